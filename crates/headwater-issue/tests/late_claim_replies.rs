//! Claims whose reply arrives so late that they may have expired.

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

/// A worker whose claim replies arrive after the TTL. The test moves the time of the database.
async fn late() -> Result<Late> {
    let backends = Backends::in_memory_with_test_clock();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    flaky.delay_claim_replies(CLAIM_TTL);
    let run_log = RunLog::default();
    let heartbeat_every = CLAIM_TTL / 3;
    let config = WorkerConfig { claim_ttl: CLAIM_TTL, heartbeat_every, ..WorkerConfig::default() };
    let worker = system.worker(run_log.handler(), config)?;
    Ok(Late { backends, system, flaky, run_log, worker })
}

#[tokio::test]
async fn a_claim_with_a_late_reply_is_confirmed_before_it_is_handled() -> Result<()> {
    let Late { system, run_log, worker, .. } = late().await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    worker.process_issue(issue_id).await;
    assert_eq!(run_log.runs(), [["a"]]);
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    assert_eq!((issue.pending_events, issue.claim_epoch.0, issue.crashes), (0, 1, 0));
    Ok(())
}

#[tokio::test]
async fn a_claim_with_a_late_reply_that_is_lost_is_not_handled() -> Result<()> {
    let Late { backends, system, flaky, run_log, worker } = late().await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let late = tokio::spawn(async move { worker.process_issue(issue_id).await });
    wait_until("the claim", || async {
        let issue =
            system.store.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.claim_epoch.0 == 1
    })
    .await?;

    // Before the reply arrives, the claim expires and another worker processes the issue.
    flaky.delay_claim_replies(Duration::ZERO);
    backends.clock.as_ref().expect("a test clock").advance(CLAIM_TTL);
    let rescued = RunLog::default();
    system.worker(rescued.handler(), WorkerConfig::default())?.process_issue(issue_id).await;
    assert_eq!(rescued.runs(), [["a"]]);
    late.await?;
    assert!(run_log.runs().is_empty(), "the handler was never called");
    system.assert_consistent().await?;
    Ok(())
}
