//! Partitions of a dead server are revoked, or their subscription stops: the partitions of the other servers go on.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Mode, Outcome, Policies, Queue, QueueConfig};
use headwater_stream::{Options, connect};
use headwater_testkit::unique;

use crate::dead_shard::{STOP_MAX, ServerFault, ShardFixture, Victim};
use crate::fixture::{GROUP, eventually};
use crate::recording_handler::recording_handler;

/// A read of the dead server has failed by then, and the leases of its partitions are valid for long.
const AFTER_FAULT: Duration = Duration::from_millis(500);
/// Longer than the deadline of a call, after which a process can join, and than the one of the calls after that.
const OBSERVED_FOR: Duration = Duration::from_secs(14);

/// A process joins while the first still holds its partitions of the dead server, so that some of them are revoked. Those
/// of the other servers that are not must go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn kept_partitions_go_on_while_those_of_a_dead_server_are_revoked() -> Result<()> {
    let mut shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    let config = || QueueConfig { rebalance_every: AFTER_FAULT, ..Default::default() };
    shards.fixture.queue = Queue::with_config(Arc::clone(&shards.fixture.backend), config())?;
    let all: Vec<usize> = (0..shards.streams.len()).collect();
    let first = shards.subscribe(&shards.fixture.queue, 1, Mode::Owned).await?;
    eventually("it has all partitions", async || Ok(first.stats().partitions == all.len())).await?;
    shards.send(&all, "before").await?;
    shards.wait_for(&all, "before").await?;
    let backend = connect(&shards.fixture.url, &Options::default()).await?;
    let second_queue = Queue::with_config(backend, config())?;
    let baseline = shards.baseline().await?;

    ServerFault::Dead.begin(shards.victims()?)?;
    tokio::time::sleep(AFTER_FAULT).await;
    let joining = shards.subscribe(&second_queue, 2, Mode::Owned);
    let sending = shards.longest_waits("revoked", OBSERVED_FOR);
    let (second, waits) = tokio::join!(joining, sending);
    let (second, waits) = (second?, waits?);
    // A member keeps the first of its partitions.
    let half = shards.streams.len() / 2;
    for (partition, (wait, last)) in waits.into_iter().filter(|(partition, _)| *partition < half) {
        assert_eq!(last, 1, "{partition} is not revoked");
        assert!(
            wait < STOP_MAX + baseline,
            "partition {partition} stood still for {wait:?}; before the fault a message waited up to {baseline:?}"
        );
    }
    eventually("the second process has partitions", async || Ok(second.stats().partitions > 0))
        .await?;

    ServerFault::Dead.end(shards.victims()?)?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    shards.send(&all, "after").await?;
    shards.wait_for(&all, "after").await?;
    for name in ["before", "after"] {
        for partition in &all {
            assert_eq!(shards.times(*partition, name), 1, "{partition} {name}");
        }
    }
    tokio::join!(first.stop(), second.stop());
    shards.report("revoked without one server")
}

/// Another subscription of the same group stops, whose partition is on the dead server.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn healthy_partitions_go_on_while_a_subscription_stops_without_a_dead_server() -> Result<()> {
    let shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    let (queue, cluster) = (&shards.fixture.queue, &shards.cluster);
    let all: Vec<usize> = (0..shards.streams.len()).collect();
    let victim = shards.victims()?.0.port();
    let is_on_victim = |key: &str| -> Result<bool> {
        Ok(cluster.primary_of_slot(cluster.slot_of(key)?)?.port() == victim)
    };
    let other = loop {
        let name = unique("stops");
        queue.topics().create(&name, 1, Policies::default()).await?;
        let described = queue.topics().describe(&name).await?;
        let is_meta_there = is_on_victim(&format!("streaming:mq:topic:{name}:meta"))?;
        if is_on_victim(&described.partitions[0].stream_key)? && !is_meta_there {
            break name;
        }
    };
    let staying = shards.subscribe(queue, 1, Mode::Shared).await?;
    let (handler, _unseen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
    let stopping = queue.subscribe(&other, GROUP, handler, config).await?;
    shards.send(&all, "before").await?;
    shards.wait_for(&all, "before").await?;
    let baseline = shards.baseline().await?;

    ServerFault::Dead.begin(shards.victims()?)?;
    tokio::time::sleep(AFTER_FAULT).await;
    let sending = shards.keep_sending("stopping", OBSERVED_FOR, baseline);
    let ((), sent) = tokio::join!(stopping.stop(), sending);
    sent?;

    ServerFault::Dead.end(shards.victims()?)?;
    cluster.wait_until_ok(Duration::from_secs(60))?;
    shards.send(&all, "after").await?;
    shards.wait_for(&all, "after").await?;
    staying.stop().await;
    shards.report("stopped without one server")
}
