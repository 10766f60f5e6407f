//! What an operator asks for happens at once: nobody sweeps in these tests.

mod support;

use anyhow::Result;
use headwater_issue::{
    HandlerError, IssueError, IssueId, IssueRetried, QuarantineCleared, Run, WorkerConfig, release,
    release_all, retry,
};
use support::{Backends, LONG, System, replies, wait_until};

/// A worker whose first run of an issue fails with this, and whose later ones succeed.
fn fails_first(system: &System, error: HandlerError) -> Result<support::RunningWorker> {
    let handler = move |run: Run| {
        let error = error.clone();
        async move { if run.epoch().0 == 1 { Err(error) } else { Ok(replies(&run)) } }
    };
    system.start(handler, WorkerConfig::default())
}

async fn failed(system: &System, issue_id: IssueId) -> Result<()> {
    wait_until("the failure", || async {
        let issue = system.store.issue(issue_id).await.expect("it answers").expect("it exists");
        issue.attempts == 1
    })
    .await
}

#[tokio::test]
async fn an_issue_that_is_released_is_worked_on_at_once() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
    let worker = fails_first(&system, HandlerError::quarantine("unknown project"))?;
    let issue_id = system.record("1", "a").await?.issue_id;
    failed(&system, issue_id).await?;
    let store = system.store.as_ref();
    assert_eq!(release(store, &system.nudger, issue_id).await?, QuarantineCleared::Queued);
    wait_until("the run", || async {
        store.check_consistency(1).await.expect("it answers").processed == 1
    })
    .await?;
    assert_eq!(release(store, &system.nudger, issue_id).await?, QuarantineCleared::NotQuarantined);
    worker.stop().await
}

#[tokio::test]
async fn an_issue_that_waits_for_its_backoff_is_worked_on_at_once_if_an_operator_asks() -> Result<()>
{
    let system = System::at(&Backends::now()).await?;
    let worker = fails_first(&system, HandlerError::retry_after(LONG * 10, "rate limit"))?;
    let issue_id = system.record("1", "a").await?.issue_id;
    failed(&system, issue_id).await?;
    let store = system.store.as_ref();
    assert_eq!(retry(store, &system.nudger, issue_id).await?, IssueRetried::Queued);
    system.wait_processed().await?;
    assert_eq!(retry(store, &system.nudger, issue_id).await?, IssueRetried::Idle);
    worker.stop().await
}

#[tokio::test]
async fn all_are_released_and_nudged_at_once_and_one_that_is_gone_stops_nobody() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
    let worker = fails_first(&system, HandlerError::quarantine("unknown project"))?;
    let mut issues = vec![IssueId(12345)];
    for number in ["1", "2", "3"] {
        let issue_id = system.record(number, "a").await?.issue_id;
        failed(&system, issue_id).await?;
        issues.push(issue_id);
    }
    let store = system.store.as_ref();
    assert_eq!(release_all(store, &system.nudger, &issues).await?, 3);
    wait_until("the runs", || async {
        store.check_consistency(1).await.expect("it answers").processed == 3
    })
    .await?;
    assert_eq!(release_all(store, &system.nudger, &issues).await?, 0);
    worker.stop().await
}

#[tokio::test]
async fn a_release_counts_although_the_stream_is_away() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
    let worker = fails_first(&system, HandlerError::quarantine("unknown project"))?;
    let issue_id = system.record("1", "a").await?.issue_id;
    failed(&system, issue_id).await?;
    system.streams.close().await?;
    let store = system.store.as_ref();
    assert_eq!(release(store, &system.nudger, issue_id).await?, QuarantineCleared::Queued);
    worker.abort().await;
    assert_eq!(release_all(store, &system.nudger, &[issue_id]).await?, 0, "it is done");
    let missing = release(store, &system.nudger, IssueId(12345)).await;
    assert!(matches!(missing, Err(IssueError::NotFound { .. })), "{missing:?}");
    Ok(())
}
