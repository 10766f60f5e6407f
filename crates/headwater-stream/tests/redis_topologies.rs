//! Sentinel and Cluster: the backend follows the primary, and stays in its slots.
#![cfg(feature = "redis")]

mod redis_support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use headwater_stream::{
    AcquireResult, Backend, DueTime, EntryId, Epoch, Fence, Fields, GroupStart, LeaseEventKind,
    Range, Retention, ScheduleRequest, SettleAction, SettleBatch, Settlement, StreamError,
    StreamName,
};
use headwater_testkit::{Cluster, Sentinel, wait_until};

use crate::redis_support::*;

const HOUR: Duration = Duration::from_secs(3600);
const KEEP: Retention = Retention::KEEP_ALL;
/// Longer than a sentinel that was starved for a moment keeps from acting, which is 30 s.
const PATIENCE: Duration = Duration::from_secs(90);

/// Appends until it succeeds, as a careful caller does.
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
    tokio::time::timeout(PATIENCE, appending).await?
}

/// Reads until this entry comes.
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
    tokio::time::timeout(PATIENCE, reading).await?
}

async fn won(backend: &Arc<dyn Backend>, name: &str) -> Result<Fence> {
    match backend.acquire(&lease(name), &holder("ann"), HOUR).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease: lease(name), epoch }),
        held => bail!("{held:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_sentinel_everything_goes_on_at_the_new_primary() -> Result<()> {
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
    wait_until("every sentinel to know the new primary", PATIENCE, || {
        sentinel.current_primary().is_ok_and(|primary| primary == sentinel.replica().addr())
    })?;
    let missed = tokio::time::timeout(PATIENCE, watch.next()).await?;
    assert_eq!(missed.kind, LeaseEventKind::Lagged);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_sentinel_demoted_is_left_at_once() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let backend = open(&sentinel.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let mut reader = backend.reader(&workers, &ann).await?;
    append(&backend, &orders, &numbered(1)).await?;

    sentinel.sentinels()[0].command(&["SENTINEL", "FAILOVER", "mymaster"])?.ok()?;

    // What reaches the old primary before it learns that it is none is lost: Redis replicates behind its replies.
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
    wait_until("every sentinel to know the new primary", PATIENCE, || {
        sentinel.current_primary().is_ok_and(|primary| primary == sentinel.replica().addr())
    })?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_sentinel_does_not_know_is_named() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let url = sentinel.url().replace("/mymaster", "/other");
    let error = open(&url).await.map(drop).expect_err("there is no such service");
    assert!(format!("{error:#}").contains("other"), "{error:#}");
    Ok(())
}

/// A stream for each primary, and which one it is on.
fn a_stream_per_primary(cluster: &Cluster) -> Result<Vec<StreamName>> {
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
async fn a_cluster_goes_on_when_a_primary_dies_while_it_is_read() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let streams = a_stream_per_primary(&cluster)?;
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
        // Each one by itself: which comes first is not said.
        let mut fresh = backend.reader(&group(&format!("g{number}")), &consumer("ann")).await?;
        read_until(&mut *fresh, &streams, &numbered(number)).await?;
    }
    append(&backend, &streams[0], &numbered(10)).await?;
    read_until(&mut *reader, &streams, &numbered(10)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_opened_while_some_of_its_nodes_are_away() -> Result<()> {
    let cluster = Cluster::start()?;
    // Nobody answers for the first slot, which is nothing special.
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
async fn a_cluster_primary_that_stands_still_is_replaced() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let streams = a_stream_per_primary(&cluster)?;
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

#[tokio::test(flavor = "multi_thread")]
async fn expired_leases_are_heard_of_from_every_primary() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let mut watch = backend.watch("lease:").await?;
    let names: BTreeSet<String> = (0..60).map(|number| format!("lease:{number}")).collect();
    for name in &names {
        backend.acquire(&lease(name), &holder("ann"), Duration::from_millis(200)).await?;
    }
    let mut heard = BTreeSet::new();
    while heard != names {
        let hint = tokio::time::timeout(PATIENCE, watch.next()).await?;
        if hint.kind == LeaseEventKind::Expired {
            heard.extend(hint.lease.map(|lease| lease.to_string()));
        }
    }

    // A release is heard once, though every node passes it on.
    let fence = won(&backend, "lease:x").await?;
    backend.release(&holder("ann"), &[fence]).await?;
    let hint = tokio::time::timeout(PATIENCE, watch.next()).await?;
    assert_eq!((hint.kind, hint.lease), (LeaseEventKind::Released, Some(lease("lease:x"))));
    let quiet = tokio::time::timeout(Duration::from_millis(300), watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_takes_callers_and_readers_along() -> Result<()> {
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    let streams = a_stream_per_primary(&cluster)?;
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
            // The last one comes when the slot has moved, however quick the others were.
            moved.wait_for(|moved| *moved).await?;
            append(&backend, &name, &numbered(400)).await
        })
    };

    to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &from_id])?.ok()?;
    from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &to_id])?.ok()?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let port = to.port().to_string();
    from.command(&["MIGRATE", "127.0.0.1", &port, name.as_str(), "0", "5000"])?.ok()?;
    // Now the old owner sends us on, once for every command.
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
    assert_eq!(all.len(), 401, "nothing was lost, nothing came twice");
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
    assert_eq!(backend.settle(settle).await?.stale, 2, "a second time changes nothing");
    assert_eq!(backend.range(&dead, Range::first(10)).await?.len(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_must_share_a_slot_and_does_not_is_refused_with_advice() -> Result<()> {
    let cluster = Cluster::shared()?;
    let backend = open(&cluster.url()).await?;
    let name = headwater_testkit::unique("orders");
    let (orders, workers, ann) = (stream(&name), group("workers"), consumer("ann"));
    let elsewhere = format!("elsewhere:{name}");
    let advice = |what: &str, error: StreamError| {
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
    advice("a fence", backend.settle(settle).await.unwrap_err());
    let then = SettleAction::Reschedule {
        delays: delays(&elsewhere),
        to: orders.clone(),
        due: DueTime::After(HOUR),
        fields: one(),
    };
    let entries = [Settlement { id: EntryId::new(1, 1), then }];
    let settle = SettleBatch { fence: None, entries: &entries, ..settle };
    advice("a delay set", backend.settle(settle).await.unwrap_err());
    let items = [ScheduleRequest { to: orders.clone(), due: DueTime::After(HOUR), fields: one() }];
    let answer = backend.schedule(&delays(&elsewhere), &items).await;
    advice("a target", answer.unwrap_err());
    Ok(())
}
