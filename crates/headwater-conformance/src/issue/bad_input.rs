//! Invalid input is rejected without effect.

use std::time::Duration;

use super::env::{StoreTestEnv, TTL, completion, event, options, reply};
use crate::TestResult;
use headwater_issue::limits::{
    BATCH_MAX, CLAIM_TTL_MAX, DELAY_MAX, JSON_DEPTH_MAX, NAME_BYTES_MAX, OUTBOX_PER_RUN_MAX,
    PAYLOAD_BYTES_MAX,
};
use headwater_issue::{
    AfterFailure, ClaimOptions, DebounceWindow, IssueError, NewEvent, NewOutboxRow, RunCompletion,
    RunFailure, SweepOptions,
};

fn is_invalid<T: std::fmt::Debug>(result: &Result<T, IssueError>) -> bool {
    matches!(result, Err(IssueError::Invalid { .. }))
}

pub async fn an_invalid_event_does_not_fail_the_batch(env: StoreTestEnv) -> TestResult {
    let deep = format!("{}{}", "[".repeat(JSON_DEPTH_MAX + 1), "]".repeat(JSON_DEPTH_MAX + 1));
    let large = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX));
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    let bad = [
        NewEvent { payload: "not json".into(), ..event("1", "a") },
        NewEvent { payload: String::new(), ..event("1", "b") },
        NewEvent { payload: deep, ..event("1", "c") },
        NewEvent { payload: large, ..event("1", "d") },
        NewEvent { payload: "{\"a\":\"\0\"}".into(), ..event("1", "e") },
        NewEvent { payload: "{1e999:1}".into(), ..event("1", "f") },
        NewEvent { payload: r#"{"a":"\ud8"}"#.into(), ..event("1", "g") },
        NewEvent { external_issue_id: "a\0b".into(), ..event("1", "h") },
        NewEvent { external_issue_id: String::new(), ..event("1", "i") },
        NewEvent { external_project_id: "\0".into(), ..event("1", "j") },
        NewEvent { source: long.clone(), ..event("1", "k") },
        NewEvent { event_type: String::new(), ..event("1", "l") },
        NewEvent { dedup_key: Some("\0".into()), ..event("1", "m") },
        NewEvent { dedup_key: Some(String::new()), ..event("1", "n") },
    ];
    let unknown = NewEvent { integration: "unknown".into(), ..event("1", "o") };
    let mut events = vec![event("1", "good-1")];
    events.extend(bad.iter().cloned());
    events.extend([unknown, event("1", "good-2")]);

    let recorded = env.store.record(&events, &DebounceWindow::default()).await;
    assert_eq!(recorded.len(), events.len());
    let (first, last) = (recorded[0].clone()?, recorded[events.len() - 1].clone()?);
    assert_eq!(first.issue_id, last.issue_id);
    for (result, event) in recorded[1..=bad.len()].iter().zip(&bad) {
        assert!(is_invalid(result), "{result:?} for {:.80}", event.payload);
    }
    let result = &recorded[bad.len() + 1];
    assert!(matches!(result, Err(IssueError::UnknownIntegration { .. })), "{result:?}");
    assert_eq!(env.claim(first.issue_id).await?.events.len(), 2);
    assert_eq!(env.store.check_consistency(10).await?.issues, 1);
    env.assert_consistent().await
}

pub async fn batches_over_a_limit_are_rejected(env: StoreTestEnv) -> TestResult {
    let many: Vec<NewEvent> = (0..=BATCH_MAX).map(|n| event("1", &n.to_string())).collect();
    let recorded = env.store.record(&many, &DebounceWindow::default()).await;
    assert_eq!(recorded.len(), BATCH_MAX + 1);
    assert!(recorded.iter().all(is_invalid));
    assert_eq!(env.store.check_consistency(10).await?.recorded, 0);

    let issue = env.record("1", "a").await?.issue_id;
    let issues = vec![issue; BATCH_MAX + 1];
    assert!(is_invalid(&env.store.claim(&issues, &options("a")).await));
    let claimed = env.claim(issue).await?;
    let claims = vec![(issue, claimed.epoch); BATCH_MAX + 1];
    assert!(is_invalid(&env.store.heartbeat(&claims, TTL).await));
    assert!(is_invalid(&env.store.check_claims(&claims).await));
    let runs = vec![completion(&claimed); BATCH_MAX + 1];
    assert!(is_invalid(&env.store.complete(&runs).await));
    Ok(())
}

pub async fn an_invalid_completion_is_rejected(env: StoreTestEnv) -> TestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let before = env.issue(issue).await?;
    let run = completion(&claimed);
    let payload = |payload: String| NewOutboxRow { payload, ..reply("") };
    let bad = [
        RunCompletion { outbox: vec![reply("x"); OUTBOX_PER_RUN_MAX + 1], ..run.clone() },
        RunCompletion { outbox: vec![payload("x".into())], ..run.clone() },
        RunCompletion { outbox: vec![payload(r#""\u0000""#.into())], ..run.clone() },
        RunCompletion {
            outbox: vec![payload(format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX)))],
            ..run.clone()
        },
        RunCompletion {
            outbox: vec![NewOutboxRow { target: "\0".into(), ..reply("") }],
            ..run.clone()
        },
        RunCompletion { fields: Some("[]".into()), ..run.clone() },
        RunCompletion { fields: Some("{".into()), ..run.clone() },
        RunCompletion { discussions: Some("{".into()), ..run.clone() },
        RunCompletion { fields: Some(r#"{"a":1e-16383}"#.into()), ..run.clone() },
        RunCompletion { discussions: Some("[1e-20000]".into()), ..run.clone() },
        RunCompletion { outbox: vec![payload("[1e-20000]".into())], ..run.clone() },
    ];
    for completion in bad {
        assert!(is_invalid(&completion.validate()));
        assert!(is_invalid(&env.store.complete(&[completion]).await));
    }
    assert_eq!(env.issue(issue).await?, before);
    let many = RunCompletion { outbox: vec![reply("x"); OUTBOX_PER_RUN_MAX], ..run };
    env.complete(many).await?;
    env.assert_consistent().await
}

pub async fn invalid_options_are_rejected(env: StoreTestEnv) -> TestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let too_long = Duration::from_secs(1) + CLAIM_TTL_MAX;
    for bad in [
        ClaimOptions { worker: String::new(), ..options("a") },
        ClaimOptions { worker: "\0".into(), ..options("a") },
        ClaimOptions { ttl: Duration::ZERO, ..options("a") },
        ClaimOptions { ttl: too_long, ..options("a") },
        ClaimOptions { events_max: 0, ..options("a") },
        ClaimOptions { crashes_max: 0, ..options("a") },
    ] {
        assert!(is_invalid(&env.store.claim(&[issue], &bad).await), "{bad:?}");
    }
    let far = DELAY_MAX + Duration::from_secs(1);
    let debounce = DebounceWindow { quiet_for: far, max_wait: far, ..DebounceWindow::default() };
    assert!(is_invalid(&env.store.record(&[event("1", "b")], &debounce).await[0]));
    let sweep = SweepOptions { limit: 0, ..SweepOptions::default() };
    assert!(is_invalid(&env.store.sweep(&sweep).await));
    assert!(is_invalid(&env.store.take_outbox("", 1, TTL).await));
    assert!(is_invalid(&env.store.heartbeat_worker("", TTL).await));
    assert!(is_invalid(&env.store.issues(&Default::default(), 0).await));
    assert!(is_invalid(&env.store.ensure_integration("", "x").await));
    let claimed = env.claim(issue).await?;
    let failure = RunFailure {
        issue_id: issue,
        epoch: claimed.epoch,
        error: String::new(),
        then: AfterFailure::Retry { after: far },
    };
    assert!(is_invalid(&env.store.fail(&[failure], 5).await));
    env.assert_consistent().await
}
