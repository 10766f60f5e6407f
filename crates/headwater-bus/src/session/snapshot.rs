//! Snapshots: the state of a session at one of its entries, so that a recovery need not replay what came before.
//!
//! Upstream: `state`, every so many events and on demand. Downstream: one registry map for each set of folds.
//! Promises: a snapshot is replaced in one atomic step, and only by one of a later entry, whoever takes it at the same
//! time: there is never half a snapshot. It says of which folds in which versions it is, and is used for no others.
//! Not here: what may be trimmed below it (see `compaction`).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::limits::{FIELDS_MAX, VALUE_BYTES_MAX};
use headwater_stream::{EntryId, RegistryMap};
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

/// What the layout of a snapshot is known by.
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

/// Tries to replace a snapshot that others replace at the same time.
const SAVE_ATTEMPTS: usize = 8;

// All chunks and what is said of them are one map.
const _: () = assert!(SNAPSHOT_BYTES_MAX / CHUNK_BYTES + 16 <= FIELDS_MAX);

/// The part that is made of folds.
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

/// What a set of folds is known by in keys.
pub(crate) fn fold_set_id(folds: &Folds) -> String {
    // FNV-1a: the same in every version of everything. A snapshot lists its folds in full, so a clash is noticed.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for (name, version) in folds.names() {
        for byte in format!("{name}\0{version}\n").bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}

/// Where the snapshot in these fields stands.
pub(crate) fn point_of(fields: &RegistryMap) -> Option<SessionPoint> {
    let entry_id = text(fields, POSITION)?.parse().ok()?;
    Some(SessionPoint { entry_id, entries: text(fields, ENTRIES)?.parse().ok()? })
}

/// The entries that a snapshot names.
pub(crate) fn entry_ids(fields: &RegistryMap) -> Vec<EntryId> {
    let invalid_payloads = text(fields, UNFIT).and_then(read_ids).unwrap_or_default();
    point_of(fields).map(|point| point.entry_id).into_iter().chain(invalid_payloads).collect()
}

/// Whether entries could not be read when it was taken.
pub(crate) fn has_unreadable(fields: &RegistryMap) -> bool {
    text(fields, UNREADABLE_COUNT) != Some("0")
}

/// Where a snapshot stands whose bytes are all there; an error says what is wrong with it.
pub(crate) fn verify(fields: &RegistryMap) -> Result<SessionPoint, String> {
    read_body(fields)?;
    point_of(fields).ok_or_else(|| "its position is odd".to_owned())
}

/// The same snapshot in another stream, where the entries have other ids. `None` if its own is not there. What it keeps
/// of events still names the entries that they were, for nobody else has them.
pub(crate) fn translate(
    fields: &RegistryMap,
    to: impl Fn(EntryId) -> Option<EntryId>,
) -> Option<RegistryMap> {
    let mut fields = fields.clone();
    let position = to(point_of(&fields)?.entry_id)?;
    // Those that are gone were given up.
    let invalid_payloads: Vec<EntryId> =
        read_ids(text(&fields, UNFIT)?)?.into_iter().filter_map(to).collect();
    fields.insert(POSITION.to_owned(), position.to_string().into());
    fields.insert(UNFIT.to_owned(), write_ids(&invalid_payloads).into());
    Some(fields)
}

/// Writes a state down.
pub(crate) fn encode(state: &SessionState, now: Timestamp) -> Result<RegistryMap, SessionError> {
    let refuse =
        |problem: String| SessionError::Snapshot { session: state.session.clone(), problem };
    let mut folds = Vec::new();
    for fold in state.folds.iter() {
        let saved = fold.save();
        let saved = saved.map_err(|error| refuse(format!("fold `{}`: {error}", fold.name())))?;
        folds.push(SavedFold {
            name: fold.name().to_owned(),
            version: fold.version(),
            state: saved,
        });
    }
    let seen = state.seen.order.iter().map(ToString::to_string).collect();
    let body = serde_json::to_vec(&SnapshotBody { folds, seen });
    let body = Bytes::from(body.map_err(|error| refuse(error.to_string()))?);
    if body.len() > SNAPSHOT_BYTES_MAX {
        let problem = format!("it has {} bytes; the limit is {SNAPSHOT_BYTES_MAX}", body.len());
        return Err(refuse(problem));
    }
    let UnreadableIndex { unknown_types, invalid_payloads, is_truncated, count } =
        &state.unreadable;
    let unknown_types =
        serde_json::to_string(unknown_types).map_err(|error| refuse(error.to_string()))?;
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

/// Reads a state; an error says why it cannot be used.
pub(crate) fn decode(
    fields: &RegistryMap,
    session: &SessionId,
    folds: &Folds,
    registry: &EventRegistry,
) -> Result<SessionState, String> {
    let body = read_body(fields)?;
    let body: SnapshotBody = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
    let point = point_of(fields).ok_or("its position is odd")?;
    let mut state = SessionState::new(session.clone(), load(body.folds, folds, registry)?);
    state.position = point.entry_id;
    state.entries = point.entries;
    state.events = number(fields, EVENTS)?;
    state.unreadable = UnreadableIndex {
        unknown_types: serde_json::from_str(field(fields, UNREADABLE_TYPES)?)
            .map_err(|error| format!("`{UNREADABLE_TYPES}` is odd: {error}"))?,
        invalid_payloads: read_ids(field(fields, UNFIT)?)
            .ok_or_else(|| format!("`{UNFIT}` is odd"))?,
        is_truncated: field(fields, UNREADABLE_MORE)? != "false",
        count: number(fields, UNREADABLE_COUNT)?,
    };
    let seen: Result<Vec<EventId>, _> = body.seen.into_iter().map(EventId::new).collect();
    state.seen = SeenEventIds::restore(seen.map_err(|error| error.to_string())?);
    Ok(state)
}

/// The bytes of a snapshot, if they are what they were when it was taken.
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
        body.extend_from_slice(fields.get(&name).ok_or_else(|| format!("`{name}` is missing"))?);
    }
    if body.len() != length || u64::from(crc32fast::hash(&body)) != number(fields, CHECKSUM)? {
        return Err("its bytes do not have its checksum".to_owned());
    }
    Ok(body)
}

fn load(saved: Vec<SavedFold>, folds: &Folds, registry: &EventRegistry) -> Result<Folds, String> {
    let mut names: Vec<(String, u32)> =
        saved.iter().map(|fold| (fold.name.clone(), fold.version)).collect();
    names.sort();
    if names != folds.names() {
        return Err("it is of other folds".to_owned());
    }
    let mut saved: BTreeMap<String, Box<RawValue>> =
        saved.into_iter().map(|fold| (fold.name, fold.state)).collect();
    let mut folds = folds.clone();
    for fold in folds.iter_mut() {
        let state = saved.remove(fold.name()).ok_or("it is of other folds")?;
        let name = fold.name().to_owned();
        // Foreign code reads it. A snapshot that it panics on is passed over, like any other that cannot be used.
        catch_unwind(AssertUnwindSafe(|| fold.load(&state, registry)))
            .unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_text(&*panic))))
            .map_err(|problem| format!("fold `{name}`: {problem}"))?;
    }
    Ok(folds)
}

/// What became of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SaveOutcome {
    SaveOutcome,
    /// Somebody has a snapshot of this entry or a later one.
    Superseded,
}

/// Keeps a snapshot of the session at this place in the list, unless there is a later one.
pub(crate) async fn save(
    storage: &SessionBackend,
    session: &SessionId,
    index: EntryId,
    set: &str,
    fields: &RegistryMap,
) -> Result<SaveOutcome, SessionError> {
    let refuse = |problem: String| SessionError::Snapshot { session: session.clone(), problem };
    let point = point_of(fields).ok_or_else(|| refuse("its position is odd".to_owned()))?;
    let map = storage.keys.session_snapshot(session, set);
    let backend = &storage.backend;
    let is_known = super::read_meta(storage, session).await?;
    match is_known {
        Some(meta) if meta.index != index => {
            return Err(refuse("there is another session of this name by now".to_owned()));
        }
        Some(meta) if meta.stage == SessionStage::Expired => {
            return Err(refuse("it is expired".to_owned()));
        }
        Some(meta)
            if !meta.snapshots.contains_key(set) && meta.snapshots.len() >= SNAPSHOT_SETS_MAX =>
        {
            let problem = format!(
                "there are snapshots of {SNAPSHOT_SETS_MAX} other sets of folds, which is the \
                 limit; remove those that anonymous uses with `Sessions::delete_snapshots`"
            );
            return Err(refuse(problem));
        }
        Some(_) => {}
        None => return Err(SessionError::NotFound { session: session.clone() }),
    }
    for _ in 0..SAVE_ATTEMPTS {
        let old = backend.map_get(&map).await?;
        let done = match old.as_ref().map(|old| (point_of(old), old.get(POSITION))) {
            Some((Some(old), _)) if old.entry_id >= point.entry_id => {
                return Ok(SaveOutcome::Superseded);
            }
            Some((_, Some(position))) => {
                backend.map_update(&map, Some((POSITION, position)), fields).await?
            }
            // Nothing of ours is there.
            Some((_, None)) => backend.map_update(&map, None, fields).await?,
            None => backend.map_create(&map, fields).await?,
        };
        if done {
            // After the snapshot: whoever trims trusts this, and it must not promise what is not there.
            let meta = storage.keys.session_meta(session);
            let index = index.to_string();
            let expected = Some((meta::INDEX, index.as_bytes()));
            backend.map_update(&meta, expected, &meta::snapshot_is(set, point)).await?;
            return Ok(SaveOutcome::SaveOutcome);
        }
    }
    Err(refuse("others replace it all the time".to_owned()))
}

fn field<'a>(fields: &'a RegistryMap, name: &str) -> Result<&'a str, String> {
    text(fields, name).ok_or_else(|| format!("`{name}` is missing"))
}

fn number(fields: &RegistryMap, name: &str) -> Result<u64, String> {
    field(fields, name)?.parse().map_err(|_| format!("`{name}` is no number"))
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
