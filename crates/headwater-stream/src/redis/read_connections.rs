//! The blocking connections of one reader: one in total, or one per slot on a cluster.
//!
//! Upstream: `readers`. Guarantees: the first connection with entries ends the wait; what other
//! connections fetch meanwhile is returned by the next read, also if others have entries with every read. A server that does
//! not answer delays the others once, by at most a second: then its connection is closed and the read of its slot has failed.
//! A connection that takes longer to open does not fail a read that waits, and its server has a second as well.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::blocking_connection::BlockingConnection;
use super::client::{RedisClient, closed};
use super::readers::StreamRead;
use super::reply::RespReplies;
use crate::error::{Result, StreamError};

/// An outstanding read that ends at most this much later than the new one is not cancelled.
pub(super) const WAIT_SLACK: Duration = Duration::from_millis(5);
/// How long the servers of other slots have after the first one has answered, or after the end of the wait.
pub(super) const OTHERS_MAX: Duration = Duration::from_secs(1);

pub(super) struct ReadConnections {
    client: Arc<RedisClient>,
    by_slot: BTreeMap<u16, BlockingConnection>,
    /// Reads whose replies were not taken yet.
    completed: Vec<(StreamRead, RespReplies)>,
    /// Reads that failed.
    failures: Vec<(StreamRead, StreamError)>,
    /// Whether a read has returned since they happened. A caller that does not take them then is not interested.
    are_reported: bool,
}

impl ReadConnections {
    pub(super) fn new(client: &Arc<RedisClient>) -> Self {
        Self {
            client: Arc::clone(client),
            by_slot: BTreeMap::new(),
            completed: Vec::new(),
            failures: Vec::new(),
            are_reported: false,
        }
    }

    pub(super) fn client(&self) -> &RedisClient {
        &self.client
    }

    pub(super) fn take_completed(&mut self) -> Vec<(StreamRead, RespReplies)> {
        std::mem::take(&mut self.completed)
    }

    /// The reads that have failed while others did not.
    pub(super) fn take_failures(&mut self) -> Vec<(StreamRead, StreamError)> {
        std::mem::take(&mut self.failures)
    }

    /// Sends one read per slot and waits until one has entries or has failed. Fails if all have. The result is available from `take_completed`, even if
    /// this future was dropped. Cancel-safe.
    pub(super) async fn read(&mut self, reads: &[(u16, StreamRead)], wait: Duration) -> Result<()> {
        let client = Arc::clone(&self.client);
        client.check_open()?;
        if std::mem::take(&mut self.are_reported) {
            self.failures.clear();
        }
        if !self.completed.is_empty() || !self.failures.is_empty() {
            // A caller that does not wait may have removed streams, which must not be read any more when this returns.
            if wait.is_zero() {
                tokio::select! {
                    biased;
                    () = self.cancel_stale(reads, None) => {}
                    () = client.until_closed() => return Err(closed()),
                }
            }
            self.are_reported = true;
            return Ok(());
        }
        tokio::select! {
            biased;
            read = self.read_all(reads, wait) => read?,
            () = client.until_closed() => return Err(closed()),
        }
        self.are_reported = true;
        let is_failed = |read: &StreamRead| self.failures.iter().any(|(failed, _)| failed == read);
        match self.completed.is_empty() && reads.iter().all(|(_, read)| is_failed(read)) {
            true => self.take_failures().pop().map_or(Ok(()), |(_, error)| Err(error)),
            false => Ok(()),
        }
    }

    async fn read_all(&mut self, reads: &[(u16, StreamRead)], wait: Duration) -> Result<()> {
        let wait_until = (!wait.is_zero()).then(|| Instant::now() + wait);
        self.cancel_stale(reads, wait_until).await;
        if !self.completed.is_empty() || !self.failures.is_empty() {
            return Ok(());
        }
        for (slot, _) in reads {
            self.by_slot.entry(*slot).or_insert_with(|| BlockingConnection::new(*slot));
        }
        if reads.len() > 1 {
            self.take_arrived();
            if !self.completed.is_empty() || !self.failures.is_empty() {
                return Ok(());
            }
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
        let is_waiting = wait_until.is_some();
        let mut connecting = self.read_many(reads, None, is_waiting).await;
        if self.completed.is_empty() && self.failures.is_empty() && is_waiting {
            connecting = self.read_many(reads, wait_until, true).await;
        } else if is_waiting {
            // Others have entries. These attempts go on, and a later read tells how they ended.
            connecting.clear();
        }
        self.failures.extend(connecting.into_iter().map(|read| (read, no_answer())));
        Ok(())
    }

    /// Takes the replies that have arrived since the last read.
    fn take_arrived(&mut self) {
        for connection in self.by_slot.values_mut() {
            let Some((read, _)) = connection.outstanding() else { continue };
            let read = read.clone();
            match connection.take_arrived() {
                Some(Ok(Some(replies))) => self.completed.push((read, replies)),
                Some(Err(error)) => self.failures.push((read, error)),
                Some(Ok(None)) | None => {}
            }
        }
    }

    /// Reads on all connections. Without a wait it collects all replies, otherwise it stops at the first with entries or an
    /// error. Returns late reads that were not sent, because their connections are still being opened. `is_waiting`: the
    /// caller waits for entries, so a connection that an earlier read began to open delays nothing.
    async fn read_many(
        &mut self,
        reads: &[(u16, StreamRead)],
        wait_until: Option<Instant>,
        is_waiting: bool,
    ) -> Vec<StreamRead> {
        let client = &self.client;
        let mut unanswered: BTreeMap<u16, &StreamRead> = BTreeMap::new();
        let mut has_others = false;
        let mut reading: FuturesUnordered<_> = self
            .by_slot
            .iter_mut()
            .filter_map(|(slot, connection)| {
                let (_, read) = reads.iter().find(|(of_slot, _)| of_slot == slot)?;
                // A connection that is still blocked has no entries yet: its server would have replied.
                let is_blocked = connection.outstanding().is_some() && !connection.is_overdue();
                let is_later = is_blocked || is_waiting && connection.is_connecting();
                has_others |= is_later;
                (wait_until.is_some() || !is_later).then(|| {
                    unanswered.insert(*slot, read);
                    async move { (*slot, connection.read(client, read, wait_until).await, read) }
                })
            })
            .collect();
        // Entries of a connection that is left out may arrive at any time, so the others do not have longer either.
        let mut limit = match wait_until {
            Some(until) => Some(until + OTHERS_MAX),
            None => has_others.then(|| Instant::now() + OTHERS_MAX),
        };
        let is_late = loop {
            let answered = match limit {
                None => Ok(reading.next().await),
                Some(limit) => timeout_at(limit, reading.next()).await,
            };
            let Ok(answered) = answered else { break true };
            let Some((slot, reply, read)) = answered else { break false };
            unanswered.remove(&slot);
            limit.get_or_insert_with(|| Instant::now() + OTHERS_MAX);
            match reply {
                Ok(None) => continue,
                Ok(Some(replies)) => self.completed.push((read.clone(), replies)),
                Err(error) => self.failures.push((read.clone(), error)),
            }
            if wait_until.is_some() {
                break false;
            }
        };
        drop(reading);
        let mut connecting = Vec::new();
        for (slot, read) in unanswered.into_iter().filter(|_| is_late) {
            match self.by_slot.get(&slot) {
                // An attempt to connect ends by its own deadline. To abort it would mean to begin again with the next read.
                Some(connection) if connection.outstanding().is_none() => {
                    connecting.push(read.clone());
                }
                // The connection was opened late, and its server has time left.
                Some(connection) if is_waiting && !connection.is_overdue() => {}
                _ => {
                    self.by_slot.remove(&slot);
                    self.failures.push((read.clone(), no_answer()));
                }
            }
        }
        connecting
    }

    /// Cancels outstanding reads that differ from these or would block too long, and drops unused connections.
    async fn cancel_stale(&mut self, reads: &[(u16, StreamRead)], wait_until: Option<Instant>) {
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
            self.cancel(&stale).await;
        }
        let unused: Vec<u16> = self
            .by_slot
            .keys()
            .filter(|slot| reads.iter().all(|(of_slot, _)| of_slot != *slot))
            .copied()
            .collect();
        self.drop_connections(&unused);
    }

    /// Cancels all reads and drops the connections. What they fetched is available from `take_completed`. Fails if one of
    /// them could not be cancelled.
    pub(super) async fn close(&mut self) -> Result<()> {
        let slots: Vec<u16> = self.by_slot.keys().copied().collect();
        self.cancel(&slots).await;
        self.drop_connections(&slots);
        match self.take_failures().pop() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// Cancels the reads of these slots and keeps what they fetched.
    async fn cancel(&mut self, slots: &[u16]) {
        let client = &self.client;
        // Without others to delay, the server has until the deadline of a call.
        let limit = match self.by_slot.len() {
            0 | 1 => client.deadline() + client.call_deadline(),
            _ => Instant::now() + OTHERS_MAX,
        };
        let mut unanswered: BTreeMap<u16, StreamRead> = BTreeMap::new();
        let connections = self.by_slot.iter_mut().filter(|(slot, _)| slots.contains(slot));
        let mut cancelling: FuturesUnordered<_> = connections
            .filter_map(|(slot, connection)| {
                let read = connection.outstanding().map(|(read, _)| read.clone())?;
                unanswered.insert(*slot, read.clone());
                Some(async move { (*slot, connection.cancel(client).await, read) })
            })
            .collect();
        // Each reply is stored as it arrives: this future may be dropped in between.
        while let Ok(Some((slot, reply, read))) = timeout_at(limit, cancelling.next()).await {
            unanswered.remove(&slot);
            match reply {
                Ok(Some(replies)) => self.completed.push((read, replies)),
                Ok(None) => {}
                Err(error) => self.failures.push((read, error)),
            }
        }
        drop(cancelling);
        for (slot, read) in unanswered {
            self.by_slot.remove(&slot);
            self.failures.push((read, no_answer()));
        }
    }

    fn drop_connections(&mut self, slots: &[u16]) {
        self.by_slot.retain(|slot, _| !slots.contains(slot));
    }
}

fn no_answer() -> StreamError {
    let problem =
        "a server of the cluster did not answer in time; entries it delivered are pending";
    StreamError::Unavailable { problem: problem.to_owned(), source: None }
}
