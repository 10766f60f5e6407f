//! Detects that PostgreSQL is down, so that requests that need it fail fast.
//!
//! Upstream: `http/timeouts.rs` reports slow requests and waits for the result. Downstream: its own connections to
//! PostgreSQL, because the pool retries until a call's deadline and does not distinguish a busy server from one that
//! is down.
//! Guarantees: the database counts as unavailable only after every connection attempt within [`UNAVAILABLE_AFTER`] was
//! refused, and until the first one succeeds. A slow, full or silent server is waited for as usual. SQLite is never
//! unavailable. A rejected request loses and duplicates nothing: it is dropped like one that timed out; its
//! transaction is rolled back, or a retry is recognised by its id.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use secrecy::{ExposeSecret, SecretString};
use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// A request that takes longer than this triggers a probe. It is also the minimum time every request gets.
const SLOW_REQUEST: Duration = Duration::from_millis(250);

/// How long connections must be refused. Longer than a quick restart of PostgreSQL.
const UNAVAILABLE_AFTER: Duration = Duration::from_millis(1500);

/// Interval between attempts while connections are refused, and pause after a successful one.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
const PAUSE_AFTER_SUCCESS: Duration = Duration::from_secs(1);

/// Timeout of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// SQLSTATE of a server that is starting, stopping or recovering.
const CANNOT_CONNECT_NOW: &str = "57P03";

/// Availability of the database. Clones share one state.
#[derive(Clone, Debug)]
pub(crate) struct DatabaseMonitor {
    is_unavailable: Arc<watch::Sender<bool>>,
    probe_requested: Arc<Notify>,
}

impl Default for DatabaseMonitor {
    fn default() -> Self {
        Self {
            is_unavailable: Arc::new(watch::Sender::new(false)),
            probe_requested: Arc::default(),
        }
    }
}

impl DatabaseMonitor {
    /// Waits until the database is unavailable, for at least [`SLOW_REQUEST`]. Cancel-safe.
    pub(crate) async fn wait_unavailable(&self) {
        sleep(SLOW_REQUEST).await;
        self.probe_requested.notify_one();
        // `wait_for` fails only when all senders are dropped, and `self` holds one.
        let _ = self.is_unavailable.subscribe().wait_for(|is_unavailable| *is_unavailable).await;
    }

    /// Probes the database whenever a request is slow. Runs until it is dropped.
    pub(crate) async fn run(self, database_url: SecretString) {
        let url = database_url.expose_secret();
        // The store has validated the URL; there is a server to probe only for PostgreSQL.
        let options = url.starts_with("postgres").then(|| url.parse::<PgConnectOptions>().ok());
        let Some(options) = options.flatten() else { return std::future::pending().await };
        let options = Arc::new(options);
        self.monitor(move || is_refused(Arc::clone(&options)).boxed()).await;
    }

    async fn monitor(&self, is_refused: impl Fn() -> BoxFuture<'static, bool>) {
        loop {
            self.probe_requested.notified().await;
            let began = Instant::now();
            while is_refused().await {
                if began.elapsed() >= UNAVAILABLE_AFTER && !self.is_unavailable.send_replace(true) {
                    warn!(
                        "database refuses connections; requests that need it fail until it is back"
                    );
                }
                sleep(RETRY_INTERVAL).await;
            }
            if self.is_unavailable.send_replace(false) {
                info!("database is available again");
            }
            sleep(PAUSE_AFTER_SUCCESS).await;
        }
    }
}

/// Whether a connection attempt is refused.
async fn is_refused(options: Arc<PgConnectOptions>) -> bool {
    match timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await {
        Ok(Ok(connection)) => {
            // The result of closing does not matter: the server accepted the connection.
            let _ = timeout(CONNECT_TIMEOUT, connection.close()).await;
            false
        }
        Ok(Err(error)) => is_server_down(&error),
        Err(_) => false,
    }
}

/// Whether no server serves at this address. All other errors may be temporary or concern one connection.
fn is_server_down(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(error) => error.kind() == ErrorKind::ConnectionRefused,
        sqlx::Error::Database(error) => error.code().as_deref() == Some(CANNOT_CONNECT_NOW),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A monitor whose server refuses connections while the flag is set.
    fn monitored() -> (DatabaseMonitor, Arc<AtomicBool>, tokio::task::JoinHandle<()>) {
        let (watch, is_refused) = (DatabaseMonitor::default(), Arc::new(AtomicBool::new(false)));
        let (monitoring, refused) = (watch.clone(), Arc::clone(&is_refused));
        let running = tokio::spawn(async move {
            let monitor = || std::future::ready(refused.load(Ordering::SeqCst)).boxed();
            monitoring.monitor(monitor).await;
        });
        (watch, is_refused, running)
    }

    #[tokio::test]
    async fn only_a_refused_connection_counts_as_server_down() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = PgConnectOptions::new_without_pgpass().host("127.0.0.1").port(port);
        let options = Arc::new(options.username("nobody"));
        // A server that accepts the connection and closes it is up.
        let ending = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(!is_refused(Arc::clone(&options)).await);
        ending.join().unwrap();
        assert!(is_refused(options).await, "the listener is closed");
        for kind in [ErrorKind::ConnectionReset, ErrorKind::TimedOut, ErrorKind::UnexpectedEof] {
            assert!(!is_server_down(&sqlx::Error::Io(kind.into())), "{kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_outage_does_not_reject_requests() {
        let (watch, is_refused, running) = monitored();
        for _ in 0..3 {
            is_refused.store(true, Ordering::SeqCst);
            let waiting = timeout(UNAVAILABLE_AFTER - RETRY_INTERVAL, watch.wait_unavailable());
            assert!(waiting.await.is_err(), "the outage is shorter than the threshold");
            is_refused.store(false, Ordering::SeqCst);
            assert!(
                timeout(UNAVAILABLE_AFTER * 10, watch.wait_unavailable()).await.is_err(),
                "the database is available"
            );
        }
        running.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_requests_fail_fast_and_later_ones_faster() {
        let (watch, is_refused, running) = monitored();
        is_refused.store(true, Ordering::SeqCst);
        let began = Instant::now();
        watch.wait_unavailable().await;
        assert!(
            (UNAVAILABLE_AFTER..UNAVAILABLE_AFTER * 2).contains(&began.elapsed()),
            "{:?}",
            began.elapsed()
        );
        let began = Instant::now();
        watch.wait_unavailable().await;
        assert!((SLOW_REQUEST..SLOW_REQUEST * 2).contains(&began.elapsed()));
        // The first success ends the outage without a request.
        is_refused.store(false, Ordering::SeqCst);
        let mut is_unavailable = watch.is_unavailable.subscribe();
        is_unavailable.wait_for(|is_unavailable| !is_unavailable).await.unwrap();
        assert!(timeout(UNAVAILABLE_AFTER * 10, watch.wait_unavailable()).await.is_err());
        running.abort();
    }
}
