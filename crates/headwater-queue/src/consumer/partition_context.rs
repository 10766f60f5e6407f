//! What all parts of a partition's consumer share and nothing changes: subscription, policy, lease, metrics; and the
//! backend calls that are made with them.
//!
//! Upstream: `partition_set` creates it. Downstream: `partition_driver` and `handler_pool`.
//! Guarantees: every write carries the fence; a settle call is retried while the lease is trusted, which is idempotent;
//! a follow-up entry (retry, dead letter) is written with the acknowledgement or before it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::limits::BATCH_MAX;
use headwater_stream::{
    ConsumerName, EntryId, Fence, Fields, GroupStart, HeldLease, PendingDelivery,
    PendingDeliveryQuery, Range, ReclaimFrom, ReclaimRequest, ReclaimResult, SettleBatch,
    SettleResult, Settlement, StreamError,
};
use tokio::time::Instant;
use tracing::{debug, error, warn};

use super::data_loss_recovery::{DataEpoch, LossRecovery};
use super::metrics::PartitionMetrics;
use super::partition_state::PartitionEvent;
use super::reclaim_state::ReclaimScope;
use super::retry_or_dead_letter::MessagePolicy;
use super::subscription_context::SubscriptionContext;
use crate::config::Mode;
use crate::group::rebalance_listener::FencedSignal;
use crate::pagination::previous;

const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Backoff between attempts of a settle call.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

pub(super) struct PartitionContext {
    pub(super) subscription: Arc<SubscriptionContext>,
    pub(super) policy: MessagePolicy,
    pub(super) consumer_name: ConsumerName,
    pub(super) lease: HeldLease,
    pub(super) metrics: PartitionMetrics,
    fence: Option<Fence>,
    fenced: FencedSignal,
    data_epoch: Arc<DataEpoch>,
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
        let metrics = PartitionMetrics::new(topic, policy.partition, group, consumer_name.as_str());
        let fence = (subscription.config.mode == Mode::Owned).then(|| lease.fence().clone());
        let data_epoch = Arc::new(DataEpoch::new(policy.data_epoch()));
        Self { subscription, policy, consumer_name, lease, metrics, fence, fenced, data_epoch }
    }

    pub(super) fn loss_recovery(&self) -> LossRecovery {
        LossRecovery {
            backend: Arc::clone(&self.subscription.backend),
            topic: self.subscription.topic.clone(),
            stream: self.policy.stream.clone(),
            group: self.subscription.group.clone(),
            data_epoch: Arc::clone(&self.data_epoch),
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
        while let Err(error) = self.data_epoch.observe(self.subscription.backend.as_ref()).await {
            if !error.is_transient() {
                return warn!(stream = %self.policy.stream, %error, "cannot observe the data epoch; data loss of the server will not be detected");
            }
            warn!(stream = %self.policy.stream, %error, "reclaiming pending entries failed, retrying");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Settles a batch. Entries that cannot be settled stay pending; the next owner of the partition reclaims them.
    /// Fails if the lease is lost.
    pub(super) async fn settle(&self, batch: &[Settlement]) -> Result<(), StreamError> {
        let started = Instant::now();
        match self.settle_with_retry(batch).await {
            Ok(settled) => {
                self.metrics.record_settled(settled.applied, started.elapsed());
                self.metrics.set_in_flight(self.subscription.pool.in_flight());
                if settled.stale > 0 {
                    self.loss_recovery().recover_stale(batch).await;
                }
                Ok(())
            }
            Err(error) if batch.len() > 1 && !matches!(error, StreamError::Fenced { .. }) => {
                debug!(stream = %self.policy.stream, %error, "settle failed for the batch, settling entries one by one");
                for one in batch.chunks(1) {
                    if let Err(error) = self.settle_with_retry(one).await {
                        self.on_settle_failed(one[0].id, error)?;
                    }
                }
                Ok(())
            }
            Err(error) => self.on_settle_failed(batch[0].id, error),
        }
    }

    /// Settles; retries transient errors while the lease is trusted.
    async fn settle_with_retry(&self, batch: &[Settlement]) -> Result<SettleResult, StreamError> {
        let mut backoff = BACKOFF_MIN;
        loop {
            let settle = SettleBatch {
                stream: &self.policy.stream,
                group: &self.subscription.group,
                consumer: &self.consumer_name,
                fence: self.fence.as_ref(),
                entries: batch,
            };
            match self.subscription.backend.settle(settle).await {
                Err(error) if error.is_transient() && self.lease.is_valid() => {
                    self.metrics.record_anomaly("settle_failed", 1);
                    warn!(stream = %self.policy.stream, %error, "settle failed, retrying");
                    tokio::time::sleep(backoff).await;
                    backoff = (backoff * 2).min(BACKOFF_MAX);
                }
                result => return result,
            }
        }
    }

    fn on_settle_failed(&self, id: EntryId, error: StreamError) -> Result<(), StreamError> {
        if matches!(error, StreamError::Fenced { .. }) {
            return Err(error);
        }
        self.metrics.record_anomaly("unsettled", 1);
        error!(stream = %self.policy.stream, entry_id = %id, %error, "entry could not be settled and stays pending");
        Ok(())
    }

    /// One page of pending entries. A missing group is created: it has none.
    pub(super) async fn list_pending(
        &self,
        scope: &ReclaimScope,
        after: Option<EntryId>,
    ) -> Result<Vec<PendingDelivery>, StreamError> {
        let (stream, group) = (&self.policy.stream, &self.subscription.group);
        let query = PendingDeliveryQuery {
            stream,
            group,
            consumer: scope.consumer(),
            min_idle: scope.min_idle(),
            after,
            count: self.subscription.config.batch,
        };
        match self.subscription.backend.pending(query).await {
            Err(StreamError::NoGroup { .. }) => {
                // From the beginning: the group has handled nothing of a partition that is new to it.
                let start = GroupStart::Beginning;
                self.subscription.backend.ensure_group(stream, group, start).await?;
                Ok(Vec::new())
            }
            rows => rows,
        }
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
        self.subscription.backend.reclaim(reclaim).await
    }

    /// Counts one more delivery of an entry of this consumer. Returns the deliveries; `None` if it is no longer pending.
    /// Retried until it succeeds; fails if the lease is lost.
    pub(super) async fn count_delivery(&self, id: EntryId) -> Result<Option<u64>, StreamError> {
        let own = ReclaimScope::Unseen(self.consumer_name.clone());
        loop {
            match self.reclaim(&own, &[id]).await {
                Ok(reclaimed) => {
                    return Ok(reclaimed.entries.first().map(|entry| entry.deliveries));
                }
                Err(StreamError::NoGroup { .. }) => return Ok(None),
                Err(error @ StreamError::Fenced { .. }) => return Err(error),
                Err(error) => {
                    warn!(stream = %self.policy.stream, entry_id = %id, %error, "the next attempt is delayed: counting the delivery failed, retrying");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
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
        let is_data_lost =
            !gone.is_empty() && self.loss_recovery().data_was_lost().await.unwrap_or(true);
        (gone, is_data_lost)
    }

    /// Reads entries again. Retried until it succeeds.
    pub(super) async fn reload(&self, ids: Vec<EntryId>) -> Vec<(EntryId, Option<Fields>)> {
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
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }
}
