//! Reassigns pulled entries whose lease ran out, that were released, or whose consumer died.
//!
//! Upstream: `pull_driver`, once per tick while callers wait. Downstream: the backend lists pending entries and reclaims
//! them under another consumer name, which fences the former holder.
//! Guarantees: an entry whose lease was extended after it was listed is not reassigned. A reassignment whose reply was lost is
//! completed later, and counts as one delivery. A partition that fails is excluded (`pull_streams`), and the others are checked.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::{
    Backend, ConsumerName, EntryId, GroupName, PendingDelivery, PendingDeliveryQuery, ReclaimFrom,
    ReclaimRequest, Result as StreamResult, SettleAction, StreamError, StreamName, StreamStats,
};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::capacity_pool::largest_bytes;
use super::pull::{lease_consumer, lease_of, metrics};
use super::pull_driver::{JoinedPullDriver, READ_MAX};
use crate::config::RECLAIM_IDLE_DEFAULT;
use crate::error::Result;
use crate::keys;
use crate::limits::{LEASE_MIN, PULL_BYTES_MAX};
use crate::topic::{Partition, Topic};

/// Partitions whose leases are checked per tick, and the pending entries examined of each.
const PARTITIONS_PER_TICK: usize = 16;
const PENDING_PAGE: usize = 500;
/// How long listing the pending entries of a partition of a cluster takes at most: a server that does not answer must not delay the others.
const CHECK_MAX: Duration = Duration::from_secs(1);
/// Consumer names for entries that are reassigned. A former holder of an entry is fenced until as many others
/// were used, at least as many ticks.
const NAMES_MAX: u64 = 1000;

/// Progress of the check for leases that ran out.
#[derive(Default)]
pub(super) struct LeaseCheck {
    pub(super) last: Option<Instant>,
    next_partition: usize,
    cursors: HashMap<Partition, EntryId>,
    /// Pending entries of each partition.
    pub(super) pending: HashMap<Partition, u64>,
    names: u64,
    /// Entries of reassignments without a reply, by the partition and consumer name of each: they may have taken effect.
    unanswered: HashMap<(Partition, ConsumerName), BTreeSet<EntryId>>,
}

impl LeaseCheck {
    /// Whether no caller can have got this entry, because the reply of its last reassignment was lost, and a caller that asks for
    /// leases of this length can.
    fn is_undelivered(&self, partition: Partition, row: &PendingDelivery, lease: Duration) -> bool {
        let unanswered = self.unanswered.get(&(partition, row.consumer.clone()));
        unanswered.is_some_and(|ids| ids.contains(&row.id))
            && lease_of(&row.consumer) == Some(lease)
    }

    fn record_answer(&mut self, partition: Partition, consumer: &ConsumerName, ids: &[EntryId]) {
        let key = (partition, consumer.clone());
        if let Some(unanswered) = self.unanswered.get_mut(&key) {
            unanswered.retain(|id| !ids.contains(id));
            if unanswered.is_empty() {
                self.unanswered.remove(&key);
            }
        }
    }
}

impl JoinedPullDriver {
    /// Reassigns entries whose lease ran out, that were released or whose consumer died: as many as callers want. A
    /// partition that fails is excluded; the next tick checks further ones.
    pub(super) async fn reassign_expired(&mut self, topic: &Arc<Topic>) -> Result<()> {
        self.check.last = Some(Instant::now());
        let partitions = usize::from(topic.partitions);
        let last = self.check.next_partition + partitions.min(PARTITIONS_PER_TICK);
        let due: Vec<Partition> = (self.check.next_partition..last)
            .map(|at| (at % partitions) as Partition)
            .filter(|partition| self.streams.is_readable(*partition))
            .collect();
        // All at once: one that does not answer delays the callers no more than all of them.
        let listing = due.iter().map(|partition| {
            let stream = keys::stream(topic, *partition);
            let after = self.check.cursors.get(partition).copied();
            list_pending(Arc::clone(&self.backend), stream, self.driver.key.1.clone(), after)
        });
        let listed = join_all(listing.collect::<Vec<_>>()).await;
        for (partition, listed) in due.into_iter().zip(listed) {
            self.check.next_partition = usize::from(partition);
            let Some(demand) = self.driver.waiting.front() else { return Ok(()) };
            let (lease, wanted) = (demand.lease, demand.max);
            let is_listed = listed.is_ok();
            let reassigned = async {
                let rows = self.apply_listed(topic, partition, listed).await?;
                self.reassign_partition(topic, partition, lease, wanted, rows).await
            };
            match reassigned.await {
                Ok(()) => self.driver.deliver_held(),
                Err(error) => {
                    self.streams.exclude(topic, partition, error)?;
                    if is_listed {
                        // The call has taken time: the others are checked at the next tick.
                        self.check.next_partition += 1;
                        return Ok(());
                    }
                }
            }
        }
        self.check.next_partition = last % partitions;
        Ok(())
    }

    async fn reassign_partition(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
        lease: Duration,
        mut wanted: usize,
        rows: Vec<PendingDelivery>,
    ) -> StreamResult<()> {
        let mut by_consumer: BTreeMap<(ConsumerName, bool), Vec<PendingDelivery>> = BTreeMap::new();
        for row in rows {
            let is_undelivered = self.check.is_undelivered(partition, &row, lease);
            if row.idle < self.idle_max(&row.consumer) && !is_undelivered {
                continue;
            }
            if wanted == 0 {
                // The rest is found at once when there are more callers.
                self.check.cursors.remove(&partition);
                self.check.last = None;
                break;
            }
            wanted -= 1;
            by_consumer.entry((row.consumer.clone(), is_undelivered)).or_default().push(row);
        }
        for ((_, is_undelivered), rows) in by_consumer {
            let mut rows = &rows[..];
            while !rows.is_empty() {
                let held = self.driver.held_bytes(lease);
                let fitting = self.message_size.fitting(PULL_BYTES_MAX.saturating_sub(held));
                if fitting == 0 && held > 0 {
                    break;
                }
                let count = fitting.clamp(1, READ_MAX).min(rows.len());
                let (next, rest) = rows.split_at(count);
                match is_undelivered {
                    true => self.complete_take_over(topic, partition, next).await?,
                    false => self.take_over(topic, partition, lease, next).await?,
                }
                rows = rest;
            }
            if !rows.is_empty() {
                // The others are for the next caller.
                self.check.cursors.remove(&partition);
                self.check.last = None;
            }
        }
        Ok(())
    }

    /// How long an entry of this consumer may be idle before it is reassigned.
    fn idle_max(&self, consumer: &ConsumerName) -> Duration {
        if consumer.as_str() == SettleAction::RELEASED || self.member.dead().contains(consumer) {
            return Duration::ZERO;
        }
        // Subscriptions keep their entries alive more often than that.
        lease_of(consumer).unwrap_or(RECLAIM_IDLE_DEFAULT)
    }

    /// Records the number of pending entries of a partition, and returns the page of them.
    async fn apply_listed(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
        listed: StreamResult<ListedPending>,
    ) -> StreamResult<Vec<PendingDelivery>> {
        self.check.cursors.remove(&partition);
        let (stats, rows) = match listed {
            Err(StreamError::NoGroup { .. }) => {
                self.check.pending.insert(partition, 0);
                self.streams.restore_group(topic, partition).await?;
                return Ok(Vec::new());
            }
            listed => listed?,
        };
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        let group = groups.iter().find(|stats| stats.name == self.driver.key.1);
        self.check.pending.insert(partition, group.map_or(0, |stats| stats.pending));
        if let Some(stats) = group {
            self.streams.record_read(partition, stats.last_delivered);
        }
        if let Some(last) = rows.last().filter(|_| rows.len() == PENDING_PAGE) {
            self.check.cursors.insert(partition, last.id);
        }
        Ok(rows)
    }

    /// Takes entries of one consumer over, unless they were touched since they were listed: then they are idle for a
    /// shorter time.
    async fn take_over(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
        lease: Duration,
        rows: &[PendingDelivery],
    ) -> StreamResult<()> {
        let Some(min_idle) = rows.iter().map(|row| row.idle).min() else { return Ok(()) };
        let ids: Vec<EntryId> = rows.iter().map(|row| row.id).collect();
        self.check.names = self.check.names % NAMES_MAX + 1;
        let consumer = lease_consumer(lease, self.check.names, &self.name);
        self.check.unanswered.retain(|(_, name), _| *name != consumer);
        let entries = self
            .reclaim(topic, partition, &consumer, ReclaimFrom::Ids(&ids), min_idle)
            .await
            .inspect_err(|error| {
                if error.is_transient() {
                    let unanswered = ids.iter().copied().collect();
                    self.check.unanswered.insert((partition, consumer), unanswered);
                }
            })?;
        if entries > 0 {
            let (stream, former) = (keys::stream(topic, partition), &rows[0].consumer);
            info!(%stream, consumer = %former, entries, "pending entries are delivered again");
        }
        Ok(())
    }

    /// Holds entries of a take-over whose reply was lost. The server counted their delivery then, and does not count it again.
    async fn complete_take_over(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
        rows: &[PendingDelivery],
    ) -> StreamResult<()> {
        let Some(consumer) = rows.first().map(|row| row.consumer.clone()) else { return Ok(()) };
        let ids: Vec<EntryId> = rows.iter().map(|row| row.id).collect();
        let own = ReclaimFrom::Own(&ids);
        self.reclaim(topic, partition, &consumer, own, Duration::ZERO).await?;
        self.check.record_answer(partition, &consumer, &ids);
        Ok(())
    }

    /// Reclaims entries for a consumer name and holds them. Returns how many.
    async fn reclaim(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
        consumer: &ConsumerName,
        from: ReclaimFrom<'_>,
        min_idle: Duration,
    ) -> StreamResult<usize> {
        let stream = &keys::stream(topic, partition);
        let leased_at = Instant::now();
        let reclaim = ReclaimRequest {
            stream,
            group: &self.driver.key.1,
            consumer,
            fence: None,
            from,
            min_idle,
            after: None,
            count: READ_MAX,
        };
        let reclaimed = self.backend.reclaim(reclaim).await?;
        if !reclaimed.deleted.is_empty() {
            metrics(topic, partition, &self.driver.key.1)
                .record_anomaly("deleted_while_pending", reclaimed.deleted.len());
            warn!(%stream, entries = reclaimed.deleted.len(), "pending entries were trimmed or deleted; the messages are lost");
        }
        let entries = reclaimed.entries.len();
        if entries > 0 {
            self.message_size.record(largest_bytes(&reclaimed.entries));
        }
        self.hold(topic, partition, consumer, leased_at, reclaimed.entries);
        Ok(entries)
    }
}

/// Statistics of a partition, and a page of its pending entries.
type ListedPending = (Option<StreamStats>, Vec<PendingDelivery>);

async fn list_pending(
    backend: Arc<dyn Backend>,
    stream: StreamName,
    group: GroupName,
    after: Option<EntryId>,
) -> StreamResult<ListedPending> {
    let query = PendingDeliveryQuery {
        stream: &stream,
        group: &group,
        consumer: None,
        min_idle: LEASE_MIN,
        after,
        count: PENDING_PAGE,
    };
    let listing =
        async { tokio::try_join!(backend.stats_without_lag(&stream), backend.pending(query)) };
    match backend.cluster_slot("") {
        // There is one server: no other partition waits for it.
        None => listing.await,
        Some(_) => timeout(CHECK_MAX, listing).await.unwrap_or_else(|_| {
            let problem = format!("its server did not answer within {CHECK_MAX:?}");
            Err(StreamError::Unavailable { problem, source: None })
        }),
    }
}
