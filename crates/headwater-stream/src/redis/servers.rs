//! The servers of a backend, and which of them is the right one for a slot.
//!
//! Upstream: every call. Downstream: `call` sends and sends again; `node` and `cluster` know where to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::call::Call;
use super::cluster::{ASK_MAX, Cluster};
use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::keys;
use super::link::Link;
use super::node::{Manners, Node, Target};
use super::reply::Replies;
use super::sentinel::Sentinels;
use super::url::{Address, Place};
use crate::error::{Result, StreamError};

const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// Whether a call may happen twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Twice is as good as once.
    Repeatable,
    /// Twice is not: after a lost reply, the caller decides.
    Once,
}

/// All servers of a backend.
pub(super) struct Servers {
    topology: Topology,
    database: u32,
    call_deadline: Duration,
    closed: watch::Sender<bool>,
    /// The same, for the many calls that only look.
    is_closed: AtomicBool,
    /// Whether waits at the server can be ended early.
    can_unblock: AtomicBool,
}

enum Topology {
    One(Arc<Node>),
    Cluster(Cluster),
}

impl Servers {
    pub(super) fn new(place: &Place, manners: Manners, call_deadline: Duration) -> Self {
        let database = manners.access.database;
        let topology = match place.clone() {
            Place::Single(address) => {
                Topology::One(Arc::new(Node::new(Target::Fixed(address), manners)))
            }
            Place::Sentinel { sentinels, service } => {
                let target = Target::Primary(Sentinels::new(sentinels, service));
                Topology::One(Arc::new(Node::new(target, manners)))
            }
            Place::Cluster { seeds } => Topology::Cluster(Cluster::new(seeds, manners)),
        };
        Self {
            topology,
            database,
            call_deadline,
            closed: watch::Sender::new(false),
            is_closed: false.into(),
            can_unblock: true.into(),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.topology, Topology::Cluster(_))
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

    /// When a call that begins now has to end.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.call_deadline
    }

    /// Refuses calls to a backend that was closed.
    pub(super) fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::Acquire) { Err(closed()) } else { Ok(()) }
    }

    /// Returns when the backend is closed. Cancel-safe.
    pub(super) async fn until_closed(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Ends all shared links after what is under way.
    pub(super) async fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.closed.send_replace(true);
        let deadline = self.deadline();
        match &self.topology {
            Topology::One(node) => node.close(deadline).await,
            Topology::Cluster(cluster) => {
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
        effect: Effect,
    ) -> Result<Replies> {
        self.check_open()?;
        let (packed, deadline) = (commands.pack(), self.deadline());
        // The usual case, without any bookkeeping.
        let send = |node: &Node| node.try_send(&packed.bytes, packed.len(), deadline);
        let answer = match &self.topology {
            Topology::One(node) => send(node),
            Topology::Cluster(cluster) => cluster.owner(slot).and_then(|node| send(&node)),
        };
        let outcome = match answer {
            Some(answer) => Some(answer.await),
            None => None,
        };
        match outcome {
            Some(Ok(replies)) if !replies.may_refuse() => Ok(replies),
            outcome => Box::pin(Call::new(self, slot, packed, effect, deadline).run(outcome)).await,
        }
    }

    /// Sends commands that any server can answer. Of a cluster, the first primary that does: one that is away keeps nobody
    /// from the others.
    pub(super) async fn call_any(&self, commands: Commands) -> Result<Replies> {
        let (packed, deadline) = (commands.pack(), self.deadline());
        if let Topology::Cluster(cluster) = &self.topology
            && self.owner(0, deadline).await.is_ok()
        {
            for node in cluster.primaries() {
                let soon = deadline.min(Instant::now() + ASK_MAX);
                match node.send(&packed.bytes, packed.len(), soon).await {
                    Ok(Ok(replies)) if !replies.may_refuse() => return Ok(replies),
                    _ => {}
                }
            }
        }
        let call = Call::new(self, 0, packed, Effect::Repeatable, deadline);
        Box::pin(call.run(None)).await
    }

    /// The shared link to the server of this slot, if there is one already.
    pub(super) fn link(&self, slot: u16) -> Option<Link> {
        match &self.topology {
            Topology::One(node) => node.link(),
            Topology::Cluster(cluster) => cluster.owner(slot)?.link(),
        }
    }

    /// A connection of one's own to the server of this slot, by the deadline.
    pub(super) async fn dedicated(&self, slot: u16, deadline: Instant) -> Result<Connection> {
        let mut backoff = Backoff::default();
        loop {
            self.check_open()?;
            let opened = match self.owner(slot, deadline).await {
                Ok(node) => node.dedicated(deadline).await,
                Err(error) => Err(error),
            };
            match opened {
                Ok(connection) => return Ok(connection),
                Err(ConnectError::Refused(error)) => return Err(error),
                Err(error) => {
                    self.look_around(None, deadline).await;
                    if !backoff.pause(deadline).await {
                        return Err(StreamError::unavailable("no connection in time", error));
                    }
                }
            }
        }
    }

    /// The server of this slot.
    pub(super) async fn owner(
        &self,
        slot: u16,
        deadline: Instant,
    ) -> Result<Arc<Node>, ConnectError> {
        match &self.topology {
            Topology::One(node) => Ok(Arc::clone(node)),
            Topology::Cluster(cluster) => match cluster.owner(slot) {
                Some(node) => Ok(node),
                None => {
                    cluster.refresh(None, deadline).await?;
                    cluster.owner(slot).ok_or_else(|| ConnectError::Nobody { slot })
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

    /// Ends the wait of the connection with this number, if it still waits.
    pub(super) async fn unblock(&self, address: &Address, connection: u64, deadline: Instant) {
        let node = match &self.topology {
            Topology::One(node) => Arc::clone(node),
            Topology::Cluster(cluster) => cluster.node(address),
        };
        let unblock = Commands::one(&["CLIENT", "UNBLOCK", &connection.to_string()]).pack();
        // If this fails, the wait is over when its time is.
        let _ = node.send(&unblock.bytes, 1, deadline).await;
    }

    /// All primaries, as far as is known.
    pub(super) fn primaries(&self) -> Vec<Arc<Node>> {
        match &self.topology {
            Topology::One(node) => vec![Arc::clone(node)],
            Topology::Cluster(cluster) => cluster.primaries(),
        }
    }

    /// Asks who owns what, after something went wrong with `suspect`.
    pub(super) async fn look_around(&self, suspect: Option<&Address>, deadline: Instant) {
        if let Topology::Cluster(cluster) = &self.topology {
            // If nobody can tell, the map stays as it is, and the next call asks again.
            let _ = cluster.refresh(suspect, deadline).await;
        }
    }

    /// Learns that the slot is elsewhere. Returns whether it is known where.
    pub(super) fn moved(&self, slot: u16, address: &str) -> bool {
        match (&self.topology, Address::parse(address, 0)) {
            (Topology::Cluster(cluster), Ok(address)) => {
                cluster.moved(slot, &address);
                true
            }
            _ => false,
        }
    }

    /// Keeps the deadline of a call that is made of several; `wait` comes on top.
    pub(super) async fn in_time<T>(
        &self,
        wait: Duration,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let limit = wait + self.call_deadline;
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            let problem = "no answer within the deadline, the call may have happened".to_owned();
            Err(StreamError::Unavailable { problem, source: None })
        })
    }

    /// The node at this address, for one call that a server asks us to make there.
    pub(super) fn elsewhere(&self, address: &str) -> Option<Arc<Node>> {
        match (&self.topology, Address::parse(address, 0)) {
            (Topology::Cluster(cluster), Ok(address)) => Some(cluster.node(&address)),
            _ => None,
        }
    }

    /// Learns that the server is no longer the primary.
    pub(super) async fn demoted(&self, deadline: Instant) {
        match &self.topology {
            Topology::One(node) => node.reset(),
            Topology::Cluster(_) => self.look_around(None, deadline).await,
        }
    }
}

/// Pauses that grow.
pub(super) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(BACKOFF_MIN)
    }
}

impl Backoff {
    /// Pauses; `false` if the deadline would come first.
    pub(super) async fn pause(&mut self, deadline: Instant) -> bool {
        let until = Instant::now() + self.0;
        if until >= deadline {
            return false;
        }
        self.0 = (self.0 * 2).min(BACKOFF_MAX);
        tokio::time::sleep_until(until).await;
        true
    }
}

/// The error of every call to a backend that was closed.
pub(super) fn closed() -> StreamError {
    StreamError::Unavailable { problem: "the backend was closed".to_owned(), source: None }
}
