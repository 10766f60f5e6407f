//! Tasks that wait on delay sets share one pub/sub connection, and wake up even if it breaks.
#![cfg(feature = "redis")]

mod redis_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use headwater_stream::{Backend, DueTime, ScheduleRequest};
use headwater_testkit::{Cluster, Redis};
use tokio::task::JoinHandle;

use crate::redis_support::*;

const TIMEOUT: Duration = Duration::from_secs(30);
/// Less than the poll interval.
const BY_NOTIFICATION: Duration = Duration::from_secs(3);
const ATTEMPTS: usize = 5;

fn wait_for(backend: &Arc<dyn Backend>, set: &str) -> JoinHandle<Result<bool>> {
    let (backend, set) = (Arc::clone(backend), delays(set));
    tokio::spawn(async move { Ok(backend.wait_until_due(&set, TIMEOUT).await?) })
}

async fn schedule(backend: &Arc<dyn Backend>, set: &str, to: &str, due: DueTime) -> Result<()> {
    backend
        .schedule(&delays(set), &[ScheduleRequest { to: stream(to), due, fields: one() }])
        .await?;
    Ok(())
}

/// Ids of the pub/sub connections.
fn subscribers(redis: &Redis) -> Result<Vec<String>> {
    let list = redis.command(&["CLIENT", "LIST", "TYPE", "pubsub"])?.text();
    let number = |line: &str| Some(line.split(' ').next()?.strip_prefix("id=")?.to_owned());
    Ok(list.lines().filter_map(number).collect())
}

async fn until_subscribed(redis: &Redis, other_than: &[String]) -> Result<Vec<String>> {
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        let found = subscribers(redis)?;
        if !found.is_empty() && found != other_than {
            return Ok(found);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("no subscriber")
}

/// Asserts that a notification ends a wait in one of several attempts: a busy machine may delay some.
async fn assert_notified(ours: &Arc<dyn Backend>, theirs: &Arc<dyn Backend>) -> Result<()> {
    for number in 0..ATTEMPTS {
        let set = format!("{{notified-{number}}}");
        schedule(theirs, &set, &format!("{set}:to"), DueTime::After(TIMEOUT * 2)).await?;
        let waiting = wait_for(ours, &set);
        tokio::time::sleep(Duration::from_millis(200)).await;
        let start = Instant::now();
        schedule(theirs, &set, &format!("{set}:to"), DueTime::After(Duration::ZERO)).await?;
        assert!(waiting.await??, "it is due");
        if start.elapsed() < BY_NOTIFICATION {
            return Ok(());
        }
    }
    bail!("no wait ended by a notification")
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_share_one_connection_and_each_gets_its_own_notification() -> Result<()> {
    let redis = Redis::start()?;
    let (ours, theirs) = (open(&redis.url()).await?, open(&redis.url()).await?);
    let waiting: Vec<_> = (0..300).map(|n| wait_for(&ours, &format!("set-{n}"))).collect();
    until_subscribed(&redis, &[]).await?;
    let list = redis.command(&["CLIENT", "LIST"])?.text();
    let connections = list.lines().filter(|line| line.contains("name=headwater")).count();
    assert!(
        connections <= 4,
        "expected two shared connections and one subscriber, found {connections}: {list}"
    );

    for number in 0..300 {
        schedule(&theirs, &format!("set-{number}"), "to", DueTime::After(Duration::ZERO)).await?;
    }

    for wait in waiting {
        assert!(wait.await??, "it is due");
    }
    assert_notified(&ours, &theirs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_arrive_again_after_the_connection_broke() -> Result<()> {
    let redis = Redis::start()?;
    let (ours, theirs) = (open(&redis.url()).await?, open(&redis.url()).await?);
    let waiting = wait_for(&ours, "set");
    let before = until_subscribed(&redis, &[]).await?;
    redis.command(&["CLIENT", "KILL", "ID", &before[0]])?.ok()?;
    schedule(&theirs, "set", "to", DueTime::After(Duration::ZERO)).await?;
    assert!(waiting.await??, "it is due");
    let _other = wait_for(&ours, "other");
    until_subscribed(&redis, &before).await?;
    assert_notified(&ours, &theirs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_arrive_with_a_key_prefix() -> Result<()> {
    let redis = Redis::start()?;
    allow(std::slice::from_ref(&redis), "app1", "app1:")?;
    let url = url_of_user(&redis, "app1", "app1:");
    let (ours, theirs) = (open(&url).await?, open(&url).await?);
    let _other = wait_for(&ours, "other");
    until_subscribed(&redis, &[]).await?;
    assert_notified(&ours, &theirs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_arrive_from_every_node_of_a_cluster() -> Result<()> {
    let cluster = Cluster::start()?;
    let (ours, theirs) = (open(&cluster.url()).await?, open(&cluster.url()).await?);
    let _other = wait_for(&ours, "other");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_notified(&ours, &theirs).await?;
    let mut subscribed = 0;
    for node in cluster.nodes() {
        subscribed += subscribers(node)?.len();
    }
    assert_eq!(subscribed, 1, "one connection for all nodes");
    Ok(())
}

/// The server with the subscription hangs. Notifications of the others arrive again long before it counts as dead.
#[tokio::test(flavor = "multi_thread")]
async fn notifications_of_a_cluster_arrive_while_one_server_hangs() -> Result<()> {
    let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no").start()?;
    let (ours, theirs) = (open(&cluster.url()).await?, open(&cluster.url()).await?);
    let nodes = cluster.nodes();
    let primaries = &nodes[..nodes.len() / 2];
    let primary_of = |set: &str| cluster.primary_of_slot(cluster.slot_of(set)?);
    let _other = wait_for(&ours, "other");
    let start = Instant::now();
    let at = loop {
        let mut subscribed =
            primaries.iter().map(|node| anyhow::Ok(!subscribers(node)?.is_empty()));
        if let Some(at) = subscribed.position(|is_subscribed| matches!(is_subscribed, Ok(true))) {
            break at;
        }
        assert!(start.elapsed() < TIMEOUT, "no subscriber");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let mut sets = (0..).map(|number| format!("{{healthy-{number}}}"));
    let set = loop {
        let set = sets.next().expect("it does not end");
        if primary_of(&set)?.port() != nodes[at].port() {
            break set;
        }
    };
    schedule(&theirs, &set, &format!("{set}:to"), DueTime::After(TIMEOUT * 2)).await?;
    let (replica, primary) = (&nodes[at + nodes.len() / 2], &nodes[at]);
    replica.pause()?;
    primary.pause()?;
    tokio::time::sleep(Duration::from_secs(4)).await;

    let waiting = wait_for(&ours, &set);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let start = Instant::now();
    schedule(&theirs, &set, &format!("{set}:to"), DueTime::After(Duration::ZERO)).await?;
    assert!(waiting.await??, "it is due");
    let took = start.elapsed();
    replica.resume()?;
    primary.resume()?;
    assert!(took < BY_NOTIFICATION, "it was found by polling, after {took:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_not_subscribe_finds_due_entries_by_polling() -> Result<()> {
    let redis = Redis::builder().user("worker", "secret", "~* resetchannels +@all").start()?;
    let (ours, theirs) = (open(&redis.url()).await?, open(&redis.url()).await?);
    let waiting = wait_for(&ours, "set");
    tokio::time::sleep(Duration::from_millis(100)).await;
    schedule(&theirs, "set", "to", DueTime::After(Duration::ZERO)).await?;
    assert!(waiting.await??, "it is due");
    assert_eq!(subscribers(&redis)?, [""; 0]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_whose_fields_are_lost_does_not_shorten_a_list() -> Result<()> {
    let redis = Redis::start()?;
    let (backend, set) = (open(&redis.url()).await?, delays("set"));
    let item = ScheduleRequest { to: stream("to"), due: DueTime::After(TIMEOUT), fields: one() };
    let ids = backend.schedule(&set, &vec![item; 6]).await?;
    for lost in [ids[0], ids[2], ids[3]] {
        let number = format!("{:020}", lost.0);
        assert_eq!(redis.command(&["HDEL", "{set}:entries", &number])?.int(), Some(1));
    }

    // A shorter list than asked for means that the set ends.
    let listed = backend.delayed(&set, 0, 3).await?;
    let listed: Vec<_> = listed.into_iter().map(|entry| entry.id).collect();
    assert_eq!(listed, [ids[1], ids[4], ids[5]]);
    assert_eq!(backend.delayed(&set, 2, 3).await?.len(), 2);
    Ok(())
}
