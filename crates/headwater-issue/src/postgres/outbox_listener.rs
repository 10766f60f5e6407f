//! Wakes deliverers when any process writes to the outbox, with `LISTEN`.
//!
//! Upstream: `outbox_wake`. A wake-up is a hint and may be lost; after a reconnection it wakes once for missed
//! notifications. It uses its own connection, opened at the first wait and closed with the store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

const CHANNEL: &str = "headwater_outbox";

/// Delay before a reconnection.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);

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

    /// Wakes one waiter, or the next one.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Completes when the outbox may have a new row, or after `wait`. Cancel-safe.
    pub(super) async fn wait(&self, wait: Duration) {
        self.start();
        // A timeout is not an error here.
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
            *task = ListenerTask::Running(tokio::spawn(listen_and_reconnect(connect, wake)));
        }
    }
}

impl Drop for OutboxListener {
    fn drop(&mut self) {
        self.close();
    }
}

async fn listen_and_reconnect(connect: PgConnectOptions, wake: Arc<Notify>) {
    loop {
        if let Err(error) = listen(&connect, &wake).await {
            tracing::debug!(%error, "LISTEN for outbox rows failed, reconnecting");
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
    }
}

async fn listen(connect: &PgConnectOptions, wake: &Notify) -> Result<(), sqlx::Error> {
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(connect.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(CHANNEL).await?;
    loop {
        // Covers notifications missed before the first LISTEN and during each reconnection.
        wake.notify_one();
        while listener.try_recv().await?.is_some() {
            wake.notify_one();
        }
    }
}
