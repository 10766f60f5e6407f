//! Which trace an event came with, on its way from whoever recorded it to the process that handles it.
//!
//! Upstream: a process that collects traces gives its [`Origins`] to the nudger. Downstream: `inbox` and `nudge` ask whose trace
//! it is, a nudge carries it in its headers, and `worker` tells the process that has read the nudge.
//! Promises: nothing hangs on it, and where nobody collects traces it costs nothing. A nudge that is lost takes its trace with
//! it: the run begins one of its own.

use std::fmt;

use headwater_queue::TraceContext;

use crate::issue::EventLogId;

/// Knows traces. Ids of event logs tell which event is meant, in every process.
pub trait Origins: fmt::Debug + Send + Sync {
    /// The trace of the code that runs now, if there is one.
    fn current(&self) -> Option<TraceContext>;

    /// An event came with this trace; whoever handles it here may go on with it. May be told more than once.
    fn came_with(&self, event_log_id: EventLogId, trace: TraceContext);
}

/// Nobody collects traces.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NoOrigins;

impl Origins for NoOrigins {
    fn current(&self) -> Option<TraceContext> {
        None
    }

    fn came_with(&self, _: EventLogId, _: TraceContext) {}
}
