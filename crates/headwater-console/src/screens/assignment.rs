//! Assignment: who owns which partition of which group, and the streams of a service with their owners.

use axum::extract::Path;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    Tone, badge, count, empty, excerpt, facts, id, live, pager, problem, table,
};
use crate::screen::{Screen, ScreenContent};
use crate::text::{counted, duration, encoded, field, items, number, plain, visible};

/// Streams of a page: the grid shows all of them at once.
const GRID_ROWS: usize = 200;

/// Owners that differ in colour.
const COLORS: usize = 8;

/// All partitions as a grid, and a form for the name of a service, because Redis has no list of them.
pub(crate) async fn choose(screen: Screen) -> Response {
    let service = screen.query.get("service");
    if !service.is_empty() {
        return Redirect::to(&format!("/console/assignment/{}", encoded(service))).into_response();
    }
    let filter = screen.query.query_of(&["topic", "cursor"]);
    let grid = match screen.api.get(&format!("/assignment?{filter}")).await {
        Err(error) => problem("The partitions", &error, &screen),
        Ok(page) if items(&page, "groups").is_empty() => empty(
            "No group reads a topic. Start one:",
            Some("headwater consume TOPIC --group billing"),
        ),
        Ok(page) => html! {
            @for group in items(&page, "groups") { (partition_grid(group)) }
            (pager(&screen, &["topic"], &page["next_cursor"]))
        },
    };
    let content = html! {
        form.filters.inline action="/console/assignment" {
            label for="topic" { "Topic" }
            input #topic name="topic" value=(screen.query.get("topic")) maxlength="200";
            button.button type="submit" { "Show partitions" }
        }
        h2 { "Partitions" }
        (live("partitions", &grid))
        h2 { "Streams of a service" }
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
        command: "headwater group owners".to_owned(),
        content,
    })
}

/// The partitions of a group, coloured by owner.
fn partition_grid(group: &Value) -> Markup {
    let (topic, name) = (field(group, "topic"), field(group, "group"));
    let members = items(group, "members");
    let color = |owner: &str| {
        let index = members.iter().position(|member| field(member, "member") == owner);
        index.map(|index| format!("owner-{}", index % COLORS))
    };
    let (orphans, skew) =
        (group["orphans"].as_u64().unwrap_or(0), group["skew"].as_u64().unwrap_or(0));
    let is_shared = field(group, "mode") == "shared";
    html! {
        section data-key={ (topic) "/" (name) } {
            h3 {
                a href={ "/console/topics/" (encoded(topic)) "/groups/" (encoded(name)) } { bdi { (visible(topic)) " / " (visible(name)) } } " "
                @if orphans > 0 { (badge(Tone::Bad, &counted(orphans, "partition waits without an owner", "partitions wait without an owner"))) " " }
                @if skew > 1 { (badge(Tone::Warning, &format!("shared unevenly, by {skew}"))) " " }
                @if is_shared { (badge(Tone::Neutral, "shared: every member reads all")) " " }
                @if members.is_empty() { (badge(Tone::Neutral, "no members")) }
            }
            @if !members.is_empty() {
                ul.owners { @for member in members {
                    li class=[color(field(member, "member"))] {
                        (excerpt(field(member, "member"))) " " span.quiet { (counted(member["partitions"].as_u64().unwrap_or(0), "partition", "partitions")) }
                    }
                } }
            }
            ul.partitions aria-label={ "Partitions of " (visible(topic)) " for " (visible(name)) } {
                @for partition in items(group, "partitions") { (cell(partition, &color, is_shared)) }
            }
        }
    }
}

fn cell(partition: &Value, color: &impl Fn(&str) -> Option<String>, is_shared: bool) -> Markup {
    let owner = partition["owner"].as_str();
    let waits = partition["lag"].as_u64().is_none_or(|lag| lag > 0)
        || partition["pending"].as_u64().unwrap_or(0) > 0;
    let is_orphan = owner.is_none() && waits && !is_shared;
    let class = match owner {
        Some(owner) => color(owner),
        None => is_orphan.then(|| "orphan".to_owned()),
    };
    let lag = partition["lag"].as_u64().map_or("unknown".to_owned(), number);
    html! {
        li class=[class] data-key=(plain(&partition["partition"])) {
            strong { span.visually-hidden { "Partition " } (plain(&partition["partition"])) }
            @match (owner, partition["remaining_ms"].as_u64()) {
                (Some(owner), left) => {
                    span.visually-hidden { "owner " (excerpt(owner)) ", lease " }
                    (left.map_or("–".to_owned(), duration))
                    span.visually-hidden { " left, moved " (plain(&partition["epoch"])) " times so far" }
                }
                (None, _) if is_orphan => "no owner",
                (None, _) => span.quiet { "free" },
            }
            @if waits { div { "lag " (lag) } }
        }
    }
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
