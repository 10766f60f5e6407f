//! The client of a Redis deployment: finds the node for a slot and sends commands to it.
//!
//! Upstream: every call of this backend. Downstream: `retry` re-sends; `node` and `cluster` hold the connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::cluster::{ClusterNodes, NODE_QUERY_TIMEOUT};
use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::keys;
use super::multiplexed::MultiplexedConnection;
use super::node::{ConnectionSettings, Node, NodeAddress};
use super::reply::RespReplies;
use super::retry::RetryingCall;
use super::sentinel::Sentinels;
use super::url::{Address, Topology};
use crate::backoff::{Backoff, RetryTimer};
use crate::error::{Result, StreamError};

const BACKOFF: Backoff = Backoff::doubling(Duration::from_millis(10), Duration::from_secs(1));

/// Whether a call may be re-sent after a lost reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idempotency {
    /// Idempotent: may be re-sent after a lost reply.
    Idempotent,
    /// Not re-sent after a lost reply: the call fails and the caller decides.
    AtMostOnce,
}

/// The client of one server, a Sentinel service or a cluster.
pub(super) struct RedisClient {
    nodes: Nodes,
    database: u32,
    call_deadline: Duration,
    closed: watch::Sender<bool>,
    /// The same value, cheaper to read on every call.
    is_closed: AtomicBool,
    /// Whether `CLIENT UNBLOCK` is permitted.
    can_unblock: AtomicBool,
}

enum Nodes {
    Single(Arc<Node>),
    Cluster(ClusterNodes),
}

impl RedisClient {
    pub(super) fn new(
        topology: &Topology,
        settings: ConnectionSettings,
        call_deadline: Duration,
    ) -> Self {
        let database = settings.params.database;
        let nodes = match topology.clone() {
            Topology::Single(address) => {
                Nodes::Single(Arc::new(Node::new(NodeAddress::Fixed(address), settings)))
            }
            Topology::Sentinel { sentinels, service } => {
                let target = NodeAddress::Sentinel(Sentinels::new(sentinels, service));
                Nodes::Single(Arc::new(Node::new(target, settings)))
            }
            Topology::Cluster { seeds } => Nodes::Cluster(ClusterNodes::new(seeds, settings)),
        };
        Self {
            nodes,
            database,
            call_deadline,
            closed: watch::Sender::new(false),
            is_closed: false.into(),
            can_unblock: true.into(),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.nodes, Nodes::Cluster(_))
    }

    /// The slot of a key; always 0 without a cluster.
    pub(super) fn slot(&self, key: &str) -> u16 {
        if self.is_cluster() { keys::slot(key) } else { 0 }
    }

    pub(super) fn database(&self) -> u32 {
        self.database
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
        self.check_open()?;
        let (encoded, deadline) = (commands.encode(), self.deadline());
        // The usual case: one attempt without retry state.
        let send = |node: &Node| node.try_send(&encoded.bytes, encoded.len(), deadline);
        let response = match &self.nodes {
            Nodes::Single(node) => send(node),
            Nodes::Cluster(cluster) => cluster.node_for_slot(slot).and_then(|node| send(&node)),
        };
        let result = match response {
            Some(response) => Some(response.await),
            None => None,
        };
        match result {
            Some(Ok(replies)) if !replies.may_contain_errors() => Ok(replies),
            result => {
                Box::pin(RetryingCall::new(self, slot, encoded, idempotency, deadline).run(result))
                    .await
            }
        }
    }

    /// Sends commands that any node can answer. On a cluster, the first primary that replies is used: unreachable ones are
    /// skipped.
    pub(super) async fn call_any(&self, commands: Commands) -> Result<RespReplies> {
        let (encoded, deadline) = (commands.encode(), self.deadline());
        if let Nodes::Cluster(cluster) = &self.nodes
            && self.node_for_slot(0, deadline).await.is_ok()
        {
            for node in cluster.primaries() {
                let soon = deadline.min(Instant::now() + NODE_QUERY_TIMEOUT);
                match node.send(&encoded.bytes, encoded.len(), soon).await {
                    Ok(Ok(replies)) if !replies.may_contain_errors() => return Ok(replies),
                    _ => {}
                }
            }
        }
        let call = RetryingCall::new(self, 0, encoded, Idempotency::Idempotent, deadline);
        Box::pin(call.run(None)).await
    }

    /// The shared connection to the node of this slot, if it exists.
    pub(super) fn connection(&self, slot: u16) -> Option<MultiplexedConnection> {
        match &self.nodes {
            Nodes::Single(node) => node.connection(),
            Nodes::Cluster(cluster) => cluster.node_for_slot(slot)?.connection(),
        }
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
        match (&self.nodes, Address::parse(address, 0)) {
            (Nodes::Cluster(cluster), Ok(address)) => {
                cluster.on_moved(slot, &address);
                true
            }
            _ => false,
        }
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

    /// The node of an `ASK` redirection.
    pub(super) fn node_for_redirect(&self, address: &str) -> Option<Arc<Node>> {
        match (&self.nodes, Address::parse(address, 0)) {
            (Nodes::Cluster(cluster), Ok(address)) => Some(cluster.node(&address)),
            _ => None,
        }
    }

    /// Handles a server that is no longer the primary: reconnects or refreshes the slot map.
    pub(super) async fn on_readonly(&self, deadline: Instant) {
        match &self.nodes {
            Nodes::Single(node) => node.reset(),
            Nodes::Cluster(_) => self.refresh_slots(None, deadline).await,
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
