//! Lifecycle of a worker: start, consume nudges, heartbeat, renew claims, drain and stop.
//!
//! Upstream: the process that owns the worker. Downstream: `headwater-queue`, which delivers the entries of
//! `issue_work`, redelivers those of dead consumers, and acknowledges an entry after the worker has processed the
//! issue. Guarantees: every task started by `run` ends before `run` returns, or when its future is dropped. A shutdown
//! lets handlers finish within the drain time, then cancels them and releases their claims. While the queue is
//! unavailable, the worker retries to subscribe and processes its local queue.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Mode, Queue, Subscription};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tracing::{info, warn};

use super::{Inner, Worker, WorkerConfig};
use crate::batcher::Batcher;
use crate::claim_registry::ClaimRegistry;
use crate::error::Result;
use crate::handler::IssueHandler;
use crate::issue::IssueId;
use crate::local_queue::DueQueue;
use crate::nudge::{GROUP, Nudger, STREAM};
use crate::store::Store;

/// How long a worker counts as alive after its last heartbeat.
const HEARTBEAT_TTL: Duration = Duration::from_secs(15);
/// Interval of worker heartbeats.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(5);

/// How long cancelled runs may take to release their claims.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before a failed subscription is retried.
const SUBSCRIBE_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Added to the worker's own drain time, for the queue to acknowledge finished entries.
const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(10);

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("name", &self.inner.config.name).finish_non_exhaustive()
    }
}

impl Worker {
    /// Creates a worker. It does nothing until [`run`](Self::run) is called.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(
        store: Arc<dyn Store>,
        nudger: Nudger,
        handler: impl IssueHandler,
        config: WorkerConfig,
    ) -> Result<Self> {
        config.validate()?;
        let inner = Inner {
            batcher: Batcher::new(&store, config.claim_options(), config.calls_max)?,
            claims: ClaimRegistry::new(Arc::clone(&store), config.claim_ttl),
            local_queue: DueQueue::default(),
            lapsed: Mutex::default(),
            slots: Semaphore::new(config.concurrency),
            has_run: AtomicBool::new(false),
            stop: watch::Sender::new(false),
            handler: Arc::new(handler),
            store,
            nudger,
            config,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The name of this worker.
    pub fn name(&self) -> &str {
        &self.inner.config.name
    }

    /// Adds issues to the local queue of this worker, without a nudge. Returns how many were accepted.
    pub fn offer(&self, issues: impl IntoIterator<Item = IssueId>) -> usize {
        let now = Instant::now();
        issues.into_iter().filter(|issue_id| self.inner.local_queue.add(*issue_id, now)).count()
    }

    /// Number of issues in flight.
    pub fn in_flight(&self) -> usize {
        self.inner.claims.len()
    }

    /// Number of runs that could be started now.
    pub(crate) fn free_slots(&self) -> usize {
        self.inner.slots.available_permits()
    }

    /// Processes issues until `shutdown` completes, then drains.
    ///
    /// # Panics
    ///
    /// If it was called before: a worker runs once, because its name must not be reused. Create a new one.
    pub async fn run(&self, queue: &Queue, shutdown: impl Future<Output = ()>) {
        let has_run = self.inner.has_run.swap(true, Ordering::SeqCst);
        assert!(
            !has_run,
            "worker `{}` was already run; a worker runs once, create a new one",
            self.name()
        );
        info!(worker_id = self.name(), "worker started");
        // On tasks of their own: a handler that blocks its thread must not delay the renewal of other claims.
        let mut maintenance = JoinSet::new();
        maintenance.spawn(renew_claims(Arc::clone(&self.inner)));
        maintenance.spawn(heartbeat_worker(Arc::clone(&self.inner)));

        let (draining, drain) = watch::channel(false);
        let working = async {
            tokio::join!(self.run_local_queue(drain.clone()), self.consume_nudges(queue, drain))
        };
        let stopping = async {
            shutdown.await;
            info!(worker_id = self.name(), in_flight = self.in_flight(), "worker stopping");
            draining.send_replace(true);
            sleep(self.inner.config.drain).await;
            self.inner.stop.send_replace(true);
            sleep(RELEASE_TIMEOUT).await;
        };
        tokio::select! {
            _ = working => {}
            () = stopping => warn!(worker_id = self.name(), "runs did not end in time, their claims will expire"),
        }
        self.inner.stop.send_replace(true);
        maintenance.shutdown().await;
        let deregister = self.inner.store.heartbeat_worker(self.name(), Duration::ZERO);
        if !matches!(timeout(RELEASE_TIMEOUT, deregister).await, Ok(Ok(()))) {
            warn!(
                worker_id = self.name(),
                "worker not deregistered, it counts as alive until its heartbeat expires"
            );
        }
        info!(worker_id = self.name(), "worker stopped");
    }

    /// Processes the local queue until the drain begins, and returns when the runs it started have ended.
    async fn run_local_queue(&self, mut drain: watch::Receiver<bool>) {
        let mut runs = JoinSet::new();
        loop {
            let has_capacity = runs.len() < self.inner.config.concurrency;
            tokio::select! {
                _ = drain.wait_for(|drain| *drain) => break,
                Some(_) = runs.join_next() => {}
                issue_id = self.inner.local_queue.next(), if has_capacity => {
                    let worker = self.clone();
                    runs.spawn(async move { worker.process_issue(issue_id).await });
                }
            }
        }
        while runs.join_next().await.is_some() {}
    }

    /// Consumes nudges until the drain begins, and returns when those in flight are acknowledged or released.
    async fn consume_nudges(&self, queue: &Queue, mut drain: watch::Receiver<bool>) {
        let Some(subscription) = self.subscribe(queue, &mut drain).await else { return };
        let _ = drain.wait_for(|drain| *drain).await;
        subscription.stop().await;
    }

    /// Subscribes; `None` if the drain begins first. An attempt is never dropped halfway: a half-joined member must
    /// leave the group before another worker of this process joins.
    async fn subscribe(
        &self,
        queue: &Queue,
        drain: &mut watch::Receiver<bool>,
    ) -> Option<Subscription> {
        while !*drain.borrow_and_update() {
            match queue.subscribe(STREAM, GROUP, self.clone(), self.consumer_config()).await {
                Ok(subscription) => return Some(subscription),
                Err(error) => {
                    warn!(%error, "subscription to nudges failed, retrying");
                    let wait = drain.wait_for(|drain| *drain);
                    let _ = timeout(SUBSCRIBE_RETRY_DELAY, wait).await;
                }
            }
        }
        None
    }

    fn consumer_config(&self) -> ConsumerConfig {
        let concurrency = self.inner.config.concurrency;
        ConsumerConfig {
            mode: Mode::Shared,
            concurrency,
            // No prefetch: a nudge that waits here could be handled by another process.
            in_flight_max: concurrency,
            batch: concurrency.min(256),
            // Longer than the worker's own drain, so that cancelled runs can release their claims.
            drain: self.inner.config.drain + ACKNOWLEDGE_TIMEOUT,
            ..ConsumerConfig::default()
        }
    }
}

/// Renews claims and releases lapsed ones, until it is aborted.
async fn renew_claims(inner: Arc<Inner>) {
    let mut ticks = interval(inner.config.renew_every());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = inner.claims.renew_all().await {
            warn!(%error, "claims were not renewed, retrying");
        }
        if let Err(error) = inner.release_lapsed().await {
            warn!(%error, "lapsed claims were not released, retrying");
        }
    }
}

/// Sends worker heartbeats until it is aborted.
async fn heartbeat_worker(inner: Arc<Inner>) {
    let mut ticks = interval(HEARTBEAT_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = inner.store.heartbeat_worker(&inner.config.name, HEARTBEAT_TTL).await {
            warn!(%error, "worker heartbeat failed, retrying");
        }
    }
}
