#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod error;
mod issue;
pub mod limits;

mod claim;
mod delivery;
mod retry;

mod json;

#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    allow(dead_code, reason = "only the stores use all of it")
)]
mod check;
#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    allow(dead_code, reason = "only the stores use all of it")
)]
mod dedup;

pub mod state;

mod operator;
mod transaction;

mod migrations;
mod store;

#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod clock_watch;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod deadline;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod prepared;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod queries;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod rows;

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

mod connect;

mod chance;
mod origins;
mod steps;

pub mod metrics;
mod nudge;

mod confirmations;
mod inbox;
mod release;

mod agenda;
mod batcher;
mod held;

mod handler;
mod worker;

mod outbox;
mod sweeper;

mod audit;
mod why;

#[cfg(feature = "conformance")]
pub mod conformance;

pub use audit::audit;
pub use claim::{
    AfterFailure, Beat, Claim, ClaimOptions, ClaimedIssue, Completed, Completion, Failed, Failure,
    GiveBack, GiveBackReason, GivenBack, Nudge, SweepOptions, Swept,
};
pub use confirmations::Confirmations;
pub use connect::{StoreOptions, connect};
pub use dedup::dedup_key;
pub use delivery::{
    Delivery, DeliveryTarget, KeyedOutbox, NewOutbox, OutboxKind, OutboxRow, OutboxSettled,
    OutboxSettlement, OutboxTake, OutboxWritten, TargetState,
};
pub use error::{IssueError, Result, SharedError};
pub use handler::{HandlerError, IssueHandler, Resolution, Run};
pub use headwater_queue::TraceContext;
pub use inbox::{Inbox, InboxConfig};
pub use issue::{
    ClaimEpoch, DeadLetterId, EventLog, EventLogId, IntegrationId, Issue, IssueId, NewEvent,
    OutboxId, ProcessingStatus, Quiet, Recorded,
};
pub use json::sanitize as sanitize_json;
pub use migrations::Migration;
pub use nudge::{GROUP, Nudger, STREAM};
pub use operator::{
    Audit, Backlog, DeadLetter, DeadOutbox, Discrepancy, EventLogFilter, Integration, IssueFilter,
    Operator, Released, Retried, WhyFacts, WorkerInfo,
};
pub use origins::Origins;
pub use outbox::{Deliver, DeliverError, Outbox, OutboxConfig};
pub use release::{release, release_all, retry};
pub use retry::RetryPolicy;
pub use steps::{NoSteps, Step, Steps};
pub use store::Store;
pub use sweeper::{Sweeper, SweeperConfig};
pub use transaction::{Connection, ReadConnection, Transaction};
pub use why::{Reason, Why, why};
pub use worker::{OnNewEvent, Worker, WorkerConfig};
