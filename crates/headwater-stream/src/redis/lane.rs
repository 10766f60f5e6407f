//! A lane is a connection on which a read may wait at the server, without holding up anybody else.
//!
//! Upstream: `lanes`. Downstream: `connection`.
//! Promises: a question that was sent is remembered until its answer is taken, whoever stops waiting for it meanwhile;
//! so nothing that the server delivered is lost by a dropped future.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::command::{Commands, Packed};
use super::connection::Connection;
use super::error::{Refusal, Remedy};
use super::reply::{Replies, Value};
use super::servers::{Backoff, Servers};
use crate::error::{Result, StreamError};

/// The longest wait at a server that does not let us end it early.
const WAIT_SLICE: Duration = Duration::from_millis(500);
/// How often a read is sent again at once, before it looks for another server.
const MENDS_AT_ONCE: u32 = 3;

/// How soon the wish to end a wait is repeated.
const UNBLOCK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Something to read, that may have to be waited for.
#[async_trait]
pub(super) trait Question: Clone + PartialEq + Send + Sync + 'static {
    /// Names a new connection before anything is asked on it. Returns whether who asks was silenced meanwhile.
    async fn introduce(
        &self,
        servers: &Servers,
        connection: &mut Connection,
        deadline: Instant,
    ) -> Result<bool>;

    /// The command; with `block` it waits that many milliseconds for something to arrive.
    fn command(&self, block_ms: Option<u64>) -> Commands;

    /// Mends what the server lacks to answer. Returns whether asking again makes sense.
    async fn mend(&self, servers: &Servers, slot: u16, refusal: &Refusal) -> Result<bool>;

    /// The error for the caller.
    async fn refused(&self, servers: &Servers, slot: u16, refusal: Refusal) -> StreamError;
}

/// One connection that waits for answers of one slot.
pub(super) struct Lane<Q> {
    slot: u16,
    connection: Option<Connection>,
    /// The attempt to connect, which goes on when the read that began it is dropped.
    opening: Option<Opening>,
    outstanding: Option<Outstanding<Q>>,
    /// Whether the slot is on its way here, so that every command needs permission.
    asking: bool,
}

struct Outstanding<Q> {
    question: Q,
    /// When the server has answered at the latest, if all is well.
    until: Instant,
}

impl<Q: Question> Lane<Q> {
    pub(super) fn new(slot: u16) -> Self {
        Self { slot, connection: None, opening: None, outstanding: None, asking: false }
    }

    /// The question that is still to be answered, and until when.
    pub(super) fn outstanding(&self) -> Option<(&Q, Instant)> {
        self.outstanding.as_ref().map(|outstanding| (&outstanding.question, outstanding.until))
    }

    /// Asks, and waits for an answer until `wait_until`; `None` if there is nothing. An outstanding question must be
    /// the same one. Cancel-safe.
    pub(super) async fn ask(
        &mut self,
        servers: &Arc<Servers>,
        question: &Q,
        wait_until: Option<Instant>,
    ) -> Result<Option<Replies>> {
        let deadline = wait_until.unwrap_or_else(Instant::now) + servers.call_deadline();
        let (mut backoff, mut mends) = (Backoff::default(), 0);
        loop {
            if self.outstanding.is_none() {
                self.send(servers, question, wait_until, deadline).await?;
            }
            let replies = self.answer(deadline).await?;
            let refusal = match self.read(&replies)? {
                Answer::Something => return Ok(Some(replies)),
                Answer::Nothing => {
                    if wait_until.is_some_and(|until| block_ms(until).is_some()) {
                        continue;
                    }
                    return Ok(None);
                }
                Answer::Refused(refusal) => refusal,
            };
            let goes_on = self.redirected(servers, question, &refusal, deadline).await?
                || refusal.is_unblocked()
                || timeout_at(deadline, question.mend(servers, self.slot, &refusal))
                    .await
                    .unwrap_or(Ok(false))?;
            if goes_on && mends < MENDS_AT_ONCE {
                mends += 1;
                continue;
            }
            // What does not help on this connection may on another: perhaps the server is no longer the primary.
            let waits = matches!(refusal.remedy(), Remedy::Wait | Remedy::FindPrimary);
            if goes_on || waits {
                self.connection = None;
                servers.demoted(deadline).await;
                if backoff.pause(deadline).await {
                    continue;
                }
            }
            return Err(question.refused(servers, self.slot, refusal).await);
        }
    }

    /// Ends the wait for an outstanding answer and takes what came of it.
    pub(super) async fn end(&mut self, servers: &Servers) -> Result<Option<Replies>> {
        let mut deadline = servers.deadline();
        let mut pause = UNBLOCK_AGAIN_AFTER;
        while let Some(until) = self.outstanding.as_ref().map(|outstanding| outstanding.until) {
            let Some(connection) = &mut self.connection else { break };
            if !servers.can_unblock() {
                deadline = deadline.max(until + servers.call_deadline());
            } else if let Some(id) = connection.id()
                && until > Instant::now()
            {
                servers.unblock(connection.address(), id, deadline).await;
            }
            // The server may get to know our question after our wish to end it, for they take different ways: it
            // is wished again until there is an answer.
            let soon = deadline.min(Instant::now() + pause);
            pause *= 2;
            if let Ok(answer) = timeout_at(soon, connection.finish()).await {
                let replies = self.taken(answer)?;
                return match self.read(&replies)? {
                    Answer::Something => Ok(Some(replies)),
                    // Refused or not: nothing was delivered.
                    Answer::Nothing | Answer::Refused(_) => Ok(None),
                };
            }
            if Instant::now() >= deadline {
                self.taken(Err(silent()))?;
            }
        }
        self.outstanding = None;
        Ok(None)
    }

    async fn send(
        &mut self,
        servers: &Arc<Servers>,
        question: &Q,
        wait_until: Option<Instant>,
        deadline: Instant,
    ) -> Result<()> {
        if self.connection.is_none() {
            self.connect(servers, question, deadline).await?;
        }
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let mut block = wait_until.and_then(block_ms);
        if !servers.can_unblock() || connection.id().is_none() {
            block = block.map(|ms| ms.min(WAIT_SLICE.as_millis() as u64));
        }
        let packed: Packed = question.command(block).pack();
        if self.asking {
            connection.start(&[ASKING, &packed.bytes].concat(), 2);
        } else {
            connection.start(&packed.bytes, 1);
        }
        let until = Instant::now() + Duration::from_millis(block.unwrap_or(0));
        self.outstanding = Some(Outstanding { question: question.clone(), until });
        Ok(())
    }

    /// Connects. Fails if who asks was silenced meanwhile; the next question may use the connection.
    async fn connect(
        &mut self,
        servers: &Arc<Servers>,
        question: &Q,
        deadline: Instant,
    ) -> Result<()> {
        let opening = self.opening.get_or_insert_with(|| {
            let (servers, slot, question) = (Arc::clone(servers), self.slot, question.clone());
            Opening(tokio::spawn(async move {
                let mut connection = servers.dedicated(slot, deadline).await?;
                let silenced = question.introduce(&servers, &mut connection, deadline).await?;
                Ok((connection, silenced))
            }))
        });
        let opened = (&mut opening.0).await;
        self.opening = None;
        self.asking = false;
        let ended = |error| StreamError::unavailable("the attempt to connect was ended", error);
        let (connection, silenced) = opened.map_err(ended)??;
        self.connection = Some(connection);
        if silenced { Err(self::silenced()) } else { Ok(()) }
    }

    /// Waits for the answer; a server that is silent beyond its time ends the lane.
    async fn answer(&mut self, deadline: Instant) -> Result<Replies> {
        let Some(connection) = &mut self.connection else {
            self.outstanding = None;
            return Err(broken(io::ErrorKind::NotConnected.into()));
        };
        let answer = timeout_at(deadline, connection.finish()).await;
        self.taken(answer.unwrap_or_else(|_| Err(silent())))
    }

    /// An answer was taken, or there will be none.
    fn taken(&mut self, answer: io::Result<Replies>) -> Result<Replies> {
        self.outstanding = None;
        answer.map_err(|error| {
            self.connection = None;
            broken(error)
        })
    }

    fn read(&self, replies: &Replies) -> Result<Answer> {
        let mut cursor = replies.cursor();
        let value =
            if self.asking { cursor.skip(1).and_then(|()| cursor.value()) } else { cursor.value() };
        match value.map_err(|failure| failure.about("a read"))? {
            Value::Nil | Value::Array(0) => Ok(Answer::Nothing),
            Value::Error(text) => Ok(Answer::Refused(Refusal::new(text))),
            _ => Ok(Answer::Something),
        }
    }

    /// Follows a redirection, if it is one.
    async fn redirected(
        &mut self,
        servers: &Servers,
        question: &Q,
        refusal: &Refusal,
        deadline: Instant,
    ) -> Result<bool> {
        match refusal.remedy() {
            Remedy::Moved { address } => {
                self.connection = None;
                if !servers.moved(self.slot, &address) {
                    servers.look_around(None, deadline).await;
                }
                Ok(true)
            }
            Remedy::Ask { address } => {
                self.connection = None;
                let Some(node) = servers.elsewhere(&address) else { return Ok(false) };
                let opened = node.dedicated(deadline).await;
                let mut connection = opened
                    .map_err(|error| StreamError::unavailable("no connection in time", error))?;
                let silenced = question.introduce(servers, &mut connection, deadline).await?;
                self.connection = Some(connection);
                self.asking = true;
                if silenced { Err(self::silenced()) } else { Ok(true) }
            }
            _ => Ok(false),
        }
    }

    /// Where the replies of this lane begin: behind the permission, if one was asked for.
    pub(super) fn skips(&self) -> usize {
        usize::from(self.asking)
    }
}

/// A connection on its way; given up with the lane.
struct Opening(JoinHandle<Result<(Connection, bool)>>);

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.abort();
    }
}

const ASKING: &[u8] = b"*1\r\n$6\r\nASKING\r\n";

enum Answer {
    Something,
    Nothing,
    Refused(Refusal),
}

/// How long to wait at the server; `None` when there is no time left.
fn block_ms(until: Instant) -> Option<u64> {
    let left = until.saturating_duration_since(Instant::now());
    // The server counts whole milliseconds, and 0 means for ever.
    let ms = (left + Duration::from_micros(500)).as_millis() as u64;
    (ms > 0).then_some(ms)
}

fn silenced() -> StreamError {
    let problem = "the reads of this consumer were ended from outside while this one connected";
    StreamError::Unavailable { problem: problem.to_owned(), source: None }
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no reply within the deadline")
}

fn broken(error: io::Error) -> StreamError {
    StreamError::unavailable("a read broke off; what it fetched is pending", Arc::new(error))
}
