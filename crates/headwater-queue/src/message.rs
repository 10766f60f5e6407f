//! Messages: what a producer sends, what a handler receives, and how both are encoded in a stream entry.
//!
//! Upstream: applications. Downstream: entries of `headwater-stream`.
//! Guarantees: payload bytes are never re-encoded; an entry of another program is readable with all its fields; a
//! malformed entry names the invalid field and keeps its bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{DeliveredEntry, EntryId, EntrySize, Epoch, FieldRef, Fields};

use crate::error::{QueueError, Result};
use crate::limits::{ATTEMPTS_MAX, HEADERS_BYTES_MAX, KEY_BYTES_MAX, MESSAGE_ID_BYTES_MAX};
use crate::topic::{EntryFormat, GroupName, Partition, Topic, TopicName};
use crate::trace::{TRACEPARENT, TraceContext};

/// Headers of a message: names and values.
pub type MessageHeaders = BTreeMap<String, String>;

pub(crate) const PAYLOAD: &str = "payload";
pub(crate) const TIMESTAMP: &str = "timestamp";
pub(crate) const RETRY_COUNT: &str = "retryCount";
pub(crate) const MAX_RETRIES: &str = "maxRetries";
pub(crate) const TOPIC: &str = "topic";
pub(crate) const PARTITION_ID: &str = "partitionId";
pub(crate) const KEY: &str = "key";
pub(crate) const HEADERS: &str = "headers";
pub(crate) const ORIGINAL_MESSAGE_ID: &str = "originalMessageId";
pub(crate) const REPLAYED_FROM: &str = "replayedFrom";
/// The group that a retried or replayed message is for; other groups skip it.
pub(crate) const RETRY_GROUP: &str = "retryGroup";

/// Every field that an entry of a message may have.
const ALL: [&str; 11] = [
    PAYLOAD,
    TIMESTAMP,
    RETRY_COUNT,
    MAX_RETRIES,
    TOPIC,
    PARTITION_ID,
    KEY,
    HEADERS,
    ORIGINAL_MESSAGE_ID,
    REPLAYED_FROM,
    RETRY_GROUP,
];

/// No headers, as JSON.
const NO_HEADERS: Bytes = Bytes::from_static(b"{}");

/// A message to send.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewMessage {
    /// Determines its partition and its order, at most 4,096 bytes. `None`: any partition, no order.
    pub key: Option<String>,
    /// Content, at most the `payload_bytes_max` of its topic.
    pub payload: Bytes,
    /// Names and values beside the payload, at most 32 KiB as JSON.
    pub headers: MessageHeaders,
    /// The partition; `None` lets the producer's partitioner choose it.
    pub partition: Option<Partition>,
    /// Idempotency key: a second message with this id is not sent again within the producer's `idempotence_window`.
    pub id: Option<String>,
    /// Retries after a failure; `None` uses the setting of the topic.
    pub max_retries: Option<u32>,
}

impl NewMessage {
    /// A message without a key.
    pub fn new(payload: impl Into<Bytes>) -> Self {
        Self { payload: payload.into(), ..Default::default() }
    }

    /// A message with a key.
    pub fn keyed(key: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self { key: Some(key.into()), ..Self::new(payload) }
    }

    /// Adds a header.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Sends to this partition.
    pub fn to_partition(mut self, partition: Partition) -> Self {
        self.partition = Some(partition);
        self
    }

    /// Sets the idempotency key.
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Checks the limits of its topic.
    pub(crate) fn validate(&self, topic: &Topic) -> Result<()> {
        let limit = topic.policies.payload_bytes_max;
        if self.payload.len() > limit {
            let problem =
                format!("{} bytes; topic `{}` allows {limit}", self.payload.len(), topic.name);
            return Err(QueueError::invalid("payload", problem));
        }
        let key_bytes = self.key.as_ref().map_or(0, String::len);
        if key_bytes > KEY_BYTES_MAX {
            let problem = format!("{key_bytes} bytes; the limit is {KEY_BYTES_MAX}");
            return Err(QueueError::invalid("key", problem));
        }
        let id_bytes = self.id.as_ref().map_or(1, String::len);
        if !(1..=MESSAGE_ID_BYTES_MAX).contains(&id_bytes) {
            let problem = format!("{id_bytes} bytes; must be 1 to {MESSAGE_ID_BYTES_MAX}");
            return Err(QueueError::invalid("id", problem));
        }
        if let Some(count) = self.max_retries.filter(|count| *count >= ATTEMPTS_MAX) {
            let problem = format!("{count}; must be below {ATTEMPTS_MAX}");
            return Err(QueueError::invalid("max_retries", problem));
        }
        if let Some(partition) = self.partition.filter(|p| *p >= topic.partitions) {
            let problem = format!(
                "{partition}; topic `{}` has partitions 0 to {}",
                topic.name,
                topic.partitions - 1
            );
            return Err(QueueError::invalid("partition", problem));
        }
        Ok(())
    }

    /// Converts it to the parts of its entry. Adds the trace context unless the headers have one.
    pub(crate) fn into_outgoing(self, trace: Option<TraceContext>) -> Result<OutgoingMessage> {
        let trace = trace.filter(|_| !self.headers.contains_key(TRACEPARENT));
        let headers = match (self.headers.is_empty(), trace) {
            (true, None) => NO_HEADERS,
            (true, Some(trace)) => format!(r#"{{"{TRACEPARENT}":"{trace}"}}"#).into(),
            (false, trace) => headers_within_limit(&self.headers, trace)?,
        };
        Ok(OutgoingMessage {
            payload: self.payload,
            key: self.key.map(Bytes::from),
            headers,
            max_retries: self.max_retries.map(|count| count.to_string().into()),
        })
    }

    #[cfg(test)]
    fn to_fields(&self, topic: &Topic, partition: Partition, now: Timestamp) -> Result<Fields> {
        let outgoing = self.clone().into_outgoing(None)?;
        Ok(outgoing.encode(&PartitionFields::new(topic, partition), &now.to_rfc3339().into()))
    }
}

/// A validated message, as the parts of its entry.
#[derive(Debug)]
pub(crate) struct OutgoingMessage {
    payload: Bytes,
    key: Option<Bytes>,
    headers: Bytes,
    max_retries: Option<Bytes>,
}

impl OutgoingMessage {
    /// The fields of its entry.
    pub(crate) fn encode(&self, partition_fields: &PartitionFields, timestamp: &Bytes) -> Fields {
        self.with_parts(partition_fields, timestamp, Fields::with_shared)
    }

    /// The size of its entry.
    pub(crate) fn size(&self, partition_fields: &PartitionFields, timestamp: &Bytes) -> EntrySize {
        self.with_parts(partition_fields, timestamp, |before, shared, after| {
            let own = before.iter().chain(after);
            let own_bytes: usize = own.map(|(name, value)| name.len() + value.len()).sum();
            let EntrySize { fields, bytes } = shared.size();
            EntrySize { fields: before.len() + fields + after.len(), bytes: own_bytes + bytes }
        })
    }

    /// Calls `take` with its own fields before the shared ones, the shared fields, and its own fields after them.
    pub(crate) fn with_parts<T>(
        &self,
        partition_fields: &PartitionFields,
        timestamp: &Bytes,
        take: impl FnOnce(&[FieldRef<'_>], &Fields, &[FieldRef<'_>]) -> T,
    ) -> T {
        static NO_RETRY: Bytes = Bytes::from_static(b"0");
        let (with_counts, without_counts) = match partition_fields {
            PartitionFields::Full { with_counts, without_counts } => (with_counts, without_counts),
            PartitionFields::Compact => return self.with_compact_parts(take),
        };
        let (payload, timestamp) = ((PAYLOAD, &self.payload), (TIMESTAMP, timestamp));
        let headers = (HEADERS, &self.headers);
        let keyed = self.key.as_ref().map(|key| [(KEY, key), headers]);
        let after = keyed.as_ref().map_or(std::slice::from_ref(&headers), |keyed| &keyed[..]);
        match &self.max_retries {
            None => take(&[payload, timestamp], with_counts, after),
            Some(max_retries) => {
                let counts = [(RETRY_COUNT, &NO_RETRY), (MAX_RETRIES, max_retries)];
                take(&[payload, timestamp, counts[0], counts[1]], without_counts, after)
            }
        }
    }

    fn with_compact_parts<T>(
        &self,
        take: impl FnOnce(&[FieldRef<'_>], &Fields, &[FieldRef<'_>]) -> T,
    ) -> T {
        let optional = [
            (KEY, self.key.as_ref()),
            (HEADERS, Some(&self.headers).filter(|headers| **headers != NO_HEADERS)),
            (MAX_RETRIES, self.max_retries.as_ref()),
        ];
        let mut fields = [(PAYLOAD, &self.payload); 4];
        let mut count = 1;
        for (name, value) in optional {
            if let Some(value) = value {
                fields[count] = (name, value);
                count += 1;
            }
        }
        static NOT_SHARED: LazyLock<Fields> = LazyLock::new(Fields::default);
        take(&fields[..count], &NOT_SHARED, &[])
    }
}

/// The fields that all messages of a partition share, encoded once.
#[derive(Clone, Debug)]
pub(crate) enum PartitionFields {
    /// None of them is written.
    Compact,
    Full {
        with_counts: Fields,
        /// Without the retry counts, for messages that have their own.
        without_counts: Fields,
    },
}

impl PartitionFields {
    pub(crate) fn new(topic: &Topic, partition: Partition) -> Self {
        if topic.policies.entry_format == EntryFormat::Compact {
            return Self::Compact;
        }
        let name = Bytes::copy_from_slice(topic.name.as_str().as_bytes());
        let location = [(TOPIC, &name), (PARTITION_ID, &partition.to_string().into())];
        let without_counts = Fields::with_shared(&location, &Fields::default(), &[]);
        let max_retries = topic.policies.max_retries.to_string().into();
        let counts = [(RETRY_COUNT, &Bytes::from_static(b"0")), (MAX_RETRIES, &max_retries)];
        let with_counts = Fields::with_shared(&counts, &without_counts, &[]);
        Self::Full { with_counts, without_counts }
    }
}

/// A message as a handler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The id of its entry.
    pub id: EntryId,
    /// Its topic.
    pub topic: TopicName,
    /// Its partition.
    pub partition: Partition,
    /// Determines its partition and its order.
    pub key: Option<String>,
    /// Content. Empty for an entry of another program without a field `payload`: see `fields`.
    pub payload: Bytes,
    /// Names and values beside the payload.
    pub headers: MessageHeaders,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// How often the group has delivered this entry, including deliveries to consumers that crashed.
    pub deliveries: u64,
    /// With `Mode::Owned`, the epoch of the partition's owner, a fencing token: a store that remembers the highest
    /// epoch per partition and rejects lower ones is safe from a stale owner.
    pub epoch: Option<Epoch>,
    /// Retries after a failure; `None` uses the setting of subscription and topic.
    pub max_retries: Option<u32>,
    /// When it was sent: the timestamp of its entry; if it has none or a malformed one, the time in the id of its first entry,
    /// which the server assigned.
    pub sent_at: Timestamp,
    /// The id of its first entry, if it was retried or replayed.
    pub original_id: Option<EntryId>,
    /// The id of the dead letter it was replayed from.
    pub replayed_from: Option<EntryId>,
    /// The only group it is for, if it was retried or replayed: other groups handle its first entry.
    pub retry_group: Option<String>,
    /// All fields of its entry, unchanged.
    pub fields: Fields,
}

/// Why an entry is not a valid message. It becomes a dead letter with its bytes unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}` {problem}")]
pub struct MalformedMessage {
    /// The invalid field.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

impl Message {
    /// Whether an entry is stored as a message is: with a payload, and no field of another meaning. A stream with other
    /// entries belongs to another program.
    pub fn is_stored_as(fields: &Fields) -> bool {
        let is_ours = |name: &[u8]| ALL.iter().any(|ours| ours.as_bytes() == name);
        fields.get(PAYLOAD).is_some() && fields.slices().all(|(name, _)| is_ours(name))
    }

    /// Parses an entry.
    pub(crate) fn read(
        topic: &TopicName,
        partition: Partition,
        delivery: DeliveredEntry,
    ) -> std::result::Result<Self, (MalformedMessage, DeliveredEntry)> {
        match Self::parse(topic, partition, &delivery) {
            Ok(message) => Ok(message),
            Err(malformed) => Err((malformed, delivery)),
        }
    }

    fn parse(
        topic: &TopicName,
        partition: Partition,
        delivery: &DeliveredEntry,
    ) -> std::result::Result<Self, MalformedMessage> {
        let DeliveredEntry { id, fields, deliveries } = delivery;
        let mut message = Self {
            id: *id,
            topic: topic.clone(),
            partition,
            key: None,
            payload: Bytes::new(),
            headers: MessageHeaders::new(),
            attempt: 1,
            deliveries: *deliveries,
            epoch: None,
            max_retries: None,
            sent_at: sent_with_id(*id),
            original_id: None,
            replayed_from: None,
            retry_group: None,
            fields: fields.clone(),
        };
        let mut timestamp = None;
        for (name, value) in fields.slices() {
            match name {
                b"payload" => message.payload = fields.share(value),
                b"key" => message.key = Some(text(KEY, value)?.to_owned()),
                b"headers" => message.headers = headers_from_json(text(HEADERS, value)?)?,
                b"retryCount" => {
                    let failures: u32 = number(RETRY_COUNT, value)?;
                    message.attempt = failures.saturating_add(1);
                }
                b"maxRetries" => message.max_retries = Some(number(MAX_RETRIES, value)?),
                // Optional: an invalid value is ignored and stays in `fields`.
                b"timestamp" => timestamp = read_timestamp(value),
                b"originalMessageId" => message.original_id = read_id(value),
                b"replayedFrom" => message.replayed_from = read_id(value),
                b"retryGroup" => {
                    message.retry_group = std::str::from_utf8(value).ok().map(str::to_owned);
                }
                _ => {}
            }
        }
        message.sent_at = timestamp.unwrap_or_else(|| sent_with_id(message.first_id()));
        if message.original_id.is_none() {
            // It was never retried or replayed, so the field belongs to another program.
            message.retry_group = None;
        }
        Ok(message)
    }

    /// Failed attempts before this one.
    pub fn failures(&self) -> u32 {
        self.attempt - 1
    }

    /// The id of its first entry.
    pub fn first_id(&self) -> EntryId {
        self.original_id.unwrap_or(self.id)
    }

    /// The fields of its retry for this group, with one more failure counted.
    pub(crate) fn to_retry(&self, group: &GroupName) -> Fields {
        replace_fields(
            &self.fields,
            &[
                (RETRY_COUNT, Some(self.attempt.to_string())),
                (ORIGINAL_MESSAGE_ID, Some(self.first_id().to_string())),
                (RETRY_GROUP, Some(group.to_string())),
            ],
        )
    }
}

/// The fields with some replaced or added (`Some`) or removed (`None`). All other bytes are unchanged.
pub(crate) fn replace_fields(
    fields: &Fields,
    changes: &[(&'static str, Option<String>)],
) -> Fields {
    let kept = fields
        .iter()
        .filter(|(name, _)| changes.iter().all(|(changed, _)| name != changed.as_bytes()))
        .cloned();
    let new = changes.iter().filter_map(|(name, value)| {
        let value = value.clone()?;
        Some((Bytes::from_static(name.as_bytes()), Bytes::from(value)))
    });
    Fields::new(kept.chain(new))
}

/// The fields with the value of one replaced or added. All other bytes are unchanged.
pub(crate) fn replace_bytes(fields: &Fields, name: &'static str, value: Bytes) -> Fields {
    let kept = fields.iter().filter(|(field, _)| field != name.as_bytes()).cloned();
    Fields::new(kept.chain([(Bytes::from_static(name.as_bytes()), value)]))
}

pub(crate) fn read_id(value: impl AsRef<[u8]>) -> Option<EntryId> {
    std::str::from_utf8(value.as_ref()).ok()?.parse().ok()
}

/// When the entry with this id was appended, by the clock of the server.
pub(crate) fn sent_with_id(id: EntryId) -> Timestamp {
    Timestamp::from_millis(id.ms)
}

pub(crate) fn read_timestamp(value: impl AsRef<[u8]>) -> Option<Timestamp> {
    let text = std::str::from_utf8(value.as_ref()).ok()?;
    Timestamp::from_rfc3339(text).or_else(|| text.parse().ok().map(Timestamp::from_millis))
}

fn text<'a>(
    field: &'static str,
    value: &'a [u8],
) -> std::result::Result<&'a str, MalformedMessage> {
    std::str::from_utf8(value)
        .map_err(|_| MalformedMessage { field, problem: "is not UTF-8 text".to_owned() })
}

fn number(field: &'static str, value: &[u8]) -> std::result::Result<u32, MalformedMessage> {
    let parsed = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| {
        let shown: String = String::from_utf8_lossy(value).chars().take(40).collect();
        MalformedMessage { field, problem: format!("is not a number: `{shown}`") }
    })
}

/// Headers that are not empty, as JSON. The limit applies to the application's headers, without the trace context.
fn headers_within_limit(headers: &MessageHeaders, trace: Option<TraceContext>) -> Result<Bytes> {
    let mut json = headers_to_json(headers);
    if json.len() > HEADERS_BYTES_MAX {
        let problem = format!("{} bytes as JSON; the limit is {HEADERS_BYTES_MAX}", json.len());
        return Err(QueueError::invalid("headers", problem));
    }
    if let Some(trace) = trace {
        json.pop();
        let _ = write!(json, r#","{TRACEPARENT}":"{trace}"}}"#);
    }
    Ok(json.into())
}

/// Headers as a JSON object.
pub(crate) fn headers_to_json(headers: &MessageHeaders) -> String {
    if headers.is_empty() {
        return "{}".to_owned();
    }
    let mut json = String::with_capacity(headers.len() * 32);
    for (name, value) in headers {
        let separator = if json.is_empty() { '{' } else { ',' };
        // Writing to a string cannot fail, nor can writing a string as JSON.
        let _ = write!(
            json,
            "{separator}{}:{}",
            serde_json::Value::from(name.as_str()),
            serde_json::Value::from(value.as_str())
        );
    }
    json.push('}');
    json
}

/// Parses a JSON object; a value that is not a string is kept as its JSON text.
pub(crate) fn headers_from_json(
    json: &str,
) -> std::result::Result<MessageHeaders, MalformedMessage> {
    if matches!(json, "" | "{}" | "null") {
        return Ok(MessageHeaders::new());
    }
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(json).map_err(|_| MalformedMessage {
            field: HEADERS,
            problem: "is not a JSON object".to_owned(),
        })?;
    let text = |value| match value {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    Ok(object.into_iter().map(|(name, value)| (name, text(value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Layout;

    fn topic() -> Topic {
        Topic::plain(TopicName::new("orders").unwrap(), Layout::Partitioned)
    }

    fn delivery(fields: Fields) -> DeliveredEntry {
        DeliveredEntry { id: EntryId::new(5, 0), fields, deliveries: 1 }
    }

    #[test]
    fn an_encoded_message_parses_to_the_same_message() {
        let bytes = Bytes::from_static(b"\x00\xff{}");
        let new = NewMessage::keyed("键", bytes.clone()).header("a\"b", "c\nd").header("e", "");
        let now = Timestamp::from_millis(1_767_225_600_250);
        let fields = new.to_fields(&topic(), 3, now).unwrap();
        assert_eq!(fields.get(TIMESTAMP).unwrap(), "2026-01-01T00:00:00.250Z");
        assert_eq!(fields.get(PARTITION_ID).unwrap(), "3");
        let message = Message::read(&topic().name, 3, delivery(fields)).unwrap();
        assert_eq!((message.key.as_deref(), &message.payload), (Some("键"), &bytes));
        assert_eq!((message.headers, message.attempt), (new.headers, 1));
        assert_eq!((message.max_retries, message.sent_at), (Some(4), now));
    }

    #[test]
    fn a_retry_counts_the_failure_and_keeps_the_rest() {
        let new = NewMessage::keyed("k", "p").header("h", "1");
        let fields = new.to_fields(&topic(), 0, Timestamp::from_millis(1)).unwrap();
        let message = Message::read(&topic().name, 0, delivery(fields)).unwrap();
        let group = GroupName::new("billing").unwrap();
        let retry = |message: &Message, id| {
            let fields = message.to_retry(&group);
            DeliveredEntry { id: EntryId::new(id, 0), fields, deliveries: 1 }
        };
        let again = retry(&message, 6);
        let again = Message::read(&topic().name, 0, again).unwrap();
        assert_eq!((again.attempt, again.first_id()), (2, message.id));
        let third = Message::read(&topic().name, 0, retry(&again, 7)).unwrap();
        assert_eq!((message.retry_group, again.retry_group), (None, Some("billing".to_owned())));
        assert_eq!((third.attempt, third.first_id()), (3, message.id));
        assert_eq!(
            (third.payload, third.key, third.headers),
            (message.payload, message.key, message.headers)
        );
    }

    #[test]
    fn an_entry_of_another_program_parses_as_a_message() {
        let fields = Fields::new([("data", "{}"), ("issue_id", "7")]);
        let message = Message::read(&topic().name, 0, delivery(fields.clone())).unwrap();
        assert_eq!((message.payload.len(), message.attempt, message.fields), (0, 1, fields));
        let fields = Fields::new([("headers", r#"{"n":1,"t":"x"}"#)]);
        let message = Message::read(&topic().name, 0, delivery(fields)).unwrap();
        assert_eq!((message.headers["n"].as_str(), message.headers["t"].as_str()), ("1", "x"));
    }

    #[test]
    fn a_retry_group_written_by_another_program_is_ignored() {
        let fields = Fields::new([("retryGroup", "theirs"), ("originalMessageId", "order 7")]);
        let message = Message::read(&topic().name, 0, delivery(fields)).unwrap();
        assert_eq!(message.retry_group, None);
    }

    #[test]
    fn a_malformed_entry_names_the_field_and_keeps_its_bytes() {
        for (field, value) in [
            ("retryCount", &b"many"[..]),
            ("retryCount", b"-1"),
            ("maxRetries", b""),
            ("key", b"\xff"),
            ("headers", b"[1]"),
            ("headers", b"{"),
            ("headers", b"\xff"),
        ] {
            let fields = Fields::new([(field, Bytes::copy_from_slice(value))]);
            let (malformed, kept) =
                Message::read(&topic().name, 0, delivery(fields.clone())).unwrap_err();
            assert_eq!((malformed.field, kept.fields), (field, fields));
        }
    }

    #[test]
    fn messages_over_a_limit_are_rejected() {
        let topic = topic();
        let too_large = NewMessage::new(vec![0; crate::limits::PAYLOAD_BYTES_MAX + 1]);
        let long_key = NewMessage::keyed("k".repeat(KEY_BYTES_MAX + 1), "");
        let no_partition = NewMessage::new("").to_partition(1);
        for message in [too_large, long_key, no_partition] {
            assert!(matches!(message.validate(&topic), Err(QueueError::Invalid { .. })));
        }
        let headers = NewMessage::new("").header("h", "x".repeat(HEADERS_BYTES_MAX));
        assert!(headers.to_fields(&topic, 0, Timestamp::from_millis(1)).is_err());
    }
}
