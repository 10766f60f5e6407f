//! Calls the API in this process, with the identity of the caller.
//!
//! Upstream: screens and actions. Downstream: the router of the API. Guarantees: a read that was answered less than a
//! second ago is answered from memory, for callers of the same role, and concurrent equal reads are one; a change made
//! here forgets all of them. A part that does not answer within [`PART_TIMEOUT`] is reported as unavailable.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode, header};
use bytes::Bytes;
use serde_json::Value;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};
use tower::ServiceExt;

use crate::user::{ConsoleRole, ConsoleUser};

/// How long an answer is kept.
const KEPT_FOR: Duration = Duration::from_secs(1);

/// Maximum number of kept answers.
const KEPT_MAX: usize = 256;

/// Maximum bytes of an answer.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Time for one part of a page.
pub(crate) const PART_TIMEOUT: Duration = Duration::from_secs(8);

/// The answer to a read, shared by all who asked within a second.
pub(crate) type Part = Result<Arc<Value>, Problem>;

/// Why a call of the API failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) code: String,
    pub(crate) message: String,
    /// Since when the same read has failed, if it failed before.
    pub(crate) lasting: Option<Duration>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        Self { status, code: code.to_owned(), message: message.into(), lasting: None }
    }

    /// A dependency did not answer; the same call may succeed later.
    pub(crate) fn is_unavailable(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.status == StatusCode::NOT_FOUND
    }
}

/// Role, view and path of a read.
type AnswerKey = (ConsoleRole, String, String);

type KeptAnswers = HashMap<AnswerKey, (Instant, Arc<OnceCell<Part>>)>;

/// State of all routes of the console.
pub(crate) struct ConsoleState {
    api: Router,
    kept: Mutex<KeptAnswers>,
    /// Since when reads of these paths have failed because a dependency did not answer.
    failing: Mutex<HashMap<String, Instant>>,
}

impl ConsoleState {
    pub(crate) fn new(api: Router) -> Self {
        Self { api, kept: Mutex::default(), failing: Mutex::default() }
    }

    /// Adds to a failure how long the same read has been failing.
    fn noted(&self, path: &str, part: Part) -> Part {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        match part {
            Err(problem) if problem.is_unavailable() => {
                if failing.len() >= KEPT_MAX && !failing.contains_key(path) {
                    failing.clear();
                }
                let now = Instant::now();
                let since = failing.entry(path.to_owned()).or_insert(now);
                let lasting = Some(now.duration_since(*since)).filter(|time| !time.is_zero());
                Err(Problem { lasting, ..problem })
            }
            other => {
                failing.remove(path);
                other
            }
        }
    }

    /// The cell for an answer to this read.
    fn cell(&self, key: AnswerKey) -> Arc<OnceCell<Part>> {
        let now = Instant::now();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT_MAX {
            kept.retain(|_, (at, _)| now.duration_since(*at) < KEPT_FOR);
        }
        if kept.len() >= KEPT_MAX {
            // All of them are fresh: this answer is not kept.
            return Arc::default();
        }
        let entry = kept.entry(key).or_insert_with(|| (now, Arc::default()));
        if now.duration_since(entry.0) >= KEPT_FOR {
            *entry = (now, Arc::default());
        }
        Arc::clone(&entry.1)
    }

    fn forget_answers(&self) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Calls the API as one user.
#[derive(Clone)]
pub(crate) struct ConsoleApi {
    state: Arc<ConsoleState>,
    user: ConsoleUser,
    /// The first path that was read: what the page is about.
    first: Arc<OnceLock<String>>,
}

impl ConsoleApi {
    pub(crate) fn new(state: Arc<ConsoleState>, user: ConsoleUser) -> Self {
        Self { state, user, first: Arc::default() }
    }

    /// The path below `/api/v1` that was read first, if any.
    pub(crate) fn first_path(&self) -> Option<&str> {
        self.first.get().map(String::as_str)
    }

    /// Reads a path below `/api/v1`.
    pub(crate) async fn get(&self, path: &str) -> Part {
        let _ = self.first.set(path.to_owned());
        let cell = self.state.cell((self.user.role, self.user.view.clone(), path.to_owned()));
        let read = || async { self.call(Method::GET, path, None).await.map(Arc::new) };
        let part = cell.get_or_init(read).await.clone();
        self.state.noted(path, part)
    }

    /// Reads a path below `/api/v1` that answers with text.
    pub(crate) async fn get_text(&self, path: &str) -> Result<String, Problem> {
        let answer = self.answer(Method::GET, path, None).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Changes something below `/api/v1`.
    pub(crate) async fn post(&self, path: &str, body: Value) -> Result<Value, Problem> {
        let changed = self.call(Method::POST, path, Some(body)).await;
        self.state.forget_answers();
        changed
    }

    /// Deletes something below `/api/v1`.
    pub(crate) async fn delete(&self, path: &str) -> Result<Value, Problem> {
        let deleted = self.call(Method::DELETE, path, None).await;
        self.state.forget_answers();
        deleted
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Value, Problem> {
        let answer = self.answer(method, path, body).await?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    }

    async fn answer(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Bytes, Problem> {
        let mut request = Request::builder().method(&method).uri(format!("/api/v1{path}"));
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let wrong = |_| Problem::new(StatusCode::BAD_REQUEST, "invalid", "not a valid address");
        let mut request = request.body(body).map_err(wrong)?;
        *request.extensions_mut() = self.user.forwarded.clone();
        let answering = async {
            // A router never fails.
            let response =
                self.state.api.clone().oneshot(request).await.unwrap_or_else(|no| match no {});
            let status = response.status();
            let read = to_bytes(response.into_body(), ANSWER_BYTES_MAX).await;
            (status, read)
        };
        // A change is never cut off half-way: the API has limits of its own.
        let answered = match method == Method::GET {
            true => timeout(PART_TIMEOUT, answering).await,
            false => Ok(answering.await),
        };
        let Ok((status, read)) = answered else {
            let message = format!("no answer within {} s", PART_TIMEOUT.as_secs());
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message));
        };
        let read = read.map_err(|_| {
            let message = "the answer is too large for a page; use the command line";
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
        })?;
        if status.is_success() {
            return Ok(read);
        }
        let value: Value = serde_json::from_slice(&read).unwrap_or_default();
        let error = &value["error"];
        let code = error["code"].as_str().unwrap_or("unknown");
        let message = error["message"].as_str().unwrap_or("the API returned no message");
        Err(Problem::new(status, code, message))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::extract::Extension;
    use axum::http::Extensions;
    use axum::routing::{get, post};
    use serde_json::json;

    use super::*;

    #[derive(Clone)]
    struct Identity(&'static str);

    /// A client of an API that counts its reads and says who asked.
    fn client(role: ConsoleRole, state: &Arc<ConsoleState>) -> ConsoleApi {
        let mut forwarded = Extensions::new();
        forwarded.insert(Identity(role.as_str()));
        let view = String::new();
        let user =
            ConsoleUser { name: "ann".to_owned(), role, view, has_session: false, forwarded };
        ConsoleApi::new(Arc::clone(state), user)
    }

    fn state() -> (Arc<ConsoleState>, Arc<AtomicUsize>) {
        let reads = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&reads);
        let read = move |Extension(who): Extension<Identity>| async move {
            let number = count.fetch_add(1, Ordering::SeqCst) + 1;
            axum::Json(json!({"who": who.0, "read": number}))
        };
        let missing = || async {
            let error = json!({"error": {"code": "not_found", "message": "no such thing"}});
            (StatusCode::NOT_FOUND, axum::Json(error))
        };
        let never = || async { std::future::pending::<()>().await };
        let api = Router::new()
            .route("/api/v1/read", get(read))
            .route("/api/v1/change", post(|| async { axum::Json(json!({})) }))
            .route("/api/v1/missing", get(missing))
            .route("/api/v1/never", get(never));
        (Arc::new(ConsoleState::new(api)), reads)
    }

    #[tokio::test(start_paused = true)]
    async fn equal_reads_within_a_second_are_one_for_each_role_until_something_changes() {
        let (state, reads) = state();
        let (ann, admin) = (client(ConsoleRole::Read, &state), client(ConsoleRole::Admin, &state));
        assert_eq!(ann.first_path(), None);
        let both = tokio::join!(ann.get("/read"), ann.get("/read"));
        assert_eq!((both.0.unwrap(), reads.load(Ordering::SeqCst)), (both.1.unwrap(), 1));
        assert_eq!(admin.get("/read").await.unwrap()["who"], "admin", "not the answer for `read`");
        assert_eq!(ann.first_path(), Some("/read"));
        assert_eq!(reads.load(Ordering::SeqCst), 2);

        admin.post("/change", json!({})).await.unwrap();
        assert_eq!(ann.get("/read").await.unwrap()["read"], 3, "a change forgets what was read");
        tokio::time::advance(KEPT_FOR).await;
        assert_eq!(ann.get("/read").await.unwrap()["read"], 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_has_its_code_and_a_silent_part_is_unavailable() {
        let (state, _) = state();
        let ann = client(ConsoleRole::Read, &state);
        let missing = ann.get("/missing").await.unwrap_err();
        assert!(missing.is_not_found());
        assert_eq!((&*missing.code, &*missing.message), ("not_found", "no such thing"));
        let first = ann.get("/never").await.unwrap_err();
        assert!(first.is_unavailable() && first.lasting.is_none());
        let second = ann.get("/never").await.unwrap_err();
        assert_eq!(second.lasting, Some(PART_TIMEOUT), "how long it has been failing");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_for_answers_is_bounded() {
        let (state, _) = state();
        let ann = client(ConsoleRole::Read, &state);
        for number in 0..2 * KEPT_MAX {
            ann.get(&format!("/read?{number}")).await.unwrap();
        }
        assert_eq!(state.kept.lock().unwrap().len(), KEPT_MAX);
    }
}
