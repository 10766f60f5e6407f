//! A node: one server, or the primary of a Sentinel service. Holds its multiplexed connection and opens dedicated ones.
//!
//! Upstream: `client`. Guarantees: a broken connection is replaced on the next call; only one task connects at a time.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::multiplexed::{FlushPolicy, MultiplexedConnection, RequestResult, ResponseFuture};
use super::reply::{RespReplies, RespValue};
use super::sentinel::Sentinels;
use super::transport::TlsConfig;
use super::url::{Address, ConnectionParams};
use crate::error::StreamError;

/// Credentials and TLS settings shared by all connections.
#[derive(Clone)]
pub(super) struct ConnectionSettings {
    pub(super) params: Arc<ConnectionParams>,
    pub(super) tls: TlsConfig,
}

/// How the address of a node is found.
pub(super) enum NodeAddress {
    /// A fixed address.
    Fixed(Address),
    /// The primary that Sentinel names.
    Sentinel(Sentinels),
}

/// One server.
pub(super) struct Node {
    address: NodeAddress,
    settings: ConnectionSettings,
    shared: Mutex<NodeConnection>,
    connecting: Arc<tokio::sync::Mutex<()>>,
}

/// The multiplexed connection of a node and its task.
#[derive(Default)]
struct NodeConnection {
    connection: Option<MultiplexedConnection>,
    task: Option<JoinHandle<()>>,
}

impl Node {
    pub(super) fn new(address: NodeAddress, settings: ConnectionSettings) -> Self {
        Self { address, settings, shared: Mutex::default(), connecting: Arc::default() }
    }

    /// The address of the node, if it is fixed.
    pub(super) fn address(&self) -> Option<&Address> {
        match &self.address {
            NodeAddress::Fixed(address) => Some(address),
            NodeAddress::Sentinel(_) => None,
        }
    }

    /// Sends commands over the multiplexed connection; connects if necessary.
    pub(super) async fn send(
        self: &Arc<Self>,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> Result<RequestResult, ConnectError> {
        let connection = match self.open_connection() {
            Some(connection) => connection,
            None => self.connect(deadline).await?,
        };
        Ok(connection.send(bytes, replies, deadline).await)
    }

    /// Sends commands over the multiplexed connection; the error is for the caller of the backend.
    pub(super) async fn request(
        self: &Arc<Self>,
        commands: Commands,
        deadline: Instant,
    ) -> Result<RespReplies, StreamError> {
        let encoded = commands.encode();
        match self.send(&encoded.bytes, encoded.len(), deadline).await {
            Ok(Ok(replies)) => Ok(replies),
            Ok(Err(error)) => Err(StreamError::unavailable("a request failed", error)),
            Err(ConnectError::Fatal(error)) => Err(error),
            Err(error) => Err(StreamError::unavailable("no connection within the deadline", error)),
        }
    }

    /// Sends commands without waiting, if there is an open connection with capacity.
    pub(super) fn try_send(
        &self,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> Option<ResponseFuture> {
        // Outside the lock: sending may be a system call, and other callers would wait for it.
        self.connection()?.try_send(bytes, replies, deadline, FlushPolicy::Auto)
    }

    /// The multiplexed connection, open or not, if there is one.
    pub(super) fn connection(&self) -> Option<MultiplexedConnection> {
        self.lock().connection.clone()
    }

    /// Opens a connection for one caller.
    pub(super) async fn open_dedicated(
        &self,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        self.open(deadline).await
    }

    /// Drops the connection: the server's role changed.
    pub(super) fn reset(&self) {
        let mut shared = self.lock();
        shared.connection = None;
    }

    /// Closes the connection after the requests in flight, or at the deadline.
    pub(super) async fn close(&self, deadline: Instant) {
        let task = {
            let mut shared = self.lock();
            shared.connection = None;
            shared.task.take()
        };
        if let Some(mut task) = task
            && timeout_at(deadline, &mut task).await.is_err()
        {
            task.abort();
        }
    }

    /// The multiplexed connection, if it is open.
    fn open_connection(&self) -> Option<MultiplexedConnection> {
        let mut shared = self.lock();
        if shared.connection.as_ref().is_some_and(|connection| !connection.is_open()) {
            shared.connection = None;
        }
        shared.connection.clone()
    }

    /// Opens the multiplexed connection. The attempt continues if its caller is dropped; the next call uses it.
    async fn connect(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<MultiplexedConnection, ConnectError> {
        let connecting = Arc::clone(&self.connecting);
        let Ok(guard) = timeout_at(deadline, connecting.lock_owned()).await else {
            return Err(self.unreachable(io::ErrorKind::TimedOut.into()));
        };
        if let Some(connection) = self.open_connection() {
            return Ok(connection);
        }
        let node = Arc::clone(self);
        let attempt = tokio::spawn(async move {
            let _guard = guard;
            let connection = node.open(deadline).await?;
            let (connection, task) = MultiplexedConnection::new(connection);
            let mut shared = node.lock();
            shared.connection = Some(connection.clone());
            shared.task = Some(task);
            Ok(connection)
        });
        attempt.await.unwrap_or_else(|ended| Err(self.unreachable(io::Error::other(ended))))
    }

    async fn open(&self, deadline: Instant) -> Result<Connection, ConnectError> {
        let ConnectionSettings { params, tls } = &self.settings;
        match &self.address {
            NodeAddress::Fixed(address) => Connection::open(address, params, tls, deadline).await,
            NodeAddress::Sentinel(sentinels) => {
                let address = sentinels.primary(&self.settings, deadline).await?;
                let mut connection = Connection::open(&address, params, tls, deadline).await?;
                check_is_primary(&mut connection, deadline).await?;
                Ok(connection)
            }
        }
    }

    fn unreachable(&self, error: io::Error) -> ConnectError {
        let address = match &self.address {
            NodeAddress::Fixed(address) => address.clone(),
            NodeAddress::Sentinel(sentinels) => sentinels.first().clone(),
        };
        ConnectError::Unreachable { address, error }
    }

    fn lock(&self) -> MutexGuard<'_, NodeConnection> {
        self.shared.lock().expect("no code panics while it holds this lock")
    }
}

/// Fails if the server is a replica: Sentinel may name the old primary for a moment after a failover.
async fn check_is_primary(
    connection: &mut Connection,
    deadline: Instant,
) -> Result<(), ConnectError> {
    let replies = connection.request_until(Commands::one(&["ROLE"]), deadline).await?;
    let mut cursor = replies.cursor();
    match (cursor.value(), cursor.value()) {
        (Ok(RespValue::Array(_)), Ok(RespValue::Text(role))) if role != b"master" => {
            let problem = "the server is not the primary".to_owned();
            Err(ConnectError::NotReady { address: connection.address().clone(), problem })
        }
        // If ROLE is not permitted, the first write detects a replica.
        _ => Ok(()),
    }
}
