//! Drafts: answers that wait for a person, and the decisions about them.
//!
//! Not live: a page that changes while a person edits a text would lose it. A decision names the version that was read.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, block, button, choices, empty, excerpt, facts, id, pager, problem, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::text::{field, items, plain};
use crate::user::ConsoleRole;

/// States and their names.
const STATUSES: [(&str, &str); 5] = [
    ("", "Pending"),
    ("approved", "Approved"),
    ("rejected", "Rejected"),
    ("outdated", "Outdated"),
    ("note", "Notes"),
];

/// Rows of a page; each may hold 64 KiB.
const DRAFT_ROWS: usize = 20;

pub(crate) async fn list(screen: Screen) -> Response {
    let status = match screen.query.get("status") {
        "" => "pending",
        status => status,
    };
    let cursor = screen.query.query_of(&["cursor"]);
    let filter = crate::text::encoded(status);
    let path = format!("/drafts?status={filter}&limit={DRAFT_ROWS}&{cursor}");
    let rows = match &screen.api.get(&path).await {
        Err(error) => problem("The drafts", error, &screen),
        Ok(page) if items(page, "drafts").is_empty() => empty("No draft has this status.", None),
        Ok(page) => html! {
            @for draft in items(page, "drafts") { (item(&screen, draft)) }
            (pager(&screen, &["status"], &page["next_cursor"]))
        },
    };
    let content = html! {
        div.filters { (choices(&screen, "status", &STATUSES, &[])) }
        (rows)
    };
    // The command accepts no others.
    let is_known = STATUSES.iter().any(|(known, _)| *known == screen.query.get("status"));
    let option = if is_known { format!(" --status {status}") } else { String::new() };
    screen.page(ScreenContent {
        title: "Drafts".to_owned(),
        path: Vec::new(),
        command: format!("headwater draft list{option}"),
        content,
    })
}

fn item(screen: &Screen, draft: &Value) -> Markup {
    let number = plain(&draft["id"]);
    let issue = plain(&draft["issue_id"]);
    let current = if draft["edited"].is_null() { "content" } else { "edited" };
    let base = format!("/console/do/drafts/{number}");
    let version = plain(&draft["version"]);
    let has_calls = !items(draft, "calls").is_empty();
    let rejection = html! {
        form.stacked method="post" action={ (base) "/reject" } {
            input type="hidden" name="version" value=(version);
            label for={ "reason-" (number) } { "Reason, for the model" }
            input id={ "reason-" (number) } name="reason" maxlength="500";
            div { (button(&screen.user, ConsoleRole::Write, ButtonStyle::Plain, "Reject")) }
        }
    };
    html! {
        section.item aria-label={ "Draft " (number) } {
            h2 { "Draft " (number) }
            (facts(&[
                ("Issue", html! { a href={ "/console/issues/" (issue) } { (id(&issue)) } }),
                ("Integration", excerpt(field(draft, "integration"))),
                ("Created", time(&draft["created_at"])),
                ("Chosen by", excerpt(field(draft, "chosen_by"))),
                ("Overdue", time(&draft["overdue_at"])),
                ("Decided", time(&draft["decided_at"])),
                ("Decided by", excerpt(&plain(&draft["decided_by"]))),
            ]))
            @for call in items(draft, "calls") {
                p { "Tool call that waits for the approval: " code { (field(call, "tool")) } }
                (block(&format!("{:#}", call["arguments"])))
            }
            @if draft["status"] == "pending" && has_calls {
                (block(field(draft, "content")))
                form.stacked method="post" action={ (base) "/approve" } {
                    input type="hidden" name="version" value=(version);
                    input type="hidden" name="calls" value="true";
                    div { (button(&screen.user, ConsoleRole::Write, ButtonStyle::Primary, "Approve the calls")) }
                }
                (rejection)
            } @else if draft["status"] == "pending" {
                form.stacked method="post" action={ (base) "/approve" } {
                    input type="hidden" name="version" value=(version);
                    label for={ "content-" (number) } { "Text to post" }
                    textarea id={ "content-" (number) } name="content" rows="6" required { "\n" (field(draft, current)) }
                    div { (button(&screen.user, ConsoleRole::Write, ButtonStyle::Primary, "Approve and post")) }
                }
                (rejection)
            } @else {
                (block(field(draft, if draft["posted"].is_null() { current } else { "posted" })))
            }
            @if !draft["difference"].is_null() {
                details {
                    summary { "Difference from the text of the model" }
                    (block(&difference(draft)))
                }
            }
        }
    }
}

/// Lines that only one of the two texts has begin with a sign.
fn difference(draft: &Value) -> String {
    let line = |line: &Value| {
        let sign = match field(line, "change") {
            "removed" => "- ",
            "added" => "+ ",
            _ => "  ",
        };
        format!("{sign}{}", field(line, "text"))
    };
    items(draft, "difference").iter().map(line).collect::<Vec<_>>().join("\n")
}
