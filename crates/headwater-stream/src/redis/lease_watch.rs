//! Watches leases that become free: expired keys on every primary, and releases published by their holders.
//!
//! Guarantees: when events may have been lost, because a connection broke or the buffer was full, the watcher gets one
//! `Lagged` event.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use super::client::RedisClient;
use super::connection::LivenessCheck;
use super::keys::Keyspace;
use super::keyspace_notifications;
use super::node::Node;
use super::pubsub::{self, PubSubConnection, unavailable};
use crate::error::{Result, StreamError};
use crate::leases::{LeaseEvent, LeaseEventKind, LeaseWatch, WatchMode};

/// Capacity of the event buffer.
const EVENTS_MAX: usize = 1024;
/// How often the primaries of a cluster are refreshed.
const REFRESH_EVERY: Duration = Duration::from_secs(5);
/// Pause before a broken connection is replaced.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// A watch on leases.
pub(super) struct RedisLeaseWatch {
    mode: WatchMode,
    events: broadcast::Receiver<LeaseEvent>,
    _task: AbortOnDropHandle<()>,
}

impl RedisLeaseWatch {
    /// Subscribes on every primary that can be reached; events are received from the moment this returns. Fails if there is
    /// none.
    pub(super) async fn open(client: &Arc<RedisClient>, prefix: &str) -> Result<Self> {
        client.check_open()?;
        let deadline = client.deadline();
        let (events, receiver) = broadcast::channel(EVENTS_MAX);
        let listener = LeaseEventListener {
            prefix: prefix.into(),
            keys: Arc::clone(client.keys()),
            liveness: pubsub::liveness(client.call_deadline()),
            configures_notifications: client.configures_notifications(),
            events,
        };
        client.node_for_slot(0, deadline).await.map_err(unavailable)?;
        let mut mode = WatchMode::All;
        let mut subscriptions = JoinSet::new();
        let nodes = client.primaries();
        let (mut broken, mut releases) = (Vec::new(), None);
        let mut failure = None;
        for (index, node) in nodes.iter().enumerate() {
            let is_first = releases.is_none();
            // One each: a server that does not answer must not use up the time of the others.
            let deadline = client.deadline();
            match listener.subscribe(&mut subscriptions, node, index, is_first, deadline).await {
                Ok(subscribed) => {
                    releases = releases.or(Some(index));
                    if let Err(reason) = subscribed {
                        mode = WatchMode::ReleasesOnly { reason };
                    }
                }
                Err(error @ StreamError::Unavailable { .. }) => {
                    debug!(%error, "not subscribed to lease events, retrying");
                    broken.push(index);
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        if let (Some(error), None) = (failure, releases) {
            return Err(error);
        }
        if let WatchMode::ReleasesOnly { reason } = &mode {
            warn!(
                %reason,
                "the server sends no notifications about expired leases; the sweep finds them"
            );
        }
        let watched = WatchedNodes { nodes, subscriptions, broken, releases };
        let task = tokio::spawn(watched.run(Arc::clone(client), listener));
        Ok(Self { mode, events: receiver, _task: AbortOnDropHandle::new(task) })
    }
}

#[async_trait]
impl LeaseWatch for RedisLeaseWatch {
    fn mode(&self) -> &WatchMode {
        &self.mode
    }

    async fn next(&mut self) -> LeaseEvent {
        match self.events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(_)) => lagged(),
            // The backend was closed: there will be no more events.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

fn lagged() -> LeaseEvent {
    LeaseEvent { lease: None, kind: LeaseEventKind::Lagged }
}

/// Turns pub/sub messages into lease events.
#[derive(Clone)]
struct LeaseEventListener {
    /// What the names of the leases begin with.
    prefix: Arc<str>,
    keys: Arc<Keyspace>,
    liveness: LivenessCheck,
    configures_notifications: bool,
    events: broadcast::Sender<LeaseEvent>,
}

/// The primaries and the subscriptions on them, by index.
struct WatchedNodes {
    nodes: Vec<Arc<Node>>,
    subscriptions: JoinSet<usize>,
    /// Those without a subscription.
    broken: Vec<usize>,
    /// The one that also reports releases: a cluster forwards them to all nodes.
    releases: Option<usize>,
}

impl WatchedNodes {
    /// Replaces broken connections and follows the primaries of a cluster, until the watch is dropped or the backend closed.
    async fn run(mut self, client: Arc<RedisClient>, listener: LeaseEventListener) {
        loop {
            let pause = if self.broken.is_empty() { REFRESH_EVERY } else { RETRY_AFTER };
            tokio::select! {
                () = client.until_closed() => return,
                Some(ended) = self.subscriptions.join_next(), if !self.subscriptions.is_empty() => {
                    listener.publish(lagged());
                    self.broken.extend(ended.ok());
                    continue;
                }
                () = tokio::time::sleep(pause) => {}
            }
            if client.is_cluster() {
                client.refresh_slots(None, client.deadline()).await;
                let now = client.primaries();
                let same = |a: &Arc<Node>, b: &Arc<Node>| a.address() == b.address();
                let is_known = |node: &Arc<Node>| self.nodes.iter().any(|known| same(node, known));
                let is_releases_broken =
                    self.releases.is_some_and(|index| self.broken.contains(&index));
                if now.len() != self.nodes.len() || !now.iter().all(is_known) || is_releases_broken
                {
                    // The set of primaries changed, or another one is to report releases: subscribe again on all of them.
                    self.subscriptions.shutdown().await;
                    listener.publish(lagged());
                    self.broken = (0..now.len()).collect();
                    self.releases = None;
                    self.nodes = now;
                }
            }
            let mut still_broken = Vec::new();
            for index in std::mem::take(&mut self.broken) {
                let Some(node) = self.nodes.get(index) else { continue };
                let releases = self.releases.is_none_or(|known| known == index);
                let subscriptions = &mut self.subscriptions;
                let deadline = client.deadline();
                match listener.subscribe(subscriptions, node, index, releases, deadline).await {
                    Ok(subscribed) => {
                        listener.publish(lagged());
                        self.releases = self.releases.or(Some(index));
                        if let Err(reason) = subscribed {
                            debug!(%reason, "subscribed to lease releases only");
                        }
                    }
                    Err(error) => {
                        debug!(%error, "not subscribed to lease events, retrying");
                        still_broken.push(index);
                    }
                }
            }
            self.broken = still_broken;
        }
    }
}

impl LeaseEventListener {
    /// Subscribes on one server. The inner error is the reason why it does not notify about expired keys.
    async fn subscribe(
        &self,
        subscriptions: &mut JoinSet<usize>,
        node: &Arc<Node>,
        index: usize,
        releases: bool,
        deadline: Instant,
    ) -> Result<Result<(), String>> {
        let enabled =
            keyspace_notifications::enable(node, self.configures_notifications, deadline).await;
        let mut subscription = PubSubConnection::open(node, self.liveness, deadline).await?;
        let mut expiry = Ok(());
        if releases {
            let added = subscription.subscribe(self.keys.released_channel(), deadline).await?;
            added.map_err(|reason| StreamError::Denied { problem: reason })?;
        }
        let expired = self.keys.expired_channel();
        if let Err(reason) = subscription.subscribe(expired, deadline).await? {
            expiry = Err(reason);
        }
        let listener = self.clone();
        subscriptions.spawn(async move {
            let on_message = |channel: &[u8], key: &str| {
                listener.event(channel, key).into_iter().for_each(|event| listener.publish(event));
            };
            subscription.run(on_message).await;
            index
        });
        Ok(enabled.and(expiry))
    }

    fn event(&self, channel: &[u8], key: &str) -> Option<LeaseEvent> {
        let kind = if channel == self.keys.released_channel().as_bytes() {
            LeaseEventKind::Released
        } else {
            LeaseEventKind::Expired
        };
        // Ignore other keys, and epoch records, which expire long after their leases.
        let lease = self.keys.lease_of(key)?;
        let is_watched = lease.as_str().starts_with(&*self.prefix);
        is_watched.then_some(LeaseEvent { lease: Some(lease), kind })
    }

    fn publish(&self, event: LeaseEvent) {
        // Fails if the watch was dropped.
        let _ = self.events.send(event);
    }
}
