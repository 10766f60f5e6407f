//! A server is dead, and members join, die or leave meanwhile: the partitions of the other servers go on.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use headwater_queue::{ConsumerConfig, Mode, Outcome, Policies, Queue, QueueConfig};
use headwater_stream::{Options, connect};
use headwater_testkit::unique;

use crate::crash;
use crate::dead_shard::{STOP_MAX, ServerFault, ShardFixture, Victim};
use crate::fixture::{GROUP, eventually};
use crate::recording_handler::recording_handler;

/// A read of the dead server has failed by then, and the leases of its partitions are valid for long.
const AFTER_FAULT: Duration = Duration::from_millis(500);
/// Longer than the deadline of a call, after which a process can join, and than the one of the calls after that.
const OBSERVED_FOR: Duration = Duration::from_secs(14);

/// How long the new owner of a partition waits for the dead server each time: when it looks for the free lease, once more if that
/// began before it was a member, and when it disconnects the reader of the former owner.
const SILENT_SERVER_WAIT: Duration = Duration::from_secs(1);

/// A process joins while the first still holds its partitions of the dead server, which the second cannot see. Each partition of
/// the other servers goes on, at one of the two.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_process_that_joins_takes_what_the_holder_of_unreachable_partitions_gives_away()
-> Result<()> {
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
    let taken = waits.values().filter(|(_, last)| *last == 2).count();
    assert!(taken > 0, "the second process took partitions of the other servers");
    let longest = waits.values().map(|(wait, _)| *wait).max().unwrap_or_default();
    shards.record_stop(longest);
    for (partition, (wait, last)) in waits {
        let limit = if last == 1 { STOP_MAX } else { STOP_MAX + 3 * SILENT_SERVER_WAIT };
        assert!(
            wait < limit + baseline,
            "partition {partition}, now of process {last}, stood still for {wait:?}; before the fault a message waited up to {baseline:?}"
        );
    }

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

/// A member dies while a server is dead, with messages of the other servers in hand.
async fn a_dead_member_is_replaced_without_a_dead_server(mode: Mode) -> Result<()> {
    let shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    let healthy = shards.healthy();
    let queue = shards.fixture.second_queue().await?;
    let survivor = shards.subscribe(&queue, 1, mode).await?;
    let dying =
        crash::spawn(&shards.fixture, if mode == Mode::Shared { "Shared" } else { "Owned" })?;
    let mut rounds = Vec::new();
    // Until the other process has one of the messages.
    loop {
        let round = format!("{} hang", rounds.len());
        shards.send(&healthy, &round).await?;
        rounds.push(round);
        if dying.line_after("HANGING", AFTER_FAULT).is_ok() {
            break;
        }
        ensure!(rounds.len() < 100, "the other process gets no message");
    }

    ServerFault::Dead.begin(shards.victims()?)?;
    tokio::time::sleep(AFTER_FAULT).await;
    dying.kill9()?;
    for round in &rounds {
        shards.wait_for(&healthy, round).await?;
    }
    shards.send(&healthy, "alone").await?;
    shards.wait_for(&healthy, "alone").await?;

    ServerFault::Dead.end(shards.victims()?)?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    let all: Vec<usize> = (0..shards.streams.len()).collect();
    shards.send(&all, "after").await?;
    shards.wait_for(&all, "after").await?;
    survivor.stop().await;
    shards.report("a member died without one server")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn healthy_partitions_of_a_dead_member_are_taken_over_without_a_dead_server() -> Result<()> {
    a_dead_member_is_replaced_without_a_dead_server(Mode::Owned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn messages_of_a_dead_member_are_reclaimed_without_a_dead_server() -> Result<()> {
    a_dead_member_is_replaced_without_a_dead_server(Mode::Shared).await
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
