//! What the tests of this crate share: places to keep things, a whole system in one value, a handler and a deliverer that
//! remember what they did.

#![allow(dead_code, reason = "each test binary uses a part of it")]

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
use headwater_stream::{Backend, KeeperConfig};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

/// Long enough for anything on a slow machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Where a system keeps what it knows.
pub(crate) struct Backends {
    pub(crate) database: String,
    pub(crate) streams: String,
    pub(crate) clock: Option<TestClock>,
    _keep: Vec<Box<dyn std::any::Any + Send + Sync>>,
}

impl Backends {
    /// In this process, gone with it; time is moved by the test.
    pub(crate) fn memory() -> Self {
        Self {
            database: "sqlite::memory:".into(),
            streams: "embedded:memory".into(),
            clock: Some(TestClock::default()),
            _keep: Vec::new(),
        }
    }

    /// In this process, in real time.
    pub(crate) fn now() -> Self {
        Self { clock: None, ..Self::memory() }
    }

    /// In a directory, for processes that die.
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

    /// On servers.
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

    /// On servers, from a process whose own clock shows this.
    pub(crate) fn with_clock(&self, clock: TestClock) -> Self {
        Self { clock: Some(clock), ..Self::named(&self.database, &self.streams) }
    }

    /// Makes all claims run out, by the clock of the database.
    pub(crate) async fn let_claims_run_out(&self, ttl: Duration) -> Result<()> {
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

    /// Where somebody else has told us.
    pub(crate) fn named(database: &str, streams: &str) -> Self {
        let (database, streams) = (database.to_owned(), streams.to_owned());
        Self { database, streams, clock: None, _keep: Vec::new() }
    }

    pub(crate) async fn store(&self) -> Result<Arc<dyn Store>> {
        // A busy machine may be slow, above all with calls of many bytes.
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

/// Store, stream and inbox, and what is needed to start the rest.
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
        // Short leases, so that what a dead process had in hand is taken over soon.
        let lease = KeeperConfig {
            ttl: Duration::from_secs(2),
            renew_every: Duration::from_millis(400),
            margin: Duration::from_millis(200),
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

    /// A worker that runs until it is stopped.
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

    /// A sweeper to which every queued issue is overdue at once.
    pub(crate) fn sweeper(&self, worker: Option<&Worker>) -> Result<Sweeper> {
        let nudge_overdue = headwater_issue::limits::NUDGE_OVERDUE_MIN;
        let options = SweepOptions { nudge_overdue, ..SweepOptions::default() };
        let config = SweeperConfig { every: Duration::from_millis(50), options };
        Ok(Sweeper::new(Arc::clone(&self.store), self.nudger.clone(), worker.cloned(), config)?)
    }

    pub(crate) fn outbox(&self, deliver: impl Deliver, config: OutboxConfig) -> Result<Outbox> {
        Ok(Outbox::new(Arc::clone(&self.store), deliver, config)?)
    }

    /// Waits until nothing is pending anywhere.
    pub(crate) async fn wait_processed(&self) -> Result<()> {
        wait_until("all events to be processed", || async {
            let report = self.store.check_consistency(10).await.expect("the store answers");
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

/// A worker that runs.
pub(crate) struct RunningWorker {
    pub(crate) worker: Worker,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl RunningWorker {
    pub(crate) async fn stop(self) -> Result<()> {
        let _ = self.stop.send(());
        tokio::time::timeout(LONG, self.task).await.context("the worker does not stop")??;
        Ok(())
    }

    /// As if the process had died: nothing is finished or given back.
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
        payload: format!(r#"{{"text":"{event}"}}"#),
    }
}

/// What was called, by whom, with what.
#[derive(Clone, Default)]
pub(crate) struct RunLog(Arc<Mutex<Vec<Vec<String>>>>);

impl RunLog {
    /// A handler that writes the events of each run down and replies to each event.
    pub(crate) fn handler(&self) -> impl IssueHandler + use<> {
        let run_log = self.clone();
        move |run: Run| {
            let run_log = run_log.clone();
            async move {
                run_log.write(&run);
                Ok::<_, HandlerError>(replies(&run))
            }
        }
    }

    pub(crate) fn write(&self, run: &Run) {
        self.0.lock().expect("not poisoned").push(texts(run));
    }

    /// The events of each run, in the order of runs.
    pub(crate) fn runs(&self) -> Vec<Vec<String>> {
        self.0.lock().expect("not poisoned").clone()
    }
}

/// The keys of the events of a run, without the issue.
pub(crate) fn texts(run: &Run) -> Vec<String> {
    let text = |key: &str| key.split_once('/').map_or(key, |(_, event)| event).to_owned();
    run.events().iter().map(|event| text(&event.dedup_key)).collect()
}

/// One reply for each event, which names it.
pub(crate) fn replies(run: &Run) -> Resolution {
    run.events().iter().fold(Resolution::new(), |resolution, event| {
        resolution.reply(format!(r#"{{"event":{}}}"#, event.id))
    })
}

/// Deliveries: for each reply the idempotency keys it came with, and how often.
#[derive(Clone, Default)]
pub(crate) struct DeliveryLog(Arc<Mutex<BTreeMap<String, Vec<String>>>>);

#[async_trait]
impl Deliver for DeliveryLog {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self.note(&row.payload, &row.idempotency_key);
        Ok(())
    }
}

impl DeliveryLog {
    pub(crate) fn note(&self, payload: &str, key: &str) {
        // Stores may change spaces in JSON.
        let payload = payload.replace(' ', "");
        self.0.lock().expect("not poisoned").entry(payload).or_default().push(key.to_owned());
    }

    pub(crate) fn deliveries(&self) -> usize {
        self.0.lock().expect("not poisoned").values().map(Vec::len).sum()
    }

    /// Every event has one reply, with one idempotency key however often it was delivered, and no key is used twice.
    pub(crate) fn assert_one_reply_each(&self, events: impl IntoIterator<Item = EventLogId>) {
        let letters = self.0.lock().expect("not poisoned");
        let expected: BTreeSet<String> =
            events.into_iter().map(|id| format!(r#"{{"event":{id}}}"#)).collect();
        let seen: BTreeSet<String> = letters.keys().cloned().collect();
        assert_eq!(seen, expected, "replies and events");
        let mut all_keys = BTreeSet::new();
        for (reply, keys) in letters.iter() {
            let keys: BTreeSet<&String> = keys.iter().collect();
            assert_eq!(keys.len(), 1, "{reply} came with {keys:?}");
            for key in keys {
                assert!(all_keys.insert(key.clone()), "{key} was used for two replies");
            }
        }
    }
}

/// A gate that a handler waits at, and a bell that it rings when it has come.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<GateState>);

#[derive(Default)]
struct GateState {
    arrived: AtomicUsize,
    bell: Notify,
    opened: Notify,
}

impl Gate {
    /// Rings and waits to be let through.
    pub(crate) async fn pass(&self) {
        let opened = self.0.opened.notified();
        self.arrive();
        opened.await;
    }

    /// Rings and goes on.
    pub(crate) fn arrive(&self) {
        self.0.arrived.fetch_add(1, Ordering::SeqCst);
        self.0.bell.notify_one();
    }

    /// Waits until so many have come in all.
    pub(crate) async fn arrivals(&self, count: usize) -> Result<()> {
        let waiting = async {
            while self.0.arrived.load(Ordering::SeqCst) < count {
                self.0.bell.notified().await;
            }
        };
        tokio::time::timeout(LONG, waiting).await.context("nobody came to the gate")
    }

    /// Lets everybody through who waits.
    pub(crate) fn open_all(&self) {
        self.0.opened.notify_waiters();
    }

    /// Lets one through: who waits, or who comes next.
    pub(crate) fn open(&self) {
        self.0.opened.notify_one();
    }
}

/// Asks again and again until it holds.
pub(crate) async fn wait_until<Asking: Future<Output = bool>>(
    what: &str,
    condition: impl Fn() -> Asking,
) -> Result<()> {
    let asking = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, asking).await.with_context(|| format!("waited in vain for {what}"))
}

/// All event logs of an issue.
pub(crate) async fn event_ids(store: &dyn Store, issue_id: IssueId) -> Result<Vec<EventLogId>> {
    let logs =
        store.event_logs(issue_id, &headwater_issue::EventLogFilter::default(), 1000).await?;
    Ok(logs.into_iter().map(|log| log.id).collect())
}
