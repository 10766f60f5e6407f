//! A connection for one caller at a time: for blocking reads, for pub/sub, and to set up a multiplexed connection.
//!
//! It has no task: the caller that waits for the reply does the I/O, so a wake-up needs no task switch.
//! Guarantees: cancel-safe; after a dropped future, the next `finish` continues where it stopped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::{Commands, EncodedCommands};
use super::error::{ReplyError, ServerError};
use super::metrics;
use super::reply::{RespReplies, RespValue, Scanner};
use super::transport::{TlsConfig, Transport};
use super::url::{Address, ConnectionParams, Login};
use crate::credentials::CredentialProvider;
use crate::error::StreamError;

/// Timeout of one connection attempt, so that another server can be tried within the deadline.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// Name of connections without a name in the URL.
const CLIENT_NAME: &str = "headwater";
/// A connection whose renewal failed is renewed again after this long.
pub(super) const RENEWAL_RETRY: Duration = Duration::from_secs(10);

/// Credentials and TLS settings shared by all connections.
#[derive(Clone)]
pub(super) struct ConnectionSettings {
    pub(super) params: Arc<ConnectionParams>,
    pub(super) tls: TlsConfig,
    pub(super) credentials: Option<Arc<dyn CredentialProvider>>,
    pub(super) liveness: LivenessCheck,
}

/// When a silent connection is checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct LivenessCheck {
    /// A connection on which nothing was received for this long is checked with `PING`.
    pub(super) silence_max: Duration,
    /// How long the server may take to reply to it.
    pub(super) ping_timeout: Duration,
}

/// A connection with at most one request in flight.
pub(super) struct Connection {
    transport: Transport,
    scanner: Scanner,
    outstanding: bool,
    address: Address,
    /// The server's id of this connection (`CLIENT ID`), if it was returned.
    id: Option<u64>,
    /// When its credentials should be renewed, by a new connection.
    renew_at: Option<Instant>,
    /// Set when another server became the primary.
    retired: Arc<AtomicBool>,
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
    /// Connects with the current credentials and selects the database.
    pub(super) async fn open(
        address: &Address,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let database = settings.params.database;
        let Some(provider) = &settings.credentials else {
            return Self::open_as(address, settings, &settings.params.login, database, deadline)
                .await;
        };
        let not_ready = |problem: String| ConnectError::NotReady {
            address: address.clone(),
            problem: format!("no credentials: {problem}"),
        };
        let asked = Instant::now();
        let given = timeout_at(deadline, provider.credentials())
            .await
            .map_err(|_| not_ready("the provider did not answer within the deadline".to_owned()))?
            .map_err(|error| not_ready(error.to_string()))?;
        let login = Login {
            user: given.user.or_else(|| settings.params.login.user.clone()),
            password: Some(given.password),
        };
        let mut connection = Self::open_as(address, settings, &login, database, deadline)
            .await
            .map_err(|error| {
                match error {
                    // The token may have expired while it was sent, or the server does not know the new password yet.
                    ConnectError::Fatal(StreamError::Denied { problem }) => not_ready(problem),
                    error => error,
                }
            })?;
        connection.renew_at = given.expires_in.map(|lifetime| asked + lifetime.mul_f64(0.75));
        Ok(connection)
    }

    /// Connects with these credentials and selects this database.
    pub(super) async fn open_as(
        address: &Address,
        settings: &ConnectionSettings,
        login: &Login,
        database: u32,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let opened = Self::try_open(address, settings, login, database, deadline).await;
        let result = if opened.is_ok() { "ok" } else { "failed" };
        ::metrics::counter!(metrics::CONNECTS, "result" => result).increment(1);
        opened
    }

    async fn try_open(
        address: &Address,
        settings: &ConnectionSettings,
        login: &Login,
        database: u32,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let deadline = deadline.min(Instant::now() + CONNECT_MAX);
        let name = settings.params.client_name.as_deref().unwrap_or(CLIENT_NAME);
        let opening = async {
            let transport = Transport::connect(address, &settings.tls).await?;
            let mut connection = Self {
                transport,
                scanner: Scanner::default(),
                outstanding: false,
                address: address.clone(),
                id: None,
                renew_at: None,
                retired: Arc::default(),
            };
            let replies = connection.request(&handshake(login, database, name)).await?;
            Ok((connection, replies))
        };
        let (mut connection, replies) = match timeout_at(deadline, opening).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => return Err(unreachable(address, error)),
            Err(_) => return Err(unreachable(address, io::ErrorKind::TimedOut.into())),
        };
        connection.id = read_handshake(&replies, login, database, address)?;
        Ok(connection)
    }

    /// The connection is replaced when this is set.
    pub(super) fn set_retired(&mut self, retired: Arc<AtomicBool>) {
        self.retired = retired;
    }

    /// Whether its server is no longer the primary.
    pub(super) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    pub(super) fn renew_at(&self) -> Option<Instant> {
        self.renew_at
    }

    /// Whether it should be replaced by a new connection, although it works.
    pub(super) fn should_replace(&self) -> bool {
        self.is_retired() || self.renew_at.is_some_and(|at| at <= Instant::now())
    }

    /// Keeps a connection whose renewal failed.
    pub(super) fn postpone_renewal(&mut self) {
        self.renew_at = Some(Instant::now() + RENEWAL_RETRY);
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

fn handshake(login: &Login, database: u32, name: &str) -> EncodedCommands {
    let mut commands = Commands::new();
    match (&login.user, &login.password) {
        (Some(user), Some(password)) => commands.add(&["AUTH", user, password]),
        (None, Some(password)) => commands.add(&["AUTH", password]),
        (_, None) => {}
    }
    if database != 0 {
        commands.add(&["SELECT", &database.to_string()]);
    }
    commands.add(&["CLIENT", "SETNAME", name]);
    commands.add(&["CLIENT", "ID"]);
    // Shown by `CLIENT LIST` since Redis 7.2; older servers reply with an error, which is ignored.
    commands.add(&["CLIENT", "SETINFO", "LIB-NAME", "headwater"]);
    commands.add(&["CLIENT", "SETINFO", "LIB-VER", env!("CARGO_PKG_VERSION")]);
    commands.encode()
}

/// Checks the replies to the handshake. Returns the id of the connection, if the server returned it.
fn read_handshake(
    replies: &RespReplies,
    login: &Login,
    database: u32,
    address: &Address,
) -> Result<Option<u64>, ConnectError> {
    let mut cursor = replies.cursor();
    let mut require = |map: fn(&ServerError) -> StreamError| match cursor.value() {
        Ok(RespValue::Error(text)) => Err(rejected(&ServerError::new(text), map, address)),
        Ok(_) => Ok(()),
        Err(error) => Err(ConnectError::Fatal(error.into_stream_error(address.to_string()))),
    };
    if login.password.is_some() {
        require(|error| StreamError::Denied { problem: error.to_string() })?;
    }
    if database != 0 {
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

impl ConnectError {
    /// A copy, for several callers that shared an attempt.
    pub(super) fn duplicate(&self) -> Self {
        match self {
            Self::Unreachable { address, error } => {
                let error = io::Error::new(error.kind(), error.to_string());
                Self::Unreachable { address: address.clone(), error }
            }
            Self::NotReady { address, problem } => {
                Self::NotReady { address: address.clone(), problem: problem.clone() }
            }
            Self::SlotUnassigned { slot } => Self::SlotUnassigned { slot: *slot },
            Self::Fatal(error) => Self::Fatal(error.duplicate()),
        }
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
