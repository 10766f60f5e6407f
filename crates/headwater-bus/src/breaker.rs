//! Circuit breaker: after a number of consecutive failures it rejects calls for a recovery period.
//!
//! Upstream: a bus asks for a permit before each call and reports the result. Downstream: nothing; the clock is
//! injected.
//! Guarantees: half-open admits exactly one probe at a time; a probe that is dropped without a result frees the slot; the
//! result of a call that started before the last state change is ignored.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::error::{BusError, Result};

/// Settings of a [`Breaker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Consecutive failures that open the breaker. Default: 5.
    pub failure_threshold: u32,
    /// Time the breaker stays open before it admits a probe. Default: 5 s.
    pub recovery: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failure_threshold: 5, recovery: Duration::from_secs(5) }
    }
}

impl BreakerConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        if self.failure_threshold == 0 {
            return Err(BusError::invalid("failure_threshold", "0; must be at least 1"));
        }
        if self.recovery.is_zero() {
            return Err(BusError::invalid("recovery", "must be greater than zero"));
        }
        Ok(())
    }
}

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Calls are admitted.
    Closed,
    /// Calls are rejected.
    Open,
    /// One probe call is admitted.
    HalfOpen,
}

/// Monotonic time since a fixed moment.
pub(crate) type MonotonicClock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// A circuit breaker. Clones share the same state.
#[derive(Clone)]
pub struct Breaker {
    inner: Arc<Inner>,
}

struct Inner {
    config: BreakerConfig,
    time: MonotonicClock,
    state: Mutex<BreakerData>,
}

struct BreakerData {
    phase: BreakerPhase,
    /// Incremented on every phase change; results with an older generation are ignored.
    generation: u64,
}

enum BreakerPhase {
    Closed { failures: u32 },
    Open { since: Duration },
    HalfOpen { probing: bool },
}

impl Breaker {
    /// Creates a closed breaker on the system's monotonic clock.
    pub fn new(config: BreakerConfig) -> Result<Self> {
        let start = Instant::now();
        Self::with_time(config, move || start.elapsed())
    }

    /// Creates a closed breaker with the monotonic clock `time`.
    pub fn with_time(
        config: BreakerConfig,
        time: impl Fn() -> Duration + Send + Sync + 'static,
    ) -> Result<Self> {
        config.validate()?;
        let state = BreakerData { phase: BreakerPhase::Closed { failures: 0 }, generation: 0 };
        let inner = Inner { config, time: Arc::new(time), state: Mutex::new(state) };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The current state.
    pub fn state(&self) -> BreakerState {
        let now = (self.inner.time)();
        match self.lock().phase {
            BreakerPhase::Closed { .. } => BreakerState::Closed,
            BreakerPhase::Open { since } if now < since + self.inner.config.recovery => {
                BreakerState::Open
            }
            BreakerPhase::Open { .. } | BreakerPhase::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Admits a call, or returns the time after which to try again.
    pub fn admit(&self) -> std::result::Result<BreakerPermit, Duration> {
        let recovery = self.inner.config.recovery;
        let now = (self.inner.time)();
        let mut state = self.lock();
        match &mut state.phase {
            BreakerPhase::Closed { .. } => {}
            BreakerPhase::Open { since } => {
                let until = *since + recovery;
                if now < until {
                    return Err(until - now);
                }
                state.change(BreakerPhase::HalfOpen { probing: true });
            }
            // The running probe may finish at any moment.
            BreakerPhase::HalfOpen { probing: true } => return Err(recovery.min(PROBE_RETRY_AFTER)),
            BreakerPhase::HalfOpen { probing } => *probing = true,
        }
        let generation = state.generation;
        drop(state);
        Ok(BreakerPermit { breaker: self.clone(), generation })
    }

    fn lock(&self) -> MutexGuard<'_, BreakerData> {
        self.inner.state.lock().expect("no code panics while it holds this lock")
    }
}

/// Longest `retry_after` that a caller gets while a probe is running.
const PROBE_RETRY_AFTER: Duration = Duration::from_millis(100);

impl BreakerData {
    fn change(&mut self, phase: BreakerPhase) {
        self.phase = phase;
        self.generation += 1;
    }
}

impl fmt::Debug for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker").field("state", &self.state()).finish_non_exhaustive()
    }
}

/// Permission for one call. Report the result with `succeeded` or `failed`. Dropping the permit reports nothing; a
/// dropped probe frees the slot for another one.
#[derive(Debug)]
#[must_use = "report the result of the call"]
pub struct BreakerPermit {
    breaker: Breaker,
    generation: u64,
}

impl BreakerPermit {
    /// Reports that the backend answered.
    pub fn succeeded(self) {
        let mut state = self.breaker.lock();
        if state.generation == self.generation {
            match &mut state.phase {
                BreakerPhase::Closed { failures } => *failures = 0,
                _ => state.change(BreakerPhase::Closed { failures: 0 }),
            }
        }
    }

    /// Reports that the backend did not answer or could not execute the call. Returns whether this opened the breaker.
    pub fn failed(self) -> bool {
        let now = (self.breaker.inner.time)();
        let threshold = self.breaker.inner.config.failure_threshold;
        let mut state = self.breaker.lock();
        if state.generation != self.generation {
            return false;
        }
        let opens = match &mut state.phase {
            BreakerPhase::Closed { failures } => {
                *failures += 1;
                *failures >= threshold
            }
            _ => true,
        };
        if opens {
            state.change(BreakerPhase::Open { since: now });
        }
        opens
    }
}

impl Drop for BreakerPermit {
    fn drop(&mut self) {
        let mut state = self.breaker.lock();
        // The result of a probe starts a new generation, so this probe had none.
        if state.generation == self.generation
            && let BreakerPhase::HalfOpen { probing } = &mut state.phase
        {
            *probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    const RECOVERY: Duration = Duration::from_secs(5);

    /// A breaker that opens after three failures, and its clock in seconds.
    fn breaker() -> (Breaker, Arc<AtomicU64>) {
        let clock = Arc::new(AtomicU64::new(0));
        let time = Arc::clone(&clock);
        let config = BreakerConfig { failure_threshold: 3, recovery: RECOVERY };
        let breaker =
            Breaker::with_time(config, move || Duration::from_secs(time.load(Ordering::SeqCst)));
        (breaker.unwrap(), clock)
    }

    fn open(breaker: &Breaker) {
        for _ in 0..3 {
            breaker.admit().unwrap().failed();
        }
        assert_eq!(breaker.state(), BreakerState::Open);
    }

    #[test]
    fn consecutive_failures_open_the_breaker_unless_a_success_comes_between() {
        let (breaker, _) = breaker();
        for _ in 0..10 {
            assert!(!breaker.admit().unwrap().failed());
            assert!(!breaker.admit().unwrap().failed());
            breaker.admit().unwrap().succeeded();
        }
        assert!(!breaker.admit().unwrap().failed());
        assert!(!breaker.admit().unwrap().failed());
        assert!(breaker.admit().unwrap().failed());
        assert_eq!(breaker.admit().unwrap_err(), RECOVERY);
    }

    #[test]
    fn half_open_admits_exactly_one_of_32_concurrent_calls() {
        for _ in 0..50 {
            let (breaker, clock) = breaker();
            open(&breaker);
            clock.store(5, Ordering::SeqCst);
            let (start, end) = (Barrier::new(32), Barrier::new(32));
            let admitted = AtomicUsize::new(0);
            thread::scope(|scope| {
                for _ in 0..32 {
                    scope.spawn(|| {
                        start.wait();
                        let permit = breaker.admit();
                        admitted.fetch_add(usize::from(permit.is_ok()), Ordering::SeqCst);
                        // No task releases the probe before all tasks have asked.
                        end.wait();
                    });
                }
            });
            assert_eq!(admitted.into_inner(), 1);
        }
    }

    #[test]
    fn a_probe_decides() {
        let (breaker, clock) = breaker();
        open(&breaker);
        clock.store(5, Ordering::SeqCst);
        assert!(breaker.admit().unwrap().failed());
        assert_eq!(breaker.admit().unwrap_err(), RECOVERY);

        clock.store(10, Ordering::SeqCst);
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        breaker.admit().unwrap().succeeded();
        assert_eq!(breaker.state(), BreakerState::Closed);
        // The failure count starts at zero again.
        assert!(!breaker.admit().unwrap().failed());
    }

    #[test]
    fn a_dropped_probe_frees_the_slot_for_the_next() {
        let (breaker, clock) = breaker();
        open(&breaker);
        clock.store(5, Ordering::SeqCst);
        let probe = breaker.admit().unwrap();
        assert!(breaker.admit().is_err());
        drop(probe);
        breaker.admit().unwrap().succeeded();
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn results_of_calls_from_before_a_state_change_are_ignored() {
        let (breaker, clock) = breaker();
        let late = [(); 4].map(|()| breaker.admit().unwrap());
        let [success, failure, probe_time, dropped] = late;
        open(&breaker);
        success.succeeded();
        assert_eq!(breaker.state(), BreakerState::Open);
        clock.store(4, Ordering::SeqCst);
        // Otherwise this would restart the recovery period.
        failure.failed();
        clock.store(5, Ordering::SeqCst);
        let probe = breaker.admit().unwrap();
        probe_time.succeeded();
        drop(dropped);
        assert!(breaker.admit().is_err(), "the probe is still in flight");
        probe.succeeded();
    }
}
