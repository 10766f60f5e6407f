//! The outbox: delivers the replies and events that runs have committed.
//!
//! Upstream: `worker` commits rows with the end of a run. Downstream: [`Deliver`], which knows providers and the bus.
//! Promises: at least once, with the same idempotency key at every try; of one issue in order, a later row waits for an
//! earlier one; after too many failures a row is dead and kept for an operator, and later rows go on. Rows are found by
//! their status, never by a position, so none is passed by.
//! Not here: what a reply looks like to a provider.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_stream::Coalescer;
use metrics::counter;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, error, warn};

use crate::batcher;
use crate::chance;
use crate::delivery::{Delivery, OutboxRow, OutboxSettled, OutboxSettlement};
use crate::error::{IssueError, Result};
use crate::limits::{DELIVERIES_AT_ONCE_MAX, OUTBOX_DELIVERIES_MAX, OUTBOX_TAKE_MAX};
use crate::metrics::OUTBOX_DELIVERIES;
use crate::retry::RetryPolicy;
use crate::steps::{NoSteps, Step, Steps};
use crate::store::Store;
use crate::worker::unique_name;

/// How long to wait before a database that did not answer is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Delivers one row. It may come twice, with the same idempotency key: hand the key on, or remember it.
///
/// Any `Fn(OutboxRow) -> impl Future<Output = Result<(), DeliverError>>` is one.
#[async_trait]
pub trait Deliver: Send + Sync + 'static {
    /// Delivers. A panic and a time-out count as failures that may pass.
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError>;
}

#[async_trait]
impl<F, Delivering> Deliver for F
where
    F: Fn(OutboxRow) -> Delivering + Send + Sync + 'static,
    Delivering: Future<Output = Result<(), DeliverError>> + Send,
{
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self(row.clone()).await
    }
}

/// Why a delivery failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeliverError {
    /// It may succeed later: try again.
    #[error("{0}")]
    Retry(String),
    /// It can never succeed: the row is dead now.
    #[error("{0}")]
    Dead(String),
}

/// Settings of the outbox.
#[derive(Clone, Debug)]
pub struct OutboxConfig {
    /// How this deliverer is called, unique per start. Default: like a worker.
    pub name: String,
    /// Deliveries under way at once, each of another issue. Default: 32.
    pub concurrency: usize,
    /// How long one delivery may take. Default: 30 s.
    pub deadline: Duration,
    /// How long a row in hand is hidden from others. Default: 60 s; longer than `deadline`.
    pub ttl: Duration,
    /// How often to look for rows, besides when one is announced. Default: 1 s.
    pub every: Duration,
    /// When and how often a failed delivery is tried again.
    pub retry: RetryPolicy,
    /// Is told of every step. Default: nobody.
    pub steps: Arc<dyn Steps>,
}

impl Default for OutboxConfig {
    fn default() -> Self {
        Self {
            name: unique_name(),
            concurrency: 32,
            deadline: Duration::from_secs(30),
            ttl: Duration::from_secs(60),
            every: Duration::from_secs(1),
            retry: RetryPolicy::default(),
            steps: Arc::new(NoSteps),
        }
    }
}

impl OutboxConfig {
    fn validate(&self) -> Result<()> {
        self.retry.validate()?;
        if !(1..=DELIVERIES_AT_ONCE_MAX).contains(&self.concurrency) {
            let problem = format!("{}; 1 to {DELIVERIES_AT_ONCE_MAX}", self.concurrency);
            return Err(IssueError::invalid("concurrency", problem));
        }
        if self.deadline.is_zero() || self.deadline >= self.ttl {
            let problem = format!("{:?} is not shorter than ttl {:?}", self.deadline, self.ttl);
            return Err(IssueError::invalid("deadline", problem));
        }
        if self.every.is_zero() {
            return Err(IssueError::invalid("every", "it is zero"));
        }
        Ok(())
    }
}

/// Delivers the outbox of a store. Any number of processes may do so at once.
#[derive(Clone)]
pub struct Outbox {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn Store>,
    deliver: Arc<dyn Deliver>,
    settlements: Coalescer<OutboxSettlement, Result<OutboxSettled>>,
    config: OutboxConfig,
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").field("name", &self.inner.config.name).finish_non_exhaustive()
    }
}

impl Outbox {
    /// The outbox of a store.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(store: Arc<dyn Store>, deliver: impl Deliver, config: OutboxConfig) -> Result<Self> {
        config.validate()?;
        let settlements = batcher::settlements(&store)?;
        let inner = Inner { store, deliver: Arc::new(deliver), settlements, config };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Delivers everything that is due now, rows that become due by it included. Returns how many rows were settled.
    pub async fn run_once(&self) -> Result<usize> {
        let (mut under_way, mut settled) = (JoinSet::new(), 0);
        loop {
            self.begin(&mut under_way).await?;
            match ended(&mut under_way).await {
                0 => return Ok(settled),
                count => settled += count,
            }
        }
    }

    /// Delivers until `shutdown` completes, and returns when the deliveries under way have ended.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let mut under_way = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            if let Err(error) = self.begin(&mut under_way).await {
                warn!(%error, "the outbox was not read, trying again");
            }
            let has_room = under_way.len() < self.inner.config.concurrency;
            tokio::select! {
                () = &mut shutdown => break,
                // A row that is settled makes room, and lets the next one of its issue go.
                1.. = ended(&mut under_way) => {}
                // Cancel-safe: an announcement that is missed here ends the next wait.
                () = self.inner.store.outbox_wake(self.inner.config.every), if has_room => {}
            }
        }
        while ended(&mut under_way).await > 0 {}
    }

    /// Takes as many rows as there is room for, and begins to deliver them, each on a task of its own: one that waits
    /// for the database must not hold it up for the others.
    async fn begin(&self, under_way: &mut JoinSet<()>) -> Result<()> {
        for row in self.inner.take(under_way.len()).await? {
            let inner = Arc::clone(&self.inner);
            under_way.spawn(async move { inner.handle(row).await });
        }
        Ok(())
    }
}

/// Waits for a delivery to end, and counts those that have ended with it: one look at the database serves them all.
/// Cancel-safe.
async fn ended(under_way: &mut JoinSet<()>) -> usize {
    if under_way.join_next().await.is_none() {
        return 0;
    }
    let more = std::iter::from_fn(|| under_way.try_join_next()).count();
    1 + more
}

impl Inner {
    async fn take(&self, under_way: usize) -> Result<Vec<OutboxRow>> {
        let room =
            (self.config.concurrency - under_way.min(self.config.concurrency)).min(OUTBOX_TAKE_MAX);
        if room == 0 {
            return Ok(Vec::new());
        }
        let rows = self.store.take_outbox(&self.config.name, room, self.config.ttl).await?;
        rows.iter().for_each(|row| self.config.steps.taken(Step::Taken, row.issue_id));
        Ok(rows)
    }

    /// Delivers a row, then tells the store.
    async fn handle(&self, row: OutboxRow) {
        let delivery = match self.died_too_often(&row) {
            Some(error) => Delivery::Dead { error },
            None => self.deliver(&row).await,
        };
        self.config.steps.taken(Step::Delivered, row.issue_id);
        self.settle(&row, delivery).await;
        self.config.steps.taken(Step::Settled, row.issue_id);
    }

    async fn deliver(&self, row: &OutboxRow) -> Delivery {
        // A deliverer that panicked may have left something of its own in disorder; we share nothing with it.
        let delivering = std::panic::AssertUnwindSafe(self.deliver.deliver(row)).catch_unwind();
        let error = match timeout(self.config.deadline, delivering).await {
            Ok(Ok(Ok(()))) => return Delivery::Delivered,
            Ok(Ok(Err(DeliverError::Dead(error)))) => return Delivery::Dead { error },
            Ok(Ok(Err(DeliverError::Retry(error)))) => error,
            Ok(Err(_)) => "the deliverer panicked".to_owned(),
            Err(_) => format!("it took longer than {:?}", self.config.deadline),
        };
        let attempt = row.attempts + 1;
        if attempt >= self.config.retry.attempts_max {
            return Delivery::Dead { error };
        }
        Delivery::Retry { after: self.config.retry.delay(attempt, chance::part()), error }
    }

    /// A row that is taken again and again without an end kills those who deliver it.
    fn died_too_often(&self, row: &OutboxRow) -> Option<String> {
        let too_often = row.deliveries > OUTBOX_DELIVERIES_MAX;
        too_often.then(|| format!("it was taken {OUTBOX_DELIVERIES_MAX} times and never arrived"))
    }

    /// Tells the store, again and again if it does not answer: the row is hidden from others meanwhile.
    async fn settle(&self, row: &OutboxRow, delivery: Delivery) {
        let result = match &delivery {
            Delivery::Delivered => "delivered",
            Delivery::Retry { error, .. } => {
                warn!(issue_id = %row.issue_id, attempt = row.attempts + 1, %error, "delivery failed, trying again");
                "retry"
            }
            Delivery::Dead { error } => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, %error, "delivery is dead, retry it when it is mended");
                "dead"
            }
            Delivery::Release => "released",
        };
        let settlement = OutboxSettlement { id: row.id, deliveries: row.deliveries, delivery };
        let settling = async {
            loop {
                let call = self.settlements.call(settlement.clone()).await;
                match call.unwrap_or_else(batcher::without_answer) {
                    Err(error) if error.is_transient() => {
                        warn!(issue_id = %row.issue_id, %error, "delivery was not settled, trying again");
                        sleep(ASK_AGAIN_AFTER).await;
                    }
                    answer => return answer,
                }
            }
        };
        let result = match timeout(self.config.ttl, settling).await {
            Ok(Ok(OutboxSettled::Done)) => result,
            Ok(Ok(OutboxSettled::Fenced)) => "fenced",
            Ok(Err(_)) | Err(_) => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, "delivery was not settled, it will come again");
                "unsettled"
            }
        };
        debug!(issue_id = %row.issue_id, outbox_id = %row.id, result, "delivery ended");
        counter!(OUTBOX_DELIVERIES, "kind" => row.kind.as_str(), "result" => result).increment(1);
    }
}
