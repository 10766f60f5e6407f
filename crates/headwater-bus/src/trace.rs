//! Which trace an event belongs to.
//!
//! Upstream: whoever publishes. Downstream: the fields `trace_id` and `span_id` of an entry, and the context in which
//! handlers run: what a handler publishes belongs to the trace of the event it handles.

use headwater_queue::TraceContext;

tokio::task_local! {
    static CURRENT: TraceContext;
}

/// The trace of the code that runs now: that of the event or message being handled.
pub fn current_trace() -> Option<TraceContext> {
    CURRENT.try_with(|context| *context).ok().or_else(TraceContext::current)
}

/// A new span in the current trace, or the beginning of a new one.
pub(crate) fn next_span() -> TraceContext {
    current_trace().map_or_else(TraceContext::root, TraceContext::child)
}

/// Runs `work` so that what it publishes belongs to the trace.
pub(crate) async fn within<F: Future>(context: Option<TraceContext>, work: F) -> F::Output {
    match context {
        Some(context) => CURRENT.scope(context, work).await,
        None => work.await,
    }
}

/// The two ids as an entry has them.
pub(crate) fn to_ids(context: TraceContext) -> (String, String) {
    (format!("{:032x}", context.trace_id()), format!("{:016x}", context.span_id()))
}

/// From the two ids of an entry; `None` if they are not what W3C Trace Context allows.
pub(crate) fn from_ids(trace_id: &str, span_id: &str) -> Option<TraceContext> {
    TraceContext::parse(&format!("00-{trace_id}-{span_id}-01"))
}
