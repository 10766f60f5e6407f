//! How nudges reach a worker: it shares the topic `issue_work` with the other workers of the group.
//!
//! Upstream: `headwater-queue`, which hands out entries, takes them over from the dead, and acknowledges them after the
//! worker has looked at the issue. Downstream: the worker as a handler of messages. Promises: a queue that is away is tried
//! again for as long as the worker lives; meanwhile it works through its agenda.

use std::time::Duration;

use headwater_queue::{ConsumerConfig, Mode, Queue, Subscription};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::warn;

use super::Worker;
use crate::nudge::{GROUP, STREAM};

/// How long to wait before a queue that did not answer is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Beyond our own drain, for the queue to acknowledge what has ended.
const SETTLE_MAX: Duration = Duration::from_secs(10);

impl Worker {
    /// Takes nudges until the drain begins, and returns when those in hand are acknowledged or released.
    pub(super) async fn work_queue(&self, queue: &Queue, mut drain: watch::Receiver<bool>) {
        let Some(subscription) = self.subscribe(queue, &mut drain).await else { return };
        let _ = drain.wait_for(|drain| *drain).await;
        subscription.stop().await;
    }

    /// Subscribes; none if the drain begins first. An attempt is never dropped half way: what it has begun in the group ends
    /// in good order, by a stop, before another worker of this process takes its place.
    async fn subscribe(
        &self,
        queue: &Queue,
        drain: &mut watch::Receiver<bool>,
    ) -> Option<Subscription> {
        while !*drain.borrow_and_update() {
            match queue.subscribe(STREAM, GROUP, self.clone(), self.consumer_config()).await {
                Ok(subscription) => return Some(subscription),
                Err(error) => {
                    warn!(%error, "worker gets no nudges yet, trying again");
                    let _ = timeout(ASK_AGAIN_AFTER, drain.wait_for(|drain| *drain)).await;
                }
            }
        }
        None
    }

    fn consumer_config(&self) -> ConsumerConfig {
        let concurrency = self.inner.config.concurrency;
        ConsumerConfig {
            mode: Mode::Shared,
            concurrency,
            // Nothing is read ahead: a nudge that waits here could be handled by another process.
            in_flight_max: concurrency,
            batch: concurrency.min(256),
            // Our own drain comes first, so that cancelled runs give their issues back.
            drain: self.inner.config.drain + SETTLE_MAX,
            ..ConsumerConfig::default()
        }
    }
}
