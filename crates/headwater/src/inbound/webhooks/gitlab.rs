//! Maps GitLab webhooks to events.
//!
//! Upstream: `webhooks`, after the token was verified. Guarantees: only issues and notes on issues become events.
//! Internal notes are ignored: a public reply would disclose them.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::config::IntegrationSettings;
use crate::http::ApiError;
use crate::inbound::webhooks::{
    WebhookEvent, WebhookMapping, header, is_own_message, required_id, text_at,
};

/// Maps a GitLab webhook.
pub(super) fn map(
    headers: &HeaderMap,
    payload: &Value,
    integration: &IntegrationSettings,
) -> Result<WebhookMapping, ApiError> {
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
    if is_own_message(integration, text_at(payload, "/user/username"), text_at(payload, text)) {
        return Ok(WebhookMapping::ignored("the desk posted this message itself"));
    }
    Ok(WebhookMapping::Event(WebhookEvent {
        // The numeric id, because the path changes when a project is moved.
        project: required_id(payload, "/project/id")?,
        issue,
        event_type: event_type.to_owned(),
        delivery: header(headers, "x-gitlab-event-uuid").map(str::to_owned),
    }))
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
