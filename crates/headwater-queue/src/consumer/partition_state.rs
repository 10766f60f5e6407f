//! The state of one partition: which messages are in flight, and what happens next. A pure state machine: an event goes
//! in, actions come out ([`PartitionState::on`]). No tasks, no locks, no clock, no backend.
//!
//! Upstream: `partition_driver` passes events. Downstream: it executes the actions. `reclaim_state`, `settle_state` and
//! `shutdown_state` hold the parts about pending entries, about settling and about the end.
//! Guarantees, whatever the order of events: never more in flight than the limit plus what was reclaimed or read before
//! it shrank, blocked messages aside; with [`MessageOrder::PerKey`](crate::MessageOrder::PerKey) one message of a key at
//! a time, in order, also over retries; every message is settled once or left pending; after
//! [`Action::Terminated`], the outcome of a handler that is still running has no effect.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    ConsumerName, DeliveredEntry, EntryId, Fields, PendingDelivery, ReclaimResult, SettleAction,
    Settlement, StreamError,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::capacity_pool::PartitionLimits;
use super::key_queues::{InFlightMessage, KeyQueues};
use super::reclaim_state::{ReclaimPurpose, ReclaimScope, ReclaimState};
use super::retry_or_dead_letter::{DeliveryResult, Disposition};
use super::settle_state::SettleState;
use super::shutdown_state::ShutdownState;
use crate::config::{ConsumerConfig, Mode, RECLAIM_IDLE_DEFAULT};
use crate::limits::BLOCKED_IDS_MAX;

/// A message that completes this soon after it was received was handled fast.
const FAST_WITHIN: Duration = Duration::from_millis(20);
/// A handler that takes this long is slow: what waits for its capacity does not wait for more.
pub(super) const SLOW_HANDLER: Duration = Duration::from_millis(1);
/// How soon a message that was released here is tried again, or reclaimed.
const RELEASED_PAUSE: Duration = Duration::from_secs(1);
/// Minimum time between two searches for orphaned entries.
const SEARCH_EVERY: Duration = Duration::from_secs(5);
/// Minimum interval of keep-alives.
const KEEP_ALIVE_MIN: Duration = Duration::from_millis(500);
/// Messages whose payload is read again in one step.
const RELOAD_PAGE: usize = 64;

/// What happened.
#[derive(Debug)]
pub(super) enum PartitionEvent {
    /// The data epoch was observed: consumption may begin.
    Started,
    /// The fetcher read these entries. They use up credits.
    EntriesRead(Vec<DeliveredEntry>),
    /// A read failed that may have fetched entries of this partition. The fetcher reads no more until it is told to.
    ReadFailed,
    HandlersFinished(Vec<FinishedMessage>),
    /// The batch of [`Action::Settle`] is settled, or was given up; except these, for whose follow-ups the backend is too
    /// full.
    Settled(Vec<Settlement>),
    /// The batch of [`Action::WriteFollowUps`] is settled, or was given up; except these, which could not be written.
    FollowUpsWritten(Vec<Settlement>),
    PendingListed(Result<Vec<PendingDelivery>, StreamError>),
    Reclaimed(Result<ReclaimResult, StreamError>),
    /// One more delivery of a message was counted; `None` if it is no longer pending.
    DeliveryCounted(EntryId, Option<u64>),
    /// Payloads were read again; `None` if the entry is gone.
    Reloaded(Vec<(EntryId, Option<Fields>)>),
    /// A keep-alive found these entries no longer pending for this consumer.
    NoLongerPending {
        ids: Vec<EntryId>,
        is_data_lost: bool,
    },
    BarrierOpened,
    LimitsChanged(PartitionLimits),
    Paused(bool),
    /// Search for orphaned entries, if the last search is long enough ago.
    SearchOrphans,
    /// Reclaim the entries of a dead consumer.
    MemberDied(ConsumerName, ReclaimReply),
    /// No handler started on these, and none will.
    Withdrawn(Vec<EntryId>),
    /// Finish what is in flight: with [`PartitionPhase::Stopping`] running handlers only, with
    /// [`PartitionPhase::Draining`] all messages.
    ShutDown {
        phase: PartitionPhase,
        drain: Duration,
    },
    /// The fetcher can deliver no more entries of this partition.
    LastReadEnded,
    /// The lease is lost, or the backend answered `Fenced`.
    LeaseLost,
    /// The subscription was dropped: everything stays pending.
    Dropped,
    /// The time of [`PartitionState::next_deadline`] has come.
    Tick,
}

/// What to do.
#[derive(Debug)]
pub(super) enum Action {
    Start(Vec<InFlightMessage>),
    /// Settle this batch; [`PartitionEvent::Settled`] follows.
    Settle(Arc<Vec<Settlement>>),
    /// Settle this batch, whose follow-ups may wait for another server; [`PartitionEvent::FollowUpsWritten`] follows.
    WriteFollowUps(Arc<Vec<Settlement>>),
    /// Change the entries that the fetcher may read, by so many.
    Credits {
        change: isize,
        is_fast: bool,
    },
    /// The fetcher may read the partition, as far as it has credits, unless more reads than these have failed.
    StartReading {
        failed_reads: u64,
    },
    StopReading,
    ListPending {
        scope: ReclaimScope,
        after: Option<EntryId>,
    },
    Reclaim {
        scope: ReclaimScope,
        ids: Vec<EntryId>,
    },
    /// Count one more delivery of a message that is tried again in place, and was delivered so many times.
    CountDelivery(EntryId, u64),
    Reload(Vec<EntryId>),
    KeepAlive(Vec<EntryId>),
    /// A message was blocked at a barrier.
    NotifyBlocked,
    /// Take back the messages that no handler has started.
    Withdraw,
    /// Wait until the fetcher can deliver no more entries.
    EndReading,
    AbortHandlers,
    Reply(ReclaimReply, bool),
    PartitionReport(PartitionReport),
    /// The end: nothing of this partition has an effect any more.
    Terminated {
        unfinished: Unfinished,
        has_lost_lease: bool,
    },
}

/// For logs and metrics.
#[derive(Debug)]
pub(super) enum PartitionReport {
    /// The results of deliveries and the durations of their handlers; `None` if the handler was not called.
    Handled(Vec<(DeliveryResult, Option<Duration>)>),
    Reclaimed(usize),
    DeletedWhilePending(Vec<EntryId>),
    GoneWhileWaiting(EntryId),
    TakenAway(usize),
    KeptAfterDataLoss(usize),
    Unseen(usize),
    ReclaimFailed {
        scope: ReclaimScope,
        is_retried: bool,
        error: StreamError,
    },
    /// So many retries and dead letters cannot be written that the partition is not read.
    FollowUpLimitReached {
        follow_ups: usize,
        bytes: usize,
    },
    FollowUpLimitLeft,
    Fenced,
    LastReadTimedOut,
    DrainTimedOut,
}

/// Tells whether all entries of a dead consumer were reclaimed. Dropped: they were not.
pub(super) type ReclaimReply = oneshot::Sender<bool>;

/// What was in flight at the end.
#[derive(Debug, Default)]
pub(super) struct Unfinished {
    pub(super) unhandled: Vec<DeliveredEntry>,
    pub(super) unsettled: Vec<Settlement>,
}

/// A handled message.
#[derive(Debug)]
pub(super) struct FinishedMessage {
    pub(super) id: EntryId,
    pub(super) disposition: Disposition,
    /// `None` if the handler was not called.
    pub(super) took: Option<Duration>,
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

/// Settings of the state machine.
#[derive(Clone, Debug)]
pub(super) struct StateSettings {
    pub(super) config: ConsumerConfig,
    pub(super) consumer_name: ConsumerName,
    /// Deliveries that may be attempts in place and do not indicate a crash.
    pub(super) in_place_attempts: u64,
}

#[derive(Debug)]
pub(super) struct PartitionState {
    pub(super) settings: StateSettings,
    pub(super) limits: PartitionLimits,
    pub(super) phase: PartitionPhase,
    /// The time of the current event.
    pub(super) now: Instant,
    pub(super) actions: Vec<Action>,
    is_paused: bool,
    pub(super) is_reading: bool,
    failed_reads: u64,
    pub(super) queues: KeyQueues,
    /// Messages handed to handlers, started or not. Mostly a queue, for which a tree is faster than a hash table.
    pub(super) running: BTreeMap<EntryId, InFlightMessage>,
    /// Finished deliveries that are not settled yet.
    pub(super) settles: SettleState,
    /// Credits given to the fetcher and not used up. Negative if it used credits that were taken back.
    credits: isize,
    /// Whether messages are handled fast, so that bulk reads pay; and what the fetcher was told.
    is_fast: bool,
    reported_fast: bool,
    /// Whether a slow handler finished in the current event.
    had_slow_handler: bool,
    /// When messages in backoff are due.
    backoffs: BTreeSet<(Instant, EntryId)>,
    /// Messages in backoff whose next attempt counts as no delivery.
    released: HashSet<EntryId>,
    is_reloading: bool,
    keep_alive_at: Option<Instant>,
    /// When to reclaim what was released here.
    search_released_at: Option<Instant>,
    pub(super) last_search: Instant,
    pub(super) last_idle_search: Instant,
    pub(super) reclaims: ReclaimState,
    pub(super) shutdown: Option<ShutdownState>,
}

impl PartitionState {
    pub(super) fn new(settings: StateSettings, limits: PartitionLimits, now: Instant) -> Self {
        let queues = KeyQueues::new(settings.config.order, settings.config.blocked_max);
        Self {
            settings,
            limits,
            phase: PartitionPhase::Active,
            now,
            actions: Vec::new(),
            is_paused: false,
            is_reading: false,
            failed_reads: 0,
            queues,
            running: BTreeMap::new(),
            settles: SettleState::default(),
            credits: 0,
            is_fast: false,
            reported_fast: false,
            had_slow_handler: false,
            backoffs: BTreeSet::new(),
            released: HashSet::new(),
            is_reloading: false,
            keep_alive_at: None,
            search_released_at: None,
            last_search: now,
            last_idle_search: now,
            reclaims: ReclaimState::default(),
            shutdown: None,
        }
    }

    /// Takes an event at this time and returns what to do. `is_blocked` tells whether a barrier blocks a message.
    pub(super) fn on(
        &mut self,
        event: PartitionEvent,
        now: Instant,
        is_blocked: &dyn Fn(&InFlightMessage) -> bool,
    ) -> Vec<Action> {
        if self.phase == PartitionPhase::Terminated {
            return Vec::new();
        }
        self.now = now;
        self.had_slow_handler = false;
        match event {
            PartitionEvent::Started => self.start(),
            PartitionEvent::EntriesRead(entries) => {
                self.credits -= isize::try_from(entries.len()).unwrap_or(isize::MAX);
                self.receive(entries);
            }
            PartitionEvent::ReadFailed => {
                self.failed_reads += 1;
                self.expect_unseen();
            }
            PartitionEvent::HandlersFinished(finished) => self.finish(finished),
            PartitionEvent::Settled(deferred) => self.on_settled(deferred),
            PartitionEvent::FollowUpsWritten(unwritten) => self.on_follow_ups_written(unwritten),
            PartitionEvent::PendingListed(rows) => self.on_pending_listed(rows),
            PartitionEvent::Reclaimed(result) => self.on_reclaimed(result),
            PartitionEvent::DeliveryCounted(id, deliveries) => {
                self.on_delivery_counted(id, deliveries);
            }
            PartitionEvent::Reloaded(found) => self.on_reloaded(found),
            PartitionEvent::NoLongerPending { ids, is_data_lost } => {
                self.on_no_longer_pending(ids, is_data_lost);
            }
            PartitionEvent::BarrierOpened => {
                self.queues.unblock(|item| !is_blocked(item));
            }
            PartitionEvent::LimitsChanged(limits) => self.limits = limits,
            PartitionEvent::Paused(is_paused) => self.is_paused = is_paused,
            PartitionEvent::SearchOrphans => self.search_orphans_if_due(SEARCH_EVERY),
            PartitionEvent::MemberDied(dead, reply) => {
                self.reclaims.request(ReclaimPurpose::Member(reply), ReclaimScope::Consumer(dead));
            }
            PartitionEvent::Withdrawn(ids) => self.release_started(&ids),
            PartitionEvent::ShutDown { phase, drain } => self.begin_shutdown(phase, drain),
            PartitionEvent::LastReadEnded => self.on_last_read_ended(),
            PartitionEvent::LeaseLost => self.terminate(true),
            PartitionEvent::Dropped => self.terminate(false),
            PartitionEvent::Tick => {}
        }
        self.advance(is_blocked);
        std::mem::take(&mut self.actions)
    }

    /// Does everything that the state allows. Each step does nothing if there is nothing to do.
    fn advance(&mut self, is_blocked: &dyn Fn(&InFlightMessage) -> bool) {
        if self.phase == PartitionPhase::Terminated {
            return;
        }
        self.end_due_backoffs();
        self.start_ready(is_blocked);
        self.reload_evicted();
        self.keep_alive();
        if self.search_released_at.is_some_and(|at| at <= self.now) {
            self.search_orphans_if_due(Duration::ZERO);
        }
        self.advance_reclaims();
        self.advance_shutdown();
        if self.phase != PartitionPhase::Terminated {
            self.settle();
            self.update_credits();
        }
    }

    /// When [`PartitionEvent::Tick`] is due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        if self.phase == PartitionPhase::Terminated {
            return None;
        }
        let backoff = self.backoffs.first().map(|(at, _)| *at);
        let all = [
            backoff,
            self.keep_alive_at,
            self.search_released_at,
            self.reclaims.deadline(),
            self.settles.deadline(),
            self.shutdown.as_ref().map(ShutdownState::deadline),
        ];
        // What is due has been done, or waits for another event.
        all.into_iter().flatten().filter(|at| *at > self.now).min()
    }

    /// Messages in flight: handed to handlers, queued, in backoff or blocked.
    pub(super) fn in_flight(&self) -> usize {
        self.running.len() + self.queues.len()
    }

    /// In-flight messages that take no capacity.
    pub(super) fn blocked(&self) -> usize {
        self.queues.blocked_len()
    }

    /// In-flight messages that wait at a barrier themselves.
    pub(super) fn blocked_messages(&self) -> impl Iterator<Item = &InFlightMessage> {
        self.queues.blocked()
    }

    /// Whether no handler is running or about to start.
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.queues.ready_len() == 0
    }

    /// Whether a slow handler finished in the last event.
    pub(super) fn had_slow_handler(&self) -> bool {
        self.had_slow_handler
    }

    /// The ids of all in-flight entries, including those being settled.
    pub(super) fn in_flight_ids(&self) -> HashSet<EntryId> {
        self.queues.ids().chain(self.running.keys().copied()).chain(self.settles.ids()).collect()
    }

    fn start(&mut self) {
        match self.settings.config.mode {
            // What the former owner left comes first.
            Mode::Owned => self.reclaims.request(ReclaimPurpose::Start, ReclaimScope::All),
            Mode::Shared => {
                self.start_reading();
                self.search_orphans();
            }
        }
    }

    pub(super) fn start_reading(&mut self) {
        if self.phase == PartitionPhase::Active {
            self.is_reading = true;
            self.actions.push(Action::StartReading { failed_reads: self.failed_reads });
        }
    }

    /// Takes entries that were read or reclaimed.
    pub(super) fn receive(&mut self, entries: Vec<DeliveredEntry>) {
        if self.phase == PartitionPhase::Stopping {
            return self.release(entries.iter().map(|entry| entry.id));
        }
        for entry in entries {
            self.queues.add(entry, self.now);
        }
    }

    /// Hands all messages that are ready to handlers.
    fn start_ready(&mut self, is_blocked: &dyn Fn(&InFlightMessage) -> bool) {
        if !matches!(self.phase, PartitionPhase::Active | PartitionPhase::Draining) {
            return;
        }
        let mut started = Vec::new();
        let mut has_blocked = false;
        while let Some(item) = self.queues.next() {
            if is_blocked(&item) {
                self.queues.block(item);
                has_blocked = true;
            } else {
                self.running.insert(item.delivery.id, item.clone());
                started.push(item);
            }
        }
        if !started.is_empty() {
            self.actions.push(Action::Start(started));
        }
        if has_blocked {
            self.actions.push(Action::NotifyBlocked);
        }
    }

    fn finish(&mut self, finished: Vec<FinishedMessage>) {
        let mut handled = Vec::with_capacity(finished.len());
        for FinishedMessage { id, disposition, took } in finished {
            // Unknown: its handler was aborted, and its message was released.
            let Some(item) = self.running.remove(&id) else { continue };
            self.is_fast = self.now.saturating_duration_since(item.received_at) <= FAST_WITHIN;
            self.had_slow_handler |= took.is_some_and(|took| took >= SLOW_HANDLER);
            let is_stopping = self.phase == PartitionPhase::Stopping;
            match disposition {
                Disposition::RetryInPlace { after } if !is_stopping => {
                    handled.push((DeliveryResult::Retry, Some(took.unwrap_or_default())));
                    let failures = item.failures + 1;
                    self.start_backoff(InFlightMessage { failures, ..item }, after);
                }
                // The next owner tries it again.
                Disposition::RetryInPlace { .. } => {
                    handled.push((DeliveryResult::Release, took));
                    self.complete(item, SettleAction::Release, DeliveryResult::Release);
                }
                // It stays at the head of its key's queue: later messages of its key must not overtake it.
                Disposition::Settle(finished)
                    if finished.result == DeliveryResult::Release
                        && item.key.is_some()
                        && !is_stopping =>
                {
                    handled.push((DeliveryResult::Release, took));
                    self.released.insert(id);
                    self.start_backoff(item, RELEASED_PAUSE);
                }
                Disposition::Settle(finished) => {
                    handled.push((finished.result, took));
                    self.complete(item, finished.action, finished.result);
                }
            }
        }
        if !handled.is_empty() {
            self.report(PartitionReport::Handled(handled));
        }
    }

    fn complete(&mut self, item: InFlightMessage, action: SettleAction, result: DeliveryResult) {
        if result == DeliveryResult::Release {
            self.search_released_at = Some(self.now + RELEASED_PAUSE);
        }
        self.queues.complete(item.key.as_ref());
        self.settles.add(Settlement { id: item.delivery.id, action });
    }

    fn start_backoff(&mut self, item: InFlightMessage, after: Duration) {
        self.backoffs.insert((self.now + after, item.delivery.id));
        self.queues.start_backoff(item);
    }

    fn end_due_backoffs(&mut self) {
        while let Some((at, id)) = self.backoffs.first().copied()
            && at <= self.now
        {
            self.backoffs.pop_first();
            let is_released = self.released.remove(&id);
            let Some(item) = self.queues.in_backoff(id) else { continue };
            let deliveries = item.delivery.deliveries;
            if is_released {
                self.queues.end_backoff(id, deliveries);
            } else {
                // The backend counts each attempt, so that the limit holds across consumers.
                self.actions.push(Action::CountDelivery(id, deliveries));
            }
        }
    }

    fn on_delivery_counted(&mut self, id: EntryId, deliveries: Option<u64>) {
        let Some(item) = self.queues.in_backoff(id) else { return };
        // Trimmed, flushed or acknowledged by an operator. This process has the only copy, so it continues.
        let next = item.delivery.deliveries + 1;
        if deliveries.is_none() {
            self.report(PartitionReport::GoneWhileWaiting(id));
        }
        self.queues.end_backoff(id, deliveries.unwrap_or(next));
    }

    /// Reads messages again whose payload was dropped while they were blocked.
    fn reload_evicted(&mut self) {
        if self.is_reloading {
            return;
        }
        let ids = self.queues.evicted(RELOAD_PAGE);
        if !ids.is_empty() {
            self.is_reloading = true;
            self.actions.push(Action::Reload(ids));
        }
    }

    fn on_reloaded(&mut self, found: Vec<(EntryId, Option<Fields>)>) {
        self.is_reloading = false;
        for (id, fields) in found {
            if self.queues.restore(id, fields) {
                self.report(PartitionReport::DeletedWhilePending(vec![id]));
                self.settles.add(Settlement::ack(id));
            }
        }
    }

    /// Resets the idle time of in-flight entries now and then, so that no other consumer reclaims them.
    fn keep_alive(&mut self) {
        if self.in_flight() == 0 && !self.settles.has_follow_ups() {
            self.keep_alive_at = None;
            return;
        }
        // Pulls of the group do not know `reclaim_idle` and use the default.
        let idle_max = self.settings.config.reclaim_idle.min(RECLAIM_IDLE_DEFAULT);
        let every = (idle_max / 3).max(KEEP_ALIVE_MIN);
        let is_due = self.keep_alive_at.is_some_and(|at| at <= self.now);
        if is_due {
            self.actions.push(Action::KeepAlive(self.in_flight_ids().into_iter().collect()));
        }
        if is_due || self.keep_alive_at.is_none() {
            self.keep_alive_at = Some(self.now + every);
        }
    }

    /// Drops entries that another consumer owns now or that no longer exist, unless they are with a handler. If the
    /// server lost its data, this process has the only copy and keeps them.
    fn on_no_longer_pending(&mut self, ids: Vec<EntryId>, is_data_lost: bool) {
        // Entries that were settled meanwhile are no longer in flight.
        let in_flight = self.in_flight_ids();
        let gone: HashSet<EntryId> = ids.into_iter().filter(|id| in_flight.contains(id)).collect();
        if gone.is_empty() {
            return;
        }
        if is_data_lost {
            return self.report(PartitionReport::KeptAfterDataLoss(gone.len()));
        }
        self.report(PartitionReport::TakenAway(gone.len()));
        self.queues.remove(&gone);
    }

    pub(super) fn release(&mut self, ids: impl IntoIterator<Item = EntryId>) {
        for id in ids {
            self.settles.add(Settlement { id, action: SettleAction::Release });
        }
    }

    /// Releases messages that were handed to handlers.
    pub(super) fn release_started(&mut self, ids: &[EntryId]) {
        for id in ids {
            if let Some(item) = self.running.remove(id) {
                self.queues.complete(item.key.as_ref());
                self.release([*id]);
            }
        }
    }

    /// Free capacity: how many more messages may be in flight, credits of the fetcher included. Blocked messages take
    /// none: otherwise two partitions could block each other forever.
    pub(super) fn free_capacity(&self, limit: usize) -> usize {
        if self.blocked() >= BLOCKED_IDS_MAX {
            return 0;
        }
        limit.saturating_sub(self.in_flight() - self.blocked())
    }

    /// Gives the fetcher credits when a read is worth it, and takes back those that are no longer covered.
    fn update_credits(&mut self) {
        let may_read = self.is_reading
            && !self.is_paused
            && self.phase == PartitionPhase::Active
            && !self.settles.is_over_limit();
        let limit = match self.limits.bulk.filter(|_| self.is_fast) {
            _ if !may_read => 0,
            Some(bulk) => bulk,
            None => self.limits.regular,
        };
        let free = self.free_capacity(limit);
        let change = isize::try_from(free).unwrap_or(isize::MAX) - self.credits;
        // Not for a few entries: a small read costs as much as a large one. But if no message waits for a handler, idle
        // handlers would have to wait for slow ones.
        let is_worth_it = change < 0
            || free * 2 >= limit
            || self.running.len() <= self.settings.config.concurrency;
        let is_news = self.limits.bulk.is_some() && self.is_fast != self.reported_fast;
        if (change != 0 && is_worth_it) || (is_news && may_read) {
            let change = if is_worth_it { change } else { 0 };
            self.credits += change;
            self.reported_fast = self.is_fast;
            self.actions.push(Action::Credits { change, is_fast: self.is_fast });
        }
    }

    pub(super) fn search_orphans_if_due(&mut self, every: Duration) {
        let is_due = self.now.saturating_duration_since(self.last_search) >= every;
        // A search that waits for capacity continues on its own; a second one would only wait beside it.
        if self.is_reading && self.reclaims.is_idle() && is_due {
            self.search_orphans();
        }
    }

    /// Searches for released and orphaned entries.
    fn search_orphans(&mut self) {
        self.last_search = self.now;
        self.search_released_at = None;
        let mut search = |scope| self.reclaims.request(ReclaimPurpose::Orphans, scope);
        match self.settings.config.mode {
            // No other consumer may work on the partition.
            Mode::Owned => search(ReclaimScope::Others),
            Mode::Shared => {
                search(ReclaimScope::released());
                let idle = self.settings.config.reclaim_idle;
                if self.now.saturating_duration_since(self.last_idle_search) >= idle / 3 {
                    self.last_idle_search = self.now;
                    search(ReclaimScope::Idle(idle));
                }
            }
        }
    }

    pub(super) fn report(&mut self, report: PartitionReport) {
        self.actions.push(Action::PartitionReport(report));
    }

    /// Ends at once: settles nothing. What was in flight stays pending.
    pub(super) fn terminate(&mut self, has_lost_lease: bool) {
        self.phase = PartitionPhase::Terminated;
        self.is_reading = false;
        let running = std::mem::take(&mut self.running).into_values().map(|item| item.delivery);
        let unhandled = running.chain(self.queues.take_all()).collect();
        let unsettled = std::mem::take(&mut self.settles).iter().cloned().collect();
        let unfinished = Unfinished { unhandled, unsettled };
        self.actions.push(Action::Terminated { unfinished, has_lost_lease });
    }
}

#[cfg(test)]
mod tests;
