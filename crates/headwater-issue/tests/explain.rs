//! Diagnoses of issues: each reason and its sentence.
#![cfg(feature = "postgres")]

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    AfterFailure, Claim, ClaimOptions, ClaimedIssue, DebounceWindow, DiagnosisReason, Issue,
    IssueDiagnosis, IssueId, RunCompletion, RunFailure, explain,
};
use support::{Backends, LONG, System, event_of, wait_until};

async fn diagnose(system: &System, issue_id: IssueId) -> Result<(IssueDiagnosis, String, Issue)> {
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    let diagnosis = explain(system.store.as_ref(), issue_id).await?;
    let sentence = diagnosis.to_string();
    Ok((diagnosis, sentence, issue))
}

async fn claimed(system: &System, issue_id: IssueId, ttl: Duration) -> Result<ClaimedIssue> {
    let options = ClaimOptions { ttl, ..ClaimOptions::new("worker-7") };
    match system.store.claim(&[issue_id], &options).await?.remove(0) {
        Claim::Won(claimed) => Ok(*claimed),
        other => anyhow::bail!("{other:?}"),
    }
}

macro_rules! on_both {
    ($($name:ident,)*) => {
        mod with_sqlite {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                super::$name(super::Backends::in_memory()).await
            })*
        }

        mod with_postgres {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                super::$name(super::Backends::servers()?).await
            })*
        }
    };
}

on_both! {
    a_queued_issue_without_workers,
    a_queued_and_nudged_issue,
    a_claimed_issue,
    an_expired_claim,
    an_issue_in_a_debounce_window,
    an_issue_in_backoff,
    a_quarantined_issue,
    an_idle_issue,
}

async fn a_queued_issue_without_workers(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    let id = system.record("1", "a").await?.issue_id;
    let (diagnosis, sentence, _) = diagnose(&system, id).await?;
    assert_eq!(diagnosis.reason, DiagnosisReason::NoWorker);
    let expected = format!(
        "issue {id} is queued with 1 event, but no worker is alive; start `headwater serve` or `headwater worker`"
    );
    assert_eq!(sentence, expected);
    assert!(diagnosis.waiting_for.is_some());
    Ok(())
}

async fn a_queued_and_nudged_issue(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    for worker in ["worker-7", "worker-8"] {
        system.store.heartbeat_worker(worker, LONG).await?;
    }
    let id = system.record("1", "a").await?.issue_id;
    system.record("1", "b").await?;
    let (diagnosis, sentence, issue) = diagnose(&system, id).await?;
    assert_eq!(
        diagnosis.reason,
        DiagnosisReason::Queued { workers: 2, nudged_at: issue.nudged_at }
    );
    let nudged = issue.nudged_at.expect("nudged").to_rfc3339();
    let expected = format!(
        "issue {id} is queued with 2 events, last nudged at {nudged}, and waits for 2 workers; if it stays so, run \
         `headwater doctor`"
    );
    assert_eq!(sentence, expected);
    Ok(())
}

async fn a_claimed_issue(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    let id = system.record("1", "a").await?.issue_id;
    let until = claimed(&system, id, LONG).await?.expires_at;
    let (diagnosis, sentence, _) = diagnose(&system, id).await?;
    let DiagnosisReason::Claimed { left, owner_alive: false, .. } = &diagnosis.reason else {
        panic!("{diagnosis:?}");
    };
    assert!(*left <= LONG && !left.is_zero());
    let until = until.to_rfc3339();
    let expected = format!(
        "issue {id} is claimed by worker-7, which is dead: worker heartbeat missing; the claim expires at {until}, then \
         another worker takes over; start one with `headwater worker`"
    );
    assert_eq!(sentence, expected);

    system.store.heartbeat_worker("worker-7", LONG).await?;
    let sentence = diagnose(&system, id).await?.1;
    let expected =
        format!("issue {id} is being processed: claimed by worker-7 until {until}, last");
    assert!(sentence.starts_with(&expected), "{sentence}");
    Ok(())
}

async fn an_expired_claim(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    let id = system.record("1", "a").await?.issue_id;
    let since = claimed(&system, id, Duration::from_millis(50)).await?.expires_at;
    wait_until("the claim to expire", || async {
        let diagnosis = explain(system.store.as_ref(), id).await.expect("the store replies");
        matches!(diagnosis.reason, DiagnosisReason::ClaimExpired { .. })
    })
    .await?;
    let (diagnosis, sentence, _) = diagnose(&system, id).await?;
    assert_eq!(diagnosis.reason, DiagnosisReason::ClaimExpired { owner: "worker-7".into(), since });
    let since = since.to_rfc3339();
    let expected = format!(
        "issue {id} was claimed by worker-7, the claim expired at {since}; the next sweep requeues it; if no worker runs, \
         start one with `headwater worker`"
    );
    assert_eq!(sentence, expected);
    Ok(())
}

async fn an_issue_in_a_debounce_window(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    system.store.heartbeat_worker("worker-7", LONG).await?;
    let debounce = DebounceWindow { quiet_for: LONG, max_wait: LONG, ..DebounceWindow::default() };
    let recorded = system.store.record(&[event_of("1", "a")], &debounce).await.remove(0)?;
    let (diagnosis, sentence, _) = diagnose(&system, recorded.issue_id).await?;
    let not_before = recorded.not_before.expect("it waits");
    let DiagnosisReason::Waiting { not_before: until, left, error: None, .. } = diagnosis.reason
    else {
        panic!("{diagnosis:?}");
    };
    assert!(until == not_before && left <= LONG);
    let expected = format!(
        "issue {0} waits for further events until {1}; to process it now, run `headwater issue retry {0}`",
        recorded.issue_id,
        until.to_rfc3339()
    );
    assert_eq!(sentence, expected);
    Ok(())
}

async fn an_issue_in_backoff(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    system.store.heartbeat_worker("worker-7", LONG).await?;
    let id = system.record("1", "a").await?.issue_id;
    fail(&system, id, AfterFailure::Retry { after: LONG }).await?;
    let (diagnosis, sentence, issue) = diagnose(&system, id).await?;
    assert!(
        matches!(diagnosis.reason, DiagnosisReason::Waiting { error: Some(_), .. }),
        "{diagnosis:?}"
    );
    let until = issue.not_before.expect("it waits").to_rfc3339();
    let expected = format!(
        "issue {id} failed 1 time and waits until {until} (no model); to try now, run `headwater issue retry {id}`"
    );
    assert_eq!(sentence, expected);
    Ok(())
}

async fn a_quarantined_issue(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    let id = system.record("1", "a").await?.issue_id;
    fail(&system, id, AfterFailure::Quarantine).await?;
    let (diagnosis, sentence, issue) = diagnose(&system, id).await?;
    let since = issue.quarantined_at.expect("it is quarantined");
    assert_eq!(
        diagnosis.reason,
        DiagnosisReason::Quarantined { since, error: Some("no model".into()) }
    );
    let since = since.to_rfc3339();
    let expected = format!(
        "issue {id} has been quarantined since {since} (no model); fix the cause, then run `headwater issue release {id}`"
    );
    assert_eq!(sentence, expected);
    Ok(())
}

async fn an_idle_issue(backends: Backends) -> Result<()> {
    let system = System::at(&backends).await?;
    let id = system.record("1", "a").await?.issue_id;
    let claimed = claimed(&system, id, LONG).await?;
    let event_log_ids = claimed.events.iter().map(|event| event.id).collect();
    let done = RunCompletion {
        issue_id: id,
        epoch: claimed.epoch,
        event_log_ids,
        ..RunCompletion::default()
    };
    system.store.complete(&[done]).await?;
    let (diagnosis, sentence, _) = diagnose(&system, id).await?;
    assert_eq!(
        (diagnosis.reason, diagnosis.pending_events, diagnosis.waiting_for),
        (DiagnosisReason::Idle, 0, None)
    );
    let expected = format!("issue {id} is idle: nothing is pending, and every reply is delivered");
    assert!(sentence.starts_with(&expected), "{sentence}");
    Ok(())
}

async fn fail(system: &System, issue_id: IssueId, then: AfterFailure) -> Result<()> {
    let epoch = claimed(system, issue_id, LONG).await?.epoch;
    system.store.fail(&[RunFailure { issue_id, epoch, error: "no model".into(), then }], 5).await?;
    Ok(())
}
