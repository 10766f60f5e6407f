#![doc = include_str!("../README.md")]

// In the order in which an event passes them: each module uses only those above it. (Errors name things, and names
// are checked with errors: those two know each other.)
mod background;
mod error;
pub mod limits;
pub mod metrics;
mod name;
mod trace;

mod event;
mod registry;

mod builtin;
mod keys;

mod journal;

mod breaker;
mod handler;

mod bus;
mod durable;
mod live;

mod local;

mod parked;
mod spool;
mod streamed;

mod fold;
mod session;

mod main_loop;

#[cfg(feature = "conformance")]
pub mod conformance;

pub use breaker::{Breaker, BreakerConfig, BreakerState, Permit};
pub use builtin::{
    Budget, MainLoopCompleted, MainLoopFailed, MainLoopRequest, PromptExecuted, PromptRendered,
    RequestFailure, ToolInvoked, ToolResult, Usage,
};
pub use bus::{
    EventBus, EventBusExt, GroupHealth, Health, PublishResult, SpoolHealth, Stored, StreamHealth,
    Subscribe, SubscriptionKind,
};
pub use error::{BusError, FailureKind, HandlerFailure, Misfit, Result, SpoolError};
pub use event::{Envelope, Event, Outgoing, Received, Scope};
pub use fold::{AllEvents, Fold, Folds, SessionEvent};
pub use handler::{EventHandler, Handlers};
pub use headwater_queue::{Backoff, Outcome, RetryPolicy, TraceContext};
pub use journal::Journal;
pub use local::{LocalBus, LocalDeadLetter};
pub use main_loop::{
    Cancelled, Completed, ExecuteError, FailedRequest, Loan, MainLoop, MainLoopClient,
    MainLoopClientConfig, MainLoopConfig, MainLoopError, MainLoopWorker, Meter, OverBudget,
    ReplyConfig, Run, Submit,
};
pub use name::{EventId, Namespace, RequestId, Requester, SessionId, SubscriptionId};
pub use parked::ParkedEntry;
pub use registry::Registry;
pub use session::{
    Compacted, Export, Import, Missing, MissingReason, Parent, Recovery, Session, SessionError,
    SessionInfo, SessionState, Sessions, SessionsConfig, Stage, Swept, UnreadableEntries, Until,
    Upkeep,
};
pub use spool::SpoolConfig;
pub use streamed::{FailurePolicy, RejectedEvent, Retried, StreamedBus, StreamedBusConfig};
pub use trace::current_trace;
