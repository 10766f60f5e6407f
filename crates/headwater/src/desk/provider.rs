//! The interface of providers that an embedding program adds beside GitHub, GitLab and Standard Webhooks.
//!
//! Upstream: `inbound::webhooks` lets a provider verify and map webhooks; `outbound` lets it deliver replies. Downstream: the
//! service of the provider.
//!
//! Guarantees: a webhook is mapped only after it was verified. An event is stored in the form of Standard Webhooks, so that it is
//! read without the provider, also by later versions. Replies are delivered by the outbox, with its retries, limits and holds. A
//! provider that fails or panics concerns only the webhook or the reply it was called for.
//! Limits: a webhook has a JSON body, and the response to it is fixed.

use std::fmt;

use async_trait::async_trait;
use hmac::{Hmac, KeyInit as _, Mac as _};
use reqwest::{Client, Method};
use serde_json::{Value as Json, json};
use sha2::Sha256;

use crate::desk::reply::ReplyTarget;
use crate::http_client;
use crate::limits::PROVIDER_RESPONSE_BYTES_MAX;
use crate::outbound::http;

pub use headwater_issue::DeliverError;

/// A system that reports issues with webhooks and gets replies. Add it with `Extensions::provider`, name it as `provider` of an
/// `[[integration]]`, and test it with [`provider_conformance`](crate::desk::provider_conformance).
#[async_trait]
pub trait Provider: Send + Sync + fmt::Debug + 'static {
    /// Its name in the settings and in the URL of its webhooks: 1 to 64 letters, digits, `-`, `_` and `.`; always the same.
    fn name(&self) -> &str;

    /// Verifies that the owner of the secret has sent this webhook. The error is the answer to a sender who may be a stranger.
    async fn verify(&self, webhook: &ReceivedWebhook<'_>) -> Result<(), String>;

    /// Maps a verified webhook. `payload` is its body; the error rejects it with status 400. Called again for a webhook that is
    /// sent again, with the same result.
    fn map(&self, webhook: &ReceivedWebhook<'_>, payload: &Json) -> Result<MappedWebhook, String>;

    /// Delivers a reply. After an error, a timeout or a crash it is called again with the same idempotency key, although the
    /// service may have accepted the reply: let the service detect the key, or look for it first if `attempt` is above 1.
    async fn deliver(&self, reply: &ProviderReply<'_>) -> Result<(), DeliverError>;
}

/// A webhook as received.
#[derive(Clone)]
pub struct ReceivedWebhook<'a> {
    /// Id of its integration.
    pub integration: &'a str,
    /// Secret of the integration.
    pub secret: &'a str,
    /// Names and values of its headers.
    pub headers: Vec<(&'a str, &'a str)>,
    /// The exact bytes.
    pub body: &'a [u8],
}

impl fmt::Debug for ReceivedWebhook<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedWebhook")
            .field("integration", &self.integration)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl<'a> ReceivedWebhook<'a> {
    /// The first header with this name, in any case.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        let mut named = self.headers.iter().filter(|(one, _)| one.eq_ignore_ascii_case(name));
        named.next().map(|(_, value)| *value)
    }

    /// Whether `signature` is the HMAC-SHA256 of `parts`, one after another, with the secret as key. Takes constant time.
    pub fn has_hmac_sha256(&self, signature: &[u8], parts: &[&[u8]]) -> bool {
        is_hmac_sha256(self.secret, signature, parts)
    }
}

/// Compares in constant time.
pub(crate) fn is_hmac_sha256(secret: &str, signature: &[u8], parts: &[&[u8]]) -> bool {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("a key may have any length");
    for part in parts {
        mac.update(part);
    }
    mac.verify_slice(signature).is_ok()
}

/// What a webhook means.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum MappedWebhook {
    /// An event of an issue.
    Event(ProviderEvent),
    /// Not relevant, with the reason.
    Ignored(String),
}

/// An event of an issue.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ProviderEvent {
    /// The project of the issue; may be empty.
    pub project: String,
    /// The issue, unique within the project.
    pub issue: String,
    /// The type. Without a message, a type that ends with `closed` or `reopened`, as in `issue.closed`, changes the status of the
    /// issue.
    pub event_type: String,
    /// The same for every webhook that reports this event, and different for any other event of the integration. `None`: equal
    /// events are duplicates.
    pub dedup_key: Option<String>,
    /// The message, if a person or a program has written one.
    pub message: Option<ProviderMessage>,
    /// Further data for a handler of the embedding program, stored as `extra`. A model sees it only in an event without a message.
    pub extra: Option<Json>,
}

/// A message in an event.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ProviderMessage {
    /// The name of its author. One of `agents` of the integration takes the issue over; `bot_login` is the desk itself.
    pub author: Option<String>,
    /// The text.
    pub text: String,
    /// Whether a program has written it. Such messages are ignored, those of the desk itself included.
    pub is_by_bot: bool,
}

impl ProviderEvent {
    /// The payload that is stored: a Standard Webhook.
    pub(crate) fn payload(&self) -> String {
        let message = self.message.as_ref();
        let mut payload = json!({
            "type": self.event_type, "project": self.project, "issue": self.issue,
            "user": message.and_then(|message| message.author.as_deref()),
            "content": message.map(|message| message.text.as_str()),
            "extra": self.extra,
        });
        if let Json::Object(fields) = &mut payload {
            fields.retain(|_, value| !value.is_null());
        }
        payload.to_string()
    }
}

/// A reply to deliver.
#[derive(Clone)]
pub struct ProviderReply<'a> {
    /// An answer, or the news that the desk has closed the issue or handed it over; never a draft or a note.
    pub target: ReplyTarget,
    /// Id of the integration.
    pub integration: &'a str,
    /// `base_url` of the integration.
    pub base_url: Option<&'a str>,
    /// The token of `reply_token_env`.
    pub token: Option<&'a str>,
    /// Secret of the integration.
    pub secret: &'a str,
    /// The project of the issue; may be empty.
    pub project: &'a str,
    /// The issue.
    pub issue: &'a str,
    /// The text. A model has written it: escape what the service would interpret.
    pub content: &'a str,
    /// The same for every attempt to deliver this reply, and different for any other reply.
    pub idempotency_key: &'a str,
    /// Number of this attempt, from 1.
    pub attempt: u32,
    pub(crate) client: &'a Client,
}

impl fmt::Debug for ProviderReply<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderReply")
            .field("target", &self.target)
            .field("integration", &self.integration)
            .field("idempotency_key", &self.idempotency_key)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

impl ProviderReply<'_> {
    /// Sends a request with the header `Idempotency-Key`, and with a JSON body if there is one. Returns the body of a response
    /// with a status of success, at most [`PROVIDER_RESPONSE_BYTES_MAX`] bytes; any other response is the right error: 401 holds
    /// the replies of the integration, 403 this reply, 429 and 5xx are retried, other 4xx are permanent. Follows redirects on the
    /// same host. Takes at most 12 s.
    pub async fn send(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: Option<&Json>,
    ) -> Result<Vec<u8>, DeliverError> {
        let method = Method::from_bytes(method.as_bytes())
            .map_err(|_| DeliverError::Dead(format!("`{method}` is not an HTTP method")))?;
        let mut request =
            self.client.request(method, url).header("idempotency-key", self.idempotency_key);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = http::send(self.client, request).await?;
        let body = http_client::read_limited(response, PROVIDER_RESPONSE_BYTES_MAX).await;
        body.map_err(|problem| DeliverError::Retry(format!("reading the response: {problem}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_stored_as_a_standard_webhook_without_empty_fields() {
        let mut event = ProviderEvent {
            project: "shop".to_owned(),
            issue: "7".to_owned(),
            event_type: "message".to_owned(),
            message: Some(ProviderMessage {
                author: Some("ada".to_owned()),
                text: "Where is it?".to_owned(),
                is_by_bot: false,
            }),
            ..ProviderEvent::default()
        };
        let stored: Json = serde_json::from_str(&event.payload()).unwrap();
        let expected = json!({"type": "message", "project": "shop", "issue": "7", "user": "ada", "content": "Where is it?"});
        assert_eq!(stored, expected);
        (event.message, event.extra) = (None, Some(json!({"a": 1})));
        let stored: Json = serde_json::from_str(&event.payload()).unwrap();
        let expected =
            json!({"type": "message", "project": "shop", "issue": "7", "extra": {"a": 1}});
        assert_eq!(stored, expected);
    }

    #[test]
    fn neither_a_webhook_nor_a_reply_shows_its_secrets() {
        let webhook = ReceivedWebhook {
            integration: "chat",
            secret: "hunter2",
            headers: vec![("X-Signature", "hunter2")],
            body: b"{}",
        };
        assert_eq!(webhook.header("x-signature"), Some("hunter2"));
        assert!(!format!("{webhook:?}").contains("hunter2"));
        let client = http_client::build().unwrap();
        let reply = ProviderReply {
            target: ReplyTarget::Answer,
            integration: "chat",
            base_url: None,
            token: Some("hunter2"),
            secret: "hunter2",
            project: "",
            issue: "7",
            content: "hunter2",
            idempotency_key: "key",
            attempt: 1,
            client: &client,
        };
        assert!(!format!("{reply:?}").contains("hunter2"));
    }
}
