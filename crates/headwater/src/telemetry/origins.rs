//! Which trace an event came with, so that its run goes on with that trace.
//!
//! Upstream: `webhooks` notes it for an event that was stored. Downstream: `run` asks before it handles an issue.
//! Promises: bounded; without a collector nothing is kept. A run in another process, or long after, begins a trace of its own:
//! traces are for people who look, and no truth hangs on them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use headwater_issue::{EventLog, EventLogId};
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, TraceContextExt};
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

/// Remembers that an event came with the request that is being answered.
pub(crate) fn note_origin(event: EventLogId) {
    let origin = Span::current().context().span().span_context().clone();
    if origin.is_valid() {
        let mut origins = ORIGINS.lock().unwrap_or_else(PoisonError::into_inner);
        origins.get_or_insert_default().note(event, origin);
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
