//! The outbox: replies and events whose delivery has failed, and those in any other state.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, ListOrder, Tone, action, badge, block, choices, count, empty, excerpt, facts, id,
    json_block, live, matching, pager, problem, table_with_order, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::screens::why::{WhySubject, why_panel};
use crate::text::{duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

/// Rows of a page; each may hold a megabyte.
const OUTBOX_ROWS: usize = 20;

/// States of rows that are not dead.
const STATES: [(&str, &str); 6] = [
    ("", "Dead"),
    ("pending", "To deliver"),
    ("waiting", "Behind another"),
    ("taken", "Being delivered"),
    ("delivered", "Delivered"),
    ("any", "All"),
];

/// The parameters of the filter.
const KEPT: [&str; 3] = ["status", "issue", "newest_first"];

pub(crate) async fn list(screen: Screen) -> Response {
    let (status, issue) = (screen.query.get("status"), screen.query.get("issue"));
    if !status.is_empty() || !issue.is_empty() {
        return of_any_state(screen).await;
    }
    let cursor = screen.query.query_of(&["cursor"]);
    let path = format!("/outbox/dead?limit={OUTBOX_ROWS}&{cursor}");
    // Numbers of the database: Redis, which may be slow, has no part in them.
    let (rows, overview) =
        tokio::join!(screen.api.get(&path), screen.api.get("/overview?topics=false"));
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
        (choices(&screen, "status", &STATES, &KEPT))
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

/// Rows in any state, without their payloads.
async fn of_any_state(screen: Screen) -> Response {
    let status = screen.query.get("status");
    let mut names = vec!["issue", "newest_first", "cursor"];
    if status != "any" {
        names.push("status");
    }
    let filter = screen.query.query_of(&names);
    let order = ListOrder::of(&screen, "Row", ("newest_first", true), &KEPT);
    let is_first = screen.query.get("cursor").is_empty();
    let path = format!("/outbox?limit={ROWS}&count={is_first}&{filter}");
    let content = match screen.api.get(&path).await {
        Err(error) => problem("The replies and events", &error, &screen),
        Ok(page) if items(&page, "rows").is_empty() => {
            empty("No reply or event is in this state.", None)
        }
        Ok(page) => html! {
            (table_with_order("Replies and events", &["Row", "State", "Issue", "Kind", "To", "Attempts", "Created", "Due", "Error"], Some(&order), &html! {
                @for row in items(&page, "rows") { (state_row(row)) }
            }))
            (matching(&page, "row matches", "rows match"))
            (pager(&screen, &KEPT, &page["next_cursor"]))
        },
    };
    let mut command = "headwater outbox list".to_owned();
    for name in ["status", "issue"] {
        if !screen.query.get(name).is_empty() {
            command += &format!(" --{name} {}", shell_word(screen.query.get(name)));
        }
    }
    if screen.query.get("newest_first") == "true" {
        command += " --newest-first";
    }
    // Of an issue, dead ones are among the others.
    let issue = screen.query.get("issue");
    let mut states = STATES;
    if !issue.is_empty() {
        (states[0].0, states[5].0) = ("dead", "");
    }
    let retry =
        ("/console/do/outbox/retry", "Retry all dead ones of this issue…", ButtonStyle::Plain);
    let content = html! {
        (choices(&screen, "status", &states, &KEPT))
        @if !issue.is_empty() && matches!(status, "" | "any" | "dead") {
            (action(&screen.user, ConsoleRole::Write, retry, &[("issue", issue)]))
        }
        (live("rows", &content))
    };
    screen.page(ScreenContent { title: "Outbox".to_owned(), path: Vec::new(), command, content })
}

fn state_row(row: &Value) -> Markup {
    let (number, issue) = (plain(&row["id"]), plain(&row["issue_id"]));
    html! {
        tr data-key=(number) {
            th scope="row" { a href={ "/console/outbox/" (number) } { (id(&number)) } }
            td { (badge(tone(field(row, "status")), field(row, "status"))) }
            td { a href={ "/console/issues/" (issue) } { (id(&issue)) } }
            td { (field(row, "kind")) }
            td { (excerpt(field(row, "target"))) }
            (count(&row["attempts"]))
            td { (time(&row["created_at"])) }
            td { @if row["delivered_at"].is_null() { (time(&row["due_at"])) } @else { span.quiet { "–" } } }
            td { (excerpt(&plain(&row["error"]))) }
        }
    }
}

/// One reply or event, delivered or not: why, and its facts.
pub(crate) async fn show(screen: Screen, Path(number): Path<String>) -> Response {
    let path = format!("/outbox/{}", encoded(&number));
    let why_path = format!("{path}/why");
    let (why, row) = tokio::join!(screen.api.get(&why_path), screen.api.get_unnamed(&path));
    if let Err(error) = &why
        && !error.is_unavailable()
    {
        return screen.failed("Outbox row", error);
    }
    let state = match &row {
        Err(error) => problem("The row", error, &screen),
        Ok(row) => html! {
            @let issue = plain(&row["issue_id"]);
            (facts(&[
                ("Issue", html! { a href={ "/console/issues/" (issue) } { (id(&issue)) } }),
                ("Integration", excerpt(field(row, "integration"))),
                ("Kind", html! { (field(row, "kind")) }),
                ("To", excerpt(field(row, "target"))),
                ("State", html! { (badge(tone(field(row, "status")), field(row, "status"))) }),
                ("Attempts", html! { (plain(&row["attempts"])) }),
                ("Created", time(&row["created_at"])),
                ("Due", time(if ["dead", "delivered"].contains(&field(row, "status")) { &Value::Null } else { &row["due_at"] })),
                ("Delivered", time(&row["delivered_at"])),
            ]))
            @if let Some(error) = row["error"].as_str() { h2 { "Error of the last attempt" } (block(error)) }
        },
    };
    let content = html! { (why_panel(&screen, WhySubject::OutboxRow, &why)) (state) };
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::body::to_bytes;
    use axum::http::Uri;
    use axum::routing::get;
    use axum::{Json, Router};
    use serde_json::json;

    use super::*;

    async fn text(page: Response) -> String {
        String::from_utf8(to_bytes(page.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn the_list_asks_the_database_only() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let paths = Arc::clone(&seen);
        let overview = move |uri: Uri| async move {
            paths.lock().unwrap().push(uri.to_string());
            Json(json!({"outbox": {"pending": 12, "dead": 0, "lag_ms": 5}}))
        };
        let api = Router::new()
            .route("/api/v1/overview", get(overview))
            .route("/api/v1/outbox/dead", get(|| async { Json(json!({"rows": []})) }));
        let page = text(list(Screen::for_test(api, "/console/outbox")).await).await;
        assert!(page.contains("<dt>To deliver</dt><dd>12</dd>"), "{page}");
        assert_eq!(*seen.lock().unwrap(), ["/api/v1/overview?topics=false"]);
    }

    #[tokio::test]
    async fn a_row_has_its_facts_and_of_an_issue_the_filter_stays() {
        let row = json!({
            "id": 5, "issue_id": 7, "kind": "reply", "target": "acme/shop#1", "status": "dead", "attempts": 12,
            "created_at": "2026-11-17T20:00:00Z", "error": "status 403",
        });
        let why = json!({"issue_id": 7, "id": 5, "reason": "dead", "sentence": "given up", "command": "x"});
        let api = Router::new()
            .route("/api/v1/outbox/{id}", get(move || async move { Json(row) }))
            .route("/api/v1/outbox/{id}/why", get(move || async move { Json(why) }))
            .route("/api/v1/outbox", get(|| async { Json(json!({"rows": []})) }));
        let screen = Screen::for_test(api.clone(), "/console/outbox/5");
        let page = text(show(screen, Path("5".to_owned())).await).await;
        for part in
            ["acme/shop#1", "<dt>Attempts</dt><dd>12</dd>", "2026-11-17 20:00:00 UTC", "status 403"]
        {
            assert!(page.contains(part), "{part}: {page}");
        }
        let page = text(list(Screen::for_test(api, "/console/outbox?issue=7")).await).await;
        for link in [
            "status=dead&amp;issue=7\">Dead<",
            "/console/outbox?issue=7\" aria-current=\"true\">All<",
        ] {
            assert!(page.contains(link), "{link}: {page}");
        }
    }
}
