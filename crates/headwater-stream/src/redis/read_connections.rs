//! The blocking connections of one reader: one in total, or one per slot on a cluster.
//!
//! Upstream: `readers`. Guarantees: the first connection with entries ends the wait; what other
//! connections fetch meanwhile is returned by the next read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use super::blocking_connection::BlockingConnection;
use super::client::{RedisClient, closed};
use super::readers::StreamRead;
use super::reply::RespReplies;
use crate::error::{Result, StreamError};

/// An outstanding read that ends at most this much later than the new one is not cancelled.
const WAIT_SLACK: Duration = Duration::from_millis(5);

pub(super) struct ReadConnections {
    client: Arc<RedisClient>,
    by_slot: BTreeMap<u16, BlockingConnection>,
    /// Reads whose replies were not taken yet.
    completed: Vec<(StreamRead, RespReplies)>,
    /// An error that happened while another connection returned entries.
    deferred_error: Option<StreamError>,
}

impl ReadConnections {
    pub(super) fn new(client: &Arc<RedisClient>) -> Self {
        Self {
            client: Arc::clone(client),
            by_slot: BTreeMap::new(),
            completed: Vec::new(),
            deferred_error: None,
        }
    }

    pub(super) fn client(&self) -> &RedisClient {
        &self.client
    }

    pub(super) fn take_completed(&mut self) -> Vec<(StreamRead, RespReplies)> {
        std::mem::take(&mut self.completed)
    }

    /// Sends one read per slot and waits until one has entries. The result is available from `take_completed`, even if
    /// this future was dropped. Cancel-safe.
    pub(super) async fn read(&mut self, reads: &[(u16, StreamRead)], wait: Duration) -> Result<()> {
        let client = Arc::clone(&self.client);
        client.check_open()?;
        if let Some(error) = self.deferred_error.take() {
            return Err(error);
        }
        if !self.completed.is_empty() {
            return Ok(());
        }
        tokio::select! {
            biased;
            read = self.read_all(reads, wait) => read,
            () = client.until_closed() => Err(closed()),
        }
    }

    async fn read_all(&mut self, reads: &[(u16, StreamRead)], wait: Duration) -> Result<()> {
        let wait_until = (!wait.is_zero()).then(|| Instant::now() + wait);
        self.cancel_stale(reads, wait_until).await?;
        if !self.completed.is_empty() {
            return Ok(());
        }
        for (slot, _) in reads {
            self.by_slot.entry(*slot).or_insert_with(|| BlockingConnection::new(*slot));
        }
        if let [(slot, read)] = reads
            && let Some(connection) = self.by_slot.get_mut(slot)
        {
            if let Some(replies) = connection.read(&self.client, read, wait_until).await? {
                self.completed.push((read.clone(), replies));
            }
            return Ok(());
        }
        // First without blocking on all connections, then blocking until the first one has entries.
        self.read_many(reads, None).await?;
        if self.completed.is_empty() && wait_until.is_some() {
            self.read_many(reads, wait_until).await?;
        }
        Ok(())
    }

    /// Reads on all connections. Without a wait it collects all replies, otherwise it stops at the first with entries.
    async fn read_many(
        &mut self,
        reads: &[(u16, StreamRead)],
        wait_until: Option<Instant>,
    ) -> Result<()> {
        let client = &self.client;
        let mut reading: FuturesUnordered<_> = self
            .by_slot
            .iter_mut()
            .filter_map(|(slot, connection)| {
                let (_, read) = reads.iter().find(|(of_slot, _)| of_slot == slot)?;
                // A connection that is still blocked has no entries yet: its server would have replied.
                let blocked = connection.outstanding().is_some() && wait_until.is_none();
                (!blocked).then_some(async move {
                    (connection.read(client, read, wait_until).await, read)
                })
            })
            .collect();
        while let Some((reply, read)) = reading.next().await {
            match reply {
                Ok(None) => {}
                Ok(Some(replies)) => {
                    self.completed.push((read.clone(), replies));
                    if wait_until.is_some() {
                        break;
                    }
                }
                Err(error) => self.deferred_error = Some(error),
            }
            if wait_until.is_some() && self.deferred_error.is_some() {
                break;
            }
        }
        drop(reading);
        self.take_deferred_error()
    }

    /// Cancels outstanding reads that differ from these or would block too long, and drops unused connections.
    async fn cancel_stale(
        &mut self,
        reads: &[(u16, StreamRead)],
        wait_until: Option<Instant>,
    ) -> Result<()> {
        let is_current =
            |slot: &u16, connection: &BlockingConnection| match connection.outstanding() {
                None => true,
                Some((outstanding, until)) => {
                    reads.iter().any(|(of_slot, read)| of_slot == slot && read == outstanding)
                        && wait_until.is_some_and(|wait| until <= wait + WAIT_SLACK)
                }
            };
        let stale = self.by_slot.iter().filter(|(slot, connection)| !is_current(slot, connection));
        let stale: Vec<u16> = stale.map(|(slot, _)| *slot).collect();
        if !stale.is_empty() {
            self.cancel(&stale).await?;
        }
        let unused: Vec<u16> = self
            .by_slot
            .keys()
            .filter(|slot| reads.iter().all(|(of_slot, _)| of_slot != *slot))
            .copied()
            .collect();
        self.drop_connections(&unused);
        Ok(())
    }

    /// Cancels all reads and drops the connections. What they fetched is available from `take_completed`.
    pub(super) async fn close(&mut self) -> Result<()> {
        let slots: Vec<u16> = self.by_slot.keys().copied().collect();
        let cancelled = self.cancel(&slots).await;
        self.drop_connections(&slots);
        cancelled
    }

    /// Cancels the reads of these slots and keeps what they fetched.
    async fn cancel(&mut self, slots: &[u16]) -> Result<()> {
        let client = &self.client;
        let connections = self.by_slot.iter_mut().filter(|(slot, _)| slots.contains(slot));
        let mut cancelling: FuturesUnordered<_> = connections
            .map(|(_, connection)| async move {
                let read = connection.outstanding().map(|(read, _)| read.clone());
                (connection.cancel(client).await, read)
            })
            .collect();
        // Each reply is stored as it arrives: this future may be dropped in between.
        while let Some((reply, read)) = cancelling.next().await {
            match (reply, read) {
                (Ok(Some(replies)), Some(read)) => self.completed.push((read, replies)),
                (Ok(_), _) => {}
                (Err(error), _) => self.deferred_error = Some(error),
            }
        }
        drop(cancelling);
        self.take_deferred_error()
    }

    /// Returns the deferred error unless a read completed; then the next read returns it.
    fn take_deferred_error(&mut self) -> Result<()> {
        match self.deferred_error.take() {
            Some(error) if self.completed.is_empty() => Err(error),
            error => {
                self.deferred_error = error;
                Ok(())
            }
        }
    }

    fn drop_connections(&mut self, slots: &[u16]) {
        self.by_slot.retain(|slot, _| !slots.contains(slot));
    }
}
