//! Hears of leases that become free: expired keys from every primary, releases from whoever releases.
//!
//! Promises: when hints may have been lost, by a broken connection or a full buffer, the watcher is told once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};

use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::error::Failure;
use super::node::Node;
use super::reply::{Replies, Value};
use super::servers::Servers;
use super::{keys, notify};
use crate::error::{Result, StreamError};
use crate::leases::{HintKind, LeaseHint, LeaseWatch, WatchMode};
use crate::name::LeaseName;

/// Hints that wait to be taken.
const HINTS_MAX: usize = 1024;
/// A server that is silent for this long is asked whether it is there.
const PING_EVERY: Duration = Duration::from_secs(5);
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
        let mut connection = node.dedicated(true, deadline).await.map_err(unavailable)?;
        let mut expiry = Ok(());
        // One node is enough to hear of releases: a cluster passes them on to all.
        if index == 0 {
            subscribe(&mut connection, &self.released, deadline)
                .await?
                .map_err(|reason| StreamError::Denied { problem: reason })?;
        }
        if let Err(reason) = subscribe(&mut connection, &self.expired, deadline).await? {
            expiry = Err(reason);
        }
        let ear = self.clone();
        listeners.spawn(async move {
            ear.hear(connection).await;
            index
        });
        Ok(prepared.and(expiry))
    }

    /// Listens until the connection breaks.
    async fn hear(&self, mut connection: Connection) {
        let mut pinged = false;
        connection.start(&[], 1);
        loop {
            let patience = if pinged { self.patience } else { PING_EVERY };
            match timeout(patience, connection.finish()).await {
                Ok(Ok(replies)) => {
                    pinged = false;
                    if let Ok(Some(hint)) = self.read(&replies) {
                        self.tell(hint);
                    }
                    connection.start(&[], 1);
                }
                Ok(Err(error)) => {
                    debug!(%error, "a connection that listens to leases broke");
                    return;
                }
                Err(_) if pinged => return,
                Err(_) => {
                    connection.push(&Commands::one(&["PING"]).pack().bytes);
                    pinged = true;
                }
            }
        }
    }

    fn read(&self, replies: &Replies) -> Result<Option<LeaseHint>, Failure> {
        let mut cursor = replies.cursor();
        if cursor.array()? != 3 || cursor.text()? != b"message" {
            return Ok(None);
        }
        let (channel, key) = (cursor.text()?, cursor.text()?);
        let kind = if channel == self.released.as_bytes() {
            HintKind::Released
        } else {
            HintKind::Expired
        };
        let name = std::str::from_utf8(key).ok().filter(|name| name.starts_with(&*self.prefix));
        // Other keys expire, too; the records of leases do so long after their leases.
        let lease = name.filter(|name| !keys::is_epoch(name)).and_then(|n| LeaseName::new(n).ok());
        Ok(lease.map(|lease| LeaseHint { lease: Some(lease), kind }))
    }

    fn tell(&self, hint: LeaseHint) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.hints.try_send(hint) {
            self.missed.store(true, Ordering::Release);
        }
    }
}

/// Subscribes; the inner error says why the server does not allow it.
async fn subscribe(
    connection: &mut Connection,
    channel: &str,
    deadline: Instant,
) -> Result<Result<(), String>> {
    let subscribe = Commands::one(&["SUBSCRIBE", channel]).pack();
    let replies = timeout_at(deadline, connection.ask(&subscribe))
        .await
        .map_err(|_| silent())?
        .map_err(|error| StreamError::unavailable("no subscription in time", error))?;
    match replies.cursor().value() {
        Ok(Value::Array(_)) => Ok(Ok(())),
        Ok(Value::Error(text)) => Ok(Err(String::from_utf8_lossy(text).into_owned())),
        _ => Err(StreamError::Protocol { problem: "no answer to SUBSCRIBE".to_owned() }),
    }
}

fn silent() -> StreamError {
    StreamError::Unavailable { problem: "no subscription in time".to_owned(), source: None }
}

fn unavailable(error: ConnectError) -> StreamError {
    match error {
        ConnectError::Refused(error) => error,
        error => StreamError::unavailable("no connection in time", error),
    }
}
