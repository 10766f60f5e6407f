//! Which trace an event came with, so that its run goes on with that trace.
//!
//! Upstream: nudges bring it, from this process or another; `webhooks` notes it for events that nobody is nudged for.
//! Downstream: `run` asks before it handles an issue.
//! Promises: bounded; without a collector nothing is kept. A run long after, or one that the sweep brought to another process,
//! begins a trace of its own: traces are for people who look, and no truth hangs on them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use headwater_issue::{EventLog, EventLogId};
use headwater_queue::TraceContext;
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, TraceContextExt, TraceFlags, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Events that are remembered at once.
const EVENTS_MAX: usize = 10_000;

/// One list for the process, as there is one collector.
static ORIGINS: Mutex<Option<Origins>> = Mutex::new(None);

#[derive(Default)]
struct Origins {
    by_event: HashMap<EventLogId, SpanContext>,
    /// Oldest first.
    order: VecDeque<EventLogId>,
}

impl Origins {
    fn note(&mut self, event: EventLogId, origin: SpanContext) {
        if self.by_event.insert(event, origin).is_none() {
            self.order.push_back(event);
        }
        if self.order.len() > EVENTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_event.remove(&oldest);
        }
    }
}

fn note(event: EventLogId, origin: SpanContext) {
    let mut origins = ORIGINS.lock().unwrap_or_else(PoisonError::into_inner);
    origins.get_or_insert_default().note(event, origin);
}

fn current() -> Option<SpanContext> {
    let origin = Span::current().context().span().span_context().clone();
    origin.is_valid().then_some(origin)
}

/// Remembers that an event came with the request that is being answered.
pub(crate) fn note_origin(event: EventLogId) {
    if let Some(origin) = current() {
        note(event, origin);
    }
}

/// The traces of the collector, for nudges that carry them from process to process.
#[derive(Debug)]
pub(crate) struct Collected;

impl headwater_issue::Origins for Collected {
    fn current(&self) -> Option<TraceContext> {
        let origin = current()?;
        let trace_id = u128::from_be_bytes(origin.trace_id().to_bytes());
        let span_id = u64::from_be_bytes(origin.span_id().to_bytes());
        TraceContext::new(trace_id, span_id, origin.is_sampled())
    }

    fn came_with(&self, event: EventLogId, trace: TraceContext) {
        let flags = if trace.is_sampled() { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let (trace_id, span_id) = (trace.trace_id().into(), trace.span_id().into());
        note(event, SpanContext::new(trace_id, span_id, flags, true, TraceState::default()));
    }
}

/// Makes the span of a run part of the trace of its oldest event that is known, and links it with those of the others.
pub(crate) fn continue_origins(span: &Span, events: &[EventLog]) {
    let found: Vec<SpanContext> = {
        let origins = ORIGINS.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(origins) = origins.as_ref() else { return };
        events.iter().filter_map(|event| origins.by_event.get(&event.id).cloned()).collect()
    };
    let Some((first, others)) = found.split_first() else { return };
    // An error means that nobody collects traces.
    let _ = span.set_parent(Context::new().with_remote_span_context(first.clone()));
    for other in others {
        span.add_link(other.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten() {
        let mut origins = Origins::default();
        for event in 0..EVENTS_MAX as i64 + 3 {
            origins.note(EventLogId(event), SpanContext::empty_context());
            origins.note(EventLogId(event), SpanContext::empty_context());
        }
        assert_eq!((origins.by_event.len(), origins.order.len()), (EVENTS_MAX, EVENTS_MAX));
        assert!(!origins.by_event.contains_key(&EventLogId(2)));
        assert!(origins.by_event.contains_key(&EventLogId(3)));
    }
}
