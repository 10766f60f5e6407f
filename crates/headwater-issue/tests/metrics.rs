//! Values of the metrics after processing, as an exporter reads them.
#![cfg(feature = "postgres")]

mod support;

use std::time::Instant;

use anyhow::Result;
use headwater_issue::{EventLogId, HandlerError, IssueId, Nudge, Run, WorkerConfig, metrics};
use support::captured_telemetry::CapturedMetrics;
use support::{Backends, Gate, RunLog, System, replies, wait_until};

#[tokio::test]
async fn the_metrics_report_queued_processing_and_done_issues_with_sqlite() -> Result<()> {
    the_metrics_report_queued_processing_and_done_issues(Backends::in_memory()).await
}

#[tokio::test]
async fn the_metrics_report_queued_processing_and_done_issues_with_postgres_and_redis() -> Result<()>
{
    the_metrics_report_queued_processing_and_done_issues(Backends::servers()?).await
}

async fn the_metrics_report_queued_processing_and_done_issues(backends: Backends) -> Result<()> {
    let (metrics_seen, _guard) = CapturedMetrics::start();
    let (system, gate, began) = (System::at(&backends).await?, Gate::default(), Instant::now());
    for (issue, event) in [("1", "a"), ("1", "b"), ("2", "a"), ("2", "a")] {
        system.record(issue, event).await?;
    }
    assert_eq!(
        metrics_seen.value("headwater_issues_queued_total"),
        2.0,
        "counted per issue, not per event"
    );
    assert_eq!(metrics_seen.value("headwater_events_recorded_total{result=recorded}"), 3.0);
    assert_eq!(metrics_seen.value("headwater_events_recorded_total{result=duplicate}"), 1.0);

    let handler = {
        let gate = gate.clone();
        move |run: Run| {
            let gate = gate.clone();
            async move {
                gate.wait().await;
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    };
    let worker = system.start(handler, WorkerConfig::default())?;
    gate.wait_for_arrivals(2).await?;
    sampled(metrics_seen, &system, 2.0, &[("processing", 2.0), ("queued", 0.0)]).await?;
    assert_eq!(metrics_seen.value("headwater_issues_processed_total{result=done}"), 0.0);

    gate.open_all();
    system.wait_processed().await?;
    worker.stop().await?;
    sampled(metrics_seen, &system, 0.0, &[("processing", 0.0), ("queued", 0.0)]).await?;
    assert_eq!(metrics_seen.value("headwater_issues_processed_total{result=done}"), 2.0);
    let mut batches = metrics_seen.values("headwater_events_per_issue_batch");
    batches.sort_by(f64::total_cmp);
    assert_eq!(batches, [1.0, 2.0]);
    let durations =
        metrics_seen.values("headwater_issues_processing_duration_seconds{result=done}");
    let longest = began.elapsed().as_secs_f64();
    assert_eq!(durations.len(), 2);
    assert!(durations.iter().all(|seconds| (0.0..=longest).contains(seconds)), "{durations:?}");
    assert_eq!(
        metrics_seen.value("headwater_outbox_rows{status=pending}"),
        3.0,
        "a reply to each event"
    );
    Ok(())
}

/// Asserts the gauges of pending entries and of issues by status. The second nudge, of the duplicate, is acknowledged
/// after its no-op run.
async fn sampled(
    metrics_seen: &CapturedMetrics,
    system: &System,
    pending: f64,
    issues: &[(&str, f64)],
) -> Result<()> {
    wait_until("the pending entries", || async {
        metrics::sample(system.store.as_ref(), Some(&system.streams))
            .await
            .expect("the store replies");
        metrics_seen.value("headwater_redis_pending_messages") == pending
    })
    .await?;
    for (status, count) in issues {
        let name = format!("headwater_issues{{status={status}}}");
        assert_eq!(metrics_seen.value(&name), *count, "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_nudge_for_a_missing_issue_is_a_no_op_that_is_counted_and_acknowledged() -> Result<()> {
    let (metrics_seen, _guard) = CapturedMetrics::start();
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    let nudge = Nudge { issue_id: IssueId(12345), event_log_id: EventLogId(1) };
    system.nudger.send(&[nudge]).await?;
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    wait_until("the count", || async {
        metrics_seen.value("headwater_nudges_without_run_total{result=missing}") == 1.0
    })
    .await?;
    sampled(metrics_seen, &system, 0.0, &[("processing", 0.0)]).await?;
    worker.stop().await?;
    assert!(run_log.runs().is_empty());
    assert_eq!(metrics_seen.value("headwater_issues_processed_total{result=done}"), 0.0);
    assert_eq!(metrics_seen.value("headwater_nudges_total{result=sent}"), 1.0);
    Ok(())
}

#[tokio::test]
async fn failed_runs_are_counted_separately() -> Result<()> {
    let (metrics_seen, _guard) = CapturedMetrics::start();
    let system = System::at(&Backends::in_memory()).await?;
    let refuse = |_: Run| async { Err(HandlerError::quarantine("unknown project")) };
    let issue_id = system.record("1", "a").await?.issue_id;
    system.worker(refuse, WorkerConfig::default())?.process_issue(issue_id).await;
    assert_eq!(metrics_seen.value("headwater_issues_processed_total{result=quarantined}"), 1.0);
    assert_eq!(metrics_seen.value("headwater_issues_processed_total{result=done}"), 0.0);
    metrics::sample(system.store.as_ref(), None).await?;
    assert_eq!(metrics_seen.value("headwater_issues{status=quarantined}"), 1.0);
    Ok(())
}
