//! Messages of all partitions in one list, by time, in both directions.

use std::sync::Arc;

use headwater_stream::clock::Timestamp;
use headwater_stream::{Delivery, Direction, Entry, EntryId, Fields, Range};

use super::{Inspector, select_partitions};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::merge_pages::{IdRange, PageMerge};
use crate::message::{Malformed, Message};
use crate::pagination::{CursorScope, PAGE_DEFAULT, Page, check_limit};
use crate::topic::{Partition, TopicName};

/// Messages of one partition that are fetched at once. They may be large.
const FETCH_MAX: usize = 16;

/// Where a range begins or ends; it is part of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// At this entry.
    Id(EntryId),
    /// At this time, to the millisecond.
    Time(Timestamp),
}

/// Which messages to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageQuery {
    /// The oldest. Default: the first there is.
    pub from: Option<Bound>,
    /// The newest. Default: the last there is.
    pub to: Option<Bound>,
    /// Which end comes first. Default: the oldest.
    pub direction: Direction,
    /// Only those of this partition.
    pub partition: Option<Partition>,
    /// At most this many on a page. Default: 100, limit: 1000. A page of large messages has fewer.
    pub limit: usize,
    /// `next` of the page before.
    pub cursor: Option<String>,
}

impl Default for MessageQuery {
    fn default() -> Self {
        Self {
            from: None,
            to: None,
            direction: Direction::Forward,
            partition: None,
            limit: PAGE_DEFAULT,
            cursor: None,
        }
    }
}

/// A message as it lies in its partition, whoever has handled it or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    /// Its partition.
    pub partition: Partition,
    /// Its entry.
    pub id: EntryId,
    /// When it was stored there.
    pub stored_at: Timestamp,
    /// The message, or why the entry is none. It was read for nobody, so its `deliveries` are 0.
    pub message: std::result::Result<Message, Malformed>,
    /// All fields of the entry as they are.
    pub fields: Fields,
}

impl StoredMessage {
    pub(crate) fn read(topic: &TopicName, partition: Partition, entry: Entry) -> Self {
        let Entry { id, fields } = entry;
        let delivery = Delivery { id, fields: fields.clone(), deliveries: 0 };
        Self {
            partition,
            id,
            stored_at: Timestamp::from_millis(id.ms),
            message: Message::read(topic, partition, delivery).map_err(|(malformed, _)| malformed),
            fields,
        }
    }
}

impl Inspector {
    /// One message, if it is still there.
    pub async fn message(
        &self,
        topic: &str,
        partition: Partition,
        id: EntryId,
    ) -> Result<Option<StoredMessage>> {
        let topic = self.queue.existing_topic(topic).await?;
        select_partitions(&topic, Some(partition))?;
        let range = Range { from: id, to: id, ..Range::first(1) };
        let stream = keys::stream(&topic, partition);
        let found = self.queue.inner.backend.range(&stream, range).await?.into_iter().next();
        Ok(found.map(|entry| StoredMessage::read(&topic.name, partition, entry)))
    }

    /// Messages in the order they were stored, over all partitions.
    pub async fn messages(&self, topic: &str, query: &MessageQuery) -> Result<Page<StoredMessage>> {
        check_limit(query.limit)?;
        let range = range(query)?;
        let topic = self.queue.existing_topic(topic).await?;
        let partitions = select_partitions(&topic, query.partition)?;
        let asked = format!("{range:?} {:?} {:?}", query.direction, query.partition);
        let scope = CursorScope::new("messages", &[topic.name.as_str(), &asked]);
        let merge = PageMerge {
            range,
            direction: query.direction,
            after: scope.position(query.cursor.as_deref())?,
            limit: query.limit,
            fetch_max: FETCH_MAX,
        };
        let fetch = |partition: Partition, range: IdRange, count: usize| {
            let backend = Arc::clone(&self.queue.inner.backend);
            let stream = keys::stream(&topic, partition);
            let direction = query.direction;
            async move {
                let range = Range { from: range.from, to: range.to, direction, count };
                let entries = backend.range(&stream, range).await?;
                Ok(entries.into_iter().map(|entry| (entry.id, entry)).collect())
            }
        };
        let merged = merge.run(partitions, fetch, |entry: &Entry| entry.fields.bytes()).await?;
        let last = merged.items.last().map(|(position, _)| *position).filter(|_| merged.has_more);
        let read = |((_, partition), entry)| StoredMessage::read(&topic.name, partition, entry);
        Ok(Page {
            items: merged.items.into_iter().map(read).collect(),
            next: last.map(|position| scope.cursor(position)),
        })
    }
}

fn range(query: &MessageQuery) -> Result<IdRange> {
    let from = match query.from {
        None => EntryId::MIN,
        Some(Bound::Id(id)) => id,
        Some(Bound::Time(at)) => EntryId::new(at.as_millis(), 0),
    };
    let to = match query.to {
        None => EntryId::MAX,
        Some(Bound::Id(id)) => id,
        Some(Bound::Time(at)) => EntryId::new(at.as_millis(), u64::MAX),
    };
    if from > to {
        let problem = format!("it begins at {from}, after its end {to}; swap them");
        return Err(QueueError::invalid("a range", problem));
    }
    Ok(IdRange { from, to })
}
