//! Search over everything that has a number, an id or words.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{Tone, badge, empty, excerpt, id, problem, table};
use crate::screen::{Screen, ScreenContent};
use crate::text::{encoded, field, items, shell_word};

pub(crate) async fn show(screen: Screen) -> Response {
    let words = screen.query.get("q");
    let content = if words.trim().is_empty() {
        empty(
            "Type the number of an issue, event or outbox row, the id of a ticket or of a message in it, an entry id of a message or dead letter, a session, the name of a topic or group, a key, a trace id, or words of a ticket.",
            None,
        )
    } else {
        match screen.api.get(&format!("/search?q={}", encoded(words))).await {
            Err(error) => problem("The results", &error, &screen),
            Ok(found) => results(&found),
        }
    };
    screen.page(ScreenContent {
        title: "Search".to_owned(),
        path: Vec::new(),
        command: format!("headwater search {}", shell_word(words)),
        content,
    })
}

fn results(found: &Value) -> Markup {
    html! {
        @if items(found, "results").is_empty() { (empty("Nothing was found.", None)) }
        @else {
            (table("Results", &["Found", "Kind", "Details"], &html! {
                @for result in items(found, "results") {
                    tr {
                        th scope="row" { a href=(address(result)) { (excerpt(field(result, "title"))) } }
                        td { (field(result, "kind").replace('_', " ")) }
                        td { (excerpt(field(result, "details"))) }
                    }
                }
            }))
        }
        ul.sources {
            @for source in items(found, "sources") {
                li.quiet {
                    (field(source, "name")) ": "
                    @if let Some(reason) = source["problem"].as_str() { (badge(Tone::Bad, "not searched")) " " (reason) }
                    @else { (field(source, "scope")) }
                }
            }
        }
        p.quiet { "Keys: " (id("/")) " searches from every page." }
    }
}

fn address(result: &Value) -> String {
    let (key, topic) = (encoded(field(result, "id")), encoded(field(result, "topic")));
    match field(result, "kind") {
        "issue" | "event" => format!("/console/issues/{key}"),
        "outbox_row" => format!("/console/outbox/{key}"),
        "session" => format!("/console/sessions/{key}"),
        "ticket" => format!("/console/tickets/{key}"),
        "topic" => format!("/console/topics/{key}"),
        "message" => format!("/console/topics/{topic}/messages/{key}"),
        "dead_letter" => format!("/console/topics/{topic}/dead-letters/{key}"),
        "group" => format!("/console/topics/{topic}/groups/{key}"),
        _ => "/console".to_owned(),
    }
}
