//! Maps Standard Webhooks of any sender: `{"type": ..., "issue": ..., "project": ...}`, or the same below `data`.
//!
//! Upstream: `webhooks`, after the signature was verified. Guarantees: a payload without an issue is rejected, so that
//! the developer of the sender notices.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::http::ApiError;
use crate::inbound::webhooks::{DedupKey, WebhookEvent, WebhookMapping, header, id_at, text_at};

/// Types of connectivity tests.
const PINGS: [&str; 4] = ["ping", "test", "webhook.ping", "webhook.test"];

/// Maps a Standard Webhook.
pub(super) fn map(headers: &HeaderMap, payload: &Value) -> Result<WebhookMapping, ApiError> {
    let event_type = text_at(payload, "/type").filter(|name| !name.is_empty());
    let event_type = event_type
        .ok_or_else(|| ApiError::invalid("`type` is missing in the payload, or not a string"))?;
    if PINGS.contains(&event_type) {
        return Ok(WebhookMapping::ignored("ping: the webhook works"));
    }
    let issue = object_id(payload, "issue").ok_or_else(|| {
        ApiError::invalid("`issue` is missing in the payload: a string, an integer, or an object with `id`; also below `data`")
    })?;
    Ok(WebhookMapping::Event(WebhookEvent {
        project: object_id(payload, "project").unwrap_or_default(),
        issue,
        event_type: event_type.to_owned(),
        // The signature covers this header, so it is present.
        dedup_key: header(headers, "webhook-id").map(|id| DedupKey::Delivery(id.to_owned())),
        message: None,
    }))
}

/// The id of an object: the value itself or its `id`, at the top level or below `data`.
fn object_id(payload: &Value, name: &str) -> Option<String> {
    let pointers = [
        format!("/{name}"),
        format!("/{name}/id"),
        format!("/data/{name}"),
        format!("/data/{name}/id"),
    ];
    pointers.iter().find_map(|pointer| id_at(payload, pointer))
}
