//! Pending entries of all partitions in one list, oldest first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headwater_stream::{ConsumerName, Direction, EntryId, Pending, PendingQuery, StreamError};

use super::{Inspector, select_partitions};
use crate::error::Result;
use crate::keys;
use crate::merge_pages::{IdRange, MergedPage, PageMerge};
use crate::pagination::{CursorScope, PAGE_DEFAULT, Page, check_limit, previous};
use crate::topic::{Partition, group_name};

/// Pending entries of one partition that are fetched at once. They are small.
const FETCH_MAX: usize = 256;

/// Which pending entries to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingFilter {
    /// Only those of this partition.
    pub partition: Option<Partition>,
    /// Only those that this consumer has in hand.
    pub consumer: Option<String>,
    /// Only those that nobody touched for this long.
    pub min_idle: Duration,
    /// At most this many on a page. Default: 100, limit: 1000.
    pub limit: usize,
    /// `next` of the page before.
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

/// A message that was delivered and not settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingView {
    /// Its partition.
    pub partition: Partition,
    /// Its entry.
    pub id: EntryId,
    /// Who has it in hand.
    pub consumer: String,
    /// How long nobody touched it.
    pub idle: Duration,
    /// How often it was delivered.
    pub deliveries: u64,
}

impl Inspector {
    /// Messages of a group that are delivered and not settled, oldest first, over all partitions.
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
                let query = PendingQuery {
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
                    // The group has not begun on this partition.
                    Err(StreamError::NoGroup { .. }) => Ok(Vec::new()),
                    Err(error) => Err(error.into()),
                }
            }
        };
        let merged = merge.run(partitions, fetch, |_| 0).await?;
        if !has_group.into_inner() {
            // Not on the partitions that were asked: perhaps on others.
            self.group(topic.name.as_str(), group.as_str()).await?;
        }
        Ok(page(merged, &scope))
    }
}

fn page(merged: MergedPage<Pending>, scope: &CursorScope) -> Page<PendingView> {
    let last = merged.items.last().map(|(position, _)| *position).filter(|_| merged.has_more);
    let view = |((id, partition), pending): ((EntryId, Partition), Pending)| PendingView {
        partition,
        id,
        consumer: pending.consumer.to_string(),
        idle: pending.idle,
        deliveries: pending.deliveries,
    };
    Page {
        items: merged.items.into_iter().map(view).collect(),
        next: last.map(|position| scope.cursor(position)),
    }
}
