//! The doorbells of delay sets: whoever waits for a due time is woken when an earlier one comes up.
//!
//! Upstream: `delays` waits here between two looks at a set. One connection hears for all who wait in this process.
//! Promises: when rings may have been lost, by a broken connection or before there was one, everybody looks again.
//! A ring is a hint: without it, whoever waits looks again after [`Bells::look_every`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tracing::debug;

use super::keys;
use super::servers::Servers;
use super::subscription::{Subscription, unavailable};
use crate::error::{Result, StreamError};
use crate::name::DelayName;

/// How often to look while rings are heard: one may still be lost when servers change their roles.
const LOOK_EVERY_HEARING: Duration = Duration::from_secs(5);
/// With many sets, looks at all of them together are at least this far apart, and each set is looked at this often.
const LOOK_SPACING: Duration = Duration::from_millis(25);
const LOOK_EVERY_MAX: Duration = Duration::from_secs(60);
/// How often to look while they are not.
const LOOK_EVERY_DEAF: Duration = Duration::from_secs(1);
/// How soon a broken connection is replaced.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// How soon a server that does not allow it is asked again.
const RETRY_REFUSED_AFTER: Duration = Duration::from_secs(60);

/// All who wait for delay sets in this process.
#[derive(Default)]
pub(super) struct Bells {
    shared: Arc<Shared>,
    /// The task that listens, from the first wait on.
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    by_set: Mutex<HashMap<DelayName, Arc<Notify>>>,
    hears: AtomicBool,
}

/// One who waits for a set, until dropped.
pub(super) struct Bell {
    shared: Arc<Shared>,
    set: DelayName,
    pub(super) rung: Arc<Notify>,
}

impl Bells {
    /// Hears of this set from now on, or is woken when it does.
    pub(super) fn wait_for(&self, servers: &Arc<Servers>, set: &DelayName) -> Bell {
        let rung = Arc::clone(self.shared.lock().entry(set.clone()).or_default());
        let mut task = self.task.lock().expect("no code panics while it holds this lock");
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            let listening = listen(Arc::clone(servers), Arc::clone(&self.shared));
            *task = Some(tokio::spawn(listening));
        }
        Bell { shared: Arc::clone(&self.shared), set: set.clone(), rung }
    }

    /// How long nobody relies on rings alone.
    pub(super) fn look_every(&self) -> Duration {
        if !self.shared.hears.load(Ordering::Relaxed) {
            return LOOK_EVERY_DEAF;
        }
        // Rings are heard; the look is for the case that one was lost in spite of that. A thousand idle sets must not
        // cost a thousand times as much.
        let sets = u32::try_from(self.shared.lock().len()).unwrap_or(u32::MAX);
        (LOOK_SPACING * sets).clamp(LOOK_EVERY_HEARING, LOOK_EVERY_MAX)
    }
}

impl Drop for Bells {
    fn drop(&mut self) {
        if let Ok(Some(task)) = self.task.get_mut().map(Option::take) {
            task.abort();
        }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        let mut by_set = self.shared.lock();
        // The map's own and ours: nobody else waits for this set.
        if Arc::strong_count(&self.rung) <= 2 {
            by_set.remove(&self.set);
        }
    }
}

impl Shared {
    fn ring(&self, set: &str) {
        let rung = DelayName::new(set).ok().and_then(|set| self.lock().get(&set).cloned());
        if let Some(rung) = rung {
            rung.notify_waiters();
        }
    }

    /// From now on rings are heard, or not. In both cases some may have been lost.
    fn set_hears(&self, hears: bool) {
        self.hears.store(hears, Ordering::Relaxed);
        let all: Vec<Arc<Notify>> = self.lock().values().cloned().collect();
        all.iter().for_each(|rung| rung.notify_waiters());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DelayName, Arc<Notify>>> {
        self.by_set.lock().expect("no code panics while it holds this lock")
    }
}

/// Listens until the backend is closed.
async fn listen(servers: Arc<Servers>, shared: Arc<Shared>) {
    let until_closed = servers.until_closed();
    tokio::select! {
        () = until_closed => {}
        () = keep_listening(&servers, &shared) => {}
    }
}

async fn keep_listening(servers: &Arc<Servers>, shared: &Shared) {
    loop {
        let pause = match subscribe(servers).await {
            Ok(subscription) => {
                shared.set_hears(true);
                subscription.hear(|_, set| shared.ring(set)).await;
                shared.set_hears(false);
                RETRY_AFTER
            }
            Err(error) => {
                debug!(%error, "not listening to delay sets, they are looked at more often");
                let refused = matches!(error, StreamError::Denied { .. });
                if refused { RETRY_REFUSED_AFTER } else { RETRY_AFTER }
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// One node is enough: a cluster passes messages on to all.
async fn subscribe(servers: &Servers) -> Result<Subscription> {
    let deadline = servers.deadline();
    let node = servers.owner(0, deadline).await.map_err(unavailable)?;
    let mut subscription = Subscription::open(&node, servers.call_deadline(), deadline).await?;
    let added = subscription.add(&keys::due_channel(servers.database()), deadline).await?;
    added.map_err(|problem| StreamError::Denied { problem })?;
    Ok(subscription)
}
