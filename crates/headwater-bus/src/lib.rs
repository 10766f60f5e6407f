#![doc = include_str!("../README.md")]

// In dependency order, along the path of an event: each module uses only those above it. (`error` and `name` use each
// other: errors contain names, and invalid names are errors.)
mod error;
pub mod limits;
pub mod metrics;
mod name;
mod trace;

mod event;
mod registry;

mod builtin_events;
mod keys;

mod session_backend;

mod breaker;
mod handler;

mod bus;
mod delivery;
mod live;

mod spool;
mod unknown_events;

mod streamed;

mod fold;
mod session;

mod main_loop;

pub use breaker::{Breaker, BreakerConfig, BreakerPermit, BreakerState};
pub use builtin_events::{
    Budget, MainLoopCompleted, MainLoopFailed, MainLoopRequest, PromptExecuted, PromptRendered,
    RequestFailure, RequestUsage, ToolInvoked, ToolResult,
};
pub use bus::{
    BusHealth, EventBus, EventBusExt, GroupHealth, PublishResult, SpoolHealth, StoreOutcome,
    StreamHealth, SubscribeOptions, SubscriptionKind,
};
pub use error::{BusError, DecodeError, FailureKind, HandlerFailure, Result};
pub use event::{Envelope, Event, OutgoingEvent, ReceivedEvent, Scope};
pub use fold::{AllEvents, Fold, Folds, SessionEvent};
pub use handler::{EventHandler, Handlers};
pub use headwater_queue::{Backoff, Outcome, RetryPolicy, TraceContext};
pub use main_loop::{
    BudgetLease, CancelOutcome, CompletedRequest, ExecuteError, FailedRequest, MainLoop,
    MainLoopClient, MainLoopClientConfig, MainLoopConfig, MainLoopError, MainLoopWorker, Meter,
    OverBudget, ReplyConfig, RequestContext, Submission,
};
pub use name::{EventId, Namespace, RequestId, Requester, SessionId, SubscriptionId};
pub use registry::EventRegistry;
pub use session::{
    CompactionReport, Export, Import, MissingEntries, MissingReason, Parent, Recovery, ReplayUntil,
    Session, SessionError, SessionInfo, SessionMaintenanceReport, SessionStage, SessionState,
    SessionSweepReport, Sessions, SessionsConfig, UnreadableEntries,
};
pub use session_backend::SessionBackend;
pub use spool::SpoolConfig;
pub use streamed::{
    FailurePolicy, RejectedEvent, RetryParkedOutcome, StreamedBus, StreamedBusConfig,
};
pub use trace::current_trace;
pub use unknown_events::ParkedEntry;
