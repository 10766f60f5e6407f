//! Replay plans: replay many dead letters a few at a time, and stop when they fail again.
//!
//! Upstream: `api/plans.rs` creates plans and changes their state; `server/run.rs` starts the runner in every process.
//! Downstream: the tables `replay_plans` and `replay_plan_letters`, and the dead letters of `headwater-queue`.
//! Flow: `selection.rs` chooses and counts the dead letters -> `rows.rs` stores the plan -> `runner.rs` takes its lease,
//! sends and observes -> `progress.rs`, a pure state machine, decides what is next. `cause.rs` reduces an error message to
//! its cause, `explain.rs` says in one sentence how a plan is doing.
//! Guarantees: see decision 91. A letter is recorded before it is sent and counted in the transaction that removes its
//! record, so a process may die at any point; every change is fenced by the epoch of the lease.

pub(crate) mod cause;
pub(crate) mod explain;
mod progress;
pub(crate) mod rows;
pub(crate) mod runner;
pub(crate) mod selection;

pub(crate) use progress::{PlanProgress, STAGES};

/// Maximum plans that are running or paused.
pub(crate) const ACTIVE_MAX: i64 = 5;

/// Maximum dead letters that a plan looks at; the oldest are taken.
pub(crate) const SCANNED_MAX: usize = 100_000;

/// Maximum topics of a plan.
pub(crate) const TOPICS_MAX: usize = 50;

/// Dead letters that were replayed this often are refused, unless the request says otherwise.
pub(crate) const REPLAYS_MAX_DEFAULT: u32 = 3;
