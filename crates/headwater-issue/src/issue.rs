//! The plain data of issues: what goes into a store and what comes out.
//!
//! Upstream: `store` speaks in these types. Promises: no behaviour but checks and names; every time is the database's.
//! Not here: how an issue changes (see `state`), and where it is kept.

use std::fmt;
use std::time::Duration;

use headwater_stream::clock::Timestamp;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub i64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number! {
    /// The id of an issue, a row of `issues`.
    IssueId
}
number! {
    /// The id of an event log, a row of `event_logs`. Within one issue, ids grow in the order of recording.
    EventLogId
}
number! {
    /// The id of an integration, a row of `integrations`.
    IntegrationId
}
number! {
    /// Grows with every claim of an issue; the fencing token that every effect of a run presents.
    ClaimEpoch
}
number! {
    /// The id of a row of `dead_letters`.
    DeadLetterId
}
number! {
    /// The id of a row of `outbox`. Within one issue, ids grow in the order of delivery.
    OutboxId
}

/// Where an issue stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ProcessingStatus {
    /// Nothing to do, or quarantined.
    #[default]
    Idle,
    /// Waits for a worker.
    Queued,
    /// A worker has claimed it.
    Processing,
}

impl ProcessingStatus {
    /// The name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Queued => "queued",
            Self::Processing => "processing",
        }
    }

    /// The status of this name, if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Idle, Self::Queued, Self::Processing].into_iter().find(|one| one.as_str() == name)
    }
}

impl fmt::Display for ProcessingStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The unit of work, a row of `issues`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issue {
    /// Its id.
    pub id: IssueId,
    /// The integration it came through, by name.
    pub integration: String,
    /// The provider of that integration.
    pub provider: String,
    /// The project, in the provider's words.
    pub external_project_id: String,
    /// The issue, in the provider's words; repeats between projects.
    pub external_issue_id: String,
    /// Where it stands.
    pub status: ProcessingStatus,
    /// Event logs not yet processed, those of a run in progress included.
    pub pending_events: u64,
    /// The epoch of the newest claim; 0 before the first.
    pub claim_epoch: ClaimEpoch,
    /// Who has claimed it, while it is `processing`.
    pub claim_owner: Option<String>,
    /// When that claim runs out unless a heartbeat comes.
    pub claim_expires_at: Option<Timestamp>,
    /// No claim before this time: a quiet window or a backoff.
    pub not_before: Option<Timestamp>,
    /// Failed tries since the last success.
    pub attempts: u32,
    /// Claims that ran out since the last success: workers that died or hung.
    pub crashes: u32,
    /// Runs given up for newer events since the last success.
    pub superseded: u32,
    /// Since when it is out of the way, waiting for an operator.
    pub quarantined_at: Option<Timestamp>,
    /// What the last failure said.
    pub last_error: Option<String>,
    /// What handlers know about it: a JSON object, changed only by completions.
    pub fields: String,
    /// The conversation, as JSON; changed only by completions.
    pub discussions: String,
    /// When the claim in progress, or the last one, began.
    pub processing_started_at: Option<Timestamp>,
    /// When a run last succeeded.
    pub last_processed_at: Option<Timestamp>,
    /// When a nudge was last due to be sent for it.
    pub nudged_at: Option<Timestamp>,
    /// When its first event was recorded.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// One stored, immutable inbound event, a row of `event_logs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLog {
    /// Its id.
    pub id: EventLogId,
    /// The issue it belongs to.
    pub issue_id: IssueId,
    /// Where it came from, such as `github`.
    pub source: String,
    /// What happened, such as `issue_created`.
    pub event_type: String,
    /// The key under which it is stored once.
    pub dedup_key: String,
    /// The JSON as received; a store may change its spaces and the order of keys. What `jsonb` cannot hold is replaced:
    /// NUL and lone surrogates by U+FFFD, numbers beyond the range of a `f64` by strings; of a repeated key the last
    /// value counts. Then [`Operator::original_payload`](crate::Operator::original_payload) has the original.
    pub payload: String,
    /// When it was recorded.
    pub created_at: Timestamp,
    /// When a run that handled it was committed.
    pub processed_at: Option<Timestamp>,
    /// What the last failed run that had it said.
    pub processing_error: Option<String>,
}

/// An event to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// The integration, by name; it must exist.
    pub integration: String,
    /// The project, in the provider's words; empty if the provider has none.
    pub external_project_id: String,
    /// The issue, in the provider's words.
    pub external_issue_id: String,
    /// Where it came from, such as `github`.
    pub source: String,
    /// What happened, such as `issue_created`.
    pub event_type: String,
    /// The provider's delivery id. If there is none, a hash of the event serves, so equal events are one.
    pub dedup_key: Option<String>,
    /// JSON, any that is valid; see [`EventLog::payload`] for what is stored.
    pub payload: String,
}

impl NewEvent {
    /// An event of a provider without projects, whose source is the integration and which has no delivery id. Set what
    /// differs.
    pub fn new(
        integration: impl Into<String>,
        external_issue_id: impl Into<String>,
        event_type: impl Into<String>,
        payload: impl Into<String>,
    ) -> Self {
        let integration = integration.into();
        Self {
            source: integration.clone(),
            integration,
            external_project_id: String::new(),
            external_issue_id: external_issue_id.into(),
            event_type: event_type.into(),
            dedup_key: None,
            payload: payload.into(),
        }
    }
}

/// What became of a [`NewEvent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The issue it belongs to.
    pub issue_id: IssueId,
    /// The event log, also that of an earlier delivery.
    pub event_log_id: EventLogId,
    /// Whether the event had been recorded before; then nothing was changed.
    pub duplicate: bool,
    /// Whether to nudge: this call made the issue `queued`, or it is a duplicate whose event still waits in a queued
    /// issue. Of several events of one issue in a call, the first says so.
    pub nudge: bool,
    /// No claim before this time.
    pub not_before: Option<Timestamp>,
}

/// The quiet window: wait while events still arrive, so that a burst is one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Quiet {
    /// A run waits until no event has come for this long. Zero (default): at once.
    pub quiet: Duration,
    /// But no event waits longer than this, counted from the first that waits. Default zero.
    pub max_wait: Duration,
    /// Nor does an issue wait that has so many events: as many as a run can have. Those of a run in progress count, so
    /// the number is looked at when none is. Zero (default): any number waits.
    pub events_max: usize,
}
