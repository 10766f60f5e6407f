//! The handler of issues: user code that processes all pending events of one issue in one run.
//!
//! Upstream: `worker` calls it. Guarantees: a run contains the unprocessed event logs of its issue, up to a limit. The
//! result of a run that lost its claim is discarded. No database transaction is open while a handler runs. Not here:
//! delivery. A handler returns outbox rows, and `outbox` delivers them after the commit.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::claim::{AfterFailure, ClaimedIssue};
use crate::claim_registry::ClaimHandle;
use crate::error::IssueError;
use crate::issue::{ClaimEpoch, EventLog, EventLogId, Issue};
use crate::limits::{DEFER_MIN, DELAY_MAX};
use crate::outbox::types::{NewOutboxRow, OutboxKind};

/// Handles runs of issues. Any `Fn(Run) -> impl Future<Output = Result<Resolution, HandlerError>>` implements it.
#[async_trait]
pub trait IssueHandler: Send + Sync + 'static {
    /// Processes the events of one run. The future is dropped when the claim is lost, when the deadline has passed,
    /// when newer events supersede the run, or at shutdown. A panic counts as a failure.
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError>;
}

#[async_trait]
impl<F, Handling> IssueHandler for F
where
    F: Fn(Run) -> Handling + Send + Sync + 'static,
    Handling: Future<Output = Result<Resolution, HandlerError>> + Send,
{
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        self(run).await
    }
}

/// One run of a handler: the issue, its pending events, and the state of its claim. Clones share the run.
#[derive(Clone, Debug)]
pub struct Run {
    pub(crate) claimed: Arc<ClaimedIssue>,
    pub(crate) claim: ClaimHandle,
    pub(crate) deadline: Instant,
}

impl Run {
    /// The issue as it was claimed.
    pub fn issue(&self) -> &Issue {
        &self.claimed.issue
    }

    /// Unprocessed event logs, oldest first. Events above the limit are in the next run.
    pub fn events(&self) -> &[EventLog] {
        &self.claimed.events
    }

    /// Newest event log of the issue when its last run was completed; `None` before the first completion. Event logs of
    /// this run up to it arrived during that run, so a reply to them may be stale.
    pub fn completed_event_log_id(&self) -> Option<EventLogId> {
        self.claimed.completed_event_log_id
    }

    /// Number of this attempt, from 1; runs whose worker crashed count.
    pub fn attempt(&self) -> u32 {
        let issue = &self.claimed.issue;
        issue.attempts.saturating_add(issue.crashes).saturating_add(1)
    }

    /// Epoch of the claim. It increases with every run of the issue: use it as a fencing token for your own effects.
    pub fn epoch(&self) -> ClaimEpoch {
        self.claimed.epoch
    }

    /// Time left until the deadline.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Whether the claim is lost or released: the result of this run will not be stored.
    pub fn is_cancelled(&self) -> bool {
        !self.claim.is_held()
    }

    /// Completes when the claim is lost or released; for tasks spawned by the handler. Cancel-safe.
    pub async fn cancelled(&self) {
        self.claim.ended().await;
    }

    /// Whether events arrived after this run started. They are in the next run.
    pub fn has_newer_events(&self) -> bool {
        self.claim.has_newer_events()
    }

    /// Completes when events have arrived after this run started; never, if the run ends first. Cancel-safe.
    pub async fn newer_events(&self) {
        self.claim.newer_events().await;
    }

    /// Renews the claim now, or fails with `Fenced` if it is lost. The worker renews in the background; call this right
    /// before an external effect that must not happen twice.
    pub async fn heartbeat(&self) -> crate::Result<()> {
        self.claim.heartbeat().await
    }
}

/// Result of a run. It is committed in one transaction with the end of the claim.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Resolution {
    /// Replies and events in delivery order.
    pub outbox: Vec<NewOutboxRow>,
    /// JSON object merged into the issue's fields; `null` removes a field.
    pub fields: Option<String>,
    /// JSON that replaces the issue's discussions.
    pub discussions: Option<String>,
}

impl Resolution {
    /// An empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a reply to the provider, as JSON.
    pub fn reply(mut self, payload: impl Into<String>) -> Self {
        let payload = payload.into();
        self.outbox.push(NewOutboxRow { kind: OutboxKind::Reply, target: String::new(), payload });
        self
    }

    /// Adds an event for the bus: its type, and its payload as JSON.
    pub fn event(mut self, event_type: impl Into<String>, payload: impl Into<String>) -> Self {
        let (target, payload) = (event_type.into(), payload.into());
        self.outbox.push(NewOutboxRow { kind: OutboxKind::Event, target, payload });
        self
    }

    /// Merges a JSON object into the fields of the issue.
    pub fn fields(mut self, fields: impl Into<String>) -> Self {
        self.fields = Some(fields.into());
        self
    }

    /// Replaces the discussions of the issue by this JSON.
    pub fn discussions(mut self, discussions: impl Into<String>) -> Self {
        self.discussions = Some(discussions.into());
        self
    }
}

/// Why a run failed, and what to do next. `?` converts any error into a retry; an [`IssueError`] of an unavailable
/// database becomes [`unavailable`](Self::unavailable), which counts no attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerError {
    pub(crate) reason: String,
    pub(crate) then: FailureAction,
}

/// Maximum jitter of a deferred run; at most a tenth of its delay.
const DEFER_JITTER_MAX: Duration = Duration::from_secs(60);

/// Defers a run, with jitter, so that runs deferred until the same time do not resume at once.
pub(crate) fn defer_with_jitter(after: Duration) -> AfterFailure {
    let spread = (after / 10).min(DEFER_JITTER_MAX);
    AfterFailure::Defer { after: after + spread.mul_f64(fastrand::f64()) }
}

/// Maximum delay after [`HandlerError::unavailable`].
const UNAVAILABLE_DELAY_MAX: Duration = Duration::from_secs(60);

/// Action requested by a handler after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureAction {
    /// Retry after the backoff of the retry policy.
    Retry,
    /// Retry after this delay.
    RetryAfter(Duration),
    /// Retry after about this delay, without counting an attempt.
    Defer(Duration),
    /// Retry without counting an attempt; the delay grows with the time the events have waited.
    Unavailable,
    /// Quarantine the issue.
    Quarantine,
}

impl HandlerError {
    /// Retries after the backoff of the retry policy.
    pub fn retry(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), then: FailureAction::Retry }
    }

    /// Retries after this delay; at most a year.
    pub fn retry_after(after: Duration, reason: impl fmt::Display) -> Self {
        let after = after.min(DELAY_MAX);
        Self { reason: reason.to_string(), then: FailureAction::RetryAfter(after) }
    }

    /// Retries after this delay plus jitter, without counting an attempt, however often. For a resource that every run
    /// needs, such as an exhausted budget. At least [`DEFER_MIN`], at most a year.
    pub fn defer(after: Duration, reason: impl fmt::Display) -> Self {
        let after = after.clamp(DEFER_MIN, DELAY_MAX - DEFER_JITTER_MAX);
        Self { reason: reason.to_string(), then: FailureAction::Defer(after) }
    }

    /// Retries without counting an attempt because a service that every run needs is unavailable, such as a database.
    /// Like [`defer`](Self::defer), with a delay of a tenth of the time the events have waited: 1 s to 60 s.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), then: FailureAction::Unavailable }
    }

    /// Quarantines the issue: a retry cannot succeed.
    pub fn quarantine(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), then: FailureAction::Quarantine }
    }
}

impl<E: std::error::Error + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        let ours = (&error as &dyn std::error::Error).downcast_ref::<IssueError>();
        let is_unavailable = ours.is_some_and(IssueError::is_transient);
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Some errors include their source in their own text.
            if !reason.contains(&text) {
                reason = format!("{reason}: {text}");
            }
            source = cause.source();
        }
        if is_unavailable { Self::unavailable(reason) } else { Self::retry(reason) }
    }
}

/// Delay after `unavailable`: a tenth of the time the oldest event has waited. Bounded, so that a clock step has no
/// effect.
pub(crate) fn unavailable_delay(waited: Duration) -> Duration {
    (waited / 10).clamp(DEFER_MIN, UNAVAILABLE_DELAY_MAX)
}

/// The text of a panic of a handler or a deliverer.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct TestError(&'static str, #[source] Option<std::io::Error>);

    #[test]
    fn an_error_is_converted_to_a_reason_that_names_each_source_once() {
        let cause = || Some(std::io::Error::other("no route"));
        assert_eq!(HandlerError::from(TestError("no model", cause())).reason, "no model: no route");
        let error = TestError("no model: no route", cause());
        assert_eq!(HandlerError::from(error).reason, "no model: no route");
    }

    #[test]
    fn an_unavailable_database_counts_no_attempt_and_the_delay_grows() {
        let unavailable = IssueError::Unavailable { problem: "no answer".into(), source: None };
        assert_eq!(HandlerError::from(unavailable).then, FailureAction::Unavailable);
        let invalid = IssueError::invalid("fields", "too long");
        assert_eq!(HandlerError::from(invalid).then, FailureAction::Retry);
        let pause = |seconds| unavailable_delay(Duration::from_secs(seconds)).as_secs();
        assert_eq!([0, 5, 100, 1_000_000].map(pause), [1, 1, 10, 60]);
    }

    #[test]
    fn a_deferred_run_waits_for_at_least_a_second_and_at_most_a_year() {
        let defer = |after| HandlerError::defer(after, "no budget").then;
        assert_eq!(defer(Duration::ZERO), FailureAction::Defer(DEFER_MIN));
        assert_eq!(defer(Duration::MAX), FailureAction::Defer(DELAY_MAX - DEFER_JITTER_MAX));
        let hour = Duration::from_secs(3600);
        assert_eq!(defer(hour), FailureAction::Defer(hour));
    }
}
