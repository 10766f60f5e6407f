//! Wakes tasks that wait on a delay set when an entry with an earlier due time is scheduled.
//!
//! Upstream: `delays` waits here between two polls of a set. One pub/sub connection serves all waiting tasks of the process.
//! Guarantees: on a cluster, a server that does not answer delays the notifications of the others by a few seconds. When
//! notifications may have been lost, because the connection broke or did not exist yet, all waiting tasks
//! are woken and poll again. Notifications are best effort: a task also polls every [`DueNotifier::poll_interval`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use super::client::RedisClient;
use super::connection::LivenessCheck;
use super::node::Node;
use super::pubsub::{self, PubSubConnection, unavailable};
use crate::error::{Result, StreamError};
use crate::name::DelayName;

/// Minimum poll interval while subscribed: a notification can still be lost during a failover.
const POLL_INTERVAL_SUBSCRIBED: Duration = Duration::from_secs(5);
/// While subscribed, the interval grows with the number of sets so that polls of all sets are this far apart on average...
const POLL_SPACING: Duration = Duration::from_millis(25);
/// ...up to this interval.
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(60);
/// Poll interval without a subscription.
const POLL_INTERVAL_UNSUBSCRIBED: Duration = Duration::from_secs(1);
/// Pause before a broken connection is replaced.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// How long one of several servers may take to accept a subscription before the next one is asked.
const SUBSCRIBE_MAX: Duration = Duration::from_secs(1);
/// One of several servers is left when it does not answer: the others do.
const LIVENESS_OF_ONE: LivenessCheck =
    LivenessCheck { silence_max: Duration::from_secs(1), ping_timeout: Duration::from_secs(2) };
/// Pause before a denied subscription is tried again.
const RETRY_DENIED_AFTER: Duration = Duration::from_secs(60);

/// Notifies the tasks of this process that wait on delay sets.
#[derive(Default)]
pub(super) struct DueNotifier {
    waiters: Arc<DueWaiters>,
    /// The subscription task, started by the first waiter.
    task: Mutex<Option<AbortOnDropHandle<()>>>,
}

#[derive(Default)]
struct DueWaiters {
    /// By the key of the set, which is the text of a notification.
    by_set: Mutex<HashMap<String, Arc<Notify>>>,
    is_subscribed: AtomicBool,
}

/// Registration of a task that waits on a set; ends when dropped.
pub(super) struct DueWaiter {
    waiters: Arc<DueWaiters>,
    set: String,
    pub(super) notified: Arc<Notify>,
}

impl DueNotifier {
    /// Registers a waiter for this set. It is notified at once when the subscription starts.
    pub(super) fn register(&self, client: &Arc<RedisClient>, set: &DelayName) -> DueWaiter {
        let set = client.keys().of(set).to_string();
        let notified = Arc::clone(self.waiters.lock().entry(set.clone()).or_default());
        let mut task = self.task.lock().expect("no code panics while it holds this lock");
        if task.as_ref().is_none_or(AbortOnDropHandle::is_finished) {
            let listener = run_until_closed(Arc::clone(client), Arc::clone(&self.waiters));
            *task = Some(AbortOnDropHandle::new(tokio::spawn(listener)));
        }
        DueWaiter { waiters: Arc::clone(&self.waiters), set, notified }
    }

    /// How long a waiter may rely on notifications before it polls.
    pub(super) fn poll_interval(&self) -> Duration {
        if !self.waiters.is_subscribed.load(Ordering::Relaxed) {
            return POLL_INTERVAL_UNSUBSCRIBED;
        }
        // While subscribed, polling only covers lost notifications: a thousand idle sets must not cost a thousand times as
        // much.
        let sets = u32::try_from(self.waiters.lock().len()).unwrap_or(u32::MAX);
        (POLL_SPACING * sets).clamp(POLL_INTERVAL_SUBSCRIBED, POLL_INTERVAL_MAX)
    }
}

impl Drop for DueWaiter {
    fn drop(&mut self) {
        let mut by_set = self.waiters.lock();
        // Two references, the map's and ours: no other task waits on this set.
        if Arc::strong_count(&self.notified) <= 2 {
            by_set.remove(&self.set);
        }
    }
}

impl DueWaiters {
    fn notify(&self, set: &str) {
        let waiters = self.lock().get(set).cloned();
        if let Some(waiters) = waiters {
            waiters.notify_waiters();
        }
    }

    /// Records the subscription state. Notifications may have been lost either way, so all waiters are woken.
    fn set_subscribed(&self, is_subscribed: bool) {
        self.is_subscribed.store(is_subscribed, Ordering::Relaxed);
        let all: Vec<Arc<Notify>> = self.lock().values().cloned().collect();
        all.iter().for_each(|waiters| waiters.notify_waiters());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Notify>>> {
        self.by_set.lock().expect("no code panics while it holds this lock")
    }
}

/// Runs the subscription until the backend is closed.
async fn run_until_closed(client: Arc<RedisClient>, waiters: Arc<DueWaiters>) {
    let until_closed = client.until_closed();
    tokio::select! {
        () = until_closed => {}
        () = run(&client, &waiters) => {}
    }
}

async fn run(client: &Arc<RedisClient>, waiters: &DueWaiters) {
    // The server to subscribe on first: the one after the last whose subscription ended.
    let mut first = 0;
    loop {
        let pause = match subscribe(client, &mut first).await {
            Ok(subscription) => {
                waiters.set_subscribed(true);
                subscription.run(|_, set| waiters.notify(set)).await;
                waiters.set_subscribed(false);
                first += 1;
                RETRY_AFTER
            }
            Err(error) => {
                debug!(%error, "not subscribed to delay set notifications, polling more often");
                let denied = matches!(error, StreamError::Denied { .. });
                if denied { RETRY_DENIED_AFTER } else { RETRY_AFTER }
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Subscribes on one server, the `first`th primary or the next one that answers: a cluster forwards messages to all.
async fn subscribe(client: &RedisClient, first: &mut usize) -> Result<PubSubConnection> {
    if client.primaries().is_empty() {
        client.node_for_slot(0, client.deadline()).await.map_err(unavailable)?;
    }
    let primaries = client.primaries();
    let mut last = None;
    for _ in 0..primaries.len() {
        let node = &primaries[*first % primaries.len()];
        match subscribe_on(client, node, primaries.len() > 1).await {
            Err(error @ StreamError::Unavailable { .. }) => {
                *first += 1;
                last = Some(error);
            }
            subscribed => return subscribed,
        }
    }
    Err(last.unwrap_or_else(|| StreamError::Unavailable {
        problem: "no primary of the cluster is known".to_owned(),
        source: None,
    }))
}

async fn subscribe_on(
    client: &RedisClient,
    node: &Arc<Node>,
    has_others: bool,
) -> Result<PubSubConnection> {
    let (deadline, liveness) = match has_others {
        true => (Instant::now() + SUBSCRIBE_MAX, LIVENESS_OF_ONE),
        false => (client.deadline(), pubsub::liveness(client.call_deadline())),
    };
    let mut subscription = PubSubConnection::open(node, liveness, deadline).await?;
    let added = subscription.subscribe(client.keys().due_channel(), deadline).await?;
    added.map_err(|problem| StreamError::Denied { problem })?;
    Ok(subscription)
}
