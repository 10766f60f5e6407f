//! Server and network failures: calls fail within their deadline, and the backend recovers afterwards.
#![cfg(feature = "redis")]

mod redis_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use headwater_stream::{
    AcquireResult, Backend, DueTime, EntryId, Fence, GroupStart, LeaseName, Options,
    PendingDeliveryQuery, Range, ReclaimFrom, ReclaimRequest, Retention, ScheduleRequest,
    SettleBatch, Settlement, StreamError, TrimGuard, connect,
};
use headwater_testkit::{Persistence, Proxy, Redis};

use crate::redis_support::*;

const DEADLINE: Duration = Duration::from_millis(600);
/// Extra time for a busy machine.
const SLACK: Duration = Duration::from_secs(20);

const LONG_TIMEOUT: Duration = Duration::from_secs(60);

fn short_deadline() -> Options {
    Options { call_deadline: DEADLINE, ..Options::default() }
}

/// Retries a call that must succeed: a busy machine may exceed the short deadline.
async fn retry_while_unavailable<T>(
    call: impl AsyncFn() -> Result<T, StreamError>,
) -> Result<T, StreamError> {
    let until = Instant::now() + LONG_TIMEOUT;
    loop {
        match call().await {
            Err(StreamError::Unavailable { .. }) if Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            result => return result,
        }
    }
}

async fn connect_with_short_deadline(url: &str) -> Result<Arc<dyn Backend>, StreamError> {
    retry_while_unavailable(async || connect(url, &short_deadline()).await).await
}

/// Asserts that the backend works again.
async fn assert_recovers(backend: &Arc<dyn Backend>) -> Result<(), StreamError> {
    retry_while_unavailable(async || {
        backend.append(&stream("orders"), &[one()], &Retention::KEEP_ALL).await.map(drop)
    })
    .await
}

/// Makes every kind of call. Returns name, duration and result of each.
async fn every_call(
    backend: &Arc<dyn Backend>,
) -> Vec<(&'static str, Duration, Result<(), StreamError>)> {
    let (stream, group, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let (delays, lease, holder) = (delays("later"), lease("lease"), holder("ann"));
    let fence = Fence { lease: lease.clone(), epoch: headwater_stream::Epoch(1) };
    let ids = [EntryId::new(1, 1)];
    let done = [Settlement::ack(ids[0])];
    let settle =
        SettleBatch { stream: &stream, group: &group, consumer: &ann, fence: None, entries: &done };
    let reclaim = ReclaimRequest {
        stream: &stream,
        group: &group,
        consumer: &ann,
        fence: None,
        from: ReclaimFrom::Anyone,
        min_idle: Duration::ZERO,
        after: None,
        count: 10,
    };
    let query = PendingDeliveryQuery {
        stream: &stream,
        group: &group,
        consumer: None,
        min_idle: Duration::ZERO,
        after: None,
        count: 10,
    };
    let scheduled = [ScheduleRequest {
        to: stream.clone(),
        due: DueTime::After(Duration::ZERO),
        fields: one(),
    }];
    let keep = Retention::KEEP_ALL;
    let wait = Duration::from_millis(100);
    let hour = Duration::from_secs(3600);
    let fields = headwater_stream::RegistryMap::from([("a".to_owned(), "b".into())]);
    let mut results = Vec::new();
    macro_rules! call {
        ($name:literal, $call:expr) => {{
            let start = Instant::now();
            let result = $call.await.map(drop);
            results.push(($name, start.elapsed(), result));
        }};
    }
    call!("append", backend.append(&stream, &[one()], &keep));
    let once = [headwater_stream::IdempotentEntry { id: "a".to_owned(), fields: one() }];
    call!("append_once", backend.append_once(&stream, &once, hour, &keep));
    call!("appended", backend.appended(&stream, &["a"]));
    call!("disconnect_reader", backend.disconnect_reader(&stream, &group, &ann));
    call!("ensure_group", backend.ensure_group(&stream, &group, GroupStart::Beginning));
    call!("remove_group", backend.remove_group(&stream, &group));
    call!("reset_group", backend.reset_group(&stream, &group, GroupStart::Beginning));
    call!("settle", backend.settle(settle));
    call!("settle with a fence", backend.settle(SettleBatch { fence: Some(&fence), ..settle }));
    call!("keep_alive", backend.keep_alive(&stream, &group, &ann, &ids));
    call!("reclaim", backend.reclaim(reclaim));
    call!("pending", backend.pending(query));
    call!("range", backend.range(&stream, Range::first(1)));
    call!("trim", backend.trim(&stream, &Retention::max_len(1), TrimGuard::Safe));
    call!("delete_entries", backend.delete_entries(&stream, &ids));
    call!("delete_stream", backend.delete_stream(&stream));
    call!("stats", backend.stats(&stream));
    call!("remove_idle_consumers", backend.remove_idle_consumers(&stream, &group, hour));
    call!("schedule", backend.schedule(&delays, &scheduled));
    call!("cancel", backend.cancel(&delays, headwater_stream::DelayId(1)));
    call!("promote_due", backend.promote_due(&delays, 1));
    call!("wait_until_due", backend.wait_until_due(&delays, wait));
    call!("delay_stats", backend.delay_stats(&delays));
    call!("delayed", backend.delayed(&delays, 0, 1));
    call!("delete_delay_set", backend.delete_delay_set(&delays));
    call!("acquire", backend.acquire(&lease, &holder, hour));
    call!("renew", backend.renew(&holder, std::slice::from_ref(&fence), hour));
    call!("release", backend.release(&holder, std::slice::from_ref(&fence)));
    call!("leases", backend.leases(std::slice::from_ref(&lease)));
    call!("watch", backend.watch("lease"));
    call!("set_add", backend.set_add(&set("topics"), &["a"], None));
    call!("set_members", backend.set_members(&set("topics")));
    call!("map_create", backend.map_create(&map("meta"), &fields));
    call!("map_get", backend.map_get(&map("meta")));
    call!("dedup_begin", backend.dedup_begin(&scope("mail"), &["a"], hour));
    call!("now", backend.now());
    if let Ok(mut reader) = backend.reader(&group, &ann).await {
        call!("read", reader.read(std::slice::from_ref(&stream), 1, wait));
        call!("close of a reader", reader.close());
    }
    if let Ok(mut tail) = backend.tail().await {
        call!("tail", tail.read(&[(stream.clone(), EntryId::MIN)], 1, wait));
    }
    results
}

fn assert_unavailable_in_time(results: Vec<(&'static str, Duration, Result<(), StreamError>)>) {
    for (name, took, result) in results {
        assert!(took < DEADLINE + SLACK, "{name} took {took:?}");
        // A reader without a connection closes without an error.
        if name != "close of a reader" {
            assert!(matches!(result, Err(StreamError::Unavailable { .. })), "{name}: {result:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_a_paused_server_ends_by_its_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let backend = connect_with_short_deadline(&redis.url()).await?;
    assert_recovers(&backend).await?;

    redis.pause()?;
    let results = every_call(&backend).await;
    redis.resume()?;

    assert_unavailable_in_time(results);
    assert_recovers(&backend).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_through_a_stalled_network_ends_by_its_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = connect_with_short_deadline(&redis.url_at(proxy.addr())).await?;

    proxy.stall()?;
    let results = every_call(&backend).await;
    proxy.heal()?;

    assert_unavailable_in_time(results);
    assert_recovers(&backend).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_a_killed_server_ends_by_its_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let backend = connect_with_short_deadline(&redis.url()).await?;

    redis.kill9()?;

    assert_unavailable_in_time(every_call(&backend).await);
    redis.restart()?;
    assert_recovers(&backend).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connecting_to_a_closed_port_ends_by_the_deadline() -> Result<()> {
    let start = Instant::now();
    let result = connect("redis://127.0.0.1:1/", &short_deadline()).await;
    assert!(matches!(result.map(drop), Err(StreamError::Unavailable { .. })));
    ensure!(start.elapsed() < DEADLINE + SLACK);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_readers_work_after_a_kill_and_a_restart() -> Result<()> {
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let backend = open(&redis.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    backend.ensure_group(&orders, &workers, GroupStart::Beginning).await?;
    let mut reader = backend.reader(&workers, &ann).await?;
    let first = backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;
    assert_eq!(read_ids(&mut *reader, &orders).await?, first);

    redis.kill9()?;
    redis.restart()?;

    let second = backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;
    // A read that was in flight when the server died may fail once.
    let found = match read_ids(&mut *reader, &orders).await {
        Ok(found) => found,
        Err(_) => read_ids(&mut *reader, &orders).await?,
    };
    assert_eq!(found, second, "read after the restart");
    let fence = won(&backend, &lease("l"), "ann").await?;
    let done = [Settlement::ack(first[0]), Settlement::ack(second[0])];
    let settle = SettleBatch {
        stream: &orders,
        group: &workers,
        consumer: &ann,
        fence: Some(&fence),
        entries: &done,
    };
    assert_eq!(backend.settle(settle).await?.applied, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_reader_fails_once_when_the_server_dies_and_recovers() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let mut reader = backend.reader(&workers, &ann).await?;
    let waiting = tokio::spawn(async move {
        let first = reader.read(&[stream("orders")], 10, Duration::from_secs(20)).await;
        let second = reader.read(&[stream("orders")], 10, Duration::from_secs(20)).await;
        (first, second)
    });
    until_readers_block(&redis, 1).await?;

    redis.kill9()?;
    redis.restart()?;
    backend.ensure_group(&orders, &workers, GroupStart::Beginning).await?;
    let id = backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?[0];

    let (first, second) = waiting.await?;
    assert!(matches!(first, Err(StreamError::Unavailable { .. })), "{first:?}");
    assert_eq!(
        second?[0].entries[0].id, id,
        "the group was lost with the server and created again"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_whose_reply_is_lost_fails_and_is_not_re_sent() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: LONG_TIMEOUT, ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    let orders = stream("orders");
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;

    proxy.drop_reply()?;
    let start = Instant::now();
    let result = backend.append(&orders, &[one()], &Retention::KEEP_ALL).await;

    assert!(matches!(result, Err(StreamError::Unavailable { .. })), "{result:?}");
    ensure!(start.elapsed() < LONG_TIMEOUT / 2, "a closed connection is detected at once");
    assert_eq!(backend.range(&orders, Range::first(10)).await?.len(), 2, "it was executed once");
    Ok(())
}

/// The server replies to the request before one and withholds the reply to that one for longer than its deadline. Then it
/// goes on: one call has failed, the call behind it has not, and the connection is the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_reply_is_late_fails_alone() -> Result<()> {
    // Half of it is left for each step, also on a busy machine.
    const LATE: Duration = Duration::from_secs(16);
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: LATE, silence_max: LATE * 10, ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    let (late, next, topics) = (stream("late"), stream("next"), set("topics"));
    backend.append(&late, &[numbered(0)], &Retention::KEEP_ALL).await?;
    let connections = proxy.connections();

    // Writes wait at the server, and so does what follows them on their connection.
    redis.command(&["CLIENT", "PAUSE", "600000", "WRITE"])?.ok()?;
    redis.pause()?;
    let before = backend.set_members(&topics);
    let failing = async {
        let result = backend.append(&late, &[numbered(1)], &Retention::KEEP_ALL).await;
        redis.command(&["CLIENT", "UNPAUSE"])?.ok()?;
        anyhow::Ok(result)
    };
    let behind = async {
        tokio::time::sleep(LATE / 2).await;
        redis.resume()?;
        anyhow::Ok(backend.append(&next, &[numbered(2)], &Retention::KEEP_ALL).await?)
    };
    // They are started in this order.
    let (before, failed, behind) = tokio::join!(before, failing, behind);

    before?;
    let failed = failed?;
    assert!(matches!(failed, Err(StreamError::Unavailable { .. })), "{failed:?}");
    behind?;
    assert_eq!(proxy.connections(), connections, "the connection was replaced");
    assert_eq!(backend.range(&late, Range::first(10)).await?.len(), 2, "it was executed later");
    assert_eq!(backend.range(&next, Range::first(10)).await?.len(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idempotent_call_whose_reply_is_lost_is_re_sent() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = open(&redis.url_at(proxy.addr())).await?;
    let orders = stream("orders");
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;
    for _ in 0..5 {
        proxy.drop_reply()?;
        assert_eq!(backend.range(&orders, Range::first(10)).await?.len(), 1);
        proxy.drop_after(20)?;
        assert_eq!(backend.stats(&orders).await?.map(|stats| stats.length), Some(1));
        proxy.cut_once()?;
        backend.now().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_lost_in_the_middle_of_a_command_fails_only_that_call() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = open(&redis.url_at(proxy.addr())).await?;
    let orders = stream("orders");
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;

    proxy.drop_after(100)?;
    let big = headwater_stream::Fields::new([("payload", vec![b'x'; 100_000])]);
    let result = backend.append(&orders, &[big], &Retention::KEEP_ALL).await;

    assert!(matches!(result, Err(StreamError::Unavailable { .. })), "{result:?}");
    assert_eq!(
        backend.range(&orders, Range::first(10)).await?.len(),
        1,
        "a partial command is not executed"
    );
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_waits_for_a_server_that_is_paused_briefly() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    redis.pause()?;
    let paused = tokio::time::sleep(Duration::from_millis(700));
    let (result, ()) = tokio::join!(
        async {
            let (orders, one) = (stream("orders"), [one()]);
            backend.append(&orders, &one, &Retention::KEEP_ALL).await
        },
        async {
            paused.await;
            redis.resume().expect("the server is running");
        }
    );
    result?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_does_not_affect_other_callers() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = open(&redis.url_at(proxy.addr())).await?;
    proxy.delay(Duration::from_millis(30))?;
    let orders = stream("orders");
    for round in 0..20_u64 {
        let limit = Duration::from_millis(round * 7);
        let fields = [numbered(1000)];
        let dropped = backend.append(&orders, &fields, &Retention::KEEP_ALL);
        let fields = [numbered(round as usize)];
        let (_, kept) = tokio::join!(
            tokio::time::timeout(limit, dropped),
            backend.append(&orders, &fields, &Retention::KEEP_ALL)
        );
        let id = kept?[0];
        let found = backend.range(&orders, Range { from: id, to: id, ..Range::first(1) }).await?;
        assert_eq!(found[0].fields, numbered(round as usize), "each reply goes to its request");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_backend_rejects_calls_and_ends_blocking_reads() -> Result<()> {
    let redis = Redis::start()?;
    let backend = connect_with_short_deadline(&redis.url()).await?;
    let (workers, ann) = (group("workers"), consumer("ann"));
    let mut reader = retry_while_unavailable(async || backend.reader(&workers, &ann).await).await?;
    let waiting = tokio::spawn(async move {
        reader.read(&[stream("orders")], 1, Duration::from_secs(30)).await.map(drop)
    });
    tokio::time::sleep(Duration::from_millis(200)).await;

    backend.close().await?;

    assert!(matches!(waiting.await?, Err(StreamError::Unavailable { .. })));
    for (name, _, result) in every_call(&backend).await {
        assert!(matches!(result, Err(StreamError::Unavailable { .. })), "{name}: {result:?}");
    }
    Ok(())
}

async fn won(backend: &Arc<dyn Backend>, lease: &LeaseName, name: &str) -> Result<Fence> {
    match backend.acquire(lease, &holder(name), Duration::from_secs(60)).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease: lease.clone(), epoch }),
        held => anyhow::bail!("{held:?}"),
    }
}
