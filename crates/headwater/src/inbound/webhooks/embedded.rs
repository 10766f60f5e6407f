//! Calls the provider of an embedding program for a webhook.
//!
//! Upstream: `webhooks`. Downstream: [`Provider`]. Guarantees: a provider that panics rejects this webhook with status 500, so the
//! sender repeats it, and nothing else. What is stored has the form of Standard Webhooks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::http::{HeaderMap, StatusCode};
use futures_util::FutureExt;
use serde_json::Value;
use tracing::error;

use crate::config::IntegrationSettings;
use crate::desk::provider::{MappedWebhook, Provider, ReceivedWebhook};
use crate::http::ApiError;
use crate::inbound::webhooks::{
    DedupKey, WebhookEvent, WebhookMapping, WebhookMessage, secret_of, unauthorized,
};
use crate::text;

/// Bytes of an error of a provider in a response.
const PROBLEM_BYTES_MAX: usize = 500;

/// The webhook as the provider sees it. Headers that are not text are left out.
pub(super) fn webhook<'a>(
    integration: &'a IntegrationSettings,
    headers: &'a HeaderMap,
    body: &'a [u8],
) -> Result<ReceivedWebhook<'a>, ApiError> {
    let headers =
        headers.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
    let (secret, headers) = (secret_of(integration)?, headers.collect());
    Ok(ReceivedWebhook { integration: &integration.id, secret, headers, body })
}

/// Verifies a webhook.
pub(super) async fn verify(
    provider: &dyn Provider,
    webhook: &ReceivedWebhook<'_>,
) -> Result<(), ApiError> {
    match AssertUnwindSafe(provider.verify(webhook)).catch_unwind().await {
        Ok(verified) => {
            verified.map_err(|problem| unauthorized(&text::one_line(&problem, PROBLEM_BYTES_MAX)))
        }
        Err(_) => Err(panicked(provider, webhook)),
    }
}

/// Maps a verified webhook: what it means, and for an event, what is stored.
pub(super) fn map(
    provider: &dyn Provider,
    webhook: &ReceivedWebhook<'_>,
    payload: &Value,
) -> Result<(WebhookMapping, Option<String>), ApiError> {
    let mapped = catch_unwind(AssertUnwindSafe(|| provider.map(webhook, payload)))
        .map_err(|_| panicked(provider, webhook))?
        .map_err(|problem| ApiError::invalid(text::one_line(&problem, PROBLEM_BYTES_MAX)))?;
    let event = match mapped {
        MappedWebhook::Event(event) => event,
        MappedWebhook::Ignored(reason) => {
            let reason = text::one_line(&reason, PROBLEM_BYTES_MAX);
            return Ok((WebhookMapping::Ignored(reason), None));
        }
    };
    let payload = event.payload();
    let message = event.message.map(|message| WebhookMessage {
        author: message.author,
        is_by_bot: message.is_by_bot,
        is_edited: false,
        text: Some(message.text),
        association: None,
    });
    let event = WebhookEvent {
        project: event.project,
        issue: event.issue,
        event_type: event.event_type,
        dedup_key: event.dedup_key.map(DedupKey::Delivery),
        message,
    };
    Ok((WebhookMapping::Event(event), Some(payload)))
}

fn panicked(provider: &dyn Provider, webhook: &ReceivedWebhook<'_>) -> ApiError {
    let name = provider.name();
    error!(integration = webhook.integration, provider = name, "provider panicked on a webhook");
    let message = format!("provider `{name}` panicked; the webhook was not stored");
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "provider_failed", message)
}
