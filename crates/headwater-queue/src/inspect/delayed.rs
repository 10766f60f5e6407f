//! Lists messages that wait for their time: retries and delayed sends.

use headwater_stream::clock::Timestamp;
use headwater_stream::{DelayedEntry, DeliveredEntry, EntryId};

use super::Inspector;
use crate::error::Result;
use crate::keys;
use crate::message::{MalformedMessage, Message, RETRY_GROUP};
use crate::pagination::check_limit;
use crate::topic::{Partition, Topic};

/// A message that waits for its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayedView {
    /// When it is due.
    pub due_at: Timestamp,
    /// The partition that it goes to; `None` if another program named a stream that does not belong to the topic.
    pub partition: Option<Partition>,
    /// The group that it is retried for; `None` if it was sent with a delay.
    pub group: Option<String>,
    /// The message, or why the entry is malformed. It has no entry id yet.
    pub message: std::result::Result<Message, MalformedMessage>,
}

impl Inspector {
    /// The messages of a topic that are due first, at most `limit`.
    pub async fn delayed(&self, topic: &str, limit: usize) -> Result<Vec<DelayedView>> {
        check_limit(limit)?;
        let topic = self.queue.existing_topic(topic).await?;
        let mut found = Vec::new();
        for delays in keys::all_delays(&topic) {
            found.extend(self.queue.inner.backend.delayed(&delays, 0, limit).await?);
            found.sort_by_key(|entry| entry.due_at);
            found.truncate(limit);
        }
        Ok(found.into_iter().map(|entry| read(&topic, entry)).collect())
    }
}

fn read(topic: &Topic, DelayedEntry { to, due_at, fields, .. }: DelayedEntry) -> DelayedView {
    let partition = (0..topic.partitions).find(|partition| keys::stream(topic, *partition) == to);
    let group = fields.get(RETRY_GROUP).map(|group| String::from_utf8_lossy(group).into_owned());
    let entry = DeliveredEntry { id: EntryId::MIN, fields, deliveries: 0 };
    let message = Message::read(&topic.name, partition.unwrap_or(0), entry);
    DelayedView { due_at, partition, group, message: message.map_err(|(malformed, _)| malformed) }
}
