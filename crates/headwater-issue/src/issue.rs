//! Data types of issues and events, as passed to and returned by a store. All timestamps are the database's.
//!
//! Not here: the transitions of an issue (see `state`), and persistence (see `store`).

use std::fmt;
use std::time::Duration;

use headwater_queue::TraceContext;
use headwater_stream::clock::Timestamp;

macro_rules! numeric_id {
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

numeric_id! {
    /// The id of an issue, a row of `issues`.
    IssueId
}
numeric_id! {
    /// The id of an event log, a row of `event_logs`. Within one issue, ids increase in the order of recording.
    EventLogId
}
numeric_id! {
    /// The id of an integration, a row of `integrations`.
    IntegrationId
}
numeric_id! {
    /// Fencing token of a claim. It increases with every claim of an issue; every effect of a run presents it.
    ClaimEpoch
}
numeric_id! {
    /// The id of a row of `dead_letters`.
    DeadLetterId
}
numeric_id! {
    /// The id of a row of `outbox`. Within one issue, ids increase in the order of delivery.
    OutboxId
}

/// Processing status of an issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ProcessingStatus {
    /// No pending events, or quarantined.
    #[default]
    Idle,
    /// Waiting for a worker.
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

    /// Parses the name in SQL.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Idle, Self::Queued, Self::Processing]
            .into_iter()
            .find(|status| status.as_str() == name)
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
    /// Id of the issue.
    pub id: IssueId,
    /// Name of its integration.
    pub integration: String,
    /// Provider of the integration.
    pub provider: String,
    /// Project id at the provider.
    pub external_project_id: String,
    /// Issue id at the provider; unique only within a project.
    pub external_issue_id: String,
    /// Processing status.
    pub status: ProcessingStatus,
    /// Unprocessed event logs, including those of a run in progress.
    pub pending_events: u64,
    /// Epoch of the newest claim; 0 before the first.
    pub claim_epoch: ClaimEpoch,
    /// Worker that holds the claim, while `processing`.
    pub claim_owner: Option<String>,
    /// When the claim expires unless it is renewed.
    pub claim_expires_at: Option<Timestamp>,
    /// Earliest time of the next claim: end of a debounce window or a backoff.
    pub not_before: Option<Timestamp>,
    /// Failed attempts since the last success.
    pub attempts: u32,
    /// Claims that expired since the last success: workers that died or hung.
    pub crashes: u32,
    /// Runs cancelled for newer events since the last success.
    pub superseded: u32,
    /// When it was quarantined; an operator has to release it.
    pub quarantined_at: Option<Timestamp>,
    /// Error of the last failure.
    pub last_error: Option<String>,
    /// Fields set by handlers: a JSON object, changed only by completions.
    pub fields: String,
    /// The conversation, as JSON; changed only by completions.
    pub discussions: String,
    /// Start of the current or the last claim.
    pub processing_started_at: Option<Timestamp>,
    /// Time of the last successful run.
    pub last_processed_at: Option<Timestamp>,
    /// When the last nudge for it was due to be sent.
    pub nudged_at: Option<Timestamp>,
    /// Time of its first event.
    pub created_at: Timestamp,
    /// Time of the last change.
    pub updated_at: Timestamp,
}

/// A stored inbound event, a row of `event_logs`. Its payload never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLog {
    /// Id of the event log.
    pub id: EventLogId,
    /// Issue of the event.
    pub issue_id: IssueId,
    /// Source of the event, such as `github`.
    pub source: String,
    /// Type of the event, such as `issue_created`.
    pub event_type: String,
    /// De-duplication key, unique within an integration.
    pub dedup_key: String,
    /// The JSON as received; a store may change whitespace and the order of keys. Values that `jsonb` cannot store are
    /// replaced: NUL and lone surrogates by U+FFFD, numbers outside the range of `f64` by strings; the last value of a
    /// repeated key wins. [`AdminStore::original_payload`](crate::AdminStore::original_payload) returns the original
    /// then.
    pub payload: String,
    /// When it was recorded.
    pub created_at: Timestamp,
    /// When the run that processed it was committed.
    pub processed_at: Option<Timestamp>,
    /// Error of the last failed run that included it.
    pub processing_error: Option<String>,
    /// [`NewEvent::trace`] of its first delivery.
    pub trace: Option<TraceContext>,
}

/// An event to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// Name of an existing integration.
    pub integration: String,
    /// Project id at the provider; empty if the provider has no projects.
    pub external_project_id: String,
    /// Issue id at the provider.
    pub external_issue_id: String,
    /// Source of the event, such as `github`.
    pub source: String,
    /// Type of the event, such as `issue_created`.
    pub event_type: String,
    /// Delivery id of the provider. `None`: a hash of the event is used, so equal events are stored once.
    pub dedup_key: Option<String>,
    /// Valid JSON; see [`EventLog::payload`] for what is stored.
    pub payload: String,
    /// Trace in which the event arrived, for the run that handles it. Not part of the event: a repeated delivery in
    /// another trace is a duplicate.
    pub trace: Option<TraceContext>,
}

impl NewEvent {
    /// Creates an event without project and delivery id, whose source is the integration name.
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
            trace: None,
        }
    }
}

/// Result of recording a [`NewEvent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Issue of the event.
    pub issue_id: IssueId,
    /// The event log; for a duplicate, that of the first delivery.
    pub event_log_id: EventLogId,
    /// Whether the event was already recorded; nothing was changed then.
    pub duplicate: bool,
    /// Whether to nudge: the call queued the issue, or the event is a duplicate that is still pending in a queued
    /// issue. Set on the first event of an issue in a call only.
    pub nudge: bool,
    /// Earliest time of the next claim.
    pub not_before: Option<Timestamp>,
}

/// Debounce window: a run waits while events still arrive, so that a burst becomes one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DebounceWindow {
    /// A run waits until no event has arrived for this long. Default: zero, no debounce.
    pub quiet_for: Duration,
    /// Maximum wait, counted from the oldest pending event that is in no run. Default: zero.
    pub max_wait: Duration,
    /// The window ends early at this number of pending events; set it to the maximum of a run. Checked only while no
    /// run is in progress, because the events of a run count as pending. Default: zero, no limit.
    pub events_max: usize,
}
