//! Receivers of replies: the comments of GitHub and GitLab, and callbacks, with faults that a test chooses.
//!
//! Every accepted POST is recorded under its idempotency key, also one whose response is lost; so a test can check that each
//! reply had its effect once.

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
pub(crate) const OUR_ACCOUNT: u64 = 7;

/// What goes wrong with one request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// Refused with this status and these headers; nothing is done.
    Refuse(u16, Vec<(&'static str, String)>),
    /// Refused with this status, no header and this body.
    Say(u16, &'static str),
    /// Done, and answered with 502: the sender cannot know.
    LoseResponse,
    /// Never answered, and nothing is done, until [`Receiver::release`].
    Hang,
}

/// A POST that had its effect.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    /// `idempotency-key`, also `webhook-id` of a callback.
    pub(crate) key: String,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
    pub(crate) at: Instant,
}

impl Accepted {
    /// The text that people see, without the mark: of a comment or of a callback.
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
struct Records {
    requests: Vec<(Method, Uri, HeaderMap)>,
    accepted: Vec<Accepted>,
    /// By the path under which they are posted.
    comments: BTreeMap<String, Vec<Comment>>,
    faults: VecDeque<Fault>,
    /// Old and new beginnings of paths.
    renamed: Vec<(String, String)>,
}

/// A server on a free port of this machine. It ends with the runtime of the test.
#[derive(Debug)]
pub(crate) struct Receiver {
    records: Mutex<Records>,
    /// Answers the next request that is not a fault of `faults`, from the seeded source of a chaos test.
    chance: Mutex<Option<Box<dyn Chance>>>,
    released: watch::Sender<u64>,
}

/// Decides over the fault of each POST.
pub(crate) trait Chance: Send + std::fmt::Debug {
    fn fault(&mut self) -> Option<Fault>;
}

impl Receiver {
    /// Starts it; returns it and its `http://ADDRESS`, which serves as `base_url` of all providers.
    pub(crate) async fn start() -> std::io::Result<(Arc<Self>, String)> {
        let receiver = Arc::new(Self {
            records: Mutex::default(),
            chance: Mutex::default(),
            released: watch::Sender::default(),
        });
        let router = Router::new().fallback(receive).with_state(Arc::clone(&receiver));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((receiver, format!("http://{address}")))
    }

    fn records(&self) -> std::sync::MutexGuard<'_, Records> {
        self.records.lock().expect("no panic")
    }

    /// What happens to the next POST that has no fault yet.
    pub(crate) fn fail_next(&self, fault: Fault) {
        self.records().faults.push_back(fault);
    }

    /// What happens to every POST for which [`Receiver::fail_next`] said nothing.
    pub(crate) fn fail_by(&self, chance: impl Chance + 'static) {
        *self.chance.lock().expect("no panic") = Some(Box::new(chance));
    }

    /// Ends all faults, and answers with 503 what hangs.
    pub(crate) fn release(&self) {
        *self.chance.lock().expect("no panic") = None;
        self.records().faults.clear();
        self.released.send_modify(|count| *count += 1);
    }

    /// Requests to paths that begin with `old` are redirected to `new`, as GitHub does for a renamed repository.
    pub(crate) fn rename(&self, old: &str, new: &str) {
        self.records().renamed.push((old.to_owned(), new.to_owned()));
    }

    /// Adds a comment that somebody else has written now, or that we have.
    pub(crate) fn add_comment(&self, path: &str, author: u64, text: impl Into<String>) {
        self.add_comment_at(path, author, text, SystemClock.now());
    }

    /// The same at another time. Add older comments first.
    pub(crate) fn add_comment_at(
        &self,
        path: &str,
        author: u64,
        text: impl Into<String>,
        created_at: Timestamp,
    ) {
        let comment = Comment { author, text: text.into(), created_at: created_at.to_rfc3339() };
        self.records().comments.entry(path.to_owned()).or_default().push(comment);
    }

    /// The comments of a thread, oldest first.
    pub(crate) fn comments(&self, path: &str) -> Vec<String> {
        let records = self.records();
        records.comments.get(path).into_iter().flatten().map(|it| it.text.clone()).collect()
    }

    /// Every POST that had its effect, in order.
    pub(crate) fn accepted(&self) -> Vec<Accepted> {
        self.records().accepted.clone()
    }

    /// How often each key had its effect.
    pub(crate) fn effects(&self) -> BTreeMap<String, usize> {
        let mut effects = BTreeMap::new();
        for accepted in &self.records().accepted {
            *effects.entry(accepted.key.clone()).or_default() += 1;
        }
        effects
    }

    /// Method, path with query, and headers of every request.
    pub(crate) fn requests(&self) -> Vec<(Method, Uri, HeaderMap)> {
        self.records().requests.clone()
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
    receiver.records().requests.push((method.clone(), uri.clone(), headers.clone()));
    if let Some(location) = redirect(&receiver, &uri) {
        // As GitHub does.
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
        let next = receiver.records().faults.pop_front();
        let mut chance = receiver.chance.lock().expect("no panic");
        next.or_else(|| chance.as_mut().and_then(|chance| chance.fault()))
    };
    match fault {
        Some(Fault::Refuse(status, extra)) => {
            let mut response = status_of(status).into_response();
            for (name, value) in extra {
                response.headers_mut().insert(name, value.parse().expect("a header"));
            }
            response
        }
        Some(Fault::Say(status, text)) => (status_of(status), text).into_response(),
        Some(Fault::Hang) => {
            // Ends with the connection, too.
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
    let records = receiver.records();
    let path = uri.path_and_query().map(|it| it.as_str()).unwrap_or_default();
    let renamed = records.renamed.iter().find(|(old, _)| path.starts_with(old))?;
    Some(format!("{}{}", renamed.1, &path[renamed.0.len()..]))
}

fn accept(receiver: &Receiver, uri: &Uri, headers: HeaderMap, body: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return false };
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let (key, path) = (key.unwrap_or_default().to_owned(), uri.path().to_owned());
    let mut records = receiver.records();
    if let Some(text) = body["body"].as_str() {
        let created_at = SystemClock.now().to_rfc3339();
        let comment = Comment { author: OUR_ACCOUNT, text: text.to_owned(), created_at };
        records.comments.entry(path.clone()).or_default().push(comment);
    }
    records.accepted.push(Accepted { key, path, headers, body, at: Instant::now() });
    true
}

/// One page of a list, or our account.
fn list(receiver: &Receiver, uri: &Uri) -> Response {
    if uri.path().ends_with("/user") {
        return axum::Json(json!({"id": OUR_ACCOUNT, "login": "us"})).into_response();
    }
    let argument = |name: &str| {
        let arguments = uri.query().unwrap_or_default().split('&');
        arguments.filter_map(|it| it.split_once('=')).find(|(it, _)| *it == name).map(|it| it.1)
    };
    let number = |name: &str| argument(name).and_then(|it| it.parse::<usize>().ok());
    let (page, per_page) = (number("page").unwrap_or(1), number("per_page").unwrap_or(30).min(100));
    let records = receiver.records();
    let comments = records.comments.get(uri.path()).into_iter().flatten();
    let since = argument("since");
    let mut comments: Vec<&Comment> =
        comments.filter(|it| since.is_none_or(|since| *it.created_at >= *since)).collect();
    if argument("sort") == Some("desc") {
        comments.reverse();
    }
    let first = (page - 1) * per_page;
    let next = comments.len() > first + per_page;
    let show = |it: &Comment| {
        let account = json!({"id": it.author});
        json!({"body": it.text, "user": account, "author": account, "created_at": it.created_at})
    };
    let shown: Vec<Value> = comments.into_iter().skip(first).take(per_page).map(show).collect();
    let mut response = axum::Json(shown).into_response();
    if next {
        let link = format!("<http://localhost{}?page={}>; rel=\"next\"", uri.path(), page + 1);
        response.headers_mut().insert(header::LINK, link.parse().expect("a header"));
    }
    response
}

/// Faults by a seeded generator: of 100 requests `percent` fail, in all the ways there are but hanging.
#[derive(Debug)]
pub(crate) struct Seeded {
    state: u64,
    percent: u64,
}

impl Seeded {
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

impl Chance for Seeded {
    fn fault(&mut self) -> Option<Fault> {
        if self.below(100) >= self.percent {
            return None;
        }
        let second = || vec![("retry-after", "1".to_owned())];
        Some(match self.below(4) {
            0 => Fault::Refuse(500, vec![]),
            1 => Fault::Refuse(429, second()),
            2 => Fault::Refuse(503, second()),
            _ => Fault::LoseResponse,
        })
    }
}
