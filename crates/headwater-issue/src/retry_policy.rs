//! Retry policy of runs and deliveries: attempts and exponential backoff with full jitter.
//!
//! Upstream: `worker` and `outbox`. Pure; randomness is passed in.

use std::time::Duration;

use crate::error::{IssueError, Result};
use crate::limits::DELAY_MAX;

/// Retry policy of failed runs and deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IssueRetryPolicy {
    /// Failed attempts after which an issue is quarantined, or an outbox row is dead. Default: 5; at least 1.
    pub attempts_max: u32,
    /// Expired claims after which an issue is quarantined, and unsettled deliveries after which an outbox row is dead.
    /// Default: 5; at least 1.
    pub crashes_max: u32,
    /// Maximum delay after the first failure. Default: 1 s.
    pub backoff_first: Duration,
    /// Factor of the maximum delay for each further failure. Default: 2; at least 1.
    pub backoff_factor: u32,
    /// Upper limit of the delay. Default: 60 s.
    pub backoff_max: Duration,
}

impl Default for IssueRetryPolicy {
    fn default() -> Self {
        Self {
            attempts_max: 5,
            crashes_max: 5,
            backoff_first: Duration::from_secs(1),
            backoff_factor: 2,
            backoff_max: Duration::from_secs(60),
        }
    }
}

impl IssueRetryPolicy {
    /// Rejects values out of range.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("attempts_max", self.attempts_max),
            ("crashes_max", self.crashes_max),
            ("backoff_factor", self.backoff_factor),
        ];
        if let Some((what, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(IssueError::invalid(*what, "must be at least 1"));
        }
        if self.backoff_first > self.backoff_max || self.backoff_max > DELAY_MAX {
            let problem =
                "backoff_first must be at most backoff_max, and backoff_max at most a year";
            return Err(IssueError::invalid("backoff", problem));
        }
        Ok(())
    }

    /// Delay after this many failed attempts (1 after the first), with full jitter; `random` is from 0 to 1.
    pub fn delay(&self, attempts: u32, random: f64) -> Duration {
        let factor = self.backoff_factor.saturating_pow(attempts.saturating_sub(1));
        let longest = self.backoff_first.saturating_mul(factor).min(self.backoff_max);
        longest.mul_f64(random.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_the_limit_and_jitter_only_shortens_it() {
        let policy = IssueRetryPolicy::default();
        let longest: Vec<u64> =
            (1..9).map(|attempts| policy.delay(attempts, 1.0).as_secs()).collect();
        assert_eq!(longest, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(policy.delay(3, 0.5), Duration::from_secs(2));
        assert_eq!(policy.delay(u32::MAX, 0.0), Duration::ZERO);
    }

    #[test]
    fn a_policy_without_attempts_is_rejected() {
        let policy = IssueRetryPolicy { attempts_max: 0, ..IssueRetryPolicy::default() };
        assert!(policy.validate().is_err());
        assert!(IssueRetryPolicy::default().validate().is_ok());
    }
}
