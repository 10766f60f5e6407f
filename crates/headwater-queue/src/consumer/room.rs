//! The room of a partition: how much of it may be in hand, and who is told when there is more.
//!
//! Upstream: `plan` asks before it reads, `adoption` before it takes over. Downstream: `feed` is told when it is worth a look.
//! Promises: never more in hand than the partition's share, or than its depth while it is read deep; whoever was left out
//! of a read for lack of room is read again when there is some.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::worker::Worker;
use crate::limits::HELD_IDS_MAX;

/// A handler that takes this long is worth telling at once that there is room for another message.
pub(super) const LONG: Duration = Duration::from_millis(1);

/// How much may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    None,
    /// None for a deep read, but there is some in a moment.
    Soon,
    /// A little: everything in hand is being handled.
    Tight(usize),
    Wide(usize),
    /// As much as a deep read takes.
    Deep(usize),
}

impl Worker {
    /// How much may be read now. From here on, more room is told to the feed.
    pub(super) fn room(&self, now: Instant) -> Room {
        self.is_known.store(false, Ordering::SeqCst);
        let is_wanted = self.is_reading.load(Ordering::Acquire) && !self.job.is_paused();
        if !is_wanted || !self.lease.is_trusted() {
            return Room::None;
        }
        let room = self.free_room();
        if matches!(room, Room::Soon | Room::Deep(_)) {
            self.pace.note_room(room != Room::Soon, now);
        }
        room
    }

    /// The next read includes this partition.
    pub(super) fn is_listed(&self) {
        self.is_known.store(true, Ordering::SeqCst);
    }

    fn free_room(&self) -> Room {
        let held = self.held.load(Ordering::SeqCst);
        if held >= HELD_IDS_MAX {
            return Room::None;
        }
        let in_hand = self.in_hand().saturating_sub(held);
        let may_be_deep = |depth: &usize| self.pace.is_deep() && *depth <= self.job.config.reach();
        if let Some(depth) = self.job.depth().filter(may_be_deep) {
            let room = depth.saturating_sub(in_hand);
            return if room * 2 >= depth { Room::Deep(room) } else { Room::Soon };
        }
        self.share_left(in_hand)
    }

    /// What is left of the partition's share, though there is a backlog.
    pub(super) fn shallow_room(&self) -> usize {
        let in_hand = self.in_hand().saturating_sub(self.held.load(Ordering::SeqCst));
        match self.share_left(in_hand) {
            Room::Tight(room) | Room::Wide(room) => room,
            Room::None | Room::Soon | Room::Deep(_) => 0,
        }
    }

    fn share_left(&self, in_hand: usize) -> Room {
        let share = self.share();
        let room = share.saturating_sub(in_hand);
        if room > 0 && room * 4 >= share {
            Room::Wide(room)
        } else if room > 0 && self.ready.load(Ordering::SeqCst) == 0 {
            Room::Tight(room)
        } else {
            Room::None
        }
    }

    /// What may be in hand without a backlog that is read deep.
    fn share(&self) -> usize {
        self.job.share.load(Ordering::Relaxed).min(self.job.config.reach())
    }

    /// How many pending entries may be taken over now. Those that wait at a gate take no room here either.
    pub(super) fn adoption_room(&self) -> usize {
        let held = self.held.load(Ordering::SeqCst);
        if held >= HELD_IDS_MAX {
            return 0;
        }
        let share = self.job.share.load(Ordering::Relaxed);
        share.saturating_sub(self.in_hand().saturating_sub(held))
    }

    /// Tells the feed that there is room again, once. Returns whether it did.
    pub(super) fn ask_for_more(&self, is_slow: bool) -> bool {
        if self.is_known.load(Ordering::SeqCst) {
            return false;
        }
        let share = self.share();
        let is_worth_it = match self.free_room() {
            // What one partition gives back, another may wait for.
            _ if self.job.is_room_awaited(is_slow) => true,
            Room::None | Room::Soon => false,
            Room::Tight(_) => true,
            Room::Deep(_) => self.job.deep_room() > 0,
            // Not at once: a read for a few entries costs as much as one for many. But slow handlers must not keep
            // others waiting, who could work beside them.
            Room::Wide(room) => room * 2 >= share || self.ready.load(Ordering::SeqCst) == 0,
        };
        if is_worth_it && !self.is_known.swap(true, Ordering::SeqCst) {
            self.feed.look_again();
            return true;
        }
        false
    }

    /// So many more are in hand.
    pub(super) fn took(&self, entries: usize) {
        self.in_hand.fetch_add(entries, Ordering::SeqCst);
        self.job.in_hand.fetch_add(entries, Ordering::SeqCst);
    }

    /// So many fewer are in hand.
    pub(super) fn gave(&self, entries: usize) {
        self.in_hand.fetch_sub(entries, Ordering::SeqCst);
        self.job.in_hand.fetch_sub(entries, Ordering::SeqCst);
    }

    pub(super) fn in_hand(&self) -> usize {
        self.in_hand.load(Ordering::SeqCst)
    }
}
