//! One server of a cluster fails: messages of the others are pulled and settled.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{
    LeaseResult, MessageLease, Outcome, Policies, PullRequest, PulledMessage, Puller, QueueError,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::dead_shard::{Handled, PARTITIONS, ShardFixture, Victim};
use crate::fixture::{GROUP, TIMEOUT};

/// A partition of a healthy server may stand still while a check and a read of the dead server time out (1 s each), not for
/// the deadline of a call (5 s).
const PULL_STOP_MAX: Duration = Duration::from_secs(4);
const LEASE: Duration = Duration::from_secs(60);

fn request(wait: Duration) -> PullRequest {
    PullRequest { max: 100, wait, lease: LEASE }
}

fn all() -> Vec<usize> {
    (0..usize::from(PARTITIONS)).collect()
}

/// Pulls and settles until the puller is closed. Every call must succeed.
fn consume(shards: &ShardFixture, puller: &Puller, by: usize) -> JoinHandle<Result<()>> {
    let (puller, topic) = (puller.clone(), shards.fixture.topic.clone());
    let handled = shards.handled.clone();
    tokio::spawn(async move {
        loop {
            let pulled = match puller.pull(&topic, GROUP, request(Duration::from_secs(5))).await {
                Err(QueueError::Stopped { .. }) => return Ok(()),
                pulled => pulled.context("a pull failed")?,
            };
            for one in &pulled {
                let payload = String::from_utf8_lossy(&one.message.payload).into_owned();
                let mut handled = handled.lock().expect("no panic");
                let first = Handled { times: 0, at: Instant::now(), by };
                handled.entry(payload).or_insert(first).times += 1;
            }
            let done = pulled.into_iter().map(|one| (one.lease, Outcome::Done)).collect();
            puller.settle(&topic, GROUP, done).await.context("settling failed")?;
        }
    })
}

/// The server has no replica. Pulls get the messages of the others, also those of another process that begins to pull, and
/// the rest when the server is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn messages_of_healthy_servers_are_pulled_without_a_dead_server() -> Result<()> {
    let mut shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    shards.stop_max = PULL_STOP_MAX;
    let first = shards.fixture.queue.puller();
    let first_consuming = consume(&shards, &first, 1);
    shards.send(&all(), "before").await?;
    shards.wait_for(&all(), "before").await?;
    let baseline = shards.baseline().await?;

    let (primary, replica) = shards.victims()?;
    replica.kill9()?;
    primary.kill9()?;
    // Longer than the deadline of a call, and than several checks of the leases.
    shards.keep_sending("dead", Duration::from_secs(8), baseline).await?;

    let second = shards.fixture.second_queue().await?.puller();
    let second_consuming = consume(&shards, &second, 2);
    let has_joined = || {
        let handled = shards.handled.lock().expect("no panic");
        handled.values().any(|handled| handled.by == 2)
    };
    let joining = async {
        for round in 0.. {
            if has_joined() {
                break;
            }
            shards
                .keep_sending(&format!("joined {round}"), Duration::from_millis(200), baseline)
                .await?;
        }
        anyhow::Ok(())
    };
    timeout(TIMEOUT, joining).await.context("the second process gets no messages")??;
    // It goes on alone.
    first.close().await;
    first_consuming.await??;
    shards.keep_sending("alone", Duration::from_secs(3), baseline).await?;

    replica.restart()?;
    primary.restart()?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    shards.send(&all(), "after").await?;
    shards.wait_for(&all(), "after").await?;
    for name in ["before", "after"] {
        for partition in all() {
            assert_eq!(shards.times(partition, name), 1, "{partition} {name}");
        }
    }
    second.close().await;
    second_consuming.await??;
    shards.report("pulls from a cluster with a dead server")
}

/// Pulls one message of each partition.
async fn pull_all(
    shards: &ShardFixture,
    puller: &Puller,
) -> Result<BTreeMap<usize, PulledMessage>> {
    shards.send(&all(), "work").await?;
    let mut pulled = BTreeMap::new();
    let pulling = async {
        while pulled.len() < usize::from(PARTITIONS) {
            let wait = Duration::from_secs(5);
            for one in puller.pull(&shards.fixture.topic, GROUP, request(wait)).await? {
                pulled.insert(usize::from(one.message.partition), one);
            }
        }
        anyhow::Ok(())
    };
    timeout(TIMEOUT, pulling).await.context("messages are missing")??;
    Ok(pulled)
}

/// The server of the metadata is dead: what was pulled from the others is extended and settled.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn leases_are_extended_and_settled_without_the_server_of_the_metadata() -> Result<()> {
    let refresh = Duration::from_millis(100);
    let policies = Policies { refresh, ..Default::default() };
    let shards = ShardFixture::start_with(Victim::Metadata, policies).await?;
    let (topic, healthy) = (&shards.fixture.topic, shards.healthy());
    let puller = shards.fixture.queue.puller();
    let pulled = pull_all(&shards, &puller).await?;
    let (primary, replica) = shards.victims()?;
    replica.kill9()?;
    primary.kill9()?;
    // The cached metadata expires.
    tokio::time::sleep(refresh * 2).await;

    let leases: Vec<MessageLease> = pulled.values().map(|one| one.lease.clone()).collect();
    let of_healthy: Vec<MessageLease> = healthy.iter().map(|p| pulled[p].lease.clone()).collect();
    let extended = puller.extend(topic, GROUP, &of_healthy).await?;
    assert_eq!(extended, vec![LeaseResult::Applied; healthy.len()]);
    let started = Instant::now();
    puller.extend(topic, GROUP, &of_healthy).await?;
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "it does not wait for the dead server again"
    );
    if healthy.len() < leases.len() {
        // Those of the dead server fail and keep no other from being extended.
        let idle = Duration::from_millis(300);
        tokio::time::sleep(idle).await;
        let (started, extended) = (Instant::now(), puller.extend(topic, GROUP, &leases).await);
        let error = extended.expect_err("partitions of the dead server cannot be reached");
        assert!(error.is_transient(), "{error:?}");
        for partition in &healthy {
            let rows = shards.pending(*partition).await?;
            // The clock of Redis is not exact. Without the extension it would be `idle` more.
            let since_call = started.elapsed() + idle / 2;
            assert!(rows.iter().all(|row| row.idle < since_call), "{partition}: {rows:?}");
        }
    }

    // First those of the dead server: they delay the others, and do not prevent them.
    let mut outcomes: Vec<_> = leases.iter().map(|lease| (lease.clone(), Outcome::Done)).collect();
    outcomes.sort_by_key(|(lease, _)| of_healthy.contains(lease));
    let settled = puller.settle(topic, GROUP, outcomes).await;
    assert_eq!(settled.is_err(), healthy.len() < leases.len(), "{settled:?}");
    for partition in &healthy {
        assert!(shards.pending(*partition).await?.is_empty(), "{partition}");
    }
    puller.close().await;
    Ok(())
}
