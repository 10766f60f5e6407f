//! An effect is one physical change of the state: decided once, applied now and again whenever the log is read.
//!
//! Upstream: the calls in `streams`, `delays`, `leases` and so on decide which effects a call has. Downstream: `codec`
//! writes them into the log, [`EmbeddedState::apply`](super::state::EmbeddedState::apply) carries them out.
//! Promises: applying the same effects in the same order gives the same state. An effect therefore holds every id and
//! every time that was decided, and asks no clock.

use std::borrow::Cow;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};

/// One change of the state. Names are borrowed: from the caller when it happens, from the log when it is read.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RedoRecord<'a> {
    /// StreamEntries enter a stream under consecutive ids. Creates the stream.
    Append { stream: &'a str, first: EntryId, entries: Cow<'a, [Fields]> },
    /// A group begins to read after an id. Creates the stream.
    CreateGroup { stream: &'a str, group: &'a str, after: EntryId },
    /// A group goes with all it knows.
    RemoveGroup { stream: &'a str, group: &'a str },
    /// All that the group has not read yet, up to an id, is pending for a consumer.
    Deliver { stream: &'a str, group: &'a str, consumer: &'a str, through: EntryId, at: Timestamp },
    /// StreamEntries are pending no longer.
    Acknowledge { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]> },
    /// Pending entries change hands; each counts as one more delivery.
    Claim {
        stream: &'a str,
        group: &'a str,
        consumer: &'a str,
        ids: Cow<'a, [EntryId]>,
        at: Timestamp,
    },
    /// Pending entries are nobody's, and their last delivery does not count.
    Release { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp },
    /// The idle time of pending entries starts anew.
    KeepAlive { stream: &'a str, group: &'a str, ids: Cow<'a, [EntryId]>, at: Timestamp },
    /// A consumer without pending entries goes.
    RemoveConsumer { stream: &'a str, group: &'a str, consumer: &'a str },
    /// All entries before an id go.
    Trim { stream: &'a str, before: EntryId },
    /// These entries go.
    DeleteEntries { stream: &'a str, ids: Cow<'a, [EntryId]> },

    /// An entry waits until it is due. Creates the set.
    Schedule { delays: &'a str, id: u64, due: Timestamp, to: &'a str, fields: Fields },
    /// A waiting entry goes.
    Cancel { delays: &'a str, id: u64 },
    /// A waiting entry enters its stream.
    Promote { delays: &'a str, id: u64, entry: EntryId },

    /// A lease is held until a time, unless it is prolonged.
    HoldLease { lease: &'a str, holder: &'a str, epoch: u64, until: Timestamp, at: Timestamp },

    /// Members enter a set; `until` of `None` leaves its life as it is. Creates the set.
    AddMembers { set: &'a str, members: Vec<&'a str>, until: Option<Timestamp>, at: Timestamp },
    /// Members leave a set, which goes with the last of them.
    RemoveMembers { set: &'a str, members: Vec<&'a str> },
    /// Fields of a map get values. Creates the map.
    PutFields { map: &'a str, fields: Vec<(&'a str, Bytes)> },

    /// An id is marked, as begun without a value or as done with one.
    SetDedup { scope: &'a str, id: &'a str, done: Option<Bytes>, until: Timestamp, at: Timestamp },
    /// A mark goes.
    RemoveDedup { scope: &'a str, id: &'a str },

    /// Whatever has this name goes: a stream, a set of delayed entries, a map, a set or a lease.
    Remove { name: &'a str },

    /// The number that the next delayed entry gets. In snapshots only, like all below.
    RestoreCounters { next_delay: u64 },
    /// The latest time at which anything was decided.
    RestoreTime { at: Timestamp },
    /// A stream exists and has given out ids up to this one.
    RestoreStream { stream: &'a str, last_id: EntryId },
    /// StreamEntries of a stream, in id order.
    RestoreEntries { stream: &'a str, entries: Vec<(EntryId, Fields)> },
    /// A consumer that a group knows, and when it last did something.
    RestoreConsumer { stream: &'a str, group: &'a str, consumer: &'a str, at: Timestamp },
    /// What is pending for a consumer: id, time and number of deliveries.
    RestorePending {
        stream: &'a str,
        group: &'a str,
        consumer: &'a str,
        pending: Vec<(EntryId, Timestamp, u64)>,
    },
    /// A lease that was held.
    RestoreLease { lease: &'a str, holder: &'a str, epoch: u64, until: Timestamp },
    /// The last epoch of a lease, held or not, and until when it is remembered.
    RestoreEpoch { lease: &'a str, epoch: u64, until: Timestamp },
}

impl RedoRecord<'_> {
    /// When it was decided, as far as it tells; 1970 if it does not.
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
            // The first part of an id is a time, or a larger one that was given out before.
            Self::Append { first: id, .. }
            | Self::Promote { entry: id, .. }
            | Self::RestoreStream { last_id: id, .. } => Timestamp::from_millis(id.ms),
            _ => Timestamp::default(),
        }
    }
}
