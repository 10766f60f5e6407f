//! Redo records: each is one physical state change, applied once when it is decided and again when the log
//! is replayed.
//!
//! Upstream: the calls in `streams`, `delays`, `leases` and so on decide which records a call produces.
//! Downstream: [`EmbeddedState::apply`](super::state::EmbeddedState::apply) applies them; `codec` encodes
//! their fields.
//! Guarantees: the same records in the same order give the same state. A record therefore contains every id
//! and time that was decided and reads no clock.

use std::borrow::Cow;

use bytes::Bytes;

use super::codec::{Decoded, Encode, take_byte};
use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};

/// Defines the records and their encoding: the tag, then the fields in the order in which they are written here.
macro_rules! redo_records {
    ($($(#[$doc:meta])* $tag:literal: $name:ident { $($field:ident: $type:ty,)* })*) => {
        /// One state change. Names borrow from the caller, or from the log on replay.
        #[derive(Clone, Debug, PartialEq)]
        pub(super) enum RedoRecord<'a> {
            $($(#[$doc])* $name { $($field: $type,)* },)*
        }

        impl<'a> RedoRecord<'a> {
            /// Appends the encoded record.
            pub(super) fn encode(&self, to: &mut Vec<u8>) {
                match self {
                    $(Self::$name { $($field,)* } => {
                        to.push($tag);
                        $($field.put(to);)*
                    })*
                }
            }

            /// Decodes the next record from the front of `from`; `None` at the end.
            pub(super) fn decode(from: &mut &'a [u8]) -> Decoded<Option<Self>> {
                if from.is_empty() {
                    return Ok(None);
                }
                Ok(Some(match take_byte(from)? {
                    $($tag => Self::$name { $($field: Encode::take(from)?,)* },)*
                    _ => return Err("unknown record tag"),
                }))
            }
        }
    };
}

// Tags and fields are part of the file format: never reuse or renumber a tag.
redo_records! {
    /// Appends entries under consecutive ids. Creates the stream.
    1: Append { stream: &'a str, first: EntryId, entries: Cow<'a, [Fields]>, }
    /// Creates a group that reads after an id. Creates the stream.
    2: CreateGroup { stream: &'a str, group: &'a str, after: EntryId, }
    /// Removes a group and its pending entries.
    3: RemoveGroup { stream: &'a str, group: &'a str, }
    /// Delivers all unread entries up to an id to a consumer.
    5: Deliver { stream: &'a str, group: &'a str, consumer: &'a str, through: EntryId, at: Timestamp, }
    /// Acknowledges pending entries.
    6: Acknowledge { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, }
    /// Assigns pending entries to a consumer; increments their delivery counts.
    7: Claim {
        stream: &'a str, group: &'a str, consumer: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp,
    }
    /// Releases pending entries from their consumer; decrements their delivery counts.
    8: Release { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp, }
    /// Resets the idle time of pending entries.
    9: KeepAlive { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp, }
    /// Removes a consumer without pending entries.
    10: RemoveConsumer { stream: &'a str, group: &'a str, consumer: &'a str, }
    /// Removes all entries before an id.
    11: Trim { stream: &'a str, before: EntryId, }
    /// Removes these entries.
    12: DeleteEntries { stream: &'a str, ids: Cow<'a, [EntryId]>, }

    /// Schedules an entry for a due time. Creates the delay set.
    13: Schedule { delays: &'a str, id: u64, due: Timestamp, to: &'a str, fields: Fields, }
    /// Removes a scheduled entry.
    14: Cancel { delays: &'a str, id: u64, }
    /// Moves a scheduled entry to its stream.
    15: Promote { delays: &'a str, id: u64, entry: EntryId, }

    /// A lease is held until a time, unless it is renewed.
    16: HoldLease { lease: &'a str, holder: &'a str, epoch: u64, until: Timestamp, at: Timestamp, }

    /// Adds members to a set; `until: None` keeps its expiration. Creates the set.
    17: AddMembers { set: &'a str, members: Vec<&'a str>, until: Option<Timestamp>, at: Timestamp, }
    /// Removes members from a set; removing the last one removes the set.
    18: RemoveMembers { set: &'a str, members: Vec<&'a str>, }
    /// Sets fields of a map. Creates the map.
    19: PutFields { map: &'a str, fields: Vec<(&'a str, Bytes)>, }

    /// Sets a deduplication record: in progress without a value, or done with one.
    20: SetDedup { scope: &'a str, id: &'a str, done: Option<Bytes>, until: Timestamp, at: Timestamp, }
    /// Removes a deduplication record.
    21: RemoveDedup { scope: &'a str, id: &'a str, }

    /// Gives a stream a name that is not in use.
    30: Rename { from: &'a str, to: &'a str, }
    /// Removes the value of a name: a stream, delay set, map, set or lease.
    22: Remove { name: &'a str, }

    /// The next delay id. Only in snapshots, like all records below.
    23: RestoreCounters { next_delay: u64, }
    /// The latest time at which a record was decided.
    29: RestoreTime { at: Timestamp, }
    /// A stream and the last id it has assigned.
    24: RestoreStream { stream: &'a str, last_id: EntryId, }
    /// Entries of a stream, in id order.
    25: RestoreEntries { stream: &'a str, entries: Vec<(EntryId, Fields)>, }
    /// A consumer of a group and when it was last active.
    4: RestoreConsumer { stream: &'a str, group: &'a str, consumer: &'a str, at: Timestamp, }
    /// Pending entries of a consumer: id, delivery time and delivery count.
    26: RestorePending {
        stream: &'a str, group: &'a str, consumer: &'a str, pending: Vec<(EntryId, Timestamp, u64)>,
    }
    /// A held lease.
    27: RestoreLease { lease: &'a str, holder: &'a str, epoch: u64, until: Timestamp, }
    /// The last epoch of a lease, held or not, and how long it is retained.
    28: RestoreEpoch { lease: &'a str, epoch: u64, until: Timestamp, }
}

impl RedoRecord<'_> {
    /// When the record was decided; the Unix epoch if it does not contain a time.
    pub(super) fn decided_at(&self) -> Timestamp {
        match self {
            Self::Deliver { at, .. }
            | Self::Claim { at, .. }
            | Self::Release { at, .. }
            | Self::KeepAlive { at, .. }
            | Self::HoldLease { at, .. }
            | Self::AddMembers { at, .. }
            | Self::SetDedup { at, .. }
            | Self::RestoreConsumer { at, .. }
            | Self::RestoreTime { at } => *at,
            // The first part of an id is a time, or a larger value that was assigned before.
            Self::Append { first: id, .. }
            | Self::Promote { entry: id, .. }
            | Self::RestoreStream { last_id: id, .. } => Timestamp::from_millis(id.ms),
            _ => Timestamp::default(),
        }
    }
}
