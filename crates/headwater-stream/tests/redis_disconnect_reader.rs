//! Disconnecting the readers of paused or partitioned processes: their reads deliver nothing afterwards.
#![cfg(feature = "redis")]

mod redis_support;

use std::env;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use headwater_stream::{
    Backend, DisconnectOutcome, EntryId, GroupReader, GroupStart, PendingDeliveryQuery, Retention,
    StreamError, StreamName,
};
use headwater_testkit::{Child, Cluster, Proxy, Redis};

use crate::redis_support::*;

const URL: &str = "HEADWATER_TEST_URL";
const STREAMS: &str = "HEADWATER_TEST_STREAMS";
const TIMEOUT: Duration = Duration::from_secs(30);

async fn append(backend: &Arc<dyn Backend>, name: &StreamName) -> Result<Vec<EntryId>> {
    Ok(backend.append(name, &[one()], &Retention::KEEP_ALL).await?)
}

async fn disconnect(backend: &Arc<dyn Backend>, name: &StreamName) -> Result<usize> {
    match backend.disconnect_reader(name, &group("workers"), &consumer("ann")).await? {
        DisconnectOutcome::Disconnected { readers } => Ok(readers),
        DisconnectOutcome::Denied { reason } => bail!("not disconnected: {reason}"),
    }
}

/// Asserts that the entries go to the new owner, and none to the old one.
async fn assert_delivered_to_bob(
    backend: &Arc<dyn Backend>,
    name: &StreamName,
    ids: &[EntryId],
) -> Result<()> {
    let query = PendingDeliveryQuery {
        stream: name,
        group: &group("workers"),
        consumer: Some(&consumer("ann")),
        min_idle: Duration::ZERO,
        after: None,
        count: 100,
    };
    assert_eq!(backend.pending(query).await?, [], "{name}: delivered to the dead consumer");
    let mut bob = backend.reader(&group("workers"), &consumer("bob")).await?;
    assert_eq!(read_ids(&mut *bob, name).await?, ids, "{name}");
    Ok(())
}

fn assert_unavailable<T: std::fmt::Debug>(result: &Result<T, StreamError>) {
    assert!(matches!(result, Err(StreamError::Unavailable { .. })), "{result:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_are_disconnected_over_another_connection_if_one_breaks() -> Result<()> {
    for command in ["LIST", "KILL"] {
        let redis = Redis::start()?;
        let proxy = Proxy::start(redis.addr())?;
        let direct = open(&redis.url()).await?;
        let behind = open(&redis.url_at(proxy.addr())).await?;
        let orders = stream("orders");
        direct.ensure_group(&orders, &group("workers"), GroupStart::Beginning).await?;
        let mut reader = direct.reader(&group("workers"), &consumer("ann")).await?;
        let blocked =
            tokio::spawn(async move { reader.read(&[stream("orders")], 1, TIMEOUT).await });
        until_readers_block(&redis, 1).await?;
        proxy.drop_replies(&format!("CLIENT\r\n$4\r\n{command}\r\n"), 2)?;
        disconnect(&behind, &orders).await?;
        assert_unavailable(&blocked.await?);
        assert_eq!(proxy.faults(), 2);
    }
    Ok(())
}

/// A backend may outlive the runtime that first used it.
#[test]
fn readers_are_disconnected_after_the_runtime_of_an_earlier_call_has_shut_down() -> Result<()> {
    let redis = Redis::start()?;
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let name = stream("orders");
    let first = runtime()?;
    let backend = first.block_on(async {
        let backend = open(&redis.url()).await?;
        backend.ensure_group(&name, &group("workers"), GroupStart::Beginning).await?;
        let outcome = backend.disconnect_reader(&name, &group("workers"), &consumer("eve")).await?;
        assert_eq!(outcome, DisconnectOutcome::Disconnected { readers: 0 });
        anyhow::Ok(backend)
    })?;
    drop(first);
    runtime()?.block_on(async {
        // Uses new connections, opened on the second runtime.
        let mut ann = backend.reader(&group("workers"), &consumer("ann")).await?;
        let read = [name.clone()];
        let reading = tokio::spawn(async move { ann.read(&read, 10, TIMEOUT).await });
        until_readers_block(&redis, 1).await?;
        assert_eq!(disconnect(&backend, &name).await?, 1);
        assert_unavailable(&reading.await?);
        let ids = append(&backend, &name).await?;
        assert_delivered_to_bob(&backend, &name, &ids).await
    })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started and paused by other tests"]
async fn child_that_reads() -> Result<()> {
    let (Ok(url), Ok(streams)) = (env::var(URL), env::var(STREAMS)) else { return Ok(()) };
    let backend = open(&url).await?;
    let streams: Vec<StreamName> = streams.split(' ').map(stream).collect();
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    println!("\nreads");
    match reader.read(&streams, 10, Duration::from_secs(60)).await {
        Err(StreamError::Unavailable { .. }) => println!("\nended"),
        // On a cluster, the first of its connections that is closed ends the read.
        Ok(batches) if batches.is_empty() && !reader.take_failures().is_empty() => {
            println!("\nended");
        }
        other => println!("\nended otherwise: {other:?}"),
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_process_blocked_in_a_read_gets_nothing_after_disconnect() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let name = stream("orders");
    backend.ensure_group(&name, &group("workers"), GroupStart::Beginning).await?;
    let child = Child::spawn_self("child_that_reads", &[(URL, &redis.url()), (STREAMS, "orders")])?;
    child.line_after("reads", TIMEOUT)?;
    until_readers_block(&redis, 1).await?;
    child.pause()?;

    assert_eq!(disconnect(&backend, &name).await?, 1);

    let ids = append(&backend, &name).await?;
    assert_delivered_to_bob(&backend, &name, &ids).await?;
    child.resume()?;
    let word = child.line_after("ended", TIMEOUT)?;
    assert_eq!(word.trim(), "", "the read ended with another result");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_process_gets_nothing_from_any_node_of_a_cluster_after_disconnect() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let names = ["orders-0", "orders-1", "orders-2", "orders-3"].map(stream);
    for name in &names {
        backend.ensure_group(name, &group("workers"), GroupStart::Beginning).await?;
    }
    let list = names.each_ref().map(StreamName::as_str).join(" ");
    let child = Child::spawn_self("child_that_reads", &[(URL, &cluster.url()), (STREAMS, &list)])?;
    child.line_after("reads", TIMEOUT)?;
    for name in &names {
        until_readers_block(cluster.primary_of_slot(cluster.slot_of(name.as_str())?)?, 1).await?;
    }
    child.pause()?;

    for name in &names {
        disconnect(&backend, name).await?;
    }

    for name in &names {
        let ids = append(&backend, name).await?;
        assert_delivered_to_bob(&backend, name, &ids).await?;
    }
    child.resume()?;
    let word = child.line_after("ended", TIMEOUT)?;
    assert_eq!(word.trim(), "", "the read ended with another result");
    Ok(())
}

/// A reader behind a proxy, and the backend of the new owner.
async fn reader_behind_proxy() -> Result<(Redis, Proxy, Arc<dyn Backend>, Box<dyn GroupReader>)> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let next = open(&redis.url()).await?;
    next.ensure_group(&stream("orders"), &group("workers"), GroupStart::Beginning).await?;
    let before = open(&redis.url_at(proxy.addr())).await?;
    let reader = before.reader(&group("workers"), &consumer("ann")).await?;
    Ok((redis, proxy, next, reader))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_in_transit_gets_nothing_after_disconnect() -> Result<()> {
    let (_redis, proxy, next, mut reader) = reader_behind_proxy().await?;
    let name = stream("orders");
    let streams = [name.clone()];
    assert_eq!(reader.read(&streams, 10, Duration::ZERO).await?, []);
    proxy.stall()?;
    let mut read = Box::pin(reader.read(&streams, 10, Duration::from_secs(20)));
    assert!(futures_util::poll!(&mut read).is_pending());

    assert_eq!(disconnect(&next, &name).await?, 1);

    let ids = append(&next, &name).await?;
    proxy.heal()?;
    assert_unavailable(&read.await);
    assert_delivered_to_bob(&next, &name, &ids).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_is_still_connecting_gets_nothing_after_disconnect() -> Result<()> {
    let (_redis, proxy, next, mut reader) = reader_behind_proxy().await?;
    let name = stream("orders");
    let streams = [name.clone()];
    proxy.stall()?;
    let mut read = Box::pin(reader.read(&streams, 10, Duration::from_secs(20)));
    assert!(futures_util::poll!(&mut read).is_pending());

    assert_eq!(disconnect(&next, &name).await?, 0, "there is no connection yet");

    let ids = append(&next, &name).await?;
    proxy.heal()?;
    assert_unavailable(&read.await);
    assert_delivered_to_bob(&next, &name, &ids).await?;

    // A read that starts afterwards works normally.
    let ids = append(&next, &name).await?;
    assert_eq!(read_ids(&mut *reader, &name).await?, ids);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_not_kill_connections_gets_denied() -> Result<()> {
    let mut all = vec!["~* &* +@all -@dangerous", "~* &* +@all -client"];
    // Before 7.0 a subcommand cannot be removed.
    if Redis::start()?.command(&["ACL", "SETUSER", "worker", "-client|kill"])?.ok().is_ok() {
        all.push("~* &* +@all -client|kill");
    }
    for rules in all {
        let redis = Redis::builder().user("worker", "secret", rules).start()?;
        let backend = open(&redis.url()).await?;
        let mut ann = backend.reader(&group("workers"), &consumer("ann")).await?;
        assert_eq!(ann.read(&[stream("orders")], 10, Duration::ZERO).await?, [], "{rules}");
        let result = backend
            .disconnect_reader(&stream("orders"), &group("workers"), &consumer("ann"))
            .await?;
        assert!(matches!(result, DisconnectOutcome::Denied { .. }), "{rules}: {result:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_in_another_database_is_not_disconnected() -> Result<()> {
    let redis = Redis::start()?;
    let (here, there) = (open(&redis.url()).await?, open(&format!("{}7", redis.url())).await?);
    let mut ann = there.reader(&group("workers"), &consumer("ann")).await?;
    let name = stream("orders");
    let streams = [name.clone()];
    let reading = tokio::spawn(async move { ann.read(&streams, 10, TIMEOUT).await });
    until_readers_block(&redis, 1).await?;
    assert_eq!(disconnect(&here, &name).await?, 0);
    let ids = append(&there, &name).await?;
    assert_eq!(reading.await??[0].entries[0].id, ids[0]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_disconnects_share_the_list_of_connections() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = open(&redis.url_at(proxy.addr())).await?;
    let names: Vec<StreamName> = (0..60).map(|n| stream(&format!("orders-{n}"))).collect();
    let dead = ["ann", "bob"].map(consumer);
    let mut readers = Vec::new();
    for name in &dead {
        let direct = open(&redis.url()).await?;
        let mut reader = direct.reader(&group("workers"), name).await?;
        let streams = names.clone();
        readers.push(tokio::spawn(async move { reader.read(&streams, 10, TIMEOUT).await }));
    }
    until_readers_block(&redis, dead.len()).await?;
    let before = lists(&redis)?;
    // A list takes so long that all other calls have set their tombstones meanwhile.
    proxy.delay(Duration::from_millis(200))?;

    let all = names.iter().flat_map(|name| dead.iter().map(move |dead| (name, dead)));
    let workers = group("workers");
    let calls = all.map(|(name, dead)| backend.disconnect_reader(name, &workers, dead));
    for outcome in futures_util::future::join_all(calls).await {
        assert!(matches!(outcome?, DisconnectOutcome::Disconnected { .. }));
    }

    for reader in readers {
        assert_unavailable(&reader.await?);
    }
    let (shared, calls) = (lists(&redis)? - before, names.len() * dead.len());
    assert!((1..calls / 2).contains(&shared), "{shared} lists for {calls} calls");
    Ok(())
}

/// Number of `CLIENT LIST` calls on this server; before 7.0, of all `CLIENT` calls.
fn lists(redis: &Redis) -> Result<usize> {
    let stats = redis.command(&["INFO", "commandstats"])?.text();
    let calls = |line: &str| {
        let of_client = line.strip_prefix("cmdstat_client")?;
        let calls = of_client.strip_prefix("|list").unwrap_or(of_client).strip_prefix(":calls=")?;
        calls.split_once(',')?.0.parse().ok()
    };
    Ok(stats.lines().find_map(calls).unwrap_or(0))
}
