//! Maps GitHub webhooks to events.
//!
//! Upstream: `webhooks`, after the signature was verified. Guarantees: only issues and their comments become events;
//! everything else, including pull requests, is ignored with a reason.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::http::ApiError;
use crate::inbound::webhooks::{
    DedupKey, WebhookEvent, WebhookMapping, WebhookMessage, content_key, header, id_at,
    required_id, text_at,
};

/// Maps a GitHub webhook.
pub(super) fn map(headers: &HeaderMap, payload: &Value) -> Result<WebhookMapping, ApiError> {
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
    let (object, user) = match event {
        "issue_comment" => ("/comment", "/comment/user"),
        _ => ("/issue", "/sender"),
    };
    let at = |parent: &str, name: &str| format!("{parent}/{name}");
    let message = matches!(action, "opened" | "created" | "edited").then(|| WebhookMessage {
        author: text_at(payload, &at(user, "login")).map(str::to_owned),
        is_by_bot: text_at(payload, &at(user, "type")) == Some("Bot"),
        is_edited: action == "edited",
        text: text_at(payload, &at(object, "body")).map(str::to_owned),
        association: text_at(payload, &at(object, "author_association")).map(str::to_owned),
    });
    let content = ["title", "body", "state", "updated_at"].map(|name| at(object, name));
    let [title, body, state, updated_at] = content.each_ref().map(String::as_str);
    let pointers = ["/repository/id", "/issue/number", title, body, state, updated_at];
    let by_content = content_key(event_type, payload, &at(object, "id"), &pointers);
    let delivery = header(headers, "x-github-delivery").map(str::to_owned);
    Ok(WebhookMapping::Event(WebhookEvent {
        // The numeric id, because the name changes when a repository is renamed or moved.
        project: match id_at(payload, "/repository/id") {
            Some(id) => id,
            None => required_id(payload, "/repository/full_name")?,
        },
        issue: required_id(payload, "/issue/number")?,
        event_type: event_type.to_owned(),
        dedup_key: by_content.or(delivery.map(DedupKey::Delivery)),
        message,
    }))
}
