//! Sentinel and Cluster: the backend follows failovers and slot migrations, and checks slots.
#![cfg(feature = "redis")]

mod redis_support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_stream::{
    AcquireResult, Backend, DueTime, EntryId, Epoch, Fence, Fields, GroupStart, LeaseEventKind,
    Leases, MajorityLease, Options, Range, Renewal, Retention, ScheduleRequest, SettleAction,
    SettleBatch, Settlement, StreamError, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis, Sentinel, wait_until};

use crate::redis_support::*;

const HOUR: Duration = Duration::from_secs(3600);
const KEEP: Retention = Retention::KEEP_ALL;
/// Longer than 30 s, the time that a sentinel stays passive after it was starved.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Appends with retries.
async fn append(
    backend: &Arc<dyn Backend>,
    stream: &StreamName,
    fields: &Fields,
) -> Result<EntryId> {
    let appending = async {
        loop {
            match backend.append(stream, std::slice::from_ref(fields), &KEEP).await {
                Ok(ids) => return anyhow::Ok(ids[0]),
                Err(StreamError::Unavailable { .. }) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => bail!(error),
            }
        }
    };
    tokio::time::timeout(TIMEOUT, appending).await?
}

/// Reads until this entry arrives.
async fn read_until(
    reader: &mut dyn headwater_stream::GroupReader,
    streams: &[StreamName],
    wanted: &Fields,
) -> Result<()> {
    let reading = async {
        loop {
            match reader.read(streams, 100, Duration::from_millis(500)).await {
                Ok(batches) => {
                    if batches.iter().flat_map(|b| &b.entries).any(|e| e.fields == *wanted) {
                        return anyhow::Ok(());
                    }
                }
                Err(StreamError::Unavailable { .. }) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => bail!(error),
            }
        }
    };
    tokio::time::timeout(TIMEOUT, reading).await?
}

async fn won(backend: &Arc<dyn Backend>, name: &str) -> Result<Fence> {
    match backend.acquire(&lease(name), &holder("ann"), HOUR).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease: lease(name), epoch }),
        held => bail!("{held:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_readers_continue_on_the_new_primary_after_a_sentinel_failover() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let backend = open(&sentinel.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    backend.ensure_group(&orders, &workers, GroupStart::Beginning).await?;
    let mut reader = backend.reader(&workers, &ann).await?;
    let mut watch = backend.watch("lease:").await?;
    append(&backend, &orders, &numbered(1)).await?;
    read_until(&mut *reader, std::slice::from_ref(&orders), &numbered(1)).await?;
    won(&backend, "lease:before").await?;

    sentinel.primary().kill9()?;

    append(&backend, &orders, &numbered(2)).await?;
    read_until(&mut *reader, std::slice::from_ref(&orders), &numbered(2)).await?;
    won(&backend, "lease:after").await?;
    wait_until("every sentinel to know the new primary", TIMEOUT, || {
        sentinel.current_primary().is_ok_and(|primary| primary == sentinel.replica().addr())
    })?;
    let event = tokio::time::timeout(TIMEOUT, watch.next()).await?;
    assert_eq!(event.kind, LeaseEventKind::Lagged);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_leave_a_demoted_primary_at_once() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let backend = open(&sentinel.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let mut reader = backend.reader(&workers, &ann).await?;
    append(&backend, &orders, &numbered(1)).await?;

    sentinel.sentinels()[0].command(&["SENTINEL", "FAILOVER", "mymaster"])?.ok()?;

    // Writes that reach the old primary before it is demoted are lost: Redis replicates asynchronously.
    let old = sentinel.primary();
    let demoted = || old.command(&["ROLE"]).is_ok_and(|role| role.items()[0].text() == "slave");
    let mut number = 2;
    while !demoted() {
        append(&backend, &orders, &numbered(number)).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
        number += 1;
        assert!(number < 1000, "the old primary was not demoted");
    }
    append(&backend, &orders, &numbered(1000)).await?;
    read_until(&mut *reader, std::slice::from_ref(&orders), &numbered(1000)).await?;
    wait_until("every sentinel to know the new primary", TIMEOUT, || {
        sentinel.current_primary().is_ok_and(|primary| primary == sentinel.replica().addr())
    })?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_sentinel_service_is_named_in_the_error() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let url = sentinel.url().replace("/mymaster", "/other");
    let error = open(&url).await.map(drop).expect_err("there is no such service");
    assert!(format!("{error:#}").contains("other"), "{error:#}");
    Ok(())
}

/// One stream on each primary.
fn one_stream_per_primary(cluster: &Cluster) -> Result<Vec<StreamName>> {
    let mut found = Vec::new();
    let mut ports = BTreeSet::new();
    for number in 0..1000 {
        let name = format!("orders-{number}");
        let primary = cluster.primary_of_slot(cluster.slot_of(&name)?)?;
        if ports.insert(primary.port()) {
            found.push(stream(&name));
        }
    }
    assert_eq!(found.len(), 3);
    Ok(found)
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_and_appends_continue_when_a_cluster_primary_dies() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let streams = one_stream_per_primary(&cluster)?;
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    for name in &streams {
        append(&backend, name, &numbered(1)).await?;
        read_until(&mut *reader, &streams, &numbered(1)).await?;
    }

    let slot = cluster.slot_of(streams[0].as_str())?;
    cluster.primary_of_slot(slot)?.kill9()?;

    for (name, number) in streams.iter().zip(2..) {
        append(&backend, name, &numbered(number)).await?;
    }
    for number in (2..).take(streams.len()) {
        // A reader for each: the order across streams is undefined.
        let mut fresh = backend.reader(&group(&format!("g{number}")), &consumer("ann")).await?;
        read_until(&mut *fresh, &streams, &numbered(number)).await?;
    }
    append(&backend, &streams[0], &numbered(10)).await?;
    read_until(&mut *reader, &streams, &numbered(10)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_can_be_opened_while_some_nodes_are_unreachable() -> Result<()> {
    let cluster = Cluster::start()?;
    // No node serves slot 0; opening must not depend on it.
    let (primary, replica) = (cluster.primary_of_slot(0)?, cluster.replica_of_slot(0)?);
    primary.kill9()?;
    replica.kill9()?;
    let backend = open(&cluster.url()).await?;
    let described = backend.describe();
    assert!(described.version.is_some(), "{described:?}");
    backend.close().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_continue_when_a_paused_cluster_primary_is_replaced() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let streams = one_stream_per_primary(&cluster)?;
    let slot = cluster.slot_of(streams[0].as_str())?;
    append(&backend, &streams[0], &numbered(1)).await?;
    let old = cluster.primary_of_slot(slot)?;

    old.pause()?;
    append(&backend, &streams[0], &numbered(2)).await?;
    old.resume()?;

    let found = backend.range(&streams[0], Range::last(1)).await?;
    assert_eq!(found[0].fields, numbered(2));
    Ok(())
}

/// On a busy machine a connection may take longer to open than the other servers wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_tail_reads_from_a_cluster_server_that_accepts_connections_slowly() -> Result<()> {
    let cluster = Cluster::builder().setting("cluster-node-timeout", "15000").start()?;
    let options = Options { call_deadline: TIMEOUT, ..Default::default() };
    let backend = connect(&cluster.url(), &options).await?;
    let streams = one_stream_per_primary(&cluster)?;
    let slow = cluster.primary_of_slot(cluster.slot_of(streams[0].as_str())?)?;
    let mut tail = backend.tail().await?;
    let positions = [&streams[0], &streams[1]].map(|name| (name.clone(), EntryId::MIN));

    slow.pause()?;
    let read =
        tokio::spawn(async move { tail.read(&positions, 10, Duration::from_secs(60)).await });
    // The other server has replied, and the read goes on although there is no connection to this one.
    let other = cluster.primary_of_slot(cluster.slot_of(streams[1].as_str())?)?;
    wait_until("a blocked read", TIMEOUT, || {
        let clients = other.command(&["CLIENT", "LIST"]).map(|list| list.text());
        let is_blocked =
            |client: &str| client.contains(" cmd=xread ") && client.contains(" flags=b ");
        clients.is_ok_and(|clients| clients.lines().any(is_blocked))
    })?;
    slow.resume()?;
    append(&backend, &streams[0], &numbered(1)).await?;

    let read = read.await??;
    assert_eq!((&read[0].stream, &read[0].entries[0].fields), (&streams[0], &numbered(1)));
    Ok(())
}

/// Entries of other servers do not end the attempt to connect, and its slot has not failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_accepts_connections_slowly_has_not_failed_while_others_have_entries()
-> Result<()> {
    let cluster = Cluster::builder().setting("cluster-node-timeout", "15000").start()?;
    let backend = open(&cluster.url()).await?;
    let streams = &one_stream_per_primary(&cluster)?[..2];
    for name in streams {
        backend.ensure_group(name, &group("workers"), GroupStart::Beginning).await?;
    }
    let slow = cluster.primary_of_slot(cluster.slot_of(streams[0].as_str())?)?;
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    append(&backend, &streams[1], &numbered(1)).await?;

    slow.pause()?;
    let read = reader.read(streams, 10, Duration::from_secs(60)).await?;
    let failures = reader.take_failures();
    slow.resume()?;

    assert_eq!((&read[0].stream, &read[0].entries[0].fields), (&streams[1], &numbered(1)));
    // On a very busy machine the attempt itself may have ended.
    let is_attempt = |error: &StreamError| error.to_string().contains("cannot connect");
    assert!(failures.iter().all(|failure| is_attempt(&failure.error)), "{failures:?}");
    append(&backend, &streams[0], &numbered(2)).await?;
    read_until(&mut *reader, streams, &numbered(2)).await
}

/// A connection that is blocked with the reply of an earlier read does not wait for a server that begins to hang.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_begins_to_hang_does_not_stop_the_streams_of_others() -> Result<()> {
    let cluster = Cluster::builder().setting("cluster-node-timeout", "60000").start()?;
    // A call may take longer than the servers wait for each other.
    let options = Options { call_deadline: Duration::from_secs(60), ..Default::default() };
    let backend = connect(&cluster.url(), &options).await?;
    let streams = &one_stream_per_primary(&cluster)?[..2];
    for name in streams {
        backend.ensure_group(name, &group("workers"), GroupStart::Beginning).await?;
    }
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    assert_eq!(reader.read(streams, 10, Duration::from_millis(50)).await?, []);
    let (writer, second) = (Arc::clone(&backend), streams[1].clone());
    let writing = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        append(&writer, &second, &numbered(1)).await
    });
    // Ends with the entry of the second stream. The read of the first one stays blocked.
    read_until(&mut *reader, streams, &numbered(1)).await?;
    writing.await??;

    let hung = cluster.primary_of_slot(cluster.slot_of(streams[1].as_str())?)?;
    hung.pause()?;
    append(&backend, &streams[0], &numbered(2)).await?;
    let read = tokio::time::timeout(Duration::from_secs(30), async {
        read_until(&mut *reader, streams, &numbered(2)).await
    })
    .await;
    hung.resume()?;
    read.context("the stream of the other server waits for the one that hangs")?
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_leases_are_reported_by_every_primary() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let mut watch = backend.watch("lease:").await?;
    let names: BTreeSet<String> = (0..60).map(|number| format!("lease:{number}")).collect();
    for name in &names {
        backend.acquire(&lease(name), &holder("ann"), Duration::from_millis(200)).await?;
    }
    let mut expired = BTreeSet::new();
    while expired != names {
        let event = tokio::time::timeout(TIMEOUT, watch.next()).await?;
        if event.kind == LeaseEventKind::Expired {
            expired.extend(event.lease.map(|lease| lease.to_string()));
        }
    }

    // A release is reported once, though every node forwards it.
    let fence = won(&backend, "lease:x").await?;
    backend.release(&holder("ann"), &[fence]).await?;
    let event = tokio::time::timeout(TIMEOUT, watch.next()).await?;
    assert_eq!((event.kind, event.lease), (LeaseEventKind::Released, Some(lease("lease:x"))));
    let quiet = tokio::time::timeout(Duration::from_millis(300), watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    Ok(())
}

/// The first of the servers does not answer: an older watch and a new one report the leases of the others.
#[tokio::test(flavor = "multi_thread")]
async fn leases_are_watched_while_a_server_of_the_cluster_does_not_answer() -> Result<()> {
    let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no").start()?;
    let options = Options { call_deadline: Duration::from_secs(1), ..Options::default() };
    let backend = connect(&cluster.url(), &options).await?;
    let mut older = backend.watch("lease:").await?;
    let nodes = cluster.nodes();
    // Releases are reported by the first server.
    let is_first = |node: &Redis| {
        let clients = node.command(&["CLIENT", "LIST"]);
        clients.is_ok_and(|list| list.text().contains(" sub=2 "))
    };
    let first = nodes[..3].iter().position(is_first).context("one reports releases")?;
    let mut name = None;
    for number in 0.. {
        let candidate = format!("lease:{number}");
        let slot = cluster.slot_of(&candidate)?;
        if cluster.primary_of_slot(slot)?.port() != nodes[first].port() {
            name = Some(candidate);
            break;
        }
    }
    let name = name.context("some slots are on other servers")?;

    // With its replica: no other server takes over.
    nodes[first + 3].pause()?;
    nodes[first].pause()?;
    let mut newer = backend.watch("lease:").await.context("a new watch")?;
    for (watch, which) in [(&mut newer, "newer"), (&mut older, "older")] {
        let reported = async {
            loop {
                let fence = won(&backend, &name).await?;
                backend.release(&holder("ann"), &[fence]).await?;
                // A release while the watch subscribes again is not reported.
                let until = tokio::time::Instant::now() + Duration::from_millis(500);
                while let Ok(event) = tokio::time::timeout_at(until, watch.next()).await {
                    if event.kind == LeaseEventKind::Released && event.lease == Some(lease(&name)) {
                        return anyhow::Ok(());
                    }
                }
            }
        };
        tokio::time::timeout(TIMEOUT, reported).await.context(which)??;
    }
    nodes[first].resume()?;
    nodes[first + 3].resume()?;
    Ok(())
}

/// One server hangs, with its replica: the leases of the others are renewed well before they lapse, and so is the one with a
/// copy on each server. Only those of the server that hangs are unknown.
#[tokio::test(flavor = "multi_thread")]
async fn leases_of_a_cluster_are_renewed_while_one_server_does_not_answer() -> Result<()> {
    let ttl = Duration::from_secs(3);
    let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no").start()?;
    let backend = open(&cluster.url()).await?;
    let servers = one_stream_per_primary(&cluster)?;
    let named = |kind: &str| -> Vec<_> {
        servers.iter().map(|server| lease(&format!("{kind}:{{{server}}}"))).collect()
    };
    let copies = named("member");
    let leases = MajorityLease::new(Arc::clone(&backend) as _, copies.clone());
    let mut fences = Vec::new();
    for name in named("partition").into_iter().chain([copies[0].clone()]) {
        match leases.acquire(&name, &holder("ann"), ttl).await? {
            AcquireResult::Won(epoch) => fences.push(Fence { lease: name, epoch }),
            held => bail!("{held:?}"),
        }
    }
    let kept = [Renewal::Kept; 4];
    assert_eq!(leases.renew(&holder("ann"), &fences, ttl).await?, kept);

    let hanging = cluster.primary_of_slot(cluster.slot_of(servers[0].as_str())?)?;
    let replica = cluster.replica_of_slot(cluster.slot_of(servers[0].as_str())?)?;
    replica.pause()?;
    hanging.pause()?;
    let expected = [Renewal::Unknown, Renewal::Kept, Renewal::Kept, Renewal::Kept];
    // Longer than the leases live.
    let until = Instant::now() + ttl * 2;
    while Instant::now() < until {
        let began = Instant::now();
        assert_eq!(leases.renew(&holder("ann"), &fences, ttl).await?, expected);
        let took = began.elapsed();
        assert!(took < ttl / 3, "a renewal took {took:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }

    hanging.resume()?;
    replica.resume()?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_and_readers_follow_a_slot_migration() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let streams = one_stream_per_primary(&cluster)?;
    let name = streams[0].clone();
    let slot = cluster.slot_of(name.as_str())?;
    let from = cluster.primary_of_slot(slot)?;
    let to = cluster.primary_of_slot(cluster.slot_of(streams[1].as_str())?)?;
    let id_of = |node: &headwater_testkit::Redis| -> Result<String> {
        Ok(node.command(&["CLUSTER", "MYID"])?.text())
    };
    let (from_id, to_id, number) = (id_of(from)?, id_of(to)?, slot.to_string());
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    append(&backend, &name, &numbered(1)).await?;
    read_until(&mut *reader, std::slice::from_ref(&name), &numbered(1)).await?;
    let (sender, mut moved) = tokio::sync::watch::channel(false);
    let appender = {
        let (backend, name) = (backend.clone(), name.clone());
        tokio::spawn(async move {
            for number in 2..400 {
                append(&backend, &name, &numbered(number)).await?;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            // The last append waits until the slot has moved.
            moved.wait_for(|moved| *moved).await?;
            append(&backend, &name, &numbered(400)).await
        })
    };

    to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &from_id])?.ok()?;
    from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &to_id])?.ok()?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let port = to.port().to_string();
    from.command(&["MIGRATE", "127.0.0.1", &port, name.as_str(), "0", "5000"])?.ok()?;
    // Now the old owner replies with ASK to every command.
    tokio::time::sleep(Duration::from_millis(200)).await;
    append(&backend, &name, &numbered(1000)).await?;
    read_until(&mut *reader, std::slice::from_ref(&name), &numbered(1000)).await?;
    sender.send_replace(true);
    for node in [to, from] {
        node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &to_id])?.ok()?;
    }

    appender.await??;
    read_until(&mut *reader, std::slice::from_ref(&name), &numbered(400)).await?;
    let all = backend.range(&name, Range::first(1000)).await?;
    assert_eq!(all.len(), 401, "nothing was lost or duplicated");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follow_up_in_another_slot_is_written_before_the_acknowledgement() -> Result<()> {
    let cluster = Cluster::shared()?;
    let backend = open(&cluster.url()).await?;
    let name = headwater_testkit::unique("orders");
    let (orders, workers, ann) = (stream(&name), group("workers"), consumer("ann"));
    let dead = stream(&format!("dead:{name}"));
    assert_ne!(cluster.slot_of(orders.as_str())?, cluster.slot_of(dead.as_str())?);
    backend.append(&orders, &[one(), one()], &KEEP).await?;
    let mut reader = backend.reader(&workers, &ann).await?;
    let ids = read_ids(&mut *reader, &orders).await?;
    let entry =
        |id| Settlement { id, action: SettleAction::Append { to: dead.clone(), fields: one() } };
    let entries = [entry(ids[0]), Settlement::ack(ids[1])];
    let settle = SettleBatch {
        stream: &orders,
        group: &workers,
        consumer: &ann,
        fence: None,
        entries: &entries,
    };

    assert_eq!(backend.settle(settle).await?.applied, 2);
    assert_eq!(backend.settle(settle).await?.stale, 2, "repeating it changes nothing");
    assert_eq!(backend.range(&dead, Range::first(10)).await?.len(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_in_different_slots_are_rejected_with_advice() -> Result<()> {
    let cluster = Cluster::shared()?;
    let backend = open(&cluster.url()).await?;
    let name = headwater_testkit::unique("orders");
    let (orders, workers, ann) = (stream(&name), group("workers"), consumer("ann"));
    let elsewhere = format!("elsewhere:{name}");
    let assert_advice = |what: &str, error: StreamError| {
        assert!(matches!(error, StreamError::Invalid { .. }), "{what}: {error}");
        assert!(error.to_string().contains("hash tag"), "{what}: {error}");
    };

    let fence = Fence { lease: lease(&elsewhere), epoch: Epoch(1) };
    let settle = SettleBatch {
        stream: &orders,
        group: &workers,
        consumer: &ann,
        fence: Some(&fence),
        entries: &[],
    };
    assert_advice("a fence", backend.settle(settle).await.unwrap_err());
    let then = SettleAction::Reschedule {
        delays: delays(&elsewhere),
        to: orders.clone(),
        due: DueTime::After(HOUR),
        fields: one(),
    };
    let entries = [Settlement { id: EntryId::new(1, 1), action: then }];
    let settle = SettleBatch { fence: None, entries: &entries, ..settle };
    assert_advice("a delay set", backend.settle(settle).await.unwrap_err());
    let items = [ScheduleRequest { to: orders.clone(), due: DueTime::After(HOUR), fields: one() }];
    let result = backend.schedule(&delays(&elsewhere), &items).await;
    assert_advice("a target", result.unwrap_err());
    Ok(())
}

/// One server is dead, so that the topology is refreshed all the time; the others stall for longer than a refresh waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_stall_does_not_lose_the_replies_of_calls_in_flight() -> Result<()> {
    let cluster = Cluster::builder()
        .setting("cluster-require-full-coverage", "no")
        .setting("cluster-node-timeout", "30000")
        .start()?;
    let backend = open(&cluster.url()).await?;
    let streams = one_stream_per_primary(&cluster)?;
    for name in &streams {
        append(&backend, name, &numbered(0)).await?;
    }
    let node_of = |name: &StreamName| cluster.primary_of_slot(cluster.slot_of(name.as_str())?);
    let (dead, stalled) = (node_of(&streams[0])?, [node_of(&streams[1])?, node_of(&streams[2])?]);
    dead.kill9()?;
    let lost = {
        let (backend, name) = (backend.clone(), streams[0].clone());
        tokio::spawn(async move { backend.append(&name, &[numbered(1)], &KEEP).await })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;

    stalled.iter().try_for_each(|node| node.pause())?;
    let calls: Vec<_> = (0..20)
        .map(|number| {
            let (backend, name) = (backend.clone(), streams[1 + number % 2].clone());
            tokio::spawn(async move { backend.append(&name, &[numbered(1)], &KEEP).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    stalled.iter().try_for_each(|node| node.resume())?;

    for call in calls {
        call.await??;
    }
    assert!(matches!(lost.await?, Err(StreamError::Unavailable { .. })));
    Ok(())
}

/// All servers stall for longer than a probe waits for each of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_probe_of_a_stalled_cluster_does_not_lose_the_replies_of_calls_in_flight() -> Result<()> {
    let cluster = Cluster::builder().setting("cluster-node-timeout", "30000").start()?;
    let backend = open(&cluster.url()).await?;
    let streams = one_stream_per_primary(&cluster)?;
    for name in &streams {
        append(&backend, name, &numbered(0)).await?;
    }
    let stalled = &cluster.nodes()[..streams.len()];
    stalled.iter().try_for_each(|node| node.pause())?;
    let probe = {
        let backend = backend.clone();
        tokio::spawn(async move { backend.probe().await })
    };
    // The probe is the oldest request.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let calls: Vec<_> = streams
        .iter()
        .map(|name| {
            let (backend, name) = (backend.clone(), name.clone());
            tokio::spawn(async move { backend.append(&name, &[numbered(1)], &KEEP).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(3500)).await;
    stalled.iter().try_for_each(|node| node.resume())?;

    for call in calls {
        call.await??;
    }
    probe.await??;
    Ok(())
}
