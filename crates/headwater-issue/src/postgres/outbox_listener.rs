//! Hears of entries in the outbox, from any process, by `LISTEN`.
//!
//! Upstream: `outbox_wake`. Promises: a hint costs nothing to lose; after a lost connection it listens again and wakes once,
//! for what it may have missed. The connection is its own, made when somebody first waits, and ends with the store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

const CHANNEL: &str = "headwater_outbox";

/// Between two tries to listen.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct OutboxListener {
    connect: PgConnectOptions,
    wake: Arc<Notify>,
    task: Mutex<ListenerTask>,
}

#[derive(Debug)]
enum ListenerTask {
    NotStarted,
    Running(JoinHandle<()>),
    Closed,
}

impl OutboxListener {
    pub(super) fn new(connect: PgConnectOptions) -> Self {
        Self { connect, wake: Arc::new(Notify::new()), task: Mutex::new(ListenerTask::NotStarted) }
    }

    /// Wakes one who waits, or the next who will.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Returns when there may be something in the outbox, or after `wait`. Cancel-safe.
    pub(super) async fn wait(&self, wait: Duration) {
        self.start();
        // Running out of time is one of the two ways to return.
        let _ = tokio::time::timeout(wait, self.wake.notified()).await;
    }

    pub(super) fn close(&self) {
        let mut task = self.task.lock().expect("no code panics while it holds the task");
        if let ListenerTask::Running(running) = std::mem::replace(&mut *task, ListenerTask::Closed)
        {
            running.abort();
        }
        drop(task);
        self.wake.notify_waiters();
    }

    fn start(&self) {
        let mut task = self.task.lock().expect("no code panics while it holds the task");
        if matches!(*task, ListenerTask::NotStarted) {
            let (connect, wake) = (self.connect.clone(), Arc::clone(&self.wake));
            *task = ListenerTask::Running(tokio::spawn(listen_always(connect, wake)));
        }
    }
}

impl Drop for OutboxListener {
    fn drop(&mut self) {
        self.close();
    }
}

async fn listen_always(connect: PgConnectOptions, wake: Arc<Notify>) {
    loop {
        if let Err(error) = listen(&connect, &wake).await {
            tracing::debug!(%error, "not listening for the outbox, will try again");
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

async fn listen(connect: &PgConnectOptions, wake: &Notify) -> Result<(), sqlx::Error> {
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(connect.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(CHANNEL).await?;
    loop {
        // Also for what came while nobody listened: after the first LISTEN and after each reconnection.
        wake.notify_one();
        while listener.try_recv().await?.is_some() {
            wake.notify_one();
        }
    }
}
