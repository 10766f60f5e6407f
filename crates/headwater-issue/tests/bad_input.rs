//! Invalid input: a typed error or a no-op, nothing lost, no partial effect.

mod support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    HandlerError, IssueError, IssueId, IssueRetryPolicy, NewEvent, OutboxConfig, Resolution, Run,
    SweepOptions, Sweeper, SweeperConfig, WorkerConfig, explain, limits,
};
use headwater_stream::{Fields, Range, Retention, StreamName};
use support::{Backends, DeliveryLog, RunLog, System, event_of, wait_until};

async fn rejected(system: &System, event: NewEvent) -> Result<IssueError> {
    let before = system.assert_consistent().await?;
    let error = system.inbox.record(event).await.expect_err("rejected");
    assert_eq!(system.assert_consistent().await?, before, "nothing was stored");
    Ok(error)
}

#[tokio::test]
async fn an_event_of_an_unknown_integration_is_rejected() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let event = NewEvent { integration: "unknown".into(), ..event_of("1", "a") };
    let error = rejected(&system, event).await?;
    assert!(
        matches!(&error, IssueError::UnknownIntegration { integration } if integration == "unknown")
    );
    Ok(())
}

#[tokio::test]
async fn a_payload_that_is_not_json_or_too_deep_or_too_large_is_rejected() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let large = format!("\"{}\"", "x".repeat(limits::PAYLOAD_BYTES_MAX));
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    for payload in ["", "{", "nonsense", r#""a\u000b"#, "\"a\0b\"", &large, &deep] {
        let event = NewEvent { payload: payload.into(), ..event_of("1", "a") };
        let error = rejected(&system, event).await?;
        assert!(matches!(&error, IssueError::Invalid { what, .. } if what == "payload"), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn nul_bytes_in_names_are_rejected() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    for event in [
        NewEvent { external_issue_id: "4\0 2".into(), ..event_of("1", "a") },
        NewEvent { external_project_id: "\0".into(), ..event_of("1", "a") },
        NewEvent { event_type: "no\0te".into(), ..event_of("1", "a") },
        NewEvent { dedup_key: Some("\0".into()), ..event_of("1", "a") },
    ] {
        let error = rejected(&system, event).await?;
        assert!(error.to_string().contains("NUL"), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn a_key_used_for_a_different_payload_is_a_conflict_and_the_first_event_is_unchanged()
-> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let first = system.record("1", "a").await?;
    let event = NewEvent { payload: r#"{"text":"another"}"#.into(), ..event_of("1", "a") };
    let error = rejected(&system, event).await?;
    assert!(matches!(&error, IssueError::DedupConflict { dedup_key, .. } if dedup_key == "1/a"));
    let again = system.record("1", "a").await?;
    assert_eq!((again.event_log_id, again.duplicate), (first.event_log_id, true));
    Ok(())
}

#[tokio::test]
async fn invalid_events_fail_alone_in_a_shared_commit() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let event = |number: usize| match number % 4 {
        0 => NewEvent { integration: "unknown".into(), ..event_of("1", &number.to_string()) },
        1 => NewEvent { payload: "{".into(), ..event_of("1", &number.to_string()) },
        _ => event_of("1", &number.to_string()),
    };
    let records = (0..200).map(|number| system.inbox.record(event(number)));
    let results = futures_util::future::join_all(records).await;
    for (number, result) in results.iter().enumerate() {
        assert_eq!(result.is_ok(), number % 4 > 1, "{number}: {result:?}");
    }
    assert_eq!(system.assert_consistent().await?.recorded, 100);
    Ok(())
}

#[tokio::test]
async fn a_handler_result_over_a_limit_is_a_failure_and_is_not_stored() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let too_many = (0..=limits::OUTBOX_PER_RUN_MAX).fold(Resolution::new(), |r, _| r.reply("1"));
    let large = format!("\"{}\"", "x".repeat(limits::PAYLOAD_BYTES_MAX));
    let too_large = Resolution::new().reply("1").reply(large);
    let not_json = Resolution::new().reply("1").fields("{");
    let no_object = Resolution::new().reply("1").fields("[]");
    for (number, resolution) in [too_many, too_large, not_json, no_object].into_iter().enumerate() {
        let issue_id = system.record(&number.to_string(), "a").await?.issue_id;
        let resolution = Arc::new(resolution);
        let handler = move |_: Run| {
            let resolution = Arc::clone(&resolution);
            async move { Ok::<_, HandlerError>((*resolution).clone()) }
        };
        let config = WorkerConfig {
            retry: IssueRetryPolicy { attempts_max: 1, ..IssueRetryPolicy::default() },
            ..WorkerConfig::default()
        };
        system.worker(handler, config)?.process_issue(issue_id).await;
        let reason = explain(system.store.as_ref(), issue_id).await?.to_string();
        assert!(
            reason.contains("quarantined") && reason.contains("the handler's result"),
            "{reason}"
        );
    }
    assert_eq!(system.store.backlog().await?.outbox_pending, 0);
    system.assert_consistent().await?;
    Ok(())
}

#[tokio::test]
async fn a_malformed_nudge_becomes_a_dead_letter_with_its_bytes() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    let stream = StreamName::new(headwater_issue::STREAM)?;
    let bad: Vec<Fields> = vec![
        Fields::new([("nothing", "1")]),
        Fields::new([("issue_id", "seven")]),
        Fields::new([("issue_id", "-1"), ("event_log_id", "2")]),
        Fields::new([("issue_id", b"\xff\x00".to_vec())]),
        Fields::new([("issue_id", "99999999999999999999")]),
    ];
    system.streams.append(&stream, &bad, &Retention::KEEP_ALL).await?;
    // A nudge of another program may have extra fields.
    let recorded = system.record("1", "a").await?;
    let foreign =
        Fields::new([("extra", "1".to_owned()), ("issue_id", recorded.issue_id.to_string())]);
    system.streams.append(&stream, &[foreign], &Retention::KEEP_ALL).await?;

    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    system.wait_processed().await?;
    let dead = StreamName::new("issue_work:dlq")?;
    wait_until("the dead letters", || async {
        let stats = system.streams.stats(&dead).await.expect("the store replies");
        stats.is_some_and(|stats| stats.length == bad.len() as u64)
    })
    .await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a"]]);
    let dead_letters = system.streams.range(&dead, Range::first(10)).await?;
    let fields: Vec<_> = dead_letters.iter().map(|letter| letter.fields.get("issue_id")).collect();
    assert!(fields.contains(&bad[3].get("issue_id")), "{dead_letters:?}");
    Ok(())
}

#[tokio::test]
async fn a_nudge_for_a_missing_issue_is_a_no_op() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    let worker = system.worker(run_log.handler(), WorkerConfig::default())?;
    worker.process_issue(IssueId(12345)).await;
    assert!(run_log.runs().is_empty());
    assert!(matches!(
        explain(system.store.as_ref(), IssueId(12345)).await,
        Err(IssueError::NotFound { .. })
    ));
    Ok(())
}

#[tokio::test]
async fn invalid_settings_are_rejected() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let worker = WorkerConfig { concurrency: 0, ..WorkerConfig::default() };
    assert!(system.worker(RunLog::default().handler(), worker).is_err());
    let outbox = OutboxConfig { concurrency: 0, ..OutboxConfig::default() };
    assert!(system.outbox(DeliveryLog::default(), outbox).is_err());
    // With zero, every nudge would always be overdue, and a sweep would never end.
    let options = SweepOptions { nudge_overdue: Duration::ZERO, ..SweepOptions::default() };
    for (name, sweeper) in [
        ("nudge_overdue", SweeperConfig { options, ..SweeperConfig::default() }),
        ("every", SweeperConfig { every: Duration::ZERO, ..SweeperConfig::default() }),
    ] {
        let store = Arc::clone(&system.store);
        let error = Sweeper::new(store, system.nudger.clone(), None, sweeper);
        let error = error.expect_err("rejected").to_string();
        assert!(error.starts_with(name), "{error}");
    }
    Ok(())
}
