//! Issues: the list, and one issue with its state, its timeline, its events and why it waits.

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
use crate::screens::runs::RunsPart;
use crate::screens::why::{WhySubject, why_panel};
use crate::text::{encoded, field, items, plain, shell_word};
use crate::user::ConsoleRole;

const FILTER: [&str; 5] = ["status", "quarantined", "integration", "error", "newest_first"];

/// What stays when another state is chosen.
const KEPT: [&str; 3] = ["integration", "error", "newest_first"];

/// Events on a page; each may hold a megabyte.
const EVENTS: usize = 20;

pub(crate) async fn list(screen: Screen) -> Response {
    let filter = screen.query.query_of(&[&FILTER[..], &["cursor"]].concat());
    let order = ListOrder::of(&screen, "Issue", ("newest_first", true), &FILTER);
    // A text in the error has no index: counting would read all issues. Further pages have the count of the first.
    let count = screen.query.get("error").is_empty() && screen.query.get("cursor").is_empty();
    let path = format!("/issues?limit={ROWS}&count={count}&{filter}");
    let content = match screen.api.get(&path).await {
        Err(error) => problem("The list of issues", &error, &screen),
        Ok(page) if items(&page, "issues").is_empty() => empty(
            "No issue matches. An issue is created by its first event: a webhook or a ticket.",
            None,
        ),
        Ok(page) => {
            let head =
                ["Issue", "Status", "Source", "Pending", "Attempts", "Last error", "Updated"];
            html! {
                (table_with_order("Issues", &head, Some(&order), &html! { @for issue in items(&page, "issues") { (row(issue)) } }))
                (matching(&page, "issue matches", "issues match"))
                (pager(&screen, &FILTER, &page["next_cursor"]))
            }
        }
    };
    let (integration, error) = (screen.query.get("integration"), screen.query.get("error"));
    let mut command = "headwater issue list".to_owned();
    for name in ["status", "integration", "error"] {
        if !screen.query.get(name).is_empty() {
            command += &format!(" --{name} {}", shell_word(screen.query.get(name)));
        }
    }
    let is_quarantined = screen.query.get("quarantined") == "true";
    if is_quarantined {
        command += " --quarantined";
    }
    if screen.query.get("newest_first") == "true" {
        command += " --newest-first";
    }
    let selected = [("integration", integration), ("error", error)];
    let states =
        [("", "All"), ("queued", "Queued"), ("processing", "Processing"), ("idle", "Idle")];
    let content = html! {
        div.filters {
            (choices(&screen, "status", &states, &KEPT))
            (choices(&screen, "quarantined", &[("true", "Quarantined")], &KEPT))
            form.inline action="/console/issues" {
                label for="integration" { "Integration" }
                input #integration name="integration" value=(integration) maxlength="200";
                label for="error" { "Error contains" }
                input #error name="error" value=(error) maxlength="200";
                @for name in ["status", "quarantined", "newest_first"] {
                    @if !screen.query.get(name).is_empty() { input type="hidden" name=(name) value=(screen.query.get(name)); }
                }
                button.button type="submit" { "Filter" }
            }
            @if is_quarantined {
                (action(&screen.user, ConsoleRole::Write, ("/console/do/issues/release", "Release all that match…", ButtonStyle::Plain), &selected))
            } @else {
                (action(&screen.user, ConsoleRole::Write, ("/console/do/issues/retry", "Retry all that wait…", ButtonStyle::Plain), &selected))
            }
        }
        (live("issues", &content))
    };
    screen.page(ScreenContent { title: "Issues".to_owned(), path: Vec::new(), command, content })
}

fn status(issue: &Value) -> Markup {
    html! {
        @match field(issue, "processing_status") {
            "processing" => (badge(Tone::Active, "processing")),
            "queued" => (badge(Tone::Warning, "queued")),
            other => (badge(Tone::Neutral, other)),
        }
        @if !issue["quarantined_at"].is_null() { " " (badge(Tone::Bad, "quarantined")) }
    }
}

fn row(issue: &Value) -> Markup {
    let number = plain(&issue["id"]);
    let source = format!(
        "{} {}#{}",
        field(issue, "integration"),
        field(issue, "external_project_id"),
        field(issue, "external_issue_id")
    );
    html! {
        tr data-key=(number) {
            th scope="row" { a href={ "/console/issues/" (number) } { (id(&number)) } }
            td { (status(issue)) }
            td { (excerpt(&source)) }
            (count(&issue["pending_events"]))
            (count(&issue["attempts"]))
            td { (excerpt(&plain(&issue["last_error"]))) }
            td { (time(&issue["updated_at"])) }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path(number): Path<String>) -> Response {
    let path = format!("/issues/{}", encoded(&number));
    let cursor = screen.query.query_of(&["cursor"]);
    let before = match screen.query.get("before") {
        "" => String::new(),
        before => format!("cursor={}", encoded(before)),
    };
    let (why_path, events_path) =
        (format!("{path}/why"), format!("{path}/events?newest_first=true&limit={EVENTS}&{cursor}"));
    let (issue, why, events, runs) = tokio::join!(
        screen.api.get(&path),
        screen.api.get(&why_path),
        screen.api.get(&events_path),
        RunsPart::read(&screen, &number, &before)
    );
    let issue = match issue {
        Ok(issue) => issue,
        Err(error) => return screen.failed("Issue", &error),
    };
    let events = match &events {
        Err(error) => problem("The events", error, &screen),
        Ok(page) => html! {
            @if items(page, "events").is_empty() { p { "No stored events." } }
            @for event in items(page, "events") { (event_item(event)) }
            (pager(&screen, &[], &page["next_cursor"]))
        },
    };
    let content = html! {
        div.columns {
            section.wide {
                (live("why", &why_panel(&screen, WhySubject::Issue, &why)))
                h2 { "Timeline" }
                (live("runs", &runs.list(&screen)))
                (older_runs(&screen, &before, runs.next()))
                h2 { "Events" }
                (live("events", &events))
                h2 { "Fields" }
                (json_block(&issue["fields"]))
            }
            aside { (live("state", &state(&screen, &issue))) }
        }
    };
    screen.page(ScreenContent {
        title: format!("Issue {}", plain(&issue["id"])),
        path: vec![("Issues".to_owned(), "/console/issues".to_owned())],
        command: format!("headwater issue show {} --newest-first", plain(&issue["id"])),
        content,
    })
}

/// Links between the pages of runs; the events below have their own.
fn older_runs(screen: &Screen, before: &str, next: &Value) -> Markup {
    let path = screen.uri.path();
    html! {
        @if !before.is_empty() || !next.is_null() {
            nav.pager aria-label="Runs" {
                @if !before.is_empty() { a href=(path) { "Newest runs" } }
                @if !next.is_null() { a href={ (path) "?before=" (encoded(&plain(next))) } { "Older runs" } }
            }
        }
    }
}

fn event_item(event: &Value) -> Markup {
    let number = plain(&event["id"]);
    html! {
        details.item data-key=(number) {
            summary {
                (id(&number)) " " strong { (excerpt(field(event, "event_type"))) } " "
                @if event["processed_at"].is_null() { (badge(Tone::Warning, "pending")) } @else { (badge(Tone::Good, "processed")) }
                " " span.quiet { (time(&event["created_at"])) }
            }
            (facts(&[
                ("Source", excerpt(field(event, "source"))),
                ("Received", time(&event["created_at"])),
                ("Processed", time(&event["processed_at"])),
                ("Dedup key", id(field(event, "dedup_key"))),
            ]))
            @if let Some(error) = event["processing_error"].as_str() { p { strong { "Error" } } (block(error)) }
            (json_block(&event["payload"]))
        }
    }
}

fn state(screen: &Screen, issue: &Value) -> Markup {
    let number = plain(&issue["id"]);
    let base = format!("/console/do/issues/{number}");
    let write = ConsoleRole::Write;
    html! {
        h2 { "State" }
        (facts(&[
            ("Status", status(issue)),
            ("Pending events", html! { (plain(&issue["pending_events"])) }),
            ("Integration", excerpt(field(issue, "integration"))),
            ("Project", excerpt(field(issue, "external_project_id"))),
            ("External issue", excerpt(field(issue, "external_issue_id"))),
            ("Claimed by", excerpt(&plain(&issue["claim_owner"]))),
            ("Claim ends", time(&issue["claim_expires_at"])),
            ("Epoch", html! { (plain(&issue["claim_epoch"])) }),
            ("Not before", time(&issue["not_before"])),
            ("Attempts", html! { (plain(&issue["attempts"])) }),
            ("Crashes", html! { (plain(&issue["crashes"])) }),
            ("Superseded runs", html! { (plain(&issue["superseded"])) }),
            ("Quarantined", time(&issue["quarantined_at"])),
            ("Last run", time(&issue["last_processed_at"])),
            ("Created", time(&issue["created_at"])),
        ]))
        div.buttons {
            (action(&screen.user, write, (&format!("{base}/retry"), "Retry now", ButtonStyle::Primary), &[]))
            @if !issue["quarantined_at"].is_null() {
                (action(&screen.user, write, (&format!("{base}/release"), "Release", ButtonStyle::Plain), &[]))
            }
        }
        @if let Some(error) = issue["last_error"].as_str() { h3 { "Last error" } (block(error)) }
    }
}
