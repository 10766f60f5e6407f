//! Actions on tickets, drafts, issues and the outbox.

use axum::extract::Path;
use axum::response::Response;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::confirmation::{Confirmation, EXAMPLES_MAX};
use super::{WORK_TIME_MAX, done, done_in_part, done_with};
use crate::api_client::Problem;
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::{encoded, field, items, plain, shell_word};
use crate::user::ConsoleRole;

/// Rows counted for a confirmation; beyond them the number is a lower bound.
const COUNTED_MAX: usize = 500;

pub(super) async fn close_ticket(screen: Screen, Path(id): Path<String>) -> Response {
    change_ticket(&screen, &id, "close", "closed").await
}

pub(super) async fn reopen_ticket(screen: Screen, Path(id): Path<String>) -> Response {
    change_ticket(&screen, &id, "reopen", "reopened").await
}

pub(super) async fn take_ticket(screen: Screen, Path(id): Path<String>) -> Response {
    change_ticket(&screen, &id, "take", "taken").await
}

pub(super) async fn unassign_ticket(screen: Screen, Path(id): Path<String>) -> Response {
    change_ticket(&screen, &id, "unassign", "unassigned").await
}

pub(super) async fn assign_ticket(
    screen: Screen,
    Path(id): Path<String>,
    form: FormFields,
) -> Response {
    let body = json!({"assignee": form.get("assignee").trim()});
    match screen.api.post(&format!("/tickets/{}/assign", encoded(&id)), body).await {
        Ok(_) => done(&format!("/console/tickets/{}", encoded(&id)), "assigned"),
        Err(error) => screen.failed("Ticket", &error),
    }
}

async fn change_ticket(screen: &Screen, id: &str, verb: &str, code: &str) -> Response {
    match screen.api.post(&format!("/tickets/{}/{verb}", encoded(id)), json!({})).await {
        Ok(_) => done(&format!("/console/tickets/{}", encoded(id)), code),
        Err(error) => screen.failed("Ticket", &error),
    }
}

pub(super) async fn reply(screen: Screen, Path(id): Path<String>, form: FormFields) -> Response {
    // Browsers send line breaks of forms as CR LF.
    let content = form.get("content").replace("\r\n", "\n");
    let mut body = json!({"content": content, "author": "agent"});
    if !form.get("message_id").is_empty() {
        body["message_id"] = form.get("message_id").into();
    }
    match screen.api.post(&format!("/tickets/{}/messages", encoded(&id)), body).await {
        Ok(_) => done(&format!("/console/tickets/{}", encoded(&id)), "replied"),
        Err(error) => screen.failed("Reply", &error),
    }
}

pub(super) async fn approve_draft(
    screen: Screen,
    Path(id): Path<String>,
    form: FormFields,
) -> Response {
    // Browsers send line breaks of forms as CR LF.
    let content = form.get("content").replace("\r\n", "\n");
    // The form of a draft with tool calls has no text.
    let content = (form.get("calls") != "true").then_some(content);
    decide_draft(&screen, &id, ("approve", "approved"), &form, json!({"content": content})).await
}

pub(super) async fn reject_draft(
    screen: Screen,
    Path(id): Path<String>,
    form: FormFields,
) -> Response {
    let reason = form.get("reason").to_owned();
    decide_draft(&screen, &id, ("reject", "rejected"), &form, json!({"reason": reason})).await
}

async fn decide_draft(
    screen: &Screen,
    id: &str,
    (verb, code): (&str, &str),
    form: &FormFields,
    mut body: Value,
) -> Response {
    body["version"] = form.get("version").parse::<i64>().ok().into();
    match screen.api.post(&format!("/drafts/{}/{verb}", encoded(id)), body).await {
        Ok(_) => done("/console/drafts", code),
        Err(error) => screen.failed("Draft", &error),
    }
}

pub(super) async fn retry_issue(screen: Screen, Path(id): Path<String>) -> Response {
    change_issue(&screen, &id, "retry", "retried").await
}

pub(super) async fn release_issue(screen: Screen, Path(id): Path<String>) -> Response {
    change_issue(&screen, &id, "release", "released").await
}

async fn change_issue(screen: &Screen, id: &str, verb: &str, code: &str) -> Response {
    match screen.api.post(&format!("/issues/{}/{verb}", encoded(id)), json!({})).await {
        Ok(answer) => {
            let code = match field(&answer, "result") {
                "queued" => code,
                other => other,
            };
            // Back to the ticket of the issue, if the button was there.
            let back = match screen.query.get("ticket") {
                "" => format!("/console/issues/{}", encoded(id)),
                ticket => format!("/console/tickets/{}", encoded(ticket)),
            };
            done(&back, code)
        }
        Err(error) => screen.failed("Issue", &error),
    }
}

/// What is done with all issues that match.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IssueAction {
    /// Ends quarantines.
    Release,
    /// Ends the waits of issues that are not quarantined.
    Retry,
}

pub(super) async fn release_issues(screen: Screen, form: FormFields) -> Response {
    on_issues(screen, form, IssueAction::Release).await
}

pub(super) async fn retry_issues(screen: Screen, form: FormFields) -> Response {
    on_issues(screen, form, IssueAction::Retry).await
}

async fn on_issues(screen: Screen, form: FormFields, action: IssueAction) -> Response {
    let deadline = Instant::now() + WORK_TIME_MAX;
    // A queued issue that waits for nothing is about to be claimed.
    let (state, selected) = match action {
        IssueAction::Release => ("quarantined=true", "quarantined=true"),
        IssueAction::Retry => ("status=queued&quarantined=false", "waiting=true"),
    };
    let filter = form.query_of(&["integration", "error"]);
    let path = format!("/issues?{selected}&limit={COUNTED_MAX}&{filter}");
    let page = match screen.api.get(&path).await {
        Ok(page) => page,
        Err(error) => return screen.failed("Issues", &error),
    };
    let example = |issue: &Value| {
        format!(
            "{} · {} · {}",
            plain(&issue["id"]),
            field(issue, "integration"),
            plain(&issue["last_error"])
        )
    };
    let all = items(&page, "issues");
    let options = ["integration", "error"].into_iter().filter(|name| !form.get(name).is_empty());
    let of: String =
        options.map(|name| format!(" --{name} {}", shell_word(form.get(name)))).collect();
    let (verb, sentence, command) = match action {
        IssueAction::Release => (
            "Release",
            "Their pending events are processed again. If the cause remains, they fail and are quarantined again.",
            format!("headwater issue release --all{of} --yes"),
        ),
        IssueAction::Retry => (
            "Retry",
            "They do not wait any longer: for a backoff, a budget or further events.",
            format!("headwater issue retry --all --waiting{of} --yes"),
        ),
    };
    let confirmation = Confirmation {
        verb,
        count: all.len() as u64,
        unit: ("issue", "issues"),
        or_more: !page["next_cursor"].is_null(),
        needed: ConsoleRole::Write,
        examples: all.iter().take(EXAMPLES_MAX).map(example).collect(),
        consequences: vec![sentence.to_owned()],
        is_destructive: false,
        typed: None,
        command,
        back: format!("/console/issues?{state}&{filter}"),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    let given = |name: &str| Some(form.get(name).to_owned()).filter(|value| !value.is_empty());
    let mut body = json!({"integration": given("integration"), "error": given("error")});
    let (path, counter, code) = match action {
        IssueAction::Release => ("/issues/release", "released", "released"),
        IssueAction::Retry => ("/issues/retry", "retried", "retried_all"),
    };
    if action == IssueAction::Retry {
        body["waiting"] = true.into();
    }
    match in_batches(&screen, path, body, counter, deadline).await {
        Ok((count, true)) => done_with("/console/issues", code, count),
        Ok((count, false)) => done_in_part(&confirmation.back, code, count, None),
        Err(error) => screen.failed(verb, &error),
    }
}

pub(super) async fn retry_reply(screen: Screen, Path(id): Path<String>) -> Response {
    match screen.api.post(&format!("/outbox/{}/retry", encoded(&id)), json!({})).await {
        Ok(_) => done_with("/console/outbox", "queued", 1),
        Err(error) => screen.failed("Reply", &error),
    }
}

pub(super) async fn retry_replies(screen: Screen, form: FormFields) -> Response {
    let deadline = Instant::now() + WORK_TIME_MAX;
    let issue = form.query_of(&["issue"]);
    let path = format!("/outbox?status=dead&limit={COUNTED_MAX}&{issue}");
    let page = match screen.api.get(&path).await {
        Ok(page) => page,
        Err(error) => return screen.failed("Dead replies", &error),
    };
    let example = |row: &Value| {
        format!("{} · {} · {}", plain(&row["id"]), field(row, "target"), field(row, "error"))
    };
    let all = items(&page, "rows");
    let confirmation = Confirmation {
        verb: "Retry",
        count: all.len() as u64,
        unit: ("reply", "replies"),
        or_more: !page["next_cursor"].is_null(),
        needed: ConsoleRole::Write,
        examples: all.iter().take(EXAMPLES_MAX).map(example).collect(),
        consequences: vec![
            "They are delivered again under the same idempotency keys. Stale replies are dropped."
                .to_owned(),
        ],
        is_destructive: false,
        typed: None,
        command: match form.get("issue") {
            "" => "headwater outbox retry --all --yes".to_owned(),
            issue => format!("headwater outbox retry --all --issue {} --yes", shell_word(issue)),
        },
        back: match issue.as_str() {
            "" => "/console/outbox".to_owned(),
            filter => format!("/console/outbox?{filter}"),
        },
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    // The list of the confirmation has refused what is no number.
    let body = json!({"issue": form.get("issue").parse::<i64>().ok()});
    match in_batches(&screen, "/outbox/retry", body, "queued", deadline).await {
        Ok((count, true)) => done_with(&confirmation.back, "queued", count),
        Ok((count, false)) => done_in_part(&confirmation.back, "queued", count, None),
        Err(error) => screen.failed("Retry", &error),
    }
}

/// Repeats a call until it has reached the end or the deadline. Returns how many it changed, and whether these are all.
async fn in_batches(
    screen: &Screen,
    path: &str,
    mut body: Value,
    counter: &str,
    deadline: Instant,
) -> Result<(u64, bool), Problem> {
    let mut total = 0;
    loop {
        let answer = screen.api.post(path, body.clone()).await;
        let answer = answer.map_err(|error| error.after(total, counter))?;
        total += answer[counter].as_u64().unwrap_or(0);
        body["cursor"] = answer["next_cursor"].clone();
        if body["cursor"].is_null() {
            return Ok((total, true));
        }
        if Instant::now() >= deadline {
            return Ok((total, false));
        }
    }
}
