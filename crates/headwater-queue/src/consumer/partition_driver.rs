//! The driver of a partition: the one task that owns its state, passes it events and executes its actions.
//!
//! Upstream: `partition_set` starts it and sends events through a [`DriverHandle`]; the `fetcher` sends what it read.
//! Downstream: `handler_pool`, the backend (`partition_context`), and credits for the `fetcher`.
//! Guarantees: backend calls run concurrently with events, one settle call, one write of follow-ups and one
//! reclaim call at a time; an idle
//! partition costs one task that waits. The channel is bounded by the credits of the partition.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use headwater_stream::{ConsumerName, SettleAction, Settlement, StreamError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};
use tracing::{debug, error, info, warn};

use super::capacity_pool::largest_bytes;
use super::fetcher::{FetchTarget, Fetcher};
use super::handler_pool::{HandlerPool, STALL_CHECK_EVERY, yield_to_queue};
use super::key_queues::InFlightMessage;
use super::partition_context::PartitionContext;
use super::partition_state::{
    Action, PartitionEvent, PartitionPhase, PartitionReport, PartitionState, StateSettings,
    Unfinished,
};
use super::reclaim_state::ReclaimScope;
use super::repartition_barrier::Barrier;

/// While messages are in flight, the driver looks this often for what a blocked thread could not report.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// An event for a driver.
pub(super) enum DriverEvent {
    State(PartitionEvent),
    /// Asks for the barriers that block messages.
    AwaitedBarriers(oneshot::Sender<Vec<Barrier>>),
}

/// The consumer of one partition, as others see it. Dropping it ends the driver.
pub(super) struct DriverHandle {
    pub(super) context: Arc<PartitionContext>,
    events: UnboundedSender<DriverEvent>,
    handlers: Arc<HandlerPool>,
}

impl DriverHandle {
    /// Starts to consume a partition.
    pub(super) fn start(context: Arc<PartitionContext>, fetcher: Arc<Fetcher>) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let (events, received) = unbounded_channel();
        let handlers = Arc::new(HandlerPool::new(Arc::clone(&context)));
        let subscription = &context.subscription;
        let settings = StateSettings {
            config: subscription.config.clone(),
            consumer_name: context.consumer_name.clone(),
            in_place_attempts: context.policy.in_place_attempts(),
        };
        let state = PartitionState::new(settings, subscription.pool.limits(), Instant::now());
        let driver = PartitionDriver {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            state,
            handlers: Arc::clone(&handlers),
            fetcher,
            // Only the fetcher holds a sender besides the handle.
            events: events.downgrade(),
            calls: FuturesUnordered::new(),
            is_added: false,
            in_flight: 0,
            blocked: 0,
            context: Arc::clone(&context),
        };
        tokio::spawn(run_or_evict(driver, received));
        let handle = Self { context, events, handlers };
        if handle.context.subscription.is_paused() {
            handle.send(PartitionEvent::Paused(true));
        }
        handle
    }

    /// Passes an event. A driver that has ended ignores it.
    pub(super) fn send(&self, event: PartitionEvent) {
        let _ = self.events.send(DriverEvent::State(event));
    }

    /// Finishes what is in flight: with [`PartitionPhase::Stopping`] running handlers only, with
    /// [`PartitionPhase::Draining`] all messages. When it returns, nothing is in flight, everything is settled (as long
    /// as the lease was valid) and no read can deliver to this consumer.
    pub(super) async fn shut_down(&self, phase: PartitionPhase, drain: Duration) {
        self.send(PartitionEvent::ShutDown { phase, drain });
        self.events.closed().await;
    }

    /// Ends at once, because the lease is lost: the next owner reclaims what was in flight; if Redis lost it, it is
    /// appended again.
    pub(super) fn abandon(&self) {
        self.handlers.close();
        self.send(PartitionEvent::LeaseLost);
    }

    /// Ends at once. What was in flight stays pending.
    pub(super) fn terminate(&self) {
        self.handlers.close();
        self.send(PartitionEvent::Dropped);
    }

    /// Reclaims the entries of a dead consumer. Returns whether all were reclaimed.
    pub(super) async fn reclaim_from(&self, dead: ConsumerName) -> bool {
        let (reply, is_reclaimed) = oneshot::channel();
        self.send(PartitionEvent::MemberDied(dead, reply));
        is_reclaimed.await.unwrap_or(false)
    }

    /// The barriers that block messages of this partition.
    pub(super) async fn awaited_barriers(&self) -> Vec<Barrier> {
        let (reply, awaited) = oneshot::channel();
        let _ = self.events.send(DriverEvent::AwaitedBarriers(reply));
        awaited.await.unwrap_or_default()
    }
}

impl Drop for DriverHandle {
    fn drop(&mut self) {
        self.terminate();
    }
}

/// Runs a driver. If it panics, in code of the application or by a defect, the member leaves the group and joins again:
/// its lease would otherwise be renewed although nothing is handled.
async fn run_or_evict(driver: PartitionDriver, received: UnboundedReceiver<DriverEvent>) {
    let (id, context) = (driver.id, Arc::clone(&driver.context));
    let (handlers, fetcher) = (Arc::clone(&driver.handlers), Arc::clone(&driver.fetcher));
    if AssertUnwindSafe(driver.run(received)).catch_unwind().await.is_err() {
        error!(stream = %context.policy.stream, "the task of a partition panicked; joining the group again");
        handlers.close();
        fetcher.remove_now(&context.policy.stream, id);
        drop(context.on_fenced());
    }
}

struct PartitionDriver {
    id: u64,
    context: Arc<PartitionContext>,
    state: PartitionState,
    handlers: Arc<HandlerPool>,
    fetcher: Arc<Fetcher>,
    events: tokio::sync::mpsc::WeakUnboundedSender<DriverEvent>,
    /// Backend calls in progress. Each ends with an event.
    calls: FuturesUnordered<BoxFuture<'static, PartitionEvent>>,
    /// Whether the fetcher knows the partition.
    is_added: bool,
    /// What the pool of the subscription knows.
    in_flight: usize,
    blocked: usize,
}

impl PartitionDriver {
    async fn run(mut self, mut received: UnboundedReceiver<DriverEvent>) {
        self.call(|context| async move {
            context.observe_data_epoch().await;
            PartitionEvent::Started
        });
        let mut timer = std::pin::pin!(tokio::time::sleep_until(Instant::now()));
        let mut armed: Option<Instant> = None;
        let handlers = Arc::clone(&self.handlers);
        while self.state.phase != PartitionPhase::Terminated {
            tokio::select! {
                event = received.recv() => match event {
                    Some(event) => self.on_driver_event(event),
                    None => self.on(PartitionEvent::Dropped),
                },
                Some(event) = self.calls.next(), if !self.calls.is_empty() => {
                    // What was sent before the call ended counts first: the last entries, a failed read, results.
                    while let Ok(sent) = received.try_recv() {
                        self.on_driver_event(sent);
                    }
                    self.take_finished();
                    self.on(event);
                }
                () = handlers.has_finished() => self.take_finished(),
                () = timer.as_mut(), if armed.is_some() => {
                    armed = None;
                    // A handler may block the thread that was to report.
                    self.take_finished();
                    handlers.check();
                    self.on(PartitionEvent::Tick);
                }
            }
            self.arm(&mut armed, timer.as_mut());
        }
        received.close();
        while let Ok(event) = received.try_recv() {
            if let DriverEvent::State(PartitionEvent::EntriesRead(entries)) = event {
                // They stay pending for the next owner.
                self.context.subscription.pool.remove_in_flight(entries.len());
            }
        }
    }

    /// Sets the timer, unless it fires early enough anyway.
    fn arm(&self, armed: &mut Option<Instant>, timer: std::pin::Pin<&mut Sleep>) {
        let mut next = self.state.next_deadline();
        if !self.state.running.is_empty() {
            let every = if self.handlers.is_limited() { STALL_CHECK_EVERY } else { CHECK_EVERY };
            let check = self.state.now + every;
            next = Some(next.map_or(check, |next| next.min(check)));
        }
        if let Some(next) = next
            && armed.is_none_or(|armed| next < armed)
        {
            timer.reset(next);
            *armed = Some(next);
        }
    }

    fn on_driver_event(&mut self, event: DriverEvent) {
        match event {
            // What is finished is not appended again if the server lost it.
            DriverEvent::State(PartitionEvent::LeaseLost) => {
                self.take_finished();
                self.on(PartitionEvent::LeaseLost);
            }
            // The newest state counts: two callers may pause and resume at once.
            DriverEvent::State(PartitionEvent::Paused(_)) => {
                let is_paused = self.context.subscription.is_paused();
                if !is_paused {
                    self.handlers.resume();
                }
                self.on(PartitionEvent::Paused(is_paused));
            }
            DriverEvent::State(event) => self.on(event),
            DriverEvent::AwaitedBarriers(reply) => {
                let barriers = &self.context.subscription.barriers;
                let partition = self.context.policy.partition;
                // If a barrier opened since, the same check unblocks its messages.
                let awaited = self.state.blocked_messages().map(|item| {
                    barriers.blocking(item, partition).unwrap_or(Barrier::TopicRefresh)
                });
                // Fails if nothing waits for it any more.
                let _ = reply.send(awaited.collect());
            }
        }
    }

    fn take_finished(&mut self) {
        let finished = self.handlers.take_finished();
        if !finished.is_empty() {
            self.on(PartitionEvent::HandlersFinished(finished));
        }
    }

    /// Passes an event to the state and executes the actions.
    fn on(&mut self, event: PartitionEvent) {
        let has_entries = match &event {
            PartitionEvent::EntriesRead(entries) => {
                // The fetcher counted them.
                self.in_flight += entries.len();
                self.context.on_delivered(entries);
                true
            }
            _ => false,
        };
        let context = Arc::clone(&self.context);
        if let PartitionEvent::Reclaimed(Ok(reclaimed)) = &event {
            let pool = &context.subscription.pool;
            pool.record_largest(largest_bytes(&reclaimed.entries));
        }
        // At least one, so that a reclaim does not wait for other partitions.
        let pool = &context.subscription.pool;
        self.state.reclaims.page_max = Some(pool.free().saturating_sub(pool.reserve()).max(1));
        let (barriers, partition) = (&context.subscription.barriers, context.policy.partition);
        let is_blocked = |item: &InFlightMessage| barriers.blocking(item, partition).is_some();
        let actions = self.state.on(event, Instant::now(), &is_blocked);
        self.update_pool();
        if has_entries {
            context.metrics.set_in_flight(context.subscription.pool.in_flight());
        }
        for action in actions {
            self.execute(action);
        }
    }

    /// Tells the pool of the subscription how many messages are in flight, and wakes the fetcher if it waits for less.
    fn update_pool(&mut self) {
        let pool = &self.context.subscription.pool;
        let blocked = self.state.blocked();
        pool.change_blocked(self.blocked, blocked);
        self.blocked = blocked;
        let (before, now) = (self.in_flight, self.state.in_flight());
        self.in_flight = now;
        if now > before {
            return pool.add_in_flight(now - before);
        }
        if now == before {
            return;
        }
        pool.remove_in_flight(before - now);
        // Fast handlers free more in a moment.
        let is_worth_it =
            || self.state.had_slow_handler() || self.state.is_idle() || pool.free_for_bulk() > 0;
        if pool.is_awaited() && is_worth_it() {
            self.fetcher.wake();
        }
    }

    fn call<F: Future<Output = PartitionEvent> + Send + 'static>(
        &self,
        call: impl FnOnce(Arc<PartitionContext>) -> F,
    ) {
        self.calls.push(Box::pin(call(Arc::clone(&self.context))));
    }

    fn execute(&mut self, action: Action) {
        let stream = &self.context.policy.stream;
        match action {
            Action::Start(messages) => self.handlers.add(messages),
            Action::Settle(batch) => self.call(|context| async move {
                // Handlers of other partitions finish first, so that concurrent settle calls share one write.
                yield_to_queue().await;
                match context.settle(&batch).await {
                    Ok(deferred) => PartitionEvent::Settled(deferred),
                    Err(_) => context.on_fenced(),
                }
            }),
            Action::WriteFollowUps(batch) => self.call(|context| async move {
                match context.write_follow_ups(&batch).await {
                    Ok(unwritten) => PartitionEvent::FollowUpsWritten(unwritten),
                    Err(_) => context.on_fenced(),
                }
            }),
            Action::Credits { change, is_fast } => {
                self.fetcher.change_credits(stream, self.id, change, is_fast);
            }
            Action::StartReading { failed_reads } => self.start_reading(failed_reads),
            Action::StopReading => self.fetcher.set_reading(stream, self.id, None),
            Action::ListPending { scope, after } => self.call(|context| async move {
                PartitionEvent::PendingListed(context.list_pending(&scope, after).await)
            }),
            Action::Reclaim { scope, ids } => self.call(|context| async move {
                PartitionEvent::Reclaimed(context.reclaim(&scope, &ids).await)
            }),
            Action::CountDelivery(id, deliveries) => self.call(move |context| async move {
                match context.count_delivery(id, deliveries).await {
                    Ok(deliveries) => PartitionEvent::DeliveryCounted(id, deliveries),
                    Err(_) => context.on_fenced(),
                }
            }),
            Action::Reload(ids) => self
                .call(|context| async move { PartitionEvent::Reloaded(context.reload(ids).await) }),
            Action::KeepAlive(ids) => self.call(|context| async move {
                let (ids, is_data_lost) = context.keep_alive(&ids).await;
                PartitionEvent::NoLongerPending { ids, is_data_lost }
            }),
            Action::NotifyBlocked => self.context.subscription.barriers.has_blocked.notify_one(),
            Action::Withdraw => {
                let ids = self.handlers.withdraw();
                self.on(PartitionEvent::Withdrawn(ids));
            }
            Action::EndReading => self.end_reading(),
            Action::AbortHandlers => self.handlers.close(),
            // Fails if nothing waits for it any more.
            Action::Reply(reply, is_reclaimed) => drop(reply.send(is_reclaimed)),
            Action::PartitionReport(report) => self.report(report),
            Action::Terminated { unfinished, has_lost_lease } => {
                self.end(unfinished, has_lost_lease);
            }
        }
    }

    fn start_reading(&mut self, failed_reads: u64) {
        let context = Arc::clone(&self.context);
        if std::mem::replace(&mut self.is_added, true) {
            self.fetcher.set_reading(&context.policy.stream, self.id, Some(failed_reads));
        } else if let Some(events) = self.events.upgrade() {
            self.fetcher.add(self.id, FetchTarget { context, events });
        }
    }

    fn end_reading(&mut self) {
        if self.state.phase == PartitionPhase::Draining {
            self.handlers.ignore_pause();
        }
        let (fetcher, id) = (Arc::clone(&self.fetcher), self.id);
        self.call(|context| async move {
            fetcher.remove(&context.policy.stream, id).await;
            PartitionEvent::LastReadEnded
        });
        self.call(|context| async move {
            context.lease.lost().await;
            PartitionEvent::LeaseLost
        });
    }

    fn report(&self, report: PartitionReport) {
        let (metrics, stream) = (&self.context.metrics, &self.context.policy.stream);
        match report {
            PartitionReport::Handled(all) => {
                for (result, took) in all {
                    metrics.record_result(result, took);
                    self.context.subscription.count(result);
                }
            }
            PartitionReport::Reclaimed(entries) => {
                info!(%stream, consumer = %self.context.consumer_name, entries, "reclaimed pending entries");
            }
            PartitionReport::DeletedWhilePending(ids) => {
                metrics.record_anomaly("deleted_while_pending", ids.len());
                warn!(
                    %stream, entries = ids.len(), entry_id = %ids[0],
                    "pending entries were trimmed or deleted; the messages are lost"
                );
            }
            PartitionReport::GoneWhileWaiting(id) => {
                metrics.record_anomaly("gone_while_waiting", 1);
                debug!(%stream, entry_id = %id, "in-flight entry is no longer pending");
            }
            PartitionReport::TakenAway(entries) => {
                metrics.record_anomaly("taken_away", entries);
                warn!(%stream, entries, "in-flight entries are no longer pending and are discarded");
            }
            PartitionReport::KeptAfterDataLoss(entries) => {
                metrics.record_anomaly("server_lost_all", 1);
                warn!(%stream, entries, "the server lost in-flight entries; they are kept");
            }
            PartitionReport::Unseen(entries) => {
                debug!(%stream, entries, "reclaiming entries of a failed read");
                metrics.record_anomaly("unseen", entries);
            }
            // The context has reported it.
            PartitionReport::ReclaimFailed { error: StreamError::NoGroup { .. }, .. } => {}
            PartitionReport::ReclaimFailed {
                error: error @ StreamError::WrongType { .. }, ..
            } => {
                metrics.record_anomaly("wrong_type", 1);
                warn!(%stream, %error, "partition cannot be read");
            }
            PartitionReport::ReclaimFailed { is_retried: true, error, .. } => {
                warn!(%stream, %error, "reclaiming pending entries failed, retrying");
            }
            PartitionReport::ReclaimFailed { scope: ReclaimScope::Unseen(_), error, .. } => {
                debug!(%stream, %error, "entries of a failed read could not be reclaimed and stay pending");
            }
            PartitionReport::ReclaimFailed {
                scope: ReclaimScope::Consumer(dead), error, ..
            } if dead.as_str() != SettleAction::RELEASED => {
                warn!(%stream, consumer = %dead, %error, "reclaiming the entries of a dead member failed; they stay pending for now");
            }
            PartitionReport::ReclaimFailed { error, .. } => {
                warn!(%stream, %error, "searching for orphaned entries failed");
            }
            PartitionReport::FollowUpLimitReached { follow_ups, bytes } => {
                metrics.record_anomaly("follow_up_limit", 1);
                warn!(%stream, follow_ups, bytes, "the partition is not read: too many retries and dead letters cannot be written; their messages stay pending");
            }
            PartitionReport::FollowUpLimitLeft => {
                info!(%stream, "the partition is read again: waiting retries and dead letters were written");
            }
            PartitionReport::Fenced => drop(self.context.on_fenced()),
            PartitionReport::LastReadTimedOut => {
                warn!(%stream, "the last read did not return before its timeout");
            }
            PartitionReport::DrainTimedOut => {
                let drain = self.context.subscription.config.drain;
                warn!(%stream, ?drain, "handlers exceeded the drain timeout and are aborted");
            }
        }
    }

    /// Nothing has an effect any more.
    fn end(&mut self, unfinished: Unfinished, has_lost_lease: bool) {
        self.handlers.close();
        self.context.ended.cancel();
        self.fetcher.remove_now(&self.context.policy.stream, self.id);
        if !has_lost_lease {
            return;
        }
        let recovery = self.context.loss_recovery();
        let requeued = unfinished.unhandled.iter().map(|delivery| recovery.requeue(delivery));
        let left: Vec<Settlement> = unfinished.unsettled.into_iter().chain(requeued).collect();
        if !left.is_empty() {
            debug!(stream = %self.context.policy.stream, in_flight = left.len(), "partition lost");
            self.context.subscription.spawn_recovery(recovery.recover_all(left));
        }
    }
}
