//! Fake receivers of replies: comments of GitHub and GitLab, and callbacks, with injected faults.
//!
//! Every accepted POST is recorded under its idempotency key, also if its response is lost, so that a test can check
//! that each reply was applied once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use serde_json::{Value, json};
use tokio::sync::watch;

/// The id of the account that posts with any token.
pub(crate) const OWN_ACCOUNT: u64 = 7;

/// A fault of one request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// Responds with this status and these headers, without an effect.
    Respond(u16, Vec<(&'static str, String)>),
    /// Responds with this status and this body, without an effect.
    RespondWithBody(u16, &'static str),
    /// Applies the request and responds with 502, so the sender does not know the outcome.
    LoseResponse,
    /// Does not respond, without an effect, until [`Receiver::release`].
    Hang,
}

/// An applied POST.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    /// The `idempotency-key`; for a callback also the `webhook-id`.
    pub(crate) key: String,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
    pub(crate) at: Instant,
}

impl Accepted {
    /// The visible text of a comment or a callback, without the marker.
    pub(crate) fn content(&self) -> &str {
        let content = self.body["body"].as_str().or(self.body["data"]["content"].as_str());
        content.unwrap_or_default().split("\n\n<!--").next().unwrap_or_default()
    }
}

#[derive(Debug)]
struct Comment {
    author: u64,
    text: String,
    /// RFC 3339, in UTC.
    created_at: String,
}

#[derive(Debug, Default)]
struct ReceiverState {
    requests: Vec<(Method, Uri, HeaderMap)>,
    accepted: Vec<Accepted>,
    /// By path.
    comments: BTreeMap<String, Vec<Comment>>,
    faults: VecDeque<Fault>,
    /// Old and new path prefixes.
    renamed: Vec<(String, String)>,
}

/// A server on a free local port. It stops with the runtime of the test.
#[derive(Debug)]
pub(crate) struct Receiver {
    state: Mutex<ReceiverState>,
    /// Fault source for requests without a fault in `faults`.
    fault_source: Mutex<Option<Box<dyn FaultSource>>>,
    released: watch::Sender<u64>,
}

/// Decides about the fault of each POST.
pub(crate) trait FaultSource: Send + std::fmt::Debug {
    fn next_fault(&mut self) -> Option<Fault>;
}

impl Receiver {
    /// Starts a receiver; returns it and its URL, which serves as `base_url` of all providers.
    pub(crate) async fn start() -> std::io::Result<(Arc<Self>, String)> {
        let receiver = Arc::new(Self {
            state: Mutex::default(),
            fault_source: Mutex::default(),
            released: watch::Sender::default(),
        });
        let router = Router::new().fallback(receive).with_state(Arc::clone(&receiver));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((receiver, format!("http://{address}")))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ReceiverState> {
        self.state.lock().expect("no panic")
    }

    /// Adds a fault for the next POST.
    pub(crate) fn fail_next(&self, fault: Fault) {
        self.state().faults.push_back(fault);
    }

    /// Sets the fault source for every POST without a fault from [`Receiver::fail_next`].
    pub(crate) fn fail_randomly(&self, fault_source: impl FaultSource + 'static) {
        *self.fault_source.lock().expect("no panic") = Some(Box::new(fault_source));
    }

    /// Removes all faults, and responds with 503 to hanging requests.
    pub(crate) fn release(&self) {
        *self.fault_source.lock().expect("no panic") = None;
        self.state().faults.clear();
        self.released.send_modify(|count| *count += 1);
    }

    /// Redirects paths that begin with `old` to `new`, as GitHub does for a renamed repository.
    pub(crate) fn rename(&self, old: &str, new: &str) {
        self.state().renamed.push((old.to_owned(), new.to_owned()));
    }

    /// Adds a comment of `author` with the current time.
    pub(crate) fn add_comment(&self, path: &str, author: u64, text: impl Into<String>) {
        self.add_comment_at(path, author, text, SystemClock.now());
    }

    /// Adds a comment with another time. Add older comments first.
    pub(crate) fn add_comment_at(
        &self,
        path: &str,
        author: u64,
        text: impl Into<String>,
        created_at: Timestamp,
    ) {
        let comment = Comment { author, text: text.into(), created_at: created_at.to_rfc3339() };
        self.state().comments.entry(path.to_owned()).or_default().push(comment);
    }

    /// The comments under a path, oldest first.
    pub(crate) fn comments(&self, path: &str) -> Vec<String> {
        let state = self.state();
        state.comments.get(path).into_iter().flatten().map(|one| one.text.clone()).collect()
    }

    /// All applied POSTs, in order.
    pub(crate) fn accepted(&self) -> Vec<Accepted> {
        self.state().accepted.clone()
    }

    /// How often each key was applied.
    pub(crate) fn effects(&self) -> BTreeMap<String, usize> {
        let mut effects = BTreeMap::new();
        for accepted in &self.state().accepted {
            *effects.entry(accepted.key.clone()).or_default() += 1;
        }
        effects
    }

    /// Method, path with query, and headers of every request.
    pub(crate) fn requests(&self) -> Vec<(Method, Uri, HeaderMap)> {
        self.state().requests.clone()
    }
}

async fn receive(
    State(receiver): State<Arc<Receiver>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut released = receiver.released.subscribe();
    receiver.state().requests.push((method.clone(), uri.clone(), headers.clone()));
    if let Some(location) = redirect(&receiver, &uri) {
        // Same status codes as GitHub.
        let status = if method == Method::GET {
            StatusCode::MOVED_PERMANENTLY
        } else {
            StatusCode::TEMPORARY_REDIRECT
        };
        return (status, [(header::LOCATION, location)]).into_response();
    }
    if method == Method::GET {
        return list(&receiver, &uri);
    }
    let fault = {
        let next = receiver.state().faults.pop_front();
        let mut fault_source = receiver.fault_source.lock().expect("no panic");
        next.or_else(|| fault_source.as_mut().and_then(|fault_source| fault_source.next_fault()))
    };
    match fault {
        Some(Fault::Respond(status, extra)) => {
            let mut response = status_of(status).into_response();
            for (name, value) in extra {
                response.headers_mut().insert(name, value.parse().expect("a header"));
            }
            response
        }
        Some(Fault::RespondWithBody(status, text)) => (status_of(status), text).into_response(),
        Some(Fault::Hang) => {
            // Also ends with the connection.
            let _ = released.changed().await;
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        }
        Some(Fault::LoseResponse) => {
            accept(&receiver, &uri, headers, &body);
            StatusCode::BAD_GATEWAY.into_response()
        }
        None if accept(&receiver, &uri, headers, &body) => {
            (StatusCode::CREATED, "{}").into_response()
        }
        None => StatusCode::BAD_REQUEST.into_response(),
    }
}

fn status_of(status: u16) -> StatusCode {
    StatusCode::from_u16(status).expect("a status")
}

fn redirect(receiver: &Receiver, uri: &Uri) -> Option<String> {
    let state = receiver.state();
    let path = uri.path_and_query().map(|one| one.as_str()).unwrap_or_default();
    let renamed = state.renamed.iter().find(|(old, _)| path.starts_with(old))?;
    Some(format!("{}{}", renamed.1, &path[renamed.0.len()..]))
}

fn accept(receiver: &Receiver, uri: &Uri, headers: HeaderMap, body: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return false };
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let (key, path) = (key.unwrap_or_default().to_owned(), uri.path().to_owned());
    let mut state = receiver.state();
    if let Some(text) = body["body"].as_str() {
        let created_at = SystemClock.now().to_rfc3339();
        let comment = Comment { author: OWN_ACCOUNT, text: text.to_owned(), created_at };
        state.comments.entry(path.clone()).or_default().push(comment);
    }
    state.accepted.push(Accepted { key, path, headers, body, at: Instant::now() });
    true
}

/// One page of comments, or the account of the token.
fn list(receiver: &Receiver, uri: &Uri) -> Response {
    if uri.path().ends_with("/user") {
        return axum::Json(json!({"id": OWN_ACCOUNT, "login": "us"})).into_response();
    }
    let argument = |name: &str| {
        let arguments = uri.query().unwrap_or_default().split('&');
        arguments
            .filter_map(|one| one.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|one| one.1)
    };
    let number = |name: &str| argument(name).and_then(|one| one.parse::<usize>().ok());
    let (page, per_page) = (number("page").unwrap_or(1), number("per_page").unwrap_or(30).min(100));
    let state = receiver.state();
    let comments = state.comments.get(uri.path()).into_iter().flatten();
    let since = argument("since");
    let mut comments: Vec<&Comment> =
        comments.filter(|one| since.is_none_or(|since| *one.created_at >= *since)).collect();
    if argument("sort") == Some("desc") {
        comments.reverse();
    }
    let first = (page - 1) * per_page;
    let next = comments.len() > first + per_page;
    let show = |comment: &Comment| {
        let account = json!({"id": comment.author});
        json!({"body": comment.text, "user": account, "author": account, "created_at": comment.created_at})
    };
    let shown: Vec<Value> = comments.into_iter().skip(first).take(per_page).map(show).collect();
    let mut response = axum::Json(shown).into_response();
    if next {
        let link = format!("<http://localhost{}?page={}>; rel=\"next\"", uri.path(), page + 1);
        response.headers_mut().insert(header::LINK, link.parse().expect("a header"));
    }
    response
}

/// Seeded random faults: `percent` of 100 requests fail, in every way except hanging.
#[derive(Debug)]
pub(crate) struct SeededFaults {
    state: u64,
    percent: u64,
}

impl SeededFaults {
    pub(crate) fn new(seed: u64, percent: u64) -> Self {
        println!("receiver faults: seed {seed}, {percent} %");
        Self { state: seed, percent }
    }

    /// SplitMix64.
    fn below(&mut self, end: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.state;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % end
    }
}

impl FaultSource for SeededFaults {
    fn next_fault(&mut self) -> Option<Fault> {
        if self.below(100) >= self.percent {
            return None;
        }
        let second = || vec![("retry-after", "1".to_owned())];
        Some(match self.below(4) {
            0 => Fault::Respond(500, vec![]),
            1 => Fault::Respond(429, second()),
            2 => Fault::Respond(503, second()),
            _ => Fault::LoseResponse,
        })
    }
}
