//! Nudges that are lost or not delivered do not stop processing.

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{WorkerConfig, limits};
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
