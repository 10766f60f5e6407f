//! What a feed reads next.
//!
//! Upstream: `feed` knows the partitions, `worker` how much room each has. Downstream: one read for those that are chosen,
//! with a count that fits the narrowest of them.
//! Promises: the partitions of a subscription together get no more than it may have in hand; nobody is left out for
//! ever: those that are left out come first in one of the next turns.
//!
//! Partitions with a backlog that is handled soon are read deep, a few at a time: a read, and the settling of what it
//! gave, cost much per partition and little per message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::StreamName;
use headwater_stream::limits::READ_STREAMS_MAX;
use tokio::time::Instant;

use super::job::Job;
use super::room::Room;
use super::worker::Worker;

/// How long a read waits when partitions take turns.
const TURN: Duration = Duration::from_millis(20);
/// The least that a deep read asks of each partition.
const DEPTH_MIN: usize = 32;
/// A partition of which a deep read asks this much is read alone: there is little more to save, and the handlers of
/// several would take processors from each other, and from a server that runs beside us (measured: 1.5 times as many
/// messages on two processors). Where each may lie on another server, they are read at the same time.
const DEPTH_ALONE: usize = 128;

/// Streams for one read.
pub(super) struct Chosen {
    pub(super) streams: Vec<StreamName>,
    /// What is asked of each.
    pub(super) count: usize,
    /// How long to wait for something, at most.
    pub(super) wait_max: Option<Duration>,
    pub(super) is_deep: bool,
    /// Whether some wait for room for a deep read, so that nobody may wait at the server.
    pub(super) is_waiting: bool,
}

/// Who could be read, by how much room they have.
#[derive(Default)]
pub(super) struct Candidates {
    deep: Choice,
    wide: Choice,
    tight: Choice,
    /// Whether some will soon have room for a deep read.
    has_soon: bool,
}

impl Candidates {
    pub(super) fn add(&mut self, worker: &Arc<Worker>, now: Instant) {
        match worker.room(now) {
            Room::None => {}
            Room::Soon => self.has_soon = true,
            Room::Tight(room) => self.tight.add(worker, room),
            Room::Wide(room) => self.wide.add(worker, room),
            Room::Deep(room) => self.deep.add(worker, room),
        }
    }

    /// Chooses whom to read in this turn. A deep read asks `depth` entries of each; while there are any, the others are
    /// read when they are due, and nobody waits at the server: that would have to be ended as soon as there is room.
    pub(super) fn choose(self, turn: u64, depth: usize, others_due: bool, now: Instant) -> Chosen {
        let Self { deep, mut wide, tight, has_soon } = self;
        let has_deep = has_soon || !deep.workers.is_empty();
        let deep = deep.deepest(depth, &mut wide, now);
        let has_others = !wide.workers.is_empty() || !tight.workers.is_empty();
        let is_waiting = has_deep && deep.workers.is_empty();
        if has_deep && !(has_others && others_due) {
            return Chosen { is_waiting, ..deep.chosen(Some(Duration::ZERO), true) };
        }
        let mut wait_max = None;
        let mut choice = wide;
        if choice.workers.is_empty() {
            choice = tight;
        } else if !tight.workers.is_empty() {
            // Both get their turn: a small count for all would slow the wide ones down.
            wait_max = Some(TURN);
            if turn.is_multiple_of(2) {
                choice = tight;
                wait_max = Some(Duration::ZERO);
            }
        }
        if choice.bound_by_total(turn) {
            wait_max = Some(wait_max.unwrap_or(TURN).min(TURN));
        }
        if has_deep {
            wait_max = Some(Duration::ZERO);
        }
        Chosen { is_waiting, ..choice.chosen(wait_max, false) }
    }
}

/// How deep to read next, after a deep read of so many streams gave so many entries: twice what there was, so that the
/// room serves as many partitions as it can.
pub(super) fn next_depth(streams: usize, entries: usize, batch: usize) -> usize {
    (2 * entries / streams.max(1)).clamp(DEPTH_MIN.min(batch), batch)
}

#[derive(Default)]
struct Choice {
    workers: Vec<Arc<Worker>>,
    /// What the narrowest of them has room for.
    room: usize,
}

impl Choice {
    fn add(&mut self, worker: &Arc<Worker>, room: usize) {
        self.room = if self.workers.is_empty() { room } else { self.room.min(room) };
        self.workers.push(Arc::clone(worker));
    }

    fn chosen(self, wait_max: Option<Duration>, is_deep: bool) -> Chosen {
        let chosen = self.workers.iter().take(READ_STREAMS_MAX);
        let streams = chosen.map(|worker| {
            worker.is_listed();
            worker.rules.stream.clone()
        });
        let streams = streams.collect();
        Chosen { streams, count: self.room, wait_max, is_deep, is_waiting: false }
    }

    /// Those that were read longest ago, as many as there is room for. Where there has been none for long, they are
    /// read like all others.
    fn deepest(mut self, depth: usize, wide: &mut Self, now: Instant) -> Self {
        self.workers.sort_by_cached_key(|worker| worker.pace.turn());
        let mut jobs = Jobs::default();
        let mut count = depth.min(self.room);
        self.workers.retain(|worker| {
            let left = jobs.of(&worker.job, |job| job.seek_depth(now));
            let fits = count.min(left.room);
            left.streams += 1;
            // A little more for one is not worth a little less for all.
            if fits > 0 && fits * 2 >= count && !left.is_full {
                left.room -= fits;
                left.taken += 1;
                count = fits;
                left.is_full = count >= DEPTH_ALONE && !worker.rules.topic.layout.is_spread();
                return true;
            }
            let room = if left.is_lasting { worker.shallow_room() } else { 0 };
            if room > 0 {
                wide.add(worker, room);
            }
            false
        });
        for (job, left) in jobs.0.values() {
            job.note_awaits_depth(left.taken < left.streams);
        }
        self.room = count;
        self
    }

    /// Where the partitions of a subscription together could take more than it may have in hand, they share what is
    /// left, or take turns. Returns whether some were left out.
    fn bound_by_total(&mut self, turn: u64) -> bool {
        let mut jobs = Jobs::default();
        for worker in self.workers.iter().filter(|worker| worker.job.is_bound()) {
            let left = jobs.of(&worker.job, |job| {
                // Said before it is looked at, so that whoever makes room meanwhile tells.
                job.note_short(true);
                (job.free_room(), false)
            });
            left.streams += 1;
        }
        if jobs.0.is_empty() {
            return false;
        }
        for (job, left) in jobs.0.values() {
            job.note_short(left.room < left.streams);
        }
        let fits = jobs.0.values().map(|(_, left)| left).filter(|left| left.room >= left.streams);
        let narrowest = fits.map(|left| left.room / left.streams).min();
        let before = self.workers.len();
        if jobs.0.values().any(|(_, left)| left.room < left.streams) {
            self.room = 1;
            self.workers.sort_unstable_by(|a, b| a.rules.stream.cmp(&b.rules.stream));
            let shift = usize::try_from(turn).unwrap_or(0) % before;
            self.workers.rotate_left(shift);
            self.workers.retain(|worker| jobs.takes(&worker.job));
        }
        self.room = self.room.min(narrowest.unwrap_or(1));
        self.workers.len() < before
    }
}

/// What subscriptions may still take in hand.
#[derive(Default)]
struct Jobs(HashMap<usize, (Arc<Job>, Left)>);

struct Left {
    room: usize,
    /// Whether there has been no room for long.
    is_lasting: bool,
    /// How many streams want some, and get it.
    streams: usize,
    taken: usize,
    /// Whether one of them is read alone.
    is_full: bool,
}

impl Jobs {
    /// What is left to a subscription; `look` is asked the first time.
    fn of(&mut self, job: &Arc<Job>, look: impl FnOnce(&Job) -> (usize, bool)) -> &mut Left {
        let (_, left) = self.0.entry(Arc::as_ptr(job) as usize).or_insert_with(|| {
            let (room, is_lasting) = look(job);
            (Arc::clone(job), Left { room, is_lasting, streams: 0, taken: 0, is_full: false })
        });
        left
    }

    /// Takes one more of a subscription that is bound. Returns whether there was one.
    fn takes(&mut self, job: &Arc<Job>) -> bool {
        let Some((_, left)) = self.0.get_mut(&(Arc::as_ptr(job) as usize)) else { return true };
        let fits = left.room > 0;
        left.room = left.room.saturating_sub(1);
        fits
    }
}
