//! Nudges that are lost or not delivered do not stop processing.

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{SweepOptions, Sweeper, SweeperConfig, WorkerConfig, limits};
use headwater_stream::StreamName;
use support::{Backends, RunLog, System, event_of, wait_until};

async fn unread(system: &System) -> usize {
    let stream = StreamName::new(headwater_issue::STREAM).expect("a name");
    let stats = system.streams.stats(&stream).await.expect("the store replies");
    stats.map_or(0, |stats| stats.length as usize)
}

#[tokio::test]
async fn a_lost_nudge_is_sent_again_despite_a_backlog_of_unread_nudges() -> Result<()> {
    let backends = Backends::in_memory_with_test_clock();
    let system = System::at(&backends).await?;
    let most = limits::NUDGES_UNREAD_MAX as usize + 1;
    let records = (0..most).map(|issue| system.inbox.record(event_of(&issue.to_string(), "a")));
    for recorded in futures_util::future::join_all(records).await {
        recorded?;
    }
    wait_until("all nudges to be sent", || async { unread(&system).await == most }).await?;
    let sweeper = system.sweeper(None)?;
    assert!(sweeper.run_once().await?.nudges.is_empty());
    let clock = backends.clock.as_ref().expect("a test clock");
    clock.advance(Duration::from_secs(60 * 60));
    assert_eq!(sweeper.run_once().await?.nudges.len(), most);
    Ok(())
}

#[tokio::test]
async fn an_idle_worker_gets_issues_from_the_sweep_when_the_stream_delivers_no_nudges() -> Result<()>
{
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    // The worker consumes other streams, which have no nudges.
    let elsewhere = System::at(&Backends::in_memory()).await?;
    let worker = system.worker(run_log.handler(), WorkerConfig::default())?;
    let sweeper = system.sweeper(Some(&worker))?;
    system.record("1", "a").await?;
    let working = worker.run(&elsewhere.queue, std::future::pending());
    tokio::select! {
        () = working => unreachable!("it runs until it is dropped"),
        () = sweeper.run(std::future::pending()) => unreachable!("it runs until it is dropped"),
        processed = system.wait_processed() => processed?,
    }
    assert_eq!(run_log.runs(), [["a"]]);
    Ok(())
}

/// Records one event for each of `count` issues, and waits until all nudges are in the stream.
async fn record_with_nudges(system: &System, count: usize) -> Result<()> {
    for first in (0..count).step_by(1000) {
        let end = (first + 1000).min(count);
        let records = (first..end).map(|n| system.inbox.record(event_of(&n.to_string(), "a")));
        for recorded in futures_util::future::join_all(records).await {
            recorded?;
        }
        wait_until("all nudges to be sent", || async { unread(system).await == end }).await?;
    }
    Ok(())
}

/// Waits until no issue is queued or in processing.
async fn until_idle(system: &System) -> Result<()> {
    wait_until("all issues to be processed", || async {
        let backlog = system.store.backlog().await.expect("the store replies");
        backlog.queued + backlog.processing == 0
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn nudges_from_before_the_first_worker_are_all_kept_for_it() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    record_with_nudges(&system, 20_000).await?;
    // No sweep: the nudges alone are enough.
    let worker = system.worker(run_log.handler(), WorkerConfig::default())?;
    tokio::select! {
        () = worker.run(&system.queue, std::future::pending()) => unreachable!("it runs until it is dropped"),
        processed = until_idle(&system) => processed?,
    }
    assert_eq!(run_log.runs().len(), 20_000);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sweep_does_not_wait_between_full_pages_while_the_worker_is_idle() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    record_with_nudges(&system, 3000).await?;
    let stream = StreamName::new(headwater_issue::STREAM)?;
    system.streams.delete_stream(&stream).await?;
    let worker = system.worker(run_log.handler(), WorkerConfig::default())?;
    // One regular sweep during the test: a pause between two pages would be longer than the test.
    let options =
        SweepOptions { nudge_overdue: limits::NUDGE_OVERDUE_MIN, ..SweepOptions::default() };
    let config = SweeperConfig { every: Duration::from_secs(60 * 60), options };
    let (store, nudger) = (system.store.clone(), system.nudger.clone());
    let sweeper = Sweeper::new(store, nudger, Some(worker.clone()), config)?;
    tokio::select! {
        () = worker.run(&system.queue, std::future::pending()) => unreachable!("it runs until it is dropped"),
        () = sweeper.run(std::future::pending()) => unreachable!("it runs until it is dropped"),
        processed = until_idle(&system) => processed?,
    }
    Ok(())
}
