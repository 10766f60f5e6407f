//! Sessions of model runs: the list, the steps of one, and two side by side.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, Tone, badge, banner, button, count, empty, excerpt, facts, id, json_block, live,
    pager, problem, table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::text::{counted, duration, encoded, field, items, number, plain};
use crate::user::ConsoleRole;

pub(crate) async fn list(screen: Screen) -> Response {
    let cursor = screen.query.query_of(&["cursor"]);
    let content = match screen.api.get(&format!("/sessions?limit={ROWS}&{cursor}")).await {
        Err(error) => problem("The sessions", &error, &screen),
        Ok(page) if items(&page, "sessions").is_empty() => empty(
            "There are no sessions. A run of the model creates one:",
            Some("headwater ticket new --title Hello --content 'Is anybody there?'"),
        ),
        Ok(page) => html! {
            (table("Sessions", &["Session", "State", "Created", "Events", "Forked from"], &html! {
                @for session in items(&page, "sessions") {
                    tr data-key=(field(session, "session")) {
                        th scope="row" { (link(field(session, "session"))) }
                        td { (stage(session)) }
                        td { (time(&session["created_at"])) }
                        (count(&session["length"]))
                        td { @if let Some(parent) = session["parent"]["session"].as_str() { (link(parent)) } }
                    }
                }
            }))
            (pager(&screen, &[], &page["next_cursor"]))
        },
    };
    screen.page(ScreenContent {
        title: "Sessions".to_owned(),
        path: Vec::new(),
        command: "headwater session list".to_owned(),
        content: live("sessions", &content),
    })
}

fn link(session: &str) -> Markup {
    html! { a href={ "/console/sessions/" (encoded(session)) } { (id(session)) } }
}

fn stage(session: &Value) -> Markup {
    match field(session, "stage") {
        "open" => badge(Tone::Active, "open"),
        other => badge(Tone::Neutral, other),
    }
}

fn above() -> Vec<(String, String)> {
    vec![("Sessions".to_owned(), "/console/sessions".to_owned())]
}

pub(crate) async fn show(screen: Screen, Path(session): Path<String>) -> Response {
    let path = format!("/sessions/{}", encoded(&session));
    let cursor = screen.query.query_of(&["cursor"]);
    let events = format!("{path}/events?limit={ROWS}&{cursor}");
    let (info, events) = tokio::join!(screen.api.get(&path), screen.api.get(&events));
    let info = match info {
        Ok(info) => info,
        Err(error) => return screen.failed("Session", &error),
    };
    let steps = match &events {
        Err(error) => problem("The events", error, &screen),
        Ok(page) if items(page, "events").is_empty() => empty("No event is stored.", None),
        Ok(page) => html! {
            @for event in items(page, "events") { (step(&screen, &session, event)) }
            (pager(&screen, &[], &page["next_cursor"]))
        },
    };
    let content = html! {
        (facts(&[
            ("State", stage(&info)),
            ("Created", time(&info["created_at"])),
            ("Events", html! { (info["length"].as_u64().map_or("–".to_owned(), number)) }),
            ("Forked from", match info["parent"]["session"].as_str() {
                Some(parent) => html! { (link(parent)) " at " (id(field(&info["parent"], "entry"))) },
                None => html! { span.quiet { "–" } },
            }),
            ("Kept after its last event", html! { (info["ttl_ms"].as_u64().map_or("–".to_owned(), duration)) }),
        ]))
        @if let Some(reason) = info["problem"].as_str() {
            (banner(Tone::Warning, &html! { p { "The session is incomplete: " (excerpt(reason)) } }))
        }
        (live("steps", &html! { h2 { "Steps" } (steps) }))
        h2 { "Compare" }
        form.inline action={ "/console/sessions/" (encoded(&session)) "/compare" } {
            label for="with" { "With session" }
            input #with name="with" required maxlength="200" value=(plain(&info["parent"]["session"]));
            button.button type="submit" { "Compare" }
        }
        p { "All events as a file: " code { "headwater session export " (session) " --output " (session) ".jsonl" } }
    };
    screen.page(ScreenContent {
        command: format!("headwater session replay {session}"),
        title: session,
        path: above(),
        content,
    })
}

/// One event, and a form that forks the session after it.
fn step(screen: &Screen, session: &str, event: &Value) -> Markup {
    let entry = field(event, "id");
    html! {
        details.item data-key=(entry) {
            summary { (id(entry)) " " strong { (excerpt(&plain(&event["type"]))) } " " span.quiet { (excerpt(&plain(&event["payload"]))) } }
            (json_block(&event["payload"]))
            form.inline method="post" action={ "/console/do/sessions/" (encoded(session)) "/fork" } {
                input type="hidden" name="until" value=(entry);
                label for={ "fork-" (entry) } { "Fork after this step as" }
                input id={ "fork-" (entry) } name="session" required maxlength="200" value={ (session) "-fork" };
                (button(&screen.user, ConsoleRole::Write, ButtonStyle::Plain, "Fork"))
            }
        }
    }
}

pub(crate) async fn compare(screen: Screen, Path(session): Path<String>) -> Response {
    let with = screen.query.get("with").to_owned();
    let path = format!("/sessions/{}/diff?with={}", encoded(&session), encoded(&with));
    let found = match screen.api.get(&path).await {
        Ok(found) => found,
        Err(error) => return screen.failed("Comparison", &error),
    };
    let same = found["same"].as_u64().unwrap_or(0);
    let (left, right) = (items(&found, "only_left"), items(&found, "only_right"));
    let column = |session: &str, events: &[Value]| {
        html! {
            section {
                h2 { (link(session)) }
                @if events.is_empty() { p.quiet { "No further event." } }
                @for event in events {
                    div.item { p { (id(field(event, "id"))) " " strong { (excerpt(&plain(&event["type"]))) } } (json_block(&event["payload"])) }
                }
            }
        }
    };
    let content = html! {
        @if left.is_empty() && right.is_empty() {
            p { "Both have the same " (counted(same, "event", "events")) "." }
        } @else {
            p { "The first " (counted(same, "event is", "events are")) " the same. What follows differs:" }
            div.side-by-side { (column(&session, left)) (column(&with, right)) }
        }
        @if found["is_cut"] == true { p.quiet { "Further events are not shown." } }
    };
    let mut path = above();
    path.push((session.clone(), format!("/console/sessions/{}", encoded(&session))));
    screen.page(ScreenContent {
        title: "Comparison".to_owned(),
        path,
        command: format!("headwater session diff {session} {with}"),
        content,
    })
}
