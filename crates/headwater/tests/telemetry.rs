//! Metrics, logs and traces of the real binary.

mod support;

use std::time::Instant;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use headwater_testkit::{Postgres, Redis};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::support::desk::new_ticket;
use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{LIMIT, Server, ServerDir};

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// A collector: its URL and the received batches.
async fn collector() -> Result<(String, mpsc::UnboundedReceiver<Bytes>)> {
    let (sender, batches) = mpsc::unbounded_channel::<Bytes>();
    let take = |State(sender): State<mpsc::UnboundedSender<Bytes>>, body: Bytes| async move {
        let _ = sender.send(body);
    };
    let collector = Router::new().route("/v1/traces", post(take)).with_state(sender);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    // Ends with the runtime of the test.
    tokio::spawn(async move { axum::serve(listener, collector).await });
    Ok((url, batches))
}

// The collector must respond while the test waits for the server to end.
#[tokio::test(flavor = "multi_thread")]
async fn traces_are_exported_and_continue_the_callers_trace() -> Result<()> {
    let (url, mut batches) = collector().await?;

    let dir = ServerDir::new()?;
    let mut server = dir.serve(&["--otlp-url", &url])?;
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
        "remaining traces are sent at shutdown"
    );
    assert!(all.windows(16).any(|window| window == id), "the caller's trace is continued");
    Ok(())
}

/// The length-delimited fields of a Protocol Buffers message: number and bytes.
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

/// Trace id (hexadecimal) and name of every span in a batch.
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

// The collector must respond while the test waits for the server to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_continues_the_trace_of_its_webhook() -> Result<()> {
    let (url, mut batches) = collector().await?;

    let dir = ServerDir::new()?.settings(&integrations())?;
    let mut server = dir.serve(&["--otlp-url", &url, "--issue-quiet", "200ms"])?;
    let mut traces = Vec::new();
    for number in 1..=5 {
        let recorded = webhook(&server, number).await?;
        let path = format!("/api/v1/issues/{}", recorded["issue_id"]);
        server.until(&path, |_, issue| issue["pending_events"] == 0).await?;
        traces.push(trace(number));
    }
    assert!(server.stop()?.success(), "{}", server.log());
    let all = collected(&mut batches);
    for name in ["request", "run"] {
        assert!(traces.iter().all(|trace| has(&all, trace, name)), "{name}: {all:?}");
    }
    Ok(())
}

/// The trace id of a caller.
fn trace(number: u64) -> String {
    format!("4bf92f3577b34da6a3ce929d0e0e4{number:03}")
}

fn traceparent(number: u64) -> String {
    format!("00-{}-00f067aa0ba902b7-01", trace(number))
}

/// Sends a webhook about a new issue in a new trace.
async fn webhook(server: &Server, number: u64) -> Result<Value> {
    let body = github_issues("opened", number, "x").to_string();
    let request = github(server, "issues", &format!("d-{number}"), body.as_bytes());
    Ok(send(request.header("traceparent", traceparent(number))).await?.1)
}

/// Opens a ticket in a new trace.
async fn ticket(server: &Server, number: u64) -> Result<Value> {
    let request = server.client.post(server.url("/api/v1/tickets")).json(&new_ticket("x"));
    Ok(send(request.header("traceparent", traceparent(number))).await?.1)
}

/// All spans received so far.
fn collected(batches: &mut mpsc::UnboundedReceiver<Bytes>) -> Vec<(String, String)> {
    let mut all = Vec::new();
    while let Ok(batch) = batches.try_recv() {
        all.extend(spans(&batch));
    }
    all
}

fn has(spans: &[(String, String)], trace: &str, name: &str) -> bool {
    spans.iter().any(|span| span.0 == trace && span.1 == name)
}

/// Number of completed runs of a process.
async fn runs(process: &Server) -> Result<u64> {
    let (_, metrics) = process.get("/metrics").await?;
    let lines = metrics.as_str().context("text")?.lines();
    let counts = lines.filter(|line| line.starts_with("headwater_issues_processed_total{"));
    let count = |line: &str| line.rsplit(' ').next()?.parse::<u64>().ok();
    Ok(counts.filter_map(count).sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_in_another_process_continues_the_trace_of_its_event() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let (of_server, mut from_server) = collector().await?;
    let (of_worker, mut from_worker) = collector().await?;
    let dir = ServerDir::new()?.settings(&integrations())?;
    let (streams, database) = (redis.url(), database.url());
    let quiet = ["--issue-quiet", "10ms"];
    let both = [&["--stream-url", &streams, "--database-url", &database][..], &quiet].concat();
    let mut server = dir.serve(&[&both[..], &["--otlp-url", &of_server]].concat())?;
    let mut worker = dir.worker(&[&both[..], &["--otlp-url", &of_worker]].concat())?;
    worker.until("/health/ready", |_, body| body["status"] == "ready").await?;

    // Alternating pairs, until the other process has run both kinds.
    let mut elsewhere = (Vec::new(), Vec::new());
    for number in 1.. {
        assert!(number < 200, "all runs were in one process: {}", worker.log());
        let is_ticket = number / 2 % 2 == 1;
        let before = runs(&worker).await?;
        let recorded = match is_ticket {
            true => ticket(&server, number).await?,
            false => webhook(&server, number).await?,
        };
        let path = format!("/api/v1/issues/{}", recorded["issue_id"]);
        server.until(&path, |_, issue| issue["pending_events"] == 0).await?;
        // A run is counted right after its commit.
        let deadline = Instant::now() + LIMIT;
        while runs(&server).await? + runs(&worker).await? < number {
            assert!(Instant::now() < deadline, "{}", server.log());
        }
        if runs(&worker).await? > before {
            if is_ticket { &mut elsewhere.1 } else { &mut elsewhere.0 }.push(trace(number));
        }
        if !elsewhere.0.is_empty() && !elsewhere.1.is_empty() {
            break;
        }
    }
    assert!(server.stop()?.success(), "{}", server.log());
    assert!(worker.stop()?.success(), "{}", worker.log());
    let (at_server, at_worker) = (collected(&mut from_server), collected(&mut from_worker));
    for trace in elsewhere.0.iter().chain(&elsewhere.1) {
        assert!(has(&at_server, trace, "request"), "{trace}: {at_server:?}");
        assert!(has(&at_worker, trace, "run"), "{trace}: {at_worker:?}");
    }
    Ok(())
}

#[tokio::test]
async fn an_unavailable_collector_has_no_effect() -> Result<()> {
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&["--otlp-url", "http://127.0.0.1:1"])?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    assert!(server.stop()?.success(), "{}", server.log());
    Ok(())
}

#[tokio::test]
async fn metrics_have_the_documented_names() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server = dir.serve(&["--issue-quiet", "50ms"])?;
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
    // Gauges are updated every few seconds.
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
async fn logs_are_json_without_secrets_or_text_on_request() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let mut server = dir.serve(&["--log-level", "debug"])?;
    send(github(&server, "ping", "d", b"{}")).await?;
    server.stop()?;
    let log = server.log();
    for line in log.lines() {
        assert!(line.starts_with('{') && line.contains("\"level\""), "{line}");
    }
    assert!(!log.contains("a secret that both sides know"), "{log}");

    let output = dir
        .command(&[
            "serve",
            "--http-listen",
            "127.0.0.1:0",
            "--log-format",
            "text",
            "--database-url",
            "postgres://ann@127.0.0.1:1/headwater",
            "--start-wait",
            "0s",
        ])
        .output()?;
    let text = support::text(&output.stderr);
    assert!(text.contains(" WARN ") && !text.contains("{\""), "{text}");
    Ok(())
}
