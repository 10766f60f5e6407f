//! Traces across handlers that publish.

use std::sync::Arc;

use headwater_bus::{
    EventBus, EventBusExt, OutgoingEvent, ReceivedEvent, StreamedBus, SubscribeOptions,
    TraceContext, current_trace,
};
use headwater_conformance::bus::{Announced, HandlerLog, Noted};

use crate::backends::telemetry::{Span, Spans};
use crate::fixture::{Fixture, entries};

on_streams!(
    a_trace_continues_across_processes_and_groups,
    publish_and_handle_spans_have_the_ids_of_the_event,
);

/// Publishes an event for each one it handles.
async fn relay(bus: &Arc<StreamedBus>, subscribe: SubscribeOptions, number: u64, log: &HandlerLog) {
    let (weak, log) = (Arc::downgrade(bus), log.clone());
    let announce = move |event: ReceivedEvent<Noted>| {
        let (bus, log) = (weak.upgrade(), log.clone());
        async move {
            assert_eq!(current_trace(), event.envelope.trace());
            bus.unwrap().publish(Announced { number }).await.unwrap().into_result().unwrap();
            log.add(number);
        }
    };
    bus.subscribe::<Noted>(subscribe, announce).await.unwrap();
}

async fn a_trace_continues_across_processes_and_groups(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, Arc::new(fixture.bus().await));
    let log = HandlerLog::default();
    relay(&bob, SubscribeOptions::live(), 1, &log).await;
    relay(&bob, SubscribeOptions::durable("all"), 2, &log).await;
    let root = TraceContext::root();
    let event = OutgoingEvent::new(fixture.noted(0)).unwrap().with_trace(root);
    ada.publish_outgoing(event).await.unwrap().into_result().unwrap();
    log.settles_at(2).await;

    // All entries share one trace, each with its own span: ada's event, and the two that bob published for it.
    let backend = fixture.connect().await;
    let control = headwater_stream::StreamName::new(format!("{}:control:tests", fixture.prefix));
    let mut all = entries(&*backend, &fixture.stream()).await;
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

async fn publish_and_handle_spans_have_the_ids_of_the_event(fixture: Fixture) {
    let spans = Spans::of_all();
    let bus = fixture.bus().await;
    let log = HandlerLog::default();
    for subscribe in [SubscribeOptions::live(), SubscribeOptions::durable("all")] {
        let seen = log.clone();
        let note = move |event: ReceivedEvent<Noted>| {
            seen.add(event.number);
            async {}
        };
        bus.subscribe::<Noted>(subscribe, note).await.unwrap();
    }
    let root = TraceContext::root();
    let event = OutgoingEvent::new(fixture.noted(0)).unwrap().with_trace(root);
    let result = bus.publish_outgoing(event).await.unwrap();
    log.settles_at(2).await;

    let event_id = result.event_id.to_string();
    let span = |name: &str, others: [(&str, &str); 2]| -> Span {
        let trace_id = format!("{:032x}", root.trace_id());
        let ids =
            [("event_type", "conformance.Noted"), ("event_id", &event_id), ("trace_id", &trace_id)];
        let fields = ids.into_iter().chain(others);
        (name.to_owned(), fields.map(|(name, value)| (name.into(), value.into())).collect())
    };
    let span_id = format!("{:016x}", root.span_id());
    let mut all = spans.all();
    all.retain(|(_, fields)| fields.get("event_id") == Some(&event_id));
    all.sort();
    let handled = |kind| span("handle", [("parent_span_id", &span_id), ("kind", kind)]);
    let published = span("publish", [("span_id", &span_id), ("events", "1")]);
    assert_eq!(all, [handled("durable"), handled("live"), published]);
    bus.close().await.unwrap();
}
