//! Two programs in one Redis database that use the same names with different key prefixes. Each is a user who may use only keys
//! and channels with its prefix.
#![cfg(feature = "redis")]

mod redis_support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_stream::{
    AcquireResult, Backend, DedupStatus, DisconnectOutcome, DueTime, Fence, GroupStart,
    IdempotentEntry, LeaseEventKind, LeaseWatch, Range, RegistryMap, Retention, ScheduleRequest,
    SettleAction, SettleBatch, Settlement, StreamError, StreamName,
};
use headwater_testkit::{Cluster, Redis};

use crate::redis_support::*;

const HOUR: Duration = Duration::from_secs(3600);
const KEEP: Retention = Retention::KEEP_ALL;
/// Upper limit for immediate actions on a busy machine.
const SLACK: Duration = Duration::from_secs(30);
/// A stream without a hash tag and one with it, each with the beginning of names that share its slot.
const NAMES: [(&str, &str); 2] = [("orders", "{orders}:"), ("{t}:orders", "{t}:")];

/// Two programs on one server or cluster.
struct Programs {
    app1: Arc<dyn Backend>,
    app2: Arc<dyn Backend>,
}

impl Programs {
    async fn on_redis(redis: &Redis) -> Result<Self> {
        allow(std::slice::from_ref(redis), "app1", "app1:")?;
        allow(std::slice::from_ref(redis), "app2", "app2:")?;
        let open_as =
            async |user: &str, prefix: &str| open(&url_of_user(redis, user, prefix)).await;
        Ok(Self { app1: open_as("app1", "app1:").await?, app2: open_as("app2", "app2:").await? })
    }

    async fn on_cluster(cluster: &Cluster) -> Result<Self> {
        allow(cluster.nodes(), "app1", "app1:")?;
        allow(cluster.nodes(), "app2", "app2:")?;
        let open_as = async |user: &str, prefix: &str| {
            open(&cluster_url_of_user(cluster, user, prefix)).await
        };
        Ok(Self { app1: open_as("app1", "app1:").await?, app2: open_as("app2", "app2:").await? })
    }
}

/// Everything that has a key, under the same names in both programs: what one does is new to the other.
async fn assert_separate(programs: &Programs) -> Result<()> {
    for (orders, beside) in NAMES {
        let orders = stream(orders);
        for (app, other) in [(&programs.app1, &programs.app2), (&programs.app2, &programs.app1)] {
            let before = other.stats(&orders).await?.map(|stats| stats.length);
            assert_streams_work(&**app, &orders, beside).await?;

            let scope = scope(&format!("{beside}dedup"));
            assert_eq!(app.dedup_begin(&scope, &["m1"], HOUR).await?, [DedupStatus::New]);
            let (map, set) = (map(&format!("{beside}map")), set(&format!("{beside}set")));
            let fields = RegistryMap::from([("a".to_owned(), "1".into())]);
            assert!(app.map_create(&map, &fields).await?, "{map}");
            assert_eq!(app.set_add(&set, &["a"], None).await?, 1, "{set}");
            assert_eq!(app.set_members(&set).await?, ["a"]);
            let wrong = app.append(&stream(set.as_str()), &[one()], &KEEP).await;
            assert!(matches!(wrong, Err(StreamError::WrongType { .. })), "{wrong:?}");

            assert_eq!(other.stats(&orders).await?.map(|stats| stats.length), before);
        }
    }
    Ok(())
}

/// Appends, reads and settles with follow-ups; everything must be new.
async fn assert_streams_work(app: &dyn Backend, orders: &StreamName, beside: &str) -> Result<()> {
    let (workers, ann) = (group("workers"), consumer("ann"));
    let (dead, later) = (stream(&format!("{beside}dead")), delays(&format!("{beside}later")));
    let owner = lease(&format!("{beside}lease"));

    let entry = IdempotentEntry { id: "m1".to_owned(), fields: numbered(1) };
    let first = app.append_once(orders, &[entry], HOUR, &Retention::max_len(100)).await?;
    assert!(!first[0].duplicate, "{orders}");
    assert_eq!(app.appended(orders, &["m1"]).await?, [Some(first[0].id)]);
    let mut ids = vec![first[0].id];
    ids.extend(app.append(orders, &[numbered(2), numbered(3)], &KEEP).await?);
    assert!(app.ensure_group(orders, &workers, GroupStart::Beginning).await?, "{orders}");
    let mut reader = app.reader(&workers, &ann).await?;
    assert_eq!(read_ids(&mut *reader, orders).await?, ids);

    let won = app.acquire(&owner, &holder("ann"), HOUR).await?;
    let AcquireResult::Won(epoch) = won else { bail!("{owner}: {won:?}") };
    let due = DueTime::After(Duration::ZERO);
    let (delays, to) = (later.clone(), orders.clone());
    let retry = SettleAction::Reschedule { delays, to, due, fields: numbered(4) };
    let letter = SettleAction::Append { to: dead.clone(), fields: numbered(5) };
    let settle = SettleBatch {
        stream: orders,
        group: &workers,
        consumer: &ann,
        fence: Some(&Fence { lease: owner.clone(), epoch }),
        entries: &[
            Settlement::ack(ids[0]),
            Settlement { id: ids[1], action: retry },
            Settlement { id: ids[2], action: letter },
        ],
    };
    assert_eq!(app.settle(settle).await?.applied, 3, "{orders}");
    assert_eq!(app.range(&dead, Range::first(10)).await?.len(), 1, "{dead}");
    assert!(app.leases(&[owner]).await?[0].is_some());

    assert!(app.wait_until_due(&later, SLACK).await?);
    let promoted = app.promote_due(&later, 10).await?;
    assert_eq!((promoted.len(), &promoted[0].stream), (1, orders));
    assert_eq!(read_ids(&mut *reader, orders).await?, [promoted[0].id]);
    let item = ScheduleRequest { to: orders.clone(), due: DueTime::After(HOUR), fields: one() };
    app.schedule(&later, &[item]).await?;
    let delayed = app.delayed(&later, 0, 10).await?;
    assert_eq!((delayed.len(), &delayed[0].to), (1, orders));

    // The server names a key, the error a stream.
    let missing = stream(&format!("{beside}missing"));
    reader.require_groups();
    let read = reader.read(&[orders.clone(), missing.clone()], 1, Duration::ZERO).await;
    match read {
        Err(StreamError::NoGroup { stream, .. }) => assert_eq!(stream, missing.as_str()),
        read => bail!("{missing}: {read:?}"),
    }
    Ok(())
}

/// The server has keys, and each begins with a prefix.
fn assert_keys_have_a_prefix(servers: &[Redis]) -> Result<()> {
    let mut found = [0, 0];
    for server in servers {
        for key in server.command(&["KEYS", "*"])?.ok()?.items() {
            let key = key.text();
            let at = ["app1:", "app2:"].iter().position(|prefix| key.starts_with(prefix));
            found[at.with_context(|| format!("the key {key:?} has no prefix"))?] += 1;
        }
    }
    assert!(found[0] > 10 && found[0] == found[1], "{found:?}");
    Ok(())
}

/// Two readers with the same names in both programs: disconnecting one does not affect the other.
async fn assert_readers_are_separate(programs: &Programs, servers: &[Redis]) -> Result<()> {
    for (name, _) in NAMES {
        let orders = stream(&format!("{name}:reads"));
        let mut reads = Vec::new();
        for app in [&programs.app1, &programs.app2] {
            app.ensure_group(&orders, &group("workers"), GroupStart::Beginning).await?;
            let mut reader = app.reader(&group("workers"), &consumer("ann")).await?;
            let orders = [orders.clone()];
            reads.push(tokio::spawn(async move { reader.read(&orders, 10, SLACK).await }));
        }
        until_readers_block_on(servers, 2).await?;
        let (second, first) = (reads.pop().context("two")?, reads.pop().context("two")?);

        let outcome =
            programs.app1.disconnect_reader(&orders, &group("workers"), &consumer("ann")).await?;

        assert_eq!(outcome, DisconnectOutcome::Disconnected { readers: 1 }, "{name}");
        let ended = first.await?;
        assert!(matches!(ended, Err(StreamError::Unavailable { .. })), "{ended:?}");
        programs.app1.append(&orders, &[one()], &KEEP).await?;
        assert!(!second.is_finished(), "{name}: an entry of another program ended the read");
        let ids = programs.app2.append(&orders, &[one()], &KEEP).await?;
        let batches = second.await??;
        assert_eq!(batches.len(), 1);
        assert_eq!((&batches[0].stream, batches[0].entries[0].id), (&orders, ids[0]), "{name}");
    }
    Ok(())
}

/// The next event about a lease.
async fn next_event(watch: &mut dyn LeaseWatch) -> Result<(String, LeaseEventKind)> {
    loop {
        let event = tokio::time::timeout(SLACK, watch.next()).await?;
        if let Some(lease) = event.lease {
            return Ok((lease.to_string(), event.kind));
        }
    }
}

/// Expired and released leases are reported to the program that held them, by the name that it uses.
async fn assert_events_are_separate(programs: &Programs) -> Result<()> {
    for (name, _) in NAMES {
        let prefix = format!("{name}:watched:");
        let mut watches =
            [programs.app1.watch(&prefix).await?, programs.app2.watch(&prefix).await?];
        let apps = [&programs.app1, &programs.app2];
        let names = ["one", "two"].map(|own| format!("{prefix}{own}"));
        for (app, own) in apps.iter().zip(&names) {
            app.acquire(&lease(own), &holder("ann"), Duration::from_millis(60)).await?;
        }
        for (watch, own) in watches.iter_mut().zip(&names) {
            let expected = (own.clone(), LeaseEventKind::Expired);
            assert_eq!(next_event(&mut **watch).await?, expected);
        }
        for (app, own) in apps.iter().zip(&names) {
            let won = app.acquire(&lease(own), &holder("ann"), HOUR).await?;
            let AcquireResult::Won(epoch) = won else { bail!("{own}: {won:?}") };
            app.release(&holder("ann"), &[Fence { lease: lease(own), epoch }]).await?;
        }
        for (watch, own) in watches.iter_mut().zip(&names) {
            let expected = (own.clone(), LeaseEventKind::Released);
            assert_eq!(next_event(&mut **watch).await?, expected);
            // Not of a reconnect, after which an event without a lease says that some may be missing.
            let more = next_event(&mut **watch);
            let more = tokio::time::timeout(Duration::from_millis(300), more).await;
            assert!(more.is_err(), "{own}: {more:?}");
        }
    }
    Ok(())
}

/// A task that waits on a delay set wakes when its own program schedules an earlier entry.
async fn assert_wakeups_are_separate(programs: &Programs) -> Result<()> {
    for (later, target) in [("wakes", "{wakes}:target"), ("{t}:wakes", "{t}:target")] {
        let (later, orders) = (delays(later), stream(target));
        let waits = [&programs.app1, &programs.app2].map(|app| {
            let (app, later) = (Arc::clone(app), later.clone());
            tokio::spawn(async move { app.wait_until_due(&later, SLACK).await })
        });
        let due = DueTime::After(Duration::from_millis(100));
        let item = ScheduleRequest { to: orders, due, fields: one() };
        programs.app1.schedule(&later, std::slice::from_ref(&item)).await?;
        let [first, second] = waits;
        assert!(first.await??, "it is due");
        assert!(!second.is_finished(), "nothing is due in the other program");
        programs.app2.schedule(&later, &[item]).await?;
        assert!(second.await??, "it is due");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_names_with_other_prefixes_are_other_data() -> Result<()> {
    let redis = Redis::start()?;
    let programs = Programs::on_redis(&redis).await?;
    assert_separate(&programs).await?;
    assert_keys_have_a_prefix(std::slice::from_ref(&redis))
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnecting_a_reader_does_not_affect_that_of_another_prefix() -> Result<()> {
    let redis = Redis::start()?;
    let programs = Programs::on_redis(&redis).await?;
    assert_readers_are_separate(&programs, std::slice::from_ref(&redis)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_and_delays_of_another_prefix_wake_nobody() -> Result<()> {
    let redis = Redis::start()?;
    let programs = Programs::on_redis(&redis).await?;
    assert_events_are_separate(&programs).await?;
    assert_wakeups_are_separate(&programs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_with_different_prefixes_are_separate_on_a_cluster() -> Result<()> {
    // No replica takes over while a busy machine stops a server for a moment.
    let cluster = Cluster::builder().setting("cluster-node-timeout", "15000").start()?;
    let programs = Programs::on_cluster(&cluster).await?;
    assert_separate(&programs).await?;
    // The first three are the primaries.
    assert_keys_have_a_prefix(&cluster.nodes()[..3])?;
    assert_readers_are_separate(&programs, cluster.nodes()).await?;
    assert_events_are_separate(&programs).await?;
    assert_wakeups_are_separate(&programs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_of_another_prefix_is_denied() -> Result<()> {
    let redis = Redis::start()?;
    allow(std::slice::from_ref(&redis), "app1", "app1:")?;
    for prefix in ["app2:", "app"] {
        let backend = open(&url_of_user(&redis, "app1", prefix)).await?;
        let appended = backend.append(&stream("orders"), &[one()], &KEEP).await;
        assert!(matches!(appended, Err(StreamError::Denied { .. })), "{prefix}: {appended:?}");
        let watch = backend.watch("lease:").await.map(drop);
        assert!(matches!(watch, Err(StreamError::Denied { .. })), "{prefix}: {watch:?}");
    }
    Ok(())
}
