//! Propagates the trace context of an event from the process that recorded it to the process that handles it.
//!
//! Upstream: a process that collects traces passes its [`TracePropagator`] to the nudger. Downstream: `inbox` and
//! `nudge` read the current context, a nudge carries it in its headers, and `worker` records it in the receiving
//! process. Best effort: a lost nudge loses its trace context, and the run starts a new trace. Without a propagator it
//! has no cost.

use std::fmt;

use headwater_queue::TraceContext;

use crate::issue::EventLogId;

/// Reads and records trace contexts of events. Event log ids identify events across processes.
pub trait TracePropagator: fmt::Debug + Send + Sync {
    /// The trace context of the running code, if any.
    fn current(&self) -> Option<TraceContext>;

    /// Records the parent trace context of an event, for the run that will handle it. May be called more than once.
    fn record_parent(&self, event_log_id: EventLogId, trace: TraceContext);
}

/// The default propagator, for processes that do not collect traces.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NoTracing;

impl TracePropagator for NoTracing {
    fn current(&self) -> Option<TraceContext> {
        None
    }

    fn record_parent(&self, _: EventLogId, _: TraceContext) {}
}
