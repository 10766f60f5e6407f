//! Shared by the tests of this crate: backends, a complete system, and recording handlers and deliverers.

#![allow(dead_code, reason = "each test binary uses only a part")]

pub(crate) mod captured_telemetry;
pub(crate) mod flaky_store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use headwater_issue::{
    Deliver, DeliverError, EventLogId, HandlerError, Inbox, InboxConfig, IssueHandler, IssueId,
    NewEvent, Nudger, Outbox, OutboxConfig, OutboxRow, Recorded, Resolution, Run, Store,
    StoreOptions, SweepOptions, Sweeper, SweeperConfig, Worker, WorkerConfig, connect,
};
use headwater_queue::{Queue, QueueConfig};
use headwater_stream::clock::TestClock;
use headwater_stream::{Backend, LeaseRenewerConfig};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

/// Timeout that is long enough for a slow machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// URLs of the database and the streams of a system, and its clock.
pub(crate) struct Backends {
    pub(crate) database: String,
    pub(crate) streams: String,
    pub(crate) clock: Option<TestClock>,
    _keep: Vec<Box<dyn std::any::Any + Send + Sync>>,
}

impl Backends {
    /// In memory, with a clock that the test moves.
    pub(crate) fn in_memory_with_test_clock() -> Self {
        Self {
            database: "sqlite::memory:".into(),
            streams: "embedded:memory".into(),
            clock: Some(TestClock::default()),
            _keep: Vec::new(),
        }
    }

    /// In memory, with the system clock.
    pub(crate) fn in_memory() -> Self {
        Self { clock: None, ..Self::in_memory_with_test_clock() }
    }

    /// In a directory, for processes that crash.
    pub(crate) fn directory() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().display();
        Ok(Self {
            database: format!("sqlite:{path}/issues.db"),
            streams: format!("embedded:{path}/streams"),
            clock: None,
            _keep: vec![Box::new(directory)],
        })
    }

    /// PostgreSQL and Redis.
    pub(crate) fn servers() -> Result<Self> {
        let postgres = headwater_testkit::Postgres::shared()?.database()?;
        let redis = headwater_testkit::Redis::start()?;
        Ok(Self {
            database: postgres.url(),
            streams: redis.url(),
            clock: None,
            _keep: vec![Box::new(postgres), Box::new(redis)],
        })
    }

    /// The same backends, with another process clock.
    pub(crate) fn with_clock(&self, clock: TestClock) -> Self {
        Self { clock: Some(clock), ..Self::named(&self.database, &self.streams) }
    }

    /// Makes all claims expire, by the clock of the database.
    pub(crate) async fn expire_claims(&self, ttl: Duration) -> Result<()> {
        if let Some(clock) = &self.clock {
            clock.advance(ttl);
            return Ok(());
        }
        use sqlx::Connection as _;
        let mut postgres = sqlx::PgConnection::connect(&self.database).await?;
        let now = "UPDATE issues SET claim_expires_at = now() WHERE claim_expires_at > now()";
        sqlx::query(now).execute(&mut postgres).await?;
        Ok(())
    }

    /// Existing backends.
    pub(crate) fn named(database: &str, streams: &str) -> Self {
        let (database, streams) = (database.to_owned(), streams.to_owned());
        Self { database, streams, clock: None, _keep: Vec::new() }
    }

    pub(crate) async fn store(&self) -> Result<Arc<dyn Store>> {
        // Large calls may be slow on a busy machine.
        let mut options =
            StoreOptions { call_deadline: Duration::from_secs(60), ..StoreOptions::default() };
        if let Some(clock) = &self.clock {
            options.clock = Arc::new(clock.clone());
        }
        let store = connect(&self.database, &options).await?;
        store.ensure_integration("main", "gitlab").await?;
        Ok(store)
    }

    pub(crate) async fn streams(&self) -> Result<Arc<dyn Backend>> {
        Ok(headwater_stream::connect(&self.streams, &headwater_stream::Options::default()).await?)
    }
}

/// Store, streams and inbox, and what is needed to start workers and deliverers.
pub(crate) struct System {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) streams: Arc<dyn Backend>,
    pub(crate) queue: Queue,
    pub(crate) nudger: Nudger,
    pub(crate) inbox: Inbox,
}

impl System {
    pub(crate) async fn at(backends: &Backends) -> Result<Self> {
        Self::with(backends, InboxConfig::default()).await
    }

    pub(crate) async fn with(backends: &Backends, config: InboxConfig) -> Result<Self> {
        let streams = backends.streams().await?;
        Self::on(backends.store().await?, streams, config)
    }

    pub(crate) fn on(
        store: Arc<dyn Store>,
        streams: Arc<dyn Backend>,
        config: InboxConfig,
    ) -> Result<Self> {
        let nudger = Nudger::with_observer(Arc::clone(&streams), Arc::clone(&config.step_observer));
        let inbox = Inbox::new(Arc::clone(&store), nudger.clone(), config)?;
        // Short leases, so that entries of a dead process are redelivered soon.
        let lease = LeaseRenewerConfig {
            ttl: Duration::from_secs(2),
            renew_every: Duration::from_millis(400),
            safety_margin: Duration::from_millis(200),
        };
        let config = QueueConfig { lease, ..QueueConfig::default() };
        let queue = Queue::with_config(Arc::clone(&streams), config)?;
        Ok(Self { queue, store, streams, nudger, inbox })
    }

    pub(crate) async fn record(&self, issue: &str, event: &str) -> Result<Recorded> {
        Ok(self.inbox.record(event_of(issue, event)).await?)
    }

    pub(crate) fn worker(
        &self,
        handler: impl IssueHandler,
        config: WorkerConfig,
    ) -> Result<Worker> {
        Ok(Worker::new(Arc::clone(&self.store), self.nudger.clone(), handler, config)?)
    }

    /// Starts a worker that runs until it is stopped.
    pub(crate) fn start(
        &self,
        handler: impl IssueHandler,
        config: WorkerConfig,
    ) -> Result<RunningWorker> {
        let worker = self.worker(handler, config)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let (running, queue) = (worker.clone(), self.queue.clone());
        let task = tokio::spawn(async move {
            running.run(&queue, async { drop(stopped.await) }).await;
        });
        Ok(RunningWorker { worker, stop, task })
    }

    /// A sweeper for which every queued issue is overdue at once.
    pub(crate) fn sweeper(&self, worker: Option<&Worker>) -> Result<Sweeper> {
        let nudge_overdue = headwater_issue::limits::NUDGE_OVERDUE_MIN;
        let options = SweepOptions { nudge_overdue, ..SweepOptions::default() };
        let config = SweeperConfig { every: Duration::from_millis(50), options };
        Ok(Sweeper::new(Arc::clone(&self.store), self.nudger.clone(), worker.cloned(), config)?)
    }

    pub(crate) fn outbox(&self, deliver: impl Deliver, config: OutboxConfig) -> Result<Outbox> {
        Ok(Outbox::new(Arc::clone(&self.store), deliver, config)?)
    }

    /// Waits until no event is pending.
    pub(crate) async fn wait_processed(&self) -> Result<()> {
        wait_until("all events to be processed", || async {
            let report = self.store.check_consistency(10).await.expect("the store replies");
            report.pending == 0
        })
        .await
    }

    pub(crate) async fn assert_consistent(&self) -> Result<headwater_issue::ConsistencyReport> {
        let report = headwater_issue::check_consistency(self.store.as_ref()).await?;
        assert!(report.is_consistent(), "{report}");
        Ok(report)
    }
}

/// A running worker.
pub(crate) struct RunningWorker {
    pub(crate) worker: Worker,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl RunningWorker {
    pub(crate) async fn stop(self) -> Result<()> {
        let _ = self.stop.send(());
        tokio::time::timeout(LONG, self.task).await.context("the worker did not stop")??;
        Ok(())
    }

    /// Like a crash of the process: nothing is finished or released.
    pub(crate) async fn abort(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

pub(crate) fn event_of(issue: &str, event: &str) -> NewEvent {
    NewEvent {
        integration: "main".into(),
        external_project_id: "7".into(),
        external_issue_id: issue.into(),
        source: "gitlab".into(),
        event_type: "note".into(),
        dedup_key: Some(format!("{issue}/{event}")),
        trace: None,
        payload: format!(r#"{{"text":"{event}"}}"#),
    }
}

/// Records the events of each run.
#[derive(Clone, Default)]
pub(crate) struct RunLog(Arc<Mutex<Vec<Vec<String>>>>);

impl RunLog {
    /// A handler that records the events of each run and replies to each event.
    pub(crate) fn handler(&self) -> impl IssueHandler + use<> {
        let run_log = self.clone();
        move |run: Run| {
            let run_log = run_log.clone();
            async move {
                run_log.record(&run);
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    }

    pub(crate) fn record(&self, run: &Run) {
        self.0.lock().expect("not poisoned").push(texts(run));
    }

    /// The events of each run, in order.
    pub(crate) fn runs(&self) -> Vec<Vec<String>> {
        self.0.lock().expect("not poisoned").clone()
    }
}

/// The keys of the events of a run, without the issue.
pub(crate) fn texts(run: &Run) -> Vec<String> {
    let text = |key: &str| key.split_once('/').map_or(key, |(_, event)| event).to_owned();
    run.events().iter().map(|event| text(&event.dedup_key)).collect()
}

/// One reply per event, with its id.
pub(crate) fn replies(run: &Run) -> Resolution {
    run.events().iter().fold(Resolution::new(), |resolution, event| {
        resolution.reply(format!(r#"{{"event":{}}}"#, event.id))
    })
}

/// Records deliveries: the idempotency keys of each reply.
#[derive(Clone, Default)]
pub(crate) struct DeliveryLog(Arc<Mutex<BTreeMap<String, Vec<String>>>>);

#[async_trait]
impl Deliver for DeliveryLog {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self.add(&row.payload, &row.idempotency_key);
        Ok(())
    }
}

impl DeliveryLog {
    pub(crate) fn add(&self, payload: &str, key: &str) {
        // Stores may change whitespace in JSON.
        let payload = payload.replace(' ', "");
        self.0.lock().expect("not poisoned").entry(payload).or_default().push(key.to_owned());
    }

    pub(crate) fn deliveries(&self) -> usize {
        self.0.lock().expect("not poisoned").values().map(Vec::len).sum()
    }

    /// Asserts that every event has one reply with one idempotency key, however often delivered, and that keys are
    /// unique.
    pub(crate) fn assert_one_reply_each(&self, events: impl IntoIterator<Item = EventLogId>) {
        let deliveries = self.0.lock().expect("not poisoned");
        let expected: BTreeSet<String> =
            events.into_iter().map(|id| format!(r#"{{"event":{id}}}"#)).collect();
        let seen: BTreeSet<String> = deliveries.keys().cloned().collect();
        assert_eq!(seen, expected, "replies and events");
        let mut all_keys = BTreeSet::new();
        for (reply, keys) in deliveries.iter() {
            let keys: BTreeSet<&String> = keys.iter().collect();
            assert_eq!(keys.len(), 1, "{reply} came with {keys:?}");
            for key in keys {
                assert!(all_keys.insert(key.clone()), "{key} was used for two replies");
            }
        }
    }
}

/// A gate at which handlers wait, and which counts their arrivals.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<GateState>);

#[derive(Default)]
struct GateState {
    arrived: AtomicUsize,
    arrival: Notify,
    opened: Notify,
}

impl Gate {
    /// Counts an arrival and waits until the gate is opened.
    pub(crate) async fn wait(&self) {
        let opened = self.0.opened.notified();
        self.arrive();
        opened.await;
    }

    /// Counts an arrival without waiting.
    pub(crate) fn arrive(&self) {
        self.0.arrived.fetch_add(1, Ordering::SeqCst);
        self.0.arrival.notify_one();
    }

    /// Waits for this total number of arrivals.
    pub(crate) async fn wait_for_arrivals(&self, count: usize) -> Result<()> {
        let waiting = async {
            while self.0.arrived.load(Ordering::SeqCst) < count {
                self.0.arrival.notified().await;
            }
        };
        tokio::time::timeout(LONG, waiting).await.context("no arrival at the gate")
    }

    /// The number of arrivals so far.
    pub(crate) fn arrivals(&self) -> usize {
        self.0.arrived.load(Ordering::SeqCst)
    }

    /// Opens the gate for all waiting handlers.
    pub(crate) fn open_all(&self) {
        self.0.opened.notify_waiters();
    }

    /// Opens the gate for one handler, waiting or next to arrive.
    pub(crate) fn open(&self) {
        self.0.opened.notify_one();
    }
}

/// Polls the condition until it holds.
pub(crate) async fn wait_until<Asking: Future<Output = bool>>(
    what: &str,
    condition: impl Fn() -> Asking,
) -> Result<()> {
    let asking = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, asking)
        .await
        .with_context(|| format!("timed out waiting for {what}"))
}

/// All event logs of an issue.
pub(crate) async fn event_ids(store: &dyn Store, issue_id: IssueId) -> Result<Vec<EventLogId>> {
    let logs =
        store.event_logs(issue_id, &headwater_issue::EventLogFilter::default(), 1000).await?;
    Ok(logs.into_iter().map(|log| log.id).collect())
}
