//! How nudges reach a worker: it shares the stream `issue_work` with the other workers of the group.
//!
//! Upstream: `headwater-stream`. Downstream: the worker as a handler of messages. Promises: an entry is acknowledged after
//! its issue was looked at; one that makes no sense goes to the dead letters with its bytes intact.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::Queue;
use headwater_stream::{
    Backend, ConsumerName, Delivery, GroupName, GroupReader, GroupStart, Settle, Settlement,
    StreamName, Then,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::warn;

use super::Worker;
use crate::nudge::{GROUP, STREAM};

/// How long to wait before a stream that did not answer is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);

const POLL: Duration = Duration::from_secs(5);

struct Intake {
    streams: Arc<dyn Backend>,
    stream: StreamName,
    group: GroupName,
    consumer: ConsumerName,
}

impl Worker {
    /// Takes nudges until the drain begins, and returns when those in hand are acknowledged.
    pub(super) async fn work_queue(&self, queue: &Queue, mut drain: watch::Receiver<bool>) {
        let intake = Arc::new(Intake {
            streams: Arc::clone(queue.backend()),
            stream: StreamName::new(STREAM).expect("the name is plain"),
            group: GroupName::new(GROUP).expect("the name is plain"),
            consumer: ConsumerName::new(self.name()).expect("the name is plain"),
        });
        let mut runs = JoinSet::new();
        let reading = async {
            loop {
                if let Err(error) = self.read(&intake, &mut runs).await {
                    warn!(%error, "nudges were not read, trying again");
                    sleep(ASK_AGAIN_AFTER).await;
                }
            }
        };
        tokio::select! {
            _ = drain.wait_for(|drain| *drain) => {}
            () = reading => {}
        }
        while runs.join_next().await.is_some() {}
    }

    async fn read(
        &self,
        intake: &Arc<Intake>,
        runs: &mut JoinSet<()>,
    ) -> headwater_stream::Result<()> {
        let Intake { streams, stream, group, consumer } = intake.as_ref();
        streams.ensure_group(stream, group, GroupStart::Beginning).await?;
        let mut reader: Box<dyn GroupReader> = streams.reader(group, consumer).await?;
        loop {
            let room = self.inner.config.concurrency.saturating_sub(runs.len());
            if room == 0 {
                runs.join_next().await;
                continue;
            }
            let batches = reader.read(std::slice::from_ref(stream), room, POLL).await?;
            for delivery in batches.into_iter().flat_map(|batch| batch.entries) {
                let (worker, intake) = (self.clone(), Arc::clone(intake));
                runs.spawn(async move { intake.handle(&worker, delivery).await });
            }
            while runs.try_join_next().is_some() {}
        }
    }
}

impl Intake {
    async fn handle(&self, worker: &Worker, delivery: Delivery) {
        let nudge = crate::nudge::read(&delivery.fields);
        let then = match nudge {
            Ok(nudge) => {
                worker.inner.config.steps.taken(crate::Step::Received, nudge.issue_id);
                worker.look_at(nudge.issue_id).await;
                Then::Done
            }
            Err(_) => Then::Append {
                to: StreamName::new("issue_work:dlq").expect("plain"),
                fields: delivery.fields,
            },
        };
        let entries = [Settlement { id: delivery.id, then }];
        let Self { stream, group, consumer, .. } = self;
        let settle = Settle { stream, group, consumer, fence: None, entries: &entries };
        if let Err(error) = self.streams.settle(settle).await {
            warn!(%error, "not settled");
        }
    }
}
