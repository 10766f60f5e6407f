//! Trace context of events.
//!
//! Upstream: publishers. Downstream: the entry fields `trace_id` and `span_id`, and the task-local context of
//! handlers: an event published by a handler joins the trace of the event being handled.

use headwater_queue::TraceContext;

tokio::task_local! {
    static CURRENT: TraceContext;
}

/// The trace context of the event or message being handled by the current task.
pub fn current_trace() -> Option<TraceContext> {
    CURRENT.try_with(|context| *context).ok().or_else(TraceContext::current)
}

/// A new span in the current trace, or the root of a new trace.
pub(crate) fn next_span() -> TraceContext {
    current_trace().map_or_else(TraceContext::root, TraceContext::child)
}

/// Runs `work` in this trace context.
pub(crate) async fn within<F: Future>(context: Option<TraceContext>, work: F) -> F::Output {
    match context {
        Some(context) => CURRENT.scope(context, work).await,
        None => work.await,
    }
}

/// Trace id and span id in hexadecimal.
pub(crate) fn to_ids(context: TraceContext) -> (String, String) {
    (format!("{:032x}", context.trace_id()), format!("{:016x}", context.span_id()))
}

/// Parses the two ids of an entry; `None` if they are invalid by W3C Trace Context.
pub(crate) fn from_ids(trace_id: &str, span_id: &str) -> Option<TraceContext> {
    TraceContext::parse(&format!("00-{trace_id}-{span_id}-01"))
}
