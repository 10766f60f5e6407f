//! Data types of the outbox: replies and events that were committed with a run and are to be delivered.
//!
//! Guarantees: the idempotency key of a row never changes. Not here: delivery (see `outbox`).

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::issue::{IssueId, OutboxId};

/// Kind of an outbox row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutboxKind {
    /// A reply to the provider.
    Reply,
    /// An event for the bus.
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

    /// Parses the name in SQL.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Reply, Self::Event].into_iter().find(|kind| kind.as_str() == name)
    }
}

/// A reply or event to commit with the end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewOutboxRow {
    /// Kind of the row.
    pub kind: OutboxKind,
    /// Destination, interpreted by the deliverer: a topic, an event type, a channel. May be empty.
    pub target: String,
    /// JSON.
    pub payload: String,
}

/// A reply or event to write in a caller's [`Transaction`](crate::Transaction).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyedOutboxRow {
    /// Key of the row within its issue. A row with the same key is written once, however often the transaction is
    /// repeated. The idempotency key is derived from it.
    pub key: String,
    /// The row.
    pub row: NewOutboxRow,
}

/// Result of writing a [`KeyedOutboxRow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxWritten {
    /// Id of the row; for a duplicate, that of the first call.
    pub id: OutboxId,
    /// Whether the row existed; nothing was written then.
    pub duplicate: bool,
}

/// An outbox row taken by one deliverer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxRow {
    /// Id of the row.
    pub id: OutboxId,
    /// Issue of the row. Per kind and issue, only the oldest undelivered row can be taken.
    pub issue_id: IssueId,
    /// Name of the issue's integration.
    pub integration: String,
    /// Provider of the integration.
    pub provider: String,
    /// Project id at the provider.
    pub external_project_id: String,
    /// Issue id at the provider.
    pub external_issue_id: String,
    /// Kind of the row.
    pub kind: OutboxKind,
    /// Destination.
    pub target: String,
    /// The same for every delivery of the row, and unique.
    pub idempotency_key: String,
    /// JSON.
    pub payload: String,
    /// Number of times it was taken, including this one; the fencing token when it is settled.
    pub deliveries: u32,
    /// Failed attempts.
    pub attempts: u32,
    /// Number of times it was taken and not settled: deliverers that died or hung.
    pub crashes: u32,
    /// When it was committed.
    pub created_at: Timestamp,
}

impl OutboxRow {
    /// Target of the row, for the limits of [`OutboxTake`].
    pub fn delivery_target(&self) -> DeliveryTarget {
        DeliveryTarget {
            integration: self.integration.clone(),
            kind: self.kind,
            target: self.target.clone(),
        }
    }
}

/// A receiver of outbox rows. Each has its own limits, so that a slow one does not delay the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeliveryTarget {
    /// Name of the integration.
    pub integration: String,
    /// Kind of the rows: replies and events of one integration go to different receivers.
    pub kind: OutboxKind,
    /// [`OutboxRow::target`].
    pub target: String,
}

/// Which rows of the outbox to take.
///
/// Order: targets with fewer rows in flight first, then the least recently served, then those with the oldest row.
/// Within a target: the earliest due time first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxTake {
    /// Name of the deliverer.
    pub worker: String,
    /// Maximum number of rows; at most [`OUTBOX_TAKE_MAX`](crate::limits::OUTBOX_TAKE_MAX).
    pub limit: usize,
    /// How long the rows are invisible to other deliverers.
    pub ttl: Duration,
    /// Maximum number of rows for each target that is not in `targets`.
    pub per_target: usize,
    /// Maximum number of rows for all failing targets together.
    pub failing_limit: usize,
    /// State of the targets that the deliverer tracks; each target at most once.
    pub targets: Vec<TargetState>,
}

/// State of a target in one deliverer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// The target.
    pub target: DeliveryTarget,
    /// Rows in flight in this process.
    pub in_flight: usize,
    /// Maximum number of rows to take.
    pub free_slots: usize,
    /// Whether the last deliveries to it failed.
    pub is_failing: bool,
    /// Sequence number of the last row taken for it; 0: none.
    pub served: u64,
}

impl OutboxTake {
    /// Takes rows of any target, without a limit per target.
    pub fn any(worker: impl Into<String>, limit: usize, ttl: Duration) -> Self {
        let worker = worker.into();
        Self { worker, limit, ttl, per_target: limit, failing_limit: limit, targets: vec![] }
    }
}

/// Result of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutboxDelivery {
    /// The receiver accepted the row.
    Delivered,
    /// The delivery failed and counts as an attempt. Later rows of the same kind and issue wait for it.
    Retry {
        /// Delay before the next attempt.
        after: Duration,
        /// Error text.
        error: String,
    },
    /// The target is unavailable; no attempt is counted. Later rows of the same kind and issue wait for it.
    Unavailable {
        /// Delay before the next attempt.
        after: Duration,
        /// Error text.
        error: String,
    },
    /// The delivery failed permanently. The row is kept for an operator; later rows are delivered.
    Dead {
        /// Error text.
        error: String,
    },
    /// The delivery was cancelled: release the row without counting an attempt.
    Release,
}

/// Settlement of one delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxSettlement {
    /// Id of the row.
    pub id: OutboxId,
    /// [`OutboxRow::deliveries`] of the taken row; with an older value the settlement is fenced.
    pub deliveries: u32,
    /// Result of the delivery.
    pub delivery: OutboxDelivery,
}

/// Result of an [`OutboxSettlement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxSettled {
    /// Committed.
    Done,
    /// Another deliverer took the row meanwhile, or it is settled already. Nothing was changed.
    Fenced,
}

/// Idempotency key of the row at `index` of a run. `identity` identifies the database, so that keys of different
/// databases, or of one that was recreated, never collide at a receiver.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn idempotency_key(
    identity: &str,
    issue_id: IssueId,
    epoch: crate::issue::ClaimEpoch,
    index: usize,
) -> String {
    format!("{identity}-{issue_id}-{epoch}-{index}")
}

/// Idempotency key of a row with a caller's key. Keys of runs contain no colon, so the two kinds never collide.
#[cfg(feature = "sqlite")]
pub(crate) fn caller_key(identity: &str, issue_id: IssueId, key: &str) -> String {
    format!("{identity}-{issue_id}:{key}")
}
