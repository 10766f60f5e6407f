//! A node: one server, or the primary of a Sentinel service. Holds its multiplexed connections, one for calls with large
//! replies and one for all others, and opens dedicated ones.
//!
//! Upstream: `client`. Downstream: `reconnect` paces the attempts, `sentinel` names the primary. Guarantees: a broken connection
//! is replaced on the next call; only one task connects at a time. A connection whose server is no longer the primary is
//! replaced before the next call. One whose credentials expire soon is replaced in the background: calls use it until the
//! new one is open. Requests in flight on a replaced connection complete.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::client::RetryBackoff;
use super::command::Commands;
use super::connection::{ConnectError, Connection, ConnectionSettings, RENEWAL_RETRY};
use super::multiplexed::{MultiplexedConnection, RequestResult, ResponseFuture};
use super::reconnect::ReconnectPacer;
use super::reply::{RespReplies, RespValue};
use super::sentinel::Sentinels;
use super::url::Address;
use crate::error::StreamError;

/// How the address of a node is found.
#[derive(Clone)]
pub(super) enum NodeAddress {
    /// A fixed address.
    Fixed(Address),
    /// The primary that Sentinel names.
    Sentinel(Arc<Sentinels>),
}

impl NodeAddress {
    async fn open(
        &self,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        match self {
            Self::Fixed(address) => Connection::open(address, settings, deadline).await,
            Self::Sentinel(sentinels) => {
                let address = sentinels.primary(settings, deadline).await?;
                let mut connection = Connection::open(&address, settings, deadline).await?;
                check_is_primary(&mut connection, deadline).await?;
                Ok(connection)
            }
        }
    }
}

/// One server.
pub(super) struct Node {
    address: NodeAddress,
    settings: ConnectionSettings,
    shared: Mutex<NodeConnection>,
    connecting: Arc<tokio::sync::Mutex<()>>,
    pacer: ReconnectPacer,
    /// The same server again, with a connection for large replies.
    bulk: OnceLock<Arc<Node>>,
}

/// The multiplexed connection of a node and its task.
#[derive(Default)]
struct NodeConnection {
    connection: Option<MultiplexedConnection>,
    task: Option<JoinHandle<()>>,
    /// When the credentials of the connection should be renewed.
    renew_at: Option<Instant>,
    /// The last renewal. It ends before the next one is due.
    renewal: Option<AbortOnDropHandle<()>>,
    /// The server of the last connection.
    primary: Option<Address>,
    /// The primary that Sentinel announced last, and how often it announced one.
    announced: Option<Address>,
    announcements: u64,
    /// Shared with the dedicated connections; set when another server became the primary.
    retired: Arc<AtomicBool>,
}

impl NodeConnection {
    fn renewal_is_due(&self) -> bool {
        self.renew_at.is_some_and(|at| at <= Instant::now())
    }
}

impl Node {
    pub(super) fn new(address: NodeAddress, settings: ConnectionSettings) -> Self {
        let (shared, connecting, pacer) = Default::default();
        Self { address, settings, shared, connecting, pacer, bulk: OnceLock::new() }
    }

    /// The same server with a multiplexed connection for calls with large replies: their transfer delays no other call. It
    /// is opened by the first one.
    pub(super) fn bulk(&self) -> &Arc<Self> {
        self.bulk.get_or_init(|| Arc::new(Self::new(self.address.clone(), self.settings.clone())))
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

    /// Sends idempotent commands over the multiplexed connection, again over another one if it breaks. The error is for the
    /// caller of the backend.
    pub(super) async fn request(
        self: &Arc<Self>,
        commands: Commands,
        deadline: Instant,
    ) -> Result<RespReplies, StreamError> {
        let encoded = commands.encode();
        let mut backoff = RetryBackoff::default();
        loop {
            let error = match self.send(&encoded.bytes, encoded.len(), deadline).await {
                Ok(Ok(replies)) => return Ok(replies),
                Ok(Err(error)) => StreamError::unavailable("a request failed", error),
                Err(ConnectError::Fatal(error)) => return Err(error),
                Err(error) => StreamError::unavailable("no connection within the deadline", error),
            };
            if !backoff.pause(deadline).await {
                return Err(error);
            }
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
        self.connection()?.try_send(bytes, replies, deadline)
    }

    /// The multiplexed connection, open or not, if there is one that need not be renewed.
    pub(super) fn connection(&self) -> Option<MultiplexedConnection> {
        let shared = self.lock();
        if shared.renewal_is_due() { None } else { shared.connection.clone() }
    }

    /// Opens a connection for one caller.
    pub(super) async fn open_dedicated(
        &self,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let retired = Arc::clone(&self.lock().retired);
        let mut connection = self.open(deadline).await?;
        connection.set_retired(retired);
        Ok(connection)
    }

    /// Drops the connection: the server's role changed. Dedicated connections are replaced before their next request.
    pub(super) fn reset(&self) {
        if let Some(bulk) = self.bulk.get() {
            bulk.reset();
        }
        let mut shared = self.lock();
        shared.connection = None;
        shared.renewal = None;
        std::mem::take(&mut shared.retired).store(true, Ordering::Relaxed);
    }

    /// Leaves a server that is no longer the primary, although it may still accept writes. An attempt to connect to it that
    /// began before fails.
    pub(super) fn on_primary(&self, primary: &Address) {
        let connected = {
            let mut shared = self.lock();
            shared.announced = Some(primary.clone());
            shared.announcements += 1;
            shared.primary.clone()
        };
        if let Some(old) = connected.filter(|connected| connected != primary) {
            info!(%old, new = %primary, "Sentinel named another primary; connections are replaced");
            self.reset();
        }
        if let Some(bulk) = self.bulk.get() {
            bulk.on_primary(primary);
        }
    }

    /// Closes the connection after the requests in flight, or at the deadline.
    pub(super) async fn close(&self, deadline: Instant) {
        let task = {
            let mut shared = self.lock();
            shared.connection = None;
            shared.renewal = None;
            shared.task.take()
        };
        if let Some(mut task) = task
            && timeout_at(deadline, &mut task).await.is_err()
        {
            task.abort();
        }
        if let Some(bulk) = self.bulk.get() {
            Box::pin(bulk.close(deadline)).await;
        }
    }

    /// The multiplexed connection, if it is open. If its credentials should be renewed, that begins here.
    fn open_connection(self: &Arc<Self>) -> Option<MultiplexedConnection> {
        let mut shared = self.lock();
        shared.connection.take_if(|connection| !connection.is_open());
        if shared.connection.is_some() && shared.renewal_is_due() {
            let retry_at = Instant::now() + RENEWAL_RETRY;
            shared.renew_at = Some(retry_at);
            shared.renewal = Some(self.start_renewal(shared.announcements, retry_at));
        }
        shared.connection.clone()
    }

    /// Replaces the multiplexed connection by one with new credentials. Until then, and if that fails, calls use the old one:
    /// they do not wait for a provider that does not answer. The task does not keep the node alive.
    fn start_renewal(
        self: &Arc<Self>,
        announcements: u64,
        deadline: Instant,
    ) -> AbortOnDropHandle<()> {
        let (address, settings) = (self.address.clone(), self.settings.clone());
        let node = Arc::downgrade(self);
        AbortOnDropHandle::new(tokio::spawn(async move {
            let opened = address.open(&settings, deadline).await;
            let Some(node) = node.upgrade() else { return };
            if let Err(error) = opened.and_then(|opened| node.share(opened, announcements)) {
                warn!(%error, "the credentials of a Redis connection could not be renewed, retrying");
            }
        }))
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
            let announcements = node.lock().announcements;
            node.open(deadline).await.and_then(|connection| node.share(connection, announcements))
        });
        attempt.await.unwrap_or_else(|ended| Err(self.unreachable(io::Error::other(ended))))
    }

    /// Shares a connection, unless Sentinel has announced another primary since the attempt began, after so many
    /// announcements.
    fn share(
        &self,
        connection: Connection,
        announcements: u64,
    ) -> Result<MultiplexedConnection, ConnectError> {
        let (renew_at, address) = (connection.renew_at(), connection.address().clone());
        let mut shared = self.lock();
        if shared.announcements > announcements && shared.announced.as_ref() != Some(&address) {
            let problem = "another server became the primary meanwhile".to_owned();
            return Err(ConnectError::NotReady { address, problem });
        }
        let (connection, task) = MultiplexedConnection::new(connection, self.settings.liveness);
        shared.connection = Some(connection.clone());
        shared.task = Some(task);
        shared.renew_at = renew_at;
        shared.primary = Some(address);
        Ok(connection)
    }

    async fn open(&self, deadline: Instant) -> Result<Connection, ConnectError> {
        self.pacer.run(deadline, self.address.open(&self.settings, deadline)).await
    }

    fn unreachable(&self, error: io::Error) -> ConnectError {
        let address = match &self.address {
            NodeAddress::Fixed(address) => address.clone(),
            NodeAddress::Sentinel(sentinels) => sentinels.first(),
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
