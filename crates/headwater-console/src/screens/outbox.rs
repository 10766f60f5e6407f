//! The outbox: replies and events whose delivery has failed.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, Tone, action, badge, block, empty, excerpt, facts, id, json_block, live, pager,
    problem, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::issues::why_panel;
use crate::text::{duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

/// Rows of a page; each may hold a megabyte.
const OUTBOX_ROWS: usize = 20;

pub(crate) async fn list(screen: Screen) -> Response {
    let cursor = screen.query.query_of(&["cursor"]);
    let path = format!("/outbox/dead?limit={OUTBOX_ROWS}&{cursor}");
    let (rows, overview) = tokio::join!(screen.api.get(&path), screen.api.get("/overview"));
    let numbers = overview.ok().map(|overview| overview["outbox"].clone()).filter(Value::is_object);
    let rows = match &rows {
        Err(error) => problem("The dead replies", error, &screen),
        Ok(page) if items(page, "rows").is_empty() => {
            empty("No delivery has failed for the last time.", None)
        }
        Ok(page) => html! {
            (action(&screen.user, ConsoleRole::Write, ("/console/do/outbox/retry", "Retry all…", ButtonStyle::Plain), &[]))
            @for row in items(page, "rows") { (item(&screen, row)) }
            (pager(&screen, &[], &page["next_cursor"]))
        },
    };
    let content = html! {
        @if let Some(numbers) = numbers {
            (facts(&[
                ("To deliver", html! { (numbers["pending"].as_u64().map_or("–".to_owned(), number)) }),
                ("Oldest waits", html! { (numbers["lag_ms"].as_u64().map_or("–".to_owned(), duration)) }),
                ("Dead", html! { (numbers["dead"].as_u64().map_or("–".to_owned(), number)) }),
            ]))
        }
        h2 { "Dead replies and events" }
        (rows)
    };
    screen.page(ScreenContent {
        title: "Outbox".to_owned(),
        path: Vec::new(),
        command: "headwater outbox list".to_owned(),
        content: live("outbox", &content),
    })
}

/// One reply or event, delivered or not: why, and its facts.
pub(crate) async fn show(screen: Screen, Path(number): Path<String>) -> Response {
    let why = screen.api.get(&format!("/outbox/{}/why", encoded(&number))).await;
    if let Err(error) = &why
        && !error.is_unavailable()
    {
        return screen.failed("Outbox row", error);
    }
    let actions = match &why {
        Err(_) => html! {},
        Ok(row) => html! {
            @let issue = plain(&row["issue_id"]);
            (facts(&[
                ("Issue", html! { a href={ "/console/issues/" (issue) } { (id(&issue)) } }),
                ("Kind", html! { (field(row, "kind")) }),
                ("State", html! { (badge(tone(field(row, "status")), field(row, "status"))) }),
            ]))
            @if field(row, "status") == "dead" {
                (action(&screen.user, ConsoleRole::Write, (&format!("/console/do/outbox/{}/retry", plain(&row["id"])), "Retry delivery", ButtonStyle::Primary), &[]))
            }
        },
    };
    let content = html! { (why_panel(&screen, &why)) (actions) };
    screen.page(ScreenContent {
        title: format!("Outbox row {number}"),
        path: vec![("Outbox".to_owned(), "/console/outbox".to_owned())],
        command: format!("headwater outbox why {}", shell_word(&number)),
        content: live("row", &content),
    })
}

fn tone(status: &str) -> Tone {
    match status {
        "delivered" => Tone::Good,
        "dead" => Tone::Bad,
        "taken" => Tone::Active,
        _ => Tone::Warning,
    }
}

fn item(screen: &Screen, row: &Value) -> Markup {
    let number = plain(&row["id"]);
    let issue = plain(&row["issue_id"]);
    html! {
        details.item data-key=(number) {
            summary {
                (id(&number)) " " (field(row, "kind")) " to " (excerpt(field(row, "target"))) " "
                span.quiet { (excerpt(field(row, "error"))) }
            }
            p { a href={ "/console/outbox/" (number) } { "Why it is not delivered" } }
            (facts(&[
                ("Issue", html! { a href={ "/console/issues/" (issue) } { (id(&issue)) } }),
                ("Integration", excerpt(field(row, "integration"))),
                ("Attempts", html! { (plain(&row["attempts"])) }),
                ("Created", time(&row["created_at"])),
            ]))
            p { strong { "Error of the last attempt" } }
            (block(field(row, "error")))
            (json_block(&row["payload"]))
            (action(&screen.user, ConsoleRole::Write, (&format!("/console/do/outbox/{number}/retry"), "Retry delivery", ButtonStyle::Primary), &[]))
        }
    }
}
