//! Webhooks of GitHub: which issue of which repository, and what happened to it.
//!
//! Upstream: `webhooks`, after the signature was checked. Promises: only issues and their comments are events; all else,
//! pull requests included, is ignored with the reason.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::config::IntegrationSettings;
use crate::http::ApiError;
use crate::inbound::webhooks::{Mapped, Placed, header, is_ours, required, text_at};

/// What a webhook of GitHub is about.
pub(super) fn map(
    headers: &HeaderMap,
    payload: &Value,
    integration: &IntegrationSettings,
) -> Result<Mapped, ApiError> {
    let event = header(headers, "x-github-event")
        .ok_or_else(|| ApiError::invalid("the header X-GitHub-Event is missing"))?;
    let action = text_at(payload, "/action").unwrap_or_default();
    let event_type = match (event, action) {
        ("issues", "opened") => "issue_created",
        ("issues", "edited") => "issue_updated",
        ("issues", "closed") => "issue_closed",
        ("issues", "reopened") => "issue_reopened",
        ("issue_comment", "created") => "comment_created",
        ("issue_comment", "edited") => "comment_updated",
        ("ping", _) => return Ok(Mapped::ignored("a ping: the webhook works")),
        (_, "") => return Ok(Mapped::ignored(format!("events `{event}` are not handled"))),
        _ => return Ok(Mapped::ignored(format!("events `{event}` `{action}` are not handled"))),
    };
    // To GitHub a pull request is an issue, too; a desk has nothing to say about code.
    if payload.pointer("/issue/pull_request").is_some_and(|it| !it.is_null()) {
        return Ok(Mapped::ignored("comments on pull requests are not handled"));
    }
    let (author, text) = match event {
        "issue_comment" => ("/comment/user/login", "/comment/body"),
        _ => ("/sender/login", "/issue/body"),
    };
    if is_ours(integration, text_at(payload, author), text_at(payload, text)) {
        return Ok(Mapped::ignored("we wrote it ourselves"));
    }
    Ok(Mapped::Event(Placed {
        project: required(payload, "/repository/full_name")?,
        issue: required(payload, "/issue/number")?,
        event_type: event_type.to_owned(),
        delivery: header(headers, "x-github-delivery").map(str::to_owned),
    }))
}
