//! Claims whose answer was so long on its way that they may have run out meanwhile.

mod support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{InboxConfig, Worker, WorkerConfig};
use support::flaky_store::FlakyStore;
use support::{Backends, RunLog, System, wait_until};

const CLAIM_TTL: Duration = Duration::from_secs(3);

struct Late {
    backends: Backends,
    system: System,
    flaky: Arc<FlakyStore>,
    run_log: RunLog,
    worker: Worker,
}

/// A worker whose claims come when it cannot trust them any more. Time in the database is moved by the test.
async fn late() -> Result<Late> {
    let backends = Backends::memory();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    flaky.slow_down_claims(CLAIM_TTL);
    let run_log = RunLog::default();
    let heartbeat_every = CLAIM_TTL / 3;
    let config = WorkerConfig { claim_ttl: CLAIM_TTL, heartbeat_every, ..WorkerConfig::default() };
    let worker = system.worker(run_log.handler(), config)?;
    Ok(Late { backends, system, flaky, run_log, worker })
}

#[tokio::test]
async fn a_claim_that_was_won_late_is_asked_for_again_and_then_handled() -> Result<()> {
    let Late { system, run_log, worker, .. } = late().await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    worker.process_issue(issue_id).await;
    assert_eq!(run_log.runs(), [["a"]]);
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    assert_eq!((issue.pending_events, issue.claim_epoch.0, issue.crashes), (0, 1, 0));
    Ok(())
}

#[tokio::test]
async fn a_claim_that_was_won_late_and_is_lost_by_then_is_not_handled() -> Result<()> {
    let Late { backends, system, flaky, run_log, worker } = late().await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let late = tokio::spawn(async move { worker.process_issue(issue_id).await });
    wait_until("the claim", || async {
        let issue = system.store.issue(issue_id).await.expect("it answers").expect("it exists");
        issue.claim_epoch.0 == 1
    })
    .await?;

    // Before the answer arrives, the claim runs out and another worker does the work.
    flaky.slow_down_claims(Duration::ZERO);
    backends.clock.as_ref().expect("time is ours").advance(CLAIM_TTL);
    let rescued = RunLog::default();
    system.worker(rescued.handler(), WorkerConfig::default())?.process_issue(issue_id).await;
    assert_eq!(rescued.runs(), [["a"]]);
    late.await?;
    assert!(run_log.runs().is_empty(), "the handler was never called");
    system.assert_consistent().await?;
    Ok(())
}
