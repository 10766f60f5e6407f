//! Metadata of a session: the map `wink:session:<id>:meta`.
//!
//! Upstream: every operation on a whole session. Downstream: a registry map of the backend.
//! Guarantees: a session exists if and only if it has metadata; a tombstone is kept after it expired.

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
pub(crate) const RENAMING: &str = "filler";
const COPIED_BY: &str = "copied_by";
const PARKED_THROUGH: &str = "parked_through";
const EXPIRED_ENTRIES: &str = "expired_entries";
const EXPIRED_THROUGH: &str = "expired_through";
pub(crate) const EXPIRED_AT: &str = "expired_at";
/// Prefix of the fields with the newest snapshot of each set of folds.
const SNAPSHOT: &str = "snapshot:";

/// Lifecycle stage of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStage {
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
    /// The copy that created the session; empty if it is not a copy.
    pub(crate) copied_by: String,
    /// Not empty while the stream may still have the temporary name of the copy.
    pub(crate) renaming: String,
    /// Undecodable entries are parked up to this entry.
    pub(crate) parked_through: EntryId,
    pub(crate) expired: Option<SessionPoint>,
    pub(crate) expired_at: Timestamp,
    /// The newest snapshot of each set of folds.
    pub(crate) snapshots: BTreeMap<String, SessionPoint>,
}

impl SessionMeta {
    pub(crate) fn new(index: EntryId, created_at: Timestamp) -> Self {
        Self {
            stage: SessionStage::Open,
            index,
            created_at,
            first: FirstEntry::NoneYet,
            ttl: None,
            parent: None,
            compacted: None,
            base: None,
            copied_by: String::new(),
            renaming: String::new(),
            parked_through: EntryId::MIN,
            expired: None,
            expired_at: Timestamp::default(),
            snapshots: BTreeMap::new(),
        }
    }

    /// The fields of a new session; those of an expiry are added later.
    pub(crate) fn to_fields(&self) -> RegistryMap {
        let mut fields = map([
            (STAGE, stage_text(self.stage).to_owned()),
            (INDEX, self.index.to_string()),
            (CREATED_AT, self.created_at.to_rfc3339()),
            (FIRST, first_text(self.first)),
            (RENAMING, self.renaming.clone()),
            (COPIED_BY, self.copied_by.clone()),
        ]);
        if let Some(ttl) = self.ttl {
            fields.extend(map([(TTL_MS, ttl.as_millis().to_string())]));
        }
        if let Some(Parent { session, entry_id }) = &self.parent {
            fields
                .extend(map([(PARENT, session.to_string()), (PARENT_ENTRY, entry_id.to_string())]));
        }
        for (point, id, count) in [
            (self.compacted, COMPACTED_BEFORE, COMPACTED_ENTRIES),
            (self.base, BASE_ENTRY, BASE_ENTRIES),
        ] {
            fields.extend(point.into_iter().flat_map(|point| point_is(id, count, point)));
        }
        for (set, point) in &self.snapshots {
            fields.extend(snapshot_is(set, *point));
        }
        fields
    }

    /// Decodes the map. `None` if it has no fields of ours; `Err` names the invalid field.
    pub(crate) fn from_fields(fields: &RegistryMap) -> Result<Option<Self>, String> {
        if !fields.contains_key(STAGE) {
            return Ok(None);
        }
        let invalid = |name: &str| format!("field `{name}` is invalid");
        let text = |name: &str| match fields.get(name) {
            None => Ok(""),
            Some(value) => std::str::from_utf8(value).map_err(|_| invalid(name)),
        };
        // An empty field has the value of a missing one.
        fn or<T>(
            text: Result<&str, String>,
            missing: T,
            read: impl FnOnce(&str) -> Option<T>,
            invalid: String,
        ) -> Result<T, String> {
            match text? {
                "" => Ok(missing),
                text => read(text).ok_or(invalid),
            }
        }
        let entry_id = |name: &str| text(name)?.parse::<EntryId>().map_err(|_| invalid(name));
        let number = |name: &str, missing: u64| {
            or(text(name), missing, |text| text.parse().ok(), invalid(name))
        };
        let point = |id: &str, count: &str| match text(id)? {
            "" => Ok::<_, String>(None),
            _ => Ok(Some(SessionPoint { entry_id: entry_id(id)?, entries: number(count, 0)? })),
        };
        let id_or =
            |name: &str, missing| or(text(name), missing, |text| text.parse().ok(), invalid(name));
        let parent = match text(PARENT)? {
            "" => None,
            parent => Some(Parent {
                session: SessionId::new(parent).map_err(|_| invalid(PARENT))?,
                entry_id: entry_id(PARENT_ENTRY)?,
            }),
        };
        let never = Timestamp::default();
        Ok(Some(Self {
            stage: read_stage(text(STAGE)?).ok_or_else(|| invalid(STAGE))?,
            index: entry_id(INDEX)?,
            created_at: Timestamp::from_rfc3339(text(CREATED_AT)?)
                .ok_or_else(|| invalid(CREATED_AT))?,
            first: read_first(text(FIRST)?).ok_or_else(|| invalid(FIRST))?,
            ttl: Some(number(TTL_MS, 0)?).filter(|ms| *ms > 0).map(Duration::from_millis),
            parent,
            compacted: point(COMPACTED_BEFORE, COMPACTED_ENTRIES)?,
            base: point(BASE_ENTRY, BASE_ENTRIES)?,
            copied_by: text(COPIED_BY)?.to_owned(),
            renaming: text(RENAMING)?.to_owned(),
            parked_through: id_or(PARKED_THROUGH, EntryId::MIN)?,
            expired: point(EXPIRED_THROUGH, EXPIRED_ENTRIES)?,
            expired_at: or(text(EXPIRED_AT), never, Timestamp::from_rfc3339, invalid(EXPIRED_AT))?,
            snapshots: read_snapshots(fields),
        }))
    }
}

/// Field updates, one function per change.
pub(crate) fn first_is(first: FirstEntry) -> RegistryMap {
    map([(FIRST, first_text(first))])
}

pub(crate) fn renaming_is(copy: &str) -> RegistryMap {
    map([(RENAMING, copy.to_owned())])
}

pub(crate) fn parked_through(id: EntryId) -> RegistryMap {
    map([(PARKED_THROUGH, id.to_string())])
}

pub(crate) fn snapshot_is(set: &str, point: SessionPoint) -> RegistryMap {
    map([(&format!("{SNAPSHOT}{set}"), format!("{} {}", point.entry_id, point.entries))])
}

pub(crate) fn snapshot_is_gone(set: &str) -> RegistryMap {
    map([(&format!("{SNAPSHOT}{set}"), String::new())])
}

pub(crate) fn compacted_is(point: SessionPoint) -> RegistryMap {
    point_is(COMPACTED_BEFORE, COMPACTED_ENTRIES, point)
}

pub(crate) fn expired_at_is(now: Timestamp) -> RegistryMap {
    map([(EXPIRED_AT, now.to_rfc3339())])
}

pub(crate) fn expired_is(point: SessionPoint, now: Timestamp) -> RegistryMap {
    let mut fields = point_is(EXPIRED_THROUGH, EXPIRED_ENTRIES, point);
    fields.extend(expired_at_is(now));
    fields.extend(map([(STAGE, stage_text(SessionStage::Expired).to_owned())]));
    fields
}

pub(crate) fn reopened() -> RegistryMap {
    let open = stage_text(SessionStage::Open);
    map([(STAGE, open), (EXPIRED_THROUGH, ""), (EXPIRED_ENTRIES, ""), (EXPIRED_AT, "")])
}

fn point_is(id: &str, count: &str, point: SessionPoint) -> RegistryMap {
    map([(id, point.entry_id.to_string()), (count, point.entries.to_string())])
}

fn map<const N: usize>(fields: [(&str, impl Into<Bytes>); N]) -> RegistryMap {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

pub(crate) fn stage_text(stage: SessionStage) -> &'static str {
    match stage {
        SessionStage::Open => "open",
        SessionStage::Expired => "expired",
    }
}

fn read_stage(text: &str) -> Option<SessionStage> {
    [SessionStage::Open, SessionStage::Expired].into_iter().find(|stage| stage_text(*stage) == text)
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
        let (entry_id, entries) = std::str::from_utf8(value).ok()?.split_once(' ')?;
        let (entry_id, entries) = (entry_id.parse().ok()?, entries.parse().ok()?);
        Some((set.to_owned(), SessionPoint { entry_id, entries }))
    };
    fields.iter().filter_map(read).collect()
}
