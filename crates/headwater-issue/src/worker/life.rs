//! The life of a worker: it starts, shows that it lives, keeps its claims, works through its agenda, and stops in good
//! order.
//!
//! Upstream: whoever runs the process. Promises: everything it starts ends before `run` returns, or with it if it is
//! dropped; a stop lets handlers finish, then cancels them and gives their issues back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_queue::Queue;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tracing::{info, warn};

use super::{Inner, Worker, WorkerConfig};
use crate::agenda::Agenda;
use crate::batcher::Batcher;
use crate::error::Result;
use crate::handler::IssueHandler;
use crate::held::Claims;
use crate::issue::IssueId;
use crate::nudge::Nudger;
use crate::store::Store;

/// How long a worker counts as alive after it last showed itself, and how often it does.
const ALIVE_TTL: Duration = Duration::from_secs(15);
const ALIVE_EVERY: Duration = Duration::from_secs(5);

/// How long cancelled runs may take to give their issues back.
const GIVE_BACK_MAX: Duration = Duration::from_secs(5);

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("name", &self.inner.config.name).finish_non_exhaustive()
    }
}

impl Worker {
    /// A worker on a store. It does nothing until it runs.
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
            claims: Claims::new(Arc::clone(&store), config.claim_ttl),
            agenda: Agenda::default(),
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

    /// How this worker is called.
    pub fn name(&self) -> &str {
        &self.inner.config.name
    }

    /// Hands issues to this worker directly, without a nudge. Returns how many it had room for.
    pub fn offer(&self, issues: impl IntoIterator<Item = IssueId>) -> usize {
        let now = Instant::now();
        issues.into_iter().filter(|issue_id| self.inner.agenda.add(*issue_id, now)).count()
    }

    /// How many issues are in hand.
    pub fn in_hand(&self) -> usize {
        self.inner.claims.len()
    }

    /// How many more issues could be handled at once.
    pub(crate) fn idle(&self) -> usize {
        self.inner.slots.available_permits()
    }

    /// Works until `shutdown` completes, then stops in good order.
    ///
    /// # Panics
    ///
    /// At once, if it was called before: a worker runs once, since its name is never used twice. Make a new one.
    pub async fn run(&self, queue: &Queue, shutdown: impl Future<Output = ()>) {
        let has_run = self.inner.has_run.swap(true, Ordering::SeqCst);
        assert!(
            !has_run,
            "worker {} was run before; a worker runs once, make a new one",
            self.name()
        );
        info!(worker_id = self.name(), "worker started");
        // Each on a task of its own: a handler that holds its thread must not cost other issues their claims.
        let mut upkeep = JoinSet::new();
        upkeep.spawn(keep_claims(Arc::clone(&self.inner)));
        upkeep.spawn(show_life(Arc::clone(&self.inner)));

        let (draining, drain) = watch::channel(false);
        let working =
            async { tokio::join!(self.work_agenda(drain.clone()), self.work_queue(queue, drain)) };
        let stopping = async {
            shutdown.await;
            info!(worker_id = self.name(), in_hand = self.in_hand(), "worker stopping");
            draining.send_replace(true);
            sleep(self.inner.config.drain).await;
            self.inner.stop.send_replace(true);
            sleep(GIVE_BACK_MAX).await;
        };
        tokio::select! {
            _ = working => {}
            () = stopping => warn!(worker_id = self.name(), "runs did not end, their claims will run out"),
        }
        self.inner.stop.send_replace(true);
        upkeep.shutdown().await;
        let gone = self.inner.store.beat_worker(self.name(), Duration::ZERO);
        if !matches!(timeout(GIVE_BACK_MAX, gone).await, Ok(Ok(()))) {
            warn!(worker_id = self.name(), "worker counts as alive for a little longer");
        }
        info!(worker_id = self.name(), "worker stopped");
    }

    /// Works through the agenda until the drain begins, and returns when what it has begun has ended.
    async fn work_agenda(&self, mut drain: watch::Receiver<bool>) {
        let mut runs = JoinSet::new();
        loop {
            let has_room = runs.len() < self.inner.config.concurrency;
            tokio::select! {
                _ = drain.wait_for(|drain| *drain) => break,
                Some(_) = runs.join_next() => {}
                issue_id = self.inner.agenda.next(), if has_room => {
                    let worker = self.clone();
                    runs.spawn(async move { worker.look_at(issue_id).await });
                }
            }
        }
        while runs.join_next().await.is_some() {}
    }
}

/// Renews claims as long as it is not aborted.
async fn keep_claims(inner: Arc<Inner>) {
    let mut ticks = interval(inner.config.beat_every());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = inner.claims.run_once().await {
            warn!(%error, "claims were not renewed, trying again");
        }
        if let Err(error) = inner.release_lapsed().await {
            warn!(%error, "claims were not released, trying again");
        }
    }
}

/// Shows that the worker lives as long as it is not aborted.
async fn show_life(inner: Arc<Inner>) {
    let mut ticks = interval(ALIVE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = inner.store.beat_worker(&inner.config.name, ALIVE_TTL).await {
            warn!(%error, "worker could not show that it lives, trying again");
        }
    }
}
