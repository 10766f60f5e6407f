//! Processing with nudges through a Redis Cluster.

mod support;

use anyhow::Result;
use headwater_issue::{IssueFilter, OutboxConfig, WorkerConfig};
use headwater_stream::StreamName;
use headwater_testkit::Cluster;
use support::{Backends, DeliveryLog, RunLog, System, event_ids, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn on_a_redis_cluster_every_event_is_processed_once_and_replied_to() -> Result<()> {
    // A cluster of its own: the stream name is fixed.
    let cluster = Cluster::start()?;
    let database = Backends::directory()?;
    let backends = Backends::named(&database.database, &cluster.url());
    let (system, run_log, deliveries) =
        (System::at(&backends).await?, RunLog::default(), DeliveryLog::default());
    let workers = [
        system.start(run_log.handler(), WorkerConfig::default())?,
        system.start(run_log.handler(), WorkerConfig::default())?,
    ];
    for event in ["a", "b", "c"] {
        for issue in 0..10 {
            system.record(&issue.to_string(), event).await?;
        }
    }
    // There is no sweeper: every nudge goes through the cluster.
    system.wait_processed().await?;
    let stream = StreamName::new(headwater_issue::STREAM)?;
    wait_until("nudges to be acknowledged", || async {
        let stats = system.streams.stats(&stream).await.expect("the stream replies");
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        groups.len() == 1 && groups[0].pending == 0 && groups[0].lag == Some(0)
    })
    .await?;
    for worker in workers {
        worker.stop().await?;
    }
    system.outbox(deliveries.clone(), OutboxConfig::default())?.run_once().await?;
    let mut ids = Vec::new();
    for issue in system.store.issues(&IssueFilter::default(), 100).await? {
        ids.extend(event_ids(system.store.as_ref(), issue.id).await?);
    }
    assert_eq!(ids.len(), 30);
    deliveries.assert_one_reply_each(ids);
    system.assert_consistent().await?;
    Ok(())
}
