//! Webhooks of GitLab: which issue of which project, and what happened to it.
//!
//! Upstream: `webhooks`, after the token was checked. Promises: only issues and notes on issues are events. Internal notes are
//! ignored: an answer to one would be seen by those it was kept from.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::config::IntegrationSettings;
use crate::http::ApiError;
use crate::inbound::webhooks::{Mapped, Placed, header, is_ours, required, text_at};

/// What a webhook of GitLab is about.
pub(super) fn map(
    headers: &HeaderMap,
    payload: &Value,
    integration: &IntegrationSettings,
) -> Result<Mapped, ApiError> {
    let event = header(headers, "x-gitlab-event")
        .ok_or_else(|| ApiError::invalid("the header X-Gitlab-Event is missing"))?;
    let mapped = match event {
        "Issue Hook" | "Confidential Issue Hook" => issue(payload)?,
        "Note Hook" | "Confidential Note Hook" => note(payload)?,
        _ => return Ok(Mapped::ignored(format!("events `{event}` are not handled"))),
    };
    let (event_type, issue) = match mapped {
        Ok(found) => found,
        Err(reason) => return Ok(Mapped::Ignored(reason)),
    };
    let text = match event_type {
        "comment_created" | "comment_updated" => "/object_attributes/note",
        _ => "/object_attributes/description",
    };
    if is_ours(integration, text_at(payload, "/user/username"), text_at(payload, text)) {
        return Ok(Mapped::ignored("we wrote it ourselves"));
    }
    Ok(Mapped::Event(Placed {
        // The number, and not the path: it stays when a project is moved.
        project: required(payload, "/project/id")?,
        issue,
        event_type: event_type.to_owned(),
        delivery: header(headers, "x-gitlab-event-uuid").map(str::to_owned),
    }))
}

/// The event type and the number of the issue, or why it is nothing for us.
type Found = Result<(&'static str, String), String>;

fn issue(payload: &Value) -> Result<Found, ApiError> {
    let action = text_at(payload, "/object_attributes/action").unwrap_or_default();
    let event_type = match action {
        "open" => "issue_created",
        // GitLab sends one for every label, too. Only new words are news.
        "update" if has_new_words(payload) => "issue_updated",
        "close" => "issue_closed",
        "reopen" => "issue_reopened",
        _ => return Ok(Err(format!("issues `{action}` are not handled"))),
    };
    Ok(Ok((event_type, required(payload, "/object_attributes/iid")?)))
}

fn has_new_words(payload: &Value) -> bool {
    ["/changes/title", "/changes/description"].iter().any(|it| payload.pointer(it).is_some())
}

fn note(payload: &Value) -> Result<Found, ApiError> {
    let kind = text_at(payload, "/object_attributes/noteable_type").unwrap_or_default();
    if kind != "Issue" {
        return Ok(Err(format!("notes on `{kind}` are not handled")));
    }
    let is_true = |pointer| payload.pointer(pointer) == Some(&Value::Bool(true));
    if is_true("/object_attributes/internal") || is_true("/object_attributes/confidential") {
        return Ok(Err("internal notes are not handled".to_owned()));
    }
    if is_true("/object_attributes/system") {
        return Ok(Err("notes that GitLab writes itself are not handled".to_owned()));
    }
    // Older servers do not say what was done; then it is new.
    let event_type = match text_at(payload, "/object_attributes/action") {
        Some("update") => "comment_updated",
        _ => "comment_created",
    };
    Ok(Ok((event_type, required(payload, "/issue/iid")?)))
}
