//! Reclaims pending entries: of a dead consumer, of the previous owner, released ones, and own ones whose read failed.
//!
//! Upstream: `partition_set` when a partition is assigned or a member died, `maintenance` periodically. Downstream:
//! `partition_consumer`.
//! Guarantees: in the order of ids; no more than there is capacity for; an entry that may crash its consumer is handled
//! alone, so that other entries do not reach the crash limit with it.
//! Entries that were trimmed or deleted while pending are lost by an explicit action; they are counted and logged.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_stream::{
    ConsumerName, EntryId, GroupStart, PendingDelivery, PendingDeliveryQuery, ReclaimFrom,
    ReclaimRequest, SettleAction, StreamError,
};
use tracing::{debug, info, warn};

use super::partition_consumer::{PartitionConsumer, PartitionPhase};

const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How long a suspect entry is handled alone before others join it.
const ALONE_FOR: Duration = Duration::from_secs(5);
/// An entry is suspect from this many deliveries on: one consumer read it and died, a second one reclaimed it and died.
const SUSPECT_DELIVERIES: u64 = 2;

/// Which pending entries to reclaim.
#[derive(Clone, Debug)]
pub(super) enum ReclaimScope {
    /// All entries, including our own: no other consumer may work on the partition.
    All,
    /// All entries except our own.
    Others,
    /// The entries of one consumer.
    Consumer(ConsumerName),
    /// Entries that were idle for at least this long.
    Idle(Duration),
}

impl ReclaimScope {
    /// Entries that were released unhandled.
    pub(super) fn released() -> Self {
        Self::Consumer(ConsumerName::new(SettleAction::RELEASED).expect("it is a valid name"))
    }

    fn consumer(&self) -> Option<&ConsumerName> {
        match self {
            Self::Consumer(consumer) => Some(consumer),
            Self::All | Self::Others | Self::Idle(_) => None,
        }
    }

    fn min_idle(&self) -> Duration {
        match self {
            Self::Idle(idle) => *idle,
            Self::All | Self::Others | Self::Consumer(_) => Duration::ZERO,
        }
    }

    fn includes(&self, row: &PendingDelivery, own_name: &ConsumerName) -> bool {
        matches!(self, Self::All | Self::Consumer(_)) || row.consumer != *own_name
    }
}

impl PartitionConsumer {
    /// [`Mode::Shared`](crate::Mode::Shared): starts reading, and reclaims what other consumers released.
    pub(super) async fn start_shared(self: Arc<Self>) {
        if self.observe_data_epoch().await {
            self.start_reading();
            self.reclaim_orphans_now().await;
        }
    }

    /// Observes the data epoch before anything is in flight. Returns whether to continue.
    async fn observe_data_epoch(self: &Arc<Self>) -> bool {
        while let Err(error) = self.data_epoch.observe(self.context.backend.as_ref()).await {
            if !error.is_transient() {
                warn!(stream = %self.policy.stream, %error, "cannot observe the data epoch; data loss of the server will not be detected");
                break;
            }
            if !self.should_retry_after(&error).await {
                return false;
            }
        }
        true
    }

    /// [`Mode::Owned`](crate::Mode::Owned): reclaims all pending entries, then starts reading.
    pub(super) async fn start_owned(self: Arc<Self>) {
        if !self.observe_data_epoch().await {
            return;
        }
        while let Err(error) = self.reclaim(&ReclaimScope::All).await {
            if !self.should_retry_after(&error).await {
                return;
            }
        }
        self.start_reading();
    }

    /// After an error: creates a missing group, or pauses. Returns whether to try again.
    async fn should_retry_after(self: &Arc<Self>, error: &StreamError) -> bool {
        if matches!(error, StreamError::Fenced { .. }) {
            self.on_fenced();
            return false;
        }
        if matches!(error, StreamError::NoGroup { .. }) && self.create_group().await {
            return true;
        }
        warn!(stream = %self.policy.stream, %error, "reclaiming pending entries failed, retrying");
        tokio::time::sleep(RETRY_PAUSE).await;
        self.lease.is_valid()
    }

    async fn create_group(&self) -> bool {
        let (stream, group) = (&self.policy.stream, &self.context.group);
        // From the beginning: the group has handled nothing of a partition that is new to it.
        self.context.backend.ensure_group(stream, group, GroupStart::Beginning).await.is_ok()
    }

    /// Reclaims entries, page by page as capacity allows. One call at a time per partition: two would take the same
    /// entries.
    pub(super) async fn reclaim(self: &Arc<Self>, scope: &ReclaimScope) -> Result<(), StreamError> {
        let _permit = self.reclaim_permit().await;
        let mut after = None;
        loop {
            // In-flight ids first, pending entries second: an entry settled in between is not taken for orphaned.
            let in_flight = self.in_flight_ids();
            let mut listed = self.list_pending(scope, after).await?;
            let Some(last) = listed.last() else { return Ok(()) };
            after = Some(last.id);
            listed.retain(|row| {
                scope.includes(row, &self.consumer_name) && !in_flight.contains(&row.id)
            });
            let mut rest = listed.as_slice();
            while let Some(first) = rest.first() {
                self.wait_until(|state| {
                    state.phase != PartitionPhase::Active || self.reclaim_capacity() > 0
                })
                .await;
                if first.deliveries >= self.suspect_deliveries() {
                    // No other handler runs, so no other message crashes with it. Messages in backoff may wait.
                    let alone = self.wait_until(|state| {
                        state.phase != PartitionPhase::Active || state.is_idle()
                    });
                    let _ = tokio::time::timeout(ALONE_FOR, alone).await;
                }
                if self.lock().phase != PartitionPhase::Active {
                    return Ok(());
                }
                let page_len = self.page_len(rest).min(self.reclaim_capacity().max(1));
                let (page, later) = rest.split_at(page_len);
                let ids: Vec<EntryId> = page.iter().map(|row| row.id).collect();
                let reclaimed = self.reclaim_page(scope, &ids).await;
                if reclaimed.as_ref().is_err_and(StreamError::is_transient) {
                    // If only the reply was lost, the entries are pending for us, unseen.
                    self.reclaim_unseen_soon();
                }
                reclaimed?;
                rest = later;
            }
        }
    }

    /// Reclaims these entries, unless another consumer was faster.
    async fn reclaim_page(
        self: &Arc<Self>,
        scope: &ReclaimScope,
        ids: &[EntryId],
    ) -> Result<(), StreamError> {
        let (from, after) = match scope {
            // An entry that another member reclaimed meanwhile no longer belongs to this consumer.
            ReclaimScope::Consumer(consumer) => {
                (ReclaimFrom::Consumer(consumer), cursor_before(ids[0]))
            }
            ReclaimScope::All | ReclaimScope::Others | ReclaimScope::Idle(_) => {
                (ReclaimFrom::Ids(ids), None)
            }
        };
        let reclaim = ReclaimRequest {
            stream: &self.policy.stream,
            group: &self.context.group,
            consumer: &self.consumer_name,
            fence: self.fence.as_ref(),
            from,
            min_idle: scope.min_idle(),
            after,
            count: ids.len(),
        };
        let reclaimed = self.context.backend.reclaim(reclaim).await?;
        self.record_deleted(&reclaimed.deleted);
        if !reclaimed.entries.is_empty() {
            info!(
                stream = %self.policy.stream, consumer = %self.consumer_name, entries = reclaimed.entries.len(),
                "reclaimed pending entries"
            );
        }
        self.receive(reclaimed.entries);
        Ok(())
    }

    /// An entry with at least this many deliveries is suspect.
    fn suspect_deliveries(&self) -> u64 {
        SUSPECT_DELIVERIES + self.policy.in_place_attempts()
    }

    /// How many of these rows to reclaim at once: those with the same risk as the first.
    fn page_len(&self, rows: &[PendingDelivery]) -> usize {
        let max_crashes = u64::from(self.context.config.retry.max_crashes);
        let crashes_max = max_crashes + self.policy.in_place_attempts();
        let risk = |row: &PendingDelivery| match row.deliveries {
            few if few < self.suspect_deliveries() => 0,
            some if some + 1 < crashes_max => 1,
            _ => 2,
        };
        let first = risk(&rows[0]);
        let same_risk = rows.iter().take_while(|row| risk(row) == first).count();
        match first {
            0 => same_risk,
            1 => same_risk.min(self.context.config.concurrency),
            _ => 1,
        }
    }

    async fn list_pending(
        &self,
        scope: &ReclaimScope,
        after: Option<EntryId>,
    ) -> Result<Vec<PendingDelivery>, StreamError> {
        let query = PendingDeliveryQuery {
            stream: &self.policy.stream,
            group: &self.context.group,
            consumer: scope.consumer(),
            min_idle: scope.min_idle(),
            after,
            count: self.context.config.batch,
        };
        self.context.backend.pending(query).await
    }

    fn record_deleted(&self, deleted: &[EntryId]) {
        if let Some(first) = deleted.first() {
            self.metrics.record_anomaly("deleted_while_pending", deleted.len());
            warn!(
                stream = %self.policy.stream, entries = deleted.len(), entry_id = %first,
                "pending entries were trimmed or deleted; the messages are lost"
            );
        }
    }

    /// After a failed read or reclaim: entries that it may have fetched are pending for this consumer, unseen. They are
    /// reclaimed before anything else is read.
    pub(super) fn reclaim_unseen_soon(self: &Arc<Self>) {
        self.has_unseen.store(true, Ordering::SeqCst);
        if self.stop_reading() {
            self.spawn(Arc::clone(self).reclaim_unseen());
        }
    }

    async fn reclaim_unseen(self: Arc<Self>) {
        loop {
            while self.has_unseen.swap(false, Ordering::SeqCst) {
                while let Err(error) = self.reclaim_own_unseen().await {
                    if !self.should_retry_after(&error).await {
                        return;
                    }
                }
            }
            self.start_reading();
            // Another read may have failed just before.
            if !self.has_unseen.load(Ordering::SeqCst) || !self.stop_reading() {
                return;
            }
        }
    }

    /// During shutdown, after the last read: entries of a failed read are not left behind.
    pub(super) async fn reclaim_unseen_before_shutdown(self: &Arc<Self>) {
        if !self.has_unseen.load(Ordering::SeqCst) && !self.is_reclaiming() {
            return;
        }
        if let Err(error) = self.reclaim_own_unseen().await {
            debug!(stream = %self.policy.stream, %error, "entries of a failed read could not be reclaimed and stay pending");
        }
    }

    async fn reclaim_own_unseen(self: &Arc<Self>) -> Result<(), StreamError> {
        let _permit = self.reclaim_permit().await;
        let own = ReclaimScope::Consumer(self.consumer_name.clone());
        let mut after = None;
        loop {
            // In-flight ids first, pending entries second: an entry settled in between is not taken for unseen.
            let in_flight = self.in_flight_ids();
            let rows = self.list_pending(&own, after).await?;
            let Some(last) = rows.last() else { return Ok(()) };
            after = Some(last.id);
            let unseen: Vec<EntryId> =
                rows.iter().map(|row| row.id).filter(|id| !in_flight.contains(id)).collect();
            if unseen.is_empty() {
                continue;
            }
            debug!(stream = %self.policy.stream, entries = unseen.len(), "reclaiming entries of a failed read");
            self.metrics.record_anomaly("unseen", unseen.len());
            let reclaim = ReclaimRequest {
                stream: &self.policy.stream,
                group: &self.context.group,
                consumer: &self.consumer_name,
                fence: self.fence.as_ref(),
                from: ReclaimFrom::Ids(&unseen),
                min_idle: Duration::ZERO,
                after: None,
                count: unseen.len(),
            };
            let reclaimed = self.context.backend.reclaim(reclaim).await?;
            self.record_deleted(&reclaimed.deleted);
            self.receive(reclaimed.entries);
        }
    }
}

/// The cursor whose page begins with this entry.
fn cursor_before(id: EntryId) -> Option<EntryId> {
    match (id.seq.checked_sub(1), id.ms.checked_sub(1)) {
        (Some(seq), _) => Some(EntryId::new(id.ms, seq)),
        (None, Some(ms)) => Some(EntryId::new(ms, u64::MAX)),
        (None, None) => None,
    }
}
