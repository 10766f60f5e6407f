//! Maps GitHub webhooks to events.
//!
//! Upstream: `webhooks`, after the signature was verified. Guarantees: only issues and their comments become events;
//! everything else, including pull requests, is ignored with a reason.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::config::IntegrationSettings;
use crate::http::ApiError;
use crate::inbound::webhooks::{
    WebhookEvent, WebhookMapping, header, is_own_message, required_id, text_at,
};

/// Maps a GitHub webhook.
pub(super) fn map(
    headers: &HeaderMap,
    payload: &Value,
    integration: &IntegrationSettings,
) -> Result<WebhookMapping, ApiError> {
    let event = header(headers, "x-github-event")
        .ok_or_else(|| ApiError::invalid("header `X-GitHub-Event` is missing"))?;
    let action = text_at(payload, "/action").unwrap_or_default();
    let event_type = match (event, action) {
        ("issues", "opened") => "issue_created",
        ("issues", "edited") => "issue_updated",
        ("issues", "closed") => "issue_closed",
        ("issues", "reopened") => "issue_reopened",
        ("issue_comment", "created") => "comment_created",
        ("issue_comment", "edited") => "comment_updated",
        ("ping", _) => return Ok(WebhookMapping::ignored("ping: the webhook works")),
        (_, "") => {
            return Ok(WebhookMapping::ignored(format!(
                "events of type `{event}` are not handled"
            )));
        }
        _ => {
            return Ok(WebhookMapping::ignored(format!(
                "events of type `{event}` with action `{action}` are not handled"
            )));
        }
    };
    // GitHub treats a pull request as an issue; the desk does not answer pull requests.
    if payload.pointer("/issue/pull_request").is_some_and(|it| !it.is_null()) {
        return Ok(WebhookMapping::ignored("comments on pull requests are not handled"));
    }
    let (author, text) = match event {
        "issue_comment" => ("/comment/user/login", "/comment/body"),
        _ => ("/sender/login", "/issue/body"),
    };
    if is_own_message(integration, text_at(payload, author), text_at(payload, text)) {
        return Ok(WebhookMapping::ignored("the desk posted this message itself"));
    }
    Ok(WebhookMapping::Event(WebhookEvent {
        project: required_id(payload, "/repository/full_name")?,
        issue: required_id(payload, "/issue/number")?,
        event_type: event_type.to_owned(),
        delivery: header(headers, "x-github-delivery").map(str::to_owned),
    }))
}
