//! Runs that fail, hang, lose their claim, are superseded or stopped, and an unavailable database or stream.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    DebounceWindow, DiagnosisReason, HandlerError, InboxConfig, IssueHandler, IssueId,
    IssueRetryPolicy, OnNewEvent, ProcessingStatus, ProcessingStep, Resolution, Run, StepObserver,
    WorkerConfig, explain, limits,
};
use headwater_stream::Backoff;
use support::flaky_store::FlakyStore;
use support::{Backends, DeliveryLog, Gate, LONG, RunLog, System, event_ids, replies, wait_until};

const NO_WAIT: IssueRetryPolicy =
    IssueRetryPolicy { attempts_max: 3, crashes_max: 3, backoff: Backoff::Fixed(Duration::ZERO) };

fn no_backoff() -> WorkerConfig {
    WorkerConfig { retry: NO_WAIT, ..WorkerConfig::default() }
}

/// A handler that records each run and waits at a gate before it replies.
fn at_gate(run_log: &RunLog, gate: &Gate) -> impl IssueHandler + use<> {
    let (run_log, gate) = (run_log.clone(), gate.clone());
    move |run: Run| {
        let (run_log, gate) = (run_log.clone(), gate.clone());
        async move {
            run_log.record(&run);
            gate.wait().await;
            Ok::<_, HandlerError>(replies(&run))
        }
    }
}

async fn issue(system: &System, issue_id: IssueId) -> Result<headwater_issue::Issue> {
    Ok(system.store.issue(issue_id).await?.expect("it exists"))
}

async fn replies_of(system: &System, issue_id: IssueId) -> Result<()> {
    let deliveries = DeliveryLog::default();
    system.outbox(deliveries.clone(), Default::default())?.run_once().await?;
    deliveries.assert_one_reply_each(event_ids(system.store.as_ref(), issue_id).await?);
    Ok(())
}

#[tokio::test]
async fn a_failed_run_is_retried_and_then_succeeds() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let attempts = Arc::new(std::sync::Mutex::new(Vec::new()));
    let handler = {
        let attempts = Arc::clone(&attempts);
        move |run: Run| {
            let attempts = Arc::clone(&attempts);
            async move {
                attempts.lock().expect("not poisoned").push(run.attempt());
                match run.attempt() {
                    1 => Err(HandlerError::retry("no model")),
                    2 => panic!("a bug in the handler"),
                    _ => Ok(replies(&run)),
                }
            }
        }
    };
    let worker = system.start(handler, no_backoff())?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(*attempts.lock().expect("not poisoned"), [1, 2, 3]);
    let issue = issue(&system, issue_id).await?;
    assert_eq!((issue.attempts, issue.last_error), (0, None), "a success resets failures");
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn an_issue_that_always_fails_is_quarantined_and_processed_after_a_release() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let worker = system.start(
        |_: Run| async { Err::<Resolution, _>(HandlerError::retry("no model")) },
        no_backoff(),
    )?;
    wait_until("the quarantine", || async {
        let issue =
            system.store.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.quarantined_at.is_some()
    })
    .await?;
    worker.stop().await?;
    let reason = explain(system.store.as_ref(), issue_id).await?;
    assert!(
        matches!(&reason.reason, DiagnosisReason::Quarantined { error: Some(error), .. } if error == "no model"),
        "{reason}"
    );
    let report = system.assert_consistent().await?;
    assert_eq!((report.pending, report.quarantined), (0, 1));

    // Neither a nudge nor a new event ends the quarantine.
    let run_log = RunLog::default();
    let worker = system.worker(run_log.handler(), no_backoff())?;
    system.record("1", "b").await?;
    worker.process_issue(issue_id).await;
    assert!(run_log.runs().is_empty());

    system.store.release(issue_id).await?;
    worker.process_issue(issue_id).await;
    assert_eq!(run_log.runs(), [["a", "b"]]);
    system.assert_consistent().await?;
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn a_handler_can_quarantine_at_once() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let refuse =
        |_: Run| async { Err::<Resolution, _>(HandlerError::quarantine("unknown project")) };
    system.worker(refuse, no_backoff())?.process_issue(issue_id).await;
    let issue = issue(&system, issue_id).await?;
    assert!(issue.quarantined_at.is_some());
    assert_eq!(issue.last_error.as_deref(), Some("unknown project"));
    Ok(())
}

#[tokio::test]
async fn a_handler_timeout_is_a_failure() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let hangs = |_: Run| std::future::pending::<Result<Resolution, HandlerError>>();
    let config = WorkerConfig {
        deadline: Duration::from_millis(20),
        retry: IssueRetryPolicy { attempts_max: 1, ..NO_WAIT },
        ..WorkerConfig::default()
    };
    system.worker(hangs, config)?.process_issue(issue_id).await;
    let error = issue(&system, issue_id).await?.last_error.expect("it failed");
    assert!(error.contains("took longer"), "{error}");
    Ok(())
}

#[tokio::test]
async fn an_issue_in_backoff_is_diagnosed_and_retried_in_time() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let handler = |run: Run| async move {
        match run.attempt() {
            1 => Err(HandlerError::retry_after(Duration::from_secs(3), "rate limit")),
            _ => Ok(replies(&run)),
        }
    };
    let worker = system.start(handler, no_backoff())?;
    wait_until("the failure", || async {
        let issue =
            system.store.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.attempts == 1
    })
    .await?;
    let reason = explain(system.store.as_ref(), issue_id).await?;
    let waits = matches!(&reason.reason, DiagnosisReason::Waiting { error: Some(error), .. } if error == "rate limit");
    assert!(waits || issue(&system, issue_id).await?.pending_events == 0, "{reason}");
    // There is no sweeper: the worker retries from its local queue.
    system.wait_processed().await?;
    worker.stop().await?;
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn a_run_deferred_by_zero_still_waits() -> Result<()> {
    // The clock of the database stands still, so a second run would not have waited.
    let backends = Backends::in_memory_with_test_clock();
    let system = System::at(&backends).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let runs = Arc::new(AtomicUsize::new(0));
    let handler = {
        let runs = Arc::clone(&runs);
        move |run: Run| {
            let first = runs.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                match first {
                    true => Err(HandlerError::defer(Duration::ZERO, "no budget")),
                    false => Ok(replies(&run)),
                }
            }
        }
    };
    let worker = system.start(handler, no_backoff())?;
    wait_until("the run to be put off", || async {
        let issue =
            system.store.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.not_before.is_some() || runs.load(Ordering::SeqCst) > 1
    })
    .await?;
    let waits = issue(&system, issue_id).await?;
    let until = waits.not_before.expect("a deferred issue");
    assert!(until.since(waits.updated_at) >= limits::DEFER_MIN, "{waits:?}");
    assert_eq!((waits.attempts, runs.load(Ordering::SeqCst)), (0, 1));

    backends.clock.as_ref().expect("a test clock").advance(limits::DEFER_MIN * 2);
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn a_worker_that_lost_its_claim_cancels_the_handler_and_changes_nothing() -> Result<()> {
    struct DropCounter(Arc<AtomicUsize>);
    impl Drop for DropCounter {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let backends = Backends::in_memory_with_test_clock();
    let (system, run_log, gate) =
        (System::at(&backends).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let cancelled = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (gate, cancelled) = (gate.clone(), Arc::clone(&cancelled));
        move |_: Run| {
            let (gate, drop_counter) = (gate.clone(), DropCounter(Arc::clone(&cancelled)));
            async move {
                gate.wait().await;
                drop(drop_counter);
                Ok::<_, HandlerError>(Resolution::new().reply(r#""from a zombie""#))
            }
        }
    };
    let config = WorkerConfig { heartbeat_every: Duration::from_millis(20), ..no_backoff() };
    // Its claims expire by the database's clock.
    let zombie = system.start(handler, config)?;
    gate.wait_for_arrivals(1).await?;
    let rescuer = system.worker(run_log.handler(), no_backoff())?;
    while run_log.runs().is_empty() {
        // Repeat if a heartbeat renews the claim in between.
        backends.clock.as_ref().expect("a test clock").advance(Duration::from_secs(60));
        rescuer.process_issue(issue_id).await;
    }
    wait_until("the handler to be cancelled", || async { cancelled.load(Ordering::SeqCst) == 1 })
        .await?;
    gate.open();
    zombie.stop().await?;
    replies_of(&system, issue_id).await?;
    system.assert_consistent().await?;
    Ok(())
}

#[tokio::test]
async fn the_result_of_a_zombie_is_fenced() -> Result<()> {
    let backends = Backends::in_memory_with_test_clock();
    let (system, run_log, gate) =
        (System::at(&backends).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let zombie = system.worker(at_gate(&RunLog::default(), &gate), no_backoff())?;
    let zombie = tokio::spawn(async move { zombie.process_issue(issue_id).await });
    gate.wait_for_arrivals(1).await?;
    backends.clock.as_ref().expect("a test clock").advance(Duration::from_secs(60));
    let rescuer = system.worker(run_log.handler(), no_backoff())?;
    rescuer.process_issue(issue_id).await;
    gate.open();
    zombie.await?;
    assert_eq!(run_log.runs(), [["a"]]);
    replies_of(&system, issue_id).await?;
    system.assert_consistent().await?;
    Ok(())
}

#[tokio::test]
async fn a_newer_event_supersedes_a_run_up_to_the_limit_and_then_waits() -> Result<()> {
    let (system, run_log, gate) =
        (System::at(&Backends::in_memory()).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let config = WorkerConfig {
        on_new_event: OnNewEvent::Supersede { times_max: 2 },
        newer_events_every: Duration::from_millis(10),
        ..no_backoff()
    };
    let handler = {
        let (run_log, gate) = (run_log.clone(), gate.clone());
        move |run: Run| {
            let (run_log, gate) = (run_log.clone(), gate.clone());
            async move {
                run_log.record(&run);
                gate.arrive();
                match (run.events().len(), run.issue().superseded) {
                    // The limit is reached: the run is notified of the newest event and continues.
                    (3, 2) => run.newer_events().await,
                    (_, 0) if run.epoch().0 == 4 => {}
                    _ => std::future::pending().await,
                }
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    };
    let worker = system.start(handler, config)?;
    for (arrivals, event) in [(1, "b"), (2, "c"), (3, "d")] {
        gate.wait_for_arrivals(arrivals).await?;
        system.record("1", event).await?;
    }
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a"], vec!["a", "b"], vec!["a", "b", "c"], vec!["d"]]);
    assert_eq!(issue(&system, issue_id).await?.attempts, 0);
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn a_run_is_notified_of_newer_events() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    system.record("1", "a").await?;
    let gate = Gate::default();
    let handler = {
        let gate = gate.clone();
        move |run: Run| {
            let gate = gate.clone();
            async move {
                if run.events().len() == 1 && run.epoch().0 == 1 {
                    assert!(!run.has_newer_events());
                    gate.wait().await;
                    run.newer_events().await;
                    run.heartbeat().await?;
                    assert!(run.has_newer_events() && !run.is_cancelled());
                }
                Ok(replies(&run))
            }
        }
    };
    let config = WorkerConfig { heartbeat_every: Duration::from_millis(20), ..no_backoff() };
    let worker = system.start(handler, config)?;
    gate.wait_for_arrivals(1).await?;
    system.record("1", "b").await?;
    gate.open();
    system.wait_processed().await?;
    worker.stop().await?;
    Ok(())
}

fn window(quiet_for: Duration, events_max: usize) -> DebounceWindow {
    DebounceWindow { quiet_for, max_wait: quiet_for * 50, events_max }
}

#[tokio::test]
async fn a_debounce_window_ends_early_at_events_max() -> Result<()> {
    // Longer than the timeout of the test.
    let config = InboxConfig { debounce: window(LONG * 10, 3), ..Default::default() };
    let (system, run_log) =
        (System::with(&Backends::in_memory(), config).await?, RunLog::default());
    let worker = system.start(run_log.handler(), no_backoff())?;
    for event in ["a", "b", "c"] {
        system.record("1", event).await?;
    }
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a", "b", "c"]]);
    Ok(())
}

#[tokio::test]
async fn a_burst_within_the_debounce_window_is_one_run() -> Result<()> {
    let config = InboxConfig { debounce: window(Duration::from_secs(3), 0), ..Default::default() };
    let (system, run_log) =
        (System::with(&Backends::in_memory(), config).await?, RunLog::default());
    let worker = system.start(run_log.handler(), no_backoff())?;
    for event in ["a", "b", "c", "d"] {
        system.record("1", event).await?;
    }
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a", "b", "c", "d"]]);
    Ok(())
}

#[tokio::test]
async fn events_over_the_run_limit_are_processed_in_several_runs_in_order() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    let mut issue_id = IssueId(0);
    for event in ["a", "b", "c", "d", "e"] {
        issue_id = system.record("1", event).await?.issue_id;
    }
    let worker = system.start(run_log.handler(), WorkerConfig { events_max: 2, ..no_backoff() })?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a", "b"], vec!["c", "d"], vec!["e"]]);
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn a_shutdown_lets_handlers_finish() -> Result<()> {
    let (system, run_log, gate) =
        (System::at(&Backends::in_memory()).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let worker = system.start(at_gate(&run_log, &gate), no_backoff())?;
    gate.wait_for_arrivals(1).await?;
    let stopping = tokio::spawn(worker.stop());
    system.record("2", "a").await?;
    gate.open();
    stopping.await??;
    assert_eq!(issue(&system, issue_id).await?.pending_events, 0);
    assert_eq!(run_log.runs().len(), 1, "no new run was started");
    assert!(system.store.workers().await?.is_empty(), "the worker is deregistered");
    Ok(())
}

#[tokio::test]
async fn a_shutdown_without_drain_releases_claims_without_counting_an_attempt() -> Result<()> {
    let (system, run_log, gate) =
        (System::at(&Backends::in_memory()).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let config = WorkerConfig { drain: Duration::ZERO, ..no_backoff() };
    let worker = system.start(at_gate(&RunLog::default(), &gate), config)?;
    gate.wait_for_arrivals(1).await?;
    worker.stop().await?;
    let left = issue(&system, issue_id).await?;
    assert_eq!((left.status, left.attempts, left.crashes), (ProcessingStatus::Queued, 0, 0));

    // There is no sweeper: the worker sent a nudge when it released the claim.
    let worker = system.start(run_log.handler(), no_backoff())?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a"]]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_nudges_never_cause_concurrent_runs_of_an_issue() -> Result<()> {
    const WORKERS: usize = 3;
    let system = Arc::new(System::at(&Backends::in_memory()).await?);
    let issue_id = system.record("1", "first").await?.issue_id;
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..WORKERS {
        let (running, most) = (Arc::clone(&running), Arc::clone(&most));
        let handler = move |run: Run| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, HandlerError>(replies(&run))
            }
        };
        let worker = system.worker(handler, no_backoff())?;
        for nudge in 0..30 {
            let (worker, system) = (worker.clone(), Arc::clone(&system));
            let event = format!("{}-{nudge}", worker.name());
            tasks.spawn(async move {
                system.record("1", &event).await.expect("it is recorded");
                worker.process_issue(issue_id).await;
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done?;
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
    // Every record was followed by `process_issue`, so nothing is left for a sweep.
    assert_eq!(issue(&system, issue_id).await?.pending_events, 0);
    system.assert_consistent().await?;
    replies_of(&system, issue_id).await
}

#[tokio::test]
async fn a_worker_runs_at_most_its_concurrency() -> Result<()> {
    let (system, gate) = (System::at(&Backends::in_memory()).await?, Gate::default());
    for issue in 0..10 {
        system.record(&issue.to_string(), "a").await?;
    }
    let config = WorkerConfig { concurrency: 3, ..no_backoff() };
    let worker = system.start(at_gate(&RunLog::default(), &gate), config)?;
    for done in 0..10 {
        gate.wait_for_arrivals((done + 3).min(10)).await?;
        assert!(worker.worker.in_flight() <= 3);
        gate.open();
    }
    system.wait_processed().await?;
    worker.stop().await
}

#[tokio::test]
async fn lost_replies_of_the_database_neither_lose_nor_repeat_work() -> Result<()> {
    let calls = [
        ("claim", 2),
        ("complete", 2),
        ("heartbeat", 2),
        ("fail", 2),
        ("settle_outbox", 1),
        ("take_outbox", 2),
    ];
    for (call, times) in calls {
        let backends = Backends::in_memory();
        let flaky = FlakyStore::new(backends.store().await?);
        let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
        let issue_id = system.record("1", "a").await?.issue_id;
        flaky.lose_replies(call, times);
        let handler = |run: Run| async move {
            // A lost heartbeat reply does not affect the handler.
            let _ = run.heartbeat().await;
            let _ = run.heartbeat().await;
            match run.attempt() {
                1 => Err(HandlerError::retry("once")),
                _ => Ok(replies(&run)),
            }
        };
        let worker = system.start(handler, no_backoff())?;
        // If the reply to a failure was lost, the sweep finds the issue.
        let sweeper = system.sweeper(Some(&worker.worker))?;
        let sweeping = tokio::spawn(async move { sweeper.run(std::future::pending()).await });
        system.wait_processed().await?;
        sweeping.abort();
        worker.stop().await?;
        let deliveries = DeliveryLog::default();
        let config = headwater_issue::OutboxConfig {
            ttl: Duration::from_millis(200),
            deadline: Duration::from_millis(100),
            every: Duration::from_millis(20),
            ..Default::default()
        };
        let outbox = system.outbox(deliveries.clone(), config)?;
        let delivering = tokio::spawn(async move { outbox.run(std::future::pending()).await });
        wait_until("the outbox to be empty", || async {
            let backlog = system.store.backlog().await.expect("the store replies");
            backlog.outbox_pending == 0 && flaky.all_replies_lost()
        })
        .await?;
        delivering.abort();
        deliveries.assert_one_reply_each(event_ids(system.store.as_ref(), issue_id).await?);
        system.assert_consistent().await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_record_whose_reply_is_lost_can_be_repeated() -> Result<()> {
    let backends = Backends::in_memory();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    flaky.lose_replies("record", 1);
    assert!(system.record("1", "a").await.is_err());
    let again = system.record("1", "a").await?;
    assert!(again.duplicate && again.nudge, "the first had no random to nudge");
    assert_eq!(system.assert_consistent().await?.recorded, 1);
    Ok(())
}

#[tokio::test]
async fn while_the_stream_is_unavailable_the_sweep_passes_issues_to_the_local_worker() -> Result<()>
{
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    let worker = system.start(run_log.handler(), no_backoff())?;
    system.streams.close().await?;
    for issue in 0..5 {
        let recorded = tokio::time::timeout(LONG, system.record(&issue.to_string(), "a")).await??;
        assert!(!recorded.duplicate);
    }
    let sweeper = system.sweeper(Some(&worker.worker))?;
    let sweeping = tokio::spawn(async move { sweeper.run(std::future::pending()).await });
    system.wait_processed().await?;
    sweeping.abort();
    assert_eq!(run_log.runs().len(), 5);
    system.assert_consistent().await?;
    worker.abort().await;
    Ok(())
}

#[tokio::test]
async fn a_sweep_does_not_fill_a_stream_without_readers() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let most = limits::NUDGES_UNREAD_MAX as usize;
    let records = (0..most + 200)
        .map(|issue| system.inbox.record(support::event_of(&issue.to_string(), "a")));
    for recorded in futures_util::future::join_all(records).await {
        recorded?;
    }
    let stream = headwater_stream::StreamName::new(headwater_issue::STREAM)?;
    let length = || async {
        let stats = system.streams.stats(&stream).await.expect("the store replies");
        stats.map_or(0, |stats| stats.length as usize)
    };
    wait_until("all nudges to be sent", || async { length().await == most + 200 }).await?;
    let sweeper = system.sweeper(None)?;
    assert!(sweeper.run_once().await?.nudges.is_empty());

    // After the stream lost everything, nudges are sent again, up to the limit of unread nudges.
    system.streams.delete_stream(&stream).await?;
    assert!(!sweeper.run_once().await?.nudges.is_empty());
    assert!((most..most + 300).contains(&length().await), "{}", length().await);
    Ok(())
}

/// Reports when a run is committed, and blocks until the test continues.
#[derive(Debug)]
struct BlockAfterCommit {
    committed: std::sync::mpsc::SyncSender<()>,
    resume: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
}

impl StepObserver for BlockAfterCommit {
    fn on_step(&self, step: ProcessingStep, _: IssueId) {
        if step == ProcessingStep::Completed {
            let _ = self.committed.send(());
            let _ = self.resume.lock().expect("not poisoned").recv();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_nudge_between_commit_and_slot_exit_is_not_lost() -> Result<()> {
    let (system, run_log) = (System::at(&Backends::in_memory()).await?, RunLog::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let (committed, is_committed) = std::sync::mpsc::sync_channel(1);
    let (resume, resumed) = std::sync::mpsc::channel();
    let step_observer = BlockAfterCommit { committed, resume: std::sync::Mutex::new(resumed) };
    let worker = system.worker(
        run_log.handler(),
        WorkerConfig { step_observer: Arc::new(step_observer), ..no_backoff() },
    )?;
    let first = {
        let worker = worker.clone();
        tokio::spawn(async move { worker.process_issue(issue_id).await })
    };
    is_committed.recv_timeout(LONG)?;

    // The issue is committed and idle, but still in flight. A new event queues it, and its nudge finds it in flight.
    assert!(system.record("1", "b").await?.nudge);
    worker.process_issue(issue_id).await;
    drop(resume);
    first.await?;
    assert_eq!(run_log.runs(), [["a"], ["b"]], "there is no sweeper and no other worker");
    Ok(())
}
