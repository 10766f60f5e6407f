//! Processing steps of an event, and an observer that is called after each.
//!
//! Upstream: `inbox`, `nudge`, `worker` and `outbox` call [`StepObserver::on_step`] when a step is complete and before
//! the next begins, so a process that dies inside the call dies exactly there. Observers have no effect on processing.
//! For tests.

use std::fmt;

use crate::issue::IssueId;

/// A completed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProcessingStep {
    /// The event is committed; no nudge was sent yet.
    Recorded,
    /// The nudge is in the stream.
    Nudged,
    /// A worker has received the nudge.
    Received,
    /// The issue is claimed; the handler was not called yet.
    Claimed,
    /// The handler has returned; its result is not stored.
    Handled,
    /// The end of the run is committed; the nudge is not acknowledged.
    Completed,
    /// An outbox row is taken, not delivered.
    Taken,
    /// The row is delivered, not settled.
    Delivered,
    /// The delivery is settled.
    Settled,
}

/// Called after every step. For tests that stop a process at a given step.
pub trait StepObserver: fmt::Debug + Send + Sync {
    /// A step is complete for this issue.
    fn on_step(&self, step: ProcessingStep, issue_id: IssueId);
}

/// The default observer, which does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStepObserver;

impl StepObserver for NoStepObserver {
    fn on_step(&self, _: ProcessingStep, _: IssueId) {}
}
