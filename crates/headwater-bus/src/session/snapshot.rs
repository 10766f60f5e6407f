//! Snapshots: the state of a session at an entry, so that recovery need not replay earlier entries.
//!
//! Upstream: `state`, periodically and on demand. Downstream: one registry map per set of folds.
//! Guarantees: a snapshot is replaced atomically, and only by one of a later entry, also if several processes take one.
//! It lists its folds and their versions, and is used for no others.
//! Not here: what may be trimmed before it (see `compaction`).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::limits::{FIELDS_MAX, VALUE_BYTES_MAX};
use headwater_stream::{Backend, EntryId, MapName, RegistryMap};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::SessionError;
use super::meta::{self, SessionPoint, SessionStage};
use super::state::{SeenEventIds, SessionState, UnreadableIndex};
use crate::fold::Folds;
use crate::handler::panic_text;
use crate::limits::{SNAPSHOT_BYTES_MAX, SNAPSHOT_SETS_MAX};
use crate::name::{EventId, SessionId};
use crate::registry::EventRegistry;
use crate::session_backend::SessionBackend;

/// Version of the snapshot format.
const FORMAT: &str = "1";

const FORMAT_FIELD: &str = "format";
const POSITION: &str = "position";
const ENTRIES: &str = "entries";
const EVENTS: &str = "events";
const UNREADABLE_TYPES: &str = "unreadable_types";
const UNFIT: &str = "unfit";
const UNREADABLE_MORE: &str = "unreadable_more";
const UNREADABLE_COUNT: &str = "unreadable_count";
const TAKEN_AT: &str = "taken_at";
const BYTES: &str = "bytes";
const CHECKSUM: &str = "crc32";
const CHUNK: &str = "chunk:";

const CHUNK_BYTES: usize = VALUE_BYTES_MAX;

/// Attempts to replace a snapshot that other processes replace, too.
const SAVE_ATTEMPTS: usize = 8;

// All chunks and the other fields fit into one map.
const _: () = assert!(SNAPSHOT_BYTES_MAX / CHUNK_BYTES + 16 <= FIELDS_MAX);

/// The encoded folds and event ids.
#[derive(Serialize, Deserialize)]
struct SnapshotBody {
    folds: Vec<SavedFold>,
    seen: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct SavedFold {
    name: String,
    version: u32,
    state: Box<RawValue>,
}

/// Id of a set of folds, used in keys.
pub(crate) fn fold_set_id(folds: &Folds) -> String {
    // FNV-1a, because it never changes. A snapshot lists its folds in full, so a collision is detected.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for (name, version) in folds.names() {
        for byte in format!("{name}\0{version}\n").bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}

/// Position of an encoded snapshot.
pub(crate) fn point_of(fields: &RegistryMap) -> Option<SessionPoint> {
    let entry_id = text(fields, POSITION)?.parse().ok()?;
    Some(SessionPoint { entry_id, entries: text(fields, ENTRIES)?.parse().ok()? })
}

/// The entries that a snapshot refers to.
pub(crate) fn entry_ids(fields: &RegistryMap) -> Vec<EntryId> {
    let invalid_payloads = text(fields, UNFIT).and_then(read_ids).unwrap_or_default();
    point_of(fields).map(|point| point.entry_id).into_iter().chain(invalid_payloads).collect()
}

/// Whether entries were undecodable when it was taken.
pub(crate) fn has_unreadable(fields: &RegistryMap) -> bool {
    text(fields, UNREADABLE_COUNT) != Some("0")
}

/// Position of a snapshot whose checksum is valid; `Err` tells what is wrong with it.
pub(crate) fn verify(fields: &RegistryMap) -> Result<SessionPoint, String> {
    read_body(fields)?;
    point_of(fields).ok_or_else(|| "invalid position".to_owned())
}

/// The snapshot with the entry ids of another stream; `None` if its position is not in that stream. Kept events still
/// have their original entry ids.
pub(crate) fn translate(
    fields: &RegistryMap,
    to: impl Fn(EntryId) -> Option<EntryId>,
) -> Option<RegistryMap> {
    let mut fields = fields.clone();
    let position = to(point_of(&fields)?.entry_id)?;
    // Entries that were not copied are dropped.
    let invalid_payloads: Vec<EntryId> =
        read_ids(text(&fields, UNFIT)?)?.into_iter().filter_map(to).collect();
    fields.insert(POSITION.to_owned(), position.to_string().into());
    fields.insert(UNFIT.to_owned(), write_ids(&invalid_payloads).into());
    Some(fields)
}

/// Encodes a state.
pub(crate) fn encode(state: &SessionState, now: Timestamp) -> Result<RegistryMap, SessionError> {
    let failed =
        |problem: String| SessionError::Snapshot { session: state.session.clone(), problem };
    let mut folds = Vec::new();
    for fold in state.folds.iter() {
        let saved = fold.save();
        let saved = saved.map_err(|error| failed(format!("fold `{}`: {error}", fold.name())))?;
        folds.push(SavedFold {
            name: fold.name().to_owned(),
            version: fold.version(),
            state: saved,
        });
    }
    let seen = state.seen.order.iter().map(ToString::to_string).collect();
    let body = serde_json::to_vec(&SnapshotBody { folds, seen });
    let body = Bytes::from(body.map_err(|error| failed(error.to_string()))?);
    if body.len() > SNAPSHOT_BYTES_MAX {
        let problem = format!("it has {} bytes; the limit is {SNAPSHOT_BYTES_MAX}", body.len());
        return Err(failed(problem));
    }
    let UnreadableIndex { unknown_types, invalid_payloads, is_truncated, count } =
        &state.unreadable;
    let unknown_types =
        serde_json::to_string(unknown_types).map_err(|error| failed(error.to_string()))?;
    let mut fields: RegistryMap = [
        (FORMAT_FIELD, FORMAT.to_owned()),
        (POSITION, state.position.to_string()),
        (ENTRIES, state.entries.to_string()),
        (EVENTS, state.events.to_string()),
        (UNREADABLE_TYPES, unknown_types),
        (UNFIT, write_ids(invalid_payloads)),
        (UNREADABLE_MORE, is_truncated.to_string()),
        (UNREADABLE_COUNT, count.to_string()),
        (TAKEN_AT, now.to_rfc3339()),
        (BYTES, body.len().to_string()),
        (CHECKSUM, crc32fast::hash(&body).to_string()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), Bytes::from(value)))
    .collect();
    for (number, at) in (0..body.len()).step_by(CHUNK_BYTES).enumerate() {
        let chunk = body.slice(at..body.len().min(at + CHUNK_BYTES));
        fields.insert(chunk_name(number), chunk);
    }
    Ok(fields)
}

/// Decodes a state; `Err` tells why it cannot be used.
pub(crate) fn decode(
    fields: &RegistryMap,
    session: &SessionId,
    folds: &Folds,
    registry: &EventRegistry,
) -> Result<SessionState, String> {
    let body = read_body(fields)?;
    let body: SnapshotBody = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
    let point = point_of(fields).ok_or("invalid position")?;
    let mut state = SessionState::new(session.clone(), load(body.folds, folds, registry)?);
    state.position = point.entry_id;
    state.entries = point.entries;
    state.events = number(fields, EVENTS)?;
    state.unreadable = UnreadableIndex {
        unknown_types: serde_json::from_str(field(fields, UNREADABLE_TYPES)?)
            .map_err(|error| format!("field `{UNREADABLE_TYPES}` is invalid: {error}"))?,
        invalid_payloads: read_ids(field(fields, UNFIT)?)
            .ok_or_else(|| format!("field `{UNFIT}` is invalid"))?,
        is_truncated: field(fields, UNREADABLE_MORE)? != "false",
        count: number(fields, UNREADABLE_COUNT)?,
    };
    let seen: Result<Vec<EventId>, _> = body.seen.into_iter().map(EventId::new).collect();
    state.seen = SeenEventIds::restore(seen.map_err(|error| error.to_string())?);
    Ok(state)
}

/// The body of a snapshot, if its checksum is valid.
fn read_body(fields: &RegistryMap) -> Result<Vec<u8>, String> {
    let format = field(fields, FORMAT_FIELD)?;
    if format != FORMAT {
        return Err(format!("its format is {format}; this version reads {FORMAT}"));
    }
    let length = number(fields, BYTES)? as usize;
    if length > SNAPSHOT_BYTES_MAX {
        return Err(format!("it has {length} bytes; the limit is {SNAPSHOT_BYTES_MAX}"));
    }
    let mut body = Vec::with_capacity(length);
    for chunk in 0..length.div_ceil(CHUNK_BYTES) {
        let name = chunk_name(chunk);
        body.extend_from_slice(
            fields.get(&name).ok_or_else(|| format!("field `{name}` is missing"))?,
        );
    }
    if body.len() != length || u64::from(crc32fast::hash(&body)) != number(fields, CHECKSUM)? {
        return Err("checksum mismatch".to_owned());
    }
    Ok(body)
}

fn load(saved: Vec<SavedFold>, folds: &Folds, registry: &EventRegistry) -> Result<Folds, String> {
    let mut names: Vec<(String, u32)> =
        saved.iter().map(|fold| (fold.name.clone(), fold.version)).collect();
    names.sort();
    if names != folds.names() {
        return Err("it was taken of other folds".to_owned());
    }
    let mut saved: BTreeMap<String, Box<RawValue>> =
        saved.into_iter().map(|fold| (fold.name, fold.state)).collect();
    let mut folds = folds.clone();
    for fold in folds.iter_mut() {
        let state = saved.remove(fold.name()).ok_or("it was taken of other folds")?;
        let name = fold.name().to_owned();
        // Application code decodes it. If that panics, the snapshot is skipped.
        catch_unwind(AssertUnwindSafe(|| fold.load(&state, registry)))
            .unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_text(&*panic))))
            .map_err(|problem| format!("fold `{name}`: {problem}"))?;
    }
    Ok(folds)
}

/// Saves a snapshot of the session with this `index`. Returns `false` if there is one of this entry or a later one.
pub(crate) async fn save(
    storage: &SessionBackend,
    session: &SessionId,
    index: EntryId,
    set: &str,
    fields: &RegistryMap,
) -> Result<bool, SessionError> {
    let failed = |problem: String| SessionError::Snapshot { session: session.clone(), problem };
    let point = point_of(fields).ok_or_else(|| failed("invalid position".to_owned()))?;
    let map = storage.keys.session_snapshot(session, set);
    let backend = &storage.backend;
    let is_known = super::read_meta(storage, session).await?;
    match is_known {
        Some(meta) if meta.index != index => {
            return Err(failed("another session of this name was created meanwhile".to_owned()));
        }
        Some(meta) if meta.stage == SessionStage::Expired => {
            return Err(failed("the session has expired".to_owned()));
        }
        Some(meta)
            if !meta.snapshots.contains_key(set) && meta.snapshots.len() >= SNAPSHOT_SETS_MAX =>
        {
            let problem = format!(
                "the limit of {SNAPSHOT_SETS_MAX} fold sets with snapshots is reached; delete unused ones \
                 with `Sessions::delete_snapshots`"
            );
            return Err(failed(problem));
        }
        Some(_) => {}
        None => return Err(SessionError::NotFound { session: session.clone() }),
    }
    match replace_older(&**backend, &map, fields).await? {
        Some(true) => {}
        Some(false) => return Ok(false),
        None => return Err(failed(format!("it was replaced {SAVE_ATTEMPTS} times meanwhile"))),
    }
    // After the snapshot, because compaction relies on the metadata.
    let meta = storage.keys.session_meta(session);
    let index = index.to_string();
    let expected = Some((meta::INDEX, index.as_bytes()));
    backend.map_update(&meta, expected, &meta::snapshot_is(set, point)).await?;
    Ok(true)
}

/// Writes a snapshot, unless there is one of this entry or a later one: then `Some(false)`. `None` if other processes
/// replaced it too often meanwhile.
pub(crate) async fn replace_older(
    backend: &dyn Backend,
    map: &MapName,
    fields: &RegistryMap,
) -> Result<Option<bool>, SessionError> {
    for _ in 0..SAVE_ATTEMPTS {
        let is_written = match backend.map_get(map).await? {
            None => backend.map_create(map, fields).await?,
            Some(old) => {
                let entry_id = |of| point_of(of).map(|point| point.entry_id);
                if entry_id(&old) >= entry_id(fields) {
                    return Ok(Some(false));
                }
                // Without a position, the map has no fields of ours.
                let expected = old.get(POSITION).map(|position| (POSITION, &**position));
                backend.map_update(map, expected, fields).await?
            }
        };
        if is_written {
            return Ok(Some(true));
        }
    }
    Ok(None)
}

fn field<'a>(fields: &'a RegistryMap, name: &str) -> Result<&'a str, String> {
    text(fields, name).ok_or_else(|| format!("field `{name}` is missing"))
}

fn number(fields: &RegistryMap, name: &str) -> Result<u64, String> {
    field(fields, name)?.parse().map_err(|_| format!("field `{name}` is not a number"))
}

fn text<'a>(fields: &'a RegistryMap, name: &str) -> Option<&'a str> {
    std::str::from_utf8(fields.get(name)?).ok()
}

fn chunk_name(number: usize) -> String {
    format!("{CHUNK}{number:03}")
}

fn write_ids(ids: &[EntryId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn read_ids(text: &str) -> Option<Vec<EntryId>> {
    text.split_whitespace().map(|id| id.parse().ok()).collect()
}
