//! Credits: how many entries of each partition the fetcher may read, and which partitions it reads next. Plain data.
//!
//! Upstream: each `partition_driver` gives credits for its partition. Downstream: `fetcher` reads what is selected here,
//! with one count for all selected partitions.
//! Guarantees: no partition gets more entries than it has credits, the partitions of a subscription together no more than
//! it may have in flight; no partition starves: a skipped one comes first in one of the next turns, and some capacity is
//! reserved for messages that a handler takes at once.
//!
//! Partitions with a backlog that is handled fast are read in bulk, a few at a time: reading and settling cost much per
//! partition and little per message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::StreamName;
use headwater_stream::limits::READ_STREAMS_MAX;
use tokio::sync::watch;
use tokio::time::Instant;

use super::capacity_pool::{CapacityPool, PartitionLimits};

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

/// A partition that is read, and where its entries go.
pub(super) struct FetchSource<T> {
    /// Identifies its consumer: another one may have the same stream later.
    pub(super) id: u64,
    pub(super) target: T,
    pub(super) pool: Arc<CapacityPool>,
    /// Whether partitions of its topic may be on different servers.
    is_spread: bool,
    pub(super) credits: isize,
    is_fast: bool,
    /// Whether its driver wants it to be read.
    pub(super) is_reading: bool,
    /// Reads that failed, and those whose entries were reclaimed.
    pub(super) failed_reads: u64,
    pub(super) recovered_reads: u64,
    /// Set once it is to be removed. It is read no more.
    pub(super) removal: Option<SourceRemoval>,
    /// Skipped until then, because its stream has the wrong type.
    pub(super) skipped_until: Option<Instant>,
    /// Whether more entries may be waiting at the server.
    has_more: bool,
    /// Since when it has too few credits for a bulk read.
    starved_since: Option<Instant>,
    last_turn: u64,
    kind: FetchKind,
}

/// The removal of a partition. It is in effect when it is dropped, with its source.
#[derive(Default)]
pub(super) struct SourceRemoval {
    ended: watch::Sender<()>,
    /// Whether its failed reads are being disconnected. The fetcher has ended all others.
    pub(super) is_disconnecting: bool,
}

impl SourceRemoval {
    /// A receiver that fails when the removal is in effect.
    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.ended.subscribe()
    }
}

/// How the next read may include a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchKind {
    No,
    /// In bulk, as soon as it has credits.
    BulkSoon,
    Bulk,
    Ample,
    /// With few credits: no message waits for a handler, but handlers are busy.
    Scarce,
}

impl<T> FetchSource<T> {
    pub(super) fn new(id: u64, target: T, pool: Arc<CapacityPool>, is_spread: bool) -> Self {
        Self {
            id,
            target,
            pool,
            is_spread,
            credits: 0,
            is_fast: false,
            is_reading: true,
            failed_reads: 0,
            recovered_reads: 0,
            removal: None,
            skipped_until: None,
            has_more: false,
            starved_since: None,
            last_turn: 0,
            kind: FetchKind::No,
        }
    }

    fn credits(&self) -> usize {
        usize::try_from(self.credits).unwrap_or(0)
    }

    /// How many messages it may have in flight.
    fn limit(&self, limits: PartitionLimits) -> usize {
        limits.bulk.filter(|_| self.is_fast).unwrap_or(limits.regular)
    }

    /// What is left of the free capacity of its subscription after a read of so many entries; `None` if they do not fit.
    /// Only a message that does not wait for a handler may use the reserve.
    fn take_regular(&self, free: usize, count: usize) -> Option<usize> {
        let in_flight = self.limit(self.pool.limits()).saturating_sub(self.credits());
        let may_use_reserve = count == 1 && in_flight < self.pool.concurrency();
        let reserve = if may_use_reserve { 0 } else { self.pool.reserve() };
        free.checked_sub(count).filter(|left| *left >= reserve)
    }

    /// Credits within the regular limit. Those of a fast partition reach up to its bulk limit.
    fn regular_credits(&self) -> usize {
        // Read once: the pool may be divided anew at any time, and the limits of before and after do not fit together.
        let limits = self.pool.limits();
        self.credits().saturating_sub(self.limit(limits).saturating_sub(limits.regular))
    }

    /// How the next read may include it.
    fn next_kind(&mut self, now: Instant) -> FetchKind {
        let limits = self.pool.limits();
        if let Some(bulk) = limits.bulk.filter(|_| self.has_more && self.is_fast) {
            if self.credits() * 2 >= bulk {
                self.starved_since = None;
                return FetchKind::Bulk;
            }
            let since = *self.starved_since.get_or_insert(now);
            if now.duration_since(since) <= SATURATED_FOR {
                return FetchKind::BulkSoon;
            }
            self.starved_since = None;
            self.has_more = false;
        }
        match self.regular_credits() {
            0 => FetchKind::No,
            few if few * 4 < limits.regular => FetchKind::Scarce,
            _ => FetchKind::Ample,
        }
    }
}

/// The next read.
#[derive(Default)]
pub(super) struct FetchRequest {
    pub(super) streams: Vec<StreamName>,
    /// Entries per stream.
    pub(super) count: usize,
    /// Maximum time to wait for an entry.
    pub(super) wait: Duration,
    pub(super) is_bulk: bool,
    /// Whether partitions wait for capacity for a bulk read, so that no read blocks at the server: it would have to be
    /// cancelled as soon as there is capacity.
    pub(super) awaits_bulk: bool,
    /// Partitions to remove, with the ids of their sources: once this read has returned, no other one includes them.
    pub(super) removals: Vec<(StreamName, u64)>,
}

/// The partitions of one fetcher.
pub(super) struct FetchCredits<T> {
    pub(super) sources: HashMap<StreamName, FetchSource<T>>,
    /// Whether the fetcher was woken and has not planned a read since.
    is_woken: bool,
    batch: usize,
    poll: Duration,
    turn: u64,
    /// Entries that a bulk read asks of each partition.
    bulk_size: usize,
    /// When partitions were last read without bulk.
    regular_read_at: Option<Instant>,
    /// Since when a subscription has had no capacity for a bulk read.
    saturated_since: HashMap<usize, Instant>,
}

/// Partitions that could be read, and how many entries of each.
type Candidates<'a, T> = Vec<(&'a StreamName, &'a FetchSource<T>, usize)>;

impl<T> FetchCredits<T> {
    pub(super) fn new(batch: usize, poll: Duration) -> Self {
        Self {
            sources: HashMap::new(),
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
    pub(super) fn find(&mut self, stream: &StreamName, id: u64) -> Option<&mut FetchSource<T>> {
        self.sources.get_mut(stream).filter(|source| source.id == id)
    }

    /// Removes the source of this consumer, unless another consumer has replaced it.
    pub(super) fn remove(&mut self, stream: &StreamName, id: u64) {
        if self.find(stream, id).is_some() {
            self.sources.remove(stream);
        }
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
        let turn = self.turn;
        let Some(source) = self.find(stream, id) else { return false };
        source.credits += change;
        source.is_fast = is_fast;
        if source.last_turn == turn || change <= 0 {
            return false;
        }
        let bulk = source.pool.limits().bulk.filter(|_| source.has_more && is_fast);
        match bulk.filter(|_| source.pool.free_for_bulk() > 0) {
            Some(bulk) => source.credits() * 2 >= bulk,
            None => source.regular_credits() > 0,
        }
    }

    /// Returns whether the fetcher has to be notified: once until it has planned again.
    pub(super) fn mark_woken(&mut self) -> bool {
        !std::mem::replace(&mut self.is_woken, true)
    }

    /// Plans the next read. `is_valid` tells whether a partition may be read at all.
    pub(super) fn next_request(
        &mut self,
        now: Instant,
        is_valid: impl Fn(&T) -> bool,
    ) -> FetchRequest {
        self.is_woken = false;
        self.turn += 1;
        let mut request = FetchRequest::default();
        let mut wait_max = self.poll;
        for (stream, source) in &mut self.sources {
            source.pool.set_awaited(false);
            source.kind = FetchKind::No;
            if source.removal.as_ref().is_some_and(|removal| !removal.is_disconnecting) {
                request.removals.push((stream.clone(), source.id));
            }
            let is_recovered = source.failed_reads == source.recovered_reads;
            if let Some(until) = source.skipped_until.filter(|until| *until > now) {
                wait_max = wait_max.min(until - now);
            } else if source.is_reading && is_recovered && source.removal.is_none() {
                source.kind =
                    if is_valid(&source.target) { source.next_kind(now) } else { FetchKind::No };
            }
        }
        request.wait = wait_max;
        self.select(&mut request, now);
        if !request.removals.is_empty() {
            // Without blocking, so that the server no longer reads the removed streams.
            request.wait = Duration::ZERO;
        }
        request.count = request.count.clamp(1, self.batch);
        for stream in &request.streams {
            if let Some(source) = self.sources.get_mut(stream) {
                source.last_turn = self.turn;
            }
        }
        request
    }

    /// Whether a partition could be read, but its subscription has no capacity.
    pub(super) fn awaits_capacity(&self) -> bool {
        self.sources.values().any(|source| source.kind != FetchKind::No)
    }

    fn of_kind(&self, kind: FetchKind) -> Candidates<'_, T> {
        let sources = self.sources.iter().filter(|(_, source)| source.kind == kind);
        let mut all: Candidates<'_, T> = match kind {
            FetchKind::Bulk => {
                sources.map(|(name, source)| (name, source, source.credits())).collect()
            }
            _ => sources.map(|(name, source)| (name, source, source.regular_credits())).collect(),
        };
        // Those that were read longest ago come first.
        all.sort_by_key(|(_, source, _)| source.last_turn);
        all
    }

    fn select(&mut self, request: &mut FetchRequest, now: Instant) {
        let mut bulk = self.of_kind(FetchKind::Bulk);
        let mut regular = self.of_kind(FetchKind::Ample);
        let scarce = self.of_kind(FetchKind::Scarce);
        let is_soon = |source: &FetchSource<T>| source.kind == FetchKind::BulkSoon;
        let has_bulk = !bulk.is_empty() || self.sources.values().any(is_soon);
        let mut saturated_since = HashMap::new();
        let mut count =
            bulk.iter().map(|(_, _, credits)| *credits).fold(self.bulk_size, usize::min);
        for (_, source, _) in &bulk {
            let (key, free) = (pool_key(source), source.pool.free_for_bulk());
            if free > 0 {
                count = count.min(free);
            } else {
                let since = self.saturated_since.get(&key).copied();
                saturated_since.insert(key, since.unwrap_or(now));
            }
        }
        let skipped = fit(&mut bulk, CapacityPool::free_for_bulk, |source, free| {
            let is_alone = count >= BULK_ALONE && !source.is_spread;
            let left = free.checked_sub(count).filter(|_| count > 0)?;
            Some(if is_alone { 0 } else { left })
        });
        // If their subscription has been saturated for long, the others are read like regular ones.
        let is_saturated = |source: &FetchSource<T>| {
            let since = saturated_since.get(&pool_key(source));
            since.is_some_and(|since| now.duration_since(*since) > SATURATED_FOR)
        };
        let skipped = skipped.into_iter().filter(|(_, source, _)| is_saturated(source));
        let skipped = skipped.map(|(name, source, _)| (name, source, source.regular_credits()));
        regular.extend(skipped.filter(|(_, _, credits)| *credits > 0));
        request.awaits_bulk = has_bulk && bulk.is_empty();
        let regular_due =
            self.regular_read_at.is_none_or(|at| now.duration_since(at) >= REGULAR_FETCH_EVERY);
        if has_bulk {
            request.wait = Duration::ZERO;
        }
        let has_regular = !regular.is_empty() || !scarce.is_empty();
        request.is_bulk = has_bulk && !(has_regular && regular_due);
        if request.is_bulk {
            regular = bulk;
        } else {
            if regular.is_empty() {
                regular = scarce;
            } else if !scarce.is_empty() {
                // They take turns: one small count for all would slow down the partitions with ample credits.
                request.wait = request.wait.min(TURN_WAIT);
                if self.turn.is_multiple_of(2) {
                    regular = scarce;
                    request.wait = Duration::ZERO;
                }
            }
            count = share_pools(&regular);
            // All subscriptions together have less than one entry for each: they take turns.
            let take = |source: &FetchSource<T>, free| source.take_regular(free, count);
            if !fit(&mut regular, CapacityPool::free, take).is_empty() {
                request.wait = request.wait.min(TURN_WAIT);
            }
        }
        let selected = regular.iter().take(READ_STREAMS_MAX);
        request.count = count.min(read_max_each(selected.clone()));
        request.streams = selected.map(|(name, ..)| (*name).clone()).collect();
        if !request.is_bulk {
            self.regular_read_at = Some(now);
        }
        self.saturated_since = saturated_since;
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
                    source.has_more = false;
                }
            }
        }
        let mut total = 0;
        for (stream, entries) in batches {
            total += entries;
            if let Some(source) = self.sources.get_mut(stream) {
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

/// Identifies the subscription of a partition.
fn pool_key<T>(source: &FetchSource<T>) -> usize {
    Arc::as_ptr(&source.pool) as usize
}

/// The entries of each partition, so that those of one subscription share its free capacity.
fn share_pools<T>(candidates: &Candidates<'_, T>) -> usize {
    let mut wanted: HashMap<usize, usize> = HashMap::new();
    for (_, source, _) in candidates {
        *wanted.entry(pool_key(source)).or_default() += 1;
    }
    let share = |(_, source, credits): &(_, &FetchSource<T>, usize)| {
        let free = source.pool.free().saturating_sub(source.pool.reserve());
        (*credits).min((free / wanted[&pool_key(source)]).max(1))
    };
    candidates.iter().map(share).min().unwrap_or(0)
}

/// How many entries of each partition one read may ask for, so that those of a subscription are not too many in bytes if
/// they are larger than recent ones.
fn read_max_each<'a, T: 'a>(
    selected: impl Iterator<Item = &'a (&'a StreamName, &'a FetchSource<T>, usize)>,
) -> usize {
    let mut pools: HashMap<usize, (usize, usize)> = HashMap::new();
    for (_, source, _) in selected {
        let (partitions, _) =
            pools.entry(pool_key(source)).or_insert_with(|| (0, source.pool.read_max()));
        *partitions += 1;
    }
    let each = pools.into_values().map(|(partitions, most)| (most / partitions).max(1));
    each.min().unwrap_or(usize::MAX)
}

/// Keeps the partitions that fit into the free capacity of their subscription, and returns those that do not. `take`
/// tells what each of them leaves of it.
fn fit<'a, T>(
    candidates: &mut Candidates<'a, T>,
    free: impl Fn(&CapacityPool) -> usize,
    take: impl Fn(&FetchSource<T>, usize) -> Option<usize>,
) -> Candidates<'a, T> {
    // Free capacity, and whether capacity is awaited.
    let mut budgets: HashMap<usize, (usize, bool)> = HashMap::new();
    let mut skipped = Vec::new();
    candidates.retain(|candidate| {
        let (_, source, _) = candidate;
        let (left, is_awaited) = budgets.entry(pool_key(source)).or_insert_with(|| {
            let is_awaited = source.pool.is_awaited();
            // Set before the capacity is read, so that capacity freed meanwhile wakes the fetcher.
            source.pool.set_awaited(true);
            (free(&source.pool), is_awaited)
        });
        let rest = take(source, *left);
        if let Some(rest) = rest {
            *left = rest;
        } else {
            *is_awaited = true;
            skipped.push(*candidate);
        }
        rest.is_some()
    });
    for (_, source, _) in candidates {
        source.pool.set_awaited(budgets[&pool_key(source)].1);
    }
    skipped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConsumerConfig;

    /// Partitions of one subscription: 24 with 5 messages each, or 32 in bulk.
    struct Fixture {
        credits: FetchCredits<()>,
        pool: Arc<CapacityPool>,
        now: Instant,
    }

    fn name(partition: usize) -> StreamName {
        StreamName::new(format!("orders:{partition:02}")).unwrap()
    }

    impl Fixture {
        fn new(partitions: usize) -> Self {
            let config = ConsumerConfig {
                in_flight_max: 128,
                in_flight_bytes_max: usize::MAX,
                ..Default::default()
            };
            let pool = Arc::new(CapacityPool::new(&config));
            pool.divide(24, 24);
            let mut credits = FetchCredits::new(256, Duration::from_secs(5));
            for partition in 0..partitions {
                let source = FetchSource::new(0, (), Arc::clone(&pool), false);
                credits.sources.insert(name(partition), source);
            }
            Self { credits, pool, now: Instant::now() }
        }

        fn next(&mut self) -> FetchRequest {
            self.credits.next_request(self.now, |()| true)
        }

        /// Reads with these credits; each stream returns as many entries as were asked for.
        fn read_all(&mut self, partitions: usize, credits: isize, is_fast: bool) -> FetchRequest {
            for partition in 0..partitions {
                self.credits.change(&name(partition), 0, credits, is_fast);
            }
            let request = self.next();
            let full = request.streams.iter().map(|stream| (stream, request.count));
            self.credits.record_read(&request, full);
            request
        }
    }

    #[test]
    fn only_partitions_with_credits_are_read_and_no_more_than_they_have() {
        let mut fixture = Fixture::new(3);
        assert!(fixture.next().streams.is_empty());
        assert!(fixture.credits.change(&name(0), 0, 5, false), "it is not being read");
        assert!(fixture.credits.change(&name(1), 0, 4, false));
        assert!(!fixture.credits.change(&name(2), 7, 5, false), "another consumer has it");
        let request = fixture.next();
        assert_eq!((request.streams.len(), request.count), (2, 4));
        assert_eq!(request.wait, Duration::from_secs(5));
        assert!(!fixture.credits.change(&name(0), 0, 1, false), "it is being read");
        fixture.credits.change(&name(1), 0, -4, false);
        assert_eq!(fixture.next().streams, [name(0)]);
    }

    #[test]
    fn bulk_reads_need_a_backlog_that_is_handled_fast() {
        for (is_fast, has_backlog) in [(true, true), (false, true), (true, false)] {
            let mut fixture = Fixture::new(2);
            let request = fixture.read_all(2, if is_fast { 32 } else { 5 }, is_fast);
            assert_eq!((request.is_bulk, request.count), (false, 5));
            if !has_backlog {
                let none = request.streams.iter().map(|stream| (stream, 0));
                fixture.credits.record_read(&request, none);
            }
            let request = fixture.next();
            assert_eq!(request.is_bulk, is_fast && has_backlog);
            assert_eq!(request.count, if request.is_bulk { 32 } else { 5 });
        }
    }

    #[test]
    fn a_partition_or_subscription_that_is_saturated_for_long_is_no_longer_read_in_bulk() {
        let mut fixture = Fixture::new(1);
        fixture.read_all(1, 32, true);
        fixture.credits.change(&name(0), 0, -27, true);
        let request = fixture.next();
        assert!(request.streams.is_empty() && request.awaits_bulk, "it waits for credits");
        fixture.now += SATURATED_FOR * 2;
        let request = fixture.next();
        assert!(!request.awaits_bulk && request.streams.is_empty(), "beyond the regular limit");

        let mut fixture = Fixture::new(1);
        fixture.read_all(1, 32, true);
        fixture.pool.add_in_flight(100);
        assert!(fixture.next().awaits_bulk, "the subscription has no capacity");
        assert!(fixture.pool.is_awaited());
        fixture.now += SATURATED_FOR * 2;
        let request = fixture.next();
        assert_eq!((request.streams.len(), request.count, request.is_bulk), (1, 5, false));
    }

    #[test]
    fn a_partition_that_becomes_fast_while_its_subscription_is_saturated_is_read() {
        let mut fixture = Fixture::new(1);
        fixture.read_all(1, 5, false);
        fixture.credits.change(&name(0), 0, -5, false);
        fixture.pool.add_in_flight(100);
        let request = fixture.next();
        assert!(request.streams.is_empty() && !fixture.credits.awaits_capacity());
        assert!(!fixture.credits.change(&name(0), 0, 27, true), "beyond the regular limit");
        assert!(fixture.credits.change(&name(0), 0, 5, true), "the fetcher is woken");
        fixture.next();
        fixture.now += SATURATED_FOR * 2;
        let request = fixture.next();
        assert_eq!((request.streams.len(), request.count, request.is_bulk), (1, 5, false));
    }

    #[test]
    fn stalled_partitions_leave_one_message_for_each_other_partition() {
        let mut fixture = Fixture::new(24);
        // Two that were assigned before the others have all that is not reserved, a third has one.
        for (partition, credits) in [(0, 0), (1, 0), (2, 4)] {
            fixture.credits.change(&name(partition), 0, credits, false);
        }
        for partition in 3..24 {
            fixture.credits.change(&name(partition), 0, 5, false);
        }
        fixture.pool.add_in_flight(128 - fixture.pool.reserve());
        let request = fixture.next();
        assert_eq!((request.streams.len(), request.count), (21, 1));
        assert!(!request.streams.contains(&name(2)), "its handler is busy");
    }

    #[test]
    fn one_read_is_bounded_in_bytes_even_if_messages_become_larger() {
        let mut fixture = Fixture::new(0);
        let config = ConsumerConfig { in_flight_bytes_max: 8 << 20, ..Default::default() };
        let pool = Arc::new(CapacityPool::new(&config));
        pool.divide(8, 8);
        for _ in 0..20 {
            pool.record_largest(100);
        }
        for partition in 0..8 {
            let source = FetchSource::new(0, (), Arc::clone(&pool), false);
            fixture.credits.sources.insert(name(partition), source);
        }
        // 32 messages of a megabyte are four times the limit.
        let request = fixture.read_all(8, 125, false);
        assert_eq!((request.streams.len(), request.count), (8, 4));
        for partition in 8..64 {
            let source = FetchSource::new(0, (), Arc::clone(&pool), false);
            fixture.credits.sources.insert(name(partition), source);
        }
        let request = fixture.read_all(64, 125, false);
        assert_eq!((request.streams.len(), request.count), (64, 1), "one for each partition");
    }

    #[test]
    fn partitions_share_the_capacity_of_their_subscription_or_take_turns() {
        let mut fixture = Fixture::new(20);
        let shared = 128 - fixture.pool.reserve();
        fixture.pool.add_in_flight(shared - 60);
        let request = fixture.read_all(20, 5, false);
        assert_eq!((request.streams.len(), request.count), (20, 3));
        fixture.pool.add_in_flight(60 - 8);
        for partition in 0..20 {
            fixture.credits.change(&name(partition), 0, -3, false);
        }
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3 {
            let request = fixture.next();
            assert_eq!((request.streams.len(), request.count), (8, 1));
            assert!(fixture.pool.is_awaited());
            seen.extend(request.streams);
        }
        assert_eq!(seen.len(), 20, "no partition starves");
        fixture.pool.add_in_flight(8);
        assert!(fixture.next().streams.is_empty());
    }
}
