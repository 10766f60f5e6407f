//! How replies leave: at least once with one key, in the order of their issue, with retries, and dead after the limit.

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
use support::captured_telemetry::{CapturedMetrics, CapturedWarnings};
use support::flaky_store::FlakyStore;
use support::{Backends, Gate, LONG, System, wait_until};

const NO_WAIT: IssueRetryPolicy = IssueRetryPolicy {
    attempts_max: 3,
    crashes_max: 3,
    backoff_first: Duration::ZERO,
    backoff_factor: 1,
    backoff_max: Duration::ZERO,
};

/// What a deliverer does with a row.
type Verdict = Box<dyn Fn(&OutboxRow) -> Result<(), DeliverError> + Send + Sync>;

/// Writes down what it was given, and does as it is told.
#[derive(Clone)]
struct RecordingDeliverer {
    seen: Arc<Mutex<Vec<(String, String)>>>,
    verdict: Arc<Verdict>,
}

impl RecordingDeliverer {
    fn new(
        verdict: impl Fn(&OutboxRow) -> Result<(), DeliverError> + Send + Sync + 'static,
    ) -> Self {
        Self { seen: Arc::default(), verdict: Arc::new(Box::new(verdict)) }
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
        (self.verdict)(row)
    }
}

/// An issue whose run has left these replies.
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
async fn replies_of_one_issue_leave_in_order_and_a_failure_holds_back_only_its_own() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
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
    assert!(keys.windows(2).all(|pair| pair[0] == pair[1]), "one key at every try");
    Ok(())
}

#[tokio::test]
async fn a_reply_that_never_leaves_is_dead_and_later_ones_go_on() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
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

    // Mended and tried again by an operator.
    system.store.retry_outbox(dead[0].row.id).await?;
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.seen(), [("10".to_owned(), dead[0].row.idempotency_key.clone())]);
    Ok(())
}

#[tokio::test]
async fn a_deliverer_that_panics_or_hangs_has_failed() -> Result<()> {
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
    let system = System::at(&Backends::now()).await?;
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
async fn a_row_that_kills_those_who_deliver_it_is_dead_in_the_end() -> Result<()> {
    let backends = Backends::memory();
    let system = System::at(&backends).await?;
    replied(&system, "1", &["10", "11"]).await?;
    let ttl = Duration::from_secs(1);
    for _ in 0..config().retry.crashes_max {
        // Taken, and never heard of again.
        assert_eq!(system.store.take_outbox("died", 2, ttl).await?.len(), 1);
        backends.clock.as_ref().expect("time is ours").advance(ttl);
    }
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.payloads(), ["11"]);
    let dead = system.store.dead_outbox(None, 10).await?;
    assert_eq!(dead[0].error, "3 deliverers died or hung while delivering it");

    // An operator who has mended it gets it delivered.
    system.store.retry_outbox(dead[0].row.id).await?;
    system.outbox(deliverer.clone(), config())?.run_once().await?;
    assert_eq!(deliverer.payloads(), ["11", "10"]);
    Ok(())
}

#[tokio::test]
async fn a_slow_delivery_does_not_hold_up_other_issues_and_is_finished_before_a_stop() -> Result<()>
{
    #[derive(Clone, Default)]
    struct Slow(Gate, Arc<Mutex<Vec<String>>>);
    #[async_trait]
    impl Deliver for Slow {
        async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
            if row.payload == "10" {
                self.0.pass().await;
            }
            self.1.lock().expect("not poisoned").push(row.payload.clone());
            Ok(())
        }
    }
    let system = System::at(&Backends::now()).await?;
    let slow = Slow::default();
    let outbox = system.outbox(slow.clone(), config())?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
    replied(&system, "1", &["10"]).await?;
    slow.0.arrivals(1).await?;
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
async fn events_and_replies_keep_the_order_in_which_the_handler_named_them() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
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

/// Replies of an integration, one of each of as many issues.
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

/// Hangs with the rows of all integrations whose names begin with `hangs`; counts and remembers.
#[derive(Clone, Default)]
struct Receivers {
    begun: Arc<AtomicUsize>,
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
            self.begun.fetch_add(1, Ordering::SeqCst);
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
async fn a_receiver_that_hangs_with_a_backlog_does_not_delay_the_replies_of_another() -> Result<()>
{
    for backends in [Backends::now(), Backends::servers()?] {
        let system = System::at(&backends).await?;
        backlog(&system, "hangs", 300).await?;
        let receivers = Receivers::default();
        // Nothing times out before the test ends: what is delivered did not wait for it.
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
async fn receivers_that_fail_leave_half_of_the_slots_to_the_others() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
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
    // Each row has failed, so that every target is known to.
    wait_until("failures", || async { receivers.begun.load(Ordering::SeqCst) >= 120 }).await?;
    backlog(&system, "prompt", 50).await?;
    let delivered = || receivers.delivered.lock().expect("not poisoned").len();
    wait_until("the others", || async { delivered() == 50 }).await?;
    drop(stop);
    running.await?;
    Ok(())
}

#[tokio::test]
async fn a_receiver_that_asks_for_a_pause_gets_nothing_before_it_is_over() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
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

/// Waits at a gate with each row, one for each of two issues, and writes down what has left.
#[derive(Clone, Default)]
struct Slow {
    gates: [Gate; 2],
    left: Arc<Mutex<Vec<String>>>,
}

impl Slow {
    fn left(&self) -> Vec<String> {
        self.left.lock().expect("not poisoned").clone()
    }
}

#[async_trait]
impl Deliver for Slow {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self.gates[usize::from(row.external_issue_id == "2")].pass().await;
        self.left.lock().expect("not poisoned").push(row.payload.clone());
        Ok(())
    }
}

async fn flaky() -> Result<(System, Arc<FlakyStore>)> {
    let backends = Backends::now();
    let flaky = FlakyStore::new(backends.store().await?);
    let system = System::on(flaky.clone(), backends.streams().await?, InboxConfig::default())?;
    Ok((system, flaky))
}

#[tokio::test]
async fn a_stop_waits_no_longer_than_the_drain_and_gives_back_what_has_not_ended() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
    replied(&system, "1", &["10"]).await?;
    let slow = Slow::default();
    // A row that was not given back would be hidden for longer than this test lives.
    let config = OutboxConfig { deadline: LONG, ttl: LONG * 10, drain: Duration::ZERO, ..config() };
    let outbox = system.outbox(slow.clone(), config)?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
    slow.gates[0].arrivals(1).await?;

    drop(stop);
    tokio::time::timeout(LONG, running).await??;
    assert!(slow.left().is_empty(), "it was cancelled");
    let again = system.store.take_outbox("other", 10, LONG).await?;
    assert_eq!(again.len(), 1, "it is there at once");
    assert_eq!(again[0].attempts, 0, "and nobody is to blame");
    Ok(())
}

#[tokio::test]
async fn a_stop_whose_end_is_known_lets_deliveries_go_on_until_then() -> Result<()> {
    let system = System::at(&Backends::now()).await?;
    replied(&system, "1", &["10"]).await?;
    let slow = Slow::default();
    let config = OutboxConfig { deadline: LONG, ttl: LONG * 10, drain: Duration::ZERO, ..config() };
    let outbox = system.outbox(slow.clone(), config)?;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let running = tokio::spawn(async move {
        outbox.run_until(async { stopped.await.expect("it is told") }).await;
    });
    slow.gates[0].arrivals(1).await?;

    stop.send(std::time::Instant::now() + LONG).expect("it listens");
    // Time to hear of it: a stop of no drain would have cancelled the delivery by then.
    tokio::time::sleep(Duration::from_millis(100)).await;
    slow.gates[0].open();
    tokio::time::timeout(LONG, running).await??;
    assert_eq!(slow.left(), ["10"], "it was not cancelled");
    assert_eq!(system.store.backlog().await?.outbox_pending, 0);
    Ok(())
}

#[tokio::test]
async fn an_error_of_the_database_does_not_cut_off_the_deliveries_under_way() -> Result<()> {
    let (system, flaky) = flaky().await?;
    replied(&system, "1", &["10"]).await?;
    replied(&system, "2", &["20"]).await?;
    let slow = Slow::default();
    let outbox = system.outbox(slow.clone(), config())?;
    let running = tokio::spawn(async move { outbox.run_once().await });
    slow.gates[0].arrivals(1).await?;
    slow.gates[1].arrivals(1).await?;
    // The next look at the database, when the second row has left, fails.
    flaky.lose("take_outbox", 1);
    slow.gates[1].open();
    wait_until("the error", || async { flaky.is_done() }).await?;
    assert!(!running.is_finished(), "it waits for what it has begun");

    slow.gates[0].open();
    assert!(tokio::time::timeout(LONG, running).await??.is_err());
    assert_eq!(slow.left(), ["20", "10"]);
    assert_eq!(system.store.backlog().await?.outbox_pending, 0, "both are settled");
    Ok(())
}

#[tokio::test]
async fn a_delivery_that_the_database_refuses_to_settle_is_told_of_and_comes_again() -> Result<()> {
    let (metrics_seen, _guard) = CapturedMetrics::start();
    let (warnings, _log_guard) = CapturedWarnings::start();
    let (system, flaky) = flaky().await?;
    replied(&system, "1", &["10"]).await?;
    flaky.refuse_settlements(1);
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    let (deadline, ttl) = (Duration::from_secs(1), Duration::from_secs(2));
    let outbox = system.outbox(deliverer.clone(), OutboxConfig { deadline, ttl, ..config() })?;
    let running = tokio::spawn(async move { outbox.run(std::future::pending()).await });
    wait_until("the row to be settled", || async {
        system.store.backlog().await.expect("it answers").outbox_pending == 0
    })
    .await?;
    running.abort();
    let seen = deliverer.seen();
    assert!(seen.len() == 2 && seen[0] == seen[1], "twice with one key: {seen:?}");
    let told = warnings.with("delivery was not settled");
    assert!(told.len() == 1 && told[0].contains("no such thing"), "{told:?}");
    let name = "headwater_outbox_deliveries_total";
    assert_eq!(metrics_seen.value(&format!("{name}{{kind=reply,result=unsettled}}")), 1.0);
    Ok(())
}

#[tokio::test]
async fn rows_that_cannot_be_taken_together_are_taken_one_by_one() -> Result<()> {
    let (system, flaky) = flaky().await?;
    for (issue, reply) in [("1", &["10"]), ("2", &["20"]), ("3", &["30"])] {
        replied(&system, issue, reply).await?;
    }
    flaky.refuse_shared_takes();
    let deliverer = RecordingDeliverer::new(|_| Ok(()));
    assert_eq!(system.outbox(deliverer.clone(), config())?.run_once().await?, 3);
    assert!(flaky.refused_takes() > 0);
    let mut payloads = deliverer.payloads();
    payloads.sort();
    assert_eq!(payloads, ["10", "20", "30"]);
    Ok(())
}
