//! The coordinator: all groups this process is a member of.
//!
//! Upstream: `consumer` joins and leaves. Downstream: one `session` per group, and one watch over all leases.
//! Guarantees: it starts no task before the first join. Renewing takes one round trip per group and polling two,
//! whatever the number of topics. A joined subscription outlives the queue. When the last one has left, or was
//! dropped and has left in the background, no task remains.
//! Refuses a second subscription to the same topic in the same group: raise `concurrency` instead. Members with ids of
//! their own are separate members, even in one process.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use headwater_stream::{Backend, GroupName, LeaseEvent, LeaseEventKind};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use super::rebalance_listener::JoinRequest;
use super::session::{GroupContext, GroupSession, MembershipCommand};
use crate::config::QueueConfig;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::topic::TopicName;

/// Buffered hints per session. A session that lags polls all its subscriptions.
const HINTS_MAX: usize = 1024;
/// Backoff before the lease watch is reopened.
const WATCH_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Attempts to join when the session is just ending.
const JOINS_MAX: usize = 16;

/// All groups this process is a member of.
pub(crate) struct Coordinator {
    backend: Arc<dyn Backend>,
    config: QueueConfig,
    serials: AtomicU64,
    state: Mutex<CoordinatorState>,
}

/// The running sessions and their shared lease watch.
#[derive(Default)]
struct CoordinatorState {
    lease_events: Weak<SharedLeaseWatch>,
    sessions: HashMap<SessionKey, mpsc::UnboundedSender<MembershipCommand>>,
    /// For tests that simulate the death of the process.
    #[cfg(test)]
    tasks: Vec<tokio::task::AbortHandle>,
}

/// A group, and the static member id if configured.
type SessionKey = (GroupName, Option<String>);

/// A subscription's membership in a group. On drop, it leaves in the background.
pub(crate) struct MembershipHandle {
    topic: TopicName,
    serial: u64,
    /// Unbounded: a subscription sends at most two commands.
    commands: mpsc::UnboundedSender<MembershipCommand>,
    left: bool,
}

impl fmt::Debug for MembershipHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MembershipHandle").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl Coordinator {
    /// Creates a coordinator without sessions.
    pub(crate) fn new(backend: Arc<dyn Backend>, config: QueueConfig) -> Self {
        Self { backend, config, serials: AtomicU64::new(0), state: Mutex::default() }
    }

    /// Joins a group. Returns when the subscription is registered, or when it waits for its member id to become free.
    /// The listener is called from then on.
    pub(crate) async fn join(&self, request: JoinRequest) -> Result<MembershipHandle> {
        let serial = self.serials.fetch_add(1, Ordering::Relaxed);
        let key = (request.group.clone(), request.member.clone());
        for _ in 0..JOINS_MAX {
            let commands = self.session(&key);
            let (reply, result) = oneshot::channel();
            // Created before the first await, so that a cancelled join leaves.
            let membership = MembershipHandle {
                topic: request.topic.name.clone(),
                serial,
                commands: commands.clone(),
                left: false,
            };
            if commands
                .send(MembershipCommand::Join { serial, request: request.clone(), reply })
                .is_ok()
                && let Ok(result) = result.await
            {
                return result.map(|()| membership);
            }
            // The session has just ended: start a new one.
        }
        Err(QueueError::Stopped { what: format!("group `{}`", request.group) })
    }

    /// The session of a group; starts one if needed.
    fn session(&self, key: &SessionKey) -> mpsc::UnboundedSender<MembershipCommand> {
        let mut state = self.lock();
        if let Some(commands) = state.sessions.get(key).filter(|open| !open.is_closed()) {
            return commands.clone();
        }
        // Removes sessions that have ended.
        state.sessions.retain(|_, open| !open.is_closed());
        let lease_events = state
            .lease_events
            .upgrade()
            .unwrap_or_else(|| SharedLeaseWatch::open(Arc::clone(&self.backend)));
        state.lease_events = Arc::downgrade(&lease_events);
        let (commands, receiver) = mpsc::unbounded_channel();
        let context = GroupContext {
            backend: Arc::clone(&self.backend),
            config: self.config.clone(),
            group: key.0.clone(),
            member: key.1.clone(),
        };
        let session = GroupSession {
            context: Arc::new(context),
            commands: receiver,
            hints: lease_events.hints.subscribe(),
            _lease_events: lease_events,
            subscriptions: HashMap::new(),
            event_targets: HashMap::new(),
            queued_joins: Vec::new(),
            cleanup: JoinSet::new(),
        };
        let _task = tokio::spawn(session.run());
        #[cfg(test)]
        state.tasks.push(_task.abort_handle());
        state.sessions.insert(key.clone(), commands.clone());
        commands
    }

    /// Aborts all tasks, as if the process were killed.
    #[cfg(test)]
    pub(crate) fn die(&self) {
        self.lock().tasks.drain(..).for_each(|task| task.abort());
    }

    fn lock(&self) -> MutexGuard<'_, CoordinatorState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

/// One watch over all leases, shared by all sessions. Closed when the last session has ended.
pub(super) struct SharedLeaseWatch {
    hints: broadcast::Sender<LeaseEvent>,
    _task: AbortOnDropHandle<()>,
}

impl SharedLeaseWatch {
    fn open(backend: Arc<dyn Backend>) -> Arc<Self> {
        let (hints, _) = broadcast::channel(HINTS_MAX);
        let task = tokio::spawn(listen(backend, hints.clone()));
        Arc::new(Self { hints, _task: AbortOnDropHandle::new(task) })
    }
}

/// Broadcasts hints to all sessions.
async fn listen(backend: Arc<dyn Backend>, hints: broadcast::Sender<LeaseEvent>) {
    loop {
        let mut watch = match backend.watch(keys::LEASE_PREFIX).await {
            Ok(watch) => watch,
            Err(error) => {
                warn!(%error, "watching leases failed, retrying; groups are polled meanwhile");
                sleep(WATCH_RETRY_AFTER).await;
                continue;
            }
        };
        debug!(mode = ?watch.mode(), "watching leases");
        // Covers events from before the watch was open.
        let mut hint = LeaseEvent { lease: None, kind: LeaseEventKind::Lagged };
        loop {
            // Fails only while no session is subscribed.
            let _ = hints.send(hint);
            hint = watch.next().await;
        }
    }
}

impl MembershipHandle {
    /// Revokes all partitions of this subscription (`on_revoke` for each) and leaves the group. Returns when other
    /// members can take over.
    pub(crate) async fn leave(mut self) {
        self.left = true;
        let (done, left) = oneshot::channel();
        self.send_leave(Some(done));
        // Fails only if the session has ended.
        let _ = left.await;
    }

    fn send_leave(&self, done: Option<oneshot::Sender<()>>) {
        let (topic, serial) = (self.topic.clone(), self.serial);
        let _ = self.commands.send(MembershipCommand::Leave { topic, serial, done });
    }
}

impl Drop for MembershipHandle {
    fn drop(&mut self) {
        if !self.left {
            self.send_leave(None);
        }
    }
}
