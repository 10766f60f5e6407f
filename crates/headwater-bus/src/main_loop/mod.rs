//! The main loop: workers of a namespace compete for requests, execute each with exactly one reply, and reply.
//!
//! Upstream: applications implement [`MainLoop`] and send requests through a [`MainLoopClient`]. Downstream: the
//! control stream of the bus, which contains the requests; its sessions; one reply stream per requester.
//!
//! How a request flows: `client` publishes it; one `worker` of the group receives it and decodes it
//! (`parsed_request`); `executor` acquires its lock (`request_lock`), runs the application's code with a
//! `request_context`, stores the reply in the `reply_store` and copies it to the control stream. Then the request is
//! acknowledged. `reply_waiters` wakes the client.
//! Guarantees: one reply per request, the first, for all callers; no request is acknowledged before it has a reply.
//! Not here: the meaning of a request; resources used by a run whose process crashed.

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
