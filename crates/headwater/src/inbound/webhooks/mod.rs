//! Webhooks: `POST /webhooks/{provider}/{integration}`, from a stranger's bytes to a committed event.
//!
//! Flow: integration (404) -> content type (415) -> body within its limits (413, 408) -> `verify` the signature on the bytes as they
//! came (401) -> JSON (400) -> `github`, `gitlab` or `standard` says which issue it is about, or that it is nothing for us
//! -> inbox (503 if the database is away) -> 200.
//! Promises: nothing is parsed before its signature is checked; 200 with `ok` means committed, with the payload as it came:
//! any JSON within the limits, also with NUL, lone surrogates or numbers that the database cannot hold. What we wrote ourselves
//! starts nothing, or we would talk to ourselves for ever.
//! Not here: what is done about an event.

mod github;
mod gitlab;
mod standard;
mod verify;

use std::borrow::Cow;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use headwater_issue::{IssueError, NewEvent, Recorded, sanitize_json};
use headwater_stream::clock::{Clock, SystemClock};
use metrics::counter;
use secrecy::ExposeSecret;
use serde::Serialize;
use serde_json::Value;
use tracing::{debug, info};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::{IntegrationSettings, Provider};
use crate::http::ApiError;
use crate::http::body;
use crate::http::extract::PathParams;
use crate::outbound::marker;
use crate::server::app_state::App;
use crate::telemetry;

/// Webhooks. Labels: provider, result (`recorded`, `duplicate`, `ignored`, or the code of a refusal).
pub(crate) const WEBHOOKS: &str = "headwater_webhooks_total";

/// What a webhook is about.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mapped {
    /// Something happened to an issue.
    Event(Placed),
    /// Nothing for us, and why.
    Ignored(String),
}

/// An event and the issue it belongs to, in the provider's words.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Placed {
    project: String,
    issue: String,
    event_type: String,
    /// The same at every try of one delivery.
    delivery: Option<String>,
}

impl Placed {
    /// Refuses an id or a type of which a character was replaced: it would be that of another issue.
    fn refuse_replaced(&self) -> Result<(), ApiError> {
        let named =
            [("project", &self.project), ("issue", &self.issue), ("type", &self.event_type)];
        match named.iter().find(|(_, name)| name.contains(char::REPLACEMENT_CHARACTER)) {
            None => Ok(()),
            Some((what, _)) => Err(ApiError::invalid(format!(
                "the {what} of the event contains NUL or a lone surrogate, which no id can contain"
            ))),
        }
    }
}

impl Mapped {
    fn ignored(reason: impl Into<String>) -> Self {
        Self::Ignored(reason.into())
    }
}

/// `/webhooks/...`
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(receive))
}

/// Takes a webhook. It is committed when the answer is 200 with `ok`.
#[utoipa::path(post, path = "/webhooks/{provider}/{integration}", tag = "webhooks",
    params(("provider" = String, Path, description = "`github`, `gitlab` or `standard`"), ("integration" = String, Path)),
    request_body(content = Value, description = "As the provider sends it, signed."),
    responses((status = 200, body = WebhookAnswer), (status = 401, description = "The signature is wrong."), (status = 404)),
    security(()))]
async fn receive(
    State(app): State<App>,
    PathParams((provider, id)): PathParams<(String, String)>,
    request: Request,
) -> Response {
    let answer = take(&app, &provider, &id, request).await;
    let result = match &answer {
        Ok(Taken::Recorded(recorded)) if recorded.duplicate => "duplicate",
        Ok(Taken::Recorded(_)) => "recorded",
        Ok(Taken::Ignored(_)) => "ignored",
        Err(refusal) => refusal.code(),
    };
    // A provider that we do not know would make a label of a stranger's choice.
    let known = [Provider::Github, Provider::Gitlab, Provider::Standard];
    let label = known.iter().map(|known| known.as_str()).find(|known| *known == provider);
    counter!(WEBHOOKS, "provider" => label.unwrap_or("unknown"), "result" => result).increment(1);
    match answer {
        Ok(taken) => Json(WebhookAnswer::from(taken)).into_response(),
        Err(refusal) => {
            info!(integration = id, result, "webhook refused");
            refusal.into_response()
        }
    }
}

/// What became of a webhook that was not refused.
enum Taken {
    Recorded(Recorded),
    Ignored(String),
}

/// What became of a webhook.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "status", rename_all = "lowercase")]
pub(crate) enum WebhookAnswer {
    /// It is committed.
    Ok { issue_id: i64, event_log_id: i64, duplicate: bool },
    /// It is nothing for us.
    Ignored { reason: String },
}

impl From<Taken> for WebhookAnswer {
    fn from(taken: Taken) -> Self {
        match taken {
            Taken::Recorded(recorded) => Self::Ok {
                issue_id: recorded.issue_id.0,
                event_log_id: recorded.event_log_id.0,
                duplicate: recorded.duplicate,
            },
            Taken::Ignored(reason) => Self::Ignored { reason },
        }
    }
}

async fn take(app: &App, provider: &str, id: &str, request: Request) -> Result<Taken, ApiError> {
    let integration = find(app, provider, id)?;
    body::require_json(request.headers())?;
    let headers = request.headers().clone();
    let body = body::read(request, &app.settings.http).await?;
    verify_signature(app, integration, &headers, &body.bytes)?;

    let text = std::str::from_utf8(&body.bytes)
        .map_err(|_| ApiError::invalid("the body is not valid UTF-8"))?;
    // What is read from the payload is sanitized; what is stored is the text as it came.
    let sanitized = sanitize_json(text);
    let payload: Value = body.parse_text(&sanitized).await?;
    let mapped = match integration.provider {
        Provider::Github => github::map(&headers, &payload, integration)?,
        Provider::Gitlab => gitlab::map(&headers, &payload, integration)?,
        Provider::Standard => standard::map(&headers, &payload)?,
        Provider::Desk => return Err(unknown(provider, id)),
    };
    match mapped {
        Mapped::Event(placed) => {
            if matches!(sanitized, Cow::Owned(_)) {
                placed.refuse_replaced()?;
            }
            record(app, integration, placed, text).await.map(Taken::Recorded)
        }
        Mapped::Ignored(reason) => {
            debug!(integration = id, reason, "webhook ignored");
            Ok(Taken::Ignored(reason))
        }
    }
}

fn find<'a>(app: &'a App, provider: &str, id: &str) -> Result<&'a IntegrationSettings, ApiError> {
    let found = app.settings.integrations.iter().find(|one| {
        one.id == id && one.provider.as_str() == provider && one.provider != Provider::Desk
    });
    found.ok_or_else(|| unknown(provider, id))
}

fn unknown(provider: &str, id: &str) -> ApiError {
    ApiError::not_found(format!("there is no integration `{id}` of the provider `{provider}`"))
}

/// Checks the bytes as they came.
fn verify_signature(
    app: &App,
    integration: &IntegrationSettings,
    headers: &HeaderMap,
    bytes: &[u8],
) -> Result<(), ApiError> {
    // Settings without a secret are refused at the start; without one, nobody gets in.
    let secret = integration.secret.as_ref().ok_or_else(|| unauthorized("there is no secret"))?;
    let secret = secret.expose_secret();
    let verdict = match integration.provider {
        Provider::Github => verify::github(secret, headers, bytes),
        Provider::Gitlab => verify::gitlab(secret, headers),
        Provider::Standard => {
            let tolerance = app.settings.webhook_tolerance;
            verify::standard(secret, headers, bytes, SystemClock.now(), tolerance)
        }
        Provider::Desk => Err("the desk takes no webhooks"),
    };
    verdict.map_err(unauthorized)
}

fn unauthorized(problem: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", problem)
}

async fn record(
    app: &App,
    integration: &IntegrationSettings,
    placed: Placed,
    payload: &str,
) -> Result<Recorded, ApiError> {
    let event = NewEvent {
        integration: integration.id.clone(),
        external_project_id: placed.project,
        external_issue_id: placed.issue,
        source: integration.provider.as_str().to_owned(),
        event_type: placed.event_type,
        dedup_key: placed.delivery,
        payload: payload.to_owned(),
    };
    let recorded = match app.inbox.record(event.clone()).await {
        // GitLab gives webhooks that a webhook has set off the id of the first one. They are events of their own.
        Err(IssueError::DedupConflict { .. }) if integration.provider == Provider::Gitlab => {
            app.inbox.record(NewEvent { dedup_key: None, ..event }).await
        }
        other => other,
    };
    if let Ok(recorded) = &recorded {
        telemetry::record_event_trace(recorded.event_log_id);
    }
    recorded.map_err(|error| match error {
        IssueError::DedupConflict { .. } => {
            let message = "this delivery id was used for another event; the new one was not stored";
            ApiError::new(StatusCode::BAD_REQUEST, "delivery_id_reused", message)
        }
        other => other.into(),
    })
}

/// A text somewhere in a payload.
fn text_at<'a>(payload: &'a Value, pointer: &str) -> Option<&'a str> {
    payload.pointer(pointer)?.as_str()
}

/// A name somewhere in a payload: text, or a whole number.
fn name_at(payload: &Value, pointer: &str) -> Option<String> {
    match payload.pointer(pointer)? {
        Value::String(name) if !name.is_empty() => Some(name.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        _ => None,
    }
}

/// A name that must be there.
fn required(payload: &Value, pointer: &str) -> Result<String, ApiError> {
    name_at(payload, pointer).ok_or_else(|| {
        let place = pointer.trim_start_matches('/').replace('/', ".");
        ApiError::invalid(format!("the payload lacks `{place}`"))
    })
}

/// A header as text.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().filter(|value| !value.is_empty())
}

/// Whether we wrote it: it bears our mark, or our name is on it.
fn is_ours(integration: &IntegrationSettings, author: Option<&str>, text: Option<&str>) -> bool {
    let is_our_name =
        |login: &String| author.is_some_and(|author| author.eq_ignore_ascii_case(login));
    integration.bot_login.as_ref().is_some_and(is_our_name) || text.is_some_and(marker::is_ours)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_text_or_whole_numbers() {
        let payload =
            json!({"a": {"text": "x", "number": 42, "part": 1.5, "none": null, "empty": ""}});
        assert_eq!(name_at(&payload, "/a/text").as_deref(), Some("x"));
        assert_eq!(name_at(&payload, "/a/number").as_deref(), Some("42"));
        for none in ["/a/part", "/a/none", "/a/empty", "/a/missing", "/a"] {
            assert_eq!(name_at(&payload, none), None, "{none}");
        }
        assert!(required(&payload, "/a/missing").is_err());
    }
}
