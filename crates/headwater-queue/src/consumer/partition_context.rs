//! What all parts of a partition's consumer share and nothing changes: subscription, policy, lease, metrics; and the
//! backend calls that are made with them.
//!
//! Upstream: `partition_set` creates it. Downstream: `partition_driver` and `handler_pool`.
//! Guarantees: every write carries the fence; a settle call is retried while the lease is trusted, which is idempotent;
//! a follow-up entry (retry, dead letter) is written with the acknowledgement or before it. While a follow-up cannot be
//! written, its message stays pending and the others are acknowledged.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::limits::BATCH_MAX;
use headwater_stream::{
    Backoff, ConsumerName, DeliveredEntry, EntryId, Fence, Fields, GroupCondition, GroupStart,
    HeldLease, PendingDelivery, PendingDeliveryQuery, Range, ReclaimFrom, ReclaimRequest,
    ReclaimResult, SettleBatch, SettleResult, Settlement, StreamError, stable_name,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};

use super::data_loss_recovery::{DataEpoch, DataLoss, LossRecovery, is_follow_up};
use super::metrics::PartitionMetrics;
use super::partition_state::PartitionEvent;
use super::reclaim_state::ReclaimScope;
use super::retry_or_dead_letter::MessagePolicy;
use super::subscription_context::SubscriptionContext;
use crate::config::Mode;
use crate::group::rebalance_listener::FencedSignal;
use crate::pagination::previous;

/// Backoff between attempts of a settle call.
const BACKOFF: Backoff = Backoff::doubling(Duration::from_millis(20), Duration::from_secs(2));

pub(super) struct PartitionContext {
    pub(super) subscription: Arc<SubscriptionContext>,
    pub(super) policy: MessagePolicy,
    pub(super) consumer_name: ConsumerName,
    pub(super) lease: HeldLease,
    pub(super) metrics: PartitionMetrics,
    fence: Option<Fence>,
    fenced: FencedSignal,
    data_epoch: Arc<DataEpoch>,
    /// Cancelled when nothing of this consumer has an effect any more.
    pub(super) ended: CancellationToken,
    group_position: Mutex<GroupPosition>,
}

/// What this consumer knows about its group on the stream.
struct GroupPosition {
    /// Whether the group existed since this consumer started. If it is missing now, it was removed.
    has_existed: bool,
    /// The newest entry that was delivered: to the group before this consumer started, or to this consumer.
    read_through: EntryId,
    /// The newest entry that this consumer received, read or reclaimed.
    received_through: EntryId,
    /// The group was removed: its pending entries up to this one are forgotten.
    restored_through: Option<EntryId>,
    /// Whether the stream was found deleted, and this was reported.
    is_stream_missing: bool,
}

impl PartitionContext {
    pub(super) fn new(
        subscription: Arc<SubscriptionContext>,
        policy: MessagePolicy,
        consumer_name: ConsumerName,
        lease: HeldLease,
        fenced: FencedSignal,
    ) -> Self {
        let (topic, group) = (&subscription.topic, &subscription.group);
        let label = stable_name(consumer_name.as_str());
        let metrics = PartitionMetrics::new(topic, policy.partition, group, &label);
        let fence = (subscription.config.mode == Mode::Owned).then(|| lease.fence().clone());
        let data_epoch = Arc::new(DataEpoch::new(policy.data_epoch()));
        let group_position = Mutex::new(GroupPosition {
            has_existed: false,
            read_through: EntryId::MIN,
            received_through: EntryId::MIN,
            restored_through: None,
            is_stream_missing: false,
        });
        Self {
            subscription,
            policy,
            consumer_name,
            lease,
            metrics,
            fence,
            fenced,
            data_epoch,
            ended: CancellationToken::new(),
            group_position,
        }
    }

    fn group_position(&self) -> MutexGuard<'_, GroupPosition> {
        self.group_position.lock().expect("no code panics while it holds the position")
    }

    /// Entries were delivered to this consumer.
    pub(super) fn on_delivered(&self, entries: &[DeliveredEntry]) {
        let newest = entries.iter().map(|entry| entry.id).max().unwrap_or(EntryId::MIN);
        let mut position = self.group_position();
        position.read_through = position.read_through.max(newest);
        position.received_through = position.received_through.max(newest);
    }

    pub(super) fn loss_recovery(&self) -> LossRecovery {
        let (restored_through, received_through) = {
            let position = self.group_position();
            (position.restored_through, position.received_through)
        };
        LossRecovery {
            backend: Arc::clone(&self.subscription.backend),
            topic: self.subscription.topic.clone(),
            stream: self.policy.stream.clone(),
            group: self.subscription.group.clone(),
            data_epoch: Arc::clone(&self.data_epoch),
            restored_through,
            received_through,
        }
    }

    /// The backend rejected an effect as fenced: the partition has another owner.
    pub(super) fn on_fenced(&self) -> PartitionEvent {
        warn!(stream = %self.policy.stream, consumer = %self.consumer_name, "fenced: the partition has another owner");
        self.metrics.record_anomaly("fenced", 1);
        self.fenced.signal();
        PartitionEvent::LeaseLost
    }

    /// Observes the data epoch before anything is in flight. Returns when it did, or never will.
    pub(super) async fn observe_data_epoch(&self) {
        let mut retry = BACKOFF.timer();
        while let Err(error) = self.data_epoch.observe(self.subscription.backend.as_ref()).await {
            if !error.is_transient() {
                return warn!(stream = %self.policy.stream, %error, "cannot observe the data epoch; data loss of the server will not be detected");
            }
            warn!(stream = %self.policy.stream, %error, "cannot observe the data epoch, retrying");
            retry.wait().await;
        }
    }

    /// Settles a batch. Entries that cannot be settled stay pending; the next owner of the partition reclaims them.
    /// Returns those for whose follow-ups the backend is too full. Fails if the lease is lost.
    pub(super) async fn settle(
        &self,
        batch: &[Settlement],
    ) -> Result<Vec<Settlement>, StreamError> {
        match self.settle_with_retry(batch).await {
            Err(StreamError::Full { .. }) if has_follow_up(batch) => {
                let (follow_ups, others): (Vec<Settlement>, Vec<Settlement>) =
                    batch.iter().cloned().partition(|entry| is_follow_up(&entry.action));
                self.metrics.record_anomaly("settle_failed", follow_ups.len());
                warn!(stream = %self.policy.stream, entries = follow_ups.len(),
                    "the backend is full: retries are written when there is space; their messages stay pending");
                if !others.is_empty() {
                    Box::pin(self.settle(&others)).await?;
                }
                Ok(follow_ups)
            }
            Ok(settled) => {
                self.on_settle_result(batch, settled).await;
                Ok(Vec::new())
            }
            Err(error) if batch.len() > 1 && !matches!(error, StreamError::Fenced { .. }) => {
                debug!(stream = %self.policy.stream, %error, "settle failed for the batch, settling entries one by one");
                let mut deferred = Vec::new();
                for one in batch.chunks(1) {
                    match self.settle_with_retry(one).await {
                        Err(StreamError::Full { .. }) if has_follow_up(one) => {
                            deferred.extend_from_slice(one);
                        }
                        Err(error) => self.on_settle_failed(one[0].id, error)?,
                        Ok(settled) => self.on_settle_result(one, settled).await,
                    }
                }
                Ok(deferred)
            }
            Err(error) => self.on_settle_failed(batch[0].id, error).map(|()| Vec::new()),
        }
    }

    /// Settles a batch whose follow-ups may be written at another server. One attempt: returns those that could not be
    /// written because a server is unavailable or full. Fails if the lease is lost.
    pub(super) async fn write_follow_ups(
        &self,
        batch: &[Settlement],
    ) -> Result<Vec<Settlement>, StreamError> {
        match self.try_settle(batch).await {
            Ok(settled) => {
                self.on_settle_result(batch, settled).await;
                Ok(Vec::new())
            }
            Err(error) if error.is_transient() => {
                self.metrics.record_anomaly("settle_failed", batch.len());
                warn!(stream = %self.policy.stream, entries = batch.len(), %error,
                    "retries or dead letters cannot be written, retrying; their messages stay pending");
                Ok(batch.to_vec())
            }
            Err(error) if batch.len() > 1 && !matches!(error, StreamError::Fenced { .. }) => {
                debug!(stream = %self.policy.stream, %error, "settle failed for the batch, settling entries one by one");
                let mut unwritten = Vec::new();
                for one in batch.chunks(1) {
                    unwritten.extend(Box::pin(self.write_follow_ups(one)).await?);
                }
                Ok(unwritten)
            }
            Err(error) => self.on_settle_failed(batch[0].id, error).map(|()| Vec::new()),
        }
    }

    /// Writes follow-ups again that the server lost with their entries.
    async fn on_settle_result(&self, batch: &[Settlement], settled: SettleResult) {
        self.metrics.set_in_flight(self.subscription.pool.in_flight());
        if settled.stale > 0 {
            self.loss_recovery().recover_stale(batch).await;
        }
    }

    /// Settles; retries transient errors while the lease is trusted. Fails if the backend is too full for a follow-up.
    async fn settle_with_retry(&self, batch: &[Settlement]) -> Result<SettleResult, StreamError> {
        let mut retry = BACKOFF.timer();
        loop {
            match self.try_settle(batch).await {
                Err(error @ StreamError::Full { .. }) if has_follow_up(batch) => return Err(error),
                Err(error) if error.is_transient() && self.lease.is_valid() => {
                    self.metrics.record_anomaly("settle_failed", 1);
                    warn!(stream = %self.policy.stream, %error, "settle failed, retrying");
                    retry.wait().await;
                }
                result => return result,
            }
        }
    }

    async fn try_settle(&self, batch: &[Settlement]) -> Result<SettleResult, StreamError> {
        let started = Instant::now();
        let settle = SettleBatch {
            stream: &self.policy.stream,
            group: &self.subscription.group,
            consumer: &self.consumer_name,
            fence: self.fence.as_ref(),
            entries: batch,
        };
        let settled = self.subscription.backend.settle(settle).await?;
        self.metrics.record_settled(settled.applied, started.elapsed());
        Ok(settled)
    }

    fn on_settle_failed(&self, id: EntryId, error: StreamError) -> Result<(), StreamError> {
        if matches!(error, StreamError::Fenced { .. }) {
            return Err(error);
        }
        self.metrics.record_anomaly("unsettled", 1);
        error!(stream = %self.policy.stream, entry_id = %id, %error, "entry could not be settled and stays pending");
        Ok(())
    }

    /// One page of pending entries. A missing group is created: it has none. Fails with `NoGroup` if the stream was deleted.
    pub(super) async fn list_pending(
        &self,
        scope: &ReclaimScope,
        after: Option<EntryId>,
    ) -> Result<Vec<PendingDelivery>, StreamError> {
        let (stream, group) = (&self.policy.stream, &self.subscription.group);
        if matches!(scope, ReclaimScope::Unseen(_)) && after.is_none() {
            // A read failed: the server may have restarted. What is received from here on is not in doubt.
            self.loss_recovery().loss().await?;
        }
        let query = PendingDeliveryQuery {
            stream,
            group,
            consumer: scope.consumer(),
            min_idle: scope.min_idle(),
            after,
            count: self.subscription.config.batch,
        };
        match self.subscription.backend.pending(query).await {
            Err(error @ StreamError::NoGroup { .. }) => {
                let has_existed = self.group_position().has_existed;
                if has_existed {
                    self.restore_group(error).await?;
                } else {
                    self.create_group().await?;
                }
                self.group_position().has_existed = true;
                Ok(Vec::new())
            }
            Ok(rows) => {
                let has_existed = self.group_position().has_existed;
                if !has_existed {
                    self.observe_group().await?;
                }
                Ok(rows)
            }
            Err(error) => Err(error),
        }
    }

    /// Creates the group on a partition that is new to it. Fails with `NoGroup` if the topic was deleted: then it counts as
    /// a plain topic, whose stream only a producer or a new subscription creates.
    async fn create_group(&self) -> Result<(), StreamError> {
        let SubscriptionContext { backend, group, is_created_topic, .. } = &*self.subscription;
        let MessagePolicy { topic, partition, stream, .. } = &self.policy;
        let start = match self.group_position().is_stream_missing {
            // It is a new stream.
            true => GroupStart::Beginning,
            false => self.subscription.group_start(*partition),
        };
        let created = if *is_created_topic && topic.layout.is_plain() {
            backend.ensure_group_if(stream, group, start, GroupCondition::StreamExists).await
        } else {
            topic.ensure_group(&**backend, *partition, group, start).await
        };
        if matches!(created, Err(StreamError::NoGroup { .. })) {
            self.group_position().is_stream_missing = true;
        }
        created.map(drop)
    }

    /// Records the position of the group when this consumer starts.
    async fn observe_group(&self) -> Result<(), StreamError> {
        let stats = self.subscription.backend.stats_without_lag(&self.policy.stream).await?;
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        let known = groups.iter().find(|known| known.name == self.subscription.group);
        if let Some(known) = known {
            let mut position = self.group_position();
            position.has_existed = true;
            position.read_through = position.read_through.max(known.last_delivered);
        }
        Ok(())
    }

    /// Creates the group again, which was removed while this consumer used it. It continues after what this consumer has
    /// read; from the beginning if the server lost its data or the stream is a new one. Fails with `missing` if the stream
    /// was deleted: a producer may create it again, a reader must not.
    async fn restore_group(&self, missing: StreamError) -> Result<(), StreamError> {
        let (stream, group) = (&self.policy.stream, &self.subscription.group);
        let exists = self.subscription.backend.stats_without_lag(stream).await?.is_some();
        let is_lost = exists && self.loss_recovery().loss().await? == DataLoss::All;
        let start = {
            let mut position = self.group_position();
            position.restored_through = Some(position.read_through);
            let was_missing = std::mem::replace(&mut position.is_stream_missing, !exists);
            match (exists, was_missing) {
                (false, true) => return Err(missing),
                (false, false) => {
                    self.metrics.record_anomaly("stream_deleted", 1);
                    warn!(%stream, %group, "the stream was deleted; waiting until a producer creates it again");
                    return Err(missing);
                }
                (true, true) => GroupStart::Beginning,
                (true, false) if is_lost => GroupStart::Beginning,
                (true, false) => GroupStart::After(position.read_through),
            }
        };
        let exists = GroupCondition::StreamExists;
        if self.subscription.backend.ensure_group_if(stream, group, start, exists).await? {
            self.metrics.record_anomaly("group_removed", 1);
            warn!(%stream, %group, ?start, "the consumer group was removed while this consumer used it; it was created again");
        }
        Ok(())
    }

    /// Reclaims these entries, unless another consumer was faster.
    pub(super) async fn reclaim(
        &self,
        scope: &ReclaimScope,
        ids: &[EntryId],
    ) -> Result<ReclaimResult, StreamError> {
        let (from, after) = match scope {
            // An entry that another member reclaimed meanwhile no longer belongs to this consumer.
            ReclaimScope::Consumer(consumer) => (ReclaimFrom::Consumer(consumer), previous(ids[0])),
            // The reply that would have delivered them was lost.
            ReclaimScope::Unseen(_) => (ReclaimFrom::Own(ids), None),
            _ => (ReclaimFrom::Ids(ids), None),
        };
        let reclaim = ReclaimRequest {
            stream: &self.policy.stream,
            group: &self.subscription.group,
            consumer: &self.consumer_name,
            fence: self.fence.as_ref(),
            from,
            min_idle: scope.min_idle(),
            after,
            count: ids.len(),
        };
        let reclaimed = self.subscription.backend.reclaim(reclaim).await?;
        let newest = reclaimed.entries.iter().map(|entry| entry.id).max().unwrap_or(EntryId::MIN);
        let mut position = self.group_position();
        position.received_through = position.received_through.max(newest);
        drop(position);
        Ok(reclaimed)
    }

    /// Removes the name of a dead consumer from the group: every process start has its own. Returns whether nothing of it is
    /// left.
    pub(super) async fn remove_dead_consumer(&self, dead: &ConsumerName) -> bool {
        let (stream, group) = (&self.policy.stream, &self.subscription.group);
        match self.subscription.backend.remove_consumer(stream, group, dead).await {
            Ok(_) | Err(StreamError::NoGroup { .. }) => true,
            Err(error) => {
                debug!(%stream, consumer = %dead, %error, "the name of a dead consumer could not be removed");
                false
            }
        }
    }

    /// Counts one more delivery of an entry of this consumer that was delivered so many times. Returns the deliveries;
    /// `None` if it is no longer pending. Retried until it succeeds; fails if the lease is lost.
    pub(super) async fn count_delivery(
        &self,
        id: EntryId,
        deliveries: u64,
    ) -> Result<Option<u64>, StreamError> {
        let (mut may_be_counted, mut retry) = (false, BACKOFF.timer());
        loop {
            match self.try_count_delivery(id, deliveries, may_be_counted).await {
                Ok(counted) => return Ok(counted),
                Err(StreamError::NoGroup { .. }) => return Ok(None),
                Err(error @ StreamError::Fenced { .. }) => return Err(error),
                Err(error) => {
                    warn!(stream = %self.policy.stream, entry_id = %id, %error, "the next attempt is delayed: counting the delivery failed, retrying");
                    may_be_counted = true;
                    retry.wait().await;
                }
            }
        }
    }

    async fn try_count_delivery(
        &self,
        id: EntryId,
        deliveries: u64,
        may_be_counted: bool,
    ) -> Result<Option<u64>, StreamError> {
        let reclaim = async |scope: ReclaimScope| {
            let reclaimed = self.reclaim(&scope, &[id]).await?;
            Ok(reclaimed.entries.first().map(|entry| entry.deliveries))
        };
        if may_be_counted {
            let counted = reclaim(ReclaimScope::Unseen(self.consumer_name.clone())).await?;
            if counted.is_some_and(|counted| counted > deliveries) {
                return Ok(counted);
            }
        }
        reclaim(ReclaimScope::All).await
    }

    /// Resets the idle time of entries. Returns those that are no longer pending, and whether the server lost its data.
    /// If that cannot be checked, it is assumed; the next keep-alive checks again.
    pub(super) async fn keep_alive(&self, ids: &[EntryId]) -> (Vec<EntryId>, bool) {
        let (stream, group) = (&self.policy.stream, &self.subscription.group);
        let mut gone = Vec::new();
        for ids in ids.chunks(BATCH_MAX) {
            let backend = &self.subscription.backend;
            match backend.keep_alive(stream, group, &self.consumer_name, ids).await {
                Ok(some) => gone.extend(some),
                Err(error) => {
                    warn!(%stream, %error, "keeping in-flight entries alive failed");
                }
            }
        }
        if gone.is_empty() {
            return (gone, false);
        }
        // If it cannot be checked, it is assumed.
        let loss = self.loss_recovery().loss().await.unwrap_or(DataLoss::All);
        let is_data_lost = gone.iter().all(|id| loss.may_include(*id));
        if !is_data_lost {
            gone.retain(|id| !loss.may_include(*id));
            // A group that was removed forgot that they are pending; this process still has them.
            let restored_through = self.group_position().restored_through;
            gone.retain(|id| restored_through.is_none_or(|through| *id > through));
        }
        (gone, is_data_lost)
    }

    /// Reads entries again. Retried until it succeeds.
    pub(super) async fn reload(&self, ids: Vec<EntryId>) -> Vec<(EntryId, Option<Fields>)> {
        let mut retry = BACKOFF.timer();
        loop {
            let reads = ids.iter().map(|id| {
                let range = Range { from: *id, to: *id, ..Range::first(1) };
                self.subscription.backend.range(&self.policy.stream, range)
            });
            let found: Result<Vec<_>, _> = join_all(reads).await.into_iter().collect();
            match found {
                Ok(found) => {
                    let fields = found
                        .into_iter()
                        .map(|entries| entries.into_iter().next().map(|entry| entry.fields));
                    return ids.into_iter().zip(fields).collect();
                }
                Err(error) => {
                    warn!(stream = %self.policy.stream, %error, "reading unblocked messages failed, retrying");
                    retry.wait().await;
                }
            }
        }
    }
}

fn has_follow_up(batch: &[Settlement]) -> bool {
    batch.iter().any(|entry| is_follow_up(&entry.action))
}
