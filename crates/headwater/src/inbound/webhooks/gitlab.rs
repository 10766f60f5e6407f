//! Maps GitLab webhooks to events.
//!
//! Upstream: `webhooks`, after the token was verified. Guarantees: only issues and notes on issues become events.
//! Internal notes are ignored: a public reply would disclose them.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::http::ApiError;
use crate::inbound::webhooks::{
    DedupKey, WebhookEvent, WebhookMapping, WebhookMessage, content_key, header, required_id,
    text_at,
};

/// Maps a GitLab webhook.
pub(super) fn map(headers: &HeaderMap, payload: &Value) -> Result<WebhookMapping, ApiError> {
    let event = header(headers, "x-gitlab-event")
        .ok_or_else(|| ApiError::invalid("header `X-Gitlab-Event` is missing"))?;
    let mapped = match event {
        "Issue Hook" | "Confidential Issue Hook" => issue(payload)?,
        "Note Hook" | "Confidential Note Hook" => note(payload)?,
        _ => {
            return Ok(WebhookMapping::ignored(format!(
                "events of type `{event}` are not handled"
            )));
        }
    };
    let (event_type, issue) = match mapped {
        Ok(found) => found,
        Err(reason) => return Ok(WebhookMapping::Ignored(reason)),
    };
    let text = match event_type {
        "comment_created" | "comment_updated" => "/object_attributes/note",
        _ => "/object_attributes/description",
    };
    let author = text_at(payload, "/user/username");
    let has_message = !matches!(event_type, "issue_closed" | "issue_reopened");
    let message = has_message.then(|| WebhookMessage {
        author: author.map(str::to_owned),
        is_by_bot: author.is_some_and(is_token_bot),
        is_edited: matches!(event_type, "comment_updated" | "issue_updated"),
        text: text_at(payload, text).map(str::to_owned),
        association: None,
    });
    let pointers = [
        "/project/id",
        "/issue/iid",
        "/object_attributes/iid",
        "/object_attributes/title",
        text,
        "/object_attributes/state",
        "/object_attributes/updated_at",
        "/changes",
    ];
    let by_content = content_key(event_type, payload, "/object_attributes/id", &pointers);
    // The idempotency key is the same when a webhook is sent again; older servers do not send it. The event id is the same
    // for all webhooks that a webhook triggers.
    let delivery = header(headers, "idempotency-key")
        .map(|key| DedupKey::Delivery(key.to_owned()))
        .or_else(|| {
            header(headers, "x-gitlab-event-uuid").map(|id| DedupKey::SharedDelivery(id.to_owned()))
        });
    Ok(WebhookMapping::Event(WebhookEvent {
        // The numeric id, because the path changes when a project is moved.
        project: required_id(payload, "/project/id")?,
        issue,
        event_type: event_type.to_owned(),
        dedup_key: by_content.or(delivery),
        message,
    }))
}

/// Whether a user is the bot of a project or group access token: `project_7_bot`, or with a suffix. Not `support-bot`,
/// which opens issues for customers.
fn is_token_bot(username: &str) -> bool {
    let number = ["project_", "group_"].iter().find_map(|prefix| username.strip_prefix(prefix));
    let bot = number.map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    bot.is_some_and(|bot| bot == "_bot" || bot.starts_with("_bot_"))
}

/// The event type and the issue number, or why the webhook is ignored.
type MappedIssue = Result<(&'static str, String), String>;

fn issue(payload: &Value) -> Result<MappedIssue, ApiError> {
    let action = text_at(payload, "/object_attributes/action").unwrap_or_default();
    let event_type = match action {
        "open" => "issue_created",
        // GitLab sends an update for label changes, too. Only text changes are events.
        "update" if has_text_changes(payload) => "issue_updated",
        "close" => "issue_closed",
        "reopen" => "issue_reopened",
        _ => return Ok(Err(format!("issue action `{action}` is not handled"))),
    };
    Ok(Ok((event_type, required_id(payload, "/object_attributes/iid")?)))
}

fn has_text_changes(payload: &Value) -> bool {
    ["/changes/title", "/changes/description"].iter().any(|it| payload.pointer(it).is_some())
}

fn note(payload: &Value) -> Result<MappedIssue, ApiError> {
    let kind = text_at(payload, "/object_attributes/noteable_type").unwrap_or_default();
    if kind != "Issue" {
        return Ok(Err(format!("notes on `{kind}` are not handled")));
    }
    let is_true = |pointer| payload.pointer(pointer) == Some(&Value::Bool(true));
    if is_true("/object_attributes/internal") || is_true("/object_attributes/confidential") {
        return Ok(Err("internal notes are not handled".to_owned()));
    }
    if is_true("/object_attributes/system") {
        return Ok(Err("system notes are not handled".to_owned()));
    }
    // Older servers do not send the action; assume a new note.
    let event_type = match text_at(payload, "/object_attributes/action") {
        Some("update") => "comment_updated",
        _ => "comment_created",
    };
    Ok(Ok((event_type, required_id(payload, "/issue/iid")?)))
}
