//! Calls the API in this process, with the identity of the caller.
//!
//! Upstream: screens and actions. Downstream: the router of the API. Guarantees: within one second of [`ConsoleSeconds`], equal reads
//! of callers of the same role are one; a change made here forgets all of them. So what a live page shows when a second begins
//! was read in that second. A part that does not answer within [`PART_TIMEOUT`] is reported as unavailable,
//! with the last answer and its age if that is known (`last_answers.rs`). Long work stops at its deadline and says how much is done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};
use tower::ServiceExt;

use crate::last_answers::{AnswerKey, LAST_BYTES_MAX, LastAnswer, LastAnswers};
use crate::user::{ConsoleUser, NotBegun};

/// Maximum number of kept answers.
const KEPT_MAX: usize = 256;

/// Maximum bytes of a kept answer: equal reads at the same time share a larger one, too, but not those after it.
const KEPT_BYTES_MAX: usize = 1024 * 1024;

/// A read that has not failed for so long fails anew.
const FAILING_GAP: Duration = Duration::from_secs(30);

/// Maximum bytes of an answer.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Time for one part of a page.
pub(crate) const PART_TIMEOUT: Duration = Duration::from_secs(8);

/// Seconds since the console was started. Answers are kept until the next one begins, and live pages are rendered when it does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConsoleSeconds {
    start: Instant,
}

impl ConsoleSeconds {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// The number of the current one.
    pub(crate) fn current(self) -> u64 {
        self.start.elapsed().as_secs()
    }

    /// When the next one begins.
    pub(crate) fn next(self) -> Instant {
        self.start + Duration::from_secs(self.current() + 1)
    }
}

/// The answer to a read, shared by all who asked within a second.
pub(crate) type Part = Result<Arc<Value>, Problem>;

/// What a failed call has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailedEffect {
    /// Nothing: it was refused, or it only reads.
    Nothing,
    /// A part of what it should.
    Part,
    /// Not known: the change may have been made although no answer says so.
    Unknown,
}

/// Why a call of the API failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) effect: FailedEffect,
    pub(crate) status: StatusCode,
    pub(crate) code: String,
    pub(crate) message: String,
    /// For how long the same read has failed, if it failed before and the reason is not in the request.
    pub(crate) lasting: Option<Duration>,
    /// The last answer to the same read, if a dependency does not answer.
    pub(crate) last: Option<LastAnswer>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let (code, message, effect) = (code.to_owned(), message.into(), FailedEffect::Nothing);
        Self { effect, status, code, message, lasting: None, last: None }
    }

    /// Of a change that may have been made.
    fn of_unknown_effect(self) -> Self {
        Self { effect: FailedEffect::Unknown, ..self }
    }

    /// After so many were changed by the same action, before it failed. `changed` is a participle.
    pub(crate) fn after(mut self, count: u64, changed: &str) -> Self {
        if count > 0 {
            self.message = format!("{}; {count} were {changed} before", self.message);
            if self.effect == FailedEffect::Nothing {
                self.effect = FailedEffect::Part;
            }
        }
        self
    }

    /// A dependency did not answer; the same call may succeed later.
    pub(crate) fn is_unavailable(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.status == StatusCode::NOT_FOUND
    }

    /// With what may have removed the object, if it is not there.
    pub(crate) fn or_gone(mut self, hint: &str) -> Self {
        if self.is_not_found() {
            self.message = format!("{}; {hint}", self.message);
        }
        self
    }
}

/// What became of long work.
#[derive(Debug, PartialEq)]
pub(crate) enum LongWork {
    /// It has ended, with this result.
    Ended(Value),
    /// Its time was over after so many items. The same call continues it.
    Stopped(u64),
}

/// The answers of one second.
#[derive(Default)]
struct KeptAnswers {
    second: u64,
    answers: HashMap<AnswerKey, Arc<OnceCell<Part>>>,
}

/// State of all routes of the console.
pub(crate) struct ConsoleState {
    api: Router,
    seconds: ConsoleSeconds,
    kept: Mutex<KeptAnswers>,
    /// Since when reads of these paths have failed because of this process or a dependency, and when they failed last.
    failing: Mutex<HashMap<String, (Instant, Instant)>>,
    last: LastAnswers,
}

impl ConsoleState {
    pub(crate) fn new(api: Router, seconds: ConsoleSeconds) -> Self {
        let (kept, failing, last) = Default::default();
        Self { api, seconds, kept, failing, last }
    }

    /// Adds to a failure how long the same read has been failing.
    fn noted(&self, path: &str, part: Part) -> Part {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        match part {
            Err(problem) if problem.status.is_server_error() => {
                if failing.len() >= KEPT_MAX && !failing.contains_key(path) {
                    failing.clear();
                }
                let now = Instant::now();
                let (since, last) = failing.entry(path.to_owned()).or_insert((now, now));
                // Nothing was read in between, so the dependency may have worked meanwhile.
                if now.duration_since(*last) > FAILING_GAP {
                    *since = now;
                }
                *last = now;
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
        let second = self.seconds.current();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.second != second {
            *kept = KeptAnswers { second, answers: HashMap::new() };
        }
        if kept.answers.len() >= KEPT_MAX && !kept.answers.contains_key(&key) {
            // This answer is not kept.
            return Arc::default();
        }
        Arc::clone(kept.answers.entry(key).or_default())
    }

    /// Forgets one answer.
    fn forget(&self, key: &AnswerKey) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).answers.remove(key);
    }

    fn forget_answers(&self) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).answers.clear();
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
        self.get_unnamed(path).await
    }

    /// The same for a path that the page does not name as its request.
    pub(crate) async fn get_unnamed(&self, path: &str) -> Part {
        let cell = self.state.cell(self.key(path));
        let part = cell.get_or_init(|| self.read(path)).await.clone();
        let mut part = self.state.noted(path, part);
        if let Err(problem) = &mut part
            && problem.is_unavailable()
        {
            problem.last = self.state.last.recall(&self.key(path));
        }
        part
    }

    fn key(&self, path: &str) -> AnswerKey {
        (self.user.role, self.user.view.clone(), path.to_owned())
    }

    async fn read(&self, path: &str) -> Part {
        let answer = self.answer(Method::GET, path, None).await?;
        let value: Arc<Value> = Arc::new(serde_json::from_slice(&answer).unwrap_or_default());
        if answer.len() > KEPT_BYTES_MAX {
            self.state.forget(&self.key(path));
        }
        if answer.len() <= LAST_BYTES_MAX {
            self.state.last.remember(self.key(path), Arc::clone(&value));
        }
        Ok(value)
    }

    /// A part of an answer whose parts are of several dependencies: this one if it is there, else the last one with its age.
    pub(crate) fn or_last(
        &self,
        path: &str,
        part: &Value,
    ) -> Option<(Arc<Value>, Option<Duration>)> {
        let key = self.key(path);
        if part.is_null() {
            return self.state.last.recall(&key).map(|(last, age)| (last, Some(age)));
        }
        let part = Arc::new(part.clone());
        self.state.last.remember(key, Arc::clone(&part));
        Some((part, None))
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

    /// Does long work below `/api/v1`, by a route with `progress`: several times a second it says how much is done, and it stops when
    /// its answer is not read any further. It is stopped at the first such line after `deadline`, so something is done in any case.
    pub(crate) async fn post_until(
        &self,
        path: &str,
        mut body: Value,
        deadline: Instant,
    ) -> Result<LongWork, Problem> {
        body["progress"] = true.into();
        let is_change = is_change(&Method::POST, Some(&body));
        let work = self.work_until(path, body, deadline).await;
        self.state.forget_answers();
        match work {
            Err((problem, done)) if is_change => Err(problem.after(done, "done")),
            Err((problem, _)) => Err(Problem { effect: FailedEffect::Nothing, ..problem }),
            Ok(work) => Ok(work),
        }
    }

    async fn work_until(
        &self,
        path: &str,
        body: Value,
        deadline: Instant,
    ) -> Result<LongWork, (Problem, u64)> {
        let response = self.respond(&Method::POST, path, Some(body)).await.map_err(|no| (no, 0))?;
        let status = response.status();
        if !status.is_success() {
            let has_begun = has_begun(&response);
            let read = to_bytes(response.into_body(), ANSWER_BYTES_MAX).await;
            let problem = refusal(status, &read.unwrap_or_default());
            return Err((if has_begun { problem.of_unknown_effect() } else { problem }, 0));
        }
        let (mut chunks, mut rest) = (response.into_body().into_data_stream(), Vec::<u8>::new());
        let (mut done, mut result) = (0, None);
        // Read to its end: only then the audit log has the status.
        while let Some(chunk) = chunks.next().await {
            rest.extend_from_slice(&chunk.unwrap_or_default());
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let line: Value = serde_json::from_slice(&line).unwrap_or_default();
                if line["error"].is_object() {
                    let status = status_of(line["error"]["code"].as_str().unwrap_or_default());
                    let problem = refusal(status, line.to_string().as_bytes());
                    let is_unknown = status.is_server_error();
                    let problem = if is_unknown { problem.of_unknown_effect() } else { problem };
                    result = Some(Err((problem, done)));
                } else if line["end"].is_object() {
                    result = Some(Ok(LongWork::Ended(line["end"].clone())));
                } else {
                    done = line["progress"]["done"].as_u64().unwrap_or(done);
                }
            }
            if result.is_none() && Instant::now() >= deadline {
                return Ok(LongWork::Stopped(done));
            }
        }
        result.unwrap_or_else(|| {
            let message = "the work ended without a result; do it again";
            let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "interrupted", message);
            Err((problem.of_unknown_effect(), done))
        })
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
        let is_change = is_change(&method, body.as_ref());
        let answering = async {
            let response = self.respond(&method, path, body).await?;
            let (status, is_unknown) = (response.status(), is_change && has_begun(&response));
            let read = to_bytes(response.into_body(), ANSWER_BYTES_MAX).await;
            Ok::<_, Problem>((status, is_unknown, read))
        };
        // A change is never cut off half-way: the API has limits of its own.
        let answered = match method == Method::GET {
            true => timeout(PART_TIMEOUT, answering).await,
            false => Ok(answering.await),
        };
        let Ok(answered) = answered else {
            let message = format!("no answer within {} s", PART_TIMEOUT.as_secs());
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message));
        };
        let (status, is_unknown, read) = answered?;
        let read = read.map_err(|_| {
            let message = "the answer is too large for a page; use the command line";
            let problem = Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message);
            if is_change { problem.of_unknown_effect() } else { problem }
        })?;
        match status.is_success() {
            true => Ok(read),
            false if is_unknown => Err(refusal(status, &read).of_unknown_effect()),
            false => Err(refusal(status, &read)),
        }
    }

    /// The answer of the API, whatever its status is.
    async fn respond(
        &self,
        method: &Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Response, Problem> {
        let mut request = Request::builder().method(method).uri(format!("/api/v1{path}"));
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let wrong = |_| Problem::new(StatusCode::BAD_REQUEST, "invalid", "not a valid address");
        let mut request = request.body(body).map_err(wrong)?;
        *request.extensions_mut() = self.user.forwarded.clone();
        // A router never fails.
        Ok(self.state.api.clone().oneshot(request).await.unwrap_or_else(|no| match no {}))
    }
}

/// Whether a call changes something.
fn is_change(method: &Method, body: Option<&Value>) -> bool {
    *method != Method::GET && body.is_none_or(|body| body["dry_run"] != true)
}

/// Whether a change with this response may have been made.
fn has_begun(response: &Response) -> bool {
    response.status().is_server_error() && response.extensions().get::<NotBegun>().is_none()
}

/// The reason in the body of a refused call.
fn refusal(status: StatusCode, body: &[u8]) -> Problem {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &value["error"];
    let code = error["code"].as_str().unwrap_or("unknown");
    let message = error["message"].as_str().unwrap_or("the API returned no message");
    Problem::new(status, code, message)
}

/// The status of a refusal after the answer had begun, which has only a code.
fn status_of(code: &str) -> StatusCode {
    match code {
        "invalid" => StatusCode::BAD_REQUEST,
        "not_found" => StatusCode::NOT_FOUND,
        "conflict" => StatusCode::CONFLICT,
        "unavailable" | "interrupted" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::extract::Extension;
    use axum::http::Extensions;
    use axum::response::IntoResponse;
    use axum::routing::{get, post};
    use futures_util::stream;
    use serde_json::json;

    use super::*;
    use crate::user::ConsoleRole;

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
        let refused = || async { (StatusCode::SERVICE_UNAVAILABLE, Extension(NotBegun)) };
        let count = Arc::clone(&reads);
        let large = move || async move {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(10)).await;
            axum::Json("x".repeat(KEPT_BYTES_MAX))
        };
        let count = Arc::clone(&reads);
        let sometimes = move || async move {
            match count.load(Ordering::SeqCst) {
                usize::MAX => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                _ => axum::Json(json!({"read": "before"})).into_response(),
            }
        };
        // Four lines of progress, 200 ms after each other, then the end; or a refusal.
        let work = |axum::Json(body): axum::Json<Value>| async move {
            let lines = stream::unfold(0, move |count: u64| {
                let fails = body["fails"] == true && body["progress"] == true;
                async move {
                    let line = match count {
                        0..4 => {
                            tokio::time::sleep(Duration::from_millis(200)).await;
                            json!({"progress": {"done": 10 * (count + 1)}})
                        }
                        4 if fails => {
                            json!({"error": {"code": "not_found", "message": "no such letter"}})
                        }
                        4 => json!({"end": {"purged": 45}}),
                        _ => return None,
                    };
                    Some((Ok::<_, std::convert::Infallible>(format!("{line}\n")), count + 1))
                }
            });
            Body::from_stream(lines).into_response()
        };
        let api = Router::new()
            .route("/api/v1/read", get(read))
            .route("/api/v1/change", post(|| async { axum::Json(json!({})) }))
            .route("/api/v1/missing", get(missing))
            .route("/api/v1/sometimes", get(sometimes))
            .route("/api/v1/never", get(never))
            .route("/api/v1/large", get(large))
            .route("/api/v1/broken", post(|| async { StatusCode::SERVICE_UNAVAILABLE }))
            .route("/api/v1/refused", post(refused))
            .route("/api/v1/work", post(work));
        (Arc::new(ConsoleState::new(api, ConsoleSeconds::start())), reads)
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
        tokio::time::advance(Duration::from_millis(999)).await;
        assert_eq!(ann.get("/read").await.unwrap()["read"], 3);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(ann.get("/read").await.unwrap()["read"], 4, "the next second has begun");
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
        assert_eq!(second.last, None, "it was never answered");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_after_a_pause_is_a_new_one() {
        let (state, reads) = state();
        let ann = client(ConsoleRole::Read, &state);
        reads.store(usize::MAX, Ordering::SeqCst);
        let lasting = async || ann.get("/sometimes").await.unwrap_err().lasting;
        assert_eq!(lasting().await, None);
        tokio::time::advance(FAILING_GAP).await;
        assert_eq!(lasting().await, Some(FAILING_GAP));
        tokio::time::advance(Duration::from_secs(3 * 3600)).await;
        assert_eq!(lasting().await, None, "nothing was read for three hours");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(lasting().await, Some(Duration::from_secs(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_change_says_whether_it_may_have_been_made() {
        let (state, reads) = state();
        let ann = client(ConsoleRole::Write, &state);
        let effect = async |path: &str, body: Value| ann.post(path, body).await.unwrap_err().effect;
        assert_eq!(effect("/broken", json!({})).await, FailedEffect::Unknown);
        assert_eq!(effect("/broken", json!({"dry_run": true})).await, FailedEffect::Nothing);
        assert_eq!(effect("/refused", json!({})).await, FailedEffect::Nothing, "it has not begun");
        assert_eq!(effect("/read", json!({})).await, FailedEffect::Nothing, "refused: 405");
        reads.store(usize::MAX, Ordering::SeqCst);
        let read = ann.get("/sometimes").await.unwrap_err();
        assert_eq!(read.effect, FailedEffect::Nothing);
        assert_eq!(read.clone().after(0, "purged"), read);
        let after = read.after(3, "purged");
        assert_eq!(after.effect, FailedEffect::Part);
        assert!(after.message.ends_with("; 3 were purged before"), "{}", after.message);
        // Long work that is refused after it has begun, and its dry run.
        let deadline = Instant::now() + Duration::from_secs(60);
        for (body, effect) in [
            (json!({"fails": true}), FailedEffect::Part),
            (json!({"fails": true, "dry_run": true}), FailedEffect::Nothing),
        ] {
            let failed = ann.post_until("/work", body, deadline).await.unwrap_err();
            assert_eq!(failed.effect, effect, "{}", failed.message);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_answer_is_shared_by_those_who_wait_for_it_and_not_kept() {
        let (state, reads) = state();
        let ann = client(ConsoleRole::Read, &state);
        let both = tokio::join!(ann.get("/large"), ann.get("/large"));
        assert_eq!((both.0.is_ok(), both.1.is_ok(), reads.load(Ordering::SeqCst)), (true, true, 1));
        assert_eq!(state.kept.lock().unwrap().answers.len(), 0);
        ann.get("/large").await.unwrap();
        assert_eq!(reads.load(Ordering::SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn long_work_stops_at_its_deadline_and_says_how_much_is_done() {
        let (state, _) = state();
        let ann = client(ConsoleRole::Admin, &state);
        let after = |ms| Instant::now() + Duration::from_millis(ms);
        let work = |body, ms| ann.post_until("/work", body, after(ms));
        let ended = work(json!({}), 60_000).await;
        assert_eq!(ended, Ok(LongWork::Ended(json!({"purged": 45}))));
        assert_eq!(work(json!({}), 500).await, Ok(LongWork::Stopped(30)), "at 600 ms");
        assert_eq!(work(json!({}), 0).await, Ok(LongWork::Stopped(10)), "something is done");
        let failed = work(json!({"fails": true}), 60_000).await.unwrap_err();
        assert!(failed.is_not_found());
        let message = "no such letter; 40 were done before";
        assert_eq!((&*failed.code, &*failed.message), ("not_found", message));
        let missing = ann.post_until("/missing", json!({}), after(0)).await.unwrap_err();
        assert_eq!(missing.status, StatusCode::METHOD_NOT_ALLOWED, "refused before it begins");
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_does_not_answer_has_the_last_answer_with_its_age() {
        let (state, reads) = state();
        let (ann, admin) = (client(ConsoleRole::Read, &state), client(ConsoleRole::Admin, &state));
        ann.get("/sometimes").await.unwrap();
        reads.store(usize::MAX, Ordering::SeqCst);
        tokio::time::advance(Duration::from_secs(14)).await;
        let problem = ann.get("/sometimes").await.unwrap_err();
        let (last, age) = problem.last.unwrap();
        assert_eq!((&last["read"], age), (&json!("before"), Duration::from_secs(14)));
        assert_eq!(admin.get("/sometimes").await.unwrap_err().last, None, "another role");
        assert_eq!(ann.get("/missing").await.unwrap_err().last, None, "not unavailable");

        // Of an answer with several parts.
        assert_eq!(ann.or_last("/overview#topics", &Value::Null), None);
        let part = json!({"lag": 3});
        assert_eq!(ann.or_last("/overview#topics", &part), Some((Arc::new(part.clone()), None)));
        tokio::time::advance(Duration::from_secs(20)).await;
        let last = Some((Arc::new(part), Some(Duration::from_secs(20))));
        assert_eq!(ann.or_last("/overview#topics", &Value::Null), last);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_for_answers_is_bounded() {
        let (state, _) = state();
        let ann = client(ConsoleRole::Read, &state);
        for number in 0..2 * KEPT_MAX {
            ann.get(&format!("/read?{number}")).await.unwrap();
        }
        assert_eq!(state.kept.lock().unwrap().answers.len(), KEPT_MAX);
    }
}
