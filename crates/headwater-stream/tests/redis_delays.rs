//! Many wait for delay sets on one connection, and are woken whatever happens to it.
#![cfg(feature = "redis")]

mod redis_steps;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use headwater_stream::{Backend, DueTime, ScheduleRequest};
use headwater_testkit::{Cluster, Redis};
use tokio::task::JoinHandle;

use crate::redis_steps::*;

const PATIENCE: Duration = Duration::from_secs(30);
/// Less than the time after which everybody looks anyway.
const BY_RING: Duration = Duration::from_secs(3);
const TRIES: usize = 5;

fn wait_for(backend: &Arc<dyn Backend>, set: &str) -> JoinHandle<Result<bool>> {
    let (backend, set) = (Arc::clone(backend), delays(set));
    tokio::spawn(async move { Ok(backend.wait_until_due(&set, PATIENCE).await?) })
}

async fn schedule(backend: &Arc<dyn Backend>, set: &str, to: &str, due: DueTime) -> Result<()> {
    backend
        .schedule(&delays(set), &[ScheduleRequest { to: stream(to), due, fields: one() }])
        .await?;
    Ok(())
}

/// The connections that listen to channels.
fn listeners(redis: &Redis) -> Result<Vec<String>> {
    let list = redis.command(&["CLIENT", "LIST", "TYPE", "pubsub"])?.text();
    let number = |line: &str| Some(line.split(' ').next()?.strip_prefix("id=")?.to_owned());
    Ok(list.lines().filter_map(number).collect())
}

async fn until_listening(redis: &Redis, other_than: &[String]) -> Result<Vec<String>> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let found = listeners(redis)?;
        if !found.is_empty() && found != other_than {
            return Ok(found);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("nobody listens")
}

/// Whether a wait ends by a ring, in one of some tries: a busy machine may spoil the others.
async fn assert_rings(ours: &Arc<dyn Backend>, theirs: &Arc<dyn Backend>) -> Result<()> {
    for number in 0..TRIES {
        let set = format!("{{rings-{number}}}");
        schedule(theirs, &set, &format!("{set}:to"), DueTime::After(PATIENCE * 2)).await?;
        let waiting = wait_for(ours, &set);
        tokio::time::sleep(Duration::from_millis(200)).await;
        let start = Instant::now();
        schedule(theirs, &set, &format!("{set}:to"), DueTime::After(Duration::ZERO)).await?;
        assert!(waiting.await??, "it is due");
        if start.elapsed() < BY_RING {
            return Ok(());
        }
    }
    bail!("no wait ended by a ring")
}

#[tokio::test(flavor = "multi_thread")]
async fn many_waits_share_one_connection_and_each_hears_its_own_ring() -> Result<()> {
    let redis = Redis::start()?;
    let (ours, theirs) = (open(&redis.url()).await?, open(&redis.url()).await?);
    let waiting: Vec<_> = (0..300).map(|n| wait_for(&ours, &format!("set-{n}"))).collect();
    until_listening(&redis, &[]).await?;
    let list = redis.command(&["CLIENT", "LIST"])?.text();
    let connections = list.lines().filter(|line| line.contains("name=headwater")).count();
    assert!(connections <= 4, "two links and one listener, found {connections}: {list}");

    for number in 0..300 {
        schedule(&theirs, &format!("set-{number}"), "to", DueTime::After(Duration::ZERO)).await?;
    }

    for wait in waiting {
        assert!(wait.await??, "it is due");
    }
    assert_rings(&ours, &theirs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rings_are_heard_again_after_the_connection_broke() -> Result<()> {
    let redis = Redis::start()?;
    let (ours, theirs) = (open(&redis.url()).await?, open(&redis.url()).await?);
    let waiting = wait_for(&ours, "set");
    let before = until_listening(&redis, &[]).await?;
    redis.command(&["CLIENT", "KILL", "ID", &before[0]])?.ok()?;
    schedule(&theirs, "set", "to", DueTime::After(Duration::ZERO)).await?;
    assert!(waiting.await??, "it is due");
    let _other = wait_for(&ours, "other");
    until_listening(&redis, &before).await?;
    assert_rings(&ours, &theirs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rings_are_heard_from_every_node_of_a_cluster() -> Result<()> {
    let cluster = Cluster::start()?;
    let (ours, theirs) = (open(&cluster.url()).await?, open(&cluster.url()).await?);
    let _other = wait_for(&ours, "other");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_rings(&ours, &theirs).await?;
    let mut listening = 0;
    for node in cluster.nodes() {
        listening += listeners(node)?.len();
    }
    assert_eq!(listening, 1, "one connection for all");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_listen_finds_what_is_due_by_looking() -> Result<()> {
    let redis = Redis::builder().user("worker", "secret", "~* resetchannels +@all").start()?;
    let (ours, theirs) = (open(&redis.url()).await?, open(&redis.url()).await?);
    let waiting = wait_for(&ours, "set");
    tokio::time::sleep(Duration::from_millis(100)).await;
    schedule(&theirs, "set", "to", DueTime::After(Duration::ZERO)).await?;
    assert!(waiting.await??, "it is due");
    assert_eq!(listeners(&redis)?, [""; 0]);
    Ok(())
}
