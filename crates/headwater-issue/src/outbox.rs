//! The outbox: delivers the replies and events that runs have committed.
//!
//! Upstream: `worker` commits rows with the end of a run. Downstream: [`Deliver`], which implements the providers and
//! the bus. Guarantees: at-least-once delivery with one idempotency key per row. Replies of one issue are delivered in
//! order, and so are its events; replies do not wait for events, so they are delivered while the streams are
//! unavailable. After too many failures a row is dead and kept for an operator, and later rows continue; an unavailable
//! target counts no attempt. Each target has a share of the delivery slots (`slots`), so that a slow, failing or
//! pausing target does not delay the others. A process does not deliver a row that another process may have taken
//! meanwhile, even if it was stopped in the middle: nothing is sent after the deadline of a delivery, which is earlier
//! than the end of its TTL. A shutdown waits for the deliveries in flight for a limited time; an
//! unsettled delivery is repeated. Not here: the format of a reply at a provider, and whether a reply is stale; the
//! deliverer decides that (see `AdminStore::newest_event_log_at_commit`).

mod slots;
pub(crate) mod types;

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_stream::Coalescer;
use metrics::counter;
use tokio::sync::watch;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{sleep, timeout, timeout_at};
use tracing::{debug, error, warn};

use self::slots::{DeliverySlots, TargetResponse};
use crate::batcher;
use crate::config::OutboxConfig;
use crate::error::{IssueError, Result};
use crate::handler::panic_text;
use crate::limits::DELIVERY_PAUSE_MAX;
use crate::metrics::OUTBOX_DELIVERIES;
use crate::outbox::types::{
    DeliveryTarget, OutboxDelivery, OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake,
};
use crate::step_observer::ProcessingStep;
use crate::store::Store;

/// A taken row, and from when on other processes may take it.
type TakenRow = (OutboxRow, Instant);

/// Delay before a database call that failed is retried.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Deliveries of a row after which a pause requested by the receiver counts as an attempt, so that a row cannot be
/// paused forever.
const PAUSES_UNCOUNTED_MAX: u32 = 48;

/// Maximum delay before a delivery to an unavailable target is retried.
const UNAVAILABLE_DELAY_MAX: Duration = Duration::from_secs(10);

/// Pause of a target after [`DeliverError::Held`]. A row that is held again and again waits for up to ten times as long,
/// so that rows of the target that can be delivered come first.
pub const HOLD_PAUSE: Duration = Duration::from_secs(30);

/// How long cancelled deliveries may take to release their rows.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Delivers rows. A row may be delivered twice, with the same idempotency key: forward the key, or de-duplicate by it.
///
/// Any `Fn(OutboxRow) -> impl Future<Output = Result<(), DeliverError>>` implements it.
#[async_trait]
pub trait Deliver: Send + Sync + 'static {
    /// Delivers a row. A panic and a timeout count as [`DeliverError::Retry`].
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
    /// The delivery may succeed later: retry, and count an attempt.
    #[error("{0}")]
    Retry(String),
    /// The target is unavailable for every row: retry, and count no attempt.
    #[error("{0}")]
    Unavailable(String),
    /// The target requested a pause, for example with `Retry-After`: retry after it, count no attempt, and deliver
    /// nothing to this target before. At most [`DELIVERY_PAUSE_MAX`](crate::limits::DELIVERY_PAUSE_MAX).
    #[error("{problem}")]
    Paused {
        /// Error of the target.
        problem: String,
        /// Length of the pause.
        after: Duration,
    },
    /// The settings or credentials of the target are wrong, and an operator must fix them: deliver nothing to this
    /// target for [`HOLD_PAUSE`], then retry, and count no attempt, however often.
    #[error("{0}")]
    Held(String),
    /// The target denies access to what this row belongs to, and an operator must fix it: retry this row later, count no
    /// attempt, however often. Other rows of the target do not wait.
    #[error("{0}")]
    Denied(String),
    /// The delivery cannot succeed: the row is dead.
    #[error("{0}")]
    Dead(String),
}

/// Delivers the outbox of a store. Several processes can run one each. Clones share one deliverer.
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
    /// Creates a deliverer.
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

    /// Delivers all rows that are due, including rows that become due by that. Returns the number of ended deliveries.
    /// After a database error, the deliveries in flight are finished before it returns.
    pub async fn run_once(&self) -> Result<usize> {
        let (mut in_flight, mut count) = (InFlightDeliveries::new(&self.inner.config), 0);
        loop {
            if let Err(error) = self.start_deliveries(&mut in_flight).await {
                // Dropping them would repeat deliveries that may have been accepted.
                in_flight.all_ended().await;
                return Err(error);
            }
            match in_flight.ended().await {
                0 => return Ok(count),
                ended => count += ended,
            }
        }
    }

    /// Delivers until `shutdown` completes. Returns when the deliveries in flight have ended, or are released after
    /// [`OutboxConfig::drain`].
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let deadline = async {
            shutdown.await;
            Instant::now() + self.inner.config.drain
        };
        self.run_until(deadline).await;
    }

    /// Like [`run`](Self::run), but `shutdown` returns the drain deadline, which replaces [`OutboxConfig::drain`].
    pub async fn run_until(&self, shutdown: impl Future<Output = Instant>) {
        let mut in_flight = InFlightDeliveries::new(&self.inner.config);
        tokio::pin!(shutdown);
        let deadline = loop {
            if let Err(error) = self.start_deliveries(&mut in_flight).await {
                warn!(%error, "outbox rows were not taken, retrying");
            }
            let has_free_slot = in_flight.slots.free() > 0;
            tokio::select! {
                deadline = &mut shutdown => break deadline,
                // A settled row frees a slot and unblocks the next row of its issue.
                1.. = in_flight.ended() => {}
                // Cancel-safe: a wake-up that is missed here ends the next wait.
                () = self.inner.store.outbox_wake(self.inner.config.every), if has_free_slot => {}
            }
        };
        in_flight.drain(deadline).await;
    }

    /// Takes as many rows as there are free slots, and delivers each on its own task, so that a delivery that waits for
    /// the database does not block the others.
    async fn start_deliveries(&self, in_flight: &mut InFlightDeliveries) -> Result<()> {
        for (row, ends_at) in self.inner.take(&mut in_flight.slots).await? {
            let (inner, cancel) = (Arc::clone(&self.inner), in_flight.cancel.subscribe());
            let target = row.delivery_target();
            let task =
                in_flight.tasks.spawn(async move { inner.handle(row, ends_at, cancel).await });
            in_flight.targets.insert(task.id(), target);
        }
        Ok(())
    }
}

/// The deliveries in flight. Dropping it aborts them; their rows are delivered again after the TTL.
struct InFlightDeliveries {
    tasks: JoinSet<TargetResponse>,
    /// Target of each task.
    targets: HashMap<Id, DeliveryTarget>,
    slots: DeliverySlots,
    /// Becomes true when the remaining deliveries are to be cancelled and released.
    cancel: watch::Sender<bool>,
}

impl InFlightDeliveries {
    fn new(config: &OutboxConfig) -> Self {
        Self {
            tasks: JoinSet::new(),
            targets: HashMap::new(),
            slots: DeliverySlots::new(config.concurrency, config.per_target),
            cancel: watch::Sender::default(),
        }
    }

    /// Waits until a delivery has ended, and returns how many have ended by then, so that rows are taken once for all
    /// of them. Cancel-safe.
    async fn ended(&mut self) -> usize {
        let Some(first) = self.tasks.join_next_with_id().await else { return 0 };
        self.free(first);
        let mut count = 1;
        while let Some(next) = self.tasks.try_join_next_with_id() {
            self.free(next);
            count += 1;
        }
        count
    }

    fn free(&mut self, ended: Result<(Id, TargetResponse), JoinError>) {
        // Only a bug ends a task without a response.
        let (id, response) = ended.unwrap_or_else(|error| (error.id(), TargetResponse::Failed));
        if let Some(target) = self.targets.remove(&id) {
            self.slots.ended(&target, response, Instant::now());
        }
    }

    async fn all_ended(&mut self) {
        while self.ended().await > 0 {}
    }

    /// Waits for deliveries until the deadline, then cancels the rest and releases their rows.
    async fn drain(mut self, deadline: Instant) {
        if timeout_at(deadline.into(), self.all_ended()).await.is_ok() {
            return;
        }
        warn!(count = self.tasks.len(), "deliveries did not end in time, releasing their rows");
        self.cancel.send_replace(true);
        if timeout(RELEASE_TIMEOUT, self.all_ended()).await.is_err() {
            warn!(
                count = self.tasks.len(),
                "outbox rows were not released, they will be delivered again after their TTL"
            );
        }
    }
}

impl Inner {
    async fn take(&self, slots: &mut DeliverySlots) -> Result<Vec<TakenRow>> {
        let take = slots.take(&self.config.name, self.config.ttl, Instant::now());
        let rows = match take.limit {
            0 => return Ok(Vec::new()),
            _ => self.take_from(&take, slots).await,
        };
        let rows = match rows {
            Err(error) if take.limit > 1 && error.is_item_error() => {
                self.take_one_by_one(take.limit, slots, error).await
            }
            rows => rows,
        }?;
        let observer = &self.config.step_observer;
        rows.iter().for_each(|(row, _)| observer.on_step(ProcessingStep::Taken, row.issue_id));
        Ok(rows)
    }

    async fn take_from(
        &self,
        take: &OutboxTake,
        slots: &mut DeliverySlots,
    ) -> Result<Vec<TakenRow>> {
        let ends_at = Instant::now() + take.ttl;
        let rows = self.store.take_outbox_from(take).await?;
        rows.iter().for_each(|row| slots.taken(&row.delivery_target(), Instant::now()));
        Ok(rows.into_iter().map(|row| (row, ends_at)).collect())
    }

    /// Takes rows one by one after a batch failed because it was too large or because of one row.
    async fn take_one_by_one(
        &self,
        limit: usize,
        slots: &mut DeliverySlots,
        error: IssueError,
    ) -> Result<Vec<TakenRow>> {
        warn!(%error, "outbox rows were not taken as a batch, retrying one by one");
        let mut rows = Vec::new();
        while rows.len() < limit {
            let take = slots.take(&self.config.name, self.config.ttl, Instant::now());
            match self.take_from(&OutboxTake { limit: 1, ..take }, slots).await {
                Ok(row) if row.is_empty() => break,
                Ok(row) => rows.extend(row),
                Err(error) if rows.is_empty() => return Err(error),
                // Deliver the rows taken so far.
                Err(_) => break,
            }
        }
        Ok(rows)
    }

    /// Delivers a row and settles it. Other processes may take the row from `ends_at` on.
    async fn handle(
        &self,
        row: OutboxRow,
        ends_at: Instant,
        mut cancel: watch::Receiver<bool>,
    ) -> TargetResponse {
        let deadline = ends_at.min(Instant::now() + self.config.deadline);
        let left = deadline.saturating_duration_since(Instant::now());
        let (delivery, response) = match self.exceeds_crash_limit(&row) {
            Some(error) => (OutboxDelivery::Dead { error }, TargetResponse::Cancelled),
            // The database or this process was so slow that the delivery would probably not end in time.
            None if left < self.config.deadline / 2 => {
                let error = "the row was taken too slowly to deliver it in time".to_owned();
                let delivery = OutboxDelivery::Unavailable { after: RETRY_DELAY, error };
                (delivery, TargetResponse::Cancelled)
            }
            None => tokio::select! {
                biased;
                ended = self.deliver(&row, deadline) => ended,
                // The receiver may have accepted it; it will be delivered again with the same key.
                _ = cancel.wait_for(|cancel| *cancel) => (OutboxDelivery::Release, TargetResponse::Cancelled),
            },
        };
        self.config.step_observer.on_step(ProcessingStep::Delivered, row.issue_id);
        self.settle(&row, delivery).await;
        self.config.step_observer.on_step(ProcessingStep::Settled, row.issue_id);
        response
    }

    async fn deliver(
        &self,
        row: &OutboxRow,
        deadline: Instant,
    ) -> (OutboxDelivery, TargetResponse) {
        let started = Instant::now();
        // Unwind safety: the outbox shares no state with the deliverer that a panic could leave inconsistent.
        let delivering = std::panic::AssertUnwindSafe(self.deliver.deliver(row)).catch_unwind();
        let error = match poll_until(deadline, delivering).await {
            Some(Ok(Ok(()))) => {
                return (OutboxDelivery::Delivered, TargetResponse::Responded(started.elapsed()));
            }
            Some(Ok(Err(DeliverError::Dead(error)))) => {
                return (
                    OutboxDelivery::Dead { error },
                    TargetResponse::Responded(started.elapsed()),
                );
            }
            Some(Ok(Err(DeliverError::Unavailable(error)))) => {
                let after = self.unavailable_delay(row);
                return (OutboxDelivery::Unavailable { after, error }, TargetResponse::Failed);
            }
            Some(Ok(Err(DeliverError::Paused { problem, after: pause }))) => {
                let after = self.unavailable_delay(row).max(pause.min(DELIVERY_PAUSE_MAX));
                let attempt = row.attempts + 1;
                let delivery = if row.deliveries <= PAUSES_UNCOUNTED_MAX {
                    OutboxDelivery::Unavailable { after, error: problem }
                } else if attempt < self.config.retry.attempts_max {
                    OutboxDelivery::Retry { after, error: problem }
                } else {
                    OutboxDelivery::Dead { error: problem }
                };
                return (delivery, TargetResponse::Paused(pause));
            }
            Some(Ok(Err(DeliverError::Held(error)))) => {
                error!(integration = row.integration, %error, "replies are held until an operator has fixed the cause; they are retried by themselves");
                let delivery = OutboxDelivery::Unavailable { after: hold_delay(row), error };
                return (delivery, TargetResponse::Paused(HOLD_PAUSE));
            }
            Some(Ok(Err(DeliverError::Denied(error)))) => {
                error!(integration = row.integration, issue_id = %row.issue_id, %error, "a reply is held until an operator has granted access; it is retried by itself");
                let delivery = OutboxDelivery::Unavailable { after: hold_delay(row), error };
                // Fewer slots, so that denied rows delay others little; no pause.
                return (delivery, TargetResponse::Failed);
            }
            Some(Ok(Err(DeliverError::Retry(error)))) => error,
            Some(Err(panic)) => format!("the deliverer panicked: {}", panic_text(panic.as_ref())),
            None => format!("the delivery took longer than {:?}", self.config.deadline),
        };
        let attempt = row.attempts + 1;
        if attempt >= self.config.retry.attempts_max {
            return (OutboxDelivery::Dead { error }, TargetResponse::Failed);
        }
        let after = self.config.retry.delay(attempt);
        (OutboxDelivery::Retry { after, error }, TargetResponse::Failed)
    }

    /// Delay of a row whose target is unavailable.
    fn unavailable_delay(&self, row: &OutboxRow) -> Duration {
        self.config.retry.delay(row.deliveries).min(UNAVAILABLE_DELAY_MAX)
    }

    /// The error of a row that was taken too often without being settled: it probably crashes its deliverers.
    fn exceeds_crash_limit(&self, row: &OutboxRow) -> Option<String> {
        let too_often = row.crashes >= self.config.retry.crashes_max;
        too_often.then(|| format!("{} deliverers died or hung while delivering it", row.crashes))
    }

    /// Settles a delivery. Retries while the database is unavailable, for at most the TTL of the row.
    async fn settle(&self, row: &OutboxRow, delivery: OutboxDelivery) {
        let result = match &delivery {
            OutboxDelivery::Delivered => "delivered",
            OutboxDelivery::Retry { error, .. } => {
                warn!(issue_id = %row.issue_id, attempt = row.attempts + 1, %error, "delivery failed, will be retried");
                "retry"
            }
            OutboxDelivery::Unavailable { error, .. } => {
                warn!(issue_id = %row.issue_id, %error, "delivery target unavailable, will be retried");
                "away"
            }
            OutboxDelivery::Dead { error } => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, %error, "delivery failed permanently; fix the cause, then run `headwater outbox retry ID`");
                "dead"
            }
            OutboxDelivery::Release => "released",
        };
        let settlement = OutboxSettlement { id: row.id, deliveries: row.deliveries, delivery };
        let settling = async {
            loop {
                let call = self.settlements.call(settlement.clone()).await;
                match call.unwrap_or_else(batcher::batch_lost) {
                    Err(error) if error.is_transient() => {
                        warn!(issue_id = %row.issue_id, %error, "delivery was not settled, retrying");
                        sleep(RETRY_DELAY).await;
                    }
                    answer => return answer,
                }
            }
        };
        let result = match timeout(self.config.ttl, settling).await {
            Ok(Ok(OutboxSettled::Done)) => result,
            Ok(Ok(OutboxSettled::Fenced)) => "fenced",
            Ok(Err(error)) => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, %error, "delivery was not settled, the row will be delivered again");
                "unsettled"
            }
            Err(_) => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, "delivery was not settled in time, the row will be delivered again");
                "unsettled"
            }
        };
        debug!(issue_id = %row.issue_id, outbox_id = %row.id, result, "delivery ended");
        counter!(OUTBOX_DELIVERIES, "kind" => row.kind.as_str(), "result" => result).increment(1);
    }
}

/// Delay of a row that is held: longer the more often it was.
fn hold_delay(row: &OutboxRow) -> Duration {
    HOLD_PAUSE * row.deliveries.clamp(1, 10)
}

/// Polls `future` before `deadline` only, and returns `None` if it does not end by then. `timeout` would poll it once
/// more: a process that was stopped for minutes would send a request that another process has sent meanwhile.
async fn poll_until<F: Future>(deadline: Instant, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let polling = poll_fn(|context| match Instant::now() < deadline {
        true => future.as_mut().poll(context).map(Some),
        false => Poll::Ready(None),
    });
    timeout_at(deadline.into(), polling).await.ok().flatten()
}
