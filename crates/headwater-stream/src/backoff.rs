//! Delays between attempts: fixed, or exponential with a maximum and jitter.
//!
//! Upstream: every loop that repeats a failing call, and the retry policies of the other crates. Pure, except that [`RetryTimer`]
//! draws its random numbers and sleeps. Guarantees: a delay never exceeds its maximum; jitter only shortens it.

use std::time::Duration;

use crate::error::{Result, StreamError};

/// Delay before a failed attempt is repeated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backoff {
    /// Constant.
    Fixed(Duration),
    /// Exponential with jitter, so that what failed together is not repeated together.
    Exponential {
        /// Delay after the first failure. Default: 1 s.
        first: Duration,
        /// Multiplier per failure, 1 to 1,000. Default: 2.
        factor: f64,
        /// Maximum delay. Default: 60 s.
        max: Duration,
        /// Random share of the delay, 0 to 1. Default: 1 (full jitter).
        jitter: f64,
    },
}

impl Default for Backoff {
    fn default() -> Self {
        Self::Exponential {
            first: Duration::from_secs(1),
            factor: 2.0,
            max: Duration::from_secs(60),
            jitter: 1.0,
        }
    }
}

impl Backoff {
    /// Doubles from `first` to `max`, and half of each delay is random. For a loop that calls a server: it neither spins nor
    /// calls at the same moment as the loops of other processes.
    pub const fn doubling(first: Duration, max: Duration) -> Self {
        Self::Exponential { first, factor: 2.0, max, jitter: 0.5 }
    }

    /// The delay after the `failures`th failure (from 1). `random` is uniform in 0..1.
    pub fn delay(&self, failures: u32, random: f64) -> Duration {
        match *self {
            Self::Fixed(delay) => delay,
            Self::Exponential { first, .. } if first.is_zero() => first,
            Self::Exponential { first, factor, max, jitter } => {
                let exponent = failures.saturating_sub(1).min(10_000);
                let full = first.as_secs_f64() * factor.powi(exponent as i32);
                let full = full.min(max.as_secs_f64());
                Duration::from_secs_f64(full * (1.0 - jitter * random.clamp(0.0, 1.0)))
            }
        }
    }

    /// The longest delay.
    pub fn max(&self) -> Duration {
        match *self {
            Self::Fixed(delay) => delay,
            Self::Exponential { max, .. } => max,
        }
    }

    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        let Self::Exponential { factor, max, jitter, first } = *self else { return Ok(()) };
        if !(1.0..=1000.0).contains(&factor) {
            return Err(StreamError::invalid("factor", format!("{factor}; must be 1 to 1000")));
        }
        if !(0.0..=1.0).contains(&jitter) {
            return Err(StreamError::invalid("jitter", format!("{jitter}; must be 0 to 1")));
        }
        if first > max {
            let problem = format!("{first:?} is greater than `max` ({max:?})");
            return Err(StreamError::invalid("first", problem));
        }
        Ok(())
    }

    /// The delays of one loop.
    pub const fn timer(self) -> RetryTimer {
        RetryTimer { backoff: self, failures: 0 }
    }
}

/// The delays of a loop that repeats a failing call.
#[derive(Clone, Copy, Debug)]
pub struct RetryTimer {
    backoff: Backoff,
    failures: u32,
}

impl RetryTimer {
    /// Counts a failure and returns the delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        self.backoff.delay(self.failures, fastrand::f64())
    }

    /// Counts a failure and sleeps until the next attempt. Cancel-safe.
    pub async fn wait(&mut self) {
        tokio::time::sleep(self.next_delay()).await;
    }

    /// Starts again from the first delay, after a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_its_maximum_and_jitter_only_shortens_it() {
        let backoff = Backoff::default();
        let seconds: Vec<u64> = (1..=8).map(|n| backoff.delay(n, 0.0).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff.delay(3, 1.0), Duration::ZERO);
        assert_eq!(backoff.delay(3, 0.5), Duration::from_secs(2));
        assert_eq!(backoff.delay(u32::MAX, 0.0), Duration::from_secs(60));
        assert_eq!(Backoff::Fixed(Duration::from_secs(3)).delay(9, 0.5), Duration::from_secs(3));
        let max = Duration::from_secs(9);
        assert_eq!(Backoff::doubling(Duration::ZERO, max).delay(u32::MAX, 0.0), Duration::ZERO);
    }

    #[test]
    fn invalid_numbers_are_rejected() {
        let exponential = |first, factor, jitter| {
            let first = Duration::from_secs(first);
            Backoff::Exponential { first, factor, max: Duration::from_secs(2), jitter }
        };
        for backoff in [
            exponential(1, 0.5, 1.0),
            exponential(1, f64::NAN, 1.0),
            exponential(1, 2.0, 1.5),
            exponential(3, 2.0, 1.0),
        ] {
            assert!(backoff.validate().is_err(), "{backoff:?}");
        }
        assert!(Backoff::default().validate().is_ok());
    }

    #[test]
    fn a_timer_starts_again_after_a_success() {
        let (first, max) = (Duration::from_millis(10), Duration::from_secs(1));
        let mut timer = Backoff::doubling(first, max).timer();
        assert!((first / 2..=first).contains(&timer.next_delay()));
        for _ in 0..20 {
            timer.next_delay();
        }
        assert!((max / 2..=max).contains(&timer.next_delay()));
        timer.reset();
        assert!(timer.next_delay() <= first);
    }
}
