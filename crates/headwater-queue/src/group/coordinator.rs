//! The coordinator: all groups this process takes part in.
//!
//! Upstream: `consumer` joins and leaves. Downstream: one `session` per group, and one watch over all leases.
//! Promises: it costs nothing until somebody joins; a process renews its leases with one round trip per group, and looks
//! at a group with two, whatever the number of topics. A subscription needs the queue no more once it has joined. When
//! the last one has left, or was dropped and has left in the background, no task is left.
//! Refuses a second subscription to the same topic in the same group: raise `concurrency` instead. Members with ids of
//! their own are different members, also in one process.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use headwater_stream::{Backend, GroupName, HintKind, LeaseHint};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;
use tracing::{debug, warn};

use super::seam::Joining;
use super::session::{Command, Place, Session};
use crate::config::QueueConfig;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::topic::TopicName;

/// Hints that wait for a session. One that falls behind looks at everything.
const HINTS_MAX: usize = 1024;
/// How long to wait before the watch is opened again.
const WATCH_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How often a wish to join is repeated that met a session just ending.
const JOINS_MAX: usize = 16;

/// All groups this process takes part in.
pub(crate) struct Coordinator {
    backend: Arc<dyn Backend>,
    config: QueueConfig,
    serials: AtomicU64,
    running: Mutex<Running>,
}

/// What runs.
#[derive(Default)]
struct Running {
    ears: Weak<Ears>,
    sessions: HashMap<SessionKey, mpsc::UnboundedSender<Command>>,
    /// So that tests can have a process die.
    #[cfg(test)]
    tasks: Vec<tokio::task::AbortHandle>,
}

/// A group, and the id of a member that has one of its own.
type SessionKey = (GroupName, Option<String>);

/// A subscription's part in a group. Dropped, it leaves in the background.
pub(crate) struct Membership {
    topic: TopicName,
    serial: u64,
    /// Two commands for each subscription at most, so it needs no bound of its own.
    commands: mpsc::UnboundedSender<Command>,
    left: bool,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl Coordinator {
    /// A coordinator that does nothing yet.
    pub(crate) fn new(backend: Arc<dyn Backend>, config: QueueConfig) -> Self {
        Self { backend, config, serials: AtomicU64::new(0), running: Mutex::default() }
    }

    /// Takes part in a group: returns when others know of it, or when it waits for its member id to become free.
    /// From then on the workplace is told what to work on.
    pub(crate) async fn join(&self, joining: Joining) -> Result<Membership> {
        let serial = self.serials.fetch_add(1, Ordering::Relaxed);
        let key = (joining.group.clone(), joining.member.clone());
        for _ in 0..JOINS_MAX {
            let commands = self.session(&key);
            let (answer, answered) = oneshot::channel();
            // Before the first await: a caller that goes away leaves nothing behind.
            let membership = Membership {
                topic: joining.topic.name.clone(),
                serial,
                commands: commands.clone(),
                left: false,
            };
            if commands.send(Command::Join { serial, joining: joining.clone(), answer }).is_ok()
                && let Ok(result) = answered.await
            {
                return result.map(|()| membership);
            }
            // The session ended at this moment; the next one is new.
        }
        Err(QueueError::Stopped { what: format!("group `{}`", joining.group) })
    }

    /// The session of a group, started if there is none.
    fn session(&self, key: &SessionKey) -> mpsc::UnboundedSender<Command> {
        let mut running = self.lock();
        if let Some(commands) = running.sessions.get(key).filter(|open| !open.is_closed()) {
            return commands.clone();
        }
        // Those that ended by themselves are forgotten here.
        running.sessions.retain(|_, open| !open.is_closed());
        let ears = running.ears.upgrade().unwrap_or_else(|| Ears::open(Arc::clone(&self.backend)));
        running.ears = Arc::downgrade(&ears);
        let (commands, receiver) = mpsc::unbounded_channel();
        let place = Place {
            backend: Arc::clone(&self.backend),
            config: self.config.clone(),
            group: key.0.clone(),
            member: key.1.clone(),
        };
        let session = Session {
            place: Arc::new(place),
            commands: receiver,
            hints: ears.hints.subscribe(),
            _ears: ears,
            placements: HashMap::new(),
            heard: HashMap::new(),
            waiting: Vec::new(),
            tidying: JoinSet::new(),
        };
        let _task = tokio::spawn(session.run());
        #[cfg(test)]
        running.tasks.push(_task.abort_handle());
        running.sessions.insert(key.clone(), commands.clone());
        commands
    }

    /// Ends everything at once, as the end of the process does.
    #[cfg(test)]
    pub(crate) fn die(&self) {
        self.lock().tasks.drain(..).for_each(|task| task.abort());
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.running.lock().expect("no code panics while it holds this lock")
    }
}

/// One watch over all leases, for all sessions. Closed when the last of them has ended.
pub(super) struct Ears {
    hints: broadcast::Sender<LeaseHint>,
    listening: AbortHandle,
}

impl Ears {
    fn open(backend: Arc<dyn Backend>) -> Arc<Self> {
        let (hints, _) = broadcast::channel(HINTS_MAX);
        let listening = tokio::spawn(listen(backend, hints.clone())).abort_handle();
        Arc::new(Self { hints, listening })
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

/// Passes hints on to whoever listens.
async fn listen(backend: Arc<dyn Backend>, hints: broadcast::Sender<LeaseHint>) {
    loop {
        let mut watch = match backend.watch(keys::WATCHED).await {
            Ok(watch) => watch,
            Err(error) => {
                warn!(%error, "leases cannot be watched yet, they are swept meanwhile");
                sleep(WATCH_AGAIN_AFTER).await;
                continue;
            }
        };
        debug!(mode = ?watch.mode(), "watching leases");
        // What happened before the watch was open.
        let mut hint = LeaseHint { lease: None, kind: HintKind::Missed };
        loop {
            // An error means that nobody listens at the moment.
            let _ = hints.send(hint);
            hint = watch.next().await;
        }
    }
}

impl Membership {
    /// Hands over what this subscription has (`give_up` for each partition), then takes part no more. Returns when
    /// others can have it.
    pub(crate) async fn leave(mut self) {
        self.left = true;
        let (farewell, gone) = oneshot::channel();
        self.send_leave(Some(farewell));
        // An error means that the session is gone, and everything with it.
        let _ = gone.await;
    }

    fn send_leave(&self, farewell: Option<oneshot::Sender<()>>) {
        let (topic, serial) = (self.topic.clone(), self.serial);
        let _ = self.commands.send(Command::Leave { topic, serial, farewell });
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.left {
            self.send_leave(None);
        }
    }
}
