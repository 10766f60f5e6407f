//! The Redis backend with the settings, users, data and limits of a real server.
#![cfg(feature = "redis")]

mod redis_support;

use std::time::Duration;

use anyhow::{Result, bail};
use headwater_stream::{
    AcquireResult, DisconnectOutcome, DueTime, Epoch, Fence, Fields, GroupStart, IdempotentEntry,
    LeaseEventKind, LeaseWatch, MapName, Range, RegistryMap, Renewal, Retention, ScheduleRequest,
    SetName, SettleAction, SettleBatch, Settlement, StreamError, TrimGuard, WatchMode,
};
use headwater_testkit::{Cluster, Redis, RedisBuilder};

use crate::redis_support::*;

const HOUR: Duration = Duration::from_secs(3600);
const KEEP: Retention = Retention::KEEP_ALL;
/// Upper limit for immediate actions on a busy machine.
const SLACK: Duration = Duration::from_secs(30);

/// The next lease event.
async fn next_event(watch: &mut dyn LeaseWatch) -> Result<(Option<String>, LeaseEventKind)> {
    let event = tokio::time::timeout(SLACK, watch.next()).await?;
    Ok((event.lease.map(|lease| lease.to_string()), event.kind))
}

/// Uses each part of the backend once, as an application does.
async fn assert_all_features_work(url: &str) -> Result<()> {
    let backend = open(url).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let later = delays("later");
    backend.ensure_group(&orders, &workers, GroupStart::Beginning).await?;
    backend.append(&orders, &[one(), one()], &Retention::max_len(1000)).await?;
    let mut reader = backend.reader(&workers, &ann).await?;
    let ids = read_ids(&mut *reader, &orders).await?;
    let AcquireResult::Won(epoch) = backend.acquire(&lease("lease:a"), &holder("h"), HOUR).await?
    else {
        bail!("the lease is held");
    };
    let fence = Fence { lease: lease("lease:a"), epoch };
    let then = SettleAction::Reschedule {
        delays: later.clone(),
        to: orders.clone(),
        due: DueTime::After(Duration::ZERO),
        fields: one(),
    };
    let entries = [Settlement::ack(ids[0]), Settlement { id: ids[1], action: then }];
    let settle = SettleBatch {
        stream: &orders,
        group: &workers,
        consumer: &ann,
        fence: Some(&fence),
        entries: &entries,
    };
    assert_eq!(backend.settle(settle).await?.applied, 2);
    assert!(backend.wait_until_due(&later, Duration::from_secs(1)).await?);
    assert_eq!(backend.promote_due(&later, 10).await?.len(), 1);
    assert_eq!(read_ids(&mut *reader, &orders).await?.len(), 1);
    assert_eq!(backend.stats(&orders).await?.map(|stats| stats.length), Some(3));
    // A dropped read, and a different one after it.
    let dropped = reader.read(std::slice::from_ref(&orders), 1, Duration::from_secs(20));
    assert!(tokio::time::timeout(Duration::from_millis(50), dropped).await.is_err());
    assert_eq!(reader.read(std::slice::from_ref(&orders), 2, Duration::ZERO).await?, []);
    reader.close().await?;
    backend.release(&holder("h"), &[fence]).await?;
    backend.set_add(&set("topics"), &["orders"], Some(HOUR)).await?;
    backend.trim(&orders, &Retention::max_len(1), TrimGuard::Safe).await?;
    backend.close().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_features_work_over_tls() -> Result<()> {
    let redis = Redis::builder().tls().start()?;
    let certificate = redis.ca_certificate().expect("it speaks TLS").display();

    assert_all_features_work(&format!("{}?ca={certificate}", redis.url())).await?;

    // A server with an untrusted certificate is rejected.
    let result = open(&redis.url()).await.map(drop);
    assert!(result.is_err(), "{result:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_callers_share_one_tls_connection() -> Result<()> {
    let redis = Redis::builder().tls().start()?;
    let certificate = redis.ca_certificate().expect("it speaks TLS").display();
    let backend = open(&format!("{}?ca={certificate}", redis.url())).await?;
    let tasks: Vec<_> = (0..32)
        .map(|number| {
            let backend = backend.clone();
            tokio::spawn(async move {
                let big = Fields::new([("payload", vec![b'x'; 10_000 + number])]);
                for _ in 0..20 {
                    backend.append(&stream("orders"), std::slice::from_ref(&big), &KEEP).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    assert_eq!(backend.stats(&stream("orders")).await?.map(|stats| stats.length), Some(640));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_features_work_for_a_user_without_dangerous_commands() -> Result<()> {
    let redis =
        Redis::builder().user("worker", "secret", "~* &* +@all -@dangerous -@admin").start()?;

    assert_all_features_work(&redis.url()).await?;

    let backend = open(&redis.url()).await?;
    let description = backend.describe();
    assert_eq!(description.version, None, "INFO is a dangerous command");
    assert!(!format!("{description:?}").contains("secret"), "{description:?}");
    let fact = description.facts.iter().find(|(name, _)| *name == "blocking reads");
    assert!(fact.is_some_and(|(_, how)| how.contains("500 ms")), "{fact:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_features_work_in_another_database() -> Result<()> {
    let redis = Redis::start()?;
    assert_all_features_work(&format!("{}7", redis.url())).await?;
    let mut connection = redis.connect()?;
    assert_eq!(connection.command(&["DBSIZE"])?.int(), Some(0), "nothing in database 0");
    connection.command(&["SELECT", "7"])?.ok()?;
    assert_eq!(connection.command(&["TYPE", "orders"])?.text(), "stream");

    let result = open(&format!("{}99", redis.url())).await.map(drop);
    let error = result.expect_err("there is no such database").to_string();
    assert!(error.contains("database"), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_denied_at_once() -> Result<()> {
    let redis = Redis::builder().password("secret").start()?;
    assert_all_features_work(&redis.url()).await?;
    for url in [
        format!("redis://{}/", redis.addr()),
        format!("redis://:hush@{}/", redis.addr()),
        format!("redis://ann:hush@{}/", redis.addr()),
    ] {
        let start = std::time::Instant::now();
        match headwater_stream::connect(&url, &headwater_stream::Options::default()).await {
            Err(error @ StreamError::Denied { .. }) => {
                assert!(!error.to_string().contains("hush"), "{error}");
            }
            Err(error) => bail!("{url}: {error}"),
            Ok(_) => bail!("{url}: accepted"),
        }
        assert!(start.elapsed() < SLACK);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_permission_is_denied() -> Result<()> {
    let redis =
        Redis::builder().user("reader", "secret", "~allowed* +@read +@connection").start()?;
    let backend = open(&redis.url()).await?;
    let result = backend.append(&stream("allowed"), &[one()], &KEEP).await;
    assert!(matches!(result, Err(StreamError::Denied { .. })), "{result:?}");
    let result = backend.range(&stream("other"), Range::first(1)).await;
    assert!(matches!(result, Err(StreamError::Denied { .. })), "{result:?}");
    assert_eq!(backend.range(&stream("allowed"), Range::first(1)).await?, []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_of_the_wrong_topology_is_rejected_with_the_right_scheme() -> Result<()> {
    let redis = Redis::start()?;
    let url = format!("redis-cluster://{}", redis.addr());
    let error = open(&url).await.map(drop).expect_err("it is not a cluster").to_string();
    assert!(error.contains("redis://"), "{error}");

    let url = Cluster::shared()?.nodes()[0].url();
    let error = open(&url).await.map(drop).expect_err("it is a cluster").to_string();
    assert!(error.contains("redis-cluster://"), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_are_loaded_again_after_a_script_flush() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    for _ in 0..3 {
        redis.command(&["SCRIPT", "FLUSH"])?.ok()?;
        let retention = Retention::max_len(1);
        backend.append(&stream("orders"), &[one(), one(), one()], &retention).await?;
        backend.trim(&stream("orders"), &retention, TrimGuard::Safe).await?;
        assert_eq!(backend.stats(&stream("orders")).await?.map(|stats| stats.length), Some(1));
        let leases: Vec<_> = (0..1200).map(|number| lease(&format!("lease:{number}"))).collect();
        redis.command(&["SCRIPT", "FLUSH"])?.ok()?;
        assert_eq!(backend.leases(&leases).await?.len(), 1200, "several scripts in one call");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_reader_recreates_its_group_after_a_flush() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let mut reader = backend.reader(&workers, &ann).await?;
    backend.append(&orders, &[one()], &KEEP).await?;
    assert_eq!(read_ids(&mut *reader, &orders).await?.len(), 1);
    let waiting = tokio::spawn(async move {
        let ids = read_ids(&mut *reader, &stream("orders")).await;
        (reader, ids)
    });
    tokio::time::sleep(Duration::from_millis(200)).await;

    redis.command(&["FLUSHALL"])?.ok()?;
    let id = backend.append(&orders, &[one()], &KEEP).await?[0];

    let (mut reader, ids) = waiting.await?;
    assert_eq!(ids?, [id]);
    redis.command(&["FLUSHALL"])?.ok()?;
    let id = backend.append(&orders, &[one()], &KEEP).await?[0];
    assert_eq!(read_ids(&mut *reader, &orders).await?, [id], "also when it was not blocked");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_reports_full_and_loses_nothing() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let (dead, later) = (stream("dead"), delays("later"));
    backend.append(&orders, &vec![one(); 6], &KEEP).await?;
    let mut reader = backend.reader(&workers, &ann).await?;
    let ids = read_ids(&mut *reader, &orders).await?;
    let due =
        [ScheduleRequest { to: dead.clone(), due: DueTime::After(Duration::ZERO), fields: one() }];
    backend.schedule(&later, &due).await?;
    // The scripts are already loaded, so that the write is what fails.
    let settle = async |entries: &[Settlement]| {
        let (stream, group, consumer) = (&orders, &workers, &ann);
        backend.settle(SettleBatch { stream, group, consumer, fence: None, entries }).await
    };
    let append =
        |id| Settlement { id, action: SettleAction::Append { to: dead.clone(), fields: one() } };
    let reschedule = |id| Settlement {
        id,
        action: SettleAction::Reschedule {
            delays: later.clone(),
            to: orders.clone(),
            due: DueTime::After(HOUR),
            fields: one(),
        },
    };
    assert_eq!(settle(&[append(ids[0]), reschedule(ids[1])]).await?.applied, 2);

    redis.command(&["CONFIG", "SET", "maxmemory", "1000"])?.ok()?;
    let full = |what: &str, error: StreamError| {
        assert!(matches!(error, StreamError::Full { .. }), "{what}: {error}");
    };
    full("append", backend.append(&orders, &[one()], &KEEP).await.unwrap_err());
    full("settle", settle(&[append(ids[2])]).await.unwrap_err());
    full("settle", settle(&[reschedule(ids[3])]).await.unwrap_err());
    full("schedule", backend.schedule(&later, &due).await.unwrap_err());
    assert_eq!(backend.promote_due(&later, 10).await?.len(), 1, "moving an entry adds little");
    assert_eq!(settle(&[Settlement::ack(ids[4])]).await?.applied, 1);
    // What a consumer needs to go on, and to take over.
    let acquired = backend.acquire(&lease("l"), &holder("h"), HOUR).await?;
    let AcquireResult::Won(epoch) = acquired else { panic!("{acquired:?}") };
    let fence = Fence { lease: lease("l"), epoch };
    let renewed = backend.renew(&holder("h"), std::slice::from_ref(&fence), HOUR).await?;
    assert_eq!(renewed, [Renewal::Kept]);
    assert_eq!(backend.release(&holder("h"), &[fence]).await?, 1);
    backend.set_add(&SetName::new("members")?, &["a"], None).await?;
    let epoch = RegistryMap::from([("since".to_owned(), "now".into())]);
    assert!(backend.map_create(&MapName::new("epoch")?, &epoch).await?);
    assert!(!backend.ensure_group(&orders, &workers, GroupStart::Beginning).await?);
    assert!(backend.ensure_group(&orders, &group("others"), GroupStart::Beginning).await?);
    let disconnected = backend.disconnect_reader(&orders, &workers, &consumer("dead")).await?;
    assert!(matches!(disconnected, DisconnectOutcome::Disconnected { .. }), "{disconnected:?}");

    redis.command(&["CONFIG", "SET", "maxmemory", "0"])?.ok()?;
    assert_eq!(backend.delay_stats(&later).await?.waiting, 1, "an entry scheduled before");
    let entries = [append(ids[2]), reschedule(ids[3]), Settlement::ack(ids[5])];
    assert_eq!(settle(&entries).await?.applied, 3, "all were still pending");
    assert!(backend.promote_due(&later, 10).await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_to_a_wrong_type_does_not_affect_concurrent_appends() -> Result<()> {
    let redis = Redis::start()?;
    redis.command(&["SET", "foreign", "x"])?.ok()?;
    let backend = open(&redis.url()).await?;
    let tasks: Vec<_> = (0..200)
        .map(|number| {
            let backend = backend.clone();
            tokio::spawn(async move {
                let name = if number % 3 == 0 { "foreign" } else { "orders" };
                (name, backend.append(&stream(name), &[one(), one()], &Retention::max_len(5)).await)
            })
        })
        .collect();
    for task in tasks {
        match task.await? {
            ("foreign", Err(StreamError::WrongType { name })) => assert_eq!(name, "foreign"),
            ("orders", Ok(ids)) => assert_eq!(ids.len(), 2),
            (name, result) => bail!("{name}: {result:?}"),
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_type_under_a_derived_key_is_named_and_not_changed() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let later = delays("later");
    let due = [ScheduleRequest { to: stream("orders"), due: DueTime::After(HOUR), fields: one() }];
    let assert_wrong_type = |what: &str, key: &str, error: StreamError| match error {
        StreamError::WrongType { name } => assert_eq!(name, key, "{what}"),
        error => panic!("{what}: {error}"),
    };
    let key = "{later}:entries";
    redis.command(&["SET", key, "x"])?.ok()?;
    assert_wrong_type("schedule", key, backend.schedule(&later, &due).await.unwrap_err());
    assert_wrong_type("delete", key, backend.delete_delay_set(&later).await.unwrap_err());
    assert_eq!(redis.command(&["GET", key])?.text(), "x");
    redis.command(&["DEL", key])?.ok()?;
    let key = "once:{orders}:a";
    redis.command(&["SET", key, "x"])?.ok()?;
    let once = ["b", "a"].map(|id| IdempotentEntry { id: id.to_owned(), fields: one() });
    let result = backend.append_once(&stream("orders"), &once, HOUR, &Retention::KEEP_ALL).await;
    assert_wrong_type("append_once", key, result.unwrap_err());
    let result = backend.appended(&stream("orders"), &["a"]).await;
    assert_wrong_type("appended", key, result.unwrap_err());
    assert_eq!(redis.command(&["EXISTS", "orders"])?.int(), Some(0), "no effect");
    redis.command(&["LPUSH", "{lease}:epoch", "x"])?.ok()?;
    let result = backend.acquire(&lease("lease"), &holder("ann"), HOUR).await;
    assert_wrong_type("acquire", "{lease}:epoch", result.unwrap_err());
    redis.command(&["LPUSH", "{mail}:a", "x"])?.ok()?;
    let result = backend.dedup_begin(&scope("mail"), &["b", "a"], HOUR).await;
    assert_wrong_type("begin", "{mail}:a", result.unwrap_err());
    assert_eq!(redis.command(&["EXISTS", "{mail}:b"])?.int(), Some(0), "no effect");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_another_program_has_no_epoch_and_fences_ours() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let name = lease("mutex:orders");
    redis.command(&["SET", "mutex:orders", "other"])?.ok()?;

    let info = backend.leases(std::slice::from_ref(&name)).await?.remove(0).expect("it is held");
    assert_eq!((info.holder.as_str(), info.epoch), ("other", Epoch(0)));
    assert!(info.remaining > HOUR, "it does not expire");
    assert!(matches!(
        backend.acquire(&name, &holder("ann"), HOUR).await?,
        AcquireResult::Held { by, .. } if by.as_str() == "other"
    ));

    redis.command(&["DEL", "mutex:orders"])?.ok()?;
    let AcquireResult::Won(epoch) = backend.acquire(&name, &holder("ann"), HOUR).await? else {
        bail!("it is free");
    };
    redis.command(&["SET", "mutex:orders", "other"])?.ok()?;
    let fence = Fence { lease: name.clone(), epoch };
    let settle = SettleBatch {
        stream: &stream("orders"),
        group: &group("workers"),
        consumer: &consumer("ann"),
        fence: Some(&fence),
        entries: &[],
    };
    assert!(matches!(backend.settle(settle).await, Err(StreamError::Fenced { .. })));
    assert_eq!(backend.release(&holder("ann"), &[fence]).await?, 0);
    Ok(())
}

async fn watch_with(builder: RedisBuilder) -> Result<(Redis, WatchMode, String)> {
    let redis = builder.start()?;
    let backend = open(&redis.url()).await?;
    let mut watch = backend.watch("lease:").await?;
    let mode = watch.mode().clone();
    if mode == WatchMode::All {
        let ttl = Duration::from_millis(80);
        backend.acquire(&lease("lease:a"), &holder("ann"), ttl).await?;
        backend.acquire(&lease("other:a"), &holder("ann"), ttl).await?;
        let expected = (Some("lease:a".to_owned()), LeaseEventKind::Expired);
        assert_eq!(next_event(&mut *watch).await?, expected);
    }
    let AcquireResult::Won(epoch) =
        backend.acquire(&lease("lease:b"), &holder("ann"), HOUR).await?
    else {
        bail!("it is free");
    };
    backend.release(&holder("ann"), &[Fence { lease: lease("lease:b"), epoch }]).await?;
    assert_eq!(
        next_event(&mut *watch).await?,
        (Some("lease:b".to_owned()), LeaseEventKind::Released)
    );
    let flags = redis.command(&["CONFIG", "GET", "notify-keyspace-events"])?;
    let flags = flags.items().get(1).map(|flags| flags.text()).unwrap_or_default();
    Ok((redis, mode, flags))
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_notification_flags_are_set() -> Result<()> {
    let (_redis, mode, flags) = watch_with(Redis::builder()).await?;
    assert_eq!(mode, WatchMode::All);
    assert!(flags.contains('E') && flags.contains('x'), "{flags}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sufficient_notification_flags_are_not_changed() -> Result<()> {
    for given in ["Ex", "AKE", "KEA"] {
        let (redis, mode, flags) = watch_with(Redis::builder().notify(given)).await?;
        assert_eq!(mode, WatchMode::All);
        let mut expected: Vec<char> = given.chars().collect();
        let mut found: Vec<char> = flags.chars().collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        drop(redis);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn existing_notification_flags_are_kept_when_ours_are_added() -> Result<()> {
    let (_redis, mode, flags) = watch_with(Redis::builder().notify("Kg")).await?;
    assert_eq!(mode, WatchMode::All);
    assert!("KgEx".chars().all(|flag| flags.contains(flag)), "{flags}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_permission_for_config_only_releases_are_reported() -> Result<()> {
    let builder = Redis::builder().user("worker", "secret", "~* &* +@all -config");
    let (_redis, mode, flags) = watch_with(builder).await?;
    assert!(matches!(mode, WatchMode::ReleasesOnly { reason } if reason.contains("NOPERM")));
    assert_eq!(flags, "");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_channel_permissions_cannot_watch() -> Result<()> {
    let redis = Redis::builder().user("worker", "secret", "~* resetchannels +@all").start()?;
    let backend = open(&redis.url()).await?;
    let result = backend.watch("lease:").await.map(drop);
    assert!(matches!(result, Err(StreamError::Denied { .. })), "{result:?}");
    let AcquireResult::Won(epoch) =
        backend.acquire(&lease("lease:b"), &holder("ann"), HOUR).await?
    else {
        bail!("it is free");
    };
    let fence = Fence { lease: lease("lease:b"), epoch };
    assert_eq!(backend.release(&holder("ann"), &[fence]).await?, 1, "releasing still works");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_receives_events_of_its_own_database_only() -> Result<()> {
    let redis = Redis::start()?;
    let here = open(&format!("{}3", redis.url())).await?;
    let there = open(&format!("{}4", redis.url())).await?;
    let mut watch = here.watch("lease:").await?;
    let ttl = Duration::from_millis(60);
    there.acquire(&lease("lease:there"), &holder("ann"), ttl).await?;
    here.acquire(&lease("lease:here"), &holder("ann"), ttl).await?;
    assert_eq!(
        next_event(&mut *watch).await?,
        (Some("lease:here".to_owned()), LeaseEventKind::Expired)
    );
    let AcquireResult::Won(epoch) = there.acquire(&lease("lease:x"), &holder("ann"), HOUR).await?
    else {
        bail!("it is free");
    };
    there.release(&holder("ann"), &[Fence { lease: lease("lease:x"), epoch }]).await?;
    let quiet = tokio::time::timeout(Duration::from_millis(300), watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_whose_connection_broke_reports_lagged_and_recovers() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let mut watch = backend.watch("lease:").await?;

    redis.kill9()?;
    redis.restart()?;

    assert_eq!(next_event(&mut *watch).await?, (None, LeaseEventKind::Lagged));
    // The flags were lost with the server; the watch sets them again.
    let expired = async {
        loop {
            let ttl = Duration::from_millis(60);
            backend.acquire(&lease("lease:a"), &holder("ann"), ttl).await?;
            let next = tokio::time::timeout(Duration::from_millis(400), watch.next()).await;
            if let Ok(event) = next
                && event.kind == LeaseEventKind::Expired
            {
                return anyhow::Ok(());
            }
        }
    };
    tokio::time::timeout(SLACK, expired).await??;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_not_polled_keeps_a_bounded_number_of_events() -> Result<()> {
    let redis = Redis::builder().notify("Ex").start()?;
    let backend = open(&redis.url()).await?;
    let mut watch = backend.watch("lease:").await?;
    let names: Vec<_> = (0..3000).map(|number| lease(&format!("lease:{number}"))).collect();
    let mut fences = Vec::new();
    for name in &names {
        let AcquireResult::Won(epoch) = backend.acquire(name, &holder("ann"), HOUR).await? else {
            bail!("it is free");
        };
        fences.push(Fence { lease: name.clone(), epoch });
    }
    assert_eq!(backend.release(&holder("ann"), &fences).await?, 3000);
    tokio::time::sleep(Duration::from_secs(5)).await;

    let (mut released, mut lagged) = (0, 0);
    while let Ok(event) = tokio::time::timeout(Duration::from_secs(2), watch.next()).await {
        match event.kind {
            LeaseEventKind::Released => released += 1,
            LeaseEventKind::Lagged => lagged += 1,
            LeaseEventKind::Expired => bail!("{event:?}"),
        }
    }
    assert!((1000..3000).contains(&released), "{released}");
    assert_eq!(lagged, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_dropped_at_any_moment_does_not_delay_the_next_one() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let (orders, other) = ([stream("orders")], [stream("other")]);
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    for round in 0..200_u64 {
        let dropped = reader.read(&orders, 10, Duration::from_secs(50));
        let _ = tokio::time::timeout(Duration::from_micros(round * 5), dropped).await;
        let start = std::time::Instant::now();
        assert_eq!(reader.read(&other, 10, Duration::ZERO).await?, []);
        assert!(start.elapsed() < SLACK, "round {round}: {:?}", start.elapsed());
    }
    let id = backend.append(&orders[0], &[one()], &KEEP).await?[0];
    assert_eq!(
        read_ids(&mut *reader, &orders[0]).await?,
        [id],
        "the dropped reads delivered nothing"
    );
    Ok(())
}
