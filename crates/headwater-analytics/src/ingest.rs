//! From the stream `ticket_events` into the warehouse, as the group `analytics_group`.
//!
//! Upstream: entries of `headwater-queue`. Downstream: `warehouse`.
//! Promises: an entry is acknowledged after its row is committed; one that comes again is not stored again; one that is
//! no event goes to the dead letters with its bytes; a warehouse that fails (a full disk) costs no attempt: the entry
//! waits. Many entries share one transaction.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Message, Outcome, Queue, Subscription};
use headwater_stream::limits::BATCH_BYTES_MAX;
use headwater_stream::{Coalescer, CoalescerConfig};
use tracing::warn;

use crate::error::{AnalyticsError, Result};
use crate::event::TicketEvent;
use crate::limits::BATCH_ROWS_MAX;
use crate::warehouse::Warehouse;

/// The stream that is read by default.
pub const STREAM: &str = "ticket_events";
/// The group that reads it by default.
pub const GROUP: &str = "analytics_group";

/// Settings of the way into the warehouse.
#[derive(Clone, Debug)]
pub struct IngestConfig {
    /// The stream. Default: [`STREAM`].
    pub topic: String,
    /// The group. Default: [`GROUP`].
    pub group: String,
    /// How long a row waits for others to share its transaction. Default: 100 ms.
    pub linger: Duration,
    /// Rows of one transaction, and entries in hand. Default and limit: [`BATCH_ROWS_MAX`].
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

/// The running way into the warehouse. Dropped, it stops without waiting.
#[derive(Debug)]
pub struct Ingest {
    subscription: Subscription,
}

/// A row on its way; whether it is stored.
type Rows = Coalescer<TicketEvent, bool>;

impl Ingest {
    /// Begins. One process of a group ingests at a time; if it dies, another goes on.
    pub async fn start(
        queue: &Queue,
        warehouse: Arc<Warehouse>,
        config: IngestConfig,
    ) -> Result<Self> {
        if !(1..=BATCH_ROWS_MAX).contains(&config.batch) {
            let problem = format!("{}; 1 to {BATCH_ROWS_MAX}", config.batch);
            return Err(AnalyticsError::invalid("batch", problem));
        }
        let together = CoalescerConfig {
            max_items: config.batch,
            max_bytes: BATCH_BYTES_MAX,
            linger: config.linger,
            in_flight_max: 1,
        };
        let carry_out = move |events: Vec<TicketEvent>| store(Arc::clone(&warehouse), events);
        let rows =
            Coalescer::new(together, carry_out).map_err(headwater_queue::QueueError::from)?;
        let rows: Arc<Rows> = Arc::new(rows);
        let handler = move |message: Message| {
            let rows = Arc::clone(&rows);
            async move { take_in(&rows, message).await }
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

    /// Stores what is in hand and ends.
    pub async fn stop(self) {
        self.subscription.stop().await;
    }
}

async fn take_in(rows: &Rows, message: Message) -> Outcome {
    match TicketEvent::read(message.first_id(), &message.fields) {
        Ok(event) => match rows.call_weighing(event, message.fields.bytes()).await {
            Ok(true) => Outcome::Done,
            // Not the entry's fault, so it costs it nothing: it comes again.
            Ok(false) | Err(_) => Outcome::Release,
        },
        Err(reason) => Outcome::dead_letter(reason),
    }
}

/// Stores a batch; each row's answer is whether it is stored.
async fn store(warehouse: Arc<Warehouse>, events: Vec<TicketEvent>) -> Vec<bool> {
    let count = events.len();
    let stored = tokio::task::spawn_blocking(move || warehouse.store(&events)).await;
    let problem = match stored {
        Ok(Ok(_)) => return vec![true; count],
        Ok(Err(error)) => error.to_string(),
        Err(panicked) => panicked.to_string(),
    };
    warn!(rows = count, error = %problem, "rows could not be stored, they will come again");
    vec![false; count]
}
