//! Consumes one partition: its in-flight messages, its handler tasks and the settlements not yet sent.
//!
//! Upstream: `fetcher` delivers entries that were read, `reclaim` entries of other consumers. Downstream:
//! `handler_task` calls the handler, `ack_batcher` settles.
//! Guarantees: never more in flight than `capacity` allows; at most `concurrency` handlers at once; after termination,
//! the outcome of a handler that is still running has no effect.
//! An idle partition has no tasks: handler tasks and the settle task start when there is work and end with it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{
    ConsumerName, DeliveredEntry, EntryId, Fence, HeldLease, SettleAction, Settlement,
};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::capacity::{BacklogTracker, SLOW_HANDLER};
use super::data_loss_recovery::DataEpoch;
use super::fetcher::Fetcher;
use super::handler_task;
use super::key_queues::{InFlightMessage, KeyQueues};
use super::maintenance::PartitionTimers;
use super::metrics::PartitionMetrics;
use super::repartition_barrier::Barrier;
use super::retry_or_dead_letter::{DeliveryResult, Disposition, FinishedDelivery, MessagePolicy};
use super::subscription_context::SubscriptionContext;
use crate::config::Mode;
use crate::group::rebalance_listener::FencedSignal;

/// The consumer of one partition.
pub(super) struct PartitionConsumer {
    pub(super) context: Arc<SubscriptionContext>,
    pub(super) policy: MessagePolicy,
    pub(super) consumer_name: ConsumerName,
    pub(super) lease: HeldLease,
    pub(super) fence: Option<Fence>,
    pub(super) fenced: FencedSignal,
    pub(super) data_epoch: Arc<DataEpoch>,
    pub(super) metrics: PartitionMetrics,
    pub(super) fetcher: Arc<Fetcher>,
    pub(super) backlog: BacklogTracker,
    /// Whether the fetcher may read new entries.
    pub(super) is_reading: AtomicBool,
    /// Whether the fetcher reads the partition, or was woken because the partition has capacity.
    pub(super) is_fetch_requested: AtomicBool,
    /// In-flight messages, which count against the limit of the partition.
    pub(super) in_flight: AtomicUsize,
    pub(super) ready: AtomicUsize,
    /// In-flight messages that a barrier blocks, and those queued behind them. They take no capacity: otherwise two
    /// partitions could block each other forever.
    pub(super) blocked: AtomicUsize,
    /// Whether a message was released here and is to be reclaimed.
    has_released: AtomicBool,
    pub(super) timers: PartitionTimers,
    /// Whether a failed read may have fetched entries that this process has not seen.
    pub(super) has_unseen: AtomicBool,
    /// Held while pending entries are reclaimed.
    reclaim_lock: Semaphore,
    state: Mutex<PartitionConsumerState>,
    changed: Notify,
    pub(super) tasks: Mutex<JoinSet<()>>,
}

#[derive(Debug)]
pub(super) struct PartitionConsumerState {
    pub(super) phase: PartitionPhase,
    pub(super) queues: KeyQueues,
    /// The delivery of each handler task; `None` before it has taken one.
    pub(super) running: Vec<Option<DeliveredEntry>>,
    pub(super) idle_slots: Vec<usize>,
    /// Finished deliveries that are not settled yet.
    pub(super) unsettled: Vec<Settlement>,
    pub(super) oldest_unsettled: Option<Instant>,
    /// The batch that is being settled.
    pub(super) settling: Arc<Vec<Settlement>>,
    pub(super) has_settle_task: bool,
    /// Incremented when all tasks are aborted; results of an older generation are ignored.
    pub(super) generation: u64,
    waiters: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartitionPhase {
    Active,
    /// Running handlers finish; everything else is released.
    Stopping,
    /// Nothing new is read; all in-flight messages are handled.
    Draining,
    Terminated,
}

/// Identifies a handler task.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandlerSlot {
    index: usize,
    generation: u64,
}

/// What a handler task does next.
pub(super) struct HandlerStep {
    pub(super) next: Option<InFlightMessage>,
    /// Another task was woken and must run before the next handler.
    pub(super) should_yield: bool,
}

impl PartitionConsumer {
    pub(super) fn new(
        context: Arc<SubscriptionContext>,
        policy: MessagePolicy,
        consumer_name: ConsumerName,
        lease: HeldLease,
        fenced: FencedSignal,
        fetcher: Arc<Fetcher>,
    ) -> Self {
        let (topic, group) = (&context.topic, &context.group);
        let metrics = PartitionMetrics::new(topic, policy.partition, group, consumer_name.as_str());
        let fence = (context.config.mode == Mode::Owned).then(|| lease.fence().clone());
        let state = PartitionConsumerState {
            phase: PartitionPhase::Active,
            queues: KeyQueues::new(context.config.order, context.config.blocked_max),
            running: Vec::new(),
            idle_slots: Vec::new(),
            unsettled: Vec::new(),
            oldest_unsettled: None,
            settling: Arc::default(),
            has_settle_task: false,
            generation: 0,
            waiters: 0,
        };
        Self {
            context,
            consumer_name,
            lease,
            fence,
            fenced,
            data_epoch: Arc::new(DataEpoch::new(policy.data_epoch())),
            policy,
            metrics,
            fetcher,
            backlog: BacklogTracker::default(),
            is_reading: AtomicBool::new(false),
            is_fetch_requested: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            blocked: AtomicUsize::new(0),
            has_released: AtomicBool::new(false),
            timers: PartitionTimers::default(),
            has_unseen: AtomicBool::new(false),
            reclaim_lock: Semaphore::new(1),
            state: Mutex::new(state),
            changed: Notify::new(),
            tasks: Mutex::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PartitionConsumerState> {
        self.state.lock().expect("no code panics while it holds the state of a partition")
    }

    /// Starts a task that is aborted when this consumer terminates.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().expect("no code panics while it holds the tasks");
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Stops reading new entries. Returns whether the partition was being read.
    pub(super) fn stop_reading(&self) -> bool {
        self.is_reading.swap(false, Ordering::AcqRel)
    }

    pub(super) fn is_reading(&self) -> bool {
        self.is_reading.load(Ordering::Acquire)
    }

    /// Whether a message was released here and is to be reclaimed.
    pub(super) fn has_released(&self) -> bool {
        self.has_released.load(Ordering::Relaxed)
    }

    pub(super) fn clear_released(&self) {
        self.has_released.store(false, Ordering::Relaxed);
    }

    /// Starts reading new entries, unless the consumer is shutting down.
    pub(super) fn start_reading(self: &Arc<Self>) {
        if self.lock().phase == PartitionPhase::Active {
            self.is_reading.store(true, Ordering::Release);
            self.fetcher.add(self);
        }
    }

    /// Waits until no other task reclaims pending entries.
    pub(super) async fn reclaim_permit(&self) -> SemaphorePermit<'_> {
        self.reclaim_lock.acquire().await.expect("the semaphore is never closed")
    }

    /// Whether a task reclaims pending entries, or waits for capacity to do so.
    pub(super) fn is_reclaiming(&self) -> bool {
        self.reclaim_lock.available_permits() == 0
    }

    /// Takes entries that were read or reclaimed.
    pub(super) fn receive(self: &Arc<Self>, entries: Vec<DeliveredEntry>) {
        if entries.is_empty() {
            return;
        }
        let mut state = self.lock();
        match state.phase {
            PartitionPhase::Active | PartitionPhase::Draining => {}
            PartitionPhase::Stopping => {
                state.release(entries.iter().map(|entry| entry.id));
                drop(state);
                self.settle_now();
                return;
            }
            PartitionPhase::Terminated => return,
        }
        self.add_in_flight(entries.len());
        self.metrics.set_in_flight(self.context.in_flight.load(Ordering::Relaxed));
        let now = Instant::now();
        entries.into_iter().for_each(|entry| state.queues.add(entry, now));
        self.start_handlers(state);
    }

    /// Starts handler tasks for the messages that are ready, up to `concurrency`.
    pub(super) fn start_handlers(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, PartitionConsumerState>,
    ) {
        self.ready.store(state.queues.ready_len(), Ordering::SeqCst);
        self.blocked.store(state.queues.blocked_len(), Ordering::SeqCst);
        if !self.may_start_handler(&state) {
            return;
        }
        let running = state.running.len() - state.idle_slots.len();
        let free = self.context.config.concurrency.saturating_sub(running);
        for _ in 0..free.min(state.queues.ready_len()) {
            let index = state.idle_slots.pop().unwrap_or_else(|| {
                state.running.push(None);
                state.running.len() - 1
            });
            let slot = HandlerSlot { index, generation: state.generation };
            self.spawn(handler_task::run(Arc::clone(self), slot));
        }
    }

    /// The first message of a handler task.
    pub(super) fn first_message(&self, slot: HandlerSlot) -> Option<InFlightMessage> {
        let mut state = self.lock();
        if state.generation != slot.generation {
            return None;
        }
        let next = self.next_message(&mut state, slot);
        drop(state);
        next
    }

    /// Whether a handler may start. Never after the lease ran out: side effects of a handler are not fenced.
    fn may_start_handler(&self, state: &PartitionConsumerState) -> bool {
        state.may_start_handler(self.context.is_paused()) && self.lease.is_valid()
    }

    fn next_message(
        &self,
        state: &mut PartitionConsumerState,
        slot: HandlerSlot,
    ) -> Option<InFlightMessage> {
        let may_start = self.may_start_handler(state);
        let next = if may_start { self.next_unblocked(&mut state.queues) } else { None };
        self.ready.store(state.queues.ready_len(), Ordering::SeqCst);
        state.running[slot.index] = next.as_ref().map(|item| item.delivery.clone());
        if next.is_none() {
            state.idle_slots.push(slot.index);
        }
        next
    }

    /// The next message that no barrier blocks.
    fn next_unblocked(&self, queues: &mut KeyQueues) -> Option<InFlightMessage> {
        loop {
            let Some(item) = queues.next() else {
                if !queues.evicted(1).is_empty() {
                    self.context.barriers.has_blocked.notify_one();
                }
                return None;
            };
            if self.context.barriers.blocking(&item, self.policy.partition).is_none() {
                return Some(item);
            }
            queues.block(item);
            self.blocked.store(queues.blocked_len(), Ordering::SeqCst);
            self.context.barriers.has_blocked.notify_one();
            // A blocked message takes no capacity.
            self.changed.notify_waiters();
        }
    }

    /// The barriers that block messages of this partition.
    pub(super) fn awaited_barriers(&self) -> Vec<Barrier> {
        if self.blocked.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let state = self.lock();
        let barriers = &self.context.barriers;
        // If a barrier opened since, the same check unblocks its messages.
        state
            .queues
            .blocked()
            .map(|item| {
                let blocking = barriers.blocking(item, self.policy.partition);
                blocking.unwrap_or(Barrier::TopicRefresh)
            })
            .collect()
    }

    /// Starts handlers for messages whose barrier is open.
    pub(super) fn unblock(self: &Arc<Self>) {
        let mut state = self.lock();
        let (barriers, partition) = (&self.context.barriers, self.policy.partition);
        state.queues.unblock(|item| barriers.blocking(item, partition).is_none());
        self.blocked.store(state.queues.blocked_len(), Ordering::SeqCst);
        self.wake_waiters(&state);
        self.start_handlers(state);
    }

    /// Records the disposition of a handled message and returns the next message.
    pub(super) fn finish_message(
        self: &Arc<Self>,
        slot: HandlerSlot,
        item: InFlightMessage,
        disposition: Disposition,
        took: Option<Duration>,
    ) -> HandlerStep {
        let mut state = self.lock();
        if state.generation != slot.generation {
            return HandlerStep { next: None, should_yield: false };
        }
        let received_at = item.received_at;
        match state.adjust_for_phase(disposition) {
            Disposition::Settle(finished)
                if finished.result == DeliveryResult::Release && state.stays_queued(&item) =>
            {
                self.metrics.record_result(DeliveryResult::Release, took);
                self.context.count(DeliveryResult::Release);
                self.release_in_place(&mut state, item);
            }
            Disposition::Settle(finished) => {
                self.metrics.record_result(finished.result, took);
                self.context.count(finished.result);
                if finished.result == DeliveryResult::Release {
                    self.has_released.store(true, Ordering::Relaxed);
                }
                state.queues.complete(item.key.as_ref());
                state.unsettled.push(Settlement { id: item.delivery.id, action: finished.action });
                self.remove_in_flight(1);
            }
            Disposition::RetryInPlace { after } => {
                self.metrics.record_in_place_retry(took.unwrap_or_default());
                self.context.count(DeliveryResult::Retry);
                self.retry_in_place(&mut state, item, after);
            }
        }
        let next = self.next_message(&mut state, slot);
        let mut should_yield = self.start_settle_task(&mut state, next.is_none());
        should_yield |= state.waiters > 0;
        self.wake_waiters(&state);
        drop(state);
        if next.is_none() {
            self.backlog.record_completed(received_at);
        }
        should_yield |= self.request_fetch(took.is_some_and(|took| took >= SLOW_HANDLER));
        HandlerStep { next, should_yield }
    }

    /// The ids of all in-flight entries, including those being settled.
    pub(super) fn in_flight_ids(&self) -> HashSet<EntryId> {
        let state = self.lock();
        let settling = state.unsettled.iter().chain(state.settling.iter()).map(|entry| entry.id);
        let running = state.running.iter().flatten().map(|delivery| delivery.id);
        state.queues.ids().chain(running).chain(settling).collect()
    }

    /// Drops entries that another consumer owns now or that no longer exist, unless a handler already runs on them.
    pub(super) fn discard(self: &Arc<Self>, gone: &HashSet<EntryId>) {
        let mut state = self.lock();
        let removed = state.queues.remove(gone);
        self.blocked.store(state.queues.blocked_len(), Ordering::SeqCst);
        self.remove_in_flight(removed);
        self.wake_waiters(&state);
        self.start_handlers(state);
        self.request_fetch(true);
    }

    /// Starts handlers that could not start while the lease was not trusted.
    pub(super) fn start_waiting_handlers(self: &Arc<Self>) {
        if self.ready.load(Ordering::SeqCst) > 0 {
            self.start_handlers(self.lock());
        }
    }

    /// Starts handlers again after a pause.
    pub(super) fn resume(self: &Arc<Self>) {
        self.start_handlers(self.lock());
        self.fetcher.wake();
    }

    /// Waits until the state of the partition satisfies a condition. Cancel-safe.
    pub(super) async fn wait_until(&self, condition: impl Fn(&PartitionConsumerState) -> bool) {
        // The count drops with the guard, also if this future is cancelled.
        self.lock().waiters += 1;
        let _waiter = StateWaiter(self);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if condition(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    pub(super) fn wake_waiters(&self, state: &PartitionConsumerState) {
        if state.waiters > 0 {
            self.changed.notify_waiters();
        }
    }
}

impl PartitionConsumerState {
    fn may_start_handler(&self, is_paused: bool) -> bool {
        match self.phase {
            PartitionPhase::Active => !is_paused,
            PartitionPhase::Draining => true,
            PartitionPhase::Stopping | PartitionPhase::Terminated => false,
        }
    }

    /// While stopping, a message that would be retried in place is released: the next owner retries it.
    fn adjust_for_phase(&self, disposition: Disposition) -> Disposition {
        match disposition {
            Disposition::RetryInPlace { .. } if self.phase == PartitionPhase::Stopping => {
                let (action, result) = (SettleAction::Release, DeliveryResult::Release);
                Disposition::Settle(FinishedDelivery { action, result })
            }
            disposition => disposition,
        }
    }

    /// Whether a released message stays at the head of its key's queue: otherwise later messages of its key would
    /// overtake it.
    fn stays_queued(&self, item: &InFlightMessage) -> bool {
        let is_working = matches!(self.phase, PartitionPhase::Active | PartitionPhase::Draining);
        item.key.is_some() && is_working
    }

    pub(super) fn release(&mut self, ids: impl IntoIterator<Item = EntryId>) {
        let releases = ids.into_iter().map(|id| Settlement { id, action: SettleAction::Release });
        self.unsettled.extend(releases);
    }

    /// Whether a handler is running.
    pub(super) fn is_handling(&self) -> bool {
        self.running.iter().any(Option::is_some)
    }

    /// Whether no handler is running or about to start.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_handling() && self.queues.ready_len() == 0
    }

    /// Whether nothing is in flight except what is to be settled.
    pub(super) fn is_drained(&self) -> bool {
        !self.is_handling() && self.queues.len() == 0
    }

    pub(super) fn is_settled(&self) -> bool {
        self.unsettled.is_empty() && self.settling.is_empty()
    }
}

struct StateWaiter<'a>(&'a PartitionConsumer);

impl Drop for StateWaiter<'_> {
    fn drop(&mut self) {
        self.0.lock().waiters -= 1;
    }
}
