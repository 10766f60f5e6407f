//! The handler: your code, or a language model, that answers all pending events of one issue in one run.
//!
//! Upstream: `worker` calls it. Promises: a handler sees every unprocessed event log of its issue up to a limit, and
//! never runs twice at once for one issue in effect: what a run that lost its claim returns is thrown away. No database
//! transaction is open while it runs.
//! Not here: sending. A handler returns what is to be sent, and `outbox` sends it after the commit.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::claim::ClaimedIssue;
use crate::delivery::{NewOutbox, OutboxKind};
use crate::error::IssueError;
use crate::held::ClaimWatch;
use crate::issue::{ClaimEpoch, EventLog, EventLogId, Issue};
use crate::limits::{DELAY_MAX, PUT_OFF_MIN};

/// Handles issues. Any `Fn(Run) -> impl Future<Output = Result<Resolution, HandlerError>>` is one.
#[async_trait]
pub trait IssueHandler: Send + Sync + 'static {
    /// Answers the events of one run. It is dropped at its next await when the claim is lost, when the deadline has
    /// passed, or when newer events supersede it; a panic counts as a failure.
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

/// One run of a handler: the issue, its pending events, and how things stand meanwhile. Clones are the same run.
#[derive(Clone, Debug)]
pub struct Run {
    pub(crate) claimed: Arc<ClaimedIssue>,
    pub(crate) claim: ClaimWatch,
    pub(crate) deadline: Instant,
}

impl Run {
    /// The issue as it was claimed.
    pub fn issue(&self) -> &Issue {
        &self.claimed.issue
    }

    /// Its unprocessed event logs, oldest first. If there are more than the limit, the rest comes with the next run.
    pub fn events(&self) -> &[EventLog] {
        &self.claimed.events
    }

    /// The newest event log that the issue had when its last run was completed; `None` if no run was.
    pub fn completed_event_log_id(&self) -> Option<EventLogId> {
        self.claimed.completed_event_log_id
    }

    /// Which try this is, from 1; runs whose worker died count, too.
    pub fn attempt(&self) -> u32 {
        let issue = &self.claimed.issue;
        issue.attempts.saturating_add(issue.crashes).saturating_add(1)
    }

    /// The claim: grows with every run of this issue, so it can fence effects of your own.
    pub fn epoch(&self) -> ClaimEpoch {
        self.claimed.epoch
    }

    /// How much time is left before the run is a failure.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Whether the claim is lost or given up: nothing of this run will be stored. Stop as soon as you can.
    pub fn is_cancelled(&self) -> bool {
        !self.claim.is_held()
    }

    /// Returns when the claim is lost or given up, for tasks that the handler has spawned. Cancel-safe.
    pub async fn cancelled(&self) {
        self.claim.ended().await;
    }

    /// Whether events have arrived since this run began. They come with the next run.
    pub fn has_newer_events(&self) -> bool {
        self.claim.has_newer()
    }

    /// Returns when events have arrived since this run began; never, if the run ends before. Cancel-safe.
    pub async fn newer_events(&self) {
        self.claim.newer().await;
    }

    /// Asks the database now whether the claim is still held, and lets it live on. The worker does this all the time;
    /// ask before an effect in the outside world that must not happen twice.
    pub async fn heartbeat(&self) -> crate::Result<()> {
        self.claim.heartbeat().await
    }
}

/// What a run came to. Everything in it is committed together with the end of the claim, or nothing.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Resolution {
    /// Replies and events, delivered in this order.
    pub outbox: Vec<NewOutbox>,
    /// A JSON object whose members replace those of the issue's fields; `null` removes one.
    pub fields: Option<String>,
    /// JSON that replaces the issue's discussions.
    pub discussions: Option<String>,
}

impl Resolution {
    /// Nothing to say.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an answer for the provider, in JSON.
    pub fn reply(mut self, payload: impl Into<String>) -> Self {
        let payload = payload.into();
        self.outbox.push(NewOutbox { kind: OutboxKind::Reply, target: String::new(), payload });
        self
    }

    /// Adds a fact for the bus: its type, and JSON.
    pub fn event(mut self, event_type: impl Into<String>, payload: impl Into<String>) -> Self {
        let (target, payload) = (event_type.into(), payload.into());
        self.outbox.push(NewOutbox { kind: OutboxKind::Event, target, payload });
        self
    }

    /// Changes fields of the issue: a JSON object.
    pub fn fields(mut self, fields: impl Into<String>) -> Self {
        self.fields = Some(fields.into());
        self
    }

    /// Replaces the discussions of the issue: JSON.
    pub fn discussions(mut self, discussions: impl Into<String>) -> Self {
        self.discussions = Some(discussions.into());
        self
    }
}

/// Why a run failed, and what to do next. Any error becomes one with `?`, and is tried again; an [`IssueError`] because
/// the database was unavailable is not the issue's fault, and counts no attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerError {
    pub(crate) reason: String,
    pub(crate) then: Then,
}

/// Over how long those come back who were put off until the same moment; over a tenth of the wait, if that is less.
pub(crate) const PUT_OFF_SPREAD_MAX: Duration = Duration::from_secs(60);

/// The longest wait after a failure of something of our own.
const UNAVAILABLE_PAUSE_MAX: Duration = Duration::from_secs(60);

/// What to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Try again when the retry policy says.
    Retry,
    /// Try again after this time.
    RetryAfter(Duration),
    /// Try again after about this time, without counting this one.
    PutOff(Duration),
    /// Try again later, without counting this one; the longer the events wait, the later.
    Unavailable,
    /// Leave it to an operator.
    Quarantine,
}

impl HandlerError {
    /// Tries again when the retry policy says.
    pub fn retry(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), then: Then::Retry }
    }

    /// Tries again after this time, or later: a year is the longest.
    pub fn retry_after(after: Duration, reason: impl fmt::Display) -> Self {
        let after = after.min(DELAY_MAX);
        Self { reason: reason.to_string(), then: Then::RetryAfter(after) }
    }

    /// Tries again after about this time: a little later, so that not all who wait come back at once. No attempt is counted,
    /// however often it happens. For what is not to be had now, whichever issue asks, such as a budget that is spent.
    /// [`PUT_OFF_MIN`] is the shortest, a year the longest.
    pub fn put_off(after: Duration, reason: impl fmt::Display) -> Self {
        let after = after.clamp(PUT_OFF_MIN, DELAY_MAX - PUT_OFF_SPREAD_MAX);
        Self { reason: reason.to_string(), then: Then::PutOff(after) }
    }

    /// Something of our own is unavailable, such as a database, whichever issue asks for it. Tries again later, as after
    /// [`put_off`](Self::put_off): a second later at first, and at most a minute later while that lasts.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), then: Then::Unavailable }
    }

    /// Trying again is of no use: the issue is quarantined now.
    pub fn quarantine(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), then: Then::Quarantine }
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
            // Some errors tell their cause themselves.
            if !reason.contains(&text) {
                reason = format!("{reason}: {text}");
            }
            source = cause.source();
        }
        if is_unavailable { Self::unavailable(reason) } else { Self::retry(reason) }
    }
}

/// How long a run is deferred when something of our own was unavailable, by how long its oldest event has waited: a tenth
/// of that. Bounded both ways, so a clock that steps does no harm.
pub(crate) fn unavailable_pause(waited: Duration) -> Duration {
    (waited / 10).clamp(PUT_OFF_MIN, UNAVAILABLE_PAUSE_MAX)
}

/// What a handler or a deliverer said when it panicked.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Told(&'static str, #[source] Option<std::io::Error>);

    #[test]
    fn an_error_becomes_a_reason_with_each_of_its_causes_once() {
        let cause = || Some(std::io::Error::other("no route"));
        assert_eq!(HandlerError::from(Told("no model", cause())).reason, "no model: no route");
        let told = Told("no model: no route", cause());
        assert_eq!(HandlerError::from(told).reason, "no model: no route");
    }

    #[test]
    fn a_database_that_is_unavailable_counts_no_attempt_and_is_asked_less_often_the_longer_it_lasts()
     {
        let unavailable = IssueError::Unavailable { problem: "no answer".into(), source: None };
        assert_eq!(HandlerError::from(unavailable).then, Then::Unavailable);
        let invalid = IssueError::invalid("fields", "too long");
        assert_eq!(HandlerError::from(invalid).then, Then::Retry);
        let pause = |seconds| unavailable_pause(Duration::from_secs(seconds)).as_secs();
        assert_eq!([0, 5, 100, 1_000_000].map(pause), [1, 1, 10, 60]);
    }

    #[test]
    fn whoever_is_put_off_waits_for_a_second_at_least_and_a_year_at_most() {
        let put_off = |after| HandlerError::put_off(after, "no budget").then;
        assert_eq!(put_off(Duration::ZERO), Then::PutOff(PUT_OFF_MIN));
        assert_eq!(put_off(Duration::MAX), Then::PutOff(DELAY_MAX - PUT_OFF_SPREAD_MAX));
        let hour = Duration::from_secs(3600);
        assert_eq!(put_off(hour), Then::PutOff(hour));
    }
}
