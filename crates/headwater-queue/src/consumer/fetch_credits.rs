//! Credits: how many entries of each partition the fetcher may read, and which partitions it reads next. Plain data.
//!
//! Upstream: each `partition_driver` gives credits for its partition. Downstream: `fetcher` reads what is selected here,
//! with one count for all selected partitions.
//! Guarantees: no partition gets more entries than it has credits, the partitions of a subscription together no more than
//! it may have in flight; no partition starves: a skipped one comes first in one of the next turns.
//!
//! Partitions with a backlog that is handled fast are read in bulk, a few at a time: reading and settling cost much per
//! partition and little per message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::limits::READ_STREAMS_MAX;
use headwater_stream::{HeldLease, StreamName};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use super::capacity_pool::CapacityPool;
use super::partition_driver::DriverEvent;
use crate::topic::TopicName;

/// How long a read waits when partitions take turns.
const TURN_WAIT: Duration = Duration::from_millis(20);
/// While some partitions are read in bulk, the others are read this often.
pub(super) const REGULAR_FETCH_EVERY: Duration = Duration::from_millis(5);
/// Without credits for a bulk read for this long, partitions are read like others.
const SATURATED_FOR: Duration = Duration::from_millis(50);
/// Minimum entries per partition of a bulk read.
const BULK_MIN: usize = 32;
/// From this many entries on, a bulk read takes one partition alone: more partitions would save little, and their
/// handlers would compete for processors with each other and with a server on the same machine (measured: 1.5 times the
/// throughput on two processors). Partitions that may be on different servers are read together.
const BULK_ALONE: usize = 128;

/// A partition that is read.
pub(super) struct FetchSource {
    /// Identifies its consumer: another one may have the same stream later.
    pub(super) id: u64,
    pub(super) topic: TopicName,
    pub(super) events: UnboundedSender<DriverEvent>,
    pub(super) lease: HeldLease,
    pub(super) pool: Arc<CapacityPool>,
    /// Whether its partitions may be on different servers.
    pub(super) is_spread: bool,
    pub(super) credits: isize,
    pub(super) is_fast: bool,
    /// Whether its driver wants it to be read.
    pub(super) is_reading: bool,
    /// Reads that failed, and those whose entries were reclaimed.
    pub(super) failed_reads: u64,
    pub(super) recovered_reads: u64,
    /// Whether more entries may be waiting at the server.
    pub(super) has_more: bool,
    /// Since when it has too few credits for a bulk read.
    starved_since: Option<Instant>,
    last_turn: u64,
    /// Whether the current read includes it.
    is_in_read: bool,
    /// The number of the removal that ends it.
    pub(super) removal_seq: Option<u64>,
    /// Skipped until then, because its stream has the wrong type.
    pub(super) skipped_until: Option<Instant>,
}

impl FetchSource {
    pub(super) fn new(
        id: u64,
        topic: TopicName,
        events: UnboundedSender<DriverEvent>,
        lease: HeldLease,
        pool: Arc<CapacityPool>,
        is_spread: bool,
    ) -> Self {
        Self {
            id,
            topic,
            events,
            lease,
            pool,
            is_spread,
            credits: 0,
            is_fast: false,
            is_reading: true,
            failed_reads: 0,
            recovered_reads: 0,
            has_more: false,
            starved_since: None,
            last_turn: 0,
            is_in_read: false,
            removal_seq: None,
            skipped_until: None,
        }
    }

    fn may_read(&self) -> bool {
        let is_recovered = self.failed_reads == self.recovered_reads;
        self.is_reading && is_recovered && self.removal_seq.is_none() && self.lease.is_valid()
    }

    fn credits(&self) -> usize {
        usize::try_from(self.credits).unwrap_or(0)
    }

    /// Credits within the regular limit. Those of a fast partition reach up to its bulk limit.
    fn regular_credits(&self) -> usize {
        let limits = self.pool.limits();
        let bulk = limits.bulk.filter(|_| self.is_fast).unwrap_or(limits.regular);
        self.credits().saturating_sub(bulk - limits.regular)
    }

    /// The size of bulk reads, if they pay for this partition.
    fn bulk_size(&self) -> Option<usize> {
        if self.has_more && self.is_fast { self.pool.limits().bulk } else { None }
    }
}

/// The next read.
#[derive(Default)]
pub(super) struct FetchRequest {
    pub(super) turn: u64,
    pub(super) streams: Vec<StreamName>,
    /// Entries per stream.
    pub(super) count: usize,
    /// Maximum time to wait for an entry.
    pub(super) wait: Duration,
    pub(super) is_bulk: bool,
    /// Whether partitions wait for capacity for a bulk read, so that no read blocks at the server: it would have to be
    /// cancelled as soon as there is capacity.
    pub(super) awaits_bulk: bool,
    /// Removals up to this number are in effect once this read has returned.
    pub(super) removals: u64,
    pub(super) has_removals: bool,
}

/// The partitions of one fetcher.
pub(super) struct FetchCredits {
    pub(super) sources: HashMap<StreamName, FetchSource>,
    pub(super) removals: u64,
    /// Whether the fetcher was woken and has not planned a read since.
    is_woken: bool,
    batch: usize,
    poll: Duration,
    turn: u64,
    /// Entries that a bulk read asks of each partition.
    bulk_size: usize,
    /// When partitions were last read without bulk.
    regular_read_at: Option<Instant>,
    /// Since when there has been no capacity for a bulk read, per subscription.
    saturated_since: HashMap<usize, Instant>,
}

impl FetchCredits {
    pub(super) fn new(batch: usize, poll: Duration) -> Self {
        Self {
            sources: HashMap::new(),
            removals: 0,
            is_woken: false,
            batch,
            poll,
            turn: 0,
            bulk_size: batch,
            regular_read_at: None,
            saturated_since: HashMap::new(),
        }
    }

    /// The source of this consumer, unless another consumer has replaced it.
    pub(super) fn find(&mut self, stream: &StreamName, id: u64) -> Option<&mut FetchSource> {
        self.sources.get_mut(stream).filter(|source| source.id == id)
    }

    /// Changes the credits of a partition. Returns whether the fetcher must plan again: it does not read the partition,
    /// and now it may.
    pub(super) fn change(
        &mut self,
        stream: &StreamName,
        id: u64,
        change: isize,
        is_fast: bool,
    ) -> bool {
        let Some(source) = self.find(stream, id) else { return false };
        source.credits += change;
        source.is_fast = is_fast;
        if source.is_in_read || change <= 0 {
            return false;
        }
        match source.bulk_size() {
            Some(size) => source.credits() * 2 >= size && source.pool.free_for_bulk() > 0,
            None => source.regular_credits() > 0,
        }
    }

    /// Returns whether the fetcher has to be notified: once until it has planned again.
    pub(super) fn mark_woken(&mut self) -> bool {
        !std::mem::replace(&mut self.is_woken, true)
    }

    /// Plans the next read.
    pub(super) fn next_request(&mut self, now: Instant) -> FetchRequest {
        self.is_woken = false;
        self.turn += 1;
        let mut candidates = Candidates::default();
        let mut soonest: Option<Instant> = None;
        for (stream, source) in &mut self.sources {
            source.is_in_read = false;
            source.pool.set_awaited(false);
            if let Some(until) = source.skipped_until.filter(|until| *until > now) {
                soonest = Some(soonest.map_or(until, |soonest| soonest.min(until)));
            } else if source.may_read() {
                candidates.add(stream, source, now);
            }
        }
        let selection = self.select(candidates, now);
        let has_removals = self.sources.values().any(|source| source.removal_seq.is_some());
        let mut wait = self.poll.min(selection.wait_max.unwrap_or(self.poll));
        if let Some(soonest) = soonest {
            wait = wait.min(soonest - now);
        }
        if has_removals {
            // Without blocking, so that the server no longer reads the removed streams.
            wait = Duration::ZERO;
        }
        let streams: Vec<StreamName> = selection.streams;
        for stream in &streams {
            if let Some(source) = self.sources.get_mut(stream) {
                source.is_in_read = true;
            }
        }
        FetchRequest {
            turn: self.turn,
            streams,
            count: selection.count.clamp(1, self.batch),
            wait,
            is_bulk: selection.is_bulk,
            awaits_bulk: selection.awaits_bulk,
            removals: self.removals,
            has_removals,
        }
    }

    fn select(&mut self, candidates: Candidates, now: Instant) -> Selection {
        let Candidates { bulk, mut ample, scarce, has_bulk_soon } = candidates;
        let has_bulk = has_bulk_soon || !bulk.is_empty();
        let (bulk, count) = self.select_bulk(bulk, &mut ample, now);
        let awaits_bulk = has_bulk && bulk.is_empty();
        let has_regular = !ample.is_empty() || !scarce.is_empty();
        let regular_due =
            self.regular_read_at.is_none_or(|at| now.duration_since(at) >= REGULAR_FETCH_EVERY);
        if has_bulk && !(has_regular && regular_due) {
            let wait_max = Some(Duration::ZERO);
            return Selection {
                wait_max,
                is_bulk: true,
                awaits_bulk,
                ..Selection::of(bulk, count)
            };
        }
        self.regular_read_at = Some(now);
        let mut wait_max = None;
        let mut selected = ample;
        if selected.is_empty() {
            selected = scarce;
        } else if !scarce.is_empty() {
            // They take turns: one small count for all would slow down the partitions with ample credits.
            wait_max = Some(TURN_WAIT);
            if self.turn.is_multiple_of(2) {
                selected = scarce;
                wait_max = Some(Duration::ZERO);
            }
        }
        let smallest = selected.iter().map(|candidate| candidate.credits).min().unwrap_or(0);
        let before = selected.len();
        let count = share_pools(&mut selected, smallest, self.turn);
        if selected.len() < before {
            wait_max = Some(wait_max.unwrap_or(TURN_WAIT).min(TURN_WAIT));
        }
        if has_bulk {
            wait_max = Some(Duration::ZERO);
        }
        Selection { wait_max, awaits_bulk, ..Selection::of(selected, count) }
    }

    /// The partitions that were read longest ago, as many as there is capacity for, and the count of each. If their
    /// subscription has been saturated for long, the others are read like regular ones.
    fn select_bulk(
        &mut self,
        mut all: Vec<Candidate>,
        ample: &mut Vec<Candidate>,
        now: Instant,
    ) -> (Vec<Candidate>, usize) {
        all.sort_by_key(|candidate| candidate.last_turn);
        let smallest = all.iter().map(|candidate| candidate.credits).min().unwrap_or(0);
        let mut count = self.bulk_size.min(smallest);
        // Free capacity of each subscription, whether one partition is read alone, and whether partitions wait.
        let mut budgets: HashMap<usize, (Arc<CapacityPool>, usize, bool, bool)> = HashMap::new();
        let mut selected = Vec::new();
        for candidate in all {
            let key = candidate.pool_key();
            let (_, free, is_exclusive, has_waiting) = budgets.entry(key).or_insert_with(|| {
                candidate.pool.set_awaited(true);
                let free = candidate.pool.free_for_bulk();
                if free > 0 {
                    self.saturated_since.remove(&key);
                } else {
                    self.saturated_since.entry(key).or_insert(now);
                }
                (Arc::clone(&candidate.pool), free, false, false)
            });
            let fits = count.min(*free);
            // One more partition is not worth a much smaller count for all.
            if fits > 0 && fits * 2 >= count && !*is_exclusive {
                *free -= fits;
                count = fits;
                *is_exclusive = count >= BULK_ALONE && !candidate.is_spread;
                selected.push(candidate);
                continue;
            }
            *has_waiting = true;
            let since = self.saturated_since.get(&key);
            if since.is_some_and(|since| now.duration_since(*since) > SATURATED_FOR) {
                let credits = candidate.regular_credits;
                if credits > 0 {
                    ample.push(Candidate { credits, ..candidate });
                }
            }
        }
        for (pool, .., has_waiting) in budgets.values() {
            pool.set_awaited(*has_waiting);
        }
        (selected, count)
    }

    /// Records the result of a read: how many entries each stream returned, empty ones not included.
    pub(super) fn record_read<'a>(
        &mut self,
        request: &FetchRequest,
        batches: impl Iterator<Item = (&'a StreamName, usize)>,
    ) {
        if request.is_bulk {
            for stream in &request.streams {
                if let Some(source) = self.sources.get_mut(stream) {
                    source.last_turn = request.turn;
                    source.has_more = false;
                }
            }
        }
        let mut total = 0;
        for (stream, entries) in batches {
            total += entries;
            if let Some(source) = self.sources.get_mut(stream) {
                source.last_turn = request.turn;
                source.has_more = entries >= request.count;
            }
        }
        if request.is_bulk {
            // Twice what there was, so that the capacity serves as many partitions as possible.
            let each = 2 * total / request.streams.len().max(1);
            self.bulk_size = each.clamp(BULK_MIN.min(self.batch), self.batch);
        }
    }
}

/// The streams of one read.
#[derive(Default)]
struct Selection {
    streams: Vec<StreamName>,
    count: usize,
    wait_max: Option<Duration>,
    is_bulk: bool,
    awaits_bulk: bool,
}

impl Selection {
    fn of(selected: Vec<Candidate>, count: usize) -> Self {
        let streams = selected.into_iter().take(READ_STREAMS_MAX);
        let streams = streams.map(|candidate| candidate.stream).collect();
        Self { streams, count, ..Self::default() }
    }
}

/// A partition that could be read.
struct Candidate {
    stream: StreamName,
    pool: Arc<CapacityPool>,
    credits: usize,
    /// Those for a read that is not in bulk.
    regular_credits: usize,
    is_spread: bool,
    last_turn: u64,
}

impl Candidate {
    /// Identifies the subscription.
    fn pool_key(&self) -> usize {
        Arc::as_ptr(&self.pool) as usize
    }
}

#[derive(Default)]
struct Candidates {
    bulk: Vec<Candidate>,
    ample: Vec<Candidate>,
    /// With few credits: no message waits for a handler, but handlers are busy.
    scarce: Vec<Candidate>,
    /// Whether partitions will have credits for a bulk read soon.
    has_bulk_soon: bool,
}

impl Candidates {
    fn add(&mut self, stream: &StreamName, source: &mut FetchSource, now: Instant) {
        let (credits, regular_credits) = (source.credits(), source.regular_credits());
        let kind = match source.bulk_size() {
            Some(size) if credits * 2 >= size => {
                source.starved_since = None;
                Some((&mut self.bulk, credits))
            }
            Some(_) => {
                let since = *source.starved_since.get_or_insert(now);
                if now.duration_since(since) <= SATURATED_FOR {
                    self.has_bulk_soon = true;
                    return;
                }
                source.starved_since = None;
                source.has_more = false;
                None
            }
            None => None,
        };
        let (list, credits) = match kind {
            Some(bulk) => bulk,
            None if regular_credits == 0 => return,
            None if regular_credits * 4 >= source.pool.limits().regular => {
                (&mut self.ample, regular_credits)
            }
            None => (&mut self.scarce, regular_credits),
        };
        list.push(Candidate {
            stream: stream.clone(),
            pool: Arc::clone(&source.pool),
            credits,
            regular_credits,
            is_spread: source.is_spread,
            last_turn: source.last_turn,
        });
    }
}

/// If the partitions of a subscription together could exceed its capacity, they share what is left, or take turns.
/// Returns the count of each.
fn share_pools(selected: &mut Vec<Candidate>, credits: usize, turn: u64) -> usize {
    // Free capacity of each subscription, and partitions that want it.
    let mut budgets: HashMap<usize, (usize, usize)> = HashMap::new();
    for candidate in selected.iter().filter(|candidate| candidate.pool.is_oversubscribed()) {
        let pool = &candidate.pool;
        let (free, wanted) = budgets.entry(candidate.pool_key()).or_insert((pool.free(), 0));
        *wanted += 1;
        if *wanted > *free && !pool.is_awaited() {
            pool.set_awaited(true);
            // Capacity freed before this was set woke nothing.
            *free = pool.free();
        }
    }
    let mut count = credits;
    let mut has_too_few = false;
    for (free, wanted) in budgets.values() {
        if free >= wanted {
            count = count.min(free / wanted);
        }
        has_too_few |= free < wanted;
    }
    if has_too_few {
        count = 1;
        selected.sort_unstable_by(|a, b| a.stream.cmp(&b.stream));
        let shift = usize::try_from(turn).unwrap_or(0) % selected.len();
        selected.rotate_left(shift);
        selected.retain(|candidate| match budgets.get_mut(&candidate.pool_key()) {
            Some((free, _)) => {
                let fits = *free > 0;
                *free = free.saturating_sub(1);
                fits
            }
            None => true,
        });
    }
    count
}
