//! Failed, deferred and released runs, and quarantine.

use std::time::Duration;

use super::env::{StoreTestEnv, TTL, completion, options, won};
use crate::TestResult;
use headwater_issue::limits::ERROR_BYTES_MAX;
use headwater_issue::{
    AfterFailure, Claim, ClaimRelease, ClaimReleased, ClaimedIssue, FailureOutcome,
    ProcessingStatus, QuarantineCleared, ReleaseReason, RunFailure,
};

const BACKOFF: Duration = Duration::from_secs(600);

fn failure(claimed: &ClaimedIssue, then: AfterFailure) -> RunFailure {
    let error = "the model is unavailable".to_owned();
    RunFailure { issue_id: claimed.issue.id, epoch: claimed.epoch, error, then }
}

fn retry(claimed: &ClaimedIssue) -> RunFailure {
    failure(claimed, AfterFailure::Retry { after: BACKOFF })
}

pub async fn a_failed_run_is_retried_after_its_backoff(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let failed = env.store.fail(&[retry(&claimed)], 3).await?.remove(0);
    assert!(matches!(failed, FailureOutcome::Requeued { attempts: 1, .. }), "{failed:?}");
    let Claim::NotYet { wait, .. } = env.try_claim(issue).await? else {
        panic!("expected a backoff")
    };
    assert!(wait <= BACKOFF);

    // A new event does not end the backoff.
    env.record("42", "b").await?;
    assert!(matches!(env.try_claim(issue).await?, Claim::NotYet { .. }));
    env.advance(BACKOFF).await?;
    let again = env.claim(issue).await?;
    assert_eq!((again.events.len(), again.issue.attempts), (2, 1));
    assert_eq!(again.issue.last_error.as_deref(), Some("the model is unavailable"));
    assert_eq!(again.events[0].processing_error.as_deref(), Some("the model is unavailable"));
    env.assert_consistent().await
}

pub async fn the_last_failure_quarantines_and_keeps_the_error(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.store.fail(&[retry(&claimed)], 2).await?;
    env.advance(BACKOFF).await?;
    let claimed = env.claim(issue).await?;
    let failed = env.store.fail(&[retry(&claimed)], 2).await?.remove(0);
    assert_eq!(failed, FailureOutcome::Quarantined { attempts: 2 });

    let after = env.issue(issue).await?;
    assert_eq!((after.status, after.pending_events), (ProcessingStatus::Idle, 1));
    assert!(after.quarantined_at.is_some());
    assert_eq!(after.last_error.as_deref(), Some("the model is unavailable"));
    let log = env.store.event_logs(issue, &Default::default(), 1).await?.remove(0);
    assert_eq!(log.processing_error.as_deref(), Some("the model is unavailable"));
    let claim = env.try_claim(issue).await?;
    assert!(matches!(claim, Claim::Quarantined { just_now: false, .. }), "{claim:?}");
    env.assert_consistent().await
}

pub async fn a_deferred_run_counts_no_attempt_however_often(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.store.fail(&[retry(&claimed)], 2).await?;
    for _ in 0..3 {
        env.advance(BACKOFF).await?;
        let claimed = env.claim(issue).await?;
        let deferred = failure(&claimed, AfterFailure::Defer { after: BACKOFF });
        let failed = env.store.fail(&[deferred], 2).await?.remove(0);
        assert!(matches!(failed, FailureOutcome::Requeued { attempts: 1, .. }), "{failed:?}");
        assert!(matches!(env.try_claim(issue).await?, Claim::NotYet { .. }));
        assert_eq!(env.issue(issue).await?.last_error.as_deref(), Some("the model is unavailable"));
    }
    env.advance(BACKOFF).await?;
    let claimed = env.claim(issue).await?;
    let failed = env.store.fail(&[retry(&claimed)], 2).await?.remove(0);
    assert_eq!(failed, FailureOutcome::Quarantined { attempts: 2 });
    env.assert_consistent().await
}

pub async fn a_permanent_failure_quarantines_at_once(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let permanent = failure(&claimed, AfterFailure::Quarantine);
    let failed = env.store.fail(&[permanent], 5).await?.remove(0);
    assert_eq!(failed, FailureOutcome::Quarantined { attempts: 1 });
    env.assert_consistent().await
}

pub async fn events_for_a_quarantined_issue_wait_for_its_release(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.store.fail(&[failure(&claimed, AfterFailure::Quarantine)], 5).await?;
    let recorded = env.record("42", "b").await?;
    assert!(!recorded.nudge && !recorded.duplicate);
    assert_eq!(env.issue(issue).await?.status, ProcessingStatus::Idle);
    env.assert_consistent().await?;

    assert_eq!(env.second.release(issue).await?, QuarantineCleared::Queued);
    let claimed = env.claim(issue).await?;
    assert_eq!((claimed.events.len(), claimed.issue.attempts), (2, 0));
    env.complete(completion(&claimed)).await?;
    env.assert_consistent().await
}

pub async fn a_failure_of_a_lost_claim_is_fenced(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let other = env.record("43", "b").await?.issue_id;
    let lost = env.claim(issue).await?;
    env.advance(TTL).await?;
    won(env.second.claim(&[issue], &options("b")).await?.remove(0));
    let live = env.claim(other).await?;
    let before = env.issue(issue).await?;

    let release = |claimed: &ClaimedIssue| ClaimRelease {
        issue_id: claimed.issue.id,
        epoch: claimed.epoch,
        reason: ReleaseReason::Shutdown,
    };
    assert_eq!(env.store.release_claims(&[release(&lost)]).await?, [ClaimReleased::Fenced]);
    let failed = env.store.fail(&[retry(&lost), retry(&live), retry(&live)], 5).await?;
    assert_eq!((failed[0], failed[2]), (FailureOutcome::Fenced, FailureOutcome::Fenced));
    assert!(matches!(failed[1], FailureOutcome::Requeued { attempts: 1, .. }));
    assert_eq!(env.issue(issue).await?, before);
    let log = env.store.event_logs(issue, &Default::default(), 1).await?.remove(0);
    assert_eq!(log.processing_error, None);
    Ok(())
}

pub async fn a_released_claim_counts_no_attempt(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    for (reason, superseded) in [(ReleaseReason::Shutdown, 0), (ReleaseReason::Superseded, 1)] {
        let claimed = env.claim(issue).await?;
        let release = ClaimRelease { issue_id: issue, epoch: claimed.epoch, reason };
        let released = env.store.release_claims(&[release, release]).await?;
        assert_eq!(released, [ClaimReleased::Requeued { not_before: None }, ClaimReleased::Fenced]);
        let after = env.issue(issue).await?;
        assert_eq!((after.status, after.attempts), (ProcessingStatus::Queued, 0));
        assert_eq!((after.crashes, after.superseded), (0, superseded));
    }
    env.assert_consistent().await
}

pub async fn a_success_resets_the_failure_counters(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.store.fail(&[failure(&claimed, AfterFailure::Retry { after: Duration::ZERO })], 5).await?;
    let claimed = env.claim(issue).await?;
    env.complete(completion(&claimed)).await?;
    let after = env.issue(issue).await?;
    assert_eq!((after.attempts, after.last_error), (0, None));
    let log = env.store.event_logs(issue, &Default::default(), 1).await?.remove(0);
    assert_eq!(log.processing_error, None);
    Ok(())
}

pub async fn an_error_text_is_sanitized_and_truncated(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let error = format!("nul \0 {}", "é".repeat(ERROR_BYTES_MAX));
    env.store.fail(&[RunFailure { error, ..retry(&claimed) }], 5).await?;
    let kept = env.issue(issue).await?.last_error.expect("an error is stored");
    assert!(kept.starts_with("nul \u{fffd} éé") && kept.len() <= ERROR_BYTES_MAX + 2);
    Ok(())
}

pub async fn a_quarantine_leaves_a_dead_letter_that_remains_after_the_release(
    env: StoreTestEnv,
) -> TestResult {
    let recorded = env.record("42", "a").await?;
    let issue = recorded.issue_id;
    env.record("42", "b").await?;
    for round in 1..=2 {
        let claimed = env.claim(issue).await?;
        env.store.fail(&[retry(&claimed)], 2).await?;
        let letters = env.second.dead_letters(None, 10).await?;
        assert_eq!(letters.len(), round - 1, "only the last failure leaves a dead letter");
        env.advance(BACKOFF).await?;
    }
    let letter = env.second.dead_letters(None, 10).await?.remove(0);
    assert_eq!((letter.issue_id, letter.attempts, letter.crashes), (issue, 2, 0));
    assert_eq!((letter.pending_events, letter.event_log_id), (2, recorded.event_log_id));
    assert_eq!((letter.integration.as_str(), letter.provider.as_str()), ("main", "github"));
    assert_eq!(letter.external_issue_id, "42");
    assert_eq!((letter.error.as_str(), letter.released_at), ("the model is unavailable", None));

    env.store.release(issue).await?;
    let claimed = env.claim(issue).await?;
    env.store.fail(&[failure(&claimed, AfterFailure::Quarantine)], 5).await?;
    env.store.retry(issue).await?;
    let letters = env.store.dead_letters(None, 10).await?;
    assert_eq!(letters.len(), 2);
    assert!(letters.iter().all(|letter| letter.released_at.is_some()), "{letters:?}");
    assert_eq!(env.store.dead_letters(Some(letters[0].id), 10).await?, letters[1..]);
    Ok(())
}

pub async fn a_claim_that_quarantines_leaves_a_dead_letter(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    env.claim(issue).await?;
    env.advance(TTL).await?;
    let strict = headwater_issue::ClaimOptions { crashes_max: 1, ..options("b") };
    let claim = env.store.claim(&[issue], &strict).await?.remove(0);
    assert!(matches!(claim, Claim::Quarantined { just_now: true, .. }), "{claim:?}");
    let letter = env.store.dead_letters(None, 10).await?.remove(0);
    let error = "claim of worker `a` expired";
    assert_eq!((letter.error.as_str(), letter.attempts, letter.crashes), (error, 0, 1));
    let log = env.store.event_logs(issue, &Default::default(), 1).await?.remove(0);
    assert_eq!(log.processing_error.as_deref(), Some(error));
    env.assert_consistent().await
}
