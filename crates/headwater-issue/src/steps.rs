//! The steps of an event's way through this crate, named, and a way to be told of each.
//!
//! Upstream: `inbox`, `nudge`, `worker` and `outbox` call [`Steps::taken`] after each step. Promises: it is called when
//! the step is complete and before the next begins, so a process that dies inside the call dies exactly there.
//! Not here: any effect on the work. In production nobody listens.

use std::fmt;

use crate::issue::IssueId;

/// What was done just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// The event is committed, nobody was nudged yet.
    Recorded,
    /// The nudge is in the stream.
    Nudged,
    /// A worker has the nudge in hand.
    Received,
    /// The issue is claimed, no handler was called yet.
    Claimed,
    /// The handler has returned, nothing of its result is stored.
    Handled,
    /// The end of the run is committed, the nudge is not acknowledged.
    Completed,
    /// A row of the outbox is in hand, not delivered.
    Taken,
    /// It is delivered, and the outbox does not know.
    Delivered,
    /// The outbox knows that it is delivered.
    Settled,
}

/// Is told of every step. For tests that stop a process at a certain one.
pub trait Steps: fmt::Debug + Send + Sync {
    /// A step was taken for this issue.
    fn taken(&self, step: Step, issue_id: IssueId);
}

/// Nobody listens.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSteps;

impl Steps for NoSteps {
    fn taken(&self, _: Step, _: IssueId) {}
}
