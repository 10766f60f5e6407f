//! Recording events: de-duplication, debounce windows and payloads.

use std::time::Duration;

use super::env::{INTEGRATION, StoreTestEnv, completion, event};
use crate::TestResult;
use headwater_issue::limits::{BATCH_MAX, JSON_DEPTH_MAX, PAYLOAD_BYTES_MAX};
use headwater_issue::{
    AfterFailure, Claim, CompletionOutcome, DebounceWindow, IssueError, IssueId, NewEvent,
    ProcessingStatus, RunFailure, TraceContext,
};

pub async fn an_event_creates_its_issue_and_queues_it(env: StoreTestEnv) -> TestResult {
    let recorded = env.record("42", "delivery-1").await?;
    assert!(!recorded.duplicate && recorded.nudge);
    assert_eq!(recorded.not_before, None);

    let issue = env.issue(recorded.issue_id).await?;
    assert_eq!((issue.integration.as_str(), issue.provider.as_str()), (INTEGRATION, "github"));
    assert_eq!(
        (issue.external_project_id.as_str(), issue.external_issue_id.as_str()),
        ("project", "42")
    );
    assert_eq!((issue.status, issue.pending_events), (ProcessingStatus::Queued, 1));
    assert_eq!((issue.fields.as_str(), issue.discussions.as_str()), ("{}", "[]"));

    let logs = env.store.event_logs(recorded.issue_id, &Default::default(), 10).await?;
    assert_eq!(logs.len(), 1);
    assert_eq!(logs[0].id, recorded.event_log_id);
    assert_eq!((logs[0].source.as_str(), logs[0].event_type.as_str()), ("github", "comment"));
    assert_eq!((logs[0].dedup_key.as_str(), logs[0].processed_at), ("delivery-1", None));
    env.assert_consistent().await
}

pub async fn the_trace_of_an_event_is_returned_with_its_run(env: StoreTestEnv) -> TestResult {
    let traced = NewEvent { trace: Some(TraceContext::root()), ..event("42", "a") };
    let elsewhere = NewEvent { trace: Some(TraceContext::root()), ..traced.clone() };
    let recorded = env.record_all(&[traced.clone(), event("42", "b")]).await?;
    let again = env.record_all(&[elsewhere]).await?;
    assert!(again[0].duplicate, "a trace is not part of an event");

    let claimed = env.claim(recorded[0].issue_id).await?;
    let traces: Vec<_> = claimed.events.iter().map(|event| event.trace).collect();
    assert_eq!(traces, [traced.trace, None]);
    let listed = env.store.event_logs(recorded[0].issue_id, &Default::default(), 10).await?;
    assert_eq!(listed, claimed.events);
    env.assert_consistent().await
}

pub async fn a_duplicate_of_a_pending_event_nudges_again(env: StoreTestEnv) -> TestResult {
    let first = env.record("42", "delivery-1").await?;
    let again = env.record("42", "delivery-1").await?;
    assert_eq!((again.issue_id, again.event_log_id), (first.issue_id, first.event_log_id));
    assert!(again.duplicate && again.nudge);
    assert_eq!(env.issue(first.issue_id).await?.pending_events, 1);

    // No nudge while the issue is processed.
    env.claim(first.issue_id).await?;
    assert!(!env.record("42", "delivery-1").await?.nudge);
    env.assert_consistent().await
}

pub async fn a_duplicate_of_a_processed_event_changes_nothing(env: StoreTestEnv) -> TestResult {
    let first = env.record("42", "delivery-1").await?;
    let claimed = env.claim(first.issue_id).await?;
    env.complete(completion(&claimed)).await?;
    let before = env.issue(first.issue_id).await?;

    let again = env.record("42", "delivery-1").await?;
    assert!(again.duplicate && !again.nudge);
    assert_eq!(env.issue(first.issue_id).await?, before);
    env.assert_consistent().await
}

pub async fn events_of_one_issue_share_one_nudge(env: StoreTestEnv) -> TestResult {
    let events = [event("1", "a"), event("2", "b"), event("1", "c"), event("1", "a")];
    let recorded = env.record_all(&events).await?;
    let nudges: Vec<bool> = recorded.iter().map(|one| one.nudge).collect();
    assert_eq!(nudges, [true, true, false, false]);
    assert!(!env.record("1", "d").await?.nudge, "it is queued already");
    assert_eq!(env.issue(recorded[0].issue_id).await?.pending_events, 3);
    env.assert_consistent().await
}

pub async fn issue_numbers_repeat_between_projects_and_integrations(
    env: StoreTestEnv,
) -> TestResult {
    env.store.ensure_integration("other", "gitlab").await?;
    let events = [
        event("42", "a"),
        NewEvent { external_project_id: "elsewhere".into(), ..event("42", "b") },
        NewEvent { integration: "other".into(), ..event("42", "c") },
        NewEvent { external_project_id: String::new(), ..event("42", "d") },
    ];
    let recorded = env.record_all(&events).await?;
    let mut issues: Vec<_> = recorded.iter().map(|one| one.issue_id).collect();
    issues.sort();
    issues.dedup();
    assert_eq!(issues.len(), 4);
    Ok(())
}

pub async fn a_key_used_for_a_different_event_is_a_conflict_and_stores_nothing(
    env: StoreTestEnv,
) -> TestResult {
    let first = env.record("42", "delivery-1").await?;
    let others = [
        NewEvent { payload: "{}".into(), ..event("42", "delivery-1") },
        NewEvent { event_type: "closed".into(), ..event("42", "delivery-1") },
        event("43", "delivery-1"),
    ];
    for other in others {
        let rejected = env.store.record(&[other], &DebounceWindow::default()).await.remove(0);
        assert!(matches!(rejected, Err(IssueError::DedupConflict { .. })), "{rejected:?}");
    }
    assert_eq!(env.issue(first.issue_id).await?.pending_events, 1);
    assert_eq!(env.store.find_issue(INTEGRATION, "project", "43").await?, None);
    env.assert_consistent().await
}

pub async fn keys_are_unique_per_integration(env: StoreTestEnv) -> TestResult {
    env.store.ensure_integration("other", "gitlab").await?;
    let there = NewEvent { integration: "other".into(), ..event("42", "delivery-1") };
    let recorded = env.record_all(&[event("42", "delivery-1"), there]).await?;
    assert!(recorded.iter().all(|one| !one.duplicate));
    Ok(())
}

pub async fn duplicates_in_one_batch_are_stored_once(env: StoreTestEnv) -> TestResult {
    let other = NewEvent { payload: "{}".into(), ..event("42", "a") };
    let events = [event("42", "a"), event("42", "a"), other];
    let recorded = env.store.record(&events, &DebounceWindow::default()).await;
    let first = recorded[0].clone()?;
    let second = recorded[1].clone()?;
    assert!(!first.duplicate && first.nudge && second.duplicate && !second.nudge);
    assert_eq!(first.event_log_id, second.event_log_id);
    assert!(matches!(recorded[2], Err(IssueError::DedupConflict { .. })));
    assert_eq!(env.issue(first.issue_id).await?.pending_events, 1);
    env.assert_consistent().await
}

pub async fn a_conflicting_event_in_a_batch_does_not_hide_a_duplicate(
    env: StoreTestEnv,
) -> TestResult {
    env.record("42", "a").await?;
    let other = NewEvent { payload: "{}".into(), ..event("42", "a") };
    let events = [other.clone(), event("42", "a"), other];
    let recorded = env.store.record(&events, &DebounceWindow::default()).await;
    assert!(matches!(recorded[0], Err(IssueError::DedupConflict { .. })), "{recorded:?}");
    assert!(recorded[1].as_ref().is_ok_and(|one| one.duplicate && one.nudge), "{recorded:?}");
    assert!(matches!(recorded[2], Err(IssueError::DedupConflict { .. })), "{recorded:?}");
    env.assert_consistent().await
}

pub async fn an_event_without_a_key_is_deduplicated_by_its_content(
    env: StoreTestEnv,
) -> TestResult {
    let event =
        NewEvent { dedup_key: None, payload: r#"{"action": "open"}"#.into(), ..event("42", "") };
    let spaced = NewEvent { payload: "{ \"action\":\"open\" }".into(), ..event.clone() };
    let other = NewEvent { payload: r#"{"action": "close"}"#.into(), ..event.clone() };
    let recorded = env.record_all(&[event, spaced, other]).await?;
    let duplicates: Vec<bool> = recorded.iter().map(|one| one.duplicate).collect();
    assert_eq!(duplicates, [false, true, false]);
    Ok(())
}

pub async fn equal_events_of_two_projects_without_a_key_are_both_stored(
    env: StoreTestEnv,
) -> TestResult {
    let first = NewEvent { dedup_key: None, ..event("42", "") };
    let second = NewEvent { external_project_id: "another".into(), ..first.clone() };
    let events = [first.clone(), second.clone(), first, second];
    let results = env.store.record(&events, &DebounceWindow::default()).await;
    let recorded = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    assert_ne!(recorded[0].issue_id, recorded[1].issue_id);
    let duplicates: Vec<bool> = recorded.iter().map(|one| one.duplicate).collect();
    assert_eq!(duplicates, [false, false, true, true]);
    env.assert_consistent().await
}

/// A debounce window of ten minutes.
fn window(max_wait: Duration, events_max: usize) -> DebounceWindow {
    DebounceWindow { quiet_for: Duration::from_secs(600), max_wait, events_max }
}

pub async fn a_burst_in_a_debounce_window_is_one_run_with_all_its_events(
    env: StoreTestEnv,
) -> TestResult {
    let debounce = window(Duration::from_secs(6000), 0);
    let mut issue = Default::default();
    for key in ["a", "b", "c"] {
        let recorded = env.store.record(&[event("42", key)], &debounce).await.remove(0)?;
        assert!(recorded.not_before.is_some());
        issue = recorded.issue_id;
        env.advance(Duration::from_secs(400)).await?;
        assert!(matches!(env.try_claim(issue).await?, Claim::NotYet { .. }));
    }
    env.advance(Duration::from_secs(400)).await?;
    let claimed = env.claim(issue).await?;
    assert_eq!(claimed.events.len(), 3);

    // An event during the run starts its own debounce window.
    env.store.record(&[event("42", "d")], &debounce).await.remove(0)?;
    let completed = env.complete(completion(&claimed)).await?;
    assert!(matches!(
        completed,
        CompletionOutcome::Committed { requeued: true, not_before: Some(_), .. }
    ));
    assert!(matches!(env.try_claim(issue).await?, Claim::NotYet { .. }));
    env.assert_consistent().await
}

pub async fn no_event_waits_longer_than_max_wait(env: StoreTestEnv) -> TestResult {
    let debounce = window(Duration::from_secs(1000), 0);
    let first = env.store.record(&[event("42", "a")], &debounce).await.remove(0)?;
    env.advance(Duration::from_secs(500)).await?;
    env.store.record(&[event("42", "b")], &debounce).await.remove(0)?;
    let Claim::NotYet { wait, .. } = env.try_claim(first.issue_id).await? else {
        panic!("expected an open debounce window")
    };
    assert!(wait <= Duration::from_secs(500), "{wait:?}");
    env.advance(Duration::from_secs(510)).await?;
    assert_eq!(env.claim(first.issue_id).await?.events.len(), 2);
    Ok(())
}

pub async fn a_debounce_window_ends_early_at_events_max(env: StoreTestEnv) -> TestResult {
    let debounce = window(Duration::from_secs(6000), 3);
    let mut nudges = Vec::new();
    let mut issue = Default::default();
    for key in ["a", "b", "c", "d"] {
        let recorded = env.store.record(&[event("42", key)], &debounce).await.remove(0)?;
        issue = recorded.issue_id;
        nudges.push((recorded.nudge, recorded.not_before.is_some()));
    }
    // The third event ends the window and nudges again: the nudge of the first found the issue not due.
    assert_eq!(nudges, [(true, true), (false, true), (true, false), (false, false)]);
    let claimed = env.claim(issue).await?;
    assert_eq!(claimed.events.len(), 4);

    // Events of a run in progress do not count; an event during the run starts its own window.
    let recorded = env.store.record(&[event("42", "e")], &debounce).await.remove(0)?;
    assert!(!recorded.nudge && recorded.not_before.is_some());
    env.complete(completion(&claimed)).await?;
    assert!(matches!(env.try_claim(issue).await?, Claim::NotYet { .. }));

    // The same with all events in one call.
    let events = ["x", "y", "z"].map(|key| event("43", key));
    let recorded = env.store.record(&events, &debounce).await.remove(0)?;
    assert!(recorded.nudge && recorded.not_before.is_none());
    assert_eq!(env.claim(recorded.issue_id).await?.events.len(), 3);
    env.assert_consistent().await
}

/// Fails a run of this issue.
async fn fail(env: &StoreTestEnv, issue_id: IssueId, then: AfterFailure) -> TestResult {
    let epoch = env.claim(issue_id).await?.epoch;
    let failure = RunFailure { issue_id, epoch, error: "no model".into(), then };
    env.store.fail(&[failure], 5).await?;
    Ok(())
}

pub async fn events_do_not_end_a_backoff(env: StoreTestEnv) -> TestResult {
    let debounce = window(Duration::from_secs(6000), 2);
    let issue_id = env.record("42", "a").await?.issue_id;
    fail(&env, issue_id, AfterFailure::Retry { after: Duration::from_secs(6000) }).await?;
    let recorded = env.store.record(&[event("42", "b")], &debounce).await.remove(0)?;
    assert!(!recorded.nudge && recorded.not_before.is_some());
    assert!(matches!(env.try_claim(issue_id).await?, Claim::NotYet { .. }));
    env.assert_consistent().await
}

pub async fn events_do_not_end_the_delay_of_a_deferred_run(env: StoreTestEnv) -> TestResult {
    let defer = AfterFailure::Defer { after: Duration::from_secs(20_000) };
    let windows = [
        window(Duration::from_secs(6000), 2),
        DebounceWindow { events_max: 2, ..DebounceWindow::default() },
    ];
    for (debounce, issue) in windows.into_iter().zip(["1", "2"]) {
        let key = |key: &str| event(issue, &format!("{issue}/{key}"));
        let issue_id = env.record_all(&[key("a"), key("b"), key("c")]).await?.remove(0).issue_id;
        fail(&env, issue_id, defer).await?;
        for events in [vec![key("d")], vec![key("e"), key("f")], vec![key("d")]] {
            let recorded = env.store.record(&events, &debounce).await.remove(0)?;
            // A duplicate of a pending event nudges, but the issue is not due.
            assert_eq!(recorded.nudge, recorded.duplicate);
            let claim = env.try_claim(issue_id).await?;
            let Claim::NotYet { wait, .. } = claim else {
                panic!("expected a deferred issue: {claim:?}")
            };
            assert!(wait > Duration::from_secs(10_000), "{wait:?}");
        }
        env.advance(Duration::from_secs(20_000)).await?;
        let claimed = env.claim(issue_id).await?;
        assert_eq!((claimed.events.len(), claimed.issue.attempts), (6, 0));

        // After a success, events end a debounce window again.
        env.complete(completion(&claimed)).await?;
        let recorded = env.store.record(&[key("g"), key("h")], &debounce).await.remove(0)?;
        assert!(recorded.nudge && recorded.not_before.is_none());
        env.claim(issue_id).await?;
    }
    env.assert_consistent().await
}

pub async fn payloads_of_maximum_size_and_depth_are_returned_unchanged(
    env: StoreTestEnv,
) -> TestResult {
    let largest = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX - 2));
    let deepest = format!("{}{}", "[".repeat(JSON_DEPTH_MAX), "]".repeat(JSON_DEPTH_MAX));
    for (issue, payload) in [("1", largest), ("2", deepest)] {
        let event = NewEvent { payload: payload.clone(), ..event(issue, issue) };
        let recorded = env.record_all(&[event]).await?.remove(0);
        assert_eq!(env.claim(recorded.issue_id).await?.events[0].payload, payload);
    }
    Ok(())
}

pub async fn a_batch_of_maximum_size_is_recorded(env: StoreTestEnv) -> TestResult {
    let events: Vec<NewEvent> =
        (0..BATCH_MAX).map(|n| event(&(n % 10).to_string(), &n.to_string())).collect();
    let recorded = env.record_all(&events).await?;
    assert_eq!(recorded.iter().filter(|one| one.nudge).count(), 10);
    // Within each issue, ids increase in the order of recording.
    for (n, one) in recorded.iter().enumerate().skip(10) {
        assert_eq!(one.issue_id, recorded[n - 10].issue_id);
        assert!(one.event_log_id > recorded[n - 10].event_log_id);
    }
    env.assert_consistent().await
}

pub async fn text_in_any_script_is_returned_unchanged(env: StoreTestEnv) -> TestResult {
    let text = "ключ 键 😀 \" \\ ' % _ \n\t\u{1} \u{7f} \u{2028} {} , NULL";
    let payload = serde_json::json!({ text: text }).to_string();
    let event = NewEvent {
        external_project_id: text.into(),
        external_issue_id: text.into(),
        source: text.into(),
        event_type: text.into(),
        dedup_key: Some(text.into()),
        payload: payload.clone(),
        ..event("", "")
    };
    let recorded = env.record_all(&[event]).await?.remove(0);
    let claimed = env.claim(recorded.issue_id).await?;
    let log = &claimed.events[0];
    assert_eq!(claimed.issue.external_project_id, text);
    assert_eq!(claimed.issue.external_issue_id, text);
    assert_eq!([&log.source, &log.event_type, &log.dedup_key], [text; 3]);
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text);
    assert_eq!(value(&log.payload)?, value(&payload)?);
    Ok(())
}

pub async fn a_payload_that_jsonb_cannot_store_is_sanitized_and_the_original_is_kept(
    env: StoreTestEnv,
) -> TestResult {
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text);
    let payloads = [
        (r#"{"a\u0000b": "\u0000"}"#, "{\"a\u{fffd}b\": \"\u{fffd}\"}"),
        (
            r#"["\ud800", "\udfff\ud83d", "\ud83d\ude00"]"#,
            "[\"\u{fffd}\", \"\u{fffd}\u{fffd}\", \"😀\"]",
        ),
        ("[1e400, -1e-16383, 1e999999999999]", r#"["1e400", "-1e-16383", "1e999999999999"]"#),
        (r#"{"a": 1, "a": 2}"#, r#"{"a": 2}"#),
    ];
    for (number, (payload, expected)) in payloads.into_iter().enumerate() {
        let key = number.to_string();
        let event = NewEvent { payload: payload.into(), ..event(&key, &key) };
        let recorded = env.record_all(std::slice::from_ref(&event)).await?.remove(0);
        let claimed = env.claim(recorded.issue_id).await?;
        assert_eq!(value(&claimed.events[0].payload)?, value(expected)?, "{payload}");
        let original = env.second.original_payload(recorded.event_log_id).await?;
        assert_eq!(original.as_deref(), Some(payload));

        // Duplicates are compared by the payload as received.
        let again = env.record_all(std::slice::from_ref(&event)).await?.remove(0);
        assert_eq!((again.event_log_id, again.duplicate), (recorded.event_log_id, true));
        let other = NewEvent { payload: expected.into(), ..event };
        let result = env.store.record(&[other], &DebounceWindow::default()).await.remove(0);
        assert!(matches!(result, Err(IssueError::DedupConflict { .. })), "{result:?}");
    }
    // `jsonb` stores negative zero as zero.
    let zero = NewEvent { payload: "[-0.0]".into(), ..event("zero", "zero") };
    let recorded = env.record_all(&[zero]).await?.remove(0);
    let original = env.store.original_payload(recorded.event_log_id).await?;
    assert_eq!(original.as_deref(), Some("[-0.0]"));
    env.assert_consistent().await
}

pub async fn originals_are_stored_once_and_only_with_their_event(env: StoreTestEnv) -> TestResult {
    let odd = |issue: &str, key: &str| NewEvent {
        payload: format!(r#"{{"{key}": "\u0000"}}"#),
        ..event(issue, key)
    };
    // Among other events, twice in one batch, and next to a rejected one.
    let events = [
        event("1", "a"),
        odd("1", "b"),
        odd("2", "c"),
        odd("1", "b"),
        NewEvent { integration: "unknown".into(), ..odd("1", "d") },
        event("2", "e"),
    ];
    let recorded = env.store.record(&events, &DebounceWindow::default()).await;
    for (index, expected) in [(0, None), (1, Some("b")), (2, Some("c")), (5, None)] {
        let id = recorded[index].clone()?.event_log_id;
        let expected = expected.map(|key| format!(r#"{{"{key}": "\u0000"}}"#));
        assert_eq!(env.second.original_payload(id).await?, expected, "{index}");
    }
    assert_eq!(recorded[3].clone()?.event_log_id, recorded[1].clone()?.event_log_id);
    assert!(matches!(recorded[4], Err(IssueError::UnknownIntegration { .. })));
    assert_eq!(env.store.original_payload(headwater_issue::EventLogId(i64::MAX)).await?, None);
    env.assert_consistent().await
}

pub async fn empty_batches_have_no_effect(env: StoreTestEnv) -> TestResult {
    assert!(env.store.record(&[], &DebounceWindow::default()).await.is_empty());
    assert!(env.store.claim(&[], &super::env::options("a")).await?.is_empty());
    assert!(env.store.complete(&[]).await?.is_empty());
    assert!(env.store.fail(&[], 5).await?.is_empty());
    assert!(env.store.release_claims(&[]).await?.is_empty());
    assert!(env.store.heartbeat(&[], super::env::TTL).await?.is_empty());
    assert!(env.store.check_claims(&[]).await?.is_empty());
    assert!(env.store.settle_outbox(&[]).await?.is_empty());
    Ok(())
}

pub async fn new_and_known_issues_of_a_batch_count_their_own_events(
    env: StoreTestEnv,
) -> TestResult {
    let known = env.record("known", "a").await?;
    let batch = [
        event("new", "b"),
        event("known", "c"),
        // Its key belongs to an event of another issue, so it must not create this one.
        event("never", "a"),
        event("new", "d"),
        NewEvent { integration: "unknown".into(), ..event("new", "e") },
        event("late", "f"),
        event("new", "b"),
    ];
    // Once with a used key in the batch and once without: new issues are created in two ways.
    for round in 0..2 {
        let named = |one: &NewEvent| NewEvent {
            external_issue_id: format!("{}{round}", one.external_issue_id),
            dedup_key: one.dedup_key.as_ref().map(|key| format!("{key}{round}")),
            ..one.clone()
        };
        let mut events: Vec<NewEvent> = batch.iter().map(named).collect();
        events[1].external_issue_id = "known".into();
        if round == 0 {
            events[2].dedup_key = Some("a".into());
        }
        let results = env.store.record(&events, &DebounceWindow::default()).await;
        let stored = |index: usize| results[index].as_ref().expect("it is stored");
        assert_eq!(stored(0).issue_id, stored(3).issue_id);
        assert!(
            stored(0).event_log_id < stored(3).event_log_id,
            "ids are in the order of the call"
        );
        assert_eq!(stored(1).issue_id, known.issue_id);
        assert_eq!([0, 1, 3, 5].map(|index| stored(index).nudge), [true, false, false, true]);
        assert!(matches!(results[4], Err(IssueError::UnknownIntegration { .. })), "{results:?}");
        assert_eq!((stored(6).event_log_id, stored(6).duplicate), (stored(0).event_log_id, true));
        let found = env.store.find_issue(INTEGRATION, "project", &format!("never{round}")).await?;
        assert_eq!((results[2].is_ok(), found.is_some()), (round == 1, round == 1), "{results:?}");
        let expected =
            [(stored(0).issue_id, 2), (stored(5).issue_id, 1), (known.issue_id, 2 + round)];
        for (issue, pending) in expected {
            assert_eq!(env.issue(issue).await?.pending_events, pending);
        }
    }
    env.assert_consistent().await
}

pub async fn a_new_issue_starts_with_the_debounce_window_of_its_batch(
    env: StoreTestEnv,
) -> TestResult {
    let debounce = DebounceWindow {
        quiet_for: Duration::from_secs(60),
        max_wait: Duration::from_secs(90),
        events_max: 2,
    };
    let events = [event("one", "a"), event("two", "b"), event("two", "c")];
    let results = env.store.record(&events, &debounce).await;
    let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    let issue = env.issue(results[0].issue_id).await?;
    assert_eq!(issue.not_before, Some(issue.created_at.after(debounce.quiet_for)));
    assert_eq!(results[0].not_before, issue.not_before);
    assert!(matches!(env.try_claim(results[0].issue_id).await?, Claim::NotYet { .. }));
    assert_eq!(results[1].not_before, None, "two events end the window");
    assert_eq!(env.claim(results[1].issue_id).await?.events.len(), 2);
    env.advance(Duration::from_secs(61)).await?;
    assert_eq!(env.claim(results[0].issue_id).await?.events.len(), 1);
    env.assert_consistent().await
}

pub async fn two_batches_that_create_the_same_issues_at_once_lose_no_event(
    env: StoreTestEnv,
) -> TestResult {
    for round in 0..20 {
        let batch = |from: &str| -> Vec<NewEvent> {
            // Some keys are in both batches, for different issues: only one of them is stored.
            let shared = event(&format!("{from}-only-{round}"), &format!("shared-{round}"));
            let own =
                (0..8).map(|n| event(&format!("{round}-{n}"), &format!("{from}-{round}-{n}")));
            own.chain([shared]).collect()
        };
        let (first, second) = (batch("x"), batch("y"));
        let debounce = DebounceWindow::default();
        let (first, second) = tokio::join!(
            env.store.record(&first, &debounce),
            env.second.record(&second, &debounce)
        );
        for (one, other) in first.iter().zip(&second).take(8) {
            let (one, other) = (one.as_ref().expect("stored"), other.as_ref().expect("stored"));
            assert_eq!(one.issue_id, other.issue_id);
            assert!(one.nudge || other.nudge, "one of them queued the issue");
            assert_eq!(env.issue(one.issue_id).await?.pending_events, 2);
        }
        let stored = [&first[8], &second[8]].map(Result::is_ok);
        assert!(
            stored == [true, false] || stored == [false, true],
            "{:?}",
            (&first[8], &second[8])
        );
    }
    env.assert_consistent().await
}
