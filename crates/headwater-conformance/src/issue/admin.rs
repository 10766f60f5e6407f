//! Administrative operations.

use std::time::Duration;

use super::env::{INTEGRATION, StoreTestEnv, TTL, completion, event};
use crate::TestResult;
use headwater_issue::{
    AfterFailure, Backlog, Claim, EventLogFilter, EventLogId, IssueError, IssueFilter, IssueId,
    IssueRetried, OutboxId, ProcessingStatus, QuarantineCleared, RunFailure,
};

async fn quarantine(env: &StoreTestEnv, issue: &str) -> TestResult<IssueId> {
    let id = env.record(issue, issue).await?.issue_id;
    let epoch = env.claim(id).await?.epoch;
    let (error, then) = ("broken".to_owned(), AfterFailure::Quarantine);
    env.store.fail(&[RunFailure { issue_id: id, epoch, error, then }], 5).await?;
    Ok(id)
}

pub async fn an_integration_is_created_once_and_keeps_its_provider(
    env: StoreTestEnv,
) -> TestResult {
    let id = env.store.ensure_integration("a", "gitlab").await?;
    assert_eq!(env.second.ensure_integration("a", "gitlab").await?, id);
    let other = env.store.ensure_integration("a", "github").await;
    assert!(matches!(other, Err(IssueError::OtherProvider { .. })), "{other:?}");
    let names = |list: Vec<headwater_issue::IntegrationInfo>| {
        list.into_iter().map(|one| one.name).collect::<Vec<_>>()
    };
    assert_eq!(names(env.store.integrations(None).await?), ["a", INTEGRATION]);
    assert_eq!(names(env.store.integrations(Some("a")).await?), [INTEGRATION]);
    Ok(())
}

pub async fn pages_of_issues_contain_each_issue_once(env: StoreTestEnv) -> TestResult {
    let events: Vec<_> = (0..7).map(|n| event(&n.to_string(), &n.to_string())).collect();
    let mut expected: Vec<_> =
        env.record_all(&events).await?.iter().map(|one| one.issue_id).collect();
    expected.sort();
    // With a filter that has an index, and with none.
    for status in [None, Some(ProcessingStatus::Queued)] {
        for newest_first in [false, true] {
            let mut filter = IssueFilter { status, newest_first, ..IssueFilter::default() };
            let mut listed = Vec::new();
            loop {
                let page = env.store.issues(&filter, 3).await?;
                let Some(last) = page.last() else { break };
                filter.after = Some(last.id);
                listed.extend(page.iter().map(|issue| issue.id));
            }
            if newest_first {
                listed.reverse();
            }
            assert_eq!(listed, expected, "{filter:?}");
            assert_eq!(env.store.count_issues(&filter, 100).await?, expected.len());
            assert_eq!(env.store.count_issues(&filter, 5).await?, 5, "counting ends at the limit");
        }
    }
    Ok(())
}

pub async fn issues_are_listed_by_status_and_quarantine(env: StoreTestEnv) -> TestResult {
    let queued = env.record("1", "1").await?.issue_id;
    let processing = env.record("2", "2").await?.issue_id;
    env.claim(processing).await?;
    let quarantined = quarantine(&env, "3").await?;
    let list = async |filter: IssueFilter| -> TestResult<Vec<IssueId>> {
        let issues = env.store.issues(&filter, 10).await?;
        assert_eq!(env.store.count_issues(&filter, 10).await?, issues.len(), "{filter:?}");
        Ok(issues.iter().map(|issue| issue.id).collect())
    };
    for (status, expected) in [
        (ProcessingStatus::Queued, queued),
        (ProcessingStatus::Processing, processing),
        (ProcessingStatus::Idle, quarantined),
    ] {
        let filter = IssueFilter { status: Some(status), ..IssueFilter::default() };
        assert_eq!(list(filter).await?, [expected]);
    }
    for newest_first in [false, true] {
        let filter =
            IssueFilter { quarantined: Some(true), newest_first, ..IssueFilter::default() };
        assert_eq!(list(filter).await?, [quarantined]);
    }
    let filter = IssueFilter { quarantined: Some(false), ..IssueFilter::default() };
    assert_eq!(list(filter).await?, [queued, processing]);
    for (text, expected) in [("ROKE", vec![quarantined]), ("b%n", vec![]), ("r_ken", vec![])] {
        let filter = IssueFilter { error: Some(text.into()), ..IssueFilter::default() };
        assert_eq!(list(filter).await?, expected, "{text}");
    }
    let filter = IssueFilter { integration: Some("other".into()), ..IssueFilter::default() };
    assert_eq!(list(filter).await?, []);
    let filter = IssueFilter { integration: Some(INTEGRATION.into()), ..IssueFilter::default() };
    assert_eq!(list(filter).await?.len(), 3);

    // Neither one that can be claimed nor one that is processed or quarantined waits.
    let waiting = env.record("4", "4").await?.issue_id;
    let (epoch, error) = (env.claim(waiting).await?.epoch, "refused".to_owned());
    let then = AfterFailure::Retry { after: TTL };
    env.store.fail(&[RunFailure { issue_id: waiting, epoch, error, then }], 5).await?;
    for newest_first in [false, true] {
        let filter = IssueFilter { waiting: true, newest_first, ..IssueFilter::default() };
        assert_eq!(list(filter.clone()).await?, [waiting]);
        assert_eq!(list(IssueFilter { error: Some("broken".into()), ..filter }).await?, []);
    }
    Ok(())
}

pub async fn event_logs_are_listed_by_whether_they_are_processed(env: StoreTestEnv) -> TestResult {
    let first = env.record("1", "a").await?;
    let claimed = env.claim(first.issue_id).await?;
    env.complete(completion(&claimed)).await?;
    let second = env.record("1", "b").await?;
    let list_in = async |newest_first, processed, after| -> TestResult<Vec<_>> {
        let filter = EventLogFilter { processed, after, newest_first };
        let logs = env.store.event_logs(first.issue_id, &filter, 10).await?;
        Ok(logs.iter().map(|log| log.id).collect())
    };
    let list = |processed, after| list_in(false, processed, after);
    assert_eq!(list(None, None).await?, [first.event_log_id, second.event_log_id]);
    assert_eq!(list_in(true, None, None).await?, [second.event_log_id, first.event_log_id]);
    assert_eq!(list_in(true, Some(true), None).await?, [first.event_log_id]);
    assert_eq!(list_in(true, None, Some(second.event_log_id)).await?, [first.event_log_id]);
    assert_eq!(list_in(true, None, Some(first.event_log_id)).await?, []);
    assert_eq!(list(Some(true), None).await?, [first.event_log_id]);
    assert_eq!(list(Some(false), None).await?, [second.event_log_id]);
    assert_eq!(list(None, Some(first.event_log_id)).await?, [second.event_log_id]);
    let missing = env.store.event_logs(IssueId(987_654), &EventLogFilter::default(), 10).await?;
    assert_eq!(missing, []);
    Ok(())
}

pub async fn an_event_log_is_found_by_its_id(env: StoreTestEnv) -> TestResult {
    let first = env.record("1", "a").await?;
    let other = env.record("2", "b").await?;
    for recorded in [first, other] {
        let filter = EventLogFilter::default();
        let listed = env.store.event_logs(recorded.issue_id, &filter, 10).await?;
        let found = env.second.event_log(recorded.event_log_id).await?;
        assert_eq!(found.as_ref(), listed.first());
    }
    assert_eq!(env.store.event_log(EventLogId(987_654)).await?, None);
    Ok(())
}

pub async fn an_issue_is_found_by_its_ids_at_the_provider(env: StoreTestEnv) -> TestResult {
    let id = env.record("42", "a").await?.issue_id;
    let found = env.store.find_issue(INTEGRATION, "project", "42").await?.expect("it exists");
    assert_eq!(found, env.issue(id).await?);
    assert_eq!(env.store.find_issue(INTEGRATION, "elsewhere", "42").await?, None);
    assert_eq!(env.store.issue(IssueId(987_654)).await?, None);
    Ok(())
}

pub async fn releasing_an_issue_that_is_not_quarantined_changes_nothing(
    env: StoreTestEnv,
) -> TestResult {
    let id = env.record("42", "a").await?.issue_id;
    let before = env.issue(id).await?;
    assert_eq!(env.store.release(id).await?, QuarantineCleared::NotQuarantined);
    assert_eq!(env.issue(id).await?, before);
    Ok(())
}

pub async fn a_retry_ends_a_wait_but_not_a_run(env: StoreTestEnv) -> TestResult {
    let id = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(id).await?;
    assert_eq!(env.store.retry(id).await?, IssueRetried::Processing);
    let then = AfterFailure::Retry { after: TTL };
    let (epoch, error) = (claimed.epoch, "broken".to_owned());
    env.store.fail(&[RunFailure { issue_id: id, epoch, error, then }], 5).await?;
    assert!(matches!(env.try_claim(id).await?, Claim::NotYet { .. }));
    assert_eq!(env.second.retry(id).await?, IssueRetried::Queued);
    let claimed = env.claim(id).await?;
    env.complete(completion(&claimed)).await?;
    assert_eq!(env.store.retry(id).await?, IssueRetried::Idle);
    let quarantined = quarantine(&env, "43").await?;
    assert_eq!(env.store.retry(quarantined).await?, IssueRetried::Queued);
    assert_eq!(env.issue(quarantined).await?.attempts, 0);
    env.assert_consistent().await
}

pub async fn operations_on_missing_objects_are_not_found(env: StoreTestEnv) -> TestResult {
    let missing = IssueId(987_654);
    assert!(matches!(env.store.release(missing).await, Err(IssueError::NotFound { .. })));
    assert!(matches!(env.store.retry(missing).await, Err(IssueError::NotFound { .. })));
    assert!(env.store.issue_facts(missing).await?.is_none());
    let row = env.store.retry_outbox(OutboxId(987_654)).await;
    assert!(matches!(row, Err(IssueError::NotFound { .. })));
    Ok(())
}

pub async fn the_facts_report_live_workers(env: StoreTestEnv) -> TestResult {
    let recorded = env.record("42", "a").await?;
    let facts = async || -> TestResult<headwater_issue::IssueFacts> {
        Ok(env.store.issue_facts(recorded.issue_id).await?.expect("the issue exists"))
    };
    let before = facts().await?;
    assert_eq!((before.workers_alive, before.owner_alive), (0, false));
    let logs = env.store.event_logs(recorded.issue_id, &EventLogFilter::default(), 1).await?;
    assert_eq!(before.oldest_pending_at, Some(logs[0].created_at));
    assert!(before.now >= before.issue.created_at);

    env.second.heartbeat_worker("a", TTL).await?;
    env.claim(recorded.issue_id).await?;
    let claimed = facts().await?;
    assert_eq!((claimed.workers_alive, claimed.owner_alive), (1, true));
    env.advance(TTL + Duration::from_secs(1)).await?;
    let dead = facts().await?;
    assert_eq!((dead.workers_alive, dead.owner_alive), (0, false));
    Ok(())
}

pub async fn a_worker_is_alive_until_its_heartbeat_expires(env: StoreTestEnv) -> TestResult {
    env.store.heartbeat_worker("a", TTL).await?;
    env.store.heartbeat_worker("b", TTL * 3).await?;
    env.claim(env.record("42", "x").await?.issue_id).await?;
    let names = async || -> TestResult<Vec<(String, u64)>> {
        let workers = env.second.workers().await?;
        Ok(workers.into_iter().map(|one| (one.worker, one.claims)).collect())
    };
    assert_eq!(names().await?, [("a".to_owned(), 1), ("b".to_owned(), 0)]);
    env.advance(TTL * 2).await?;
    assert_eq!(names().await?, [("b".to_owned(), 0)]);
    env.store.heartbeat_worker("b", Duration::ZERO).await?;
    assert_eq!(names().await?, []);
    env.store.heartbeat_worker("a", TTL).await?;
    assert_eq!(names().await?.len(), 1);
    Ok(())
}

pub async fn the_backlog_is_counted(env: StoreTestEnv) -> TestResult {
    assert_eq!(env.store.backlog().await?, Backlog::default());
    env.record("1", "1").await?;
    env.claim(env.record("2", "2").await?.issue_id).await?;
    quarantine(&env, "3").await?;
    env.replied("4", &["x", "y"]).await?;
    env.advance(Duration::from_secs(100)).await?;
    let backlog = env.second.backlog().await?;
    assert_eq!((backlog.queued, backlog.processing, backlog.quarantined), (1, 1, 1));
    assert_eq!((backlog.outbox_pending, backlog.outbox_dead), (2, 0));
    assert!(backlog.outbox_lag >= Duration::from_secs(100));
    assert!(backlog.oldest_wait >= Duration::from_secs(100), "{:?}", backlog.oldest_wait);
    // Neither a claimed nor a quarantined issue waits for a worker.
    let queued = env.record("5", "5").await?.issue_id;
    env.claim(env.record("1", "again").await?.issue_id).await?;
    let backlog = env.second.backlog().await?;
    assert!(backlog.queued == 1 && backlog.oldest_wait < Duration::from_secs(100));
    env.claim(queued).await?;
    assert_eq!(env.second.backlog().await?.oldest_wait, Duration::ZERO);
    Ok(())
}

pub async fn a_consistency_check_reads_pages_and_can_be_resumed(env: StoreTestEnv) -> TestResult {
    let mut ids = Vec::new();
    for issue in ["1", "2", "3", "4", "5"] {
        ids.push(env.record(issue, issue).await?.issue_id);
    }
    env.record("3", "another").await?;
    let first = env.store.check_consistency_page(None, 2).await?;
    assert_eq!((first.issues, first.recorded, first.resume_after), (2, 2, Some(ids[1])));
    // An issue behind the cursor changes; the rest of the check is not affected.
    env.record("1", "later").await?;
    let second = env.second.check_consistency_page(first.resume_after, 2).await?;
    assert_eq!((second.issues, second.recorded, second.resume_after), (2, 3, Some(ids[3])));
    let last = env.store.check_consistency_page(second.resume_after, 2).await?;
    assert_eq!((last.issues, last.pending, last.resume_after), (1, 1, None));
    let mut report = first;
    report.add_page(second, 10);
    report.add_page(last, 10);
    assert_eq!((report.issues, report.recorded, report.pending), (5, 6, 6));
    assert!(report.is_consistent() && report.resume_after.is_none());
    let none = env.store.check_consistency_page(Some(ids[4]), 2).await?;
    assert_eq!(none, headwater_issue::ConsistencyReport::default());
    let zero = env.store.check_consistency_page(None, 0).await;
    assert!(matches!(zero, Err(IssueError::Invalid { .. })), "{zero:?}");
    Ok(())
}

pub async fn the_consistency_report_is_consistent_in_every_state(env: StoreTestEnv) -> TestResult {
    env.record("1", "1").await?;
    env.claim(env.record("2", "2").await?.issue_id).await?;
    quarantine(&env, "3").await?;
    env.replied("4", &[]).await?;
    let report = env.store.check_consistency(10).await?;
    assert_eq!((report.issues, report.recorded, report.processed), (4, 4, 1));
    assert_eq!((report.pending, report.quarantined), (2, 1));
    assert_eq!((report.discrepancies.len(), report.discrepancies_total), (0, 0));
    env.assert_consistent().await
}
