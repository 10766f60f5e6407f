#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it, except that `outbox::types` is used by the stores.
mod error;
mod issue;
pub mod limits;

mod claim;
mod retry_policy;

mod json;

#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    allow(dead_code, reason = "only the stores use all of it")
)]
mod dedup;
#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    allow(dead_code, reason = "only the stores use all of it")
)]
mod validate;

pub mod state;

mod admin;
mod transaction;

mod migrations;
mod store;

mod connect;

#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod admin_queries;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod admin_statements;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod clock_watch;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod event_batch;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod row_decoding;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod sql;

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

mod step_observer;

pub mod metrics;
mod nudge;
mod nudge_handler;

mod commit_verifier;
mod inbox;
mod operator_actions;

mod batcher;
mod claim_registry;
mod local_queue;

mod config;
mod handler;
mod lapsed_claims;
mod worker;
mod worker_heartbeat;

mod outbox;
mod sweeper;

mod consistency_check;
mod explain;
mod explain_outbox;

#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod history;

pub use admin::{
    AdminStore, Backlog, ConsistencyReport, DeadOutboxRow, Discrepancy, EventLogFilter,
    IntegrationInfo, IssueDeadLetter, IssueFacts, IssueFilter, IssueRetried, OutboxFacts,
    OutboxFilter, OutboxStatus, QuarantineCleared, UndeliveredRow, WorkerInfo,
};
pub use claim::{
    AfterFailure, Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, ClaimedIssue,
    CompletionOutcome, FailureOutcome, IssueRun, Nudge, ReleaseReason, RunCompletion, RunFailure,
    RunResult, SweepOptions, SweepReport,
};
pub use commit_verifier::CommitVerifier;
pub use config::{OnNewEvent, OutboxConfig, WorkerConfig};
pub use connect::{SchemaPolicy, StoreOptions, connect};
pub use consistency_check::{check_consistency, next_page};
pub use dedup::dedup_key;
pub use error::{IssueError, Result, SharedError};
pub use explain::{DiagnosisReason, IssueDiagnosis, explain};
pub use explain_outbox::{OutboxDiagnosis, OutboxReason};
pub use handler::{HandlerError, IssueHandler, Resolution, Run};
pub use headwater_queue::TraceContext;
pub use inbox::{Inbox, InboxConfig};
pub use issue::{
    ClaimEpoch, DeadLetterId, DebounceWindow, EventLog, EventLogId, IntegrationId, Issue, IssueId,
    NewEvent, OutboxId, ProcessingStatus, Recorded,
};
pub use json::sanitize as sanitize_json;
pub use migrations::Migration;
pub use nudge::{GROUP, Nudger, STREAM};
pub use operator_actions::{release, release_all, retry};
pub use outbox::types::{
    DeliveryTarget, KeyedOutboxRow, NewOutboxRow, OutboxDelivery, OutboxKind, OutboxRow,
    OutboxSettled, OutboxSettlement, OutboxTake, OutboxWritten, TargetState,
};
pub use outbox::{Deliver, DeliverError, HOLD_PAUSE, Outbox};
pub use retry_policy::IssueRetryPolicy;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub use sql::{SqlColumn, SqlRow, SqlValue};
pub use step_observer::{NoStepObserver, ProcessingStep, StepObserver};
pub use store::Store;
pub use sweeper::{Sweeper, SweeperConfig};
pub use transaction::{ReadConnection, StoreConnection, Transaction};
pub use worker::Worker;
