//! The state of the embedded backend, in memory.
//!
//! Upstream: the calls read it to decide. Downstream: `snapshot` writes it to a file.
//! Guarantees: only [`EmbeddedState::apply`] changes it, so replaying the log gives the same state. The one
//! exception is [`EmbeddedState::touch`], which is not logged.
//! Cloning is cheap: large parts are behind shared pointers and copied on write.

pub(super) mod chunked_map;
pub(super) mod dedup_table;
pub(super) mod delay_set;
pub(super) mod entries;
pub(super) mod group;
pub(super) mod lease_table;
pub(super) mod registry;
pub(super) mod stream;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;

use self::dedup_table::{DedupRecord, DedupTable};
use self::delay_set::{DelaySet, DelayedItem};
use self::group::GroupState;
use self::lease_table::{EpochTable, Lease};
use self::registry::{Set, field_bytes, member_bytes};
use self::stream::StreamState;
use super::codec::RecordError;
use super::redo_record::RedoRecord;
use crate::clock::Timestamp;
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::name::{GroupName, HolderName, LeaseName, StreamName};

#[derive(Clone, Debug, Default)]
pub(super) struct EmbeddedState {
    /// One key space for all types, as on Redis.
    pub(super) names: HashMap<Arc<str>, NamedValue>,
    pub(super) epochs: EpochTable,
    pub(super) dedup: DedupTable,
    /// Held and expired leases by expiration time.
    lease_expirations: BTreeSet<(Timestamp, Arc<str>)>,
    /// Sets with an expiration, by expiration time.
    set_expirations: BTreeSet<(Timestamp, Arc<str>)>,
    pub(super) next_delay: u64,
    /// Approximate memory use in bytes.
    bytes: u64,
    latest: Timestamp,
}

/// The value of a name.
#[derive(Clone, Debug)]
pub(super) enum NamedValue {
    StreamState(Arc<StreamState>),
    Delays(Arc<DelaySet>),
    Map(Arc<BTreeMap<String, Bytes>>),
    Set(Arc<Set>),
    Lease(Lease),
}

macro_rules! kind {
    ($getter:ident, $kind:ident, $type:ty, $what:literal) => {
        #[doc = concat!("The ", $what, " with this name; `WrongType` if the name holds another type.")]
        pub(super) fn $getter(&self, name: &str, now: Timestamp) -> Result<Option<&$type>> {
            match self.get(name, now) {
                None => Ok(None),
                Some(NamedValue::$kind(value)) => Ok(Some(value)),
                Some(_) => Err(StreamError::WrongType { name: name.to_owned() }),
            }
        }
    };
}

impl EmbeddedState {
    kind!(stream, StreamState, StreamState, "stream");
    kind!(delays, Delays, DelaySet, "delay set");
    kind!(map, Map, BTreeMap<String, Bytes>, "map");
    kind!(set, Set, Set, "set");
    kind!(lease, Lease, Lease, "lease");

    /// A stream and one of its groups, if both exist.
    pub(super) fn group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        now: Timestamp,
    ) -> Result<Option<(&StreamState, &GroupState)>> {
        let stream = self.stream(stream.as_str(), now)?;
        Ok(stream.and_then(|stream| Some((stream, stream.groups.get(group.as_str())?))))
    }

    /// The value of a name, unless it has expired.
    pub(super) fn get(&self, name: &str, now: Timestamp) -> Option<&NamedValue> {
        self.names.get(name).filter(|value| !value.is_expired(now))
    }

    /// Whether the name holds an expired value.
    pub(super) fn is_expired(&self, name: &str, now: Timestamp) -> bool {
        self.names.get(name).is_some_and(|value| value.is_expired(now))
    }

    /// Approximate memory use in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The latest time at which a record was decided; the clock does not go back behind it.
    pub(super) fn latest(&self) -> Timestamp {
        self.latest
    }

    /// Applies one record. An error means that the record does not match this state.
    pub(super) fn apply(&mut self, record: &RedoRecord<'_>) -> Result<(), RecordError> {
        self.latest = self.latest.max(record.decided_at());
        match record {
            RedoRecord::Append { stream, first, entries } => {
                self.create_stream(stream)?;
                self.with_stream(stream, |stream| stream.append(*first, entries))?;
            }
            RedoRecord::CreateGroup { stream, group, after } => {
                self.create_stream(stream)?;
                self.with_stream(stream, |stream| stream.create_group(group, *after))?;
            }
            RedoRecord::RemoveGroup { stream, group } => self.with_stream(stream, |stream| {
                stream.groups.remove(*group).map(|_| ()).ok_or("unknown group")
            })?,
            RedoRecord::RestoreConsumer { stream, group, consumer, at } => self
                .with_stream(stream, |stream| {
                    stream.group_mut(group)?.touch(consumer, *at).map(|_| ())
                })?,
            RedoRecord::Deliver { stream, group, consumer, through, at } => {
                self.with_stream(stream, |stream| stream.deliver(group, consumer, *through, *at))?;
            }
            RedoRecord::Acknowledge { stream, group, ids } => {
                self.with_stream(stream, |stream| {
                    let group = stream.group_mut(group)?;
                    ids.iter().for_each(|id| {
                        group.acknowledge(*id);
                    });
                    Ok(())
                })?;
            }
            RedoRecord::Claim { stream, group, consumer, ids, at } => {
                self.with_stream(stream, |stream| {
                    let group = stream.group_mut(group)?;
                    ids.iter().try_for_each(|id| group.claim(*id, consumer, *at))
                })?;
            }
            RedoRecord::Release { stream, group, ids, at } => {
                self.with_stream(stream, |stream| {
                    let group = stream.group_mut(group)?;
                    ids.iter().try_for_each(|id| group.release(*id, *at))
                })?;
            }
            RedoRecord::KeepAlive { stream, group, ids, at } => {
                self.with_stream(stream, |stream| {
                    let group = stream.group_mut(group)?;
                    ids.iter().try_for_each(|id| group.keep_alive(*id, *at))
                })?;
            }
            RedoRecord::RemoveConsumer { stream, group, consumer } => {
                self.with_stream(stream, |stream| {
                    let group = stream.group_mut(group)?;
                    match group.consumers.remove(*consumer) {
                        Some(gone) if gone.pending.is_empty() => Ok(()),
                        _ => Err("the consumer to remove is unknown or has pending entries"),
                    }
                })?;
            }
            RedoRecord::Trim { stream, before } => self.with_stream(stream, |stream| {
                stream.trim(*before);
                Ok(())
            })?,
            RedoRecord::DeleteEntries { stream, ids } => self.with_stream(stream, |stream| {
                stream.delete(ids);
                Ok(())
            })?,
            RedoRecord::Schedule { delays, id, due, to, fields } => {
                let to = StreamName::new(to).map_err(|_| "invalid stream name")?;
                let waiting = DelayedItem { to, fields: fields.clone() };
                self.schedule(delays, *id, *due, waiting)?;
            }
            RedoRecord::Cancel { delays, id } => {
                self.remove_delayed(delays, *id)?;
            }
            RedoRecord::Promote { delays, id, entry } => {
                let DelayedItem { to, fields } = self.remove_delayed(delays, *id)?;
                self.create_stream(to.as_str())?;
                self.with_stream(to.as_str(), |stream| stream.append(*entry, &[fields]))?;
            }
            RedoRecord::HoldLease { lease, holder, epoch, until, at } => {
                self.hold(lease, holder, *epoch, *until)?;
                self.epochs.note(lease, *epoch, *until, *at);
            }
            RedoRecord::AddMembers { set, members, until, at } => {
                self.remove_expired_sets(*at);
                self.add_members(set, members, *until)?;
            }
            RedoRecord::RemoveMembers { set, members } => self.remove_members(set, members)?,
            RedoRecord::PutFields { map, fields } => self.put_fields(map, fields)?,
            RedoRecord::SetDedup { scope, id, done, until, at } => {
                let record = DedupRecord { done: done.clone(), until: *until };
                let (added, freed) = self.dedup.set(scope, id, record, *at);
                self.bytes = (self.bytes + added).saturating_sub(freed);
            }
            RedoRecord::RemoveDedup { scope, id } => {
                let freed = self.dedup.remove(scope, id);
                self.bytes = self.bytes.saturating_sub(freed);
            }
            RedoRecord::Rename { from, to } => self.rename(from, to)?,
            RedoRecord::Remove { name } => self.remove(name)?,
            RedoRecord::RestoreCounters { next_delay } => self.next_delay = *next_delay,
            // Recorded above.
            RedoRecord::RestoreTime { .. } => {}
            RedoRecord::RestoreStream { stream, last_id } => {
                self.create_stream(stream)?;
                self.with_stream(stream, |stream| {
                    stream.last_id = *last_id;
                    Ok(())
                })?;
            }
            RedoRecord::RestoreEntries { stream, entries } => {
                self.with_stream(stream, |stream| {
                    entries.iter().try_for_each(|(id, fields)| stream.restore(*id, fields.clone()))
                })?;
            }
            RedoRecord::RestorePending { stream, group, consumer, pending } => {
                self.with_stream(stream, |stream| {
                    let group = stream.group_mut(group)?;
                    pending.iter().try_for_each(|(id, at, deliveries)| {
                        group.restore(*id, consumer, *at, *deliveries)
                    })
                })?;
            }
            RedoRecord::RestoreLease { lease, holder, epoch, until } => {
                self.hold(lease, holder, *epoch, *until)?;
            }
            RedoRecord::RestoreEpoch { lease, epoch, until } => {
                self.epochs.restore(lease, *epoch, *until);
            }
        }
        Ok(())
    }

    /// Records activity of a consumer. Not logged: it only prevents removal of an idle consumer.
    pub(super) fn touch(&mut self, stream: &str, group: &str, consumer: &str, at: Timestamp) {
        if let Some(NamedValue::StreamState(stream)) = self.names.get_mut(stream)
            && let Some(group) = Arc::make_mut(stream).groups.get_mut(group)
            && let Some(consumer) = group.consumers.get_mut(consumer)
        {
            consumer.seen_at = at;
        }
    }

    /// Records which commit appended entries to a stream.
    pub(super) fn record_commit(
        &mut self,
        stream: &str,
        first: EntryId,
        commit: u64,
        durable: u64,
    ) {
        if let Some(NamedValue::StreamState(stream)) = self.names.get_mut(stream) {
            Arc::make_mut(stream).record_commit(first, commit, durable);
        }
    }

    /// The lease with the earliest expiration, if it has expired.
    pub(super) fn next_expired_lease(&self, now: Timestamp) -> Option<LeaseName> {
        let (end, name) = self.lease_expirations.first()?;
        match self.names.get(name)? {
            NamedValue::Lease(lease) if *end <= now => Some(lease.name.clone()),
            _ => None,
        }
    }

    /// When the next lease expires.
    pub(super) fn next_lease_expiry(&self) -> Option<Timestamp> {
        self.lease_expirations.first().map(|(end, _)| *end)
    }

    fn create_stream(&mut self, name: &str) -> Result<(), RecordError> {
        if !self.names.contains_key(name) {
            StreamName::new(name).map_err(|_| "invalid stream name")?;
            self.names.insert(name.into(), NamedValue::StreamState(Arc::default()));
        }
        Ok(())
    }

    fn with_stream(
        &mut self,
        name: &str,
        update: impl FnOnce(&mut StreamState) -> Result<(), RecordError>,
    ) -> Result<(), RecordError> {
        let Some(NamedValue::StreamState(stream)) = self.names.get_mut(name) else {
            return Err("unknown stream");
        };
        let stream = Arc::make_mut(stream);
        let before = stream.entries.bytes();
        let done = update(stream);
        self.bytes = self.bytes - before + stream.entries.bytes();
        done
    }

    fn hold(
        &mut self,
        name: &str,
        holder: &str,
        epoch: u64,
        until: Timestamp,
    ) -> Result<(), RecordError> {
        let key: Arc<str> = name.into();
        let lease = Lease {
            name: LeaseName::new(name).map_err(|_| "invalid lease name")?,
            holder: HolderName::new(holder).map_err(|_| "invalid holder name")?,
            epoch,
            until,
        };
        match self.names.insert(key.clone(), NamedValue::Lease(lease)) {
            None => {}
            Some(NamedValue::Lease(old)) => {
                self.lease_expirations.remove(&(old.until, key.clone()));
            }
            Some(_) => return Err("the name does not hold a lease"),
        }
        self.lease_expirations.insert((until, key));
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), RecordError> {
        StreamName::new(to).map_err(|_| "invalid stream name")?;
        if self.names.contains_key(to) {
            return Err("the new name is in use");
        }
        match self.names.remove(from) {
            Some(value @ NamedValue::StreamState(_)) => self.names.insert(to.into(), value),
            _ => return Err("unknown stream"),
        };
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<(), RecordError> {
        let (name, value) = self.names.remove_entry(name).ok_or("unknown name")?;
        let freed = match value {
            NamedValue::StreamState(stream) => stream.entries.bytes(),
            NamedValue::Delays(delays) => delays.bytes(),
            NamedValue::Map(map) => {
                map.iter().map(|(field, value)| field_bytes(field, value)).sum()
            }
            NamedValue::Set(set) => {
                if let Some(until) = set.until {
                    self.set_expirations.remove(&(until, name));
                }
                set.members.iter().map(|member| member_bytes(member)).sum()
            }
            NamedValue::Lease(lease) => {
                self.lease_expirations.remove(&(lease.until, name));
                0
            }
        };
        self.bytes = self.bytes.saturating_sub(freed);
        Ok(())
    }
}

impl NamedValue {
    fn is_expired(&self, now: Timestamp) -> bool {
        match self {
            Self::Lease(lease) => lease.until <= now,
            Self::Set(set) => set.until.is_some_and(|until| until <= now),
            _ => false,
        }
    }
}
