//! Settings of the outbox.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{IssueError, Result};
use crate::limits::CONCURRENT_DELIVERIES_MAX;
use crate::retry_policy::IssueRetryPolicy;
use crate::step_observer::{NoStepObserver, StepObserver};
use crate::worker::unique_name;

/// Settings of the outbox.
#[derive(Clone, Debug)]
pub struct OutboxConfig {
    /// How this deliverer is called, unique per start. Default: like a worker.
    pub name: String,
    /// Deliveries in flight at once, each of another issue. Default: 64.
    pub concurrency: usize,
    /// Deliveries in flight to one target (integration, kind and `target`), so that a slow one does not delay the others. A
    /// target that responds promptly gets as many, one that fails gets one. Default: 16; at most `concurrency`.
    pub per_target: usize,
    /// How long one delivery may take. Default: 30 s.
    pub deadline: Duration,
    /// How long a row in hand is hidden from others. Default: 60 s; longer than `deadline`.
    pub ttl: Duration,
    /// How often to look for rows, besides when one is announced. Default: 1 s.
    pub every: Duration,
    /// How long stopping waits for deliveries; what is left is cancelled and given back without counting an attempt.
    /// Default: 25 s.
    pub drain: Duration,
    /// When and how often a failed delivery is tried again.
    pub retry: IssueRetryPolicy,
    /// Is told of every step. Default: nobody.
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
            let problem = format!("{}; 1 to {CONCURRENT_DELIVERIES_MAX}", self.concurrency);
            return Err(IssueError::invalid("concurrency", problem));
        }
        if self.per_target == 0 {
            return Err(IssueError::invalid("per_target", "it is zero"));
        }
        if self.deadline.is_zero() || self.deadline >= self.ttl {
            let problem = format!("{:?} is not shorter than ttl {:?}", self.deadline, self.ttl);
            return Err(IssueError::invalid("deadline", problem));
        }
        if self.every.is_zero() {
            return Err(IssueError::invalid("every", "it is zero"));
        }
        Ok(())
    }
}
