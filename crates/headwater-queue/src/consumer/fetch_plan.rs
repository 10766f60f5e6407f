//! Plans the next read of a fetcher: which partitions, and how many entries of each.
//!
//! Upstream: `fetcher` knows the partitions, `capacity` how much each may take. Downstream: one read of the selected
//! partitions, with a count that fits the one with the least capacity.
//! Guarantees: the partitions of a subscription together get no more than it may have in flight; no partition starves: a
//! skipped one comes first in one of the next turns.
//!
//! Partitions with a backlog that is handled fast are read in bulk, a few at a time: reading and settling cost much per
//! partition and little per message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::StreamName;
use headwater_stream::limits::READ_STREAMS_MAX;
use tokio::time::Instant;

use super::capacity::Capacity;
use super::partition_consumer::PartitionConsumer;
use super::subscription_context::SubscriptionContext;

/// How long a read waits when partitions take turns.
const TURN_WAIT: Duration = Duration::from_millis(20);
/// Minimum entries per partition of a bulk read.
const BULK_MIN: usize = 32;
/// From this many entries on, a bulk read takes one partition alone: more partitions would save little, and their
/// handlers would compete for processors with each other and with a server on the same machine (measured: 1.5 times the
/// throughput on two processors). Partitions that may be on different servers are read together.
const BULK_ALONE: usize = 128;

/// The streams of one read.
pub(super) struct FetchSelection {
    pub(super) streams: Vec<StreamName>,
    /// Entries per stream.
    pub(super) count: usize,
    /// Maximum time to wait for an entry.
    pub(super) wait_max: Option<Duration>,
    pub(super) is_bulk: bool,
    /// Whether partitions wait for capacity for a bulk read, so that the read must not block at the server.
    pub(super) awaits_bulk: bool,
}

/// Partitions that could be read, by capacity.
#[derive(Default)]
pub(super) struct FetchPlanner {
    bulk: FetchCandidates,
    ample: FetchCandidates,
    scarce: FetchCandidates,
    /// Whether partitions will have capacity for a bulk read soon.
    has_bulk_soon: bool,
}

impl FetchPlanner {
    pub(super) fn add(&mut self, consumer: &Arc<PartitionConsumer>, now: Instant) {
        match consumer.capacity(now) {
            Capacity::None => {}
            Capacity::BulkSoon => self.has_bulk_soon = true,
            Capacity::Scarce(free) => self.scarce.add(consumer, free),
            Capacity::Ample(free) => self.ample.add(consumer, free),
            Capacity::Bulk(free) => self.bulk.add(consumer, free),
        }
    }

    /// Selects the partitions of this turn. A bulk read asks each for `bulk_size` entries. While bulk partitions exist,
    /// the others are read when `regular_due`, and no read blocks at the server: it would have to be cancelled as soon
    /// as there is capacity.
    pub(super) fn select(
        self,
        turn: u64,
        bulk_size: usize,
        regular_due: bool,
        now: Instant,
    ) -> FetchSelection {
        let Self { bulk, mut ample, scarce, has_bulk_soon } = self;
        let has_bulk = has_bulk_soon || !bulk.consumers.is_empty();
        let bulk = bulk.select_bulk(bulk_size, &mut ample, now);
        let has_regular = !ample.consumers.is_empty() || !scarce.consumers.is_empty();
        let awaits_bulk = has_bulk && bulk.consumers.is_empty();
        if has_bulk && !(has_regular && regular_due) {
            return FetchSelection { awaits_bulk, ..bulk.selection(Some(Duration::ZERO), true) };
        }
        let mut wait_max = None;
        let mut candidates = ample;
        if candidates.consumers.is_empty() {
            candidates = scarce;
        } else if !scarce.consumers.is_empty() {
            // They take turns: one small count for all would slow down the partitions with ample capacity.
            wait_max = Some(TURN_WAIT);
            if turn.is_multiple_of(2) {
                candidates = scarce;
                wait_max = Some(Duration::ZERO);
            }
        }
        if candidates.limit_to_budgets(turn) {
            wait_max = Some(wait_max.unwrap_or(TURN_WAIT).min(TURN_WAIT));
        }
        if has_bulk {
            wait_max = Some(Duration::ZERO);
        }
        FetchSelection { awaits_bulk, ..candidates.selection(wait_max, false) }
    }
}

/// The size of the next bulk read, after one of so many streams returned so many entries: twice what there was, so that
/// the capacity serves as many partitions as possible.
pub(super) fn next_bulk_size(streams: usize, entries: usize, batch: usize) -> usize {
    (2 * entries / streams.max(1)).clamp(BULK_MIN.min(batch), batch)
}

#[derive(Default)]
struct FetchCandidates {
    consumers: Vec<Arc<PartitionConsumer>>,
    /// The least capacity among them.
    capacity: usize,
}

impl FetchCandidates {
    fn add(&mut self, consumer: &Arc<PartitionConsumer>, capacity: usize) {
        let is_first = self.consumers.is_empty();
        self.capacity = if is_first { capacity } else { self.capacity.min(capacity) };
        self.consumers.push(Arc::clone(consumer));
    }

    fn selection(self, wait_max: Option<Duration>, is_bulk: bool) -> FetchSelection {
        let selected = self.consumers.iter().take(READ_STREAMS_MAX);
        let streams = selected.map(|consumer| {
            consumer.mark_fetch_requested();
            consumer.policy.stream.clone()
        });
        let streams = streams.collect();
        FetchSelection { streams, count: self.capacity, wait_max, is_bulk, awaits_bulk: false }
    }

    /// The partitions that were read longest ago, as many as there is capacity for. If their subscription has been
    /// saturated for long, the others are read like regular ones.
    fn select_bulk(mut self, bulk_size: usize, ample: &mut Self, now: Instant) -> Self {
        self.consumers.sort_by_cached_key(|consumer| consumer.backlog.last_turn());
        let mut budgets = SubscriptionBudgets::default();
        let mut count = bulk_size.min(self.capacity);
        self.consumers.retain(|consumer| {
            let budget = budgets
                .get_or_insert(&consumer.context, |context| context.request_bulk_capacity(now));
            let fits = count.min(budget.capacity);
            budget.streams += 1;
            // One more partition is not worth a much smaller count for all.
            if fits > 0 && fits * 2 >= count && !budget.is_exclusive {
                budget.capacity -= fits;
                budget.selected += 1;
                count = fits;
                let is_spread = consumer.policy.topic.layout.is_spread();
                budget.is_exclusive = count >= BULK_ALONE && !is_spread;
                return true;
            }
            let free = if budget.is_saturated { consumer.capacity_without_bulk() } else { 0 };
            if free > 0 {
                ample.add(consumer, free);
            }
            false
        });
        for (context, budget) in budgets.0.values() {
            context.set_awaits_bulk(budget.selected < budget.streams);
        }
        self.capacity = count;
        self
    }

    /// If the partitions of a subscription together could exceed `in_flight_max`, they share what is left, or take
    /// turns. Returns whether partitions were skipped.
    fn limit_to_budgets(&mut self, turn: u64) -> bool {
        let mut budgets = SubscriptionBudgets::default();
        let oversubscribed =
            self.consumers.iter().filter(|consumer| consumer.context.is_oversubscribed());
        for consumer in oversubscribed {
            let budget = budgets.get_or_insert(&consumer.context, |context| {
                // Set before the capacity is read, so that a handler that frees capacity meanwhile wakes the fetcher.
                context.set_skips_partitions(true);
                (context.free_capacity(), false)
            });
            budget.streams += 1;
        }
        if budgets.0.is_empty() {
            return false;
        }
        for (context, budget) in budgets.0.values() {
            context.set_skips_partitions(budget.capacity < budget.streams);
        }
        let all = budgets.0.values().map(|(_, budget)| budget);
        let sufficient = all.filter(|budget| budget.capacity >= budget.streams);
        let smallest = sufficient.map(|budget| budget.capacity / budget.streams).min();
        let before = self.consumers.len();
        if budgets.0.values().any(|(_, budget)| budget.capacity < budget.streams) {
            self.capacity = 1;
            self.consumers.sort_unstable_by(|a, b| a.policy.stream.cmp(&b.policy.stream));
            let shift = usize::try_from(turn).unwrap_or(0) % before;
            self.consumers.rotate_left(shift);
            self.consumers.retain(|consumer| budgets.take_one(&consumer.context));
        }
        self.capacity = self.capacity.min(smallest.unwrap_or(1));
        self.consumers.len() < before
    }
}

/// The free capacity of each subscription.
#[derive(Default)]
struct SubscriptionBudgets(HashMap<usize, (Arc<SubscriptionContext>, SubscriptionBudget)>);

struct SubscriptionBudget {
    capacity: usize,
    /// Whether there has been no capacity for long.
    is_saturated: bool,
    /// Streams that could be read.
    streams: usize,
    /// Streams that are read.
    selected: usize,
    /// Whether one of them is read alone.
    is_exclusive: bool,
}

impl SubscriptionBudgets {
    /// The budget of a subscription; `measure` is called the first time.
    fn get_or_insert(
        &mut self,
        context: &Arc<SubscriptionContext>,
        measure: impl FnOnce(&SubscriptionContext) -> (usize, bool),
    ) -> &mut SubscriptionBudget {
        let (_, budget) = self.0.entry(Arc::as_ptr(context) as usize).or_insert_with(|| {
            let (capacity, is_saturated) = measure(context);
            let budget = SubscriptionBudget {
                capacity,
                is_saturated,
                streams: 0,
                selected: 0,
                is_exclusive: false,
            };
            (Arc::clone(context), budget)
        });
        budget
    }

    /// Takes one unit of a subscription's budget. Returns whether there was one; always true without a budget.
    fn take_one(&mut self, context: &Arc<SubscriptionContext>) -> bool {
        let Some((_, budget)) = self.0.get_mut(&(Arc::as_ptr(context) as usize)) else {
            return true;
        };
        let fits = budget.capacity > 0;
        budget.capacity = budget.capacity.saturating_sub(1);
        fits
    }
}
