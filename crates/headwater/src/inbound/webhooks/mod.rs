//! Webhooks: `POST /webhooks/{provider}/{integration}`, from untrusted bytes to a committed event.
//!
//! Flow: integration (404) -> content type (415) -> body within its limits (413, 408) -> `verify` the signature on the
//! raw bytes (401) -> JSON (400) -> `github`, `gitlab`, `standard` or `embedded` maps it to an issue, or ignores it -> inbox
//! (503 if the database is unavailable) -> 200.
//! Guarantees: nothing is parsed before its signature is verified. 200 with `ok` means committed, with the payload as
//! received: any JSON within the limits, also with NUL, lone surrogates or numbers that the database cannot represent.
//! Messages of the desk itself and of other bots are ignored, which prevents loops. An event that several webhooks
//! report, or one reports again, is recorded once.
//! Not here: processing of the event.

mod embedded;
mod github;
mod gitlab;
mod standard;
mod verify;

use std::borrow::Cow;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use headwater_issue::{Inbox, IssueError, NewEvent, Recorded, sanitize_json};
use headwater_stream::clock::{Clock, SystemClock};
use metrics::counter;
use secrecy::ExposeSecret;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tracing::{debug, info};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::{IntegrationSettings, ProviderKind, Settings};
use crate::http::ApiError;
use crate::http::body;
use crate::http::extract::PathParams;
use crate::inbound::webhook_log::WebhookResult;
use crate::outbound::marker;
use crate::server::app_state::HttpServer;
use crate::telemetry;

/// Counter of webhooks. Labels: provider, result (`recorded`, `duplicate`, `ignored`, or the error code).
pub(crate) const WEBHOOKS: &str = "headwater_webhooks_total";

/// A webhook mapped to an event.
#[derive(Clone, Debug, PartialEq, Eq)]
enum WebhookMapping {
    /// An event of an issue.
    Event(WebhookEvent),
    /// Not relevant, with the reason.
    Ignored(String),
}

/// An event and its issue, identified as by the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WebhookEvent {
    project: String,
    issue: String,
    event_type: String,
    /// Identifies the event; the same for every attempt to deliver it.
    dedup_key: Option<DedupKey>,
    /// The message of the event, if it has one.
    message: Option<WebhookMessage>,
}

/// What identifies an event.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DedupKey {
    /// The id of a delivery. Another payload with this id is an error of the sender.
    Delivery(String),
    /// The id of a delivery, which several events may have.
    SharedDelivery(String),
    /// Derived from the content: the same for all webhooks that report the event, such as that of the organization and
    /// that of the repository, although the rest of their payloads may differ.
    Content(String),
}

/// A message in a webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WebhookMessage {
    author: Option<String>,
    is_by_bot: bool,
    is_edited: bool,
    text: Option<String>,
    /// The author's association with the repository, if the provider sends it.
    association: Option<String>,
}

impl WebhookEvent {
    /// Rejects an id or type with a replaced character: it would identify another issue.
    fn reject_replaced_characters(&self) -> Result<(), ApiError> {
        let named =
            [("project", &self.project), ("issue", &self.issue), ("type", &self.event_type)];
        match named.iter().find(|(_, name)| name.contains(char::REPLACEMENT_CHARACTER)) {
            None => Ok(()),
            Some((what, _)) => Err(ApiError::invalid(format!(
                "the {what} of the event contains NUL or a lone surrogate, which is not allowed in an id"
            ))),
        }
    }
}

impl WebhookMapping {
    fn ignored(reason: impl Into<String>) -> Self {
        Self::Ignored(reason.into())
    }
}

/// `/webhooks/...`
pub(crate) fn routes() -> OpenApiRouter<HttpServer> {
    OpenApiRouter::new().routes(routes!(receive))
}

/// Receives a webhook. The event is committed if the response is 200 with `ok`.
#[utoipa::path(post, path = "/webhooks/{provider}/{integration}", tag = "webhooks",
    params(("provider" = String, Path, description = "`github`, `gitlab`, `standard`, or a provider of the program that embeds the server"), ("integration" = String, Path)),
    request_body(content = Value, description = "The payload as sent by the provider, signed."),
    responses((status = 200, body = WebhookResponse), (status = 401, description = "The signature is missing or invalid."), (status = 404)),
    security(()))]
async fn receive(
    State(server): State<HttpServer>,
    PathParams((provider, id)): PathParams<(String, String)>,
    request: Request,
) -> Response {
    let result = process(&server, &provider, &id, request).await;
    let (logged, reason) = match &result {
        Ok(WebhookOutcome::Recorded(recorded)) if recorded.duplicate => {
            (WebhookResult::Duplicate, "")
        }
        Ok(WebhookOutcome::Recorded(_)) => (WebhookResult::Recorded, ""),
        Ok(WebhookOutcome::Ignored(reason)) => (WebhookResult::Ignored, reason.as_str()),
        Err(error) => (WebhookResult::Rejected, error.message()),
    };
    let is_known = find_integration(&server.app.settings, &provider, &id).is_ok();
    server.app.webhook_log.record(&id, is_known, logged, reason);
    let label = match &result {
        Ok(_) => logged.as_str(),
        Err(error) => error.code(),
    };
    // An unknown provider would let the sender choose the label value.
    let (built_in, configured) = (ProviderKind::BUILT_IN, &server.app.settings.integrations);
    let known = built_in.iter().chain(configured.iter().map(|one| &one.provider));
    let mut known = known.filter(|kind| **kind != ProviderKind::Desk).map(ProviderKind::as_str);
    let provider_label = known.find(|known| *known == provider).unwrap_or("unknown").to_owned();
    counter!(WEBHOOKS, "provider" => provider_label, "result" => label).increment(1);
    match result {
        Ok(outcome) => Json(WebhookResponse::from(outcome)).into_response(),
        Err(error) => {
            info!(integration = id, result = label, "webhook rejected");
            error.into_response()
        }
    }
}

/// Result of a webhook that was not rejected.
enum WebhookOutcome {
    Recorded(Recorded),
    Ignored(String),
}

/// Result of a webhook.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "status", rename_all = "lowercase")]
pub(crate) enum WebhookResponse {
    /// The event is committed.
    Ok { issue_id: i64, event_log_id: i64, duplicate: bool },
    /// The webhook is not relevant.
    Ignored { reason: String },
}

impl From<WebhookOutcome> for WebhookResponse {
    fn from(outcome: WebhookOutcome) -> Self {
        match outcome {
            WebhookOutcome::Recorded(recorded) => Self::Ok {
                issue_id: recorded.issue_id.0,
                event_log_id: recorded.event_log_id.0,
                duplicate: recorded.duplicate,
            },
            WebhookOutcome::Ignored(reason) => Self::Ignored { reason },
        }
    }
}

async fn process(
    server: &HttpServer,
    provider: &str,
    id: &str,
    request: Request,
) -> Result<WebhookOutcome, ApiError> {
    let settings = &server.app.settings;
    let integration = find_integration(settings, provider, id)?;
    body::require_json(request.headers())?;
    let headers = request.headers().clone();
    let body = body::read(request, &settings.http).await?;
    verify_signature(settings, integration, &headers, &body.bytes).await?;

    let text = std::str::from_utf8(&body.bytes)
        .map_err(|_| ApiError::invalid("the body is not valid UTF-8"))?;
    // Ids are read from the sanitized payload; the original text is stored.
    let sanitized = sanitize_json(text);
    let payload: Value = body.parse_text(&sanitized).await?;
    // What is stored, if it is not the payload as received.
    let mut stored = None;
    let mapped = match &integration.provider {
        ProviderKind::Github => github::map(&headers, &payload)?,
        ProviderKind::Gitlab => gitlab::map(&headers, &payload)?,
        ProviderKind::Standard => standard::map(&headers, &payload)?,
        ProviderKind::Embedded(one) => {
            let webhook = embedded::webhook(integration, &headers, &body.bytes)?;
            let (mapped, text) = embedded::map(one.as_ref(), &webhook, &payload)?;
            stored = text;
            mapped
        }
        ProviderKind::Desk => return Err(unknown(provider, id)),
    };
    match mapped {
        WebhookMapping::Event(event) => {
            let reason = event
                .message
                .as_ref()
                .and_then(|message| message.reason_to_ignore(settings, integration));
            if let Some(reason) = reason {
                debug!(integration = id, reason, "webhook ignored");
                return Ok(WebhookOutcome::Ignored(reason.to_owned()));
            }
            if matches!(sanitized, Cow::Owned(_)) {
                event.reject_replaced_characters()?;
            }
            record(&server.inbox, integration, event, stored.as_deref().unwrap_or(text)).await
        }
        WebhookMapping::Ignored(reason) => {
            debug!(integration = id, reason, "webhook ignored");
            Ok(WebhookOutcome::Ignored(reason))
        }
    }
}

fn find_integration<'a>(
    settings: &'a Settings,
    provider: &str,
    id: &str,
) -> Result<&'a IntegrationSettings, ApiError> {
    let found = settings.integrations.iter().find(|one| {
        one.id == id && one.provider.as_str() == provider && one.provider != ProviderKind::Desk
    });
    found.ok_or_else(|| unknown(provider, id))
}

fn unknown(provider: &str, id: &str) -> ApiError {
    ApiError::not_found(format!("no integration `{id}` with provider `{provider}`"))
}

/// Verifies the signature of the raw bytes.
async fn verify_signature(
    settings: &Settings,
    integration: &IntegrationSettings,
    headers: &HeaderMap,
    bytes: &[u8],
) -> Result<(), ApiError> {
    let secret = secret_of(integration)?;
    let verification = match &integration.provider {
        ProviderKind::Github => verify::github(secret, headers, bytes),
        ProviderKind::Gitlab => verify::gitlab(secret, headers),
        ProviderKind::Standard => {
            let tolerance = settings.webhook_tolerance;
            verify::standard(secret, headers, bytes, SystemClock.now(), tolerance)
        }
        ProviderKind::Embedded(one) => {
            let webhook = embedded::webhook(integration, headers, bytes)?;
            return embedded::verify(one.as_ref(), &webhook).await;
        }
        ProviderKind::Desk => Err("the desk does not receive webhooks"),
    };
    verification.map_err(unauthorized)
}

/// The configuration requires a secret. Without one, every request is rejected.
fn secret_of(integration: &IntegrationSettings) -> Result<&str, ApiError> {
    let secret = integration.secret.as_ref();
    let secret = secret.ok_or_else(|| unauthorized("the integration has no secret"))?;
    Ok(secret.expose_secret())
}

fn unauthorized(problem: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", problem)
}

async fn record(
    inbox: &Inbox,
    integration: &IntegrationSettings,
    event: WebhookEvent,
    payload: &str,
) -> Result<WebhookOutcome, ApiError> {
    let dedup_key = match &event.dedup_key {
        Some(DedupKey::Delivery(key) | DedupKey::SharedDelivery(key) | DedupKey::Content(key)) => {
            Some(key.clone())
        }
        None => None,
    };
    let new = NewEvent {
        integration: integration.id.clone(),
        external_project_id: event.project,
        external_issue_id: event.issue,
        source: integration.provider.as_str().to_owned(),
        event_type: event.event_type,
        dedup_key,
        payload: payload.to_owned(),
        trace: telemetry::current_trace(),
    };
    let recorded = match (inbox.record(new.clone()).await, event.dedup_key) {
        (Err(IssueError::DedupConflict { .. }), Some(DedupKey::SharedDelivery(_))) => {
            inbox.record(NewEvent { dedup_key: None, ..new }).await
        }
        (Err(IssueError::DedupConflict { .. }), Some(DedupKey::Content(_))) => {
            let reason = "another webhook has reported this event".to_owned();
            return Ok(WebhookOutcome::Ignored(reason));
        }
        (recorded, _) => recorded,
    };
    recorded.map(WebhookOutcome::Recorded).map_err(|error| match error {
        IssueError::DedupConflict { .. } => {
            let message = "this delivery id was used for another event; the event was not stored";
            ApiError::new(StatusCode::BAD_REQUEST, "delivery_id_reused", message)
        }
        other => other.into(),
    })
}

/// A key from the content of an event: the object at `id`, and the values at `pointers`. `None` without that id.
fn content_key(event_type: &str, payload: &Value, id: &str, pointers: &[&str]) -> Option<DedupKey> {
    let id = id_at(payload, id)?;
    let values: Vec<_> = pointers.iter().map(|pointer| payload.pointer(pointer)).collect();
    let values = serde_json::to_vec(&values).expect("JSON values are JSON");
    let digest = hex::encode(&Sha256::digest(values)[..16]);
    Some(DedupKey::Content(format!("{event_type}:{id}:{digest}")))
}

/// A string in the payload.
fn text_at<'a>(payload: &'a Value, pointer: &str) -> Option<&'a str> {
    payload.pointer(pointer)?.as_str()
}

/// An id in the payload: a non-empty string or an integer.
fn id_at(payload: &Value, pointer: &str) -> Option<String> {
    match payload.pointer(pointer)? {
        Value::String(name) if !name.is_empty() => Some(name.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        _ => None,
    }
}

/// A required id in the payload.
fn required_id(payload: &Value, pointer: &str) -> Result<String, ApiError> {
    id_at(payload, pointer).ok_or_else(|| {
        let field = pointer.trim_start_matches('/').replace('/', ".");
        ApiError::invalid(format!("`{field}` is missing in the payload"))
    })
}

/// A non-empty header value.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().filter(|value| !value.is_empty())
}

impl WebhookMessage {
    /// Why the desk does not answer the message: it wrote the message itself, another bot did, or an author whose
    /// association with the repository is excluded. Messages of other bots are ignored, because two bots would answer each
    /// other until a budget is used up.
    fn reason_to_ignore(
        &self,
        settings: &Settings,
        integration: &IntegrationSettings,
    ) -> Option<&'static str> {
        let is_bot_login = |login: &String| {
            self.author.as_ref().is_some_and(|author| author.eq_ignore_ascii_case(login))
        };
        // Other integrations may reply to the same issues.
        let siblings =
            settings.integrations.iter().filter(|one| one.provider == integration.provider);
        let mut secrets = siblings.filter_map(|one| one.secret.as_ref());
        let text = self.text.as_deref().unwrap_or_default();
        if integration.bot_login.as_ref().is_some_and(is_bot_login)
            || secrets.any(|secret| marker::is_own(text, self.is_edited, secret))
        {
            return Some("the desk posted this message itself");
        }
        if self.is_by_bot {
            return Some("messages of other bots are not handled");
        }
        let allowed = &integration.author_associations;
        let is_allowed = |association: &String| allowed.contains(association);
        let is_excluded = !allowed.is_empty() && !self.association.as_ref().is_some_and(is_allowed);
        is_excluded.then_some(
            "the association of the author with the repository is not in `author_associations`",
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ids_are_strings_or_integers() {
        let payload =
            json!({"a": {"text": "x", "number": 42, "part": 1.5, "none": null, "empty": ""}});
        assert_eq!(id_at(&payload, "/a/text").as_deref(), Some("x"));
        assert_eq!(id_at(&payload, "/a/number").as_deref(), Some("42"));
        for none in ["/a/part", "/a/none", "/a/empty", "/a/missing", "/a"] {
            assert_eq!(id_at(&payload, none), None, "{none}");
        }
        assert!(required_id(&payload, "/a/missing").is_err());
    }
}
