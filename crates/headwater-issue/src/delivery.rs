//! The data of the outbox: replies and events that were committed with a run and wait to be delivered.
//!
//! Upstream: `store` speaks in these types. Promises: the idempotency key of a row never changes.
//! Not here: how something is delivered (see `outbox`).

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::issue::{IssueId, OutboxId};

/// What an outbox row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutboxKind {
    /// An answer for the provider.
    Reply,
    /// A fact for the bus.
    Event,
}

impl OutboxKind {
    /// The name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reply => "reply",
            Self::Event => "event",
        }
    }

    /// The kind of this name, if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Reply, Self::Event].into_iter().find(|one| one.as_str() == name)
    }
}

/// A reply or event to commit with the end of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewOutbox {
    /// What it is.
    pub kind: OutboxKind,
    /// Where it goes, in words the deliverer knows: a topic, an event type, a channel. May be empty.
    pub target: String,
    /// JSON.
    pub payload: String,
}

/// A reply or event to write in a [`Transaction`](crate::Transaction) of your own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyedOutbox {
    /// Names this row within its issue: with the same key it is written once, however often its transaction is repeated.
    /// The idempotency key of the row is made of it.
    pub key: String,
    /// The row.
    pub row: NewOutbox,
}

/// What became of a [`KeyedOutbox`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxWritten {
    /// The row, also that of an earlier call.
    pub id: OutboxId,
    /// Whether it was there before; then nothing was written.
    pub duplicate: bool,
}

/// A row of the outbox in the hands of one deliverer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxRow {
    /// Its id.
    pub id: OutboxId,
    /// The issue it belongs to. Of one kind and issue only the oldest undelivered row is ever in hand.
    pub issue_id: IssueId,
    /// The integration of that issue, by name.
    pub integration: String,
    /// The provider of that integration.
    pub provider: String,
    /// The project of that issue, in the provider's words.
    pub external_project_id: String,
    /// That issue, in the provider's words.
    pub external_issue_id: String,
    /// What it is.
    pub kind: OutboxKind,
    /// Where it goes.
    pub target: String,
    /// The same at every try, and never used for anything else.
    pub idempotency_key: String,
    /// JSON.
    pub payload: String,
    /// How often it was taken, this time included; presented when it is settled.
    pub deliveries: u32,
    /// Failed tries.
    pub attempts: u32,
    /// How often it was taken and nobody said what became of it: deliverers that died or hung.
    pub crashes: u32,
    /// When it was committed.
    pub created_at: Timestamp,
}

impl OutboxRow {
    /// Where the row goes, for the limits of [`OutboxTake`].
    pub fn delivery_target(&self) -> DeliveryTarget {
        DeliveryTarget {
            integration: self.integration.clone(),
            kind: self.kind,
            target: self.target.clone(),
        }
    }
}

/// One receiver of outbox rows: a slow one must not delay the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeliveryTarget {
    /// The integration, by name.
    pub integration: String,
    /// Replies and events of one integration go to different receivers.
    pub kind: OutboxKind,
    /// [`OutboxRow::target`].
    pub target: String,
}

/// Which rows of the outbox to take.
///
/// Targets with fewer rows in flight come first, then those that were served longest ago, then those with the oldest row.
/// Within a target the row that is due longest comes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxTake {
    /// Who takes them.
    pub worker: String,
    /// Rows in all; at most [`OUTBOX_TAKE_MAX`](crate::limits::OUTBOX_TAKE_MAX).
    pub limit: usize,
    /// How long the rows are hidden from other deliverers.
    pub ttl: Duration,
    /// Rows of each target that is not in `targets`.
    pub per_target: usize,
    /// Rows of all targets together that are failing.
    pub failing_limit: usize,
    /// Targets of which the deliverer knows more, each named once.
    pub targets: Vec<TargetState>,
}

/// What a deliverer knows of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// The target.
    pub target: DeliveryTarget,
    /// Rows in flight in this process.
    pub in_flight: usize,
    /// Rows to take at most.
    pub room: usize,
    /// Whether its last deliveries failed.
    pub is_failing: bool,
    /// Grows with each row taken; 0: never.
    pub served: u64,
}

impl OutboxTake {
    /// Takes rows of any target.
    pub fn any(worker: impl Into<String>, limit: usize, ttl: Duration) -> Self {
        let worker = worker.into();
        Self { worker, limit, ttl, per_target: limit, failing_limit: limit, targets: vec![] }
    }
}

/// How a delivery ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It arrived.
    Delivered,
    /// It failed and counts as an attempt; later rows of its kind and issue wait for it.
    Retry {
        /// After this long.
        after: Duration,
        /// What went wrong.
        error: String,
    },
    /// Nothing goes this way at the moment, so it counts no attempt; later rows of its kind and issue wait for it.
    Away {
        /// After this long it is tried again.
        after: Duration,
        /// What went wrong.
        error: String,
    },
    /// It failed for good. Kept for an operator; later rows go on.
    Dead {
        /// What went wrong.
        error: String,
    },
    /// It was not tried: give it back without counting an attempt.
    Release,
}

/// The end of one delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxSettlement {
    /// The row.
    pub id: OutboxId,
    /// [`OutboxRow::deliveries`] of the row in hand; an old one changes nothing.
    pub deliveries: u32,
    /// How it ended.
    pub delivery: Delivery,
}

/// What became of an [`OutboxSettlement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxSettled {
    /// It is so.
    Done,
    /// The row was taken by somebody else meanwhile, or is settled. Nothing was changed.
    Fenced,
}

/// The key of the row that a run writes at this place. `identity` is the database's, so that a receiver which knows
/// several, or one that began anew, never takes two replies for one.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn idempotency_key(
    identity: &str,
    issue_id: IssueId,
    epoch: crate::issue::ClaimEpoch,
    place: usize,
) -> String {
    format!("{identity}-{issue_id}-{epoch}-{place}")
}

/// The key of a row that a caller names within an issue. A colon is in no key of a run, so the two never meet.
#[cfg(feature = "sqlite")]
pub(crate) fn caller_key(identity: &str, issue_id: IssueId, key: &str) -> String {
    format!("{identity}-{issue_id}:{key}")
}
