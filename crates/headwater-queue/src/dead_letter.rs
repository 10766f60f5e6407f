//! A dead letter: a message that ran out of attempts, with all that is needed to send it again.
//!
//! Upstream: `consumer` writes them. Downstream: whoever browses and replays them.
//! Promises: every field of the original entry is kept as it is; WIRE's fields come on top.

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{Entry, EntryId, Fields};

use crate::limits::REASON_BYTES_MAX;
use crate::message::{
    self, HEADERS, Headers, KEY, ORIGINAL_MESSAGE_ID, PARTITION_ID, PAYLOAD, REPLAYED_FROM,
    RETRY_COUNT, TIMESTAMP, TOPIC,
};
use crate::topic::{Partition, TopicName};

const ORIGINAL_TOPIC: &str = "originalTopic";
const FAILED_AT: &str = "failedAt";
const REASON: &str = "reason";
/// How often a message was replayed. It stays with the message, so that one that fails every time is noticed.
const REPLAY_COUNT: &str = "replayCount";

/// A message that ran out of attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The id of the dead letter.
    pub id: EntryId,
    /// The topic it was sent to.
    pub original_topic: Option<String>,
    /// The partition it lay in.
    pub partition: Option<Partition>,
    /// The entry it first was.
    pub original_id: Option<EntryId>,
    /// Its key, if it is text.
    pub key: Option<String>,
    /// What it carries.
    pub payload: Bytes,
    /// Names and values beside the payload; empty if the entry's were malformed.
    pub headers: Headers,
    /// How often it failed.
    pub failures: u32,
    /// When it was sent.
    pub sent_at: Option<Timestamp>,
    /// When it was given up.
    pub failed_at: Option<Timestamp>,
    /// Why.
    pub reason: String,
    /// The dead letter it was replayed from before it failed again.
    pub replayed_from: Option<EntryId>,
    /// How often it was replayed before.
    pub replays: u32,
    /// All fields as they are.
    pub fields: Fields,
}

/// The fields of the dead letter for an entry. `failures` is `None` where the entry's own count is not to be touched,
/// because it is malformed.
pub(crate) fn to_fields(
    topic: &TopicName,
    partition: Partition,
    original_id: EntryId,
    fields: &Fields,
    failures: Option<u32>,
    reason: &str,
    now: Timestamp,
) -> Fields {
    let mut reason_end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(reason_end) {
        reason_end -= 1;
    }
    let mut changes = vec![
        (ORIGINAL_TOPIC, Some(topic.to_string())),
        (PARTITION_ID, Some(partition.to_string())),
        (ORIGINAL_MESSAGE_ID, Some(original_id.to_string())),
        (FAILED_AT, Some(now.to_rfc3339())),
        (REASON, Some(reason[..reason_end].to_owned())),
    ];
    if let Some(failures) = failures {
        changes.push((RETRY_COUNT, Some(failures.to_string())));
    }
    message::replace_fields(fields, &changes)
}

impl DeadLetter {
    /// Reads a dead letter; what is missing or odd is left out, for an operator must see all of them.
    pub(crate) fn read(entry: Entry) -> Self {
        let Entry { id, fields } = entry;
        let text = |name: &str| {
            fields.get(name).and_then(|value| std::str::from_utf8(value).ok()).map(str::to_owned)
        };
        Self {
            id,
            original_topic: text(ORIGINAL_TOPIC).or_else(|| text(TOPIC)),
            partition: text(PARTITION_ID).and_then(|number| number.parse().ok()),
            original_id: fields.get(ORIGINAL_MESSAGE_ID).and_then(message::read_id),
            key: text(KEY),
            payload: fields.get(PAYLOAD).cloned().unwrap_or_default(),
            headers: text(HEADERS)
                .and_then(|json| message::headers_from_json(&json).ok())
                .unwrap_or_default(),
            failures: text(RETRY_COUNT).and_then(|count| count.parse().ok()).unwrap_or(0),
            sent_at: fields.get(TIMESTAMP).and_then(message::read_timestamp),
            failed_at: fields.get(FAILED_AT).and_then(message::read_timestamp),
            reason: text(REASON).unwrap_or_default(),
            replayed_from: fields.get(REPLAYED_FROM).and_then(message::read_id),
            replays: text(REPLAY_COUNT).and_then(|count| count.parse().ok()).unwrap_or(0),
            fields,
        }
    }

    /// The fields of the message it becomes when it is sent again: as it was, with its failures forgotten.
    pub(crate) fn to_replay(&self) -> Fields {
        message::replace_fields(
            &self.fields,
            &[
                (ORIGINAL_TOPIC, None),
                (FAILED_AT, None),
                (REASON, None),
                (RETRY_COUNT, Some("0".to_owned())),
                (REPLAYED_FROM, Some(self.id.to_string())),
                (REPLAY_COUNT, Some(self.replays.saturating_add(1).to_string())),
            ],
        )
    }

    /// What it has in common with its copies, and with no other dead letter.
    ///
    /// A crash between writing a dead letter and settling its message, or a second group that gives up the same message,
    /// makes a copy. A message that was replayed and failed again is no copy: it was replayed from another letter.
    pub(crate) fn identity(&self) -> String {
        match (self.original_id, self.partition) {
            (Some(original), Some(partition)) => {
                let from = self.replayed_from.unwrap_or(EntryId::MIN);
                format!("{partition}:{original}:{from}")
            }
            _ => format!("letter:{}", self.id),
        }
    }
}
