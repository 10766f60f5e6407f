//! The intake reads new entries of the input while there is room, and makes their streams ours.
//!
//! Promises: it reads no more than there is room for, in slots and in the channel; what it cannot keep it gives back
//! unhandled, so that anybody can have it.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Batch, Delivery, EntryId, GroupReader, Result, StreamError};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::warn;

use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};

/// How long one read waits. A stop does not wait for it.
const READ_WAIT: Duration = Duration::from_secs(5);

/// Room is looked for again after this, should a wake-up be missed.
const CAPACITY_CHECK: Duration = Duration::from_secs(1);

/// A pause after a full batch, so that others who read at the same time get their turn: without it, whoever is awake
/// first takes everything.
const YIELD_PAUSE: Duration = Duration::from_millis(2);

const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

pub(crate) struct InputReader {
    member: Arc<AssignmentMember>,
    reader: Box<dyn GroupReader>,
    /// Read, but not yet ours, because the backend did not answer.
    backlog: Vec<Delivery>,
    backoff: Duration,
}

impl InputReader {
    pub(crate) fn new(member: Arc<AssignmentMember>, reader: Box<dyn GroupReader>) -> Self {
        Self { member, reader, backlog: Vec::new(), backoff: BACKOFF_MIN }
    }

    /// Takes new streams until the assignment closes. An error is one that no retry mends.
    pub(crate) async fn run(mut self, mut lifecycle: watch::Receiver<Lifecycle>) -> Result<()> {
        let result = loop {
            tokio::select! {
                () = lifecycle_reached(&mut lifecycle, Lifecycle::Closing) => break Ok(()),
                // Cancel-safe: what a dropped read fetched comes back from `close`.
                result = self.read() => match result {
                    // Outside of `select!`: what was read is taken or given back.
                    Ok(read) => self.take(read).await,
                    Err(StreamError::NoGroup { .. }) => {
                        if let Err(error) = self.member.ensure_group().await {
                            warn!(%error, "group was not created, trying again");
                        }
                        self.back_off().await;
                    }
                    Err(error) if error.is_transient() => {
                        warn!(%error, "input was not read, trying again");
                        self.back_off().await;
                    }
                    Err(error) => break Err(error),
                },
            }
        };
        self.close().await;
        result
    }

    /// Waits for room, then for new entries. Cancel-safe.
    async fn read(&mut self) -> Result<Vec<Batch<Delivery>>> {
        if !self.backlog.is_empty() {
            sleep(self.backoff).await;
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

    async fn take(&mut self, read: Vec<Batch<Delivery>>) {
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
            self.backoff = BACKOFF_MIN;
        } else {
            self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn back_off(&mut self) {
        sleep(self.backoff).await;
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
    }

    /// Stops reading and gives back what is read and not ours.
    async fn close(self) {
        let mut ids: Vec<EntryId> = self.backlog.iter().map(|delivery| delivery.id).collect();
        match self.reader.close().await {
            Ok(rest) => {
                ids.extend(rest.iter().flat_map(|batch| &batch.entries).map(|entry| entry.id));
            }
            Err(error) => warn!(%error, "reader was not closed in good order"),
        }
        if let Err(error) = self.member.release_entries(&ids).await {
            warn!(count = ids.len(), %error, "entries were not given back, a sweep finds them");
        }
    }
}
