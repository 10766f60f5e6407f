//! Lists pending entries of all partitions, oldest first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use headwater_stream::{
    ConsumerName, Direction, EntryId, PendingDelivery, PendingDeliveryQuery, SettleAction,
    StreamError,
};

use super::{CONCURRENT_STATS, Inspector, select_partitions};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::merge_pages::{IdRange, MergedPage, PageMerge};
use crate::pagination::{CursorScope, PAGE_DEFAULT, Page, check_limit, previous};
use crate::topic::{Partition, group_name};

/// Pending entries of one partition per fetch; they are small.
const FETCH_MAX: usize = 256;

/// A query for a page of pending entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingFilter {
    /// Only those of this partition.
    pub partition: Option<Partition>,
    /// Only those pending for this consumer.
    pub consumer: Option<String>,
    /// Only those idle for at least this long. Default: 0.
    pub min_idle: Duration,
    /// Page size. Default: 100, limit: 1000.
    pub limit: usize,
    /// `next` of the previous page.
    pub cursor: Option<String>,
}

impl Default for PendingFilter {
    fn default() -> Self {
        Self {
            partition: None,
            consumer: None,
            min_idle: Duration::ZERO,
            limit: PAGE_DEFAULT,
            cursor: None,
        }
    }
}

/// A pending message: delivered and not settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingView {
    /// Its partition.
    pub partition: Partition,
    /// Its entry id.
    pub id: EntryId,
    /// The consumer it is pending for; `None` if it was released and waits for its next delivery.
    pub consumer: Option<String>,
    /// Time since it was last delivered or claimed; `None` if it was released.
    pub idle: Option<Duration>,
    /// Number of deliveries.
    pub deliveries: u64,
}

impl Inspector {
    /// A page of pending messages of a group, oldest first, over all partitions.
    pub async fn pending(
        &self,
        topic: &str,
        group: &str,
        filter: &PendingFilter,
    ) -> Result<Page<PendingView>> {
        check_limit(filter.limit)?;
        let group = group_name(group)?;
        let consumer = filter.consumer.as_ref().map(ConsumerName::new).transpose()?;
        let topic = self.queue.existing_topic(topic).await?;
        let partitions = select_partitions(&topic, filter.partition)?;
        let scope = CursorScope::new(
            "pending",
            &[
                topic.name.as_str(),
                group.as_str(),
                filter.consumer.as_deref().unwrap_or_default(),
                &format!("{:?} {:?}", filter.partition, filter.min_idle),
            ],
        );
        let merge = PageMerge {
            range: IdRange::ALL,
            direction: Direction::Forward,
            after: scope.position(filter.cursor.as_deref())?,
            limit: filter.limit,
            fetch_max: FETCH_MAX,
        };
        let has_group = AtomicBool::new(false);
        let fetch = |partition: Partition, range: IdRange, count: usize| {
            let backend = Arc::clone(&self.queue.inner.backend);
            let stream = keys::stream(&topic, partition);
            let (group, consumer, has_group) = (&group, &consumer, &has_group);
            async move {
                let query = PendingDeliveryQuery {
                    stream: &stream,
                    group,
                    consumer: consumer.as_ref(),
                    min_idle: filter.min_idle,
                    after: previous(range.from),
                    count,
                };
                match backend.pending(query).await {
                    Ok(pending) => {
                        has_group.store(true, Ordering::Relaxed);
                        Ok(pending.into_iter().map(|pending| (pending.id, pending)).collect())
                    }
                    // The group does not exist on this partition.
                    Err(StreamError::NoGroup { .. }) => Ok(Vec::new()),
                    Err(error) => Err(error.into()),
                }
            }
        };
        let merged = merge.run(partitions, fetch, |_| 0).await?;
        if !has_group.into_inner() {
            // Not on the selected partitions. Fails if it exists on no partition.
            self.group(topic.name.as_str(), group.as_str()).await?;
        }
        Ok(page(merged, &scope))
    }

    /// The pending message with the lowest id of each of these partitions, in their order. A partition without one, or that does
    /// not exist, is left out.
    pub async fn oldest_pending(
        &self,
        topic: &str,
        group: &str,
        partitions: &[Partition],
    ) -> Result<Vec<PendingView>> {
        let group = group_name(group)?;
        let topic = self.queue.existing_topic(topic).await?;
        let (topic, group, backend) = (&*topic, &group, &self.queue.inner.backend);
        let looks = partitions.iter().copied().filter(|partition| *partition < topic.partitions);
        let looks = looks.map(|partition| async move {
            let query = PendingDeliveryQuery {
                stream: &keys::stream(topic, partition),
                group,
                consumer: None,
                min_idle: Duration::ZERO,
                after: None,
                count: 1,
            };
            let found = match backend.pending(query).await {
                Ok(found) => found,
                Err(StreamError::NoGroup { .. }) => Vec::new(),
                Err(error) => return Err(QueueError::from(error)),
            };
            Ok(found.into_iter().next().map(|pending| view(pending.id, partition, pending)))
        });
        let found: Vec<_> = stream::iter(looks).buffered(CONCURRENT_STATS).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// One pending message of a group; `None` if it is not pending, or the group does not exist on its partition.
    pub async fn pending_message(
        &self,
        topic: &str,
        group: &str,
        partition: Partition,
        id: EntryId,
    ) -> Result<Option<PendingView>> {
        let group = group_name(group)?;
        let topic = self.queue.existing_topic(topic).await?;
        select_partitions(&topic, Some(partition))?;
        let query = PendingDeliveryQuery {
            stream: &keys::stream(&topic, partition),
            group: &group,
            consumer: None,
            min_idle: Duration::ZERO,
            after: previous(id),
            count: 1,
        };
        match self.queue.inner.backend.pending(query).await {
            Ok(found) => {
                let found = found.into_iter().find(|pending| pending.id == id);
                Ok(found.map(|pending| view(id, partition, pending)))
            }
            Err(StreamError::NoGroup { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn view(id: EntryId, partition: Partition, pending: PendingDelivery) -> PendingView {
    PendingView {
        partition,
        id,
        idle: (!is_released(&pending)).then_some(pending.idle),
        consumer: (!is_released(&pending)).then(|| pending.consumer.to_string()),
        deliveries: pending.deliveries,
    }
}

/// Whether the entry was released, and waits for its next delivery. The backend keeps no time for it.
fn is_released(pending: &PendingDelivery) -> bool {
    pending.consumer.as_str() == SettleAction::RELEASED
}

fn page(merged: MergedPage<PendingDelivery>, scope: &CursorScope) -> Page<PendingView> {
    let last = merged.items.last().map(|(position, _)| *position).filter(|_| merged.has_more);
    let items = merged.items.into_iter();
    Page {
        items: items.map(|((id, partition), pending)| view(id, partition, pending)).collect(),
        next: last.map(|position| scope.cursor(position)),
    }
}
