//! What the metrics say of a day's work, read as an exporter would read them.
#![cfg(feature = "postgres")]

mod support;

use std::time::Instant;

use anyhow::Result;
use headwater_issue::{EventLogId, HandlerError, IssueId, Nudge, Run, WorkerConfig, metrics};
use support::meters::Meters;
use support::{Door, Journal, Place, System, replies, until};

#[tokio::test]
async fn the_metrics_tell_what_was_queued_in_work_and_done_with_sqlite() -> Result<()> {
    the_metrics_tell_what_was_queued_in_work_and_done(Place::now()).await
}

#[tokio::test]
async fn the_metrics_tell_what_was_queued_in_work_and_done_with_postgres_and_redis() -> Result<()> {
    the_metrics_tell_what_was_queued_in_work_and_done(Place::servers()?).await
}

async fn the_metrics_tell_what_was_queued_in_work_and_done(place: Place) -> Result<()> {
    let (meters, _hearing) = Meters::start();
    let (system, door, began) = (System::at(&place).await?, Door::default(), Instant::now());
    for (issue, event) in [("1", "a"), ("1", "b"), ("2", "a"), ("2", "a")] {
        system.record(issue, event).await?;
    }
    assert_eq!(
        meters.value("headwater_issues_queued_total"),
        2.0,
        "two issues, however many events"
    );
    assert_eq!(meters.value("headwater_events_recorded_total{result=recorded}"), 3.0);
    assert_eq!(meters.value("headwater_events_recorded_total{result=duplicate}"), 1.0);

    let handler = {
        let door = door.clone();
        move |run: Run| {
            let door = door.clone();
            async move {
                door.pass().await;
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    };
    let worker = system.start(handler, WorkerConfig::default())?;
    door.arrivals(2).await?;
    sampled(meters, &system, 2.0, &[("processing", 2.0), ("queued", 0.0)]).await?;
    assert_eq!(meters.value("headwater_issues_processed_total{result=done}"), 0.0);

    door.open_all();
    system.settled().await?;
    worker.stop().await?;
    sampled(meters, &system, 0.0, &[("processing", 0.0), ("queued", 0.0)]).await?;
    assert_eq!(meters.value("headwater_issues_processed_total{result=done}"), 2.0);
    let mut batches = meters.values("headwater_events_per_issue_batch");
    batches.sort_by(f64::total_cmp);
    assert_eq!(batches, [1.0, 2.0]);
    let durations = meters.values("headwater_issues_processing_duration_seconds{result=done}");
    let longest = began.elapsed().as_secs_f64();
    assert_eq!(durations.len(), 2);
    assert!(durations.iter().all(|seconds| (0.0..=longest).contains(seconds)), "{durations:?}");
    assert_eq!(meters.value("headwater_outbox_rows{status=pending}"), 3.0, "a reply to each event");
    Ok(())
}

/// The gauges: entries that are delivered and not acknowledged, and issues by where they stand. A second nudge for the
/// duplicate is acknowledged as soon as somebody has looked.
async fn sampled(
    meters: &Meters,
    system: &System,
    pending: f64,
    issues: &[(&str, f64)],
) -> Result<()> {
    until("the entries in hand", || async {
        metrics::sample(system.store.as_ref(), Some(&system.streams)).await.expect("it answers");
        meters.value("headwater_redis_pending_messages") == pending
    })
    .await?;
    for (status, count) in issues {
        let name = format!("headwater_issues{{status={status}}}");
        assert_eq!(meters.value(&name), *count, "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_nudge_for_a_missing_issue_is_a_no_op_that_is_counted_and_acknowledged() -> Result<()> {
    let (meters, _hearing) = Meters::start();
    let (system, journal) = (System::at(&Place::now()).await?, Journal::default());
    let nudge = Nudge { issue_id: IssueId(12345), event_log_id: EventLogId(1) };
    system.nudger.send(&[nudge]).await?;
    let worker = system.start(journal.handler(), WorkerConfig::default())?;
    until("the count", || async {
        meters.value("headwater_nudges_without_run_total{result=missing}") == 1.0
    })
    .await?;
    sampled(meters, &system, 0.0, &[("processing", 0.0)]).await?;
    worker.stop().await?;
    assert!(journal.runs().is_empty());
    assert_eq!(meters.value("headwater_issues_processed_total{result=done}"), 0.0);
    assert_eq!(meters.value("headwater_nudges_total{result=sent}"), 1.0);
    Ok(())
}

#[tokio::test]
async fn runs_that_fail_are_counted_apart_from_those_that_are_done() -> Result<()> {
    let (meters, _hearing) = Meters::start();
    let system = System::at(&Place::now()).await?;
    let refuse = |_: Run| async { Err(HandlerError::quarantine("unknown project")) };
    let issue_id = system.record("1", "a").await?.issue_id;
    system.worker(refuse, WorkerConfig::default())?.look_at(issue_id).await;
    assert_eq!(meters.value("headwater_issues_processed_total{result=quarantined}"), 1.0);
    assert_eq!(meters.value("headwater_issues_processed_total{result=done}"), 0.0);
    metrics::sample(system.store.as_ref(), None).await?;
    assert_eq!(meters.value("headwater_issues{status=quarantined}"), 1.0);
    Ok(())
}
