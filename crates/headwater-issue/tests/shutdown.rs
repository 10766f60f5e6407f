//! A worker that stops leaves to others what it could not begin, and does not begin anew.

mod support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{DebounceWindow, InboxConfig, WorkerConfig};
use support::flaky_store::FlakyStore;
use support::{Backends, RunLog, System, event_of, wait_until};

async fn flaky() -> Result<(System, Arc<FlakyStore>)> {
    let backends = Backends::now();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    Ok((system, flaky))
}

fn in_a_hurry() -> WorkerConfig {
    WorkerConfig { drain: Duration::ZERO, ..WorkerConfig::default() }
}

/// A worker comes after the one that stopped. There is no sweep, so only an entry of the stream brings it to the issue.
async fn successor_does_the_work(system: &System) -> Result<()> {
    let run_log = RunLog::default();
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a"]]);
    system.assert_consistent().await?;
    Ok(())
}

#[tokio::test]
async fn a_nudge_that_led_to_no_claim_before_the_stop_is_not_acknowledged() -> Result<()> {
    let (system, flaky) = flaky().await?;
    flaky.block_claims(true);
    system.record("1", "a").await?;
    let worker = system.start(RunLog::default().handler(), in_a_hurry())?;
    wait_until("a claim", || async { flaky.blocked_claims() > 0 }).await?;
    worker.stop().await?;

    flaky.block_claims(false);
    successor_does_the_work(&system).await
}

#[tokio::test]
async fn an_issue_of_the_agenda_that_was_not_claimed_before_the_stop_is_nudged_for() -> Result<()> {
    let (system, flaky) = flaky().await?;
    flaky.block_claims(true);
    let recorded =
        system.store.record(&[event_of("1", "a")], &DebounceWindow::default()).await.remove(0)?;
    let worker = system.start(RunLog::default().handler(), in_a_hurry())?;
    assert_eq!(worker.worker.offer([recorded.issue_id]), 1);
    wait_until("a claim", || async { flaky.blocked_claims() > 0 }).await?;
    worker.stop().await?;

    flaky.block_claims(false);
    successor_does_the_work(&system).await
}

#[tokio::test]
async fn a_nudge_that_comes_to_a_worker_that_has_stopped_is_handed_on() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
    let worker = system.worker(RunLog::default().handler(), in_a_hurry())?;
    worker.run(&system.queue, std::future::ready(())).await;
    let recorded =
        system.store.record(&[event_of("1", "a")], &DebounceWindow::default()).await.remove(0)?;
    worker.process_issue(recorded.issue_id).await;
    successor_does_the_work(&system).await
}

#[tokio::test]
#[should_panic(expected = "a worker runs once, make a new one")]
async fn a_worker_that_is_run_twice_says_so_at_once() {
    let system = System::at(&Backends::now()).await.expect("a system");
    let worker = system.worker(RunLog::default().handler(), in_a_hurry()).expect("a worker");
    worker.run(&system.queue, std::future::ready(())).await;
    worker.run(&system.queue, std::future::pending()).await;
}
