//! A circuit breaker: after too many failures in a row, the backend is left alone for a while.
//!
//! Upstream: a bus asks before each call and says afterwards how it went. Downstream: nothing; time is passed in.
//! Promises: half-open admits exactly one probe at a time, however many ask at once; a probe whose caller went away
//! makes room for the next; the verdict of a call that began before the breaker last changed does not move it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::error::{BusError, Result};

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Failures in a row that open it. Default: 5.
    pub failure_threshold: u32,
    /// How long it stays open before one call may try again. Default: 5 s.
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
            return Err(BusError::invalid("failure_threshold", "it is 0; at least 1"));
        }
        if self.recovery.is_zero() {
            return Err(BusError::invalid("recovery", "it is zero"));
        }
        Ok(())
    }
}

/// What a breaker does with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// It lets them through.
    Closed,
    /// It refuses them.
    Open,
    /// It lets one through, to see how it goes.
    HalfOpen,
}

/// Time since some fixed moment, never going back.
pub(crate) type MonotonicClock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// A circuit breaker. Clones are the same one.
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
    /// Grows when the phase changes: verdicts from before say nothing about now.
    generation: u64,
}

enum BreakerPhase {
    Closed { failures: u32 },
    Open { since: Duration },
    HalfOpen { probing: bool },
}

impl Breaker {
    /// A closed breaker on the clock of the machine.
    pub fn new(config: BreakerConfig) -> Result<Self> {
        let start = Instant::now();
        Self::with_time(config, move || start.elapsed())
    }

    /// A closed breaker that takes the time from `time`, which never goes back.
    pub fn with_time(
        config: BreakerConfig,
        time: impl Fn() -> Duration + Send + Sync + 'static,
    ) -> Result<Self> {
        config.validate()?;
        let state = BreakerData { phase: BreakerPhase::Closed { failures: 0 }, generation: 0 };
        let inner = Inner { config, time: Arc::new(time), state: Mutex::new(state) };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What it would do with a call now.
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

    /// Lets a call through or refuses it, with the time after which it is worth asking again.
    pub fn admit(&self) -> std::result::Result<BreakerPermit, Duration> {
        let recovery = self.inner.config.recovery;
        let now = (self.inner.time)();
        let mut state = self.lock();
        let is_probe = match &mut state.phase {
            BreakerPhase::Closed { .. } => false,
            BreakerPhase::Open { since } => {
                let until = *since + recovery;
                if now < until {
                    return Err(until - now);
                }
                state.change(BreakerPhase::HalfOpen { probing: true });
                true
            }
            // Its verdict may come at any moment.
            BreakerPhase::HalfOpen { probing: true } => return Err(recovery.min(PROBE_RETRY_AFTER)),
            BreakerPhase::HalfOpen { probing } => {
                *probing = true;
                true
            }
        };
        let generation = state.generation;
        drop(state);
        Ok(BreakerPermit { breaker: self.clone(), generation, is_probe, is_decided: false })
    }

    fn lock(&self) -> MutexGuard<'_, BreakerData> {
        self.inner.state.lock().expect("no code panics while it holds this lock")
    }
}

/// How long to wait for somebody else's probe.
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

/// A call that was let through. Say how it went; dropping it says nothing, and a dropped probe makes room for another.
#[derive(Debug)]
#[must_use = "say how the call went"]
pub struct BreakerPermit {
    breaker: Breaker,
    generation: u64,
    is_probe: bool,
    is_decided: bool,
}

impl BreakerPermit {
    /// The backend answered.
    pub fn succeeded(mut self) {
        self.is_decided = true;
        let mut state = self.breaker.lock();
        if state.generation == self.generation {
            match &mut state.phase {
                BreakerPhase::Closed { failures } => *failures = 0,
                _ => state.change(BreakerPhase::Closed { failures: 0 }),
            }
        }
    }

    /// The backend did not answer, or could not do what it was asked to. Returns whether this opened the breaker.
    pub fn failed(mut self) -> bool {
        self.is_decided = true;
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
        if self.is_probe && !self.is_decided {
            let mut state = self.breaker.lock();
            if state.generation == self.generation {
                state.phase = BreakerPhase::HalfOpen { probing: false };
            }
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
    fn failures_in_a_row_open_it_and_a_success_between_them_does_not() {
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
    fn half_open_admits_exactly_one_probe_of_32_that_ask_at_once() {
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
                        // Nobody gives the probe back before all have asked.
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
        // It counts from zero again.
        assert!(!breaker.admit().unwrap().failed());
    }

    #[test]
    fn a_probe_whose_caller_went_away_makes_room_for_the_next() {
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
    fn verdicts_of_calls_from_before_do_not_move_it() {
        let (breaker, clock) = breaker();
        let late = [(); 4].map(|()| breaker.admit().unwrap());
        let [success, failure, probe_time, dropped] = late;
        open(&breaker);
        success.succeeded();
        assert_eq!(breaker.state(), BreakerState::Open);
        clock.store(4, Ordering::SeqCst);
        // It would otherwise open anew, for longer.
        failure.failed();
        clock.store(5, Ordering::SeqCst);
        let probe = breaker.admit().unwrap();
        probe_time.succeeded();
        drop(dropped);
        assert!(breaker.admit().is_err(), "the probe is still under way");
        probe.succeeded();
    }
}
