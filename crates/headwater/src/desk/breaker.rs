//! Circuit breaker of one model endpoint or tool: while it fails, only single calls test whether it works again.
//!
//! Upstream: `handler` and `tool_calls` ask before each call and report its result. No I/O; the state is that of one process.
//! Guarantees: the breaker opens after a few failed calls without a success in between. An issue whose own text makes
//! every call fail delays no other issue: until several issues have failed, each further issue may try. While open, one
//! call at a time tests the endpoint, after a pause that doubles up to a limit. A test call that is dropped lets the
//! next caller test.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use headwater_issue::IssueId;
use metrics::gauge;
use tracing::{error, info, warn};

use crate::desk::model::{Fault, ModelError};

/// Gauge: 1 while a model endpoint is called, 0 while its breaker is open. Label: `model`.
const MODEL_AVAILABLE: &str = "headwater_model_available";

/// Consecutive failures that open the breaker, and the number of different issues after which no further one may try.
const FAILURES_MAX: u32 = 3;

/// Longest pause between two tests of a failing endpoint.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Pause before the first test of a failing tool.
const TOOL_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct CircuitBreaker {
    target: BreakerTarget,
    /// Name of the target, for the log.
    name: String,
    pause_min: Duration,
    state: Mutex<CircuitState>,
}

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerTarget {
    Model,
    Tool,
}

/// Calls since the last success.
#[derive(Debug, Default)]
struct CircuitState {
    failures: u32,
    /// Different issues of failed calls, at most [`FAILURES_MAX`].
    issues: Vec<IssueId>,
    /// The next test is due.
    test_at: Option<Instant>,
    is_testing: bool,
    last_error: String,
}

/// Why a call is not made.
#[derive(Debug, PartialEq, Eq, Default)]
pub(crate) struct BreakerOpen {
    /// When to ask again.
    pub(crate) after: Duration,
    /// The last error of the endpoint.
    pub(crate) last_error: String,
}

/// Permission for one call. Report its result; if it is dropped before, nothing is counted.
#[derive(Debug)]
pub(crate) struct CallPermit<'a> {
    breaker: &'a CircuitBreaker,
    issue_id: IssueId,
    is_test: bool,
    /// Whether the endpoint was known to fail before the call.
    pub(crate) was_failing: bool,
}

impl CircuitBreaker {
    /// `pause_min` is the pause before the first test.
    pub(crate) fn of_model(name: &str, pause_min: Duration) -> Self {
        gauge!(MODEL_AVAILABLE, "model" => name.to_owned()).set(1.0);
        Self::new(BreakerTarget::Model, name, pause_min)
    }

    pub(crate) fn of_tool(name: &str) -> Self {
        Self::new(BreakerTarget::Tool, name, TOOL_PAUSE)
    }

    fn new(target: BreakerTarget, name: &str, pause_min: Duration) -> Self {
        let pause_min = pause_min.min(PAUSE_MAX);
        Self { target, name: name.to_owned(), pause_min, state: Mutex::default() }
    }

    /// Asks for a call for an issue.
    pub(crate) fn admit(
        &self,
        issue_id: IssueId,
        now: Instant,
    ) -> Result<CallPermit<'_>, BreakerOpen> {
        let mut state = self.state();
        let was_failing = state.failures >= FAILURES_MAX;
        let is_untried =
            state.issues.len() < FAILURES_MAX as usize && !state.issues.contains(&issue_id);
        let is_test = was_failing && !is_untried;
        if is_test {
            let wait = state.test_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
            if state.is_testing || !wait.is_zero() {
                let last_error = state.last_error.clone();
                return Err(BreakerOpen { after: wait.max(self.pause_min), last_error });
            }
            state.is_testing = true;
        }
        Ok(CallPermit { breaker: self, issue_id, is_test, was_failing })
    }

    /// Whether the endpoint is known to fail.
    pub(crate) fn is_open(&self) -> bool {
        self.state().failures >= FAILURES_MAX
    }

    fn state(&self) -> MutexGuard<'_, CircuitState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }

    fn failed(&self, issue_id: IssueId, error: &str, kind: CallFailure, now: Instant) {
        let mut state = self.state();
        let was_failing = state.failures >= FAILURES_MAX;
        let at_least = if kind == CallFailure::Denied { FAILURES_MAX } else { 1 };
        state.failures = state.failures.saturating_add(1).max(at_least);
        if state.issues.len() < FAILURES_MAX as usize && !state.issues.contains(&issue_id) {
            state.issues.push(issue_id);
        }
        error.clone_into(&mut state.last_error);
        if state.failures < FAILURES_MAX {
            return;
        }
        let doublings = (state.failures - FAILURES_MAX).min(16);
        let pause = self.pause_min.saturating_mul(1 << doublings).min(PAUSE_MAX);
        state.test_at = Some(now + pause);
        let name = &self.name;
        if self.target == BreakerTarget::Model {
            gauge!(MODEL_AVAILABLE, "model" => name.clone()).set(0.0);
        }
        match (self.target, kind) {
            _ if was_failing => {}
            (BreakerTarget::Tool, _) => {
                warn!(
                    tool = name,
                    error, "tool calls stopped: the tool fails; they continue when it works again"
                );
            }
            (BreakerTarget::Model, CallFailure::Theirs) => {
                warn!(
                    model = name,
                    error,
                    "model calls stopped: the service fails; they continue when it works again"
                );
            }
            (BreakerTarget::Model, CallFailure::Ours | CallFailure::Denied) => {
                error!(
                    model = name,
                    error,
                    "model calls stopped: the service refuses our requests; fix the settings, then they continue by themselves"
                );
            }
        }
    }

    fn succeeded(&self) {
        let before = std::mem::take(&mut *self.state());
        if before.failures < FAILURES_MAX {
            return;
        }
        match self.target {
            BreakerTarget::Model => {
                gauge!(MODEL_AVAILABLE, "model" => self.name.clone()).set(1.0);
                info!(model = self.name, failures = before.failures, "model works again");
            }
            BreakerTarget::Tool => {
                info!(tool = self.name, failures = before.failures, "tool works again");
            }
        }
    }
}

/// Whose fault a failed call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallFailure {
    Theirs,
    Ours,
    /// A wrong key or address fails every call: one failure is enough.
    Denied,
}

impl CallPermit<'_> {
    /// The endpoint processed the request.
    pub(crate) fn succeeded(self) {
        self.breaker.succeeded();
    }

    /// The call failed, and not because of its content.
    pub(crate) fn failed(self, error: &ModelError, now: Instant) {
        let kind = match error {
            ModelError::Unauthorized(_) => CallFailure::Denied,
            error if error.fault() == Fault::Ours => CallFailure::Ours,
            _ => CallFailure::Theirs,
        };
        self.breaker.failed(self.issue_id, &error.to_string(), kind, now);
    }

    /// A tool did not respond, or gave no outcome.
    pub(crate) fn tool_failed(self, problem: &str, now: Instant) {
        self.breaker.failed(self.issue_id, problem, CallFailure::Theirs, now);
    }
}

impl Drop for CallPermit<'_> {
    fn drop(&mut self) {
        if self.is_test {
            self.breaker.state().is_testing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(5);

    fn fail(breaker: &CircuitBreaker, issue: i64, error: &ModelError, now: Instant) {
        breaker.admit(IssueId(issue), now).unwrap().failed(error, now);
    }

    fn unavailable() -> ModelError {
        ModelError::Unavailable("500".into())
    }

    #[test]
    fn after_three_failures_one_call_at_a_time_tests_the_endpoint_with_growing_pauses() {
        let (breaker, mut now) = (CircuitBreaker::of_model("m", PAUSE), Instant::now());
        for issue in 1..=3 {
            fail(&breaker, issue, &unavailable(), now);
        }
        for pause in [5, 10, 20, 40, 60, 60] {
            let refused = breaker.admit(IssueId(9), now).unwrap_err();
            assert_eq!(refused.after, Duration::from_secs(pause));
            assert!(refused.last_error.contains("500"));
            now += Duration::from_secs(pause);
            let test = breaker.admit(IssueId(9), now).unwrap();
            assert!(test.was_failing);
            assert_eq!(breaker.admit(IssueId(8), now).unwrap_err().after, PAUSE, "one test");
            test.failed(&unavailable(), now);
        }
        now += PAUSE_MAX;
        // A dropped test, as of a superseded run, makes room for the next.
        drop(breaker.admit(IssueId(9), now).unwrap());
        breaker.admit(IssueId(8), now).unwrap().succeeded();
        assert!(!breaker.admit(IssueId(1), now).unwrap().was_failing);
    }

    #[test]
    fn an_issue_that_always_fails_stops_no_other_issue() {
        let (breaker, now) = (CircuitBreaker::of_model("m", PAUSE), Instant::now());
        for _ in 0..3 {
            fail(&breaker, 1, &unavailable(), now);
        }
        assert!(breaker.admit(IssueId(1), now).is_err());
        breaker.admit(IssueId(2), now).unwrap().succeeded();
        assert!(breaker.admit(IssueId(1), now).is_ok());
    }

    #[test]
    fn a_denied_key_opens_the_breaker_at_once() {
        let (breaker, now) = (CircuitBreaker::of_model("m", PAUSE), Instant::now());
        fail(&breaker, 1, &ModelError::Unauthorized("401".into()), now);
        assert!(breaker.admit(IssueId(1), now).is_err());
    }
}
