//! The order of shutdown: stop accepting requests and claims, drain deliveries, close connections.
//!
//! Upstream: `run.rs`, after the shutdown signal. Guarantees: shutdown takes at most `worker.drain` plus ten seconds, of which
//! the last are for unsent traces. Tasks that miss their deadline are aborted, so none of them uses the database
//! after it is closed. Work that does not finish in time is retried later: claims and outbox leases expire.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::StreamedBus;
use headwater_issue::Store;
use headwater_stream::Backend;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::analytics::Analytics;
use crate::api::Operations;
use crate::desk::{Desk, build};
use crate::exit::CliError;
use crate::server::app_state::App;
use crate::server::services::{ABORT_MAX, Services};

/// Shutdown deadlines, counted from the end of the drain: services ended and claims released; last replies delivered;
/// connections closed. The rest of the ten seconds is for unsent traces.
const SERVICES_MAX: Duration = Duration::from_millis(5500);
const REPLIES_MAX: Duration = Duration::from_secs(7);
const CLOSE_MAX: Duration = Duration::from_secs(8);

/// How long after the drain the outbox may finish deliveries in flight.
const REPLIES_DRAIN: Duration = Duration::from_secs(5);

/// How long the database may take to close. A consistency check may still be running on it.
const DATABASE_MAX: Duration = Duration::from_secs(2);

// A service has time to end and to report its result before it is aborted.
const _: () = assert!(REPLIES_DRAIN.as_millis() + 1000 <= REPLIES_MAX.as_millis());
const _: () = assert!(SERVICES_MAX.as_millis() + ABORT_MAX.as_millis() < REPLIES_MAX.as_millis());
const _: () = assert!(REPLIES_MAX.as_millis() + ABORT_MAX.as_millis() < CLOSE_MAX.as_millis());

/// What runs in the process when shutdown is triggered.
pub(super) struct Running {
    /// Everything but the outbox.
    pub(super) services: Services,
    /// Ends after the others, because they produce replies.
    pub(super) outbox: Services,
    /// Receives the deadline of the last deliveries.
    pub(super) last_replies: oneshot::Sender<Instant>,
    pub(super) operations: Operations,
    pub(super) app: App,
    pub(super) analytics: Analytics,
    pub(super) desk: Arc<Desk>,
    pub(super) bus: Arc<StreamedBus>,
    /// For HTTP and for work.
    pub(super) stores: [Arc<dyn Store>; 2],
    pub(super) streams: Arc<dyn Backend>,
}

impl Running {
    /// Shuts down; `drain` is the time for work in progress. Fails if a service had ended by itself.
    pub(super) async fn shut_down(self, drain: Duration) -> Result<(), CliError> {
        let Self {
            mut services,
            mut outbox,
            last_replies,
            operations,
            app,
            analytics,
            desk,
            bus,
            stores: [http_store, store],
            streams,
        } = self;
        let drained = Instant::now() + drain;
        let failed = {
            let ending = async {
                tokio::join!(
                    services.join(drained + SERVICES_MAX),
                    finish_before(drained + SERVICES_MAX, operations.close(), "pulls"),
                    finish_before(
                        drained + SERVICES_MAX,
                        app.background_jobs.close(),
                        "imports and forks"
                    ),
                )
            };
            tokio::pin!(ending);
            let in_time = timeout_at(drained, ending.as_mut()).await;
            // Runs still in progress are aborted by now, so they produce no more replies.
            let _ = last_replies.send(drained + REPLIES_DRAIN);
            let rest = async {
                match in_time {
                    Ok(ended) => ended,
                    Err(_) => ending.await,
                }
            };
            let ((failed, (), ()), outbox_failed) =
                tokio::join!(rest, outbox.join(drained + REPLIES_MAX));
            failed.or(outbox_failed)
        };
        drop(app);
        let end = drained + CLOSE_MAX;
        tokio::join!(
            finish_before(end, analytics.close(), "analytics rebuild"),
            finish_before(end, desk.close(), "desk token accounting"),
            finish_before(end, build::close(bus), "bus"),
        );
        tokio::join!(
            finish_before(end.min(Instant::now() + DATABASE_MAX), store.close(), "database"),
            finish_before(
                end.min(Instant::now() + DATABASE_MAX),
                http_store.close(),
                "database of HTTP"
            ),
            finish_before(end, close(streams), "streams")
        );
        match failed {
            Some(part) => {
                Err(CliError::new(format!("service `{part}` ended unexpectedly; see the log")))
            }
            None => {
                info!("stopped");
                Ok(())
            }
        }
    }
}

async fn close(streams: Arc<dyn Backend>) {
    if let Err(error) = streams.close().await {
        warn!(%error, "failed to close the stream backend");
    }
}

/// Awaits `ending` until the deadline, then logs and gives up.
async fn finish_before(deadline: Instant, ending: impl Future<Output = ()>, what: &str) {
    if timeout_at(deadline, ending).await.is_err() {
        warn!(what, "component did not finish before the shutdown deadline; continuing without it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_does_not_finish_before_its_deadline_is_given_up() {
        let began = Instant::now();
        finish_before(began + DATABASE_MAX, std::future::pending(), "never closes").await;
        assert_eq!(began.elapsed(), DATABASE_MAX);
    }
}
