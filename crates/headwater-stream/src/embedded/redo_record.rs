//! Redo records: each is one physical state change, applied once when it is decided and again when the log
//! is replayed.
//!
//! Upstream: the calls in `streams`, `delays`, `leases` and so on decide which records a call produces.
//! Downstream: `codec` encodes them, [`EmbeddedState::apply`](super::state::EmbeddedState::apply) applies
//! them.
//! Guarantees: the same records in the same order give the same state. A record therefore contains every id
//! and time that was decided and reads no clock.

use std::borrow::Cow;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};

/// One state change. Names borrow from the caller, or from the log on replay.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RedoRecord<'a> {
    /// Appends entries under consecutive ids. Creates the stream.
    Append { stream: &'a str, first: EntryId, entries: Cow<'a, [Fields]> },
    /// Creates a group that reads after an id. Creates the stream.
    CreateGroup { stream: &'a str, group: &'a str, after: EntryId },
    /// Removes a group and its pending entries.
    RemoveGroup { stream: &'a str, group: &'a str },
    /// Delivers all unread entries up to an id to a consumer.
    Deliver { stream: &'a str, group: &'a str, consumer: &'a str, through: EntryId, at: Timestamp },
    /// Acknowledges pending entries.
    Acknowledge { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]> },
    /// Assigns pending entries to a consumer; increments their delivery counts.
    Claim {
        stream: &'a str,
        group: &'a str,
        consumer: &'a str,
        ids: Cow<'a, [EntryId]>,
        at: Timestamp,
    },
    /// Releases pending entries from their consumer; decrements their delivery counts.
    Release { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp },
    /// Resets the idle time of pending entries.
    KeepAlive { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp },
    /// Removes a consumer without pending entries.
    RemoveConsumer { stream: &'a str, group: &'a str, consumer: &'a str },
    /// Removes all entries before an id.
    Trim { stream: &'a str, before: EntryId },
    /// Removes these entries.
    DeleteEntries { stream: &'a str, ids: Cow<'a, [EntryId]> },

    /// Schedules an entry for a due time. Creates the delay set.
    Schedule { delays: &'a str, id: u64, due: Timestamp, to: &'a str, fields: Fields },
    /// Removes a scheduled entry.
    Cancel { delays: &'a str, id: u64 },
    /// Moves a scheduled entry to its stream.
    Promote { delays: &'a str, id: u64, entry: EntryId },

    /// A lease is held until a time, unless it is renewed.
    HoldLease { lease: &'a str, holder: &'a str, epoch: u64, until: Timestamp, at: Timestamp },

    /// Adds members to a set; `until: None` keeps its expiration. Creates the set.
    AddMembers { set: &'a str, members: Vec<&'a str>, until: Option<Timestamp>, at: Timestamp },
    /// Removes members from a set; removing the last one removes the set.
    RemoveMembers { set: &'a str, members: Vec<&'a str> },
    /// Sets fields of a map. Creates the map.
    PutFields { map: &'a str, fields: Vec<(&'a str, Bytes)> },

    /// Sets a deduplication record: in progress without a value, or done with one.
    SetDedup { scope: &'a str, id: &'a str, done: Option<Bytes>, until: Timestamp, at: Timestamp },
    /// Removes a deduplication record.
    RemoveDedup { scope: &'a str, id: &'a str },

    /// Gives a stream a name that is not in use.
    Rename { from: &'a str, to: &'a str },
    /// Removes the value of a name: a stream, delay set, map, set or lease.
    Remove { name: &'a str },

    /// The next delay id. Only in snapshots, like all records below.
    RestoreCounters { next_delay: u64 },
    /// The latest time at which a record was decided.
    RestoreTime { at: Timestamp },
    /// A stream and the last id it has assigned.
    RestoreStream { stream: &'a str, last_id: EntryId },
    /// Entries of a stream, in id order.
    RestoreEntries { stream: &'a str, entries: Vec<(EntryId, Fields)> },
    /// A consumer of a group and when it was last active.
    RestoreConsumer { stream: &'a str, group: &'a str, consumer: &'a str, at: Timestamp },
    /// Pending entries of a consumer: id, delivery time and delivery count.
    RestorePending {
        stream: &'a str,
        group: &'a str,
        consumer: &'a str,
        pending: Vec<(EntryId, Timestamp, u64)>,
    },
    /// A held lease.
    RestoreLease { lease: &'a str, holder: &'a str, epoch: u64, until: Timestamp },
    /// The last epoch of a lease, held or not, and how long it is retained.
    RestoreEpoch { lease: &'a str, epoch: u64, until: Timestamp },
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
