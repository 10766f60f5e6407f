//! A topic: its name, partition count, policies and resizes, and their form in the registry.
//!
//! Upstream: all modules. Downstream: `keys`, which derives its keys.
//! Guarantees: a topic read from the registry is valid; otherwise reading it fails with an error that names the field.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Backend, EntryId, GroupCondition, GroupStart, RegistryMap, Retention, StreamError,
};
use serde_json::{Value, json};

pub use headwater_stream::GroupName;

use crate::error::{QueueError, Result};
use crate::keys::{self, Layout};
use crate::limits::{
    GROUP_BYTES_MAX, GROUP_KEY_BYTES_MAX, PARTITIONS_MAX, PAYLOAD_BYTES_MAX, REFRESH_MAX,
    REFRESH_MIN, RESIZES_MAX, TOPIC_BYTES_MAX,
};

/// The number of a partition, from 0.
pub type Partition = u16;

/// The name of a topic: 1 to 200 bytes of text without control characters and braces.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicName(Arc<str>);

impl TopicName {
    /// Validates a name. Clones share the text.
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        let problem = if name.is_empty() {
            "it is empty".to_owned()
        } else if name.len() > TOPIC_BYTES_MAX {
            format!("{} bytes; the limit is {TOPIC_BYTES_MAX}", name.len())
        } else if let Some(odd) = name.chars().find(|c| c.is_control() || matches!(c, '{' | '}')) {
            format!("it contains {odd:?}; control characters and braces are not allowed")
        } else {
            return Ok(Self(name.into()));
        };
        Err(QueueError::invalid("a topic name", problem))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Allows lookups by `&str` without allocating a name.
impl Borrow<str> for TopicName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TopicName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TopicName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// Validates a group name.
pub(crate) fn group_name(name: &str) -> Result<GroupName> {
    if name.len() > GROUP_BYTES_MAX {
        let problem = format!("{} bytes; the limit is {GROUP_BYTES_MAX}", name.len());
        return Err(QueueError::invalid("a group name", problem));
    }
    let escaped = keys::escaped_len(name);
    if escaped > GROUP_KEY_BYTES_MAX {
        let problem = format!(
            "{escaped} bytes when escaped in a key; the limit is {GROUP_KEY_BYTES_MAX}; use fewer `:` and `%`"
        );
        return Err(QueueError::invalid("a group name", problem));
    }
    Ok(GroupName::new(name)?)
}

/// The fields that a producer writes into the entries of a topic. Consumers read both formats, also in one topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryFormat {
    /// `payload`, and `key`, `headers` and `maxRetries` if the message has them. What a message does not carry follows from
    /// its stream and from the id of its entry. Cheaper to write, store and read.
    Compact,
    /// Also `timestamp`, `retryCount`, `maxRetries`, `topic`, `partitionId` and `headers` in every entry, for other programs
    /// that read the topic. The format of topics that were not created by Headwater.
    Full,
}

impl EntryFormat {
    /// Its name in the registry, in settings and in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Compact => "compact",
            Self::Full => "full",
        }
    }

    /// The format with this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Compact, Self::Full].into_iter().find(|format| format.as_str() == name)
    }
}

/// Retention and limits of a topic. Stored with the topic; the same for every process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policies {
    /// How much of each partition is kept after every group has settled it. Default: everything.
    pub retention: Retention,
    /// Maximum size of the topic in bytes. Default: `None`, no limit. When it is reached, messages settled by every
    /// group are removed, oldest first; sends fail while that does not free enough. May be exceeded by what is sent
    /// within about 200 ms.
    pub byte_budget: Option<u64>,
    /// Maximum payload size in bytes. Default and limit: 1 MiB.
    pub payload_bytes_max: usize,
    /// Retries of a failed message, unless the message or the subscription sets its own. Default: 4.
    pub max_retries: u32,
    /// How long a process may use cached metadata of the topic; growing takes twice as long. Default: 5 s.
    pub refresh: Duration,
    /// The fields of new entries. Default: compact.
    pub entry_format: EntryFormat,
}

impl Default for Policies {
    fn default() -> Self {
        Self {
            retention: Retention::KEEP_ALL,
            byte_budget: None,
            payload_bytes_max: PAYLOAD_BYTES_MAX,
            max_retries: 4,
            refresh: Duration::from_secs(5),
            entry_format: EntryFormat::Compact,
        }
    }
}

/// Changes of [`Policies`]. `None` keeps a value; an inner `None` removes the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyChanges {
    /// Messages kept per partition.
    pub retention_count: Option<Option<u64>>,
    /// Age up to which messages are kept.
    pub retention_age: Option<Option<Duration>>,
    /// Bytes kept per partition.
    pub retention_bytes: Option<Option<u64>>,
    /// Maximum size of the topic in bytes.
    pub byte_budget: Option<Option<u64>>,
    /// Retries of a failed message.
    pub max_retries: Option<u32>,
    /// The fields of new entries; stored entries keep theirs.
    pub entry_format: Option<EntryFormat>,
}

impl Policies {
    /// These policies with changes.
    pub(crate) fn with(&self, changes: &PolicyChanges) -> Self {
        let Retention { max_len, max_age, max_bytes } = self.retention;
        Self {
            retention: Retention {
                max_len: changes.retention_count.unwrap_or(max_len),
                max_age: changes.retention_age.unwrap_or(max_age),
                max_bytes: changes.retention_bytes.unwrap_or(max_bytes),
            },
            byte_budget: changes.byte_budget.unwrap_or(self.byte_budget),
            max_retries: changes.max_retries.unwrap_or(self.max_retries),
            entry_format: changes.entry_format.unwrap_or(self.entry_format),
            ..self.clone()
        }
    }

    /// Rounded as the registry stores them: times in whole milliseconds.
    pub(crate) fn in_milliseconds(mut self) -> Self {
        for time in self.retention.max_age.iter_mut().chain([&mut self.refresh]) {
            *time = Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        }
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.payload_bytes_max == 0 || self.payload_bytes_max > PAYLOAD_BYTES_MAX {
            let problem = format!("{}; 1 to {PAYLOAD_BYTES_MAX}", self.payload_bytes_max);
            return Err(QueueError::invalid("payload_bytes_max", problem));
        }
        if !(REFRESH_MIN..=REFRESH_MAX).contains(&self.refresh) {
            let problem = format!("{:?}; {REFRESH_MIN:?} to {REFRESH_MAX:?}", self.refresh);
            return Err(QueueError::invalid("refresh", problem));
        }
        let Retention { max_age, max_bytes, .. } = self.retention;
        if max_age.is_some_and(|age| age.as_millis() == 0) {
            let problem = "the age is below 1 ms; omit it for no age limit";
            return Err(QueueError::invalid("retention", problem));
        }
        if max_bytes == Some(0) {
            let problem = "the size is 0 bytes; omit it for no size limit";
            return Err(QueueError::invalid("retention", problem));
        }
        if self.max_retries >= crate::limits::ATTEMPTS_MAX {
            let problem = format!("{}; below {}", self.max_retries, crate::limits::ATTEMPTS_MAX);
            return Err(QueueError::invalid("max_retries", problem));
        }
        Ok(())
    }
}

/// An increase of a topic's partition count. Messages of keys that it moved wait for the older ones in the old
/// partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    /// Partitions before.
    pub from: u16,
    /// Partitions after.
    pub to: u16,
    /// When it started, by the backend's clock. Until [`Resize::propagation_time`] has passed, some producers may not
    /// know of it.
    pub began: Timestamp,
    /// The last entry of each old partition that may have been sent by a producer unaware of the resize. `None` until
    /// the resize has propagated; until then moved keys wait.
    pub last_ids: Option<Vec<EntryId>>,
}

impl Resize {
    /// How long after `began` every producer knows of the resize: twice the topic's `refresh`.
    pub fn propagation_time(refresh: Duration) -> Duration {
        refresh * 2
    }
}

/// A topic as the registry describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    /// Its name.
    pub name: TopicName,
    /// How many partitions it has.
    pub partitions: u16,
    /// The key layout; plain for a topic that was not created.
    pub layout: Layout,
    /// When it was created; `None` for a plain topic.
    pub created_at: Option<Timestamp>,
    /// Retention and limits.
    pub policies: Policies,
    /// Its resizes, oldest first.
    pub resizes: Vec<Resize>,
    /// When its deletion started. Stays set if the deletion is interrupted; delete the topic again to finish it.
    pub deleting_since: Option<Timestamp>,
}

pub(crate) const PARTITION_COUNT: &str = "partitionCount";
const CREATED_AT: &str = "createdAt";
const LAYOUT: &str = "layout";
const DELETING_SINCE: &str = "deletingSince";
const RETENTION_COUNT: &str = "retentionCount";
const RETENTION_AGE_MS: &str = "retentionAgeMs";
const RETENTION_BYTES: &str = "retentionBytes";
const BYTE_BUDGET: &str = "byteBudget";
const PAYLOAD_BYTES: &str = "payloadBytesMax";
const MAX_RETRIES: &str = "maxRetries";
const REFRESH_MS: &str = "refreshMs";
const ENTRY_FORMAT: &str = "entryFormat";
/// The meta field that changes with each resize; updates compare it.
pub(crate) const RESIZES: &str = "growths";

impl Topic {
    /// A topic without meta: one partition whose stream key is the topic name.
    pub(crate) fn plain(name: TopicName, layout: Layout) -> Self {
        Self {
            name,
            partitions: 1,
            layout,
            created_at: None,
            policies: Policies { entry_format: EntryFormat::Full, ..Policies::default() },
            resizes: Vec::new(),
            deleting_since: None,
        }
    }

    /// Reads a topic from the registry. One that was not created is plain.
    pub(crate) async fn read(backend: &dyn Backend, name: &TopicName) -> Result<Self> {
        let meta = backend.map_get(&keys::meta(name)).await.map_err(|error| match error {
            StreamError::Unavailable { .. } => StreamError::Unavailable {
                problem: format!("the metadata of topic `{name}` cannot be read"),
                source: Some(error.into()),
            },
            error => error,
        })?;
        Ok(match meta {
            Some(meta) => {
                let mut topic = Self::from_meta(name.clone(), &meta)?;
                // Created by a program that does not use hash tags.
                if topic.layout == Layout::Partitioned && backend.cluster_slot("").is_some() {
                    topic.layout = Layout::PartitionedClustered;
                }
                topic
            }
            None if backend.cluster_slot("").is_some() => {
                Self::plain(name.clone(), Layout::PlainClustered)
            }
            None => Self::plain(name.clone(), Layout::Plain),
        })
    }

    /// Creates a group on a partition. Its stream is created, too, unless the topic was deleted since it was read: then it
    /// fails with `NoGroup`. Returns whether the group is new.
    pub(crate) async fn ensure_group(
        &self,
        backend: &dyn Backend,
        partition: Partition,
        group: &GroupName,
        start: GroupStart,
    ) -> headwater_stream::Result<bool> {
        let stream = keys::stream(self, partition);
        if self.layout.is_plain() {
            return backend.ensure_group(&stream, group, start).await;
        }
        let map = &keys::meta(&self.name);
        let is_created = GroupCondition::StreamOrMap { map, without: DELETING_SINCE };
        backend.ensure_group_if(&stream, group, start, is_created).await
    }

    /// The meta update that marks a topic as being deleted.
    pub(crate) fn deleting(since: Timestamp) -> RegistryMap {
        RegistryMap::from([(DELETING_SINCE.to_owned(), since.to_rfc3339().into())])
    }

    /// The meta update for new policies. A map keeps fields that an update does not name, so a removed limit is an empty
    /// value.
    pub(crate) fn altered(policies: &Policies) -> RegistryMap {
        let number = |value: u64| value.to_string();
        let limit = |value: Option<u64>| value.map(number).unwrap_or_default();
        let retention = policies.retention;
        let age_ms = retention.max_age.map(|age| age.as_millis() as u64);
        let fields = [
            (RETENTION_COUNT, limit(retention.max_len)),
            (RETENTION_AGE_MS, limit(age_ms)),
            (RETENTION_BYTES, limit(retention.max_bytes)),
            (BYTE_BUDGET, limit(policies.byte_budget)),
            (MAX_RETRIES, number(u64::from(policies.max_retries))),
            (ENTRY_FORMAT, policies.entry_format.as_str().to_owned()),
        ];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
    }

    /// Encodes the meta for the registry.
    pub(crate) fn to_meta(&self) -> RegistryMap {
        let mut meta = RegistryMap::new();
        let mut put = |name: &str, value: String| meta.insert(name.to_owned(), value.into());
        put(PARTITION_COUNT, self.partitions.to_string());
        put(LAYOUT, self.layout.as_str().to_owned());
        put(RESIZES, resizes_to_json(&self.resizes));
        put(PAYLOAD_BYTES, self.policies.payload_bytes_max.to_string());
        put(MAX_RETRIES, self.policies.max_retries.to_string());
        put(REFRESH_MS, self.policies.refresh.as_millis().to_string());
        put(ENTRY_FORMAT, self.policies.entry_format.as_str().to_owned());
        let retention = self.policies.retention;
        let age_ms = retention.max_age.map(|age| age.as_millis() as u64);
        for (name, value) in [
            (RETENTION_COUNT, retention.max_len),
            (RETENTION_AGE_MS, age_ms),
            (RETENTION_BYTES, retention.max_bytes),
            (BYTE_BUDGET, self.policies.byte_budget),
        ] {
            if let Some(value) = value {
                put(name, value.to_string());
            }
        }
        if let Some(at) = self.created_at {
            put(CREATED_AT, at.to_rfc3339());
        }
        meta
    }

    /// Decodes the meta. Fields that another program omitted have their defaults; malformed ones are an error.
    pub(crate) fn from_meta(name: TopicName, meta: &RegistryMap) -> Result<Self> {
        let read = MetaReader { topic: &name, meta };
        let partitions = read.number(PARTITION_COUNT)?.unwrap_or(1);
        let partitions = u16::try_from(partitions)
            .ok()
            .filter(|count| (1..=PARTITIONS_MAX).contains(count))
            .ok_or_else(|| read.wrong(PARTITION_COUNT, &format!("1 to {PARTITIONS_MAX}")))?;
        let layout = match read.text(LAYOUT)? {
            None => Layout::Partitioned,
            Some(text) => Layout::parse(text)
                .ok_or_else(|| read.wrong(LAYOUT, "`partitioned` or `clustered`"))?,
        };
        let entry_format = match read.text(ENTRY_FORMAT)? {
            // Created by another program, or by a version that knew no other format.
            None => EntryFormat::Full,
            Some(text) => EntryFormat::parse(text)
                .ok_or_else(|| read.wrong(ENTRY_FORMAT, "`compact` or `full`"))?,
        };
        let defaults = Policies::default();
        let policies = Policies {
            retention: Retention {
                max_len: read.number(RETENTION_COUNT)?,
                max_age: read.number(RETENTION_AGE_MS)?.map(Duration::from_millis),
                max_bytes: read.number(RETENTION_BYTES)?,
            },
            byte_budget: read.number(BYTE_BUDGET)?,
            payload_bytes_max: read
                .number(PAYLOAD_BYTES)?
                .map_or(defaults.payload_bytes_max, |bytes| bytes as usize),
            max_retries: read
                .number(MAX_RETRIES)?
                .map_or(defaults.max_retries, |count| u32::try_from(count).unwrap_or(u32::MAX)),
            refresh: read.number(REFRESH_MS)?.map_or(defaults.refresh, Duration::from_millis),
            entry_format,
        };
        policies.validate()?;
        let created_at = read.time(CREATED_AT)?;
        let deleting_since = read.time(DELETING_SINCE)?;
        let resizes = match read.text(RESIZES)? {
            None => Vec::new(),
            Some(text) => resizes_from_json(text).ok_or_else(|| {
                read.wrong(RESIZES, "a JSON array of resizes as this program writes it")
            })?,
        };
        Ok(Self { name, partitions, layout, created_at, policies, resizes, deleting_since })
    }
}

/// Reads fields of a topic's meta. Errors name the topic and the field.
struct MetaReader<'a> {
    topic: &'a TopicName,
    meta: &'a RegistryMap,
}

impl<'a> MetaReader<'a> {
    fn text(&self, field: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.meta.get(field) else { return Ok(None) };
        std::str::from_utf8(value).map(Some).map_err(|_| self.wrong(field, "text"))
    }

    fn number(&self, field: &str) -> Result<Option<u64>> {
        // A limit that was removed is empty.
        let Some(text) = self.text(field)?.filter(|text| !text.is_empty()) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.wrong(field, "a number"))
    }

    /// An RFC 3339 timestamp, or epoch milliseconds as written by other programs.
    fn time(&self, field: &str) -> Result<Option<Timestamp>> {
        let Some(text) = self.text(field)? else { return Ok(None) };
        Timestamp::from_rfc3339(text)
            .or_else(|| text.parse().ok().map(Timestamp::from_millis))
            .map(Some)
            .ok_or_else(|| self.wrong(field, "an instant such as 2026-01-01T00:00:00Z"))
    }

    fn wrong(&self, field: &str, allowed: &str) -> QueueError {
        let found = self.meta.get(field).map(Bytes::as_ref).unwrap_or_default();
        let found: String = String::from_utf8_lossy(found).chars().take(64).collect();
        QueueError::invalid(
            format!("`{field}` in the meta of topic `{}`", self.topic),
            format!("got `{found}`; expected {allowed}"),
        )
    }
}

pub(crate) fn resizes_to_json(resizes: &[Resize]) -> String {
    let resize = |resize: &Resize| {
        let ids = |ids: &Vec<EntryId>| ids.iter().map(EntryId::to_string).collect::<Vec<_>>();
        // In alphabetical order, whether or not an application enables `preserve_order` of serde_json: the text is
        // compared with that of other processes.
        json!({
            "beganMs": resize.began.as_millis(),
            "from": resize.from,
            "lastIds": resize.last_ids.as_ref().map(ids),
            "to": resize.to,
        })
    };
    Value::Array(resizes.iter().map(resize).collect()).to_string()
}

fn resizes_from_json(text: &str) -> Option<Vec<Resize>> {
    let resize = |value: &Value| {
        let count = |name: &str| u16::try_from(value.get(name)?.as_u64()?).ok();
        let last_ids = match value.get("lastIds")? {
            Value::Null => None,
            ids => Some(
                ids.as_array()?
                    .iter()
                    .map(|id| id.as_str()?.parse().ok())
                    .collect::<Option<Vec<EntryId>>>()?,
            ),
        };
        let (from, to) = (count("from")?, count("to")?);
        let fits = last_ids.as_ref().is_none_or(|ids| ids.len() == usize::from(from));
        (from < to && fits).then_some(Resize {
            from,
            to,
            began: Timestamp::from_millis(value.get("beganMs")?.as_u64()?),
            last_ids,
        })
    };
    let resizes: Value = serde_json::from_str(text).ok()?;
    let resizes = resizes.as_array().filter(|resizes| resizes.len() <= RESIZES_MAX)?;
    resizes.iter().map(resize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders() -> Topic {
        Topic {
            name: TopicName::new("orders").unwrap(),
            partitions: 5,
            layout: Layout::Clustered,
            created_at: Some(Timestamp::from_millis(1_767_225_600_250)),
            policies: Policies {
                retention: Retention {
                    max_len: Some(10),
                    max_age: Some(Duration::from_secs(60)),
                    max_bytes: None,
                },
                byte_budget: Some(1 << 30),
                ..Default::default()
            },
            deleting_since: None,
            resizes: vec![
                Resize {
                    from: 1,
                    to: 2,
                    began: Timestamp::from_millis(1),
                    last_ids: Some(vec![EntryId::new(7, 8)]),
                },
                Resize { from: 2, to: 5, began: Timestamp::from_millis(2), last_ids: None },
            ],
        }
    }

    #[test]
    fn a_topic_round_trips_through_its_meta() {
        let topic = orders();
        assert_eq!(Topic::from_meta(topic.name.clone(), &topic.to_meta()).unwrap(), topic);
    }

    #[test]
    fn the_meta_of_another_program_is_read_with_defaults() {
        let meta = [("partitionCount", "3"), ("createdAt", "1767225600250")]
            .map(|(name, value)| (name.to_owned(), Bytes::from_static(value.as_bytes())));
        let topic = Topic::from_meta(TopicName::new("t").unwrap(), &meta.into()).unwrap();
        assert_eq!((topic.partitions, topic.layout), (3, Layout::Partitioned));
        assert_eq!(topic.created_at, Some(Timestamp::from_millis(1_767_225_600_250)));
        let full = Policies { entry_format: EntryFormat::Full, ..Policies::default() };
        assert_eq!(topic.policies, full);
    }

    #[test]
    fn invalid_meta_fails_with_the_topic_and_field_name() {
        for (field, value) in [
            (PARTITION_COUNT, "0"),
            (PARTITION_COUNT, "many"),
            (PARTITION_COUNT, "70000"),
            (LAYOUT, "round"),
            (ENTRY_FORMAT, "small"),
            (CREATED_AT, "yesterday"),
            (RETENTION_COUNT, "-1"),
            (RESIZES, "{}"),
            (RESIZES, r#"[{"from":2,"to":3,"beganMs":1,"lastIds":["0-0"]}]"#),
        ] {
            let mut meta = orders().to_meta();
            meta.insert(field.to_owned(), Bytes::from_static(value.as_bytes()));
            let error = Topic::from_meta(TopicName::new("orders").unwrap(), &meta).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("orders") && text.contains(field), "{text}");
        }
    }

    #[test]
    fn a_topic_name_that_cannot_be_part_of_a_key_is_rejected() {
        for bad in ["", "a\nb", "a{b", "a}b", &"x".repeat(TOPIC_BYTES_MAX + 1)] {
            assert!(matches!(TopicName::new(bad), Err(QueueError::Invalid { .. })), "{bad:?}");
        }
    }
}
