//! Metadata of a session: the map `wink:session:<id>:meta`.
//!
//! Upstream: every operation on a whole session. Downstream: a registry map of the backend.
//! Guarantees: a session is complete if and only if its stage is `open`; a tombstone is kept after it expired.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, RegistryMap};

use crate::name::SessionId;

pub(crate) const STAGE: &str = "stage";
pub(crate) const INDEX: &str = "index";
const CREATED_AT: &str = "created_at";
pub(crate) const FIRST: &str = "first_entry";
const TTL_MS: &str = "ttl_ms";
const PARENT: &str = "parent";
const PARENT_ENTRY: &str = "parent_entry";
const COMPACTED_BEFORE: &str = "compacted_before";
const COMPACTED_ENTRIES: &str = "compacted_entries";
const BASE_ENTRY: &str = "base_entry";
const BASE_ENTRIES: &str = "base_entries";
const COPY_DESCRIPTION: &str = "filling";
pub(crate) const COPIER: &str = "filler";
const COPIED_BY: &str = "copied_by";
const PARKED_THROUGH: &str = "parked_through";
const PROGRESS_AT: &str = "progress_at";
const EXPIRED_ENTRIES: &str = "expired_entries";
const EXPIRED_THROUGH: &str = "expired_through";
const EXPIRED_AT: &str = "expired_at";
/// Prefix of the fields with the newest snapshot of each set of folds.
const SNAPSHOT: &str = "snapshot:";

/// Lifecycle stage of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStage {
    /// A fork or import in progress, or an interrupted one.
    Copying,
    /// Open.
    Open,
    /// Expired; its events are deleted.
    Expired,
}

/// The first entry of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstEntry {
    /// No entry was seen yet.
    NoneYet,
    /// This entry.
    Entry(EntryId),
    /// Not in this stream: snapshots include the first entries.
    Elsewhere,
    /// Unknown: the stream had entries before the session was created.
    Unknown,
}

/// The session that another one was forked from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Its id.
    pub session: SessionId,
    /// The last entry copied to the fork.
    pub entry_id: EntryId,
}

/// A position in a session, and the number of entries up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionPoint {
    pub(crate) entry_id: EntryId,
    pub(crate) entries: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionMeta {
    pub(crate) stage: SessionStage,
    /// Its entry in the list of sessions.
    pub(crate) index: EntryId,
    pub(crate) created_at: Timestamp,
    pub(crate) first: FirstEntry,
    pub(crate) ttl: Option<Duration>,
    pub(crate) parent: Option<Parent>,
    /// Entries before this one were compacted, and their number.
    pub(crate) compacted: Option<SessionPoint>,
    /// Last generated id and number of entries of the stream when the session was created; `None` if the stream was
    /// new.
    pub(crate) base: Option<SessionPoint>,
    /// Description, copier and last progress of a copy in progress.
    pub(crate) copy_description: String,
    pub(crate) copier: String,
    pub(crate) progress_at: Timestamp,
    /// The copier that created the session as a copy.
    pub(crate) copied_by: String,
    /// Undecodable entries are parked up to this entry.
    pub(crate) parked_through: EntryId,
    pub(crate) expired: Option<SessionPoint>,
    pub(crate) expired_at: Option<Timestamp>,
    /// The newest snapshot of each set of folds.
    pub(crate) snapshots: BTreeMap<String, SessionPoint>,
}

impl SessionMeta {
    pub(crate) fn new(stage: SessionStage, index: EntryId, created_at: Timestamp) -> Self {
        Self {
            stage,
            index,
            created_at,
            first: FirstEntry::NoneYet,
            ttl: None,
            parent: None,
            compacted: None,
            base: None,
            copy_description: String::new(),
            copier: String::new(),
            progress_at: created_at,
            copied_by: String::new(),
            parked_through: EntryId::MIN,
            expired: None,
            expired_at: None,
            snapshots: BTreeMap::new(),
        }
    }

    pub(crate) fn to_fields(&self) -> RegistryMap {
        let mut fields = RegistryMap::new();
        let mut put = |name: &str, value: String| fields.insert(name.to_owned(), value.into());
        put(STAGE, stage_text(self.stage).to_owned());
        put(INDEX, self.index.to_string());
        put(CREATED_AT, self.created_at.to_rfc3339());
        put(FIRST, first_text(self.first));
        put(COPY_DESCRIPTION, self.copy_description.clone());
        put(COPIER, self.copier.clone());
        put(PROGRESS_AT, self.progress_at.to_rfc3339());
        put(COPIED_BY, self.copied_by.clone());
        if let Some(ttl) = self.ttl {
            put(TTL_MS, ttl.as_millis().to_string());
        }
        if let Some(parent) = &self.parent {
            put(PARENT, parent.session.to_string());
            put(PARENT_ENTRY, parent.entry_id.to_string());
        }
        if let Some(SessionPoint { entry_id, entries }) = self.compacted {
            put(COMPACTED_BEFORE, entry_id.to_string());
            put(COMPACTED_ENTRIES, entries.to_string());
        }
        if let Some(SessionPoint { entry_id, entries }) = self.base {
            put(BASE_ENTRY, entry_id.to_string());
            put(BASE_ENTRIES, entries.to_string());
        }
        if let Some(SessionPoint { entry_id, entries }) = self.expired {
            put(EXPIRED_THROUGH, entry_id.to_string());
            put(EXPIRED_ENTRIES, entries.to_string());
        }
        if let Some(at) = self.expired_at {
            put(EXPIRED_AT, at.to_rfc3339());
        }
        for (set, point) in &self.snapshots {
            put(&format!("{SNAPSHOT}{set}"), point.to_text());
        }
        fields
    }

    /// Decodes the map. `None` if it has no fields of ours; `Err` names the invalid field.
    pub(crate) fn from_fields(fields: &RegistryMap) -> Result<Option<Self>, String> {
        let text = |name: &str| match fields.get(name) {
            None => Ok(""),
            Some(value) => {
                std::str::from_utf8(value).map_err(|_| format!("field `{name}` is not valid UTF-8"))
            }
        };
        let invalid = |name: &str| format!("field `{name}` is invalid");
        if !fields.contains_key(STAGE) {
            return Ok(None);
        }
        let stage = read_stage(text(STAGE)?).ok_or_else(|| invalid(STAGE))?;
        let entry_id = |name: &str| text(name)?.parse::<EntryId>().map_err(|_| invalid(name));
        let time = |name: &str| Timestamp::from_rfc3339(text(name)?).ok_or_else(|| invalid(name));
        let number = |name: &str| text(name)?.parse::<u64>().map_err(|_| invalid(name));
        let point = |id: &str, count: &str| match text(id)? {
            "" => Ok(None),
            _ => Ok::<_, String>(Some(SessionPoint {
                entry_id: entry_id(id)?,
                entries: number(count)?,
            })),
        };
        let ttl = match text(TTL_MS)? {
            "" => None,
            _ => Some(Duration::from_millis(number(TTL_MS)?)),
        };
        let parent = match text(PARENT)? {
            "" => None,
            parent => Some(Parent {
                session: SessionId::new(parent).map_err(|_| invalid(PARENT))?,
                entry_id: entry_id(PARENT_ENTRY)?,
            }),
        };
        Ok(Some(Self {
            stage,
            index: entry_id(INDEX)?,
            created_at: time(CREATED_AT)?,
            first: read_first(text(FIRST)?).ok_or_else(|| invalid(FIRST))?,
            ttl,
            parent,
            compacted: point(COMPACTED_BEFORE, COMPACTED_ENTRIES)?,
            base: point(BASE_ENTRY, BASE_ENTRIES)?,
            copy_description: text(COPY_DESCRIPTION)?.to_owned(),
            copier: text(COPIER)?.to_owned(),
            progress_at: time(PROGRESS_AT)?,
            copied_by: text(COPIED_BY)?.to_owned(),
            parked_through: match text(PARKED_THROUGH)? {
                "" => EntryId::MIN,
                _ => entry_id(PARKED_THROUGH)?,
            },
            expired: point(EXPIRED_THROUGH, EXPIRED_ENTRIES)?,
            expired_at: match text(EXPIRED_AT)? {
                "" => None,
                _ => Some(time(EXPIRED_AT)?),
            },
            snapshots: read_snapshots(fields),
        }))
    }
}

impl SessionPoint {
    fn to_text(self) -> String {
        format!("{} {}", self.entry_id, self.entries)
    }

    fn from_text(text: &str) -> Option<Self> {
        let (entry_id, entries) = text.split_once(' ')?;
        Some(Self { entry_id: entry_id.parse().ok()?, entries: entries.parse().ok()? })
    }
}

/// Field updates, one function per change.
pub(crate) fn first_is(first: FirstEntry) -> RegistryMap {
    one(FIRST, first_text(first))
}

pub(crate) fn progress_is(now: Timestamp) -> RegistryMap {
    one(PROGRESS_AT, now.to_rfc3339())
}

pub(crate) fn parked_through(id: EntryId) -> RegistryMap {
    one(PARKED_THROUGH, id.to_string())
}

pub(crate) fn snapshot_is(set: &str, point: SessionPoint) -> RegistryMap {
    one(&format!("{SNAPSHOT}{set}"), point.to_text())
}

pub(crate) fn snapshot_is_gone(set: &str) -> RegistryMap {
    one(&format!("{SNAPSHOT}{set}"), String::new())
}

pub(crate) fn compacted_is(point: SessionPoint) -> RegistryMap {
    let mut fields = one(COMPACTED_BEFORE, point.entry_id.to_string());
    fields.extend(one(COMPACTED_ENTRIES, point.entries.to_string()));
    fields
}

/// Marks a tombstone that is about to be deleted.
pub(crate) fn deleting(copier: &str, now: Timestamp) -> RegistryMap {
    let mut fields = one(STAGE, stage_text(SessionStage::Copying).to_owned());
    fields.extend(one(COPY_DESCRIPTION, "deletion of an expired session".to_owned()));
    fields.extend(claimed_by(copier, now));
    fields
}

/// Transfers the ownership of a copy.
pub(crate) fn claimed_by(copier: &str, now: Timestamp) -> RegistryMap {
    let mut fields = one(COPIER, copier.to_owned());
    fields.extend(progress_is(now));
    fields
}

pub(crate) fn expired_is(point: SessionPoint, now: Timestamp) -> RegistryMap {
    let mut fields = one(STAGE, stage_text(SessionStage::Expired).to_owned());
    fields.extend(one(EXPIRED_AT, now.to_rfc3339()));
    fields.extend(one(EXPIRED_THROUGH, point.entry_id.to_string()));
    fields.extend(one(EXPIRED_ENTRIES, point.entries.to_string()));
    fields
}

pub(crate) fn reopened() -> RegistryMap {
    let mut fields = one(STAGE, stage_text(SessionStage::Open).to_owned());
    fields.extend(one(EXPIRED_THROUGH, String::new()));
    fields.extend(one(EXPIRED_ENTRIES, String::new()));
    fields.extend(one(EXPIRED_AT, String::new()));
    fields
}

fn one(name: &str, value: String) -> RegistryMap {
    BTreeMap::from([(name.to_owned(), Bytes::from(value))])
}

pub(crate) fn stage_text(stage: SessionStage) -> &'static str {
    match stage {
        SessionStage::Copying => "filling",
        SessionStage::Open => "open",
        SessionStage::Expired => "expired",
    }
}

fn read_stage(text: &str) -> Option<SessionStage> {
    [SessionStage::Copying, SessionStage::Open, SessionStage::Expired]
        .into_iter()
        .find(|stage| stage_text(*stage) == text)
}

pub(crate) fn first_text(first: FirstEntry) -> String {
    match first {
        FirstEntry::NoneYet => "unseen".to_owned(),
        FirstEntry::Elsewhere => "elsewhere".to_owned(),
        FirstEntry::Unknown => "unknown".to_owned(),
        FirstEntry::Entry(id) => id.to_string(),
    }
}

fn read_first(text: &str) -> Option<FirstEntry> {
    match text {
        "unseen" => Some(FirstEntry::NoneYet),
        "elsewhere" => Some(FirstEntry::Elsewhere),
        "unknown" => Some(FirstEntry::Unknown),
        id => id.parse().ok().map(FirstEntry::Entry),
    }
}

fn read_snapshots(fields: &RegistryMap) -> BTreeMap<String, SessionPoint> {
    let read = |(name, value): (&String, &Bytes)| {
        let set = name.strip_prefix(SNAPSHOT)?;
        let point = SessionPoint::from_text(std::str::from_utf8(value).ok()?)?;
        Some((set.to_owned(), point))
    };
    fields.iter().filter_map(read).collect()
}
