//! Metrics and spans of sends.

use crate::setup::on_every_backend;

on_every_backend! { in one thread:
    sends_are_counted_by_topic_partition_and_result
    a_message_carries_the_trace_context_of_its_send_span
    a_traceparent_set_by_the_application_is_kept
}

mod bodies {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use anyhow::{Context, Result};
    use headwater_queue::limits::PAYLOAD_BYTES_MAX;
    use headwater_queue::metrics::PRODUCED;
    use headwater_queue::{NewMessage, Policies, TRACEPARENT, TraceContext};
    use metrics::{
        Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Subscriber};

    use crate::setup::{Setup, text};

    pub(super) async fn sends_are_counted_by_topic_partition_and_result(
        setup: Setup,
    ) -> Result<()> {
        let counts = Counts::default();
        let _counting = metrics::set_default_local_recorder(&counts);
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        let message = |partition| NewMessage::new("p").to_partition(partition);
        setup.producer.send(&setup.topic, message(1)).await?;
        setup.producer.send_batch(&setup.topic, vec![message(1); 4]).await?;
        for _ in 0..3 {
            setup.producer.send(&setup.topic, message(2).with_id("a")).await?;
        }
        setup.producer.send_after(&setup.topic, message(2), Duration::from_secs(60)).await?;
        // An unknown partition, a too large message, and a batch with one.
        let too_large = NewMessage::new(vec![0; PAYLOAD_BYTES_MAX + 1]);
        assert!(setup.producer.send(&setup.topic, message(3)).await.is_err());
        assert!(setup.producer.send(&setup.topic, too_large.clone()).await.is_err());
        let batch = vec![message(1), too_large];
        assert!(setup.producer.send_batch(&setup.topic, batch).await.is_err());
        assert_eq!(setup.entries(1).await?.len(), 5);

        let expected = [
            (("", "refused"), 4),
            (("1", "ok"), 5),
            (("2", "delayed"), 1),
            (("2", "duplicate"), 2),
            (("2", "ok"), 1),
        ];
        let expected = expected.map(|((partition, result), count)| {
            let topic = &setup.topic;
            (format!("{PRODUCED} partition={partition} result={result} topic={topic}"), count)
        });
        assert_eq!(*counts.0.lock().expect("no test panicked"), BTreeMap::from(expected));
        Ok(())
    }

    pub(super) async fn a_message_carries_the_trace_context_of_its_send_span(
        setup: Setup,
    ) -> Result<()> {
        // No span is recorded: no trace context is added.
        setup.producer.send(&setup.topic, NewMessage::new("p")).await?;
        assert_eq!(text(&setup.entries(0).await?[0], "headers"), Some("{}"));

        let spans = Spans::default();
        let _listening = tracing::subscriber::set_default(spans.clone());
        setup.producer.send(&setup.topic, NewMessage::new("p").header("a", "b")).await?;
        let batch = vec![NewMessage::new("p"), NewMessage::new("p")];
        setup.producer.send_batch(&setup.topic, batch).await?;

        let carried: Vec<TraceContext> = setup.entries(0).await?[1..]
            .iter()
            .map(|entry| {
                let headers = text(entry, "headers").context("no headers")?;
                let headers: BTreeMap<String, String> = serde_json::from_str(headers)?;
                TraceContext::parse(&headers[TRACEPARENT]).context("no trace")
            })
            .collect::<Result<_>>()?;
        let sends = spans.named("send");
        assert_eq!((sends.len(), carried.len()), (2, 3), "one span per call");
        assert_eq!(carried[1], carried[2], "a batch is one send");
        for (span, context) in sends.iter().zip(&carried) {
            assert_eq!(span["trace_id"], format!("{:032x}", context.trace_id()));
            assert_eq!(span["span_id"], format!("{:016x}", context.span_id()));
            assert_eq!(span["topic"], setup.topic);
            assert!(!span.contains_key("parent_span_id"));
        }
        assert_eq!(sends[0]["partition"], "0");
        Ok(())
    }

    pub(super) async fn a_traceparent_set_by_the_application_is_kept(setup: Setup) -> Result<()> {
        let given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        let spans = Spans::default();
        let _listening = tracing::subscriber::set_default(spans.clone());
        let message = NewMessage::new("p").header(TRACEPARENT, given);
        setup.producer.send(&setup.topic, message).await?;
        let entry = setup.entries(0).await?.remove(0);
        let headers = format!(r#"{{"traceparent":"{given}"}}"#);
        assert_eq!(text(&entry, "headers"), Some(headers.as_str()));
        let span = spans.named("send").remove(0);
        assert_eq!(span["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(span["parent_span_id"], "00f067aa0ba902b7");
        Ok(())
    }

    /// Counters by name and labels, without those at zero.
    #[derive(Clone, Debug, Default)]
    struct Counts(Arc<Mutex<BTreeMap<String, u64>>>);

    struct Count(Counts, String);

    impl CounterFn for Count {
        fn increment(&self, value: u64) {
            let mut counts = self.0.0.lock().expect("no test panicked");
            *counts.entry(self.1.clone()).or_default() += value;
        }

        fn absolute(&self, _: u64) {}
    }

    impl Recorder for Counts {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            let mut labels: Vec<String> =
                key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            labels.sort();
            let name = format!("{} {}", key.name(), labels.join(" "));
            // Only metrics of the queue.
            if key.name() != PRODUCED {
                return Counter::noop();
            }
            Counter::from_arc(Arc::new(Count(self.clone(), name)))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    type SpanFields = BTreeMap<String, String>;

    /// Records spans with their fields.
    #[derive(Clone, Debug, Default)]
    struct Spans(Arc<Mutex<Vec<(&'static str, SpanFields)>>>);

    impl Spans {
        fn named(&self, name: &str) -> Vec<SpanFields> {
            let spans = self.0.lock().expect("no test panicked");
            spans.iter().filter(|span| span.0 == name).map(|span| span.1.clone()).collect()
        }
    }

    impl Subscriber for Spans {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            metadata.is_span()
        }

        fn new_span(&self, span: &Attributes<'_>) -> Id {
            let mut fields = Collected::default();
            span.record(&mut fields);
            let mut spans = self.0.lock().expect("no test panicked");
            spans.push((span.metadata().name(), fields.0));
            Id::from_u64(spans.len() as u64)
        }

        fn record(&self, id: &Id, values: &Record<'_>) {
            let mut fields = Collected::default();
            values.record(&mut fields);
            let mut spans = self.0.lock().expect("no test panicked");
            let index = usize::try_from(id.into_u64() - 1).expect("a small number");
            spans[index].1.extend(fields.0);
        }

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[derive(Default)]
    struct Collected(SpanFields);

    impl Visit for Collected {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            self.0.insert(field.name().to_owned(), format!("{value:?}"));
        }
    }
}
