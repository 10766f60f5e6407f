//! Delivers replies to a program: one signed request each (Standard Webhooks).
//!
//! Upstream: `outbound`. Guarantees: `webhook-id` is the row's idempotency key and the same for every attempt, so the
//! receiver can detect duplicates; the signature covers id, time and body.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::clock::{Clock, SystemClock};
use hmac::Mac;
use reqwest::{Client, RequestBuilder};
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use crate::desk::{DeskReply, ReplyTarget};
use crate::inbound::standard_webhooks;
use crate::outbound::http;

/// Sends a reply.
pub(super) async fn post(
    client: &Client,
    url: &str,
    secret: &SecretString,
    row: &OutboxRow,
    target: ReplyTarget,
    reply: &DeskReply,
) -> Result<(), DeliverError> {
    let event_type = match target {
        ReplyTarget::Answer => "reply",
        ReplyTarget::Close => "close",
        ReplyTarget::HandOver => "hand_over",
        ReplyTarget::Draft | ReplyTarget::Note => {
            return Err(DeliverError::Dead("a draft is never sent".to_owned()));
        }
    };
    let body = json!({
        "type": event_type,
        "timestamp": row.created_at.to_rfc3339(),
        "data": {
            "integration": row.integration, "issue_id": row.issue_id.0,
            "external_project_id": row.external_project_id,
            "external_issue_id": row.external_issue_id,
            "content": reply.content, "session_id": reply.session_id,
        },
    })
    .to_string();
    let request = signed(client, url, secret, &row.idempotency_key, body);
    http::send(client, request).await.map(drop)
}

/// A POST request with the headers of Standard Webhooks, signed now.
pub(super) fn signed(
    client: &Client,
    url: &str,
    secret: &SecretString,
    id: &str,
    body: String,
) -> RequestBuilder {
    let seconds = SystemClock.now().as_millis() / 1000;
    let signature = sign(secret, id, seconds, body.as_bytes());
    client
        .post(url)
        .header("content-type", "application/json")
        .header("webhook-id", id)
        .header("webhook-timestamp", seconds.to_string())
        .header("webhook-signature", signature)
        .header("idempotency-key", id)
        .body(body)
}

/// The signature: `v1,` and the base64 HMAC of `id.timestamp.body`.
pub fn sign(secret: &SecretString, id: &str, seconds: u64, body: &[u8]) -> String {
    let secret = secret.expose_secret();
    let mac = standard_webhooks::authenticate(secret, id, &seconds.to_string(), body);
    format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_matches_the_specification() {
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned().into();
        let signature = sign(
            &secret,
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }
}
