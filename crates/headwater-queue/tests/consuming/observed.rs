//! What can be seen of handling from outside: the values of metrics, and spans that belong to the producer's trace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, NewMessage, ProducerConfig, metrics};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::counted::{counted, gauged, start_counting, timed};
use crate::env::{Env, GROUP, eventually};

async fn metrics_have_the_values_they_should(env: Env) -> Result<()> {
    start_counting();
    env.create(3).await?;
    let took = Duration::from_millis(20);
    let handler = move |_: Message| tokio::time::sleep(took);
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    eventually("all partitions are owned", async || Ok(subscription.stats().partitions == 3))
        .await?;
    let producer = env.queue.producer(ProducerConfig::default())?;
    let started = std::time::Instant::now();
    for n in 0..12 {
        let message = NewMessage::new(n.to_string()).to_partition(n % 3);
        producer.send(&env.topic, message).await?;
    }
    eventually("all are acknowledged", async || Ok(counted(metrics::ACKS, &env.topic, "") == 12))
        .await?;
    let whole = started.elapsed().as_secs_f64();
    assert_eq!(counted(metrics::CONSUMED, &env.topic, "done"), 12);

    let handled = timed(metrics::HANDLE_LATENCY, &env.topic, "done");
    assert_eq!(handled.len(), 12);
    assert!(handled.iter().all(|took| (0.02..=whole).contains(took)), "{handled:?}");
    let from_end_to_end = timed(metrics::END_TO_END_LATENCY, &env.topic, "");
    assert_eq!(from_end_to_end.len(), 12);
    // Its beginning is written in whole milliseconds.
    let possible = 0.018..=whole + 0.002;
    assert!(from_end_to_end.iter().all(|took| possible.contains(took)), "{from_end_to_end:?}");
    let acknowledged = timed(metrics::ACK_LATENCY, &env.topic, "");
    assert!((1..=12).contains(&acknowledged.len()), "several at once: {acknowledged:?}");
    assert!(acknowledged.iter().all(|took| (0.0..=whole).contains(took)), "{acknowledged:?}");
    assert!(acknowledged.iter().any(|took| *took > 0.0));

    assert_eq!(gauged(metrics::PARTITIONS_OWNED, &env.topic), Some(3.0));
    assert_eq!(gauged(metrics::IN_FLIGHT, &env.topic), Some(0.0));
    subscription.stop().await;
    assert_eq!(gauged(metrics::PARTITIONS_OWNED, &env.topic), Some(0.0));
    Ok(())
}

on_every_backend!(metrics_have_the_values_they_should);

async fn handling_belongs_to_the_trace_of_the_send(env: Env) -> Result<()> {
    let spans = Spans::default();
    let _listening = tracing::subscriber::set_default(spans.clone());
    let producer = env.queue.producer(ProducerConfig::default())?;
    let (follow_up, next) = (producer.clone(), format!("{}-next", env.topic));
    let (done, mut is_done) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |_: Message| {
        let (producer, next, done) = (follow_up.clone(), next.clone(), done.clone());
        async move {
            let sent = producer.send(&next, NewMessage::new("next")).await;
            let _ = done.send(sent.is_ok());
        }
    };
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    producer.send(&env.topic, NewMessage::new("first")).await?;
    assert_eq!(is_done.recv().await, Some(true));
    subscription.stop().await;

    let (sends, handles) = (spans.named("send"), spans.named("handle"));
    assert_eq!((sends.len(), handles.len()), (2, 1));
    let (first, handle, next) = (&sends[0], &handles[0], &sends[1]);
    assert_eq!(handle["trace_id"], first["trace_id"]);
    assert_eq!(handle["parent_span_id"], first["span_id"]);
    assert_eq!((handle["topic"].as_str(), handle["group"].as_str()), (env.topic.as_str(), GROUP));
    assert_eq!(handle["attempt"], "1");
    assert_eq!(next["trace_id"], first["trace_id"], "what a handler sends goes on with the trace");
    assert_eq!(next["parent_span_id"], handle["span_id"]);
    Ok(())
}

// In one thread: whoever listens, listens to that.
mod in_one_thread {
    use anyhow::Result;

    use crate::env::Env;

    #[tokio::test]
    async fn handling_belongs_to_the_trace_of_the_send_embedded() -> Result<()> {
        super::handling_belongs_to_the_trace_of_the_send(Env::embedded().await?).await
    }

    #[tokio::test]
    async fn handling_belongs_to_the_trace_of_the_send_on_redis() -> Result<()> {
        super::handling_belongs_to_the_trace_of_the_send(Env::redis().await?).await
    }
}

type Fields = BTreeMap<String, String>;

/// Remembers spans and their fields.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<(&'static str, Fields)>>>);

impl Spans {
    fn named(&self, name: &str) -> Vec<Fields> {
        let spans = self.0.lock().expect("nobody panicked");
        let named = spans.iter().filter(|(known, _)| *known == name);
        named.map(|(_, fields)| fields.clone()).collect()
    }

    fn change(&self, id: &Id, change: impl FnOnce(&mut Fields)) {
        let mut spans = self.0.lock().expect("nobody panicked");
        let index = usize::try_from(id.into_u64()).context("ids are small").expect("a span");
        change(&mut spans[index - 1].1);
    }
}

struct Into<'a>(&'a mut Fields);

impl Visit for Into<'_> {
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
        span.record(&mut Into(&mut fields));
        let mut spans = self.0.lock().expect("nobody panicked");
        spans.push((span.metadata().name(), fields));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.change(span, |fields| values.record(&mut Into(fields)));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
