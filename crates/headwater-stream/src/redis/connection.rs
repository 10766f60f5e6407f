//! A connection for one caller at a time: for blocking reads, for pub/sub, and to set up a multiplexed connection.
//!
//! It has no task: the caller that waits for the reply does the I/O, so a wake-up needs no task switch.
//! Guarantees: cancel-safe; after a dropped future, the next `finish` continues where it stopped.

use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::{Commands, EncodedCommands};
use super::error::{ReplyError, ServerError};
use super::reply::{RespReplies, RespValue, Scanner};
use super::transport::{TlsConfig, Transport};
use super::url::{Address, ConnectionParams};
use crate::error::StreamError;

/// Timeout of one connection attempt, so that another server can be tried within the deadline.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// A connection with at most one request in flight.
pub(super) struct Connection {
    transport: Transport,
    scanner: Scanner,
    outstanding: bool,
    address: Address,
    /// The server's id of this connection (`CLIENT ID`), if it was returned.
    id: Option<u64>,
}

/// Why there is no connection. No command with an effect was sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// The server cannot be reached. Transient.
    #[error("cannot connect to {address}: {error}")]
    Unreachable { address: Address, error: io::Error },
    /// The server answered that it is not ready. Transient.
    #[error("{address} is not ready: {problem}")]
    NotReady { address: Address, problem: String },
    /// No node of the cluster serves the slot. Transient.
    #[error("no node of the cluster serves slot {slot}")]
    SlotUnassigned { slot: u16 },
    /// Retrying will not help.
    #[error("{0}")]
    Fatal(StreamError),
}

impl Connection {
    /// Connects, authenticates and selects the database.
    pub(super) async fn open(
        address: &Address,
        params: &ConnectionParams,
        tls: &TlsConfig,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let deadline = deadline.min(Instant::now() + CONNECT_MAX);
        let opening = async {
            let transport = Transport::connect(address, tls).await?;
            let mut connection = Self {
                transport,
                scanner: Scanner::default(),
                outstanding: false,
                address: address.clone(),
                id: None,
            };
            let replies = connection.request(&handshake(params)).await?;
            Ok((connection, replies))
        };
        let (mut connection, replies) = match timeout_at(deadline, opening).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => return Err(unreachable(address, error)),
            Err(_) => return Err(unreachable(address, io::ErrorKind::TimedOut.into())),
        };
        connection.id = read_handshake(&replies, params, address)?;
        Ok(connection)
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The server's id of this connection.
    pub(super) fn id(&self) -> Option<u64> {
        self.id
    }

    /// Starts a request; `finish` sends it and returns the replies.
    pub(super) fn start(&mut self, bytes: &[u8], replies: usize) {
        debug_assert!(!self.outstanding, "one request at a time");
        self.transport.write_buffer.extend_from_slice(bytes);
        self.scanner.begin(replies);
        self.outstanding = true;
    }

    /// Sends further bytes whose reply is part of those already expected.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.transport.write_buffer.extend_from_slice(bytes);
    }

    /// Does I/O until the replies are complete. After an error the connection is unusable.
    pub(super) fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<RespReplies>> {
        if self.transport.poll_write(cx)?.is_pending() {
            // Replies that arrive while writing stay in the socket buffer.
            return Poll::Pending;
        }
        loop {
            let found = self.scanner.scan(&self.transport.read_buffer).map_err(io::Error::other)?;
            if let Some(length) = found {
                self.outstanding = false;
                let bytes = self.transport.take(length);
                return Poll::Ready(Ok(RespReplies::new(bytes, self.scanner.has_errors())));
            }
            ready!(self.transport.poll_read(cx, self.scanner.wanted()))?;
        }
    }

    /// Waits for the replies to the started request. Cancel-safe.
    pub(super) async fn finish(&mut self) -> io::Result<RespReplies> {
        std::future::poll_fn(|cx| self.poll_finish(cx)).await
    }

    /// Sends commands and waits for their replies.
    pub(super) async fn request(&mut self, encoded: &EncodedCommands) -> io::Result<RespReplies> {
        self.start(&encoded.bytes, encoded.len());
        self.finish().await
    }

    /// Sends commands and waits for their replies until the deadline.
    pub(super) async fn request_until(
        &mut self,
        commands: Commands,
        deadline: Instant,
    ) -> Result<RespReplies, ConnectError> {
        let reply = timeout_at(deadline, self.request(&commands.encode())).await;
        reply
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|error| unreachable(&self.address, error))
    }

    /// The transport, for a multiplexed connection.
    pub(super) fn into_transport(self) -> Transport {
        self.transport
    }
}

fn handshake(params: &ConnectionParams) -> EncodedCommands {
    let mut commands = Commands::new();
    match (&params.user, &params.password) {
        (Some(user), Some(password)) => commands.add(&["AUTH", user, password]),
        (None, Some(password)) => commands.add(&["AUTH", password]),
        (_, None) => {}
    }
    if params.database != 0 {
        commands.add(&["SELECT", &params.database.to_string()]);
    }
    commands.add(&["CLIENT", "SETNAME", "headwater"]);
    commands.add(&["CLIENT", "ID"]);
    commands.encode()
}

/// Checks the replies to the handshake. Returns the id of the connection, if the server returned it.
fn read_handshake(
    replies: &RespReplies,
    params: &ConnectionParams,
    address: &Address,
) -> Result<Option<u64>, ConnectError> {
    let mut cursor = replies.cursor();
    let mut require = |map: fn(&ServerError) -> StreamError| match cursor.value() {
        Ok(RespValue::Error(text)) => Err(rejected(&ServerError::new(text), map, address)),
        Ok(_) => Ok(()),
        Err(error) => Err(ConnectError::Fatal(error.into_stream_error(address.to_string()))),
    };
    if params.password.is_some() {
        require(|error| StreamError::Denied { problem: error.to_string() })?;
    }
    if params.database != 0 {
        require(|error| StreamError::invalid("the database", error.text()))?;
    }
    // The name only helps operators who run CLIENT LIST; an error is ignored.
    let named = cursor.value();
    match (named, cursor.value()) {
        (Ok(RespValue::Error(text)), _) if text.starts_with(b"NOAUTH") => Err(rejected(
            &ServerError::new(text),
            |error| StreamError::Denied { problem: error.to_string() },
            address,
        )),
        (_, Ok(RespValue::Number(id))) => Ok(u64::try_from(id).ok()),
        (_, Ok(_)) => Ok(None),
        (_, Err(ReplyError::Unexpected(problem))) => {
            Err(ConnectError::Fatal(StreamError::Protocol { problem }))
        }
        (_, Err(ReplyError::Server(_))) => Ok(None),
    }
}

fn rejected(
    error: &ServerError,
    map: fn(&ServerError) -> StreamError,
    address: &Address,
) -> ConnectError {
    match error.code() {
        "LOADING" | "MASTERDOWN" | "BUSY" => {
            ConnectError::NotReady { address: address.clone(), problem: error.to_string() }
        }
        _ if error.text().contains("max number of clients") => {
            ConnectError::NotReady { address: address.clone(), problem: error.to_string() }
        }
        _ => ConnectError::Fatal(map(error)),
    }
}

fn unreachable(address: &Address, error: io::Error) -> ConnectError {
    ConnectError::Unreachable { address: address.clone(), error }
}
