//! Whether anybody listens where the database should be, so that who needs it is told soon.
//!
//! Upstream: `http::limits` tells of requests that take long, and asks. Downstream: connections of its own to Postgres, since a
//! pool goes on trying for as long as a call may take, and does not tell busy from away.
//! Promises: nobody is turned away for a hiccup: only when for [`PATIENCE`] every try to connect was refused, and until the
//! first that succeeds. A server that is slow, full or silent is waited for as before. SQLite is never away.
//! Why it loses and doubles nothing: a request that is turned away is dropped as one that took too long is; what it had begun
//! is rolled back, or is known by its id when it comes again.

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

/// A request that takes longer than this is worth a look at the database. Also the time that every request has.
const SUSPECT_AFTER: Duration = Duration::from_millis(250);

/// For so long nobody must listen: longer than a quick restart of Postgres takes.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Between two tries to connect, while nobody listens, and after all was well.
const TRY_EVERY: Duration = Duration::from_millis(250);
const WELL_FOR: Duration = Duration::from_secs(1);

/// How long one try may take.
const TRY_MAX: Duration = Duration::from_secs(2);

/// SQLSTATE of a server that is starting, stopping or recovering.
const CANNOT_CONNECT_NOW: &str = "57P03";

/// What is known of the database. Clones know the same.
#[derive(Clone, Debug)]
pub(crate) struct DatabaseWatch {
    is_away: Arc<watch::Sender<bool>>,
    suspicion: Arc<Notify>,
}

impl Default for DatabaseWatch {
    fn default() -> Self {
        Self { is_away: Arc::new(watch::Sender::new(false)), suspicion: Arc::default() }
    }
}

impl DatabaseWatch {
    /// Returns when nobody listens, but not at once: what is quick is done by then. Cancel-safe.
    pub(crate) async fn away(&self) {
        sleep(SUSPECT_AFTER).await;
        self.suspicion.notify_one();
        // An error means that all senders are gone; we hold one.
        let _ = self.is_away.subscribe().wait_for(|is_away| *is_away).await;
    }

    /// Looks whenever a request takes long, as long as it is not dropped.
    pub(crate) async fn run(self, database_url: SecretString) {
        let url = database_url.expose_secret();
        // The store has read the same URL: where it is not one of PostgreSQL, there is no server to look at.
        let options = url.starts_with("postgres").then(|| url.parse::<PgConnectOptions>().ok());
        let Some(options) = options.flatten() else { return std::future::pending().await };
        let options = Arc::new(options);
        self.look(move || is_refused(Arc::clone(&options)).boxed()).await;
    }

    async fn look(&self, is_refused: impl Fn() -> BoxFuture<'static, bool>) {
        loop {
            self.suspicion.notified().await;
            let began = Instant::now();
            while is_refused().await {
                if began.elapsed() >= PATIENCE && !self.is_away.send_replace(true) {
                    warn!(
                        "nobody listens where the database should be, requests are refused until somebody does"
                    );
                }
                sleep(TRY_EVERY).await;
            }
            if self.is_away.send_replace(false) {
                info!("the database is back");
            }
            sleep(WELL_FOR).await;
        }
    }
}

/// Tries to connect.
async fn is_refused(options: Arc<PgConnectOptions>) -> bool {
    match timeout(TRY_MAX, PgConnection::connect_with(&options)).await {
        Ok(Ok(connection)) => {
            // Whoever is gone by now was there a moment ago.
            let _ = timeout(TRY_MAX, connection.close()).await;
            false
        }
        Ok(Err(error)) => is_nobody_there(&error),
        Err(_) => false,
    }
}

/// Whether nobody serves at this address. Everything else may be over in a moment, or is about one connection.
fn is_nobody_there(error: &sqlx::Error) -> bool {
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

    /// A watch on a server that is as the flag says, by a clock that jumps ahead when nothing happens.
    fn watched() -> (DatabaseWatch, Arc<AtomicBool>, tokio::task::JoinHandle<()>) {
        let (watch, is_refused) = (DatabaseWatch::default(), Arc::new(AtomicBool::new(false)));
        let (looking, refused) = (watch.clone(), Arc::clone(&is_refused));
        let running = tokio::spawn(async move {
            let look = || std::future::ready(refused.load(Ordering::SeqCst)).boxed();
            looking.look(look).await;
        });
        (watch, is_refused, running)
    }

    #[tokio::test]
    async fn only_who_is_refused_finds_nobody_there() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = PgConnectOptions::new_without_pgpass().host("127.0.0.1").port(port);
        let options = Arc::new(options.username("nobody"));
        // One who takes the connection and ends it is there.
        let ending = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(!is_refused(Arc::clone(&options)).await);
        ending.join().unwrap();
        assert!(is_refused(options).await, "nobody listens any more");
        for kind in [ErrorKind::ConnectionReset, ErrorKind::TimedOut, ErrorKind::UnexpectedEof] {
            assert!(!is_nobody_there(&sqlx::Error::Io(kind.into())), "{kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_turned_away_for_a_hiccup() {
        let (watch, is_refused, running) = watched();
        for _ in 0..3 {
            is_refused.store(true, Ordering::SeqCst);
            let waiting = timeout(PATIENCE - TRY_EVERY, watch.away());
            assert!(waiting.await.is_err(), "it is away for less than it may be");
            is_refused.store(false, Ordering::SeqCst);
            assert!(timeout(PATIENCE * 10, watch.away()).await.is_err(), "it is back");
        }
        running.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_database_that_is_away_is_told_soon_and_who_comes_later_sooner() {
        let (watch, is_refused, running) = watched();
        is_refused.store(true, Ordering::SeqCst);
        let began = Instant::now();
        watch.away().await;
        assert!((PATIENCE..PATIENCE * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
        let began = Instant::now();
        watch.away().await;
        assert!((SUSPECT_AFTER..SUSPECT_AFTER * 2).contains(&began.elapsed()));
        // The first that succeeds opens the door, with nobody asking.
        is_refused.store(false, Ordering::SeqCst);
        let mut is_away = watch.is_away.subscribe();
        is_away.wait_for(|is_away| !is_away).await.unwrap();
        assert!(timeout(PATIENCE * 10, watch.away()).await.is_err());
        running.abort();
    }
}
