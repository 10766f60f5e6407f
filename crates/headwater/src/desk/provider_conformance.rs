//! Conformance suite of providers: what the server relies on, checked with a real sample of the provider and a service on this
//! machine.
//!
//! Upstream: tests of programs that implement [`Provider`]. Downstream: the provider, and an HTTP server that plays its service.
//! Guarantees: no other network is used; a check that fails is named. Limits: whether the real service detects an idempotency key
//! is not checked.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use futures_util::FutureExt;
use serde_json::{Value as Json, json};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::desk::provider::{
    DeliverError, MappedWebhook, Provider, ProviderEvent, ProviderReply, ReceivedWebhook,
};
use crate::desk::reply::ReplyTarget;
use crate::http_client;

/// Bytes of the sample that are changed one by one.
const CHANGED_BYTES_MAX: usize = 512;

/// Bytes of a request to the service that are read.
const REQUEST_BYTES_MAX: usize = 1024 * 1024;

/// Limit of one delivery, as of the outbox.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(30);

/// A webhook as the provider sends it, and how its service answers.
#[derive(Clone)]
pub struct ProviderSample {
    /// The secret with which the webhook is signed.
    pub secret: String,
    /// Its headers.
    pub headers: Vec<(String, String)>,
    /// Its body: JSON with a message of a person.
    pub body: Vec<u8>,
    /// The token for replies.
    pub token: String,
    /// The JSON with which the service accepts a reply.
    pub accepted: String,
}

impl std::fmt::Debug for ProviderSample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProviderSample")
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl ProviderSample {
    fn webhook<'a>(&'a self, secret: &'a str, body: &'a [u8]) -> ReceivedWebhook<'a> {
        let headers = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        ReceivedWebhook { integration: "sample", secret, headers: headers.collect(), body }
    }
}

/// Checks a provider. The error names the first requirement that it does not meet.
pub async fn check(provider: &dyn Provider, sample: &ProviderSample) -> Result<(), String> {
    check_verification(provider, sample).await?;
    check_mapping(provider, sample)?;
    check_delivery(provider, sample).await
}

fn ensure(holds: bool, requirement: impl Into<String>) -> Result<(), String> {
    if holds { Ok(()) } else { Err(requirement.into()) }
}

async fn check_verification(
    provider: &dyn Provider,
    sample: &ProviderSample,
) -> Result<(), String> {
    let verify = async |webhook: ReceivedWebhook<'_>| {
        let verified = AssertUnwindSafe(provider.verify(&webhook)).catch_unwind().await;
        verified.map_err(|_| "`verify` does not panic".to_owned())
    };
    let genuine = verify(sample.webhook(&sample.secret, &sample.body)).await?;
    genuine.map_err(|problem| format!("the sample is verified, but: {problem}"))?;
    for secret in ["", "another secret"] {
        let other = verify(sample.webhook(secret, &sample.body)).await?;
        ensure(other.is_err(), format!("the secret `{secret}` is rejected"))?;
    }
    for at in 0..sample.body.len().min(CHANGED_BYTES_MAX) {
        let mut changed = sample.body.clone();
        changed[at] ^= 1;
        let changed = verify(sample.webhook(&sample.secret, &changed)).await?;
        ensure(changed.is_err(), format!("a body with another byte {at} is rejected"))?;
    }
    let unsigned =
        ReceivedWebhook { headers: Vec::new(), ..sample.webhook(&sample.secret, &sample.body) };
    ensure(verify(unsigned).await?.is_err(), "a webhook without headers is rejected")?;
    // Whatever a header is, it is no reason to panic, and makes a changed body no better.
    let odd = ["", " ", "=", "sha256=", "v1,", "ä", "0", "\u{1f600}", "-1", "99999999999999999999"];
    for place in 0..sample.headers.len() {
        for value in odd {
            let mut webhook = sample.webhook(&sample.secret, b"{}");
            webhook.headers[place].1 = value;
            let requirement =
                format!("another body with `{}: {value}` is rejected", sample.headers[place].0);
            ensure(verify(webhook).await?.is_err(), requirement)?;
        }
    }
    Ok(())
}

fn check_mapping(provider: &dyn Provider, sample: &ProviderSample) -> Result<(), String> {
    let webhook = sample.webhook(&sample.secret, &sample.body);
    let map = |payload: &Json| {
        let mapped = catch_unwind(AssertUnwindSafe(|| provider.map(&webhook, payload)));
        mapped.map_err(|_| format!("`map` does not panic, but does for {payload}"))
    };
    let payload: Json = serde_json::from_slice(&sample.body)
        .map_err(|error| format!("the body of the sample is JSON, but: {error}"))?;
    let event = sample_event(map(&payload)?)?;
    ensure(!event.issue.is_empty(), "an event has an issue")?;
    ensure(!event.event_type.is_empty(), "an event has a type")?;
    ensure(event.dedup_key.as_deref() != Some(""), "a key for de-duplication is not empty")?;
    let message = event.message.as_ref().ok_or("the sample has a message")?;
    ensure(!message.text.is_empty(), "the message of the sample has a text")?;
    ensure(!message.is_by_bot, "the message of the sample is by a person")?;
    let again = sample_event(map(&payload)?)?;
    ensure(again == event, "a webhook that is sent again is mapped to the same event")?;
    // Every field missing or of another type: the fields of the sample, and payloads of any shape.
    for odd in
        [json!(null), json!([]), json!({}), json!(""), json!(7), json!([{}]), json!({"": null})]
    {
        let _ = map(&odd)?;
    }
    let fields = payload.as_object().into_iter().flatten().map(|(name, _)| name);
    for name in fields {
        for odd in [json!(null), json!([]), json!({}), json!(""), json!(-1), json!("\u{fffd}")] {
            let mut changed = payload.clone();
            changed[name] = odd;
            let _ = map(&changed)?;
        }
    }
    Ok(())
}

fn sample_event(mapped: Result<MappedWebhook, String>) -> Result<ProviderEvent, String> {
    match mapped {
        Ok(MappedWebhook::Event(event)) => Ok(event),
        Ok(MappedWebhook::Ignored(reason)) => {
            Err(format!("the sample is an event, but is ignored: {reason}"))
        }
        Err(problem) => Err(format!("the sample is mapped, but: {problem}")),
    }
}

/// The service of the provider: it answers every request in the same way.
#[derive(Clone)]
struct SampleService {
    status: StatusCode,
    accepted: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl SampleService {
    async fn start(status: StatusCode, accepted: &str) -> Result<(Self, String), String> {
        let (accepted, requests) = (accepted.to_owned(), Arc::default());
        let service = Self { status, accepted, requests };
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.map_err(|error| format!("listening failed: {error}"))?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        let router = Router::new().fallback(answer).with_state(service.clone());
        // Ends with the runtime of the test.
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((service, format!("http://{address}")))
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn answer(State(service): State<SampleService>, request: Request) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, REQUEST_BYTES_MAX).await.unwrap_or_default();
    let body = String::from_utf8_lossy(&body);
    let seen = format!("{} {} {:?}\n{body}", head.method, head.uri, head.headers);
    service.requests.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    let is_accepted = service.status.is_success();
    let answer = if is_accepted { service.accepted } else { "{}".to_owned() };
    let mut response = Response::new(Body::from(answer));
    *response.status_mut() = service.status;
    let json = axum::http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(axum::http::header::CONTENT_TYPE, json);
    response
}

async fn check_delivery(provider: &dyn Provider, sample: &ProviderSample) -> Result<(), String> {
    let client = http_client::build()?;
    let deliver = async |base_url: &str, target: ReplyTarget, attempt: u32| {
        let reply = ProviderReply {
            target,
            integration: "sample",
            base_url: Some(base_url),
            token: Some(&sample.token),
            secret: &sample.secret,
            project: "a project/with ä",
            issue: "42",
            content: "the text of the reply",
            idempotency_key: "key-of-the-sample",
            attempt,
            client: &client,
        };
        let delivered = AssertUnwindSafe(provider.deliver(&reply)).catch_unwind();
        match timeout(DELIVERY_TIMEOUT, delivered).await {
            Ok(Ok(delivered)) => Ok(delivered),
            Ok(Err(_)) => Err("`deliver` does not panic".to_owned()),
            Err(_) => Err(format!("`deliver` ends within {DELIVERY_TIMEOUT:?}")),
        }
    };

    let (service, url) = SampleService::start(StatusCode::OK, &sample.accepted).await?;
    for attempt in [1, 2] {
        let before = service.requests().len();
        let delivered = deliver(&url, ReplyTarget::Answer, attempt).await?;
        delivered.map_err(|error| format!("a reply is accepted, but: {error}"))?;
        let requests = service.requests();
        let sent = &requests[before..];
        ensure(!sent.is_empty(), format!("attempt {attempt} calls the service"))?;
        if attempt == 1 {
            let has = |text: &str| sent.iter().any(|request| request.contains(text));
            ensure(has("the text of the reply"), "a request has the text of the reply")?;
            ensure(has("key-of-the-sample"), "a request has the idempotency key")?;
            ensure(has("42"), "a request has the issue")?;
        }
    }
    for target in [ReplyTarget::Close, ReplyTarget::HandOver] {
        let delivered = deliver(&url, target, 1).await?;
        delivered.map_err(|error| format!("{target:?} is delivered or ignored, but: {error}"))?;
    }

    let responses: [(u16, ExpectedError); 7] = [
        (401, is_held),
        (403, is_held),
        (429, is_repeated),
        (500, is_repeated),
        (503, is_repeated),
        (400, |_| true),
        (404, |_| true),
    ];
    for (status, is_right) in responses {
        let status = StatusCode::from_u16(status).map_err(|error| error.to_string())?;
        let (_, url) = SampleService::start(status, &sample.accepted).await?;
        match deliver(&url, ReplyTarget::Answer, 1).await? {
            Ok(()) => {
                return Err(format!("a reply that is answered with {status} is not delivered"));
            }
            Err(error) => ensure(
                is_right(&error),
                format!("a reply that is answered with {status} is not {error:?}"),
            )?,
        }
    }
    // Nothing listens there: the listener is closed.
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(|error| error.to_string())?;
    let url = format!("http://{}", listener.local_addr().map_err(|error| error.to_string())?);
    drop(listener);
    match deliver(&url, ReplyTarget::Answer, 1).await? {
        Ok(()) => Err("a reply to a service that is down is not delivered".to_owned()),
        Err(error) => ensure(
            is_repeated(&error),
            format!("a reply to a service that is down is repeated, not {error:?}"),
        ),
    }
}

/// Whether an error is right for a response.
type ExpectedError = fn(&DeliverError) -> bool;

/// Waits for an operator.
fn is_held(error: &DeliverError) -> bool {
    matches!(error, DeliverError::Held(_) | DeliverError::Denied(_))
}

/// Is repeated by itself.
fn is_repeated(error: &DeliverError) -> bool {
    matches!(
        error,
        DeliverError::Retry(_) | DeliverError::Unavailable(_) | DeliverError::Paused { .. }
    )
}
