//! What the real binary tells of itself: metrics, logs and traces.

mod support;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::support::Place;
use crate::support::sender::{github, github_issues, integrations, send};

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

// The collector must answer while the test waits for the end of the server.
#[tokio::test(flavor = "multi_thread")]
async fn traces_go_to_the_collector_and_keep_the_trace_of_the_caller() -> Result<()> {
    let (sender, mut batches) = mpsc::unbounded_channel::<Bytes>();
    let take = |State(sender): State<mpsc::UnboundedSender<Bytes>>, body: Bytes| async move {
        let _ = sender.send(body);
    };
    let collector = Router::new().route("/v1/traces", post(take)).with_state(sender);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let collecting = tokio::spawn(async move { axum::serve(listener, collector).await });

    let place = Place::new()?;
    let mut server = place.serve(&["--otlp-url", &url])?;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let request = server.client.get(server.url("/health/live"));
    send(request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"))).await?;
    assert!(server.stop()?.success(), "{}", server.log());

    let mut all = Vec::new();
    while let Ok(batch) = batches.try_recv() {
        all.extend_from_slice(&batch);
    }
    let id: Vec<u8> =
        (0..16).filter_map(|at| u8::from_str_radix(&trace[2 * at..2 * at + 2], 16).ok()).collect();
    assert!(
        contains(&all, "headwater") && contains(&all, "/health/live"),
        "what is left is sent at the end"
    );
    assert!(all.windows(16).any(|window| window == id), "the caller's trace goes on");
    collecting.abort();
    Ok(())
}

/// The fields of a message of Protocol Buffers that have a length: number and bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, &[u8])> {
    fn number(bytes: &mut &[u8]) -> Option<u64> {
        let (mut value, mut shift) = (0, 0);
        loop {
            let (first, rest) = bytes.split_first()?;
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            shift += 7;
            if first & 0x80 == 0 || shift > 63 {
                return Some(value);
            }
        }
    }
    let mut found = Vec::new();
    while let Some(key) = number(&mut bytes) {
        let length = match key & 7 {
            0 => number(&mut bytes).map(|_| 0),
            1 => Some(8),
            2 => number(&mut bytes).and_then(|length| usize::try_from(length).ok()),
            _ => Some(4),
        };
        let Some((field, rest)) = length.and_then(|length| bytes.split_at_checked(length)) else {
            break;
        };
        if key & 7 == 2 {
            found.push((key >> 3, field));
        }
        bytes = rest;
    }
    found
}

/// Of every span in a batch: its trace, in hexadecimal digits, and its name.
fn spans(batch: &[u8]) -> Vec<(String, String)> {
    let inner = |messages: Vec<&'_ [u8]>, wanted: u64| -> Vec<Vec<u8>> {
        let all = messages.iter().flat_map(|message| fields(message));
        all.filter(|(field, _)| *field == wanted).map(|(_, bytes)| bytes.to_vec()).collect()
    };
    // resource_spans = 1, scope_spans = 2, spans = 2; of a span: trace_id = 1, name = 5.
    let resources = inner(vec![batch], 1);
    let scopes = inner(resources.iter().map(Vec::as_slice).collect(), 2);
    let spans = inner(scopes.iter().map(Vec::as_slice).collect(), 2);
    let describe = |span: &Vec<u8>| {
        let (mut trace, mut name) = (String::new(), String::new());
        for (field, bytes) in fields(span) {
            match field {
                1 => trace = bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
                5 => name = String::from_utf8_lossy(bytes).into_owned(),
                _ => {}
            }
        }
        (trace, name)
    };
    spans.iter().map(describe).collect()
}

// The collector must answer while the test waits for the end of the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_goes_on_with_the_trace_of_the_webhook_that_led_to_it() -> Result<()> {
    let (sender, mut batches) = mpsc::unbounded_channel::<Bytes>();
    let take = |State(sender): State<mpsc::UnboundedSender<Bytes>>, body: Bytes| async move {
        let _ = sender.send(body);
    };
    let collector = Router::new().route("/v1/traces", post(take)).with_state(sender);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let collecting = tokio::spawn(async move { axum::serve(listener, collector).await });

    let place = Place::new()?.settings(&integrations())?;
    let mut server = place.serve(&["--otlp-url", &url, "--issue-quiet", "200ms"])?;
    // Several, each with a trace of its own: a run that is quicker than the end of its request begins a trace of its own.
    let mut traces = Vec::new();
    for number in 1..=5 {
        let trace = format!("4bf92f3577b34da6a3ce929d0e0e473{number}");
        let body = github_issues("opened", number, "x").to_string();
        let request = github(&server, "issues", &format!("d-{number}"), body.as_bytes());
        let request = request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"));
        let (_, recorded) = send(request).await?;
        let path = format!("/api/v1/issues/{}", recorded["issue_id"]);
        server.until(&path, |_, issue| issue["pending_events"] == 0).await?;
        traces.push(trace);
    }
    assert!(server.stop()?.success(), "{}", server.log());
    let mut all = Vec::new();
    while let Ok(batch) = batches.try_recv() {
        all.extend(spans(&batch));
    }
    let has =
        |trace: &String, name: &str| all.iter().any(|span| span.0 == *trace && span.1 == name);
    assert!(traces.iter().all(|trace| has(trace, "request")), "{all:?}");
    assert!(traces.iter().any(|trace| has(trace, "run")), "{all:?}");
    collecting.abort();
    Ok(())
}

#[tokio::test]
async fn a_collector_that_is_away_costs_nothing() -> Result<()> {
    let place = Place::new()?;
    let mut server = place.serve(&["--otlp-url", "http://127.0.0.1:1"])?;
    server.until("/health/ready", |status, _| status == 200).await?;
    assert!(server.stop()?.success(), "{}", server.log());
    Ok(())
}

#[tokio::test]
async fn metrics_have_the_names_that_are_promised() -> Result<()> {
    let place = Place::new()?.settings(&integrations())?;
    let server = place.serve(&["--issue-quiet", "50ms"])?;
    let body = github_issues("opened", 1, "x").to_string();
    let (_, recorded) = send(github(&server, "issues", "d", body.as_bytes())).await?;
    let path = format!("/api/v1/issues/{}", recorded["issue_id"]);
    server.until(&path, |_, issue| issue["pending_events"] == 0).await?;

    let names = [
        "headwater_issues_queued_total",
        "headwater_issues_processing_duration_seconds_bucket",
        "headwater_issues_processed_total",
        "headwater_events_per_issue_batch_bucket",
        "headwater_redis_pending_messages",
        "headwater_events_recorded_total",
        "headwater_outbox_lag_seconds",
        "headwater_topic_length",
        "headwater_webhooks_total",
        "headwater_http_requests_total",
        "headwater_http_duration_seconds_bucket",
    ];
    // Gauges are set every few seconds.
    let has_all = |text: &str| names.iter().all(|name| text.contains(name));
    let metrics = server.until("/metrics", |_, text| text.as_str().is_some_and(has_all)).await;
    let metrics = metrics.context("a metric is missing")?;
    let lines = metrics.as_str().context("text")?.lines();
    for line in lines.filter(|line| !line.starts_with('#') && !line.is_empty()) {
        assert!(line.starts_with("headwater_"), "{line}");
    }
    Ok(())
}

#[tokio::test]
async fn logs_are_json_lines_without_secrets_and_text_if_asked_for() -> Result<()> {
    let place = Place::new()?.settings(&integrations())?;
    let mut server = place.serve(&["--log-level", "debug"])?;
    send(github(&server, "ping", "d", b"{}")).await?;
    server.stop()?;
    let log = server.log();
    for line in log.lines() {
        assert!(line.starts_with('{') && line.contains("\"level\""), "{line}");
    }
    assert!(!log.contains("a secret that both sides know"), "{log}");

    let output = place
        .command(&[
            "serve",
            "--http-listen",
            "127.0.0.1:0",
            "--log-format",
            "text",
            "--stream-url",
            "redis://127.0.0.1:1",
            "--start-wait",
            "0s",
        ])
        .output()?;
    let text = support::text(&output.stderr);
    assert!(text.contains(" WARN ") && !text.contains("{\""), "{text}");
    Ok(())
}
