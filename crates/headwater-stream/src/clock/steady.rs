//! A clock without steps: it advances with the monotonic clock and slews towards the wall clock.
//!
//! Upstream: the embedded backend, whose leases, delays, idle times and deduplication windows use this
//! clock. Downstream: any [`Clock`].
//! Guarantees: it never goes back; between two readings it advances by the elapsed time, plus or minus a
//! twentieth, however the wall clock is set.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use super::{Clock, Timestamp};

/// The clock slews by at most 1/SLEW_PART of the elapsed time. Less than the safety margin of a lease.
const SLEW_PART: u32 = 20;

#[derive(Debug)]
pub(crate) struct SteadyClock {
    clock: Arc<dyn Clock>,
    last: Mutex<SteadyReading>,
}

#[derive(Debug)]
struct SteadyReading {
    /// Time since the Unix epoch. Finer than milliseconds; otherwise frequent readings would round every
    /// correction to zero.
    time: Duration,
    monotonic: Duration,
}

impl SteadyClock {
    /// Follows `clock` and starts no earlier than `earliest`.
    pub(crate) fn new(clock: Arc<dyn Clock>, earliest: Timestamp) -> Self {
        let time = Duration::from_millis(clock.now().max(earliest).as_millis());
        let last = Mutex::new(SteadyReading { time, monotonic: clock.monotonic() });
        Self { clock, last }
    }
}

#[async_trait]
impl Clock for SteadyClock {
    fn now(&self) -> Timestamp {
        let mut last = self.last.lock().expect("no code panics while it holds the time");
        let wall = Duration::from_millis(self.clock.now().as_millis());
        let monotonic = self.clock.monotonic();
        let elapsed = monotonic.saturating_sub(last.monotonic);
        let time = last.time.saturating_add(elapsed);
        let slew = elapsed / SLEW_PART;
        let time = wall.clamp(time.saturating_sub(slew), time.saturating_add(slew));
        *last = SteadyReading { time, monotonic };
        Timestamp::default().after(time)
    }

    fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }

    async fn sleep(&self, duration: Duration) {
        self.clock.sleep(duration).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::TestClock;

    const HOUR: Duration = Duration::from_secs(3600);

    fn steady() -> (TestClock, SteadyClock) {
        let clock = TestClock::default();
        (clock.clone(), SteadyClock::new(Arc::new(clock), Timestamp::default()))
    }

    #[test]
    fn without_steps_it_equals_the_wall_clock() {
        let (clock, steady) = steady();
        for ms in [0, 1, 19, 500, 3_600_000] {
            clock.advance(Duration::from_millis(ms));
            assert_eq!(steady.now(), clock.now());
        }
    }

    #[test]
    fn a_step_of_the_wall_clock_is_slewed_gradually() {
        for is_back in [true, false] {
            let (clock, steady) = steady();
            let before = steady.now();
            if is_back {
                clock.step_back(HOUR);
            } else {
                clock.step_forward(HOUR);
            }
            assert_eq!(steady.now(), before);
            let mut last = before;
            for _ in 0..1000 {
                clock.advance(Duration::from_millis(10));
                let now = steady.now();
                assert!(now >= last, "time went back from {last} to {now}");
                last = now;
            }
            let (low, high) = (Duration::from_millis(9_490), Duration::from_millis(10_510));
            let passed = last.since(before);
            assert!(low < passed && passed < high, "10 s took {passed:?}");
            clock.advance(HOUR * 21);
            assert_eq!(steady.now(), clock.now(), "the clock has caught up with the step");
        }
    }

    #[test]
    fn it_starts_no_earlier_than_the_given_time() {
        let clock = TestClock::default();
        let earliest = clock.now().after(HOUR);
        let steady = SteadyClock::new(Arc::new(clock.clone()), earliest);
        assert_eq!(steady.now(), earliest);
        clock.advance(Duration::from_secs(20));
        assert_eq!(steady.now(), earliest.after(Duration::from_secs(19)));
    }
}
