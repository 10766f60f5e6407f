//! Ended runs: the rows of `issue_runs`.

use std::time::Duration;

use super::env::{StoreTestEnv, TTL, completion, event, ids, options, won};
use crate::TestResult;
use headwater_issue::history::{self, DeleteCondition};
use headwater_issue::{
    AfterFailure, ClaimEpoch, ClaimOptions, ClaimRelease, CompletionOutcome, IssueId, IssueRun,
    ReleaseReason, RunFailure, RunResult, SweepOptions,
};

/// The ended runs of an issue, oldest first.
async fn runs(env: &StoreTestEnv, issue: IssueId) -> TestResult<Vec<IssueRun>> {
    let mut runs = env.second.runs(issue, None, 100).await?;
    runs.reverse();
    Ok(runs)
}

/// Number, worker, result, error and events of a run.
type RunFacts = (i64, &'static str, RunResult, Option<String>, u64);

fn facts(run: &IssueRun) -> (i64, &str, RunResult, Option<String>, u64) {
    (run.epoch.0, run.worker.as_str(), run.result, run.error.clone(), run.events)
}

pub async fn every_end_of_a_run_leaves_a_row(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "1").await?.issue_id;
    let fail = async |then| -> TestResult {
        let (epoch, error) = (env.claim(issue).await?.epoch, "broken".to_owned());
        env.store.fail(&[RunFailure { issue_id: issue, epoch, error, then }], 99).await?;
        env.store.retry(issue).await?;
        Ok(())
    };
    let release = async |reason| -> TestResult {
        let epoch = env.claim(issue).await?.epoch;
        env.store.release_claims(&[ClaimRelease { issue_id: issue, epoch, reason }]).await?;
        Ok(())
    };
    assert_eq!(runs(&env, issue).await?, []);
    fail(AfterFailure::Retry { after: TTL }).await?;
    fail(AfterFailure::Defer { after: TTL }).await?;
    fail(AfterFailure::Quarantine).await?;
    release(ReleaseReason::Superseded).await?;
    release(ReleaseReason::Shutdown).await?;

    // One claim expires and is taken over, one is swept, and the result of the first comes late.
    let late = env.claim(issue).await?;
    env.advance(TTL).await?;
    won(env.second.claim(&[issue], &options("b")).await?.remove(0));
    env.advance(TTL).await?;
    env.store.sweep(&SweepOptions::default()).await?;
    assert_eq!(env.complete(completion(&late)).await?, CompletionOutcome::Fenced);

    // The last one is completed twice, and its claim is released and failed afterwards: it stays done.
    env.record_all(&[event("42", "2"), event("42", "3")]).await?;
    let claimed = env.claim(issue).await?;
    assert_eq!(runs(&env, issue).await?.len(), 7, "a run in progress has no row");
    env.complete(completion(&claimed)).await?;
    env.complete(completion(&claimed)).await?;
    let (epoch, reason) = (claimed.epoch, ReleaseReason::Shutdown);
    env.store.release_claims(&[ClaimRelease { issue_id: issue, epoch, reason }]).await?;
    let (error, then) = ("late".to_owned(), AfterFailure::Quarantine);
    env.store.fail(&[RunFailure { issue_id: issue, epoch, error, then }], 5).await?;

    let found = runs(&env, issue).await?;
    let broken = || Some("broken".to_owned());
    let expected: [RunFacts; 8] = [
        (1, "a", RunResult::Failed, broken(), 0),
        (2, "a", RunResult::Deferred, broken(), 0),
        (3, "a", RunResult::Quarantined, broken(), 0),
        (4, "a", RunResult::Superseded, None, 0),
        (5, "a", RunResult::Released, None, 0),
        (6, "a", RunResult::Fenced, None, 0),
        (7, "b", RunResult::Expired, None, 0),
        (8, "a", RunResult::Done, None, 3),
    ];
    assert_eq!(found.iter().map(facts).collect::<Vec<_>>(), expected);
    assert!(found.iter().all(|run| run.issue_id == issue && run.claimed_at <= run.ended_at));
    let lasted = found[5].ended_at.since(found[5].claimed_at);
    assert!(lasted >= TTL && lasted < TTL + Duration::from_secs(600), "{lasted:?}");

    // A claim that expires too often quarantines its issue: in a claim, and in a sweep.
    for (name, sweeps) in [("43", false), ("44", true)] {
        let issue = env.record(name, name).await?.issue_id;
        let options = ClaimOptions { crashes_max: 1, ..options("a") };
        won(env.store.claim(&[issue], &options).await?.remove(0));
        env.advance(TTL).await?;
        if sweeps {
            env.store.sweep(&SweepOptions { crashes_max: 1, ..Default::default() }).await?;
        } else {
            env.store.claim(&[issue], &options).await?;
        }
        let found = runs(&env, issue).await?;
        let expected: [RunFacts; 1] = [(1, "a", RunResult::Quarantined, None, 0)];
        assert_eq!(found.iter().map(facts).collect::<Vec<_>>(), expected, "{name}");
    }
    env.assert_consistent().await
}

pub async fn runs_are_paged_newest_first_with_their_events(env: StoreTestEnv) -> TestResult {
    let mut issue = IssueId::default();
    let mut events = Vec::new();
    for n in 0..5 {
        issue = env.record("42", &n.to_string()).await?.issue_id;
        let claimed = env.claim(issue).await?;
        events.push(ids(&claimed));
        env.complete(completion(&claimed)).await?;
        env.advance(TTL).await?;
    }
    env.record("42", "pending").await?;
    let mut listed = Vec::new();
    let mut before = None;
    loop {
        let page = env.store.runs(issue, before, 2).await?;
        let Some(last) = page.last() else { break };
        before = Some(last.epoch);
        listed.extend(page);
    }
    assert_eq!(listed.iter().map(|run| run.epoch.0).collect::<Vec<_>>(), [5, 4, 3, 2, 1]);
    for (run, events) in listed.iter().rev().zip(&events) {
        let (from, to) = (run.ended_at, run.ended_at);
        let logs = env.second.processed_event_logs(issue, from, to, 10).await?;
        assert_eq!(logs.iter().map(|log| log.id).collect::<Vec<_>>(), *events);
    }
    // The rows of a run have the time of its end.
    let replied = env.replied("43", &["a", "b"]).await?;
    let run = env.store.runs(replied, None, 1).await?.remove(0);
    let (from, to) = (run.ended_at, run.ended_at);
    assert_eq!(env.store.committed_outbox(replied, from, to, 10).await?.len(), 2);
    assert_eq!(env.store.committed_outbox(replied, from, to, 1).await?.len(), 1);
    assert_eq!(env.store.committed_outbox(issue, from, to, 10).await?, []);
    let (first, last) = (listed[4].ended_at, listed[0].ended_at);
    let logs = env.store.processed_event_logs(issue, first, last, 10).await?;
    assert_eq!(logs.iter().map(|log| log.id).collect::<Vec<_>>(), events.concat());
    assert_eq!(env.store.processed_event_logs(issue, first, last, 3).await?.len(), 3);
    assert_eq!(env.store.runs(IssueId(987_654), None, 10).await?, []);
    Ok(())
}

pub async fn runs_are_deleted_after_their_retention_and_with_their_issue(
    env: StoreTestEnv,
) -> TestResult {
    let mut issues = Vec::new();
    for n in 0..3 {
        issues.push(env.replied(&n.to_string(), &[]).await?);
    }
    let delete = async |keep: Duration| -> TestResult<usize> {
        let (mut next, mut deleted) = (Some((IssueId::default(), ClaimEpoch::default())), 0);
        while let Some(after) = next {
            let page = history::delete_runs(env.store.as_ref(), after, keep, 2).await?;
            (deleted, next) = (deleted + page.found.len(), page.next);
        }
        Ok(deleted)
    };
    let left = async || -> TestResult<usize> {
        let mut left = 0;
        for issue in &issues {
            left += runs(&env, *issue).await?.len();
        }
        Ok(left)
    };
    // Older than anything that the clock of a test writes.
    let keep = Duration::from_secs(20 * 365 * 86_400);
    assert_eq!((delete(keep).await?, left().await?), (0, 3));
    let mut transaction = env.store.begin().await?;
    let age = "UPDATE issue_runs SET ended_at = headwater_time($2) WHERE issue_id = $1";
    transaction.connection().execute(age, &[issues[2].0.into(), 1000.into()]).await?;
    transaction.commit().await?;
    assert_eq!((delete(keep).await?, left().await?), (1, 2));

    let mut transaction = env.store.begin().await?;
    let condition = DeleteCondition::NotInUse;
    assert!(history::lock_deletable(transaction.as_mut(), issues[0], condition).await?);
    assert!(!history::delete_history_of(transaction.as_mut(), issues[0], 100).await?);
    history::delete_issue(transaction.as_mut(), issues[0]).await?;
    transaction.commit().await?;
    assert_eq!((runs(&env, issues[0]).await?.len(), left().await?), (0, 1));
    assert_eq!((delete(Duration::ZERO).await?, left().await?), (1, 0));
    Ok(())
}

pub async fn a_run_that_was_already_stored_does_not_prevent_a_completion(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.replied("42", &[]).await?;
    // As if a part of the tables had been restored from a backup.
    let mut transaction = env.store.begin().await?;
    let reset = "UPDATE issues SET claim_epoch = 0, completed_epoch = 0 WHERE id = $1";
    transaction.connection().execute(reset, &[issue.0.into()]).await?;
    transaction.commit().await?;
    env.record("42", "again").await?;
    let claimed = env.claim(issue).await?;
    let completed = env.complete(completion(&claimed)).await?;
    assert!(matches!(completed, CompletionOutcome::Committed { repeated: false, .. }));
    assert_eq!(runs(&env, issue).await?.len(), 1);
    env.assert_consistent().await
}
