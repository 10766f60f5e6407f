//! Overview: is all well, and what should be done?

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{ButtonStyle, Tone, action, badge, live, problem};
use crate::screen::{Screen, ScreenContent};
use crate::text::{duration, field, items, number};
use crate::user::ConsoleRole;

pub(crate) async fn show(screen: Screen) -> Response {
    let content = match screen.api.get("/overview").await {
        Ok(overview) => content(&screen, &overview),
        Err(error) => problem("The overview", &error, &screen),
    };
    screen.page(ScreenContent {
        title: "Overview".to_owned(),
        path: Vec::new(),
        command: "curl -s $HEADWATER_URL/api/v1/overview".to_owned(),
        content: live("overview", &content),
    })
}

fn content(screen: &Screen, overview: &Value) -> Markup {
    let problems = items(overview, "problems");
    let tone = match field(overview, "status") {
        "ok" => Tone::Good,
        "warning" => Tone::Warning,
        _ => Tone::Bad,
    };
    html! {
        section class={ "verdict " (match tone { Tone::Good => "good", Tone::Warning => "warning", _ => "bad" }) } {
            h2 { (field(overview, "verdict")) }
            @if !problems.is_empty() {
                ul.problems {
                    @for found in problems { (problem_line(screen, found)) }
                }
            }
        }
        (tiles(overview))
        h2 { "Dependencies" }
        ul.dependencies {
            @for found in items(overview, "dependencies") {
                li {
                    @if found["ok"] == true { (badge(Tone::Good, "ok")) } @else { (badge(Tone::Bad, "unavailable")) }
                    " " strong { (field(found, "name")) } " " span.quiet { (field(found, "kind")) }
                    @if let Some(reason) = found["reason"].as_str() { " " (reason) }
                }
            }
        }
    }
}

fn problem_line(screen: &Screen, found: &Value) -> Markup {
    let tone = if found["level"] == "error" { Tone::Bad } else { Tone::Warning };
    let code = field(found, "code");
    html! {
        li data-code=(code) {
            (badge(tone, if tone == Tone::Bad { "act now" } else { "look" }))
            span { (field(found, "sentence")) }
            span.buttons {
                @match code {
                    "quarantined" => {
                        a.button href="/console/issues?quarantined=true" { "Show them" }
                        (action(&screen.user, ConsoleRole::Write, ("/console/do/issues/release", "Release all…", ButtonStyle::Plain), &[]))
                    }
                    "dead_replies" => {
                        a.button href="/console/outbox" { "Show them" }
                        (action(&screen.user, ConsoleRole::Write, ("/console/do/outbox/retry", "Retry all…", ButtonStyle::Plain), &[]))
                    }
                    "dead_letters" => { a.button href="/console/failures" { "Show by cause" } }
                    "no_worker" => { a.button href="/console/processes" { "Show processes" } }
                    "outbox_lag" => { a.button href="/console/outbox" { "Show the outbox" } }
                    _ => { a.button href="/console/doctor" { "Open Doctor" } }
                }
            }
        }
    }
}

fn tiles(overview: &Value) -> Markup {
    let count = |part: &str, name: &str| overview[part][name].as_u64().map(number);
    let time = |part: &str, name: &str| overview[part][name].as_u64().map(duration);
    let more = if overview["topics"]["complete"] == false { "+" } else { "" };
    let topics = |name: &str| count("topics", name).map(|count| count + more);
    let tiles = [
        ("Queued issues", count("issues", "queued"), "/console/issues?status=queued"),
        ("Running", count("issues", "processing"), "/console/issues?status=processing"),
        ("Quarantined", count("issues", "quarantined"), "/console/issues?quarantined=true"),
        ("Replies to deliver", count("outbox", "pending"), "/console/outbox"),
        ("Oldest reply waits", time("outbox", "lag_ms"), "/console/outbox"),
        ("Dead replies", count("outbox", "dead"), "/console/outbox"),
        ("Consumer lag", topics("lag"), "/console/topics"),
        ("Dead letters", topics("dead_letters"), "/console/failures"),
        ("Workers", count("workers", "alive"), "/console/processes"),
    ];
    html! {
        h2.visually-hidden { "Numbers" }
        ul.tiles {
            @for (name, value, address) in tiles {
                li { a href=(address) {
                    span.label { (name) }
                    @match value { Some(value) => strong { (value) }, None => strong.unknown { "unknown" } }
                } }
            }
        }
    }
}
