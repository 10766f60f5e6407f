//! Completion of runs.

use std::time::Duration;

use serde_json::{Value, json};

use super::env::{StoreTestEnv, TTL, completion, ids, options, reply, text_of, won};
use crate::TestResult;
use headwater_issue::limits::FIELDS_BYTES_MAX;
use headwater_issue::{
    ClaimEpoch, CompletionOutcome, EventLogFilter, IssueId, ProcessingStatus, RunCompletion,
    SweepOptions,
};

const DONE: CompletionOutcome =
    CompletionOutcome::Committed { requeued: false, not_before: None, repeated: false };

pub async fn a_completed_run_leaves_its_issue_idle(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    assert_eq!(env.complete(completion(&claimed)).await?, DONE);
    let after = env.issue(issue).await?;
    assert_eq!((after.status, after.pending_events), (ProcessingStatus::Idle, 0));
    assert_eq!((after.claim_owner, after.claim_expires_at), (None, None));
    assert!(after.last_processed_at.is_some());
    let processed = EventLogFilter { processed: Some(true), ..Default::default() };
    assert_eq!(env.store.event_logs(issue, &processed, 10).await?.len(), 1);
    env.assert_consistent().await
}

pub async fn an_event_that_arrives_while_processing_is_not_lost(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    assert!(!env.record("42", "b").await?.nudge, "no nudge while the issue is processed");
    let completed = env.complete(completion(&claimed)).await?;
    assert!(matches!(
        completed,
        CompletionOutcome::Committed { requeued: true, not_before: None, .. }
    ));
    let next = env.claim(issue).await?;
    assert_eq!(next.events.len(), 1);
    assert_eq!(next.events[0].dedup_key, "b");
    env.assert_consistent().await
}

pub async fn events_beyond_the_run_requeue_the_issue(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    env.record("42", "b").await?;
    let options = headwater_issue::ClaimOptions { events_max: 1, ..options("a") };
    let claimed = won(env.store.claim(&[issue], &options).await?.remove(0));
    let completed = env.complete(completion(&claimed)).await?;
    assert!(matches!(completed, CompletionOutcome::Committed { requeued: true, .. }));
    assert_eq!(env.issue(issue).await?.pending_events, 1);
    env.assert_consistent().await
}

pub async fn a_completion_of_a_lost_claim_is_fenced_and_writes_nothing(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let lost = env.claim(issue).await?;
    env.advance(TTL).await?;
    let holder = won(env.second.claim(&[issue], &options("b")).await?.remove(0));
    let before = env.issue(issue).await?;

    let fields = Some(r#"{"by":"lost claim"}"#.to_owned());
    let discussions = Some("[1]".to_owned());
    let outbox = vec![reply("from a lost claim")];
    let late = RunCompletion { fields, discussions, outbox, ..completion(&lost) };
    assert_eq!(env.complete(late).await?, CompletionOutcome::Fenced);

    assert_eq!(env.issue(issue).await?, before);
    assert!(env.store.take_outbox("deliverer", 10, TTL).await?.is_empty());
    assert_eq!(env.complete(completion(&holder)).await?, DONE);
    env.assert_consistent().await
}

pub async fn a_repeated_completion_is_reported_and_changes_nothing(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let run = RunCompletion { outbox: vec![reply("once")], ..completion(&claimed) };
    assert_eq!(env.complete(run.clone()).await?, DONE);
    let before = env.issue(issue).await?;
    let again = env.complete(run.clone()).await?;
    assert!(matches!(again, CompletionOutcome::Committed { repeated: true, requeued: false, .. }));
    assert_eq!(env.issue(issue).await?, before);
    assert_eq!(env.store.take_outbox("deliverer", 10, TTL).await?.len(), 1);

    // Two completions in one batch behave like two calls.
    env.record("42", "b").await?;
    let claimed = env.claim(issue).await?;
    let completed = env.store.complete(&[completion(&claimed), completion(&claimed)]).await?;
    assert_eq!(completed[0], DONE);
    assert!(matches!(completed[1], CompletionOutcome::Committed { repeated: true, .. }));
    env.assert_consistent().await
}

pub async fn fields_are_merged_and_discussions_replaced(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let steps = [
        (json!({ "a": 1, "b": { "c": null, "d": 2 } }), json!(["first"])),
        (json!({ "a": null, "b": { "e": 3 }, "f": "x" }), json!({ "second": [] })),
    ];
    for (n, (fields, discussions)) in steps.iter().enumerate() {
        env.record("42", &format!("step-{n}")).await?;
        let claimed = env.claim(issue).await?;
        let changes = RunCompletion {
            fields: Some(fields.to_string()),
            discussions: Some(discussions.to_string()),
            ..completion(&claimed)
        };
        assert_eq!(env.complete(changes).await?, DONE);
        let after = env.issue(issue).await?;
        assert_eq!(serde_json::from_str::<Value>(&after.discussions)?, *discussions);
    }
    let fields: Value = serde_json::from_str(&env.issue(issue).await?.fields)?;
    assert_eq!(fields, json!({ "b": { "e": 3 }, "f": "x" }));
    Ok(())
}

pub async fn a_completion_counts_only_its_own_unprocessed_events(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let other = env.record("43", "b").await?;
    let first = env.claim(issue).await?;
    let id = ids(&first)[0];
    let ids = vec![id, id, other.event_log_id, headwater_issue::EventLogId(987_654)];
    assert_eq!(
        env.complete(RunCompletion { event_log_ids: ids, ..completion(&first) }).await?,
        DONE
    );
    assert_eq!(env.issue(other.issue_id).await?.pending_events, 1);

    // A processed event log is not counted again.
    env.record("42", "c").await?;
    let second = env.claim(issue).await?;
    let old = RunCompletion { event_log_ids: vec![id], ..completion(&second) };
    assert!(matches!(
        env.complete(old).await?,
        CompletionOutcome::Committed { requeued: true, .. }
    ));
    assert_eq!(env.issue(issue).await?.pending_events, 1);
    env.assert_consistent().await
}

pub async fn a_fenced_completion_does_not_fail_the_batch(env: StoreTestEnv) -> TestResult {
    let mut runs = Vec::new();
    for name in ["1", "2", "3"] {
        let issue = env.record(name, name).await?.issue_id;
        runs.push(completion(&env.claim(issue).await?));
    }
    runs[1].epoch = ClaimEpoch(77);
    runs.push(RunCompletion {
        issue_id: IssueId(987_654),
        epoch: ClaimEpoch(1),
        ..runs[0].clone()
    });
    runs.reverse();
    let completed = env.store.complete(&runs).await?;
    assert_eq!(completed, [CompletionOutcome::Fenced, DONE, CompletionOutcome::Fenced, DONE]);
    env.assert_consistent().await
}

pub async fn a_run_may_complete_without_processing_any_event(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let nothing = RunCompletion { event_log_ids: vec![], ..completion(&claimed) };
    let completed = env.complete(nothing).await?;
    assert!(matches!(completed, CompletionOutcome::Committed { requeued: true, .. }));
    assert_eq!(env.claim(issue).await?.events.len(), 1);
    env.assert_consistent().await
}

pub async fn a_completion_after_its_claim_was_swept_is_fenced(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.advance(TTL + Duration::from_secs(1)).await?;
    assert_eq!(env.second.sweep(&SweepOptions::default()).await?.requeued, 1);
    assert_eq!(env.complete(completion(&claimed)).await?, CompletionOutcome::Fenced);
    assert_eq!(env.claim(issue).await?.events.len(), 1);
    env.assert_consistent().await
}

pub async fn fields_over_the_size_limit_are_rejected(env: StoreTestEnv) -> TestResult {
    let large = |name: &str| format!(r#"{{"{name}":"{}"}}"#, "x".repeat(FIELDS_BYTES_MAX * 2 / 3));
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.complete(RunCompletion { fields: Some(large("a")), ..completion(&claimed) }).await?;

    env.record("42", "b").await?;
    let claimed = env.claim(issue).await?;
    let before = env.issue(issue).await?;
    let grown = RunCompletion { fields: Some(large("b")), ..completion(&claimed) };
    let rejected = env.store.complete(&[grown]).await;
    assert!(matches!(rejected, Err(headwater_issue::IssueError::Invalid { .. })), "{rejected:?}");
    let problem = format!("{rejected:?}");
    assert!(problem.contains("fields of issue"), "{problem}");
    assert!(env.issue(issue).await? == before, "nothing was changed");

    // Replacing a field of the same size is allowed.
    let changed = RunCompletion { fields: Some(large("a")), ..completion(&claimed) };
    let completed = env.complete(changed).await?;
    assert!(
        matches!(completed, CompletionOutcome::Committed { repeated: false, .. }),
        "{completed:?}"
    );
    Ok(())
}

pub async fn valid_fenced_repeated_and_unknown_runs_of_a_batch_have_their_own_results(
    env: StoreTestEnv,
) -> TestResult {
    let mut runs = Vec::new();
    for issue in 0..4 {
        let issue = env.record(&issue.to_string(), &format!("a{issue}")).await?.issue_id;
        runs.push(completion(&env.claim(issue).await?));
    }
    let [valid, repeated, requeued, stale] = runs.try_into().expect("four runs");
    let replied =
        |run: &RunCompletion, text| RunCompletion { outbox: vec![reply(text)], ..run.clone() };
    assert_eq!(env.complete(replied(&repeated, "earlier")).await?, DONE);
    env.record("2", "late").await?;
    // An event log of another issue counts for neither.
    let foreign = RunCompletion { event_log_ids: valid.event_log_ids.clone(), ..stale.clone() };
    let batch = [
        replied(&RunCompletion { epoch: ClaimEpoch(9), ..foreign }, "stale"),
        replied(&requeued, "third"),
        RunCompletion { issue_id: IssueId(i64::MAX), ..replied(&valid, "nowhere") },
        RunCompletion { fields: Some(json!({ "a": 1 }).to_string()), ..replied(&valid, "first") },
        replied(&repeated, "again"),
        replied(&valid, "twice"),
    ];
    let results = env.store.complete(&batch).await?;
    let committed =
        |requeued, repeated| CompletionOutcome::Committed { requeued, not_before: None, repeated };
    let expected = [
        CompletionOutcome::Fenced,
        committed(true, false),
        CompletionOutcome::Fenced,
        committed(false, false),
        committed(false, true),
        committed(false, true),
    ];
    assert_eq!(results, expected);
    let rows = env.store.take_outbox("d", 10, TTL).await?;
    let mut replies: Vec<String> = rows.iter().map(|row| text_of(&row.payload)).collect();
    replies.sort();
    assert_eq!(replies, ["earlier", "first", "third"]);
    let issue = env.issue(valid.issue_id).await?;
    assert_eq!(serde_json::from_str::<Value>(&issue.fields)?, json!({ "a": 1 }));
    assert_eq!(env.issue(stale.issue_id).await?.status, ProcessingStatus::Processing);
    assert_eq!(env.complete(stale).await?, DONE, "the fenced completion changed nothing");
    env.assert_consistent().await
}
