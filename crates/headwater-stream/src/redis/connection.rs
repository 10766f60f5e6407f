//! A connection for one caller at a time: for reads that wait, for subscriptions, and to set up a shared link.
//!
//! It has no task of its own: whoever waits for the reply moves the bytes, so a wake-up costs no detour.
//! Promises: dropping a future of this type loses nothing; the next `finish` goes on where it stopped.

use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::{Commands, Packed};
use super::error::{Failure, Refusal};
use super::reply::{Replies, Scanner, Value};
use super::url::{Access, Address};
use super::wire::{Tls, Wire};
use crate::error::StreamError;

/// The longest a single attempt to connect may take, so that another server can be tried within the deadline.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// A connection that answers one request after the other.
pub(super) struct Connection {
    wire: Wire,
    scanner: Scanner,
    outstanding: bool,
    address: Address,
    /// The number by which the server knows this connection, if it told.
    id: Option<u64>,
}

/// Why there is no connection. Nothing was sent that could have had an effect.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// Trying again may help.
    #[error("cannot connect to {address}: {error}")]
    Unreachable { address: Address, error: io::Error },
    /// The server answered, and refuses us for now.
    #[error("{address} refuses connections for now: {problem}")]
    NotYet { address: Address, problem: String },
    /// No node of the cluster owns the slot now.
    #[error("no node of the cluster serves slot {slot}")]
    Nobody { slot: u16 },
    /// Trying again is of no use.
    #[error("{0}")]
    Refused(StreamError),
}

impl Connection {
    /// Connects and introduces itself.
    pub(super) async fn open(
        address: &Address,
        access: &Access,
        tls: &Tls,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let deadline = deadline.min(Instant::now() + CONNECT_MAX);
        let opening = async {
            let wire = Wire::connect(address, tls).await?;
            let mut connection = Self {
                wire,
                scanner: Scanner::default(),
                outstanding: false,
                address: address.clone(),
                id: None,
            };
            let replies = connection.ask(&greeting(access)).await?;
            Ok((connection, replies))
        };
        let (mut connection, replies) = match timeout_at(deadline, opening).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => return Err(unreachable(address, error)),
            Err(_) => return Err(unreachable(address, io::ErrorKind::TimedOut.into())),
        };
        connection.id = read_greeting(&replies, access, address)?;
        Ok(connection)
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The number by which the server knows this connection.
    pub(super) fn id(&self) -> Option<u64> {
        self.id
    }

    /// Puts a request on its way; `finish` sends it and takes the replies.
    pub(super) fn start(&mut self, bytes: &[u8], replies: usize) {
        debug_assert!(!self.outstanding, "one request at a time");
        self.wire.outbox.extend_from_slice(bytes);
        self.scanner.begin(replies);
        self.outstanding = true;
    }

    /// Sends bytes whose reply comes among those that are awaited already.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.wire.outbox.extend_from_slice(bytes);
    }

    /// Moves bytes until the replies are complete. After an error the connection is of no use any more.
    pub(super) fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Replies>> {
        if self.wire.poll_write(cx)?.is_pending() {
            // Replies may come while we still write; they wait for us in the system's buffer.
            return Poll::Pending;
        }
        loop {
            let found = self.scanner.scan(&self.wire.inbox).map_err(io::Error::other)?;
            if let Some(length) = found {
                self.outstanding = false;
                let bytes = self.wire.take(length);
                return Poll::Ready(Ok(Replies::new(bytes, self.scanner.refusals())));
            }
            ready!(self.wire.poll_read(cx, self.scanner.wanted()))?;
        }
    }

    /// Waits for the replies to what was started. Cancel-safe.
    pub(super) async fn finish(&mut self) -> io::Result<Replies> {
        std::future::poll_fn(|cx| self.poll_finish(cx)).await
    }

    /// Sends commands and waits for their replies.
    pub(super) async fn ask(&mut self, packed: &Packed) -> io::Result<Replies> {
        self.start(&packed.bytes, packed.len());
        self.finish().await
    }

    /// The bytes below, for a link that serves many callers.
    pub(super) fn into_wire(self) -> Wire {
        self.wire
    }
}

fn greeting(access: &Access) -> Packed {
    let mut commands = Commands::new();
    match (&access.user, &access.password) {
        (Some(user), Some(password)) => commands.add(&["AUTH", user, password]),
        (None, Some(password)) => commands.add(&["AUTH", password]),
        (_, None) => {}
    }
    if access.database != 0 {
        commands.add(&["SELECT", &access.database.to_string()]);
    }
    commands.add(&["CLIENT", "SETNAME", "headwater"]);
    commands.add(&["CLIENT", "ID"]);
    commands.pack()
}

/// What the server says to our greeting: the number of this connection, if it may be known.
fn read_greeting(
    replies: &Replies,
    access: &Access,
    address: &Address,
) -> Result<Option<u64>, ConnectError> {
    let mut cursor = replies.cursor();
    let mut must = |problem: fn(&Refusal) -> StreamError| match cursor.value() {
        Ok(Value::Error(text)) => Err(refused(&Refusal::new(text), problem, address)),
        Ok(_) => Ok(()),
        Err(failure) => Err(ConnectError::Refused(failure.about(address.to_string()))),
    };
    if access.password.is_some() {
        must(|refusal| StreamError::Denied { problem: refusal.to_string() })?;
    }
    if access.database != 0 {
        must(|refusal| StreamError::invalid("the database", refusal.text()))?;
    }
    // The name is a courtesy to whoever looks at the server's clients.
    let named = cursor.value();
    match (named, cursor.value()) {
        (Ok(Value::Error(text)), _) if text.starts_with(b"NOAUTH") => Err(refused(
            &Refusal::new(text),
            |refusal| StreamError::Denied { problem: refusal.to_string() },
            address,
        )),
        (_, Ok(Value::Number(id))) => Ok(u64::try_from(id).ok()),
        (_, Ok(_)) => Ok(None),
        (_, Err(Failure::Shape(problem))) => {
            Err(ConnectError::Refused(StreamError::Protocol { problem }))
        }
        (_, Err(Failure::Refused(_))) => Ok(None),
    }
}

fn refused(
    refusal: &Refusal,
    problem: fn(&Refusal) -> StreamError,
    address: &Address,
) -> ConnectError {
    match refusal.code() {
        "LOADING" | "MASTERDOWN" | "BUSY" => {
            ConnectError::NotYet { address: address.clone(), problem: refusal.to_string() }
        }
        _ if refusal.text().contains("max number of clients") => {
            ConnectError::NotYet { address: address.clone(), problem: refusal.to_string() }
        }
        _ => ConnectError::Refused(problem(refusal)),
    }
}

fn unreachable(address: &Address, error: io::Error) -> ConnectError {
    ConnectError::Unreachable { address: address.clone(), error }
}
