//! Detects steps of a store's wall clock, in either direction.
//!
//! Upstream: the stores read their clock before they compare deadlines. Downstream: their `clock` modules end all waits
//! and renew all leases after a step. Guarantees: a step of more than [`STEP_MIN`] between two readings of one process
//! is detected with the monotonic clock of the process; a slow reply is not mistaken for a step. Not here: the affected
//! rows.
//!
//! Deadlines are wall-clock times of the database, because several processes share them. After a step back they lie too
//! far ahead, and work stalls; after a step forward they have passed, and claims and taken rows seem to have expired.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::clock::{Clock, Timestamp};
use tracing::warn;

use crate::limits::CLAIM_TTL_DEFAULT;

/// Smaller steps are ignored: every deadline has more slack.
pub(crate) const STEP_MIN: Duration = Duration::from_secs(2);

/// Interval of storing the current time. A shorter step back while no process runs may stay undetected; it prolongs
/// waits by at most this time.
const STORE_EVERY: Duration = Duration::from_secs(60);

/// How long a reading counts as fresh.
#[cfg(feature = "postgres")]
const FRESH_FOR: Duration = Duration::from_secs(1);

/// Detector of clock steps of one store.
#[derive(Debug)]
pub(crate) struct ClockWatch {
    clock: Arc<dyn Clock>,
    state: Mutex<WatchState>,
}

#[derive(Debug, Default)]
struct WatchState {
    last: Option<ClockReading>,
    /// Number of detected steps, and how many of them the store has handled.
    detected: u64,
    handled: u64,
    /// Total of the steps forward, minus the steps back.
    ahead: Duration,
    claim_ttl: Duration,
    outbox_ttl: Duration,
    /// When the time was last stored, by the monotonic clock.
    stored: Option<Duration>,
}

/// The store's clock read `at` at some time between `before` and `after` of the monotonic clock.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    at: Timestamp,
    before: Duration,
    after: Duration,
}

/// A detected step that the store has to handle, including all earlier ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetectedStep(u64);

impl ClockWatch {
    /// Creates a detector. `clock` provides the monotonic time; its wall clock is not used.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, state: Mutex::default() }
    }

    /// The monotonic time, for [`read`](Self::read).
    pub(crate) fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }

    /// Adds a reading `at` of the store's clock, requested at `before` and received now. Returns a step that is not
    /// handled yet, of this or an earlier reading.
    pub(crate) fn read(&self, at: Timestamp, before: Duration) -> Option<DetectedStep> {
        let now = ClockReading { at, before, after: self.clock.monotonic() };
        let mut state = self.lock();
        // Ignore a reply that was overtaken by the reply to a later request.
        if state.last.is_some_and(|last| now.before < last.before) {
            return state.pending();
        }
        if let Some(last) = state.last.replace(now) {
            let earliest = last.at.after(now.before).before(last.after);
            let latest = last.at.after(now.after).before(last.before);
            let (back, forward) = (earliest.since(at), at.since(latest));
            if back > STEP_MIN {
                state.step(&format!("set back by about {back:?}"));
                state.ahead = state.ahead.saturating_sub(back);
            } else if forward > STEP_MIN {
                state.step(&format!("set forward by about {forward:?}"));
                state.ahead = state.ahead.saturating_add(forward);
            }
        }
        state.pending()
    }

    /// Compares a reading with the time stored by any process.
    pub(crate) fn compare(&self, at: Timestamp, stored: Timestamp) -> Option<DetectedStep> {
        let mut state = self.lock();
        let back = stored.since(at);
        if back > STEP_MIN && state.pending().is_none() {
            state.step(&format!("set back by about {back:?} since it was last read"));
        }
        state.pending()
    }

    /// Marks a step as handled.
    pub(crate) fn handled(&self, DetectedStep(detected): DetectedStep) {
        let mut state = self.lock();
        state.handled = state.handled.max(detected);
    }

    /// Whether the step was handled by any caller.
    #[cfg(feature = "sqlite")]
    pub(crate) fn is_handled(&self, DetectedStep(detected): DetectedStep) -> bool {
        self.lock().handled >= detected
    }

    /// Whether the time is to be stored now; it counts as stored then.
    pub(crate) fn should_store(&self) -> bool {
        let now = self.clock.monotonic();
        let mut state = self.lock();
        let is_due = state.stored.is_none_or(|stored| now.saturating_sub(stored) >= STORE_EVERY);
        if is_due {
            state.stored = Some(now);
        }
        is_due
    }

    /// Whether the last reading is recent and every step is handled.
    #[cfg(feature = "postgres")]
    pub(crate) fn is_fresh(&self) -> bool {
        let now = self.clock.monotonic();
        let state = self.lock();
        let is_recent = |last: &ClockReading| now.saturating_sub(last.after) < FRESH_FOR;
        state.last.as_ref().is_some_and(is_recent) && state.pending().is_none()
    }

    /// The latest time the store's clock can show now, unless it stepped forward by more than `slack`.
    #[cfg(feature = "postgres")]
    pub(crate) fn latest(&self, slack: Duration) -> Timestamp {
        let now = self.clock.monotonic();
        let last = self.lock().last;
        last.map_or(Timestamp::from_millis(u64::MAX), |last| {
            last.at.after(now.saturating_sub(last.before)).after(slack)
        })
    }

    /// Added to retention times, so that a step forward does not remove fresh rows.
    pub(crate) fn ahead(&self) -> Duration {
        self.lock().ahead
    }

    /// Records the TTL of a claim.
    pub(crate) fn note_claim_ttl(&self, ttl: Duration) {
        let mut state = self.lock();
        if ttl > state.claim_ttl {
            state.claim_ttl = ttl;
            state.stored = None;
        }
    }

    /// Records the TTL of a taken outbox row.
    pub(crate) fn note_outbox_ttl(&self, ttl: Duration) {
        let mut state = self.lock();
        if ttl > state.outbox_ttl {
            state.outbox_ttl = ttl;
            state.stored = None;
        }
    }

    /// The longest recorded TTLs of claims and of outbox rows.
    pub(crate) fn ttls(&self) -> (Duration, Duration) {
        let state = self.lock();
        let or_default = |ttl: Duration| if ttl.is_zero() { CLAIM_TTL_DEFAULT } else { ttl };
        (or_default(state.claim_ttl), or_default(state.outbox_ttl))
    }

    fn lock(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

impl WatchState {
    fn step(&mut self, how: &str) {
        self.detected += 1;
        warn!(
            "the clock of the database was {how}; ending all waits and extending all claims and deliveries by their full TTL"
        );
    }

    fn pending(&self) -> Option<DetectedStep> {
        (self.detected > self.handled).then_some(DetectedStep(self.detected))
    }
}

#[cfg(test)]
mod tests {
    use headwater_stream::clock::TestClock;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn watch() -> (TestClock, ClockWatch) {
        let clock = TestClock::default();
        let watch = ClockWatch::new(Arc::new(clock.clone()));
        assert!(watch.read(clock.now(), clock.monotonic()).is_none(), "the first reading");
        (clock, watch)
    }

    #[test]
    fn a_step_is_reported_until_it_is_handled_and_elapsed_time_is_not_a_step() {
        let (clock, watch) = watch();
        let read = || watch.read(clock.now(), clock.monotonic());
        clock.advance(HOUR * 100);
        assert!(read().is_none());
        for step in [TestClock::step_back, TestClock::step_forward] {
            step(&clock, HOUR);
            let detected = read().expect("a step");
            clock.advance(HOUR);
            assert!(read().is_some(), "not handled yet");
            watch.handled(detected);
            assert!(read().is_none());
        }
    }

    #[test]
    fn a_slow_reply_is_not_mistaken_for_a_step() {
        let (clock, watch) = watch();
        // The first reading is taken at once and received ten seconds later; the second the other way round.
        let (at, before) = (clock.now(), clock.monotonic());
        clock.advance(Duration::from_secs(10));
        assert!(watch.read(at, before).is_none());
        let before = clock.monotonic();
        clock.advance(Duration::from_secs(10));
        assert!(watch.read(clock.now(), before).is_none());
    }

    #[test]
    fn reordered_replies_are_not_mistaken_for_a_step() {
        let (clock, watch) = watch();
        let (at, before) = (clock.now(), clock.monotonic());
        clock.advance(Duration::from_secs(9));
        assert!(watch.read(clock.now(), clock.monotonic()).is_none());
        assert!(watch.read(at, before).is_none(), "requested first, received last");
        // Two concurrent requests.
        let before = clock.monotonic();
        clock.advance(Duration::from_secs(9));
        let (at, later) = (clock.now(), clock.monotonic());
        clock.advance(Duration::from_secs(9));
        assert!(watch.read(clock.now(), before).is_none());
        assert!(watch.read(at, later).is_none());
    }

    #[test]
    fn the_stored_time_reveals_only_a_step_back() {
        let (clock, watch) = watch();
        let now = clock.now();
        for stored in [Timestamp::default(), now.before(HOUR), now, now.after(STEP_MIN)] {
            assert!(watch.compare(now, stored).is_none(), "{stored}");
        }
        assert!(watch.compare(now, now.after(HOUR)).is_some());
    }

    #[test]
    fn retention_is_extended_after_a_step_forward() {
        let (clock, watch) = watch();
        clock.step_forward(HOUR * 2);
        watch.read(clock.now(), clock.monotonic());
        assert_eq!(watch.ahead(), HOUR * 2);
        clock.step_back(HOUR * 3);
        watch.read(clock.now(), clock.monotonic());
        assert_eq!(watch.ahead(), Duration::ZERO);
    }
}
