//! A dead letter: a message that exhausted its attempts, with everything needed to replay it.
//!
//! Upstream: `consumer` writes them. Downstream: `dead_letters` lists and replays them.
//! Guarantees: every field of the original entry is kept; the dead-letter fields are added. A field of another program
//! with the same name is renamed with [`CONFLICT_PREFIX`] and gets its own name back on replay.

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{Entry, EntryId, Fields};

use crate::limits::REASON_BYTES_MAX;
use crate::message::{
    self, HEADERS, KEY, MessageHeaders, ORIGINAL_MESSAGE_ID, PARTITION_ID, PAYLOAD, REPLAYED_FROM,
    RETRY_COUNT, RETRY_GROUP, TIMESTAMP, TOPIC,
};
use crate::topic::{GroupName, Partition, TopicName};

const ORIGINAL_TOPIC: &str = "originalTopic";
const FAILED_AT: &str = "failedAt";
const REASON: &str = "reason";
/// Number of replays so far. Kept with the message, so that repeated failures are noticed.
const REPLAY_COUNT: &str = "replayCount";
/// Prefix for fields of the original entry whose names a dead letter uses itself.
const CONFLICT_PREFIX: &str = "original:";

/// A message that exhausted its attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The id of the dead letter.
    pub id: EntryId,
    /// The topic it was sent to.
    pub original_topic: Option<String>,
    /// The partition it was in.
    pub partition: Option<Partition>,
    /// The id of its first entry.
    pub original_id: Option<EntryId>,
    /// Its key, if it is text.
    pub key: Option<String>,
    /// The payload.
    pub payload: Bytes,
    /// The headers; empty if they were malformed.
    pub headers: MessageHeaders,
    /// How often it failed.
    pub failures: u32,
    /// When it was sent.
    pub sent_at: Option<Timestamp>,
    /// When it became a dead letter.
    pub failed_at: Option<Timestamp>,
    /// Why it became a dead letter.
    pub reason: String,
    /// The group whose consumer failed. A replay is delivered to this group only, or to all if there is none.
    pub group: Option<String>,
    /// The dead letter it was replayed from before it failed again.
    pub replayed_from: Option<EntryId>,
    /// How often it was replayed before.
    pub replays: u32,
    /// All fields of the entry, unchanged.
    pub fields: Fields,
}

/// The entry that becomes a dead letter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeadLetterOrigin<'a> {
    pub(crate) topic: &'a TopicName,
    pub(crate) partition: Partition,
    /// The id of its first entry.
    pub(crate) first_id: EntryId,
    /// The group whose consumer failed.
    pub(crate) group: &'a GroupName,
}

/// The fields of the dead letter for an entry. `failures` is `None` to keep a malformed count as it is.
pub(crate) fn to_fields(
    origin: &DeadLetterOrigin<'_>,
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
        (ORIGINAL_TOPIC, Some(origin.topic.to_string())),
        (PARTITION_ID, Some(origin.partition.to_string())),
        (ORIGINAL_MESSAGE_ID, Some(origin.first_id.to_string())),
        (FAILED_AT, Some(now.to_rfc3339())),
        (REASON, Some(reason[..reason_end].to_owned())),
        (RETRY_GROUP, Some(origin.group.to_string())),
    ];
    let renamed = rename_conflicting(fields, &changes);
    if let Some(failures) = failures {
        changes.push((RETRY_COUNT, Some(failures.to_string())));
    }
    message::replace_fields(&renamed, &changes)
}

/// Adds [`CONFLICT_PREFIX`] to the names of fields that would be overwritten, and of fields that already have the
/// prefix, so that it can be undone.
fn rename_conflicting(fields: &Fields, changes: &[(&'static str, Option<String>)]) -> Fields {
    let conflicts = |name: &Bytes, value: &Bytes| {
        name.starts_with(CONFLICT_PREFIX.as_bytes())
            || changes.iter().any(|(changed, new)| {
                name == changed.as_bytes()
                    && !is_ours(changed, fields)
                    && new.as_ref().is_some_and(|new| value != new.as_bytes())
            })
    };
    if !fields.iter().any(|(name, value)| conflicts(name, value)) {
        return fields.clone();
    }
    Fields::new(fields.iter().map(|(name, value)| {
        let name = match conflicts(name, value) {
            true => Bytes::from([CONFLICT_PREFIX.as_bytes(), name].concat()),
            false => name.clone(),
        };
        (name, value.clone())
    }))
}

/// Whether a field of an entry was written by this program and may be overwritten.
fn is_ours(name: &str, fields: &Fields) -> bool {
    let was_retried = fields.get(ORIGINAL_MESSAGE_ID).and_then(message::read_id).is_some();
    matches!(name, ORIGINAL_MESSAGE_ID | RETRY_GROUP) && was_retried
}

/// Undoes `rename_conflicting`, except for names that a replayed message needs itself.
fn restore_names(fields: &Fields) -> Fields {
    // These two identify the message, also to detect copies.
    let is_needed =
        |name: &[u8]| [ORIGINAL_MESSAGE_ID, RETRY_GROUP].iter().any(|ours| name == ours.as_bytes());
    let own_name = |name: &Bytes| {
        let own = name.strip_prefix(CONFLICT_PREFIX.as_bytes()).filter(|own| !is_needed(own));
        own.map(Bytes::copy_from_slice)
    };
    let own: Vec<Bytes> = fields.iter().filter_map(|(name, _)| own_name(name)).collect();
    if own.is_empty() {
        return fields.clone();
    }
    let is_new = |name: &Bytes| own_name(name).is_none() && own.contains(name);
    let stays = fields.iter().filter(|(name, _)| !is_new(name));
    Fields::new(
        stays.map(|(name, value)| (own_name(name).unwrap_or_else(|| name.clone()), value.clone())),
    )
}

impl DeadLetter {
    /// Reads a dead letter. Missing or malformed fields are left empty, so that every entry can be shown.
    pub(crate) fn read(entry: Entry) -> Self {
        let Entry { id, fields } = entry;
        let text = |name: &str| {
            fields.get(name).and_then(|value| std::str::from_utf8(value).ok()).map(str::to_owned)
        };
        let original_id = fields.get(ORIGINAL_MESSAGE_ID).and_then(message::read_id);
        Self {
            id,
            original_topic: text(ORIGINAL_TOPIC).or_else(|| text(TOPIC)),
            partition: text(PARTITION_ID).and_then(|number| number.parse().ok()),
            original_id,
            key: text(KEY),
            payload: fields.get(PAYLOAD).cloned().unwrap_or_default(),
            headers: text(HEADERS)
                .and_then(|json| message::headers_from_json(&json).ok())
                .unwrap_or_default(),
            failures: text(RETRY_COUNT).and_then(|count| count.parse().ok()).unwrap_or(0),
            sent_at: fields
                .get(TIMESTAMP)
                .and_then(message::read_timestamp)
                .or_else(|| original_id.map(message::sent_with_id)),
            failed_at: fields.get(FAILED_AT).and_then(message::read_timestamp),
            reason: text(REASON).unwrap_or_default(),
            group: text(RETRY_GROUP),
            replayed_from: fields.get(REPLAYED_FROM).and_then(message::read_id),
            replays: text(REPLAY_COUNT).and_then(|count| count.parse().ok()).unwrap_or(0),
            fields,
        }
    }

    /// The fields of the replayed message: the original ones with the failure count reset.
    pub(crate) fn to_replay(&self) -> Fields {
        let sent = message::replace_fields(
            &self.fields,
            &[(ORIGINAL_TOPIC, None), (FAILED_AT, None), (REASON, None)],
        );
        let own = restore_names(&sent);
        message::replace_fields(
            &own,
            &[
                (RETRY_COUNT, Some("0".to_owned())),
                (REPLAYED_FROM, Some(self.id.to_string())),
                (REPLAY_COUNT, Some(self.replays.saturating_add(1).to_string())),
            ],
        )
    }

    /// An identity shared by all copies of this dead letter and by no other.
    ///
    /// A crash between writing a dead letter and settling its message creates a copy. The dead letters of two groups
    /// for the same message are not copies: each is replayed for its group. Nor is a message that failed again after
    /// a replay.
    pub fn identity(&self) -> String {
        match (self.original_id, self.partition) {
            (Some(original), Some(partition)) => {
                let from = self.replayed_from.unwrap_or(EntryId::MIN);
                let group = self.group.as_deref().unwrap_or_default();
                format!("{partition}:{original}:{from}:{group}")
            }
            _ => format!("letter:{}", self.id),
        }
    }
}
