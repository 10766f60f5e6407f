//! One failing issue in a batch does not affect the others.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    Claim, ClaimOptions, DebounceWindow, HandlerError, InboxConfig, IssueError, NewEvent,
    ProcessingStatus, Resolution, Run, WorkerConfig, limits,
};
use sqlx::{Connection, PgConnection};
use support::flaky_store::FlakyStore;
use support::{Backends, Gate, RunLog, System, event_of, replies, wait_until};

#[tokio::test]
async fn a_completion_rejected_by_the_database_does_not_fail_the_batch() -> Result<()> {
    let backends = Backends::in_memory();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    let gate = Gate::default();
    let handler = {
        let gate = gate.clone();
        move |run: Run| {
            let gate = gate.clone();
            async move {
                gate.wait().await;
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    };
    let mut issues = Vec::new();
    for issue in 0..10 {
        issues.push(system.record(&issue.to_string(), "a").await?.issue_id);
    }
    flaky.reject_completions_of(issues[3]);
    // One call at a time, so that completions are batched.
    let config = WorkerConfig { calls_max: 1, ..WorkerConfig::default() };
    let worker = system.worker(handler, config)?;
    let looking = issues.iter().map(|issue| worker.process_issue(*issue));
    let looking = futures_util::future::join_all(looking);
    let opening = async {
        gate.wait_for_arrivals(10).await?;
        gate.open_all();
        anyhow::Ok(())
    };
    tokio::join!(looking, opening).1?;
    assert!(flaky.rejected_batches() > 0, "completions were batched");
    for (number, id) in issues.iter().enumerate() {
        let issue = system.store.issue(*id).await?.expect("it exists");
        let expected = if number == 3 { (1, 1) } else { (0, 0) };
        assert_eq!((issue.attempts, issue.pending_events), expected, "issue {number}");
    }
    Ok(())
}

#[tokio::test]
async fn a_result_that_the_database_never_stores_is_deferred_and_counts_no_attempt() -> Result<()> {
    let backends = Backends::in_memory();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    let issue_id = system.record("1", "a").await?.issue_id;
    flaky.block_completions_of(issue_id);
    let config = WorkerConfig {
        claim_ttl: Duration::from_secs(5),
        heartbeat_every: Duration::from_millis(500),
        ..WorkerConfig::default()
    };
    let handler = |_: Run| async { Ok::<_, HandlerError>(Resolution::new()) };
    let worker = system.start(handler, config)?;
    wait_until("the end of the run", || async {
        let issue =
            system.store.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.last_error.unwrap_or_default().contains("not stored")
    })
    .await?;
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    assert_eq!((issue.attempts, issue.crashes, issue.quarantined_at), (0, 0, None));
    worker.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn while_one_issue_is_locked_other_issues_are_recorded_renewed_and_completed() -> Result<()> {
    let backends = Backends::servers()?;
    let (system, gate) = (System::at(&backends).await?, Gate::default());
    let locked = system.record("1", "a").await?.issue_id;
    let free = system.record("2", "a").await?.issue_id;
    let run_log = RunLog::default();
    let handler = {
        let (run_log, gate) = (run_log.clone(), gate.clone());
        move |run: Run| {
            let (run_log, gate) = (run_log.clone(), gate.clone());
            async move {
                run_log.record(&run);
                gate.wait().await;
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    };
    let claim_ttl = Duration::from_secs(15);
    let config = WorkerConfig {
        claim_ttl,
        heartbeat_every: Duration::from_secs(2),
        ..WorkerConfig::default()
    };
    let worker = system.start(handler, config)?;
    gate.wait_for_arrivals(2).await?;

    let mut connection = PgConnection::connect(&backends.database).await?;
    let mut holder = connection.begin().await?;
    sqlx::query("SELECT 1 FROM issues WHERE id = $1 FOR UPDATE")
        .bind(locked.0)
        .execute(&mut *holder)
        .await?;
    let events = [event_of("1", "b"), event_of("2", "b"), event_of("1", "c"), event_of("3", "b")];
    let recorded = system.store.record(&events, &DebounceWindow::default()).await;
    let is_unavailable =
        |result: &Result<_, IssueError>| result.as_ref().is_err_and(IssueError::is_transient);
    assert!(is_unavailable(&recorded[0]) && is_unavailable(&recorded[2]), "{recorded:?}");
    assert!(recorded[1].is_ok() && recorded[3].is_ok(), "{recorded:?}");
    // Longer than the TTL: only heartbeats keep the claim.
    tokio::time::sleep(claim_ttl).await;
    let issue = system.store.issue(free).await?.expect("it exists");
    assert_eq!((issue.status, issue.claim_epoch.0), (ProcessingStatus::Processing, 1));
    gate.open_all();
    wait_until("the end of the run", || async {
        let issue = system.store.issue(free).await.expect("the store replies").expect("it exists");
        issue.last_processed_at.is_some()
    })
    .await?;
    holder.rollback().await?;
    worker.abort().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_in_one_batch_share_its_byte_limit() -> Result<()> {
    for backends in [Backends::in_memory(), Backends::servers()?] {
        let system = System::at(&backends).await?;
        let payload = format!("\"{}\"", "x".repeat(limits::PAYLOAD_BYTES_MAX - 2));
        let mut issues = Vec::new();
        for issue in 0..8 {
            for key in 0..5 {
                let event = NewEvent {
                    payload: payload.clone(),
                    ..event_of(&issue.to_string(), &key.to_string())
                };
                issues.push(system.inbox.record(event).await?.issue_id);
            }
        }
        issues.dedup();
        // 8 issues would be 40 MiB.
        let claims = system.store.claim(&issues, &ClaimOptions::new("w")).await?;
        let bytes = |claim: &Claim| match claim {
            Claim::Won(claimed) => {
                claimed.events.iter().map(|event| event.payload.len()).sum::<usize>()
            }
            other => panic!("{other:?}"),
        };
        let all: usize = claims.iter().map(bytes).sum();
        assert_eq!(all, limits::BATCH_BYTES_MAX, "four of five events each");
    }
    Ok(())
}
