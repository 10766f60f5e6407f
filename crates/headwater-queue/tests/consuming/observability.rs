//! Metrics and spans of handled messages.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, NewMessage, Outcome, ProducerConfig, metrics};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::fixture::{Fixture, GROUP, eventually};
use crate::metric_recorder::{
    counter_value, gauge_value, histogram_values, install_metric_recorder, label_values,
};
use crate::recording_handler::recording_handler;

async fn metric_labels_are_the_same_after_each_start(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    for _ in 0..3 {
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        let queue = fixture.second_queue().await?;
        let config = ConsumerConfig::default();
        let subscription = queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
        fixture.send(0, None, "message").await?;
        seen.next().await?;
        subscription.stop().await;
    }
    let consumers = label_values("consumer", &fixture.topic);
    assert_eq!(consumers.len(), 1, "{consumers:?}");
    assert!(!consumers.iter().any(|name| name.contains(&std::process::id().to_string())));
    Ok(())
}

async fn metrics_have_the_expected_values(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.create(3).await?;
    let took = Duration::from_millis(20);
    let handler = move |_: Message| tokio::time::sleep(took);
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    eventually("all partitions are owned", async || Ok(subscription.stats().partitions == 3))
        .await?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let started = std::time::Instant::now();
    for n in 0..12 {
        let message = NewMessage::new(n.to_string()).to_partition(n % 3);
        producer.send(&fixture.topic, message).await?;
    }
    eventually("all messages are acknowledged", async || {
        Ok(counter_value(metrics::ACKS, &fixture.topic, "") == 12)
    })
    .await?;
    let whole = started.elapsed().as_secs_f64();
    assert_eq!(counter_value(metrics::CONSUMED, &fixture.topic, "done"), 12);

    let handled = histogram_values(metrics::HANDLE_LATENCY, &fixture.topic, "done");
    assert_eq!(handled.len(), 12);
    assert!(handled.iter().all(|took| (0.02..=whole).contains(took)), "{handled:?}");
    let from_end_to_end = histogram_values(metrics::END_TO_END_LATENCY, &fixture.topic, "");
    assert_eq!(from_end_to_end.len(), 12);
    // The timestamp of a message has millisecond precision.
    let possible = 0.018..=whole + 0.002;
    assert!(from_end_to_end.iter().all(|took| possible.contains(took)), "{from_end_to_end:?}");
    let acknowledged = histogram_values(metrics::ACK_LATENCY, &fixture.topic, "");
    assert!(
        (1..=12).contains(&acknowledged.len()),
        "acknowledgements are batched: {acknowledged:?}"
    );
    assert!(acknowledged.iter().all(|took| (0.0..=whole).contains(took)), "{acknowledged:?}");
    assert!(acknowledged.iter().any(|took| *took > 0.0));

    assert_eq!(gauge_value(metrics::PARTITIONS_OWNED, &fixture.topic), Some(3.0));
    assert_eq!(gauge_value(metrics::IN_FLIGHT, &fixture.topic), Some(0.0));
    subscription.stop().await;
    assert_eq!(gauge_value(metrics::PARTITIONS_OWNED, &fixture.topic), Some(0.0));
    Ok(())
}

on_every_backend!(metrics_have_the_expected_values, metric_labels_are_the_same_after_each_start);

async fn the_handler_span_belongs_to_the_trace_of_the_send(fixture: Fixture) -> Result<()> {
    let spans = Spans::default();
    let _listening = tracing::subscriber::set_default(spans.clone());
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let (follow_up, next) = (producer.clone(), format!("{}-next", fixture.topic));
    let (done, mut is_done) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |_: Message| {
        let (producer, next, done) = (follow_up.clone(), next.clone(), done.clone());
        async move {
            let sent = producer.send(&next, NewMessage::new("next")).await;
            let _ = done.send(sent.is_ok());
        }
    };
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    producer.send(&fixture.topic, NewMessage::new("first")).await?;
    assert_eq!(is_done.recv().await, Some(true));
    subscription.stop().await;

    let (sends, handles) = (spans.named("send"), spans.named("handle"));
    assert_eq!((sends.len(), handles.len()), (2, 1));
    let (first, handle, next) = (&sends[0], &handles[0], &sends[1]);
    assert_eq!(handle["trace_id"], first["trace_id"]);
    assert_eq!(handle["parent_span_id"], first["span_id"]);
    assert_eq!(
        (handle["topic"].as_str(), handle["group"].as_str()),
        (fixture.topic.as_str(), GROUP)
    );
    assert_eq!(handle["attempt"], "1");
    assert_eq!(next["trace_id"], first["trace_id"], "a send in a handler continues the trace");
    assert_eq!(next["parent_span_id"], handle["span_id"]);
    Ok(())
}

// Single-threaded: the subscriber is set for the current thread.
mod single_threaded {
    use anyhow::Result;

    use crate::fixture::Fixture;

    #[tokio::test]
    async fn the_handler_span_belongs_to_the_trace_of_the_send_embedded() -> Result<()> {
        super::the_handler_span_belongs_to_the_trace_of_the_send(Fixture::embedded().await?).await
    }

    #[tokio::test]
    async fn the_handler_span_belongs_to_the_trace_of_the_send_on_redis() -> Result<()> {
        super::the_handler_span_belongs_to_the_trace_of_the_send(Fixture::redis().await?).await
    }
}

type Fields = BTreeMap<String, String>;

/// Records spans and their fields.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<(&'static str, Fields)>>>);

impl Spans {
    fn named(&self, name: &str) -> Vec<Fields> {
        let spans = self.0.lock().expect("no test panicked while holding it");
        let named = spans.iter().filter(|(known, _)| *known == name);
        named.map(|(_, fields)| fields.clone()).collect()
    }

    fn change(&self, id: &Id, change: impl FnOnce(&mut Fields)) {
        let mut spans = self.0.lock().expect("no test panicked while holding it");
        let index = usize::try_from(id.into_u64()).context("ids are small").expect("a span");
        change(&mut spans[index - 1].1);
    }
}

struct FieldVisitor<'a>(&'a mut Fields);

impl Visit for FieldVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("headwater_queue") && metadata.is_span()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields::new();
        span.record(&mut FieldVisitor(&mut fields));
        let mut spans = self.0.lock().expect("no test panicked while holding it");
        spans.push((span.metadata().name(), fields));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.change(span, |fields| values.record(&mut FieldVisitor(fields)));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
