//! A worker that stops leaves to others what it could not begin, and does not begin anew.

mod support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{InboxConfig, Quiet, WorkerConfig};
use support::flaky::Flaky;
use support::{Journal, Place, System, event_of, until};

async fn flaky() -> Result<(System, Arc<Flaky>)> {
    let place = Place::now();
    let flaky = Flaky::new(place.store().await?);
    let system = System::on(flaky.clone(), place.streams().await?, InboxConfig::default())?;
    Ok((system, flaky))
}

fn in_a_hurry() -> WorkerConfig {
    WorkerConfig { drain: Duration::ZERO, ..WorkerConfig::default() }
}

/// A worker comes after the one that stopped. There is no sweep, so only an entry of the stream brings it to the issue.
async fn successor_does_the_work(system: &System) -> Result<()> {
    let journal = Journal::default();
    let worker = system.start(journal.handler(), WorkerConfig::default())?;
    system.settled().await?;
    worker.stop().await?;
    assert_eq!(journal.runs(), [["a"]]);
    system.assert_balanced().await?;
    Ok(())
}

#[tokio::test]
async fn a_nudge_that_led_to_no_claim_before_the_stop_is_not_acknowledged() -> Result<()> {
    let (system, flaky) = flaky().await?;
    flaky.block_claims(true);
    system.record("1", "a").await?;
    let worker = system.start(Journal::default().handler(), in_a_hurry())?;
    until("a claim", || async { flaky.blocked_claims() > 0 }).await?;
    worker.stop().await?;

    flaky.block_claims(false);
    successor_does_the_work(&system).await
}

#[tokio::test]
async fn an_issue_of_the_agenda_that_was_not_claimed_before_the_stop_is_nudged_for() -> Result<()> {
    let (system, flaky) = flaky().await?;
    flaky.block_claims(true);
    let recorded = system.store.record(&[event_of("1", "a")], &Quiet::default()).await.remove(0)?;
    let worker = system.start(Journal::default().handler(), in_a_hurry())?;
    assert_eq!(worker.worker.offer([recorded.issue_id]), 1);
    until("a claim", || async { flaky.blocked_claims() > 0 }).await?;
    worker.stop().await?;

    flaky.block_claims(false);
    successor_does_the_work(&system).await
}

#[tokio::test]
async fn a_nudge_that_comes_to_a_worker_that_has_stopped_is_handed_on() -> Result<()> {
    let system = System::at(&Place::now()).await?;
    let worker = system.worker(Journal::default().handler(), in_a_hurry())?;
    worker.run(&system.queue, std::future::ready(())).await;
    let recorded = system.store.record(&[event_of("1", "a")], &Quiet::default()).await.remove(0)?;
    worker.look_at(recorded.issue_id).await;
    successor_does_the_work(&system).await
}

#[tokio::test]
#[should_panic(expected = "a worker runs once, make a new one")]
async fn a_worker_that_is_run_twice_says_so_at_once() {
    let system = System::at(&Place::now()).await.expect("a system");
    let worker = system.worker(Journal::default().handler(), in_a_hurry()).expect("a worker");
    worker.run(&system.queue, std::future::ready(())).await;
    worker.run(&system.queue, std::future::pending()).await;
}
