//! Delivery of replies: at least once with one key, in order per issue, with retries, and dead after the limit.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use headwater_issue::{
    Deliver, DeliverError, HandlerError, InboxConfig, IssueRetryPolicy, KeyedOutboxRow, NewEvent,
    NewOutboxRow, OutboxConfig, OutboxKind, OutboxRow, Resolution, Run, WorkerConfig,
};
use headwater_stream::Backoff;
use support::captured_telemetry::{CapturedMetrics, CapturedWarnings};
use support::flaky_store::FlakyStore;
use support::{Backends, Gate, LONG, System, wait_until};

const NO_WAIT: IssueRetryPolicy =
    IssueRetryPolicy { attempts_max: 3, crashes_max: 3, backoff: Backoff::Fixed(Duration::ZERO) };

/// The result of a delivery.
type DeliverFn = Box<dyn Fn(&OutboxRow) -> Result<(), DeliverError> + Send + Sync>;

/// Records the rows it gets, and returns the given results.
#[derive(Clone)]
struct RecordingDeliverer {
    seen: Arc<Mutex<Vec<(String, String)>>>,
    result: Arc<DeliverFn>,
}

impl RecordingDeliverer {
    fn new(
        result: impl Fn(&OutboxRow) -> Result<(), DeliverError> + Send + Sync + 'static,
    ) -> Self {
        Self { seen: Arc::default(), result: Arc::new(Box::new(result)) }
    }

    fn seen(&self) -> Vec<(String, String)> {
        self.seen.lock().expect("not poisoned").clone()
    }

    fn payloads(&self) -> Vec<String> {
        self.seen().into_iter().map(|(payload, _)| payload).collect()
    }
}

#[async_trait]
impl Deliver for RecordingDeliverer {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let seen = (row.payload.clone(), row.idempotency_key.clone());
        self.seen.lock().expect("not poisoned").push(seen);
        (self.result)(row)
    }
}

/// Processes an issue with these replies.
async fn replied(system: &System, issue: &str, replies: &'static [&'static str]) -> Result<()> {
    let issue_id = system.record(issue, "a").await?.issue_id;
    let handler = move |_: Run| async move {
        let resolution = replies.iter().fold(Resolution::new(), |r, reply| r.reply(*reply));
        Ok::<_, HandlerError>(resolution)
    };
    system.worker(handler, WorkerConfig::default())?.process_issue(issue_id).await;
    Ok(())
}

fn config() -> OutboxConfig {
    OutboxConfig { retry: NO_WAIT, every: Duration::from_millis(20), ..OutboxConfig::default() }
}

#[tokio::test]
async fn replies_of_an_issue_are_delivered_in_order_and_a_failure_blocks_only_its_issue()
-> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    replied(&system, "1", &["10", "11", "12"]).await?;
    replied(&system, "2", &["20"]).await?;
    let deliverer = RecordingDeliverer::new(|row| match (row.payload.as_str(), row.attempts) {
        ("10", 0 | 1) => Err(DeliverError::Retry("busy".into())),
        _ => Ok(()),
    });
    let outbox = system.outbox(deliverer.clone(), config())?;
    assert_eq!(outbox.run_once().await?, 6);
    let (first, second): (Vec<_>, Vec<_>) =
        deliverer.payloads().into_iter().partition(|payload| payload.starts_with('1'));
    assert_eq!(first, ["10", "10", "10", "11", "12"]);
    assert_eq!(second, ["20"]);
    let keys: Vec<_> =
        deliverer.seen().into_iter().filter(|(payload, _)| payload == "10").collect();
    assert!(keys.windows(2).all(|pair| pair[0] == pair[1]), "one key for all attempts");
    Ok(())
}

#[tokio::test]
async fn a_reply_that_always_fails_is_dead_and_later_replies_continue() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    replied(&system, "1", &["10", "11", "12"]).await?;
    let deliverer = RecordingDeliverer::new(|row| match row.payload.as_str() {
        "10" => Err(DeliverError::Retry("gone".into())),
        "11" => Err(DeliverError::Dead("no such channel".into())),
        _ => Ok(()),
    });
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.payloads(), ["10", "10", "10", "11", "12"]);
    let dead = system.store.dead_outbox(None, 10).await?;
    let errors: Vec<&str> = dead.iter().map(|dead| dead.error.as_str()).collect();
    assert_eq!(errors, ["gone", "no such channel"]);

    // Retried by an operator.
    system.store.retry_outbox(dead[0].row.id).await?;
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.seen(), [("10".to_owned(), dead[0].row.idempotency_key.clone())]);
    Ok(())
}

#[tokio::test]
async fn a_panic_or_timeout_of_the_deliverer_is_a_failure() -> Result<()> {
    struct Hangs;
    #[async_trait]
    impl Deliver for Hangs {
        async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
            match row.payload.as_str() {
                "10" => panic!("a bug in the deliverer"),
                _ => std::future::pending().await,
            }
        }
    }
    let system = System::at(&Backends::in_memory()).await?;
    replied(&system, "1", &["10"]).await?;
    replied(&system, "2", &["20"]).await?;
    let config = OutboxConfig { deadline: Duration::from_millis(20), ..config() };
    system.outbox(Hangs, config)?.run_once().await?;
    let mut errors: Vec<String> =
        system.store.dead_outbox(None, 10).await?.into_iter().map(|dead| dead.error).collect();
    errors.sort();
    assert_eq!(
        errors,
        ["the deliverer panicked: a bug in the deliverer", "the delivery took longer than 20ms"]
    );
    Ok(())
}

#[tokio::test]
async fn a_row_that_crashes_its_deliverers_is_dead_after_the_limit() -> Result<()> {
    let backends = Backends::in_memory_with_test_clock();
    let system = System::at(&backends).await?;
    replied(&system, "1", &["10", "11"]).await?;
    let ttl = Duration::from_secs(1);
    for _ in 0..config().retry.crashes_max {
        // Taken and never settled.
        assert_eq!(system.store.take_outbox("died", 2, ttl).await?.len(), 1);
        backends.clock.as_ref().expect("a test clock").advance(ttl);
    }
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.payloads(), ["11"]);
    let dead = system.store.dead_outbox(None, 10).await?;
    assert_eq!(dead[0].error, "3 deliverers died or hung while delivering it");

    // An operator can retry it.
    system.store.retry_outbox(dead[0].row.id).await?;
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.payloads(), ["11", "10"]);
    Ok(())
}

#[tokio::test]
async fn a_slow_delivery_does_not_block_other_issues_and_finishes_before_shutdown() -> Result<()> {
    #[derive(Clone, Default)]
    struct Slow(Gate, Arc<Mutex<Vec<String>>>);
    #[async_trait]
    impl Deliver for Slow {
        async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
            if row.payload == "10" {
                self.0.wait().await;
            }
            self.1.lock().expect("not poisoned").push(row.payload.clone());
            Ok(())
        }
    }
    let system = System::at(&Backends::in_memory()).await?;
    let slow = Slow::default();
    let outbox = system.outbox(slow.clone(), config())?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
    replied(&system, "1", &["10"]).await?;
    slow.0.wait_for_arrivals(1).await?;
    replied(&system, "2", &["20", "21"]).await?;
    wait_until("the others", || async { slow.1.lock().expect("not poisoned").len() == 2 }).await?;
    drop(stop);
    slow.0.open();
    running.await?;
    assert_eq!(*slow.1.lock().expect("not poisoned"), ["20", "21", "10"]);
    assert_eq!(system.store.backlog().await?.outbox_pending, 0);
    Ok(())
}

#[tokio::test]
async fn events_and_replies_keep_the_order_of_the_resolution() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    let handler = |_: Run| async {
        Ok::<_, HandlerError>(
            Resolution::new().event("started", "1").reply("2").event("ended", "3"),
        )
    };
    system.worker(handler, WorkerConfig::default())?.process_issue(issue_id).await;
    let kinds = Arc::new(Mutex::new(Vec::new()));
    let deliverer = {
        let kinds = Arc::clone(&kinds);
        RecordingDeliverer::new(move |row| {
            assert_eq!(row.external_issue_id, "1");
            kinds.lock().expect("not poisoned").push((row.kind, row.target.clone()));
            Ok(())
        })
    };
    system.outbox(deliverer, config())?.run_once().await?;
    let expected = [
        (OutboxKind::Event, "started".to_owned()),
        (OutboxKind::Reply, String::new()),
        (OutboxKind::Event, "ended".to_owned()),
    ];
    assert_eq!(*kinds.lock().expect("not poisoned"), expected);
    Ok(())
}

/// Creates `count` replies of an integration, one per issue.
async fn backlog(system: &System, integration: &str, count: usize) -> Result<()> {
    system.store.ensure_integration(integration, "gitlab").await?;
    for number in 0..count {
        let event = NewEvent::new(integration, number.to_string(), "note", "{}");
        let issue_id = system.inbox.record(event).await?.issue_id;
        let mut transaction = system.store.begin().await?;
        let row =
            NewOutboxRow { kind: OutboxKind::Reply, target: "answer".into(), payload: "1".into() };
        transaction.write_outbox(issue_id, &[KeyedOutboxRow { key: "1".into(), row }]).await?;
        transaction.commit().await?;
    }
    Ok(())
}

/// Hangs on rows of integrations whose names begin with `hangs`, and records the others.
#[derive(Clone, Default)]
struct Receivers {
    started: Arc<AtomicUsize>,
    hanging: Arc<AtomicUsize>,
    most_hanging: Arc<AtomicUsize>,
    delivered: Arc<Mutex<Vec<String>>>,
}

struct Hanging<'a>(&'a Receivers);

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.0.hanging.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Deliver for Receivers {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        if row.integration.starts_with("hangs") {
            self.started.fetch_add(1, Ordering::SeqCst);
            let hanging = self.hanging.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_hanging.fetch_max(hanging, Ordering::SeqCst);
            let _hanging = Hanging(self);
            std::future::pending::<()>().await;
        }
        self.delivered.lock().expect("not poisoned").push(row.integration.clone());
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_target_with_a_backlog_does_not_delay_another_target() -> Result<()> {
    for backends in [Backends::in_memory(), Backends::servers()?] {
        let system = System::at(&backends).await?;
        backlog(&system, "hangs", 300).await?;
        let receivers = Receivers::default();
        // No delivery times out during the test, so the others did not wait for it.
        let config =
            OutboxConfig { deadline: LONG * 10, ttl: LONG * 20, drain: Duration::ZERO, ..config() };
        let per_target = config.per_target;
        let outbox = system.outbox(receivers.clone(), config)?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
        wait_until("the hanging ones", || async { receivers.hanging.load(Ordering::SeqCst) > 0 })
            .await?;
        backlog(&system, "prompt", 100).await?;
        let delivered = || receivers.delivered.lock().expect("not poisoned").len();
        wait_until("the others", || async { delivered() == 100 }).await?;

        drop(stop);
        running.await?;
        let most = receivers.most_hanging.load(Ordering::SeqCst);
        assert!(
            most <= per_target,
            "{most} rows of one target in flight, its share is {per_target}"
        );
        assert!(receivers.delivered.lock().expect("not poisoned").iter().all(|it| it == "prompt"));
    }
    Ok(())
}

#[tokio::test]
async fn failing_targets_leave_half_of_the_slots_to_the_others() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    for number in 0..20 {
        backlog(&system, &format!("hangs-{number}"), 5).await?;
    }
    let receivers = Receivers::default();
    let retry = IssueRetryPolicy { attempts_max: 1000, ..NO_WAIT };
    let deadline = Duration::from_millis(200);
    let config = OutboxConfig {
        concurrency: 8,
        per_target: 4,
        deadline,
        retry,
        drain: Duration::ZERO,
        ..config()
    };
    let outbox = system.outbox(receivers.clone(), config)?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
    // Every row has failed, so every target is failing.
    wait_until("failures", || async { receivers.started.load(Ordering::SeqCst) >= 120 }).await?;
    backlog(&system, "prompt", 50).await?;
    let delivered = || receivers.delivered.lock().expect("not poisoned").len();
    wait_until("the others", || async { delivered() == 50 }).await?;
    drop(stop);
    running.await?;
    Ok(())
}

#[tokio::test]
async fn a_paused_target_gets_no_deliveries_until_the_pause_ends() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    backlog(&system, "limited", 20).await?;
    backlog(&system, "prompt", 20).await?;
    let deliverer = RecordingDeliverer::new(|row| match row.integration.as_str() {
        "limited" => {
            Err(DeliverError::Paused { problem: "429".into(), after: Duration::from_secs(1800) })
        }
        _ => Ok(()),
    });
    let outbox = system.outbox(deliverer.clone(), OutboxConfig { per_target: 2, ..config() })?;
    outbox.run_once().await?;
    let seen = deliverer.seen().len();
    assert_eq!(seen, 22, "the others, and the two that were in flight");
    assert!(system.store.dead_outbox(None, 10).await?.is_empty(), "no attempt is counted");
    assert_eq!(system.store.backlog().await?.outbox_pending, 20);
    Ok(())
}

#[tokio::test]
async fn a_held_target_gets_no_deliveries_and_no_row_of_it_dies() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    backlog(&system, "expired", 20).await?;
    backlog(&system, "prompt", 20).await?;
    let held = |row: &OutboxRow| match row.integration.as_str() {
        "expired" => Err(DeliverError::Held("401 Unauthorized".into())),
        _ => Ok(()),
    };
    let retry = IssueRetryPolicy { attempts_max: 1, ..IssueRetryPolicy::default() };
    let deliverer = RecordingDeliverer::new(held);
    let config = OutboxConfig { per_target: 2, retry, ..config() };
    let outbox = system.outbox(deliverer.clone(), config)?;
    outbox.run_once().await?;
    assert_eq!(deliverer.seen().len(), 22, "the others, and the two that were in flight");
    assert!(system.store.dead_outbox(None, 10).await?.is_empty(), "no attempt is counted");
    assert_eq!(system.store.backlog().await?.outbox_pending, 20);
    Ok(())
}

#[tokio::test]
async fn denied_rows_do_not_delay_the_other_rows_of_their_target() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    backlog(&system, "one", 40).await?;
    // They are due first.
    let denied = |row: &OutboxRow| match row.external_issue_id.parse() {
        Ok(0..20) => Err(DeliverError::Denied("403 Forbidden".into())),
        _ => Ok(()),
    };
    let retry = IssueRetryPolicy { attempts_max: 1, ..IssueRetryPolicy::default() };
    let deliverer = RecordingDeliverer::new(denied);
    let config = OutboxConfig { per_target: 2, retry, ..config() };
    let outbox = system.outbox(deliverer.clone(), config)?;
    outbox.run_once().await?;
    assert_eq!(deliverer.seen().len(), 40, "each was tried once");
    assert!(system.store.dead_outbox(None, 10).await?.is_empty(), "no attempt is counted");
    assert_eq!(system.store.backlog().await?.outbox_pending, 20);
    Ok(())
}

/// Waits at a gate per issue, and records the delivered rows.
#[derive(Clone, Default)]
struct Slow {
    gates: [Gate; 2],
    delivered: Arc<Mutex<Vec<String>>>,
}

impl Slow {
    fn delivered(&self) -> Vec<String> {
        self.delivered.lock().expect("not poisoned").clone()
    }
}

#[async_trait]
impl Deliver for Slow {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self.gates[usize::from(row.external_issue_id == "2")].wait().await;
        self.delivered.lock().expect("not poisoned").push(row.payload.clone());
        Ok(())
    }
}

async fn flaky() -> Result<(System, Arc<FlakyStore>)> {
    let backends = Backends::in_memory();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    Ok((system, flaky))
}

#[tokio::test]
async fn a_shutdown_waits_for_the_drain_time_and_releases_unfinished_rows() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    replied(&system, "1", &["10"]).await?;
    let slow = Slow::default();
    // A row that was not released would stay invisible during the test.
    let config = OutboxConfig { deadline: LONG, ttl: LONG * 10, drain: Duration::ZERO, ..config() };
    let outbox = system.outbox(slow.clone(), config)?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
    slow.gates[0].wait_for_arrivals(1).await?;

    drop(stop);
    tokio::time::timeout(LONG, running).await??;
    assert!(slow.delivered().is_empty(), "it was cancelled");
    let again = system.store.take_outbox("other", 10, LONG).await?;
    assert_eq!(again.len(), 1, "it can be taken at once");
    assert_eq!(again[0].attempts, 0, "no attempt is counted");
    Ok(())
}

#[tokio::test]
async fn a_shutdown_with_a_deadline_lets_deliveries_finish_until_then() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    replied(&system, "1", &["10"]).await?;
    let slow = Slow::default();
    let config = OutboxConfig { deadline: LONG, ttl: LONG * 10, drain: Duration::ZERO, ..config() };
    let outbox = system.outbox(slow.clone(), config)?;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let running = tokio::spawn(async move {
        outbox.run_until(async { stopped.await.expect("a deadline") }).await;
    });
    slow.gates[0].wait_for_arrivals(1).await?;

    stop.send(std::time::Instant::now() + LONG).expect("a receiver");
    // Time to react: without the deadline the delivery would be cancelled by then.
    tokio::time::sleep(Duration::from_millis(100)).await;
    slow.gates[0].open();
    tokio::time::timeout(LONG, running).await??;
    assert_eq!(slow.delivered(), ["10"], "it was not cancelled");
    assert_eq!(system.store.backlog().await?.outbox_pending, 0);
    Ok(())
}

#[tokio::test]
async fn a_database_error_does_not_cancel_deliveries_in_flight() -> Result<()> {
    let (system, flaky) = flaky().await?;
    replied(&system, "1", &["10"]).await?;
    replied(&system, "2", &["20"]).await?;
    let slow = Slow::default();
    let outbox = system.outbox(slow.clone(), config())?;
    let running = tokio::spawn(async move { outbox.run_once().await });
    slow.gates[0].wait_for_arrivals(1).await?;
    slow.gates[1].wait_for_arrivals(1).await?;
    // The next take, after the second row was delivered, fails.
    flaky.lose_replies("take_outbox", 1);
    slow.gates[1].open();
    wait_until("the error", || async { flaky.all_replies_lost() }).await?;
    assert!(!running.is_finished(), "it waits for deliveries in flight");

    slow.gates[0].open();
    assert!(tokio::time::timeout(LONG, running).await??.is_err());
    assert_eq!(slow.delivered(), ["20", "10"]);
    assert_eq!(system.store.backlog().await?.outbox_pending, 0, "both are settled");
    Ok(())
}

#[tokio::test]
async fn a_delivery_that_cannot_be_settled_is_logged_and_repeated() -> Result<()> {
    let (metrics_seen, _guard) = CapturedMetrics::start();
    let (warnings, _log_guard) = CapturedWarnings::start();
    let (system, flaky) = flaky().await?;
    replied(&system, "1", &["10"]).await?;
    flaky.reject_settlements(1);
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    let (deadline, ttl) = (Duration::from_secs(1), Duration::from_secs(2));
    let outbox = system.outbox(deliverer.clone(), OutboxConfig { deadline, ttl, ..config() })?;
    let running = tokio::spawn(async move { outbox.run(std::future::pending()).await });
    wait_until("the row to be settled", || async {
        system.store.backlog().await.expect("the store replies").outbox_pending == 0
    })
    .await?;
    running.abort();
    let seen = deliverer.seen();
    assert!(seen.len() == 2 && seen[0] == seen[1], "twice with one key: {seen:?}");
    let logged = warnings.containing("delivery was not settled");
    assert!(logged.len() == 1 && logged[0].contains("no such thing"), "{logged:?}");
    let name = "headwater_outbox_deliveries_total";
    assert_eq!(metrics_seen.value(&format!("{name}{{kind=reply,result=unsettled}}")), 1.0);
    Ok(())
}

#[tokio::test]
async fn rows_that_cannot_be_taken_as_a_batch_are_taken_one_by_one() -> Result<()> {
    let (system, flaky) = flaky().await?;
    for (issue, reply) in [("1", &["10"]), ("2", &["20"]), ("3", &["30"])] {
        replied(&system, issue, reply).await?;
    }
    flaky.reject_batch_takes();
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    assert_eq!(system.outbox(deliverer.clone(), config())?.run_once().await?, 3);
    assert!(flaky.rejected_takes() > 0);
    let mut payloads = deliverer.payloads();
    payloads.sort();
    assert_eq!(payloads, ["10", "20", "30"]);
    Ok(())
}

#[tokio::test]
async fn a_process_that_was_stopped_during_a_delivery_sends_nothing_afterwards() -> Result<()> {
    let system = System::at(&Backends::in_memory()).await?;
    replied(&system, "1", &["10"]).await?;
    let (sent, is_first) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
    let (deadline, ttl) = (Duration::from_millis(300), Duration::from_millis(600));
    let seen = Arc::clone(&sent);
    let deliver = move |row: OutboxRow| {
        let (sent, is_first) = (Arc::clone(&seen), Arc::clone(&is_first));
        async move {
            // Stands for the search of an earlier reply.
            tokio::task::yield_now().await;
            if is_first.fetch_add(1, Ordering::SeqCst) == 0 {
                // The only thread of this runtime stops, like all threads of a stopped process. It continues when
                // another process may take the row.
                std::thread::sleep(ttl);
                tokio::task::yield_now().await;
            }
            sent.lock().expect("not poisoned").push(row.deliveries);
            Ok(())
        }
    };
    system.outbox(deliver, OutboxConfig { deadline, ttl, ..config() })?.run_once().await?;
    assert_eq!(*sent.lock().expect("not poisoned"), [2], "only by the second delivery");
    Ok(())
}

#[tokio::test]
async fn a_row_whose_take_was_answered_late_is_released_and_delivered_once() -> Result<()> {
    let (system, flaky) = flaky().await?;
    replied(&system, "1", &["10"]).await?;
    let (deadline, ttl) = (Duration::from_secs(4), Duration::from_secs(5));
    flaky.delay_next_take_reply(Duration::from_millis(3_100));
    let deliveries = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&deliveries);
    let deliverer = RecordingDeliverer::new(move |row| {
        seen.lock().expect("not poisoned").push((row.deliveries, row.attempts, row.crashes));
        Ok(())
    });
    let outbox = system.outbox(deliverer, OutboxConfig { deadline, ttl, ..config() })?;
    let running = tokio::spawn(async move { outbox.run(std::future::pending()).await });
    wait_until("the row to be settled", || async {
        system.store.backlog().await.expect("the store replies").outbox_pending == 0
    })
    .await?;
    running.abort();
    assert_eq!(*deliveries.lock().expect("not poisoned"), [(2, 0, 0)]);
    Ok(())
}
