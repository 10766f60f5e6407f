//! Standard Webhooks of anybody: `{"type": ..., "issue": ..., "project": ...}`, or the same below `data`.
//!
//! Upstream: `webhooks`, after the signature was checked. Promises: the sender names the issue; a payload that names none is
//! refused, so that whoever writes the sender sees it.

use axum::http::HeaderMap;
use serde_json::Value;

use crate::http::ApiError;
use crate::inbound::webhooks::{Mapped, Placed, header, name_at, text_at};

/// Types that only ask whether we are there.
const PINGS: [&str; 4] = ["ping", "test", "webhook.ping", "webhook.test"];

/// What a Standard Webhook is about.
pub(super) fn map(headers: &HeaderMap, payload: &Value) -> Result<Mapped, ApiError> {
    let event_type = text_at(payload, "/type").filter(|name| !name.is_empty());
    let event_type =
        event_type.ok_or_else(|| ApiError::invalid("the payload lacks `type`, a text"))?;
    if PINGS.contains(&event_type) {
        return Ok(Mapped::ignored("a ping: the webhook works"));
    }
    let issue = named(payload, "issue").ok_or_else(|| {
        ApiError::invalid("the payload lacks `issue`: text, a whole number, or an object with `id`; also below `data`")
    })?;
    Ok(Mapped::Event(Placed {
        project: named(payload, "project").unwrap_or_default(),
        issue,
        event_type: event_type.to_owned(),
        // The signature covers it, so it is there.
        delivery: header(headers, "webhook-id").map(str::to_owned),
    }))
}

/// The name of a thing, itself or its `id`, at the top or below `data`.
fn named(payload: &Value, thing: &str) -> Option<String> {
    let places = [
        format!("/{thing}"),
        format!("/{thing}/id"),
        format!("/data/{thing}"),
        format!("/data/{thing}/id"),
    ];
    places.iter().find_map(|place| name_at(payload, place))
}
