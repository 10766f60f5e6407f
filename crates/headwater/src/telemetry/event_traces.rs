//! Remembers the trace of each event, so that its run continues it.
//!
//! Upstream: nudges carry traces between processes; `inbound/webhooks` records traces of events without a nudge.
//! Downstream: `server/run.rs` reads them before a run. Guarantees: memory is bounded; without a collector nothing is
//! stored. A run much later, or one found by the sweeper of another process, starts a new trace.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use headwater_issue::{EventLog, EventLogId};
use headwater_queue::TraceContext;
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, TraceContextExt, TraceFlags, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Maximum number of remembered events.
const EVENTS_MAX: usize = 10_000;

/// One table for the process, as there is one collector.
static EVENT_TRACES: Mutex<Option<EventTraces>> = Mutex::new(None);

#[derive(Default)]
struct EventTraces {
    by_event: HashMap<EventLogId, SpanContext>,
    /// Oldest first.
    order: VecDeque<EventLogId>,
}

impl EventTraces {
    fn record(&mut self, event: EventLogId, trace: SpanContext) {
        if self.by_event.insert(event, trace).is_none() {
            self.order.push_back(event);
        }
        if self.order.len() > EVENTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_event.remove(&oldest);
        }
    }
}

fn record(event: EventLogId, trace: SpanContext) {
    let mut traces = EVENT_TRACES.lock().unwrap_or_else(PoisonError::into_inner);
    traces.get_or_insert_default().record(event, trace);
}

fn current_span_context() -> Option<SpanContext> {
    let trace = Span::current().context().span().span_context().clone();
    trace.is_valid().then_some(trace)
}

/// Remembers the current request's trace for an event.
pub(crate) fn record_event_trace(event: EventLogId) {
    if let Some(trace) = current_span_context() {
        record(event, trace);
    }
}

/// Passes the collector's traces to nudges.
#[derive(Debug)]
pub(crate) struct OtelTraces;

impl headwater_issue::TracePropagator for OtelTraces {
    fn current(&self) -> Option<TraceContext> {
        let trace = current_span_context()?;
        let trace_id = u128::from_be_bytes(trace.trace_id().to_bytes());
        let span_id = u64::from_be_bytes(trace.span_id().to_bytes());
        TraceContext::new(trace_id, span_id, trace.is_sampled())
    }

    fn record_parent(&self, event: EventLogId, trace: TraceContext) {
        let flags = if trace.is_sampled() { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let (trace_id, span_id) = (trace.trace_id().into(), trace.span_id().into());
        record(event, SpanContext::new(trace_id, span_id, flags, true, TraceState::default()));
    }
}

/// Makes a run's span part of the trace of its oldest known event, and links the traces of the others.
pub(crate) fn continue_event_traces(span: &Span, events: &[EventLog]) {
    let found: Vec<SpanContext> = {
        let traces = EVENT_TRACES.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(traces) = traces.as_ref() else { return };
        events.iter().filter_map(|event| traces.by_event.get(&event.id).cloned()).collect()
    };
    let Some((first, others)) = found.split_first() else { return };
    // Fails only without a collector.
    let _ = span.set_parent(Context::new().with_remote_span_context(first.clone()));
    for other in others {
        span.add_link(other.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_entries_are_evicted() {
        let mut traces = EventTraces::default();
        for event in 0..EVENTS_MAX as i64 + 3 {
            traces.record(EventLogId(event), SpanContext::empty_context());
            traces.record(EventLogId(event), SpanContext::empty_context());
        }
        assert_eq!((traces.by_event.len(), traces.order.len()), (EVENTS_MAX, EVENTS_MAX));
        assert!(!traces.by_event.contains_key(&EventLogId(2)));
        assert!(traces.by_event.contains_key(&EventLogId(3)));
    }
}
