//! Notices that the clock of a store was set, in either direction.
//!
//! Upstream: the stores, which read their clock before they trust a deadline. Downstream: their `clock` files, which end all
//! waits and renew all leases after a step. Promises: a step of more than [`STEP_MIN`] between two readings of one
//! process is detected, because the monotonic clock of the process cannot step; a slow reply is not mistaken for one.
//! Not here: which rows a step concerns.
//!
//! Deadlines are wall-clock times of the database, since several processes share them. A step makes them mean something
//! else: set back, they are hours ahead and work is stranded; set forward, they are over and work in progress is taken
//! from its owner.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::clock::{Clock, Timestamp};
use tracing::warn;

use crate::limits::CLAIM_TTL_DEFAULT;

/// Smaller steps are not worth the trouble: every deadline has more slack than this.
pub(crate) const STEP_MIN: Duration = Duration::from_secs(2);

/// How old the stored reading may become before it is written again. A step back of less than this that happens while no
/// process runs may go unnoticed, and then prolongs waits by no more than it.
const STORE_EVERY: Duration = Duration::from_secs(60);

/// How long a reading serves.
#[cfg(feature = "postgres")]
const FRESH_FOR: Duration = Duration::from_secs(1);

/// Watches the clock of one store.
#[derive(Debug)]
pub(crate) struct ClockWatch {
    clock: Arc<dyn Clock>,
    state: Mutex<WatchState>,
}

#[derive(Debug, Default)]
struct WatchState {
    last: Option<ClockReading>,
    /// StepObserver that were detected, and how many of them the store has dealt with.
    detected: u64,
    handled: u64,
    /// How far the clock was set forward in all, less how far it was set back.
    ahead: Duration,
    claim_ttl: Duration,
    outbox_ttl: Duration,
    /// When a reading was last stored, by the monotonic clock.
    stored: Option<Duration>,
}

/// The store's clock showed `at` at some moment from `before` to `after` of the monotonic clock.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    at: Timestamp,
    before: Duration,
    after: Duration,
}

/// A step that is to be dealt with, and all before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetectedStep(u64);

impl ClockWatch {
    /// Watches a clock with the monotonic time of another, or of the same one.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, state: Mutex::default() }
    }

    /// The monotonic time, for [`read`](Self::read).
    pub(crate) fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }

    /// Notes that the store's clock shows `at`, which was asked for at `before` and is known now. Returns whether there is a
    /// step to deal with, of now or of an earlier reading.
    pub(crate) fn read(&self, at: Timestamp, before: Duration) -> Option<DetectedStep> {
        let now = ClockReading { at, before, after: self.clock.monotonic() };
        let mut state = self.lock();
        // A reply that was overtaken by that to a later question tells nothing new.
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

    /// Compares what was read with what was stored, perhaps by another process.
    pub(crate) fn compare(&self, at: Timestamp, stored: Timestamp) -> Option<DetectedStep> {
        let mut state = self.lock();
        let back = stored.since(at);
        if back > STEP_MIN && state.pending().is_none() {
            state.step(&format!("set back by about {back:?} since it was last read"));
        }
        state.pending()
    }

    /// The step was dealt with.
    pub(crate) fn handled(&self, DetectedStep(detected): DetectedStep) {
        let mut state = self.lock();
        state.handled = state.handled.max(detected);
    }

    /// Whether the step was dealt with, by whichever caller.
    #[cfg(feature = "sqlite")]
    pub(crate) fn is_handled(&self, DetectedStep(detected): DetectedStep) -> bool {
        self.lock().handled >= detected
    }

    /// Whether a reading is to be stored now; then it counts as stored.
    pub(crate) fn should_store(&self) -> bool {
        let now = self.clock.monotonic();
        let mut state = self.lock();
        let is_due = state.stored.is_none_or(|stored| now.saturating_sub(stored) >= STORE_EVERY);
        if is_due {
            state.stored = Some(now);
        }
        is_due
    }

    /// Whether the last reading is recent, and nothing is to be dealt with.
    #[cfg(feature = "postgres")]
    pub(crate) fn is_fresh(&self) -> bool {
        let now = self.clock.monotonic();
        let state = self.lock();
        let is_recent = |last: &ClockReading| now.saturating_sub(last.after) < FRESH_FOR;
        state.last.as_ref().is_some_and(is_recent) && state.pending().is_none()
    }

    /// The latest time that the store's clock can show now, unless it was set forward by more than `slack`.
    #[cfg(feature = "postgres")]
    pub(crate) fn latest(&self, slack: Duration) -> Timestamp {
        let now = self.clock.monotonic();
        let last = self.lock().last;
        last.map_or(Timestamp::from_millis(u64::MAX), |last| {
            last.at.after(now.saturating_sub(last.before)).after(slack)
        })
    }

    /// How much longer than usual to keep what is removed by age: fresh rows must not look old.
    pub(crate) fn ahead(&self) -> Duration {
        self.lock().ahead
    }

    /// A claim is held for this long.
    pub(crate) fn note_claim_ttl(&self, ttl: Duration) {
        let mut state = self.lock();
        if ttl > state.claim_ttl {
            state.claim_ttl = ttl;
            state.stored = None;
        }
    }

    /// A row of the outbox is taken for this long.
    pub(crate) fn note_outbox_ttl(&self, ttl: Duration) {
        let mut state = self.lock();
        if ttl > state.outbox_ttl {
            state.outbox_ttl = ttl;
            state.stored = None;
        }
    }

    /// The longest of these, for claims and for rows of the outbox.
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
        warn!("the clock of the database was {how}; waits end now and leases start anew");
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
    fn a_step_is_noticed_until_it_is_handled_and_passing_time_is_none() {
        let (clock, watch) = watch();
        let read = || watch.read(clock.now(), clock.monotonic());
        clock.advance(HOUR * 100);
        assert!(read().is_none());
        for step in [TestClock::step_back, TestClock::step_forward] {
            step(&clock, HOUR);
            let detected = read().expect("a step");
            clock.advance(HOUR);
            assert!(read().is_some(), "still to be handled");
            watch.handled(detected);
            assert!(read().is_none());
        }
    }

    #[test]
    fn a_reply_that_took_long_is_not_mistaken_for_a_step() {
        let (clock, watch) = watch();
        // Read at once, and known ten seconds later; the next one the other way round.
        let (at, before) = (clock.now(), clock.monotonic());
        clock.advance(Duration::from_secs(10));
        assert!(watch.read(at, before).is_none());
        let before = clock.monotonic();
        clock.advance(Duration::from_secs(10));
        assert!(watch.read(clock.now(), before).is_none());
    }

    #[test]
    fn replies_that_overtake_each_other_are_not_mistaken_for_a_step() {
        let (clock, watch) = watch();
        let (at, before) = (clock.now(), clock.monotonic());
        clock.advance(Duration::from_secs(9));
        assert!(watch.read(clock.now(), clock.monotonic()).is_none());
        assert!(watch.read(at, before).is_none(), "asked first, known last");
        // Two questions under way at once.
        let before = clock.monotonic();
        clock.advance(Duration::from_secs(9));
        let (at, later) = (clock.now(), clock.monotonic());
        clock.advance(Duration::from_secs(9));
        assert!(watch.read(clock.now(), before).is_none());
        assert!(watch.read(at, later).is_none());
    }

    #[test]
    fn what_was_stored_tells_of_a_step_back_and_of_nothing_else() {
        let (clock, watch) = watch();
        let now = clock.now();
        for stored in [Timestamp::default(), now.before(HOUR), now, now.after(STEP_MIN)] {
            assert!(watch.compare(now, stored).is_none(), "{stored}");
        }
        assert!(watch.compare(now, now.after(HOUR)).is_some());
    }

    #[test]
    fn what_is_kept_for_a_time_is_kept_longer_after_a_step_forward() {
        let (clock, watch) = watch();
        clock.step_forward(HOUR * 2);
        watch.read(clock.now(), clock.monotonic());
        assert_eq!(watch.ahead(), HOUR * 2);
        clock.step_back(HOUR * 3);
        watch.read(clock.now(), clock.monotonic());
        assert_eq!(watch.ahead(), Duration::ZERO);
    }
}
