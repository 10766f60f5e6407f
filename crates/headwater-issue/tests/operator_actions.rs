//! Release and retry take effect at once, without a sweeper.

mod support;

use anyhow::Result;
use headwater_issue::{
    HandlerError, IssueError, IssueId, IssueRetried, QuarantineCleared, Run, WorkerConfig, release,
    release_all, retry,
};
use support::{Backends, LONG, System, replies, wait_until};

/// A worker whose first run of an issue fails with this error; later runs succeed.
fn fails_first(system: &System, error: HandlerError) -> Result<support::RunningWorker> {
    let handler = move |run: Run| {
        let error = error.clone();
        async move { if run.epoch().0 == 1 { Err(error) } else { Ok(replies(&run)) } }
    };
    system.start(handler, WorkerConfig::default())
}

async fn wait_failed(system: &System, issue_id: IssueId) -> Result<()> {
    wait_until("the failure", || async {
        let issue =
            system.store.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.attempts == 1
    })
    .await
}

#[tokio::test]
async fn a_released_issue_is_processed_at_once() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let worker = fails_first(&system, HandlerError::quarantine("unknown project"))?;
    let issue_id = system.record("1", "a").await?.issue_id;
    wait_failed(&system, issue_id).await?;
    let store = system.store.as_ref();
    assert_eq!(release(store, &system.nudger, issue_id).await?, QuarantineCleared::Queued);
    wait_until("the run", || async {
        store.check_consistency(1).await.expect("the store replies").processed == 1
    })
    .await?;
    assert_eq!(release(store, &system.nudger, issue_id).await?, QuarantineCleared::NotQuarantined);
    worker.stop().await
}

#[tokio::test]
async fn a_retried_issue_in_backoff_is_processed_at_once() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let worker = fails_first(&system, HandlerError::retry_after(LONG * 10, "rate limit"))?;
    let issue_id = system.record("1", "a").await?.issue_id;
    wait_failed(&system, issue_id).await?;
    let store = system.store.as_ref();
    assert_eq!(retry(store, &system.nudger, issue_id).await?, IssueRetried::Queued);
    system.wait_processed().await?;
    assert_eq!(retry(store, &system.nudger, issue_id).await?, IssueRetried::Idle);
    worker.stop().await
}

#[tokio::test]
async fn release_all_releases_and_nudges_all_issues_and_skips_missing_ones() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let worker = fails_first(&system, HandlerError::quarantine("unknown project"))?;
    let mut issues = vec![IssueId(12345)];
    for number in ["1", "2", "3"] {
        let issue_id = system.record(number, "a").await?.issue_id;
        wait_failed(&system, issue_id).await?;
        issues.push(issue_id);
    }
    let store = system.store.as_ref();
    assert_eq!(release_all(store, &system.nudger, &issues).await?, 3);
    wait_until("the runs", || async {
        store.check_consistency(1).await.expect("the store replies").processed == 3
    })
    .await?;
    assert_eq!(release_all(store, &system.nudger, &issues).await?, 0);
    worker.stop().await
}

#[tokio::test]
async fn a_release_succeeds_while_the_stream_is_unavailable() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let worker = fails_first(&system, HandlerError::quarantine("unknown project"))?;
    let issue_id = system.record("1", "a").await?.issue_id;
    wait_failed(&system, issue_id).await?;
    system.streams.close().await?;
    let store = system.store.as_ref();
    assert_eq!(release(store, &system.nudger, issue_id).await?, QuarantineCleared::Queued);
    worker.abort().await;
    assert_eq!(release_all(store, &system.nudger, &[issue_id]).await?, 0, "already released");
    let missing = release(store, &system.nudger, IssueId(12345)).await;
    assert!(matches!(missing, Err(IssueError::NotFound { .. })), "{missing:?}");
    Ok(())
}
