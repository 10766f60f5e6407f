//! A stopping worker leaves unprocessed issues to other workers.

mod support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{DebounceWindow, InboxConfig, WorkerConfig};
use support::flaky_store::FlakyStore;
use support::{Backends, RunLog, System, event_of, wait_until};

async fn flaky() -> Result<(System, Arc<FlakyStore>)> {
    let backends = Backends::in_memory();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    Ok((system, flaky))
}

fn no_drain() -> WorkerConfig {
    WorkerConfig { drain: Duration::ZERO, ..WorkerConfig::default() }
}

/// Starts another worker, and asserts that it processes the issue. Without a sweeper, it needs a stream entry for that.
async fn assert_next_worker_processes_it(system: &System) -> Result<()> {
    let run_log = RunLog::default();
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a"]]);
    system.assert_consistent().await?;
    Ok(())
}

#[tokio::test]
async fn a_nudge_without_a_claim_before_shutdown_is_not_acknowledged() -> Result<()> {
    let (system, flaky) = flaky().await?;
    flaky.block_claims(true);
    system.record("1", "a").await?;
    let worker = system.start(RunLog::default().handler(), no_drain())?;
    wait_until("a claim", || async { flaky.blocked_claims() > 0 }).await?;
    worker.stop().await?;

    flaky.block_claims(false);
    assert_next_worker_processes_it(&system).await
}

#[tokio::test]
async fn an_issue_of_the_local_queue_that_was_not_claimed_before_shutdown_is_nudged() -> Result<()>
{
    let (system, flaky) = flaky().await?;
    flaky.block_claims(true);
    let recorded =
        system.store.record(&[event_of("1", "a")], &DebounceWindow::default()).await.remove(0)?;
    let worker = system.start(RunLog::default().handler(), no_drain())?;
    assert_eq!(worker.worker.offer([recorded.issue_id]), 1);
    wait_until("a claim", || async { flaky.blocked_claims() > 0 }).await?;
    worker.stop().await?;

    flaky.block_claims(false);
    assert_next_worker_processes_it(&system).await
}

#[tokio::test]
async fn a_stopped_worker_nudges_instead_of_processing() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let worker = system.worker(RunLog::default().handler(), no_drain())?;
    worker.run(&system.queue, std::future::ready(())).await;
    let recorded =
        system.store.record(&[event_of("1", "a")], &DebounceWindow::default()).await.remove(0)?;
    worker.process_issue(recorded.issue_id).await;
    assert_next_worker_processes_it(&system).await
}

#[tokio::test]
#[should_panic(expected = "a worker runs once, create a new one")]
async fn running_a_worker_twice_panics() {
    let system = System::at(&Backends::in_memory()).await.expect("a system");
    let worker = system.worker(RunLog::default().handler(), no_drain()).expect("a worker");
    worker.run(&system.queue, std::future::ready(())).await;
    worker.run(&system.queue, std::future::pending()).await;
}
