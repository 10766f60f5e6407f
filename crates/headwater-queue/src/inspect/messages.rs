//! Lists messages of all partitions by time, in both directions.

use std::sync::Arc;

use headwater_stream::clock::Timestamp;
use headwater_stream::{DeliveredEntry, Direction, Entry, EntryId, Fields, Range};

use super::{Inspector, select_partitions};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::merge_pages::{IdRange, PageMerge};
use crate::message::{MalformedMessage, Message};
use crate::pagination::{CursorScope, PAGE_DEFAULT, Page, check_limit};
use crate::topic::{Partition, TopicName};

/// Messages of one partition per fetch; they may be large.
const FETCH_MAX: usize = 16;

/// An inclusive bound of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// An entry id.
    Id(EntryId),
    /// A time, to the millisecond.
    Time(Timestamp),
}

/// A query for a page of messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageQuery {
    /// Lower bound. Default: the oldest message.
    pub from: Option<Bound>,
    /// Upper bound. Default: the newest message.
    pub to: Option<Bound>,
    /// The order. Default: oldest first.
    pub direction: Direction,
    /// Only those of this partition.
    pub partition: Option<Partition>,
    /// Page size. Default: 100, limit: 1000. A page of large messages has fewer.
    pub limit: usize,
    /// `next` of the previous page.
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

/// A message as stored in its partition, handled or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    /// Its partition.
    pub partition: Partition,
    /// Its entry id.
    pub id: EntryId,
    /// When it was stored.
    pub stored_at: Timestamp,
    /// The message, or why the entry is malformed. Its `deliveries` is 0, because it was not read by a group.
    pub message: std::result::Result<Message, MalformedMessage>,
    /// All fields of the entry, unchanged.
    pub fields: Fields,
}

impl StoredMessage {
    pub(crate) fn read(topic: &TopicName, partition: Partition, entry: Entry) -> Self {
        let Entry { id, fields } = entry;
        let delivery = DeliveredEntry { id, fields: fields.clone(), deliveries: 0 };
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
    /// One message; `None` if it does not exist.
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

    /// A page of messages in storage order, over all partitions.
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
        let problem = format!("its start {from} is after its end {to}; swap them");
        return Err(QueueError::invalid("a range", problem));
    }
    Ok(IdRange { from, to })
}
