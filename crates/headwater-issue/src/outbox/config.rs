//! Configuration of the outbox.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{IssueError, Result};
use crate::limits::CONCURRENT_DELIVERIES_MAX;
use crate::retry_policy::IssueRetryPolicy;
use crate::step_observer::{NoStepObserver, StepObserver};
use crate::worker::unique_name;

/// Configuration of the outbox.
#[derive(Clone, Debug)]
pub struct OutboxConfig {
    /// Name of the deliverer, unique per start. Default: like a worker.
    pub name: String,
    /// Maximum number of deliveries in flight. Default: 64.
    pub concurrency: usize,
    /// Maximum number of deliveries in flight to one target (integration, kind and `target`), so that a slow target
    /// does not delay the others. A prompt target reaches it, a failing target gets one. Default: 16; at most
    /// `concurrency`.
    pub per_target: usize,
    /// Timeout of one delivery. Default: 30 s.
    pub deadline: Duration,
    /// How long a taken row is invisible to other deliverers. Default: 60 s; longer than `deadline`.
    pub ttl: Duration,
    /// Polling interval, in addition to wake-ups. Default: 1 s.
    pub every: Duration,
    /// How long a shutdown waits for deliveries. Then they are cancelled, and their rows are released without counting
    /// an attempt. Default: 25 s.
    pub drain: Duration,
    /// Retry policy of failed deliveries.
    pub retry: IssueRetryPolicy,
    /// Observer of processing steps, for tests. Default: none.
    pub step_observer: Arc<dyn StepObserver>,
}

impl Default for OutboxConfig {
    fn default() -> Self {
        Self {
            name: unique_name(),
            concurrency: 64,
            per_target: 16,
            deadline: Duration::from_secs(30),
            ttl: Duration::from_secs(60),
            every: Duration::from_secs(1),
            drain: Duration::from_secs(25),
            retry: IssueRetryPolicy::default(),
            step_observer: Arc::new(NoStepObserver),
        }
    }
}

impl OutboxConfig {
    pub(super) fn validate(&self) -> Result<()> {
        self.retry.validate()?;
        if !(1..=CONCURRENT_DELIVERIES_MAX).contains(&self.concurrency) {
            let problem =
                format!("is {}, must be from 1 to {CONCURRENT_DELIVERIES_MAX}", self.concurrency);
            return Err(IssueError::invalid("concurrency", problem));
        }
        if self.per_target == 0 {
            return Err(IssueError::invalid("per_target", "must be at least 1"));
        }
        if self.deadline.is_zero() || self.deadline >= self.ttl {
            let problem =
                format!("{:?} must be shorter than `ttl`, which is {:?}", self.deadline, self.ttl);
            return Err(IssueError::invalid("deadline", problem));
        }
        if self.every.is_zero() {
            return Err(IssueError::invalid("every", "must be greater than zero"));
        }
        Ok(())
    }
}
