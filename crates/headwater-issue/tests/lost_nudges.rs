//! Nudges that are lost, or that nobody hands out: the work is done all the same.

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{WorkerConfig, limits};
use headwater_stream::StreamName;
use support::{Backends, RunLog, System, event_of, wait_until};

async fn unread(system: &System) -> usize {
    let stream = StreamName::new(headwater_issue::STREAM).expect("a name");
    let stats = system.streams.stats(&stream).await.expect("it answers");
    stats.map_or(0, |stats| stats.length as usize)
}

#[tokio::test]
async fn a_lost_nudge_is_replaced_although_many_others_are_unread() -> Result<()> {
    let backends = Backends::memory();
    let system = System::at(&backends).await?;
    let most = limits::NUDGES_UNREAD_MAX as usize + 1;
    let records = (0..most).map(|issue| system.inbox.record(event_of(&issue.to_string(), "a")));
    for recorded in futures_util::future::join_all(records).await {
        recorded?;
    }
    wait_until("all nudges to be sent", || async { unread(&system).await == most }).await?;
    let sweeper = system.sweeper(None)?;
    assert!(sweeper.run_once().await?.nudges.is_empty());
    let clock = backends.clock.as_ref().expect("time is moved by the test");
    clock.advance(Duration::from_secs(60 * 60));
    assert_eq!(sweeper.run_once().await?.nudges.len(), most);
    Ok(())
}

#[tokio::test]
async fn an_idle_worker_works_although_the_stream_takes_nudges_and_hands_none_out() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::now()).await?, RunLog::default());
    // The worker reads from streams that nobody appends to.
    let elsewhere = System::at(&Backends::now()).await?;
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
