//! The pace of a partition: whether more waits at the server than was read, and whether what is read is handled soon.
//!
//! Upstream: `feed` notes what reads gave, `worker` when messages end. Downstream: `plan` reads deep, a few partitions at a
//! time, where both hold. Elsewhere deep reads would harm: messages would lie in hand that others could have.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// A message that ends this soon after it came was handled soon.
const SOON: Duration = Duration::from_millis(20);
/// What is full for this long is not handled soon, whatever was so before.
const FULL_FOR: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Pace {
    has_more: AtomicBool,
    is_quick: AtomicBool,
    /// The turn of the feed in which it was read last.
    turn: AtomicU64,
    full: Full,
}

/// Since when there is no room for a deep read.
#[derive(Debug, Default)]
pub(super) struct Full(Mutex<Option<Instant>>);

impl Full {
    /// Notes whether there is room. Returns whether there has been none for too long.
    pub(super) fn lasts(&self, has_room: bool, now: Instant) -> bool {
        let mut since = self.0.lock().expect("no code panics while it holds it");
        if has_room {
            *since = None;
            return false;
        }
        now.duration_since(*since.get_or_insert(now)) > FULL_FOR
    }
}

impl Pace {
    /// It was read in this turn, and there may be more.
    pub(super) fn was_read(&self, turn: u64, has_more: bool) {
        self.turn.store(turn, Ordering::Relaxed);
        self.has_more.store(has_more, Ordering::Relaxed);
    }

    /// A message ended that came then.
    pub(super) fn ended(&self, came_at: Instant) {
        self.is_quick.store(came_at.elapsed() <= SOON, Ordering::Relaxed);
    }

    /// The turn in which it was read last.
    pub(super) fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }

    /// Whether deep reads are worth their while.
    pub(super) fn is_deep(&self) -> bool {
        self.has_more.load(Ordering::Relaxed) && self.is_quick.load(Ordering::Relaxed)
    }

    /// There is room, or there is none; for too long, and it is quick no more.
    pub(super) fn note_room(&self, has_room: bool, now: Instant) {
        if self.full.lasts(has_room, now) {
            self.is_quick.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn deep_reads_need_a_backlog_that_is_handled_soon() {
        let pace = Pace::default();
        assert!(!pace.is_deep());
        pace.was_read(1, true);
        assert!(!pace.is_deep(), "nobody knows how soon they end");
        pace.ended(Instant::now());
        assert!(pace.is_deep());
        let came_at = Instant::now();
        tokio::time::advance(SOON * 2).await;
        pace.ended(came_at);
        assert!(!pace.is_deep(), "they take long");
        pace.ended(Instant::now());
        pace.was_read(2, false);
        assert!(!pace.is_deep(), "there are no more");
    }

    #[tokio::test(start_paused = true)]
    async fn a_partition_that_stays_full_is_quick_no_more() {
        let pace = Pace::default();
        pace.was_read(1, true);
        pace.ended(Instant::now());
        pace.note_room(false, Instant::now());
        tokio::time::advance(FULL_FOR * 2).await;
        pace.note_room(true, Instant::now());
        pace.note_room(false, Instant::now());
        assert!(pace.is_deep(), "it had room meanwhile");
        tokio::time::advance(FULL_FOR * 2).await;
        pace.note_room(false, Instant::now());
        assert!(!pace.is_deep());
    }
}
