//! Reads new input entries while there is capacity and acquires their streams.
//!
//! Guarantees: it reads no more entries than there is capacity for, in owned streams and notifications.
//! Entries it cannot keep are released for other consumers.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    Backoff, DeliveredEntry, EntryId, GroupReader, Result, RetryTimer, StreamBatch, StreamError,
};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::warn;

use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};

/// Timeout of one read. A shutdown cancels it.
const READ_WAIT: Duration = Duration::from_secs(5);

/// Polling interval for capacity, in case a wakeup is missed.
const CAPACITY_CHECK: Duration = Duration::from_secs(1);

/// Pause after a full batch, so that concurrent readers get their share. Without it the first reader takes
/// everything.
const YIELD_PAUSE: Duration = Duration::from_millis(2);

const BACKOFF: Backoff = Backoff::doubling(Duration::from_millis(50), Duration::from_secs(2));

pub(crate) struct InputReader {
    member: Arc<AssignmentMember>,
    reader: Box<dyn GroupReader>,
    /// Entries that were read but not acquired because the backend was unavailable.
    backlog: Vec<DeliveredEntry>,
    retry: RetryTimer,
}

impl InputReader {
    pub(crate) fn new(member: Arc<AssignmentMember>, reader: Box<dyn GroupReader>) -> Self {
        Self { member, reader, backlog: Vec::new(), retry: BACKOFF.timer() }
    }

    /// Acquires new streams until the assignment closes. Fails only with errors that a retry cannot fix.
    pub(crate) async fn run(mut self, mut lifecycle: watch::Receiver<Lifecycle>) -> Result<()> {
        let result = loop {
            tokio::select! {
                () = lifecycle_reached(&mut lifecycle, Lifecycle::Closing) => break Ok(()),
                // Cancel-safe: `close` returns entries that a dropped read has fetched.
                result = self.read() => match result {
                    // Outside of `select!`, so that entries that were read are acquired or released.
                    Ok(read) => self.take(read).await,
                    Err(StreamError::NoGroup { .. }) => {
                        if let Err(error) = self.member.restore_group().await {
                            warn!(%error, "could not restore the consumer group; retrying");
                        }
                        self.retry.wait().await;
                    }
                    Err(error) if error.is_transient() => {
                        warn!(%error, "could not read the input stream; retrying");
                        self.retry.wait().await;
                    }
                    Err(error) => break Err(error),
                },
            }
        };
        self.close().await;
        result
    }

    /// Waits for capacity, then for new entries. Cancel-safe.
    async fn read(&mut self) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        if !self.backlog.is_empty() {
            self.retry.wait().await;
            return Ok(Vec::new());
        }
        let member = &self.member;
        let capacity = loop {
            let capacity =
                member.owned_set.free_capacity().min(member.notification_queue.free_capacity());
            if capacity > 0 {
                break capacity;
            }
            tokio::select! {
                () = member.owned_set.freed.notified() => {}
                () = member.notification_queue.received.notified() => {}
                () = sleep(CAPACITY_CHECK) => {}
            }
        };
        let count = capacity.min(member.config.read_batch);
        self.reader.read(std::slice::from_ref(&member.names.input), count, READ_WAIT).await
    }

    async fn take(&mut self, read: Vec<StreamBatch<DeliveredEntry>>) {
        let mut deliveries = std::mem::take(&mut self.backlog);
        deliveries.extend(read.into_iter().flat_map(|batch| batch.entries));
        let full = deliveries.len() >= self.member.config.read_batch;
        if !deliveries.is_empty() {
            self.backlog = self.member.acquire_new(deliveries).await;
        }
        if full {
            sleep(YIELD_PAUSE).await;
        }
        if self.backlog.is_empty() {
            self.retry.reset();
        }
    }

    /// Stops reading and releases entries that were not acquired.
    async fn close(self) {
        let mut ids: Vec<EntryId> = self.backlog.iter().map(|delivery| delivery.id).collect();
        match self.reader.close().await {
            Ok(rest) => {
                ids.extend(rest.iter().flat_map(|batch| &batch.entries).map(|entry| entry.id));
            }
            Err(error) => warn!(%error, "could not close the reader"),
        }
        if let Err(error) = self.member.release_entries(&ids).await {
            warn!(count = ids.len(), %error, "could not release input entries; the sweep will find them");
        }
    }
}
