//! Assignment: the streams of a service and who owns them.

use axum::extract::Path;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    Tone, badge, count, empty, excerpt, facts, id, live, pager, problem, table,
};
use crate::screen::{Screen, ScreenContent};
use crate::text::{duration, encoded, field, items, number, plain};

/// Streams of a page: the grid shows all of them at once.
const GRID_ROWS: usize = 200;

/// Asks for the name of a service: Redis has no list of them.
pub(crate) async fn choose(screen: Screen) -> Response {
    let service = screen.query.get("service");
    if !service.is_empty() {
        return Redirect::to(&format!("/console/assignment/{}", encoded(service))).into_response();
    }
    let content = html! {
        p { "A service shares streams among its consumers, each with one owner at a time." }
        form.inline action="/console/assignment" {
            label for="service" { "Service" }
            input #service name="service" required maxlength="200";
            button.button type="submit" { "Show" }
        }
        (empty("Add the first stream of a service:", Some("headwater assign add SERVICE STREAM")))
    };
    screen.page(ScreenContent {
        title: "Assignment".to_owned(),
        path: Vec::new(),
        command: "headwater assign list SERVICE".to_owned(),
        content,
    })
}

pub(crate) async fn show(screen: Screen, Path(service): Path<String>) -> Response {
    let path = format!("/assignments/{}", encoded(&service));
    let cursor = screen.query.query_of(&["cursor"]);
    let streams = format!("{path}/streams?limit={GRID_ROWS}&{cursor}");
    let (summary, streams) = tokio::join!(screen.api.get(&path), screen.api.get(&streams));
    let content = html! {
        @match &summary {
            Err(error) => (problem("The service", error, &screen)),
            Ok(summary) => (numbers(summary)),
        }
        @match &streams {
            Err(error) => (problem("The streams", error, &screen)),
            Ok(page) if items(page, "streams").is_empty() => {
                (empty("The service has no streams. Add one:", Some(&format!("headwater assign add {service} STREAM"))))
            }
            Ok(page) => {
                h2 { "Owners" }
                (grid(items(page, "streams")))
                h2 { "Streams" }
                (table("Streams", &["Stream", "State", "Owner", "Epoch", "Lease", "Owners so far"], &html! {
                    @for stream in items(page, "streams") { (row(stream)) }
                }))
                (pager(&screen, &[], &page["next_cursor"]))
            }
        }
    };
    screen.page(ScreenContent {
        command: format!("headwater assign list {service}"),
        title: service,
        path: vec![("Assignment".to_owned(), "/console/assignment".to_owned())],
        content: live("assignment", &content),
    })
}

fn numbers(summary: &Value) -> Markup {
    let shown = |name: &str| html! { (summary[name].as_u64().map_or("–".to_owned(), number)) };
    let members = items(summary, "members");
    html! {
        (facts(&[
            ("Waiting", shown("waiting")),
            ("Assigned", shown("assigned")),
            ("Dead letters", shown("dead_letters")),
            ("Consumers", html! { (number(members.len() as u64)) }),
        ]))
        @if !members.is_empty() { p { "Alive: " @for member in members { (id(&plain(member))) " " } } }
    }
}

/// How the state of a stream is shown.
fn tone(state: &str) -> Tone {
    match state {
        "owned" => Tone::Good,
        "waiting" => Tone::Active,
        "released" => Tone::Neutral,
        "expired" => Tone::Warning,
        _ => Tone::Bad,
    }
}

/// All streams of the page, by owner: skew and orphans stand out.
fn grid(streams: &[Value]) -> Markup {
    let mut owners: Vec<&str> = streams.iter().map(|stream| field(stream, "holder")).collect();
    owners.sort_unstable();
    owners.dedup();
    html! {
        @for owner in owners {
            @let owned: Vec<&Value> = streams.iter().filter(|stream| field(stream, "holder") == owner).collect();
            div {
                p { @if owner.is_empty() { strong { "No owner" } } @else { (id(owner)) } " " span.quiet { (owned.len()) } }
                ul.choices { @for stream in owned { li { (badge(tone(field(stream, "state")), field(stream, "stream"))) } } }
            }
        }
    }
}

fn row(stream: &Value) -> Markup {
    html! {
        tr data-key=(field(stream, "entry_id")) {
            th scope="row" { (id(field(stream, "stream"))) }
            td {
                (badge(tone(field(stream, "state")), field(stream, "state")))
                @if let Some(reason) = stream["problem"].as_str() { " " (excerpt(reason)) }
            }
            td { @match stream["holder"].as_str() { Some(owner) => (id(owner)), None => span.quiet { "–" } } }
            (count(&stream["epoch"]))
            td { (stream["remaining_ms"].as_u64().map_or("–".to_owned(), duration)) }
            td { (plain(&stream["owners"])) }
        }
    }
}
