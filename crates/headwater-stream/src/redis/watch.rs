//! Hears of leases that become free: expired keys from every primary, releases from whoever releases.
//!
//! Promises: when hints may have been lost, by a broken connection or a full buffer, the watcher is told once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::node::Node;
use super::servers::Servers;
use super::subscription::{Subscription, unavailable};
use super::{keys, notify};
use crate::error::{Result, StreamError};
use crate::leases::{HintKind, LeaseHint, LeaseWatch, WatchMode};
use crate::name::LeaseName;

/// Hints that wait to be taken.
const HINTS_MAX: usize = 1024;
/// How often the primaries are looked at anew, and how soon a broken connection is replaced.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// A watch over leases.
pub(super) struct RedisLeaseWatch {
    mode: WatchMode,
    hints: mpsc::Receiver<LeaseHint>,
    missed: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl RedisLeaseWatch {
    /// Subscribes everywhere; hints are heard from the moment this returns.
    pub(super) async fn open(servers: &Arc<Servers>, database: u32, prefix: &str) -> Result<Self> {
        servers.check_open()?;
        let deadline = servers.deadline();
        let (hints, receiver) = mpsc::channel(HINTS_MAX);
        let missed = Arc::new(AtomicBool::new(false));
        let ear = Ear {
            prefix: prefix.into(),
            expired: keys::expired_channel(database),
            released: keys::released_channel(database),
            patience: servers.call_deadline(),
            hints,
            missed: Arc::clone(&missed),
        };
        servers.owner(0, deadline).await.map_err(unavailable)?;
        let mut mode = WatchMode::All;
        let mut listeners = JoinSet::new();
        let nodes = servers.primaries();
        for (index, node) in nodes.iter().enumerate() {
            if let Err(reason) = ear.listen(&mut listeners, node, index, deadline).await? {
                mode = WatchMode::ReleasesOnly { reason };
            }
        }
        if let WatchMode::ReleasesOnly { reason } = &mode {
            warn!(%reason, "the server does not tell of expired leases, they are found by sweeping");
        }
        let task = tokio::spawn(keep_listening(Arc::clone(servers), ear, nodes, listeners));
        Ok(Self { mode, hints: receiver, missed, task })
    }
}

#[async_trait]
impl LeaseWatch for RedisLeaseWatch {
    fn mode(&self) -> &WatchMode {
        &self.mode
    }

    async fn next(&mut self) -> LeaseHint {
        if self.missed.swap(false, Ordering::AcqRel) {
            return missed();
        }
        match self.hints.recv().await {
            Some(hint) => hint,
            // The backend was closed: there is nothing more to hear.
            None => std::future::pending().await,
        }
    }
}

impl Drop for RedisLeaseWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn missed() -> LeaseHint {
    LeaseHint { lease: None, kind: HintKind::Missed }
}

/// What to listen for, and where to tell it.
#[derive(Clone)]
struct Ear {
    prefix: Arc<str>,
    expired: String,
    released: String,
    patience: Duration,
    hints: mpsc::Sender<LeaseHint>,
    missed: Arc<AtomicBool>,
}

/// Replaces broken connections and follows the cluster, until the watch is dropped or the backend closed.
async fn keep_listening(
    servers: Arc<Servers>,
    ear: Ear,
    mut nodes: Vec<Arc<Node>>,
    mut listeners: JoinSet<usize>,
) {
    let mut broken: Vec<usize> = Vec::new();
    loop {
        let pause = if broken.is_empty() { LOOK_EVERY } else { RETRY_AFTER };
        tokio::select! {
            () = servers.until_closed() => return,
            Some(ended) = listeners.join_next(), if !listeners.is_empty() => {
                ear.tell(missed());
                broken.extend(ended.ok());
                continue;
            }
            () = tokio::time::sleep(pause) => {}
        }
        let deadline = servers.deadline();
        if servers.is_cluster() {
            servers.look_around(None, deadline).await;
            let now = servers.primaries();
            let same = |a: &Arc<Node>, b: &Arc<Node>| a.address() == b.address();
            if now.len() != nodes.len() || !now.iter().all(|n| nodes.iter().any(|o| same(n, o))) {
                // Another set of primaries: begin anew everywhere.
                listeners.shutdown().await;
                ear.tell(missed());
                broken = (0..now.len()).collect();
                nodes = now;
            }
        }
        let mut still_broken = Vec::new();
        for index in broken.drain(..) {
            let Some(node) = nodes.get(index) else { continue };
            match ear.listen(&mut listeners, node, index, deadline).await {
                Ok(Ok(())) => ear.tell(missed()),
                Ok(Err(reason)) => debug!(%reason, "listening to releases only"),
                Err(error) => {
                    debug!(%error, "not listening to leases yet");
                    still_broken.push(index);
                }
            }
        }
        broken = still_broken;
    }
}

impl Ear {
    /// Subscribes at one server. The inner error says why it does not tell of expired keys.
    async fn listen(
        &self,
        listeners: &mut JoinSet<usize>,
        node: &Arc<Node>,
        index: usize,
        deadline: Instant,
    ) -> Result<Result<(), String>> {
        let prepared = notify::prepare(node, deadline).await;
        let mut subscription = Subscription::open(node, self.patience, deadline).await?;
        let mut expiry = Ok(());
        // One node is enough to hear of releases: a cluster passes them on to all.
        if index == 0 {
            let added = subscription.add(&self.released, deadline).await?;
            added.map_err(|reason| StreamError::Denied { problem: reason })?;
        }
        if let Err(reason) = subscription.add(&self.expired, deadline).await? {
            expiry = Err(reason);
        }
        let ear = self.clone();
        listeners.spawn(async move {
            let tell = |channel: &[u8], key: &str| {
                ear.read(channel, key).into_iter().for_each(|hint| ear.tell(hint));
            };
            subscription.hear(tell).await;
            index
        });
        Ok(prepared.and(expiry))
    }

    fn read(&self, channel: &[u8], key: &str) -> Option<LeaseHint> {
        let kind = if channel == self.released.as_bytes() {
            HintKind::Released
        } else {
            HintKind::Expired
        };
        // Other keys expire, too; the records of leases do so long after their leases.
        let is_lease = key.starts_with(&*self.prefix) && !keys::is_epoch(key);
        let lease = is_lease.then(|| LeaseName::new(key).ok()).flatten();
        lease.map(|lease| LeaseHint { lease: Some(lease), kind })
    }

    fn tell(&self, hint: LeaseHint) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.hints.try_send(hint) {
            self.missed.store(true, Ordering::Release);
        }
    }
}
