//! The outbox: delivers the replies and events that runs have committed.
//!
//! Upstream: `worker` commits rows with the end of a run. Downstream: [`Deliver`], which knows providers and the bus.
//! Promises: at least once, with the same idempotency key at every try; replies of one issue in order, and its events, a later
//! one waits for an earlier one; but no reply waits for an event, so that an answer leaves while the streams are away. After too
//! many failures a row is dead and kept for an operator, and later rows go on; a way that is closed to all is no failure. Rows are found by
//! their status, never by a position, so none is passed by. Each target has a share of the slots (`slots`): one that is slow,
//! dead or asks for a pause does not delay the others.
//! A stop waits for the deliveries under way, but not for ever; what a database does not hear of comes again.
//! Not here: what a reply looks like to a provider.

mod config;
mod slots;
pub(crate) mod types;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_stream::Coalescer;
use metrics::counter;
use tokio::sync::watch;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{sleep, timeout, timeout_at};
use tracing::{debug, error, warn};

pub use self::config::OutboxConfig;
use self::slots::{DeliverySlots, TargetResponse};
use crate::batcher;
use crate::error::{IssueError, Result};
use crate::handler::panic_text;
use crate::limits::DELIVERY_PAUSE_MAX;
use crate::metrics::OUTBOX_DELIVERIES;
use crate::outbox::types::{
    DeliveryTarget, OutboxDelivery, OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake,
};
use crate::random;
use crate::step_observer::ProcessingStep;
use crate::store::Store;

/// How long to wait before a database that did not answer is asked again.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Deliveries of a row that may end with a pause the receiver asked for and count no attempt. A receiver that asks for ever
/// does not keep a row for ever.
const PAUSES_UNCOUNTED_MAX: u32 = 48;

/// How long to wait at most before a way that was closed is tried again: somebody waits at its end.
const UNAVAILABLE_DELAY_MAX: Duration = Duration::from_secs(10);

/// How long cancelled deliveries may take to give their rows back.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Nothing goes this way at the moment, whatever the row: try again, and count no attempt.
    #[error("{0}")]
    Unavailable(String),
    /// The target asked for a pause, such as by `Retry-After`: try again after it, count no attempt, and deliver nothing
    /// else to this target before. At most [`DELIVERY_PAUSE_MAX`](crate::limits::DELIVERY_PAUSE_MAX).
    #[error("{problem}")]
    Paused {
        /// What the target said.
        problem: String,
        /// How long to wait.
        after: Duration,
    },
    /// It can never succeed: the row is dead now.
    #[error("{0}")]
    Dead(String),
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

    /// Delivers everything that is due now, rows that become due by it included. Returns how many deliveries ended. After
    /// an error of the database, those that were under way have ended, too.
    pub async fn run_once(&self) -> Result<usize> {
        let (mut in_flight, mut count) = (InFlightDeliveries::new(&self.inner.config), 0);
        loop {
            if let Err(error) = self.start_deliveries(&mut in_flight).await {
                // Dropped half way, they would come again although they may have arrived.
                in_flight.all_ended().await;
                return Err(error);
            }
            match in_flight.ended().await {
                0 => return Ok(count),
                ended => count += ended,
            }
        }
    }

    /// Delivers until `shutdown` completes, and returns when the deliveries under way have ended, or are given back
    /// because they take longer than [`OutboxConfig::drain`].
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let told = async {
            shutdown.await;
            Instant::now() + self.inner.config.drain
        };
        self.run_until(told).await;
    }

    /// The same for a stop whose end is known: `shutdown` says until when the deliveries under way may go on, whatever
    /// [`OutboxConfig::drain`] is.
    pub async fn run_until(&self, shutdown: impl Future<Output = Instant>) {
        let mut in_flight = InFlightDeliveries::new(&self.inner.config);
        tokio::pin!(shutdown);
        let deadline = loop {
            if let Err(error) = self.start_deliveries(&mut in_flight).await {
                warn!(%error, "the outbox was not read, trying again");
            }
            let has_room = in_flight.slots.free() > 0;
            tokio::select! {
                deadline = &mut shutdown => break deadline,
                // A row that is settled makes room, and lets the next one of its issue go.
                1.. = in_flight.ended() => {}
                // Cancel-safe: an announcement that is missed here ends the next wait.
                () = self.inner.store.outbox_wake(self.inner.config.every), if has_room => {}
            }
        };
        in_flight.drain(deadline).await;
    }

    /// Takes as many rows as there are slots for, and begins to deliver them, each on a task of its own: one that waits
    /// for the database must not hold it up for the others.
    async fn start_deliveries(&self, in_flight: &mut InFlightDeliveries) -> Result<()> {
        for row in self.inner.take(&mut in_flight.slots).await? {
            let (inner, cancel) = (Arc::clone(&self.inner), in_flight.cancel.subscribe());
            let target = row.delivery_target();
            let task = in_flight.tasks.spawn(async move { inner.handle(row, cancel).await });
            in_flight.targets.insert(task.id(), target);
        }
        Ok(())
    }
}

/// The deliveries under way. They are aborted when this is dropped; their rows come again.
struct InFlightDeliveries {
    tasks: JoinSet<TargetResponse>,
    /// Where each task delivers to.
    targets: HashMap<Id, DeliveryTarget>,
    slots: DeliverySlots,
    /// Becomes true when those that have not arrived yet are to be given back.
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

    /// Waits for a delivery to end, and counts those that have ended with it: one look at the database serves them all.
    /// Cancel-safe.
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
        // Only a bug of ours ends a task without a response.
        let (id, response) = ended.unwrap_or_else(|error| (error.id(), TargetResponse::Failed));
        if let Some(target) = self.targets.remove(&id) {
            self.slots.ended(&target, response, Instant::now());
        }
    }

    async fn all_ended(&mut self) {
        while self.ended().await > 0 {}
    }

    /// Lets deliveries end until then, and cancels the rest and gives their rows back.
    async fn drain(mut self, deadline: Instant) {
        if timeout_at(deadline.into(), self.all_ended()).await.is_ok() {
            return;
        }
        warn!(
            count = self.tasks.len(),
            "deliveries did not end in time, their rows are given back"
        );
        self.cancel.send_replace(true);
        if timeout(RELEASE_TIMEOUT, self.all_ended()).await.is_err() {
            warn!(count = self.tasks.len(), "rows were not given back, they come again later");
        }
    }
}

impl Inner {
    async fn take(&self, slots: &mut DeliverySlots) -> Result<Vec<OutboxRow>> {
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
        rows.iter()
            .for_each(|row| self.config.step_observer.on_step(ProcessingStep::Taken, row.issue_id));
        Ok(rows)
    }

    async fn take_from(
        &self,
        take: &OutboxTake,
        slots: &mut DeliverySlots,
    ) -> Result<Vec<OutboxRow>> {
        let rows = self.store.take_outbox_from(take).await?;
        rows.iter().for_each(|row| slots.taken(&row.delivery_target(), Instant::now()));
        Ok(rows)
    }

    /// What cannot be taken together, because it is too much or one is in the way, is taken one by one, as far as it goes.
    async fn take_one_by_one(
        &self,
        limit: usize,
        slots: &mut DeliverySlots,
        error: IssueError,
    ) -> Result<Vec<OutboxRow>> {
        warn!(%error, "rows were not taken together, trying one by one");
        let mut rows = Vec::new();
        while rows.len() < limit {
            let take = slots.take(&self.config.name, self.config.ttl, Instant::now());
            match self.take_from(&OutboxTake { limit: 1, ..take }, slots).await {
                Ok(row) if row.is_empty() => break,
                Ok(row) => rows.extend(row),
                Err(error) if rows.is_empty() => return Err(error),
                // Those in hand must not wait for it.
                Err(_) => break,
            }
        }
        Ok(rows)
    }

    /// Delivers a row, then tells the store.
    async fn handle(&self, row: OutboxRow, mut cancel: watch::Receiver<bool>) -> TargetResponse {
        let (delivery, response) = match self.exceeds_crash_limit(&row) {
            Some(error) => (OutboxDelivery::Dead { error }, TargetResponse::Cancelled),
            None => tokio::select! {
                biased;
                ended = self.deliver(&row) => ended,
                // It may have arrived. Then it comes again, with the same key; late rather than never.
                _ = cancel.wait_for(|cancel| *cancel) => (OutboxDelivery::Release, TargetResponse::Cancelled),
            },
        };
        self.config.step_observer.on_step(ProcessingStep::Delivered, row.issue_id);
        self.settle(&row, delivery).await;
        self.config.step_observer.on_step(ProcessingStep::Settled, row.issue_id);
        response
    }

    async fn deliver(&self, row: &OutboxRow) -> (OutboxDelivery, TargetResponse) {
        let begun = Instant::now();
        // A deliverer that panicked may have left something of its own in disorder; we share nothing with it.
        let delivering = std::panic::AssertUnwindSafe(self.deliver.deliver(row)).catch_unwind();
        let error = match timeout(self.config.deadline, delivering).await {
            Ok(Ok(Ok(()))) => {
                return (OutboxDelivery::Delivered, TargetResponse::Answered(begun.elapsed()));
            }
            Ok(Ok(Err(DeliverError::Dead(error)))) => {
                return (OutboxDelivery::Dead { error }, TargetResponse::Answered(begun.elapsed()));
            }
            Ok(Ok(Err(DeliverError::Unavailable(error)))) => {
                let after = self.unavailable_delay(row);
                return (OutboxDelivery::Unavailable { after, error }, TargetResponse::Failed);
            }
            Ok(Ok(Err(DeliverError::Paused { problem, after: pause }))) => {
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
            Ok(Ok(Err(DeliverError::Retry(error)))) => error,
            Ok(Err(panic)) => format!("the deliverer panicked: {}", panic_text(panic.as_ref())),
            Err(_) => format!("it took longer than {:?}", self.config.deadline),
        };
        let attempt = row.attempts + 1;
        if attempt >= self.config.retry.attempts_max {
            return (OutboxDelivery::Dead { error }, TargetResponse::Failed);
        }
        let after = self.config.retry.delay(attempt, random::unit_f64());
        (OutboxDelivery::Retry { after, error }, TargetResponse::Failed)
    }

    /// How long a row waits that found its way closed.
    fn unavailable_delay(&self, row: &OutboxRow) -> Duration {
        self.config.retry.delay(row.deliveries, random::unit_f64()).min(UNAVAILABLE_DELAY_MAX)
    }

    /// A row that is taken again and again without an end kills those who deliver it.
    fn exceeds_crash_limit(&self, row: &OutboxRow) -> Option<String> {
        let too_often = row.crashes >= self.config.retry.crashes_max;
        too_often.then(|| format!("{} deliverers died or hung with it", row.crashes))
    }

    /// Tells the store, again and again if it does not answer: the row is hidden from others meanwhile.
    async fn settle(&self, row: &OutboxRow, delivery: OutboxDelivery) {
        let result = match &delivery {
            OutboxDelivery::Delivered => "delivered",
            OutboxDelivery::Retry { error, .. } => {
                warn!(issue_id = %row.issue_id, attempt = row.attempts + 1, %error, "delivery failed, trying again");
                "retry"
            }
            OutboxDelivery::Unavailable { error, .. } => {
                warn!(issue_id = %row.issue_id, %error, "delivery is not possible now, trying again");
                "away"
            }
            OutboxDelivery::Dead { error } => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, %error, "delivery is dead, retry it when it is mended");
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
                        warn!(issue_id = %row.issue_id, %error, "delivery was not settled, trying again");
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
                error!(issue_id = %row.issue_id, outbox_id = %row.id, %error, "delivery was not settled, it will come again");
                "unsettled"
            }
            Err(_) => {
                error!(issue_id = %row.issue_id, outbox_id = %row.id, "delivery was not settled in time, it will come again");
                "unsettled"
            }
        };
        debug!(issue_id = %row.issue_id, outbox_id = %row.id, result, "delivery ended");
        counter!(OUTBOX_DELIVERIES, "kind" => row.kind.as_str(), "result" => result).increment(1);
    }
}
