//! Registers a worker as alive, again and again.
//!
//! Upstream: `worker` runs it while it works. Downstream: the table `workers`, which diagnoses read. Claims do not depend on it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use crate::store::Store;

/// How long a worker counts as alive after its last heartbeat.
const HEARTBEAT_TTL: Duration = Duration::from_secs(15);
/// Interval of worker heartbeats.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(5);

/// Sends heartbeats of the worker with this name until it is aborted.
pub(crate) async fn run(store: Arc<dyn Store>, name: String) {
    let mut ticks = interval(HEARTBEAT_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = store.heartbeat_worker(&name, HEARTBEAT_TTL).await {
            warn!(%error, "worker heartbeat failed, retrying");
        }
    }
}
