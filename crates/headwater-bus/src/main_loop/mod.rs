//! The main loop: requests are carried out by whichever process is free, each once in effect, and replied to.
//!
//! Upstream: applications implement [`MainLoop`], and ask through a [`MainLoopClient`]. Downstream: the bus, whose
//! control stream the requests lie in; its sessions; streams of replies beside them.
//!
//! The way of a request: a `client` publishes it; one `worker` of the group gets it as a `task`, and `carry` takes it
//! from there: `running` locks it, `run` tries it, `replies` keeps what came of it and copies it to the control
//! stream. Then the request is acknowledged. The client hears of the reply by `waiting`.
//! Promises: one reply per request, the first, for everybody; no request is acknowledged before it has one. The same on
//! every bus: on a local one, all of it happens in one process.
//! Not here: what a request means; what its run spent before its process died.

// In dependency order: each module uses only those above it.
mod budget;

mod config;
mod error;

mod reply;

mod parsed_request;
mod reply_store;
mod request_context;

mod request_lock;

mod executor;
mod reply_waiters;

mod client;
mod worker;

pub use self::budget::{BudgetLease, Meter, OverBudget};
pub use self::client::{CancelOutcome, MainLoopClient, Submission};
pub use self::config::{MainLoopClientConfig, MainLoopConfig, ReplyConfig};
pub use self::error::{ExecuteError, FailedRequest, MainLoopError};
pub use self::reply::CompletedRequest;
pub use self::request_context::{MainLoop, RequestContext};
pub use self::worker::MainLoopWorker;
