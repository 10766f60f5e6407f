//! Ingestion: consumes the stream `ticket_events` as group `analytics_group` and stores its events.
//!
//! Upstream: entries of `headwater-queue`. Downstream: `store`.
//! Guarantees: an entry is acknowledged after its row is committed; a redelivered one is not stored again; a malformed
//! one goes to the dead letters unchanged; a failing store (a full disk) releases the entry without counting an
//! attempt. Many entries share one transaction.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Message, Outcome, Queue, Subscription};
use headwater_stream::limits::BATCH_BYTES_MAX;
use headwater_stream::{Coalescer, CoalescerConfig};
use tracing::warn;

use crate::error::{AnalyticsError, Result};
use crate::event::TicketEventRow;
use crate::limits::BATCH_ROWS_MAX;
use crate::store::AnalyticsStore;

/// Default stream.
pub const STREAM: &str = "ticket_events";
/// Default group.
pub const GROUP: &str = "analytics_group";

/// Settings of the ingestion.
#[derive(Clone, Debug)]
pub struct IngestConfig {
    /// The stream. Default: [`STREAM`].
    pub topic: String,
    /// The group. Default: [`GROUP`].
    pub group: String,
    /// How long a row waits for others in the same transaction. Default: 100 ms.
    pub linger: Duration,
    /// Rows per transaction, and entries in flight. Default and limit: [`BATCH_ROWS_MAX`].
    pub batch: usize,
}

impl Default for IngestConfig {
    fn default() -> Self {
        Self {
            topic: STREAM.to_owned(),
            group: GROUP.to_owned(),
            linger: Duration::from_millis(100),
            batch: BATCH_ROWS_MAX,
        }
    }
}

/// A running ingestion. On drop it stops without waiting.
#[derive(Debug)]
pub struct Ingest {
    subscription: Subscription,
}

/// Batches rows into transactions; the result says whether the row is stored.
type RowBatcher = Coalescer<TicketEventRow, bool>;

impl Ingest {
    /// Starts ingesting. One process of a group ingests at a time; if it dies, another takes over.
    pub async fn start(
        queue: &Queue,
        store: Arc<AnalyticsStore>,
        config: IngestConfig,
    ) -> Result<Self> {
        if !(1..=BATCH_ROWS_MAX).contains(&config.batch) {
            let problem = format!("{}; 1 to {BATCH_ROWS_MAX}", config.batch);
            return Err(AnalyticsError::invalid("batch", problem));
        }
        let batching = CoalescerConfig {
            max_items: config.batch,
            max_bytes: BATCH_BYTES_MAX,
            linger: config.linger,
            in_flight_max: 1,
        };
        let store_batch = move |events: Vec<TicketEventRow>| store_rows(Arc::clone(&store), events);
        let rows =
            Coalescer::new(batching, store_batch).map_err(headwater_queue::QueueError::from)?;
        let rows: Arc<RowBatcher> = Arc::new(rows);
        let handler = move |message: Message| {
            let rows = Arc::clone(&rows);
            async move { ingest(&rows, message).await }
        };
        let consumer = ConsumerConfig {
            in_flight_max: config.batch,
            concurrency: config.batch,
            batch: config.batch.min(1024),
            ..ConsumerConfig::default()
        };
        let subscription = queue.subscribe(&config.topic, &config.group, handler, consumer).await?;
        Ok(Self { subscription })
    }

    /// Stores the events in flight and stops.
    pub async fn stop(self) {
        self.subscription.stop().await;
    }
}

async fn ingest(rows: &RowBatcher, message: Message) -> Outcome {
    match TicketEventRow::read(message.first_id(), &message.fields) {
        Ok(event) => match rows.call_with_size(event, message.fields.bytes()).await {
            Ok(true) => Outcome::Done,
            // The store failed, not the entry: redeliver without counting an attempt.
            Ok(false) | Err(_) => Outcome::Release,
        },
        Err(reason) => Outcome::dead_letter(reason),
    }
}

/// Stores a batch; returns for each row whether it is stored.
async fn store_rows(store: Arc<AnalyticsStore>, events: Vec<TicketEventRow>) -> Vec<bool> {
    let count = events.len();
    let stored = tokio::task::spawn_blocking(move || store.store(&events)).await;
    let problem = match stored {
        Ok(Ok(_)) => return vec![true; count],
        Ok(Err(error)) => error.to_string(),
        Err(panicked) => panicked.to_string(),
    };
    warn!(rows = count, error = %problem, "storing rows failed, they will be redelivered");
    vec![false; count]
}
