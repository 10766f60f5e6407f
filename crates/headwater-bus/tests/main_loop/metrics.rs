//! Metrics and spans of a main loop.

use std::time::Duration;

use headwater_bus::{Budget, CancelOutcome, RequestId, Submission};
use serde_json::Value;

use crate::backends::telemetry::{Counts, Span, Spans};
use crate::fixture::{Ask, Fixture, LIMIT, Loop, begun};

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

// One thread, so that all tasks use the recorder of the test.
on_streams!((): request_metrics_are_counted, client_and_worker_have_a_span_for_each_request);

async fn request_metrics_are_counted(fixture: Fixture) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let echo = || Submission::new(Ask::Echo("a".to_owned())).id(id("echo"));
    client.submit::<_, String>(echo()).await.unwrap();
    client.submit::<_, u32>(Submission::new(Ask::FailTimes(2))).await.unwrap();
    client.submit::<_, Value>(Submission::new(Ask::GiveUp)).await.unwrap_err();
    client.submit::<_, Value>(Submission::new(Ask::Panic)).await.unwrap_err();
    let budget = Budget { max_total_tokens: Some(1), ..Budget::default() };
    let spend = Ask::Spend { tokens: 10, charges: 2, is_stubborn: false };
    client.submit::<_, Value>(Submission::new(spend).budget(budget)).await.unwrap_err();
    let wait = Submission::new(Ask::Wait("a".to_owned())).id(id("wait"));
    // Long enough to publish the request on a busy machine: a timeout before that is counted as `error`.
    let wait = wait.timeout(Duration::from_secs(2));
    client.submit::<_, String>(wait).await.unwrap_err();
    let only_the_waiting_request_runs = async {
        while begun(&main_loop, "wait") == 0 || counts.of("main_loop_running") != Some(1) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, only_the_waiting_request_runs).await.unwrap();
    assert_eq!(client.cancel(&id("wait")).await.unwrap(), CancelOutcome::Cancelled);
    // The run has ended when the worker has stopped.
    worker.stop().await.unwrap();
    // A repeated request is recognized.
    let worker = fixture.worker(&main_loop).await;
    let other = fixture.client("shop").await;
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
        let name = format!("main_loop_{name}");
        assert_eq!(counts.of(&name), Some(expected), "{name} in {counts:?}");
    }
}

async fn client_and_worker_have_a_span_for_each_request(fixture: Fixture) {
    let spans = Spans::of_all();
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let request_id = RequestId::random();
    let session = client.session_of(&request_id);
    let submit = Submission::new(Ask::Note(1)).id(request_id.clone());
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
    // Events published during a request belong to its trace.
    let is_refresh = |span: &&Span| span.0 == "refresh" && span.1["session"] == session.to_string();
    assert!(spans.iter().any(|span| is_refresh(&span)), "{spans:?}");
}
