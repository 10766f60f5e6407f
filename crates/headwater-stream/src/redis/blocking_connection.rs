//! A dedicated connection for blocking reads of one slot, so that a blocked read delays no other call.
//!
//! Upstream: `read_connections`. Downstream: `connection`.
//! Guarantees: a read that was sent stays outstanding until its reply is taken, even if the caller drops its future. So no
//! entry that the server delivered is lost by cancellation.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::client::{RedisClient, RetryBackoff};
use super::command::EncodedCommands;
use super::connection::Connection;
use super::error::{RetryAction, ServerError};
use super::read_connections::{OTHERS_MAX, WAIT_SLACK};
use super::readers::StreamRead;
use super::reply::{RespReplies, RespValue};
use crate::error::{Result, StreamError};

/// Longest block on a server that does not permit `CLIENT UNBLOCK`.
const BLOCK_SLICE: Duration = Duration::from_millis(500);
/// How often a read is re-sent immediately before another server is looked for.
const IMMEDIATE_RETRIES_MAX: u32 = 3;

/// Timeout of the renewal of a connection that still works.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before `CLIENT UNBLOCK` is first repeated; it doubles each time.
const UNBLOCK_RETRY_AFTER: Duration = Duration::from_millis(10);

/// A connection for blocking reads of one slot.
pub(super) struct BlockingConnection {
    slot: u16,
    connection: Option<Connection>,
    /// The attempt to connect. It continues if the read that started it is dropped.
    connecting: Option<ConnectAttempt>,
    outstanding: Option<OutstandingRead>,
    /// Whether the slot is being migrated to this server, so that each command needs `ASKING`.
    asking: bool,
}

struct OutstandingRead {
    read: StreamRead,
    /// When the server should have replied at the latest.
    until: Instant,
}

impl BlockingConnection {
    pub(super) fn new(slot: u16) -> Self {
        Self { slot, connection: None, connecting: None, outstanding: None, asking: false }
    }

    /// The read without a reply, and when it ends.
    pub(super) fn outstanding(&self) -> Option<(&StreamRead, Instant)> {
        self.outstanding.as_ref().map(|outstanding| (&outstanding.read, outstanding.until))
    }

    /// Whether the server should have replied to the outstanding read so long ago that other servers wait for it no more.
    pub(super) fn is_overdue(&self) -> bool {
        let now = Instant::now() + WAIT_SLACK;
        self.outstanding.as_ref().is_some_and(|read| read.until + OTHERS_MAX <= now)
    }

    /// Takes the reply to the outstanding read if it has arrived: what the read fetched, if anything. The next read gets an
    /// error of the server again.
    pub(super) fn take_arrived(&mut self) -> Option<Result<Option<RespReplies>>> {
        self.outstanding.as_ref()?;
        let reply = self.connection.as_mut()?.finish().now_or_never()?;
        Some(self.finish_read(reply).and_then(Self::fetched))
    }

    /// Whether the connection is still being opened: nothing was sent yet.
    pub(super) fn is_connecting(&self) -> bool {
        self.connecting.as_ref().is_some_and(|attempt| !attempt.is_finished())
    }

    /// Sends a read and waits for entries until `wait_until`; `None` if there are none. An outstanding read must be the
    /// same one. Cancel-safe.
    pub(super) async fn read(
        &mut self,
        client: &Arc<RedisClient>,
        read: &StreamRead,
        wait_until: Option<Instant>,
    ) -> Result<Option<RespReplies>> {
        let deadline = wait_until.unwrap_or_else(Instant::now) + client.call_deadline();
        let (mut backoff, mut retries) = (RetryBackoff::default(), 0);
        loop {
            if self.outstanding.is_none() {
                self.send(client, read, wait_until, deadline).await?;
            }
            let replies = self.await_reply(deadline).await?;
            let error = match Self::classify(&replies)? {
                ReadReply::Entries => return Ok(Some(replies)),
                ReadReply::Empty => {
                    if wait_until.is_some_and(|until| block_ms(until).is_some()) {
                        continue;
                    }
                    return Ok(None);
                }
                ReadReply::Error(error) => error,
            };
            let retry = self.follow_redirect(client, read, &error, deadline).await?
                || error.is_unblocked()
                || timeout_at(deadline, read.recover(client, self.slot, &error))
                    .await
                    .unwrap_or(Ok(false))?;
            if retry && retries < IMMEDIATE_RETRIES_MAX {
                retries += 1;
                continue;
            }
            // Try another connection: the server may no longer be the primary.
            let waits =
                matches!(error.retry_action(), RetryAction::Wait | RetryAction::FindPrimary);
            if retry || waits {
                self.connection = None;
                client.on_readonly(deadline).await;
                if backoff.pause(deadline).await {
                    continue;
                }
            }
            return Err(read.to_error(client, self.slot, error).await);
        }
    }

    /// Cancels the outstanding read and returns what it fetched.
    pub(super) async fn cancel(&mut self, client: &RedisClient) -> Result<Option<RespReplies>> {
        let mut deadline = client.deadline();
        let mut pause = UNBLOCK_RETRY_AFTER;
        while let Some(until) = self.outstanding.as_ref().map(|outstanding| outstanding.until) {
            let Some(connection) = &mut self.connection else { break };
            if !client.can_unblock() {
                deadline = deadline.max(until + client.call_deadline());
            } else if let Some(id) = connection.id()
                && until > Instant::now()
            {
                client.unblock(connection.address(), id, deadline).await;
            }
            // CLIENT UNBLOCK uses another connection and may reach the server before the read. It is repeated until there
            // is a reply.
            let soon = deadline.min(Instant::now() + pause);
            pause *= 2;
            if let Ok(reply) = timeout_at(soon, connection.finish()).await {
                return self.finish_read(reply).and_then(Self::fetched);
            }
            if Instant::now() >= deadline {
                self.finish_read(Err(timed_out()))?;
            }
        }
        self.outstanding = None;
        Ok(None)
    }

    async fn send(
        &mut self,
        client: &Arc<RedisClient>,
        read: &StreamRead,
        wait_until: Option<Instant>,
        deadline: Instant,
    ) -> Result<()> {
        if self.connection.as_ref().is_none_or(Connection::should_replace) {
            self.replace(client, read, deadline).await?;
        }
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let mut block = wait_until.and_then(block_ms);
        if !client.can_unblock() || connection.id().is_none() {
            block = block.map(|ms| ms.min(BLOCK_SLICE.as_millis() as u64));
        }
        let encoded: EncodedCommands = read.command(client.keys(), block).encode();
        if self.asking {
            connection.start(&[ASKING, &encoded.bytes].concat(), 2);
        } else {
            connection.start(&encoded.bytes, 1);
        }
        let until = Instant::now() + Duration::from_millis(block.unwrap_or(0));
        self.outstanding = Some(OutstandingRead { read: read.clone(), until });
        Ok(())
    }

    /// Connects again. If only the credentials should be renewed and that fails, the old connection stays.
    async fn replace(
        &mut self,
        client: &Arc<RedisClient>,
        read: &StreamRead,
        mut deadline: Instant,
    ) -> Result<()> {
        self.connection.take_if(|connection| connection.is_retired());
        if self.connection.is_some() {
            deadline = deadline.min(Instant::now() + RENEWAL_TIMEOUT);
        }
        let connected = self.connect(client, read, deadline).await;
        match &mut self.connection {
            Some(old) if old.should_replace() => {
                old.postpone_renewal();
                Ok(())
            }
            _ => connected,
        }
    }

    /// Connects. Fails if the consumer was disconnected meanwhile; the next read may use the connection.
    async fn connect(
        &mut self,
        client: &Arc<RedisClient>,
        read: &StreamRead,
        deadline: Instant,
    ) -> Result<()> {
        let attempt = self.connecting.get_or_insert_with(|| {
            let (client, slot, read) = (Arc::clone(client), self.slot, read.clone());
            AbortOnDropHandle::new(tokio::spawn(async move {
                let mut connection = client.open_dedicated(slot, deadline).await?;
                let disconnected = read.on_connect(&client, &mut connection, deadline).await?;
                Ok((connection, disconnected))
            }))
        });
        let opened = attempt.await;
        self.connecting = None;
        self.asking = false;
        let aborted = |error| StreamError::unavailable("the connection attempt was aborted", error);
        let (connection, disconnected) = opened.map_err(aborted)??;
        self.connection = Some(connection);
        if disconnected { Err(consumer_disconnected()) } else { Ok(()) }
    }

    /// Waits for the reply. If there is none by the deadline, the connection is closed.
    async fn await_reply(&mut self, deadline: Instant) -> Result<RespReplies> {
        let Some(connection) = &mut self.connection else {
            self.outstanding = None;
            return Err(read_failed(io::ErrorKind::NotConnected.into()));
        };
        let reply = timeout_at(deadline, connection.finish()).await;
        self.finish_read(reply.unwrap_or_else(|_| Err(timed_out())))
    }

    /// Ends the outstanding read with its reply or error.
    fn finish_read(&mut self, reply: io::Result<RespReplies>) -> Result<RespReplies> {
        self.outstanding = None;
        let replies = reply.map_err(|error| {
            self.connection = None;
            read_failed(error)
        })?;
        if !self.asking {
            return Ok(replies);
        }
        // The first reply is the one to `ASKING`.
        let mut parts = replies.split(2).map_err(|error| error.into_stream_error("a read"))?;
        let (reply, error) = parts.remove(1);
        Ok(RespReplies::new(reply, error.is_some()))
    }

    /// The replies, if they have entries.
    fn fetched(replies: RespReplies) -> Result<Option<RespReplies>> {
        let has_entries = matches!(Self::classify(&replies)?, ReadReply::Entries);
        Ok(has_entries.then_some(replies))
    }

    fn classify(replies: &RespReplies) -> Result<ReadReply> {
        match replies.cursor().value().map_err(|error| error.into_stream_error("a read"))? {
            RespValue::Nil | RespValue::Array(0) => Ok(ReadReply::Empty),
            RespValue::Error(text) => Ok(ReadReply::Error(ServerError::new(text))),
            _ => Ok(ReadReply::Entries),
        }
    }

    /// Follows a redirection. Returns whether the error was one.
    async fn follow_redirect(
        &mut self,
        client: &RedisClient,
        read: &StreamRead,
        error: &ServerError,
        deadline: Instant,
    ) -> Result<bool> {
        match error.retry_action() {
            RetryAction::Moved { address } => {
                self.connection = None;
                if !client.on_moved(self.slot, &address) {
                    client.refresh_slots(None, deadline).await;
                }
                Ok(true)
            }
            RetryAction::Ask { address } => {
                self.connection = None;
                let Some(node) = client.node_for_redirect(self.slot, &address) else {
                    return Ok(false);
                };
                let opened = node.open_dedicated(deadline).await;
                let mut connection = opened.map_err(|error| {
                    StreamError::unavailable("no connection within the deadline", error)
                })?;
                let disconnected = read.on_connect(client, &mut connection, deadline).await?;
                self.connection = Some(connection);
                self.asking = true;
                if disconnected { Err(consumer_disconnected()) } else { Ok(true) }
            }
            _ => Ok(false),
        }
    }
}

/// A running attempt to connect.
type ConnectAttempt = AbortOnDropHandle<Result<(Connection, bool)>>;

const ASKING: &[u8] = b"*1\r\n$6\r\nASKING\r\n";

enum ReadReply {
    Entries,
    Empty,
    Error(ServerError),
}

/// How long to block on the server; `None` when no time is left.
fn block_ms(until: Instant) -> Option<u64> {
    let left = until.saturating_duration_since(Instant::now());
    // The server counts whole milliseconds, and 0 blocks forever.
    let ms = (left + Duration::from_micros(500)).as_millis() as u64;
    (ms > 0).then_some(ms)
}

fn consumer_disconnected() -> StreamError {
    let problem = "the readers of this consumer were disconnected while this one was connecting";
    StreamError::Unavailable { problem: problem.to_owned(), source: None }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no reply within the deadline")
}

fn read_failed(error: io::Error) -> StreamError {
    StreamError::unavailable("a read failed; entries it fetched are pending", Arc::new(error))
}
