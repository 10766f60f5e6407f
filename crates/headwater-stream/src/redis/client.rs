//! The client of a Redis deployment: finds the node for a slot and sends commands to it.
//!
//! Upstream: every call of this backend. Downstream: `retry` re-sends; `node` and `cluster` hold the connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::cluster::ClusterNodes;
use super::command::{Commands, EncodedCommands};
use super::connection::{ConnectError, Connection, ConnectionSettings};
use super::keys::{self, Keyspace};
use super::multiplexed::ResponseFuture;
use super::node::{Node, NodeAddress};
use super::reconnect::BACKOFF;
use super::reply::RespReplies;
use super::retry::RetryingCall;
use super::sentinel::Sentinels;
use super::url::{Address, Topology};
use crate::backoff::RetryTimer;
use crate::error::{Result, StreamError};

/// Whether a call may be re-sent after a lost reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idempotency {
    /// Idempotent: may be re-sent after a lost reply.
    Idempotent,
    /// Not re-sent after a lost reply: the call fails and the caller decides.
    AtMostOnce,
}

/// The connection of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallConnection {
    /// The one that all calls share.
    Shared,
    /// The one for large replies, whose transfer must not delay lease renewals and acknowledgements.
    Bulk,
}

impl CallConnection {
    /// The node with this connection.
    pub(super) fn of(self, node: &Arc<Node>) -> &Arc<Node> {
        match self {
            Self::Shared => node,
            Self::Bulk => node.bulk(),
        }
    }
}

/// The client of one server, a Sentinel service or a cluster.
pub(super) struct RedisClient {
    nodes: Nodes,
    keys: Arc<Keyspace>,
    call_deadline: Duration,
    closed: watch::Sender<bool>,
    /// The same value, cheaper to read on every call.
    is_closed: AtomicBool,
    /// Whether `CLIENT UNBLOCK` is permitted.
    can_unblock: AtomicBool,
    /// Whether `notify-keyspace-events` may be changed.
    configure_notifications: bool,
    /// Watches the Sentinels for another primary.
    sentinel_watch: Mutex<Option<AbortOnDropHandle<()>>>,
}

enum Nodes {
    Single(Arc<Node>),
    Cluster(Box<ClusterNodes>),
}

impl RedisClient {
    pub(super) fn new(
        topology: &Topology,
        settings: ConnectionSettings,
        call_deadline: Duration,
        configure_notifications: bool,
    ) -> Self {
        let is_cluster = matches!(topology, Topology::Cluster { .. });
        let params = &settings.params;
        let keys = Arc::new(Keyspace::new(&params.key_prefix, params.database, is_cluster));
        let mut sentinel_watch = None;
        let nodes = match topology.clone() {
            Topology::Single(address) => {
                Nodes::Single(Arc::new(Node::new(NodeAddress::Fixed(address), settings)))
            }
            Topology::Sentinel { sentinels, service } => {
                let sentinels = Arc::new(Sentinels::new(sentinels, service));
                let target = NodeAddress::Sentinel(Arc::clone(&sentinels));
                let node = Arc::new(Node::new(target, settings.clone()));
                let watch = sentinels.watch(Arc::clone(&node), settings, call_deadline);
                sentinel_watch = Some(AbortOnDropHandle::new(tokio::spawn(watch)));
                Nodes::Single(node)
            }
            Topology::Cluster { seeds } => {
                Nodes::Cluster(Box::new(ClusterNodes::new(seeds, settings)))
            }
        };
        Self {
            nodes,
            keys,
            call_deadline,
            closed: watch::Sender::new(false),
            is_closed: false.into(),
            can_unblock: true.into(),
            configure_notifications,
            sentinel_watch: Mutex::new(sentinel_watch),
        }
    }

    /// Whether `notify-keyspace-events` may be changed.
    pub(super) fn configures_notifications(&self) -> bool {
        self.configure_notifications
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.nodes, Nodes::Cluster(_))
    }

    /// The slot of a name and its keys; always 0 without a cluster.
    pub(super) fn slot(&self, name: &str) -> u16 {
        if self.is_cluster() { keys::slot(name) } else { 0 }
    }

    /// The keys and channels of this client.
    pub(super) fn keys(&self) -> &Arc<Keyspace> {
        &self.keys
    }

    pub(super) fn call_deadline(&self) -> Duration {
        self.call_deadline
    }

    /// The deadline of a call that starts now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.call_deadline
    }

    /// Fails if the backend was closed.
    pub(super) fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::Acquire) { Err(closed()) } else { Ok(()) }
    }

    /// Returns when the backend is closed. Cancel-safe.
    pub(super) async fn until_closed(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Closes all shared connections after the requests in flight.
    pub(super) async fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.closed.send_replace(true);
        *self.sentinel_watch.lock().expect("no code panics while it holds this lock") = None;
        let deadline = self.deadline();
        match &self.nodes {
            Nodes::Single(node) => node.close(deadline).await,
            Nodes::Cluster(cluster) => {
                let nodes = cluster.primaries();
                futures_util::future::join_all(nodes.iter().map(|node| node.close(deadline))).await;
            }
        }
    }

    /// Sends commands of one slot and returns their replies, errors included.
    pub(super) async fn call(
        &self,
        slot: u16,
        commands: Commands,
        idempotency: Idempotency,
    ) -> Result<RespReplies> {
        self.start(slot, commands, idempotency, self.deadline())?.finish().await
    }

    /// The same for commands whose replies may be large.
    pub(super) async fn call_bulk(
        &self,
        slot: u16,
        commands: Commands,
        idempotency: Idempotency,
    ) -> Result<RespReplies> {
        let (deadline, connection) = (self.deadline(), CallConnection::Bulk);
        self.start_on(connection, slot, commands, idempotency, deadline)?.finish().await
    }

    /// Starts a call: sends the commands if there is an open connection with capacity.
    pub(super) fn start(
        &self,
        slot: u16,
        commands: Commands,
        idempotency: Idempotency,
        deadline: Instant,
    ) -> Result<StartedCall<'_>> {
        self.start_on(CallConnection::Shared, slot, commands, idempotency, deadline)
    }

    fn start_on(
        &self,
        connection: CallConnection,
        slot: u16,
        commands: Commands,
        idempotency: Idempotency,
        deadline: Instant,
    ) -> Result<StartedCall<'_>> {
        self.check_open()?;
        let encoded = commands.encode();
        let send = |node: &Arc<Node>| {
            connection.of(node).try_send(&encoded.bytes, encoded.len(), deadline)
        };
        let response = match &self.nodes {
            Nodes::Single(node) => send(node),
            Nodes::Cluster(cluster) => cluster.node_for_slot(slot).and_then(|node| send(&node)),
        };
        Ok(StartedCall { client: self, connection, slot, encoded, idempotency, deadline, response })
    }

    /// Sends commands that any node can answer. On a cluster, the first primary that replies is used: unreachable ones are
    /// skipped, and a stalled one affects no call in flight.
    pub(super) async fn call_any(&self, commands: Commands) -> Result<RespReplies> {
        let (encoded, deadline) = (commands.encode(), self.deadline());
        if let Nodes::Cluster(cluster) = &self.nodes {
            let mut backoff = RetryBackoff::default();
            loop {
                match cluster.query_any(&encoded, deadline).await {
                    Ok(Some(replies)) => return Ok(replies),
                    // Some errors are temporary: the call is retried as any other.
                    Ok(None) => break,
                    Err(ConnectError::Fatal(error)) => return Err(error),
                    Err(error) => {
                        self.check_open()?;
                        if !backoff.pause(deadline).await {
                            let problem = "no connection within the deadline";
                            return Err(StreamError::unavailable(problem, error));
                        }
                    }
                }
            }
        }
        let (connection, idempotency) = (CallConnection::Shared, Idempotency::Idempotent);
        let call = RetryingCall::new(self, connection, 0, encoded, idempotency, deadline);
        Box::pin(call.run(None)).await
    }

    /// Opens a dedicated connection to the node of this slot.
    pub(super) async fn open_dedicated(&self, slot: u16, deadline: Instant) -> Result<Connection> {
        let mut backoff = RetryBackoff::default();
        loop {
            self.check_open()?;
            let opened = match self.node_for_slot(slot, deadline).await {
                Ok(node) => node.open_dedicated(deadline).await,
                Err(error) => Err(error),
            };
            match opened {
                Ok(connection) => return Ok(connection),
                Err(ConnectError::Fatal(error)) => return Err(error),
                Err(error) => {
                    self.refresh_slots(None, deadline).await;
                    if !backoff.pause(deadline).await {
                        return Err(StreamError::unavailable(
                            "no connection within the deadline",
                            error,
                        ));
                    }
                }
            }
        }
    }

    /// The node that serves this slot.
    pub(super) async fn node_for_slot(
        &self,
        slot: u16,
        deadline: Instant,
    ) -> Result<Arc<Node>, ConnectError> {
        match &self.nodes {
            Nodes::Single(node) => Ok(Arc::clone(node)),
            Nodes::Cluster(cluster) => match cluster.node_for_slot(slot) {
                Some(node) => Ok(node),
                None => {
                    cluster.refresh(None, deadline).await?;
                    cluster.node_for_slot(slot).ok_or_else(|| ConnectError::SlotUnassigned { slot })
                }
            },
        }
    }

    pub(super) fn can_unblock(&self) -> bool {
        self.can_unblock.load(Ordering::Relaxed)
    }

    pub(super) fn set_can_unblock(&self, can: bool) {
        self.can_unblock.store(can, Ordering::Relaxed);
    }

    /// Unblocks the connection with this id, if it is blocked in a read.
    pub(super) async fn unblock(&self, address: &Address, connection: u64, deadline: Instant) {
        let node = match &self.nodes {
            Nodes::Single(node) => Arc::clone(node),
            Nodes::Cluster(cluster) => cluster.node(address),
        };
        let unblock = Commands::one(&["CLIENT", "UNBLOCK", &connection.to_string()]).encode();
        // If this fails, the read ends when its block time is over.
        let _ = node.send(&unblock.bytes, 1, deadline).await;
    }

    /// All known primaries.
    pub(super) fn primaries(&self) -> Vec<Arc<Node>> {
        match &self.nodes {
            Nodes::Single(node) => vec![Arc::clone(node)],
            Nodes::Cluster(cluster) => cluster.primaries(),
        }
    }

    /// Refreshes the slot map of a cluster, asking `suspect` last.
    pub(super) async fn refresh_slots(&self, suspect: Option<&Address>, deadline: Instant) {
        if let Nodes::Cluster(cluster) = &self.nodes {
            // If no node answers, the map stays as it is and the next call tries again.
            let _ = cluster.refresh(suspect, deadline).await;
        }
    }

    /// Records a `MOVED` redirection. Returns whether its address is usable.
    pub(super) fn on_moved(&self, slot: u16, address: &str) -> bool {
        let Nodes::Cluster(cluster) = &self.nodes else { return false };
        let address = cluster.redirect_address(slot, address);
        address.inspect(|address| cluster.on_moved(slot, address)).is_some()
    }

    /// Limits an operation of several calls to one deadline; `wait` is added to it.
    pub(super) async fn with_deadline<T>(
        &self,
        wait: Duration,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let limit = wait + self.call_deadline;
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            let problem =
                "no reply within the deadline, the call may have been executed".to_owned();
            Err(StreamError::Unavailable { problem, source: None })
        })
    }

    /// The node of an `ASK` redirection of this slot.
    pub(super) fn node_for_redirect(&self, slot: u16, address: &str) -> Option<Arc<Node>> {
        let Nodes::Cluster(cluster) = &self.nodes else { return None };
        Some(cluster.node(&cluster.redirect_address(slot, address)?))
    }

    /// Handles a server that is no longer the primary: reconnects or refreshes the slot map.
    pub(super) async fn on_readonly(&self, deadline: Instant) {
        match &self.nodes {
            Nodes::Single(node) => node.reset(),
            Nodes::Cluster(_) => self.refresh_slots(None, deadline).await,
        }
    }
}

/// A call whose commands were sent, if that was possible without waiting.
pub(super) struct StartedCall<'a> {
    client: &'a RedisClient,
    connection: CallConnection,
    slot: u16,
    encoded: EncodedCommands,
    idempotency: Idempotency,
    deadline: Instant,
    response: Option<ResponseFuture>,
}

impl StartedCall<'_> {
    /// Waits for the replies, errors included. Sends the commands again as far as that is safe.
    pub(super) async fn finish(self) -> Result<RespReplies> {
        let result = match self.response {
            Some(response) => Some(response.await),
            None => None,
        };
        match result {
            // The usual case: one attempt without retry state.
            Some(Ok(replies)) if !replies.may_contain_errors() => Ok(replies),
            result => {
                let Self { client, connection, slot, encoded, idempotency, deadline, .. } = self;
                let call =
                    RetryingCall::new(client, connection, slot, encoded, idempotency, deadline);
                Box::pin(call.run(result)).await
            }
        }
    }
}

/// Exponential backoff from 10 ms to 1 s.
pub(super) struct RetryBackoff(RetryTimer);

impl Default for RetryBackoff {
    fn default() -> Self {
        Self(BACKOFF.timer())
    }
}

impl RetryBackoff {
    /// Sleeps; returns `false` at once if the deadline would pass first.
    pub(super) async fn pause(&mut self, deadline: Instant) -> bool {
        let until = Instant::now() + self.0.next_delay();
        if until >= deadline {
            return false;
        }
        tokio::time::sleep_until(until).await;
        true
    }
}

/// The error of calls to a closed backend.
pub(super) fn closed() -> StreamError {
    StreamError::Unavailable { problem: "the backend was closed".to_owned(), source: None }
}
