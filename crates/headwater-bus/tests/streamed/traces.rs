//! Traces: who published what while handling what.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use headwater_bus::conformance::{Announced, Log, Noted};
use headwater_bus::{
    EventBus, EventBusExt, Outgoing, Received, StreamedBus, Subscribe, TraceContext, current_trace,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata};

use crate::place::{Place, entries};

on_streams!(a_trace_goes_on_over_processes_and_groups);

/// Publishes an event for each one it handles.
async fn relay(bus: &Arc<StreamedBus>, subscribe: Subscribe, number: u64, log: &Log) {
    let (weak, log) = (Arc::downgrade(bus), log.clone());
    let announce = move |event: Received<Noted>| {
        let (bus, log) = (weak.upgrade(), log.clone());
        async move {
            assert_eq!(current_trace(), event.envelope.trace());
            bus.unwrap().publish(Announced { number }).await.unwrap().raise().unwrap();
            log.add(number);
        }
    };
    bus.subscribe::<Noted>(subscribe, announce).await.unwrap();
}

async fn a_trace_goes_on_over_processes_and_groups(place: Place) {
    let (ada, bob) = (place.bus().await, Arc::new(place.bus().await));
    let log = Log::default();
    relay(&bob, Subscribe::live(), 1, &log).await;
    relay(&bob, Subscribe::durable("all"), 2, &log).await;
    let root = TraceContext::root();
    let event = Outgoing::new(place.noted(0)).unwrap().with_trace(root);
    ada.publish_outgoing(event).await.unwrap().raise().unwrap();
    log.settles_at(2).await;

    // All entries are of one trace, each with a span of its own: what ada was doing, and what bob made of it, twice.
    let backend = place.connect().await;
    let control = headwater_stream::StreamName::new(format!("{}:control:tests", place.prefix));
    let mut all = entries(&*backend, &place.stream()).await;
    all.extend(entries(&*backend, &control.unwrap()).await);
    let text = |entry: &headwater_stream::Entry, name: &str| {
        String::from_utf8(entry.fields.get(name).unwrap().to_vec()).unwrap()
    };
    assert_eq!(all.len(), 3);
    for entry in &all {
        assert_eq!(text(entry, "trace_id"), format!("{:032x}", root.trace_id()));
    }
    let mut spans: Vec<String> = all.iter().map(|entry| text(entry, "span_id")).collect();
    assert_eq!(spans[0], format!("{:016x}", root.span_id()));
    spans.sort();
    spans.dedup();
    assert_eq!(spans.len(), 3);
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

/// On one thread, so that the listener of this test hears its buses and no others.
#[tokio::test]
async fn publishing_and_handling_are_spans_with_the_ids_of_the_event() {
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(spans.clone());
    let place = Place::embedded().await;
    let bus = place.bus().await;
    let log = Log::default();
    for subscribe in [Subscribe::live(), Subscribe::durable("all")] {
        let seen = log.clone();
        let note = move |event: Received<Noted>| {
            seen.add(event.number);
            async {}
        };
        bus.subscribe::<Noted>(subscribe, note).await.unwrap();
    }
    let root = TraceContext::root();
    let event = Outgoing::new(place.noted(0)).unwrap().with_trace(root);
    let result = bus.publish_outgoing(event).await.unwrap();
    log.settles_at(2).await;

    let ids = BTreeMap::from([
        ("event_type", "conformance.Noted".to_owned()),
        ("event_id", result.event_id.to_string()),
        ("trace_id", format!("{:032x}", root.trace_id())),
    ]);
    let span_id = format!("{:016x}", root.span_id());
    let mut published = ids.clone();
    published.extend([("span_id", span_id.clone()), ("events", "1".to_owned())]);
    assert_eq!(spans.named("publish"), [published]);
    let handled = |kind: &str| {
        let mut handled = ids.clone();
        handled.extend([("parent_span_id", span_id.clone()), ("kind", kind.to_owned())]);
        handled
    };
    let mut all = spans.named("handle");
    all.retain(|span| span.contains_key("event_type"));
    all.sort();
    assert_eq!(all, [handled("durable"), handled("live")]);
    bus.close().await.unwrap();
}

/// The fields of a span.
type Fields = BTreeMap<&'static str, String>;

/// All spans of this crate that were opened, by name.
#[derive(Clone, Default)]
struct Spans {
    opened: Arc<Mutex<Vec<(&'static str, Fields)>>>,
    next: Arc<AtomicU64>,
}

impl Spans {
    fn named(&self, name: &str) -> Vec<Fields> {
        let opened = self.opened.lock().unwrap();
        opened
            .iter()
            .filter(|(other, _)| *other == name)
            .map(|(_, fields)| fields.clone())
            .collect()
    }
}

impl tracing::Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("headwater_bus")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Reader::default();
        span.record(&mut fields);
        self.opened.lock().unwrap().push((span.metadata().name(), fields.0));
        Id::from_u64(self.next.fetch_add(1, Ordering::SeqCst) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Reader(Fields);

impl Visit for Reader {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}
