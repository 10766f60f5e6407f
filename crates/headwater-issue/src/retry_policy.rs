//! Retry policy of runs and deliveries: attempts and exponential backoff with full jitter.
//!
//! Upstream: `worker` and `outbox`.

use std::time::Duration;

use headwater_stream::Backoff;

use crate::error::{IssueError, Result};
use crate::limits::DELAY_MAX;

/// Retry policy of failed runs and deliveries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IssueRetryPolicy {
    /// Failed attempts after which an issue is quarantined, or an outbox row is dead. Default: 5; at least 1.
    pub attempts_max: u32,
    /// Expired claims after which an issue is quarantined, and unsettled deliveries after which an outbox row is dead.
    /// Default: 5; at least 1.
    pub crashes_max: u32,
    /// Delay after a failure. Default: 1 s, doubling up to 60 s, with full jitter; at most a year.
    pub backoff: Backoff,
}

impl Default for IssueRetryPolicy {
    fn default() -> Self {
        Self { attempts_max: 5, crashes_max: 5, backoff: Backoff::default() }
    }
}

impl IssueRetryPolicy {
    /// Rejects values out of range.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = [("attempts_max", self.attempts_max), ("crashes_max", self.crashes_max)];
        if let Some((what, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(IssueError::invalid(*what, "must be at least 1"));
        }
        let invalid = |problem: String| IssueError::invalid("backoff", problem);
        self.backoff.validate().map_err(|error| invalid(error.to_string()))?;
        if self.backoff.max() > DELAY_MAX {
            return Err(invalid("a delay is at most a year".to_owned()));
        }
        Ok(())
    }

    /// The delay after this many failed attempts (1 after the first).
    pub(crate) fn delay(&self, attempts: u32) -> Duration {
        self.backoff.delay(attempts, fastrand::f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_out_of_range_is_rejected() {
        let policy = IssueRetryPolicy { attempts_max: 0, ..IssueRetryPolicy::default() };
        assert!(policy.validate().is_err());
        let backoff = Backoff::Fixed(DELAY_MAX + Duration::from_secs(1));
        assert!(IssueRetryPolicy { backoff, ..IssueRetryPolicy::default() }.validate().is_err());
        assert!(IssueRetryPolicy::default().validate().is_ok());
    }
}
