//! What a main loop tells those who watch it: metrics and spans.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use headwater_bus::{Budget, Cancelled, RequestId, Submit};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};

use crate::place::{Ask, LIMIT, Loop, Place};

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

/// One thread, so that it and all tasks have the recorder of the test.
macro_rules! watched {
    ($($scenario:ident),* $(,)?) => {
        mod local {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(crate::place::Place::local()).await;
            })*
        }
        mod embedded {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(crate::place::Place::embedded().await).await;
            })*
        }
        mod redis {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(crate::place::Place::redis()).await;
            })*
        }
        mod cluster {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(crate::place::Place::cluster()).await;
            })*
        }
    };
}

watched![what_becomes_of_requests_is_counted, each_request_has_a_span_that_names_it_on_both_sides];

async fn what_becomes_of_requests_is_counted(place: Place) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
    let echo = || Submit::new(Ask::Echo("a".to_owned())).id(id("echo"));
    client.submit::<_, String>(echo()).await.unwrap();
    client.submit::<_, u32>(Submit::new(Ask::FailTimes(2))).await.unwrap();
    client.submit::<_, Value>(Submit::new(Ask::GiveUp)).await.unwrap_err();
    client.submit::<_, Value>(Submit::new(Ask::Panic)).await.unwrap_err();
    let budget = Budget { max_total_tokens: Some(1), ..Budget::default() };
    let spend = Ask::Spend { tokens: 10, charges: 2, is_stubborn: false };
    client.submit::<_, Value>(Submit::new(spend).budget(budget)).await.unwrap_err();
    let wait = Submit::new(Ask::Wait("a".to_owned())).id(id("wait"));
    let wait = wait.timeout(Duration::from_millis(10));
    client.submit::<_, String>(wait).await.unwrap_err();
    main_loop.log.wait_for(1 + 3 + 1 + 3 + 1 + 1).await;
    // Those before it may be about to end.
    let one_runs = async {
        while counts.of("running") != Some(1) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, one_runs).await.unwrap();
    assert_eq!(client.cancel(&id("wait")).await.unwrap(), Cancelled::Yes);
    // It has stopped when the worker has.
    worker.stop().await.unwrap();
    // One that comes again is known.
    let worker = place.worker(&main_loop).await;
    let other = place.client("shop").await;
    other.submit::<_, String>(echo()).await.unwrap();
    worker.stop().await.unwrap();

    for (name, expected) in [
        ("requests_total{result=completed}", 2),
        ("requests_total{result=given_up}", 1),
        ("requests_total{result=panicked}", 1),
        ("requests_total{result=over_budget}", 1),
        ("requests_total{result=cancelled}", 1),
        ("request_seconds{result=completed}", 2),
        ("request_seconds{result=over_budget}", 1),
        ("retries_total", 2 + 2),
        ("repeated_total", 1),
        ("running", 0),
        ("submitted_total{result=completed}", 3),
        ("submitted_total{result=failed}", 3),
        ("submitted_total{result=timed_out}", 1),
        ("submit_seconds{result=completed}", 3),
    ] {
        assert_eq!(counts.of(name), Some(expected), "{name} in {counts:?}");
    }
}

async fn each_request_has_a_span_that_names_it_on_both_sides(place: Place) {
    let spans = Spans::of_all();
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
    let request_id = RequestId::random();
    let session = client.session_of(&request_id);
    let submit = Submit::new(Ask::Note(1)).id(request_id.clone());
    client.submit::<_, Vec<u64>>(submit).await.unwrap();
    worker.stop().await.unwrap();
    let spans = spans.all();
    let is_of = |span: &&Span, name: &str| {
        span.0 == name && span.1.get("request_id").is_some_and(|id| *id == request_id.to_string())
    };
    let submit = spans.iter().find(|span| is_of(span, "submit")).unwrap();
    assert_eq!(submit.1["requester"], "desk");
    let run = spans.iter().find(|span| is_of(span, "main_loop")).unwrap();
    assert_eq!(run.1["session"], session.to_string());
    // What is published for it belongs to it.
    let is_refresh = |span: &&Span| span.0 == "refresh" && span.1["session"] == session.to_string();
    assert!(spans.iter().any(|span| is_refresh(&span)), "{spans:?}");
}

/// All spans there were, with their fields.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<Span>>>);

/// Its name and its fields.
type Span = (String, BTreeMap<String, String>);

impl Spans {
    /// One for the whole process: of subscribers that come and go while other tests run, some spans are missed.
    fn of_all() -> Self {
        static SPANS: OnceLock<Spans> = OnceLock::new();
        let spans = SPANS.get_or_init(|| {
            let spans = Spans::default();
            tracing::subscriber::set_global_default(spans.clone()).unwrap();
            spans
        });
        spans.clone()
    }

    fn all(&self) -> Vec<Span> {
        self.0.lock().unwrap().clone()
    }
}

struct Fields<'a>(&'a mut BTreeMap<String, String>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("headwater_bus")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = BTreeMap::new();
        span.record(&mut Fields(&mut fields));
        let mut spans = self.0.lock().unwrap();
        spans.push((span.metadata().name().to_owned(), fields));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// What was counted, set or recorded, by name and labels.
#[derive(Clone, Debug, Default)]
struct Counts(Arc<Mutex<BTreeMap<String, i64>>>);

impl Counts {
    fn of(&self, name: &str) -> Option<i64> {
        self.0.lock().unwrap().get(&format!("headwater_bus_main_loop_{name}")).copied()
    }

    fn count(&self, key: &Key) -> Arc<Count> {
        let labels = key.labels().map(|label| format!("{{{}={}}}", label.key(), label.value()));
        let name = format!("{}{}", key.name(), labels.collect::<String>());
        Arc::new(Count(self.clone(), name))
    }
}

struct Count(Counts, String);

impl Count {
    fn change(&self, change: impl FnOnce(&mut i64)) {
        change(self.0.0.lock().unwrap().entry(self.1.clone()).or_default());
    }
}

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        self.change(|count| *count += value as i64);
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for Count {
    fn increment(&self, value: f64) {
        self.change(|count| *count += value as i64);
    }

    fn decrement(&self, value: f64) {
        self.change(|count| *count -= value as i64);
    }

    fn set(&self, value: f64) {
        self.change(|count| *count = value as i64);
    }
}

impl HistogramFn for Count {
    fn record(&self, _: f64) {
        self.change(|count| *count += 1);
    }
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.count(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.count(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.count(key))
    }
}
