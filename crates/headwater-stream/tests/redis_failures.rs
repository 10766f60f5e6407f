//! What a Redis backend does when the server or the network fails: it tells, within the deadline, and goes on after.
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
/// What a busy machine may add.
const GRACE: Duration = Duration::from_secs(20);

const PATIENT: Duration = Duration::from_secs(60);

fn impatient() -> Options {
    Options { call_deadline: DEADLINE, ..Options::default() }
}

/// A call that must succeed, though a busy machine may be too slow for an impatient backend.
async fn patiently<T>(call: impl AsyncFn() -> Result<T, StreamError>) -> Result<T, StreamError> {
    let until = Instant::now() + PATIENT;
    loop {
        match call().await {
            Err(StreamError::Unavailable { .. }) if Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            answer => return answer,
        }
    }
}

async fn connect_impatient(url: &str) -> Result<Arc<dyn Backend>, StreamError> {
    patiently(async || connect(url, &impatient()).await).await
}

/// It goes on, whatever was before.
async fn goes_on(backend: &Arc<dyn Backend>) -> Result<(), StreamError> {
    patiently(async || {
        backend.append(&stream("orders"), &[one()], &Retention::KEEP_ALL).await.map(drop)
    })
    .await
}

/// Every kind of call, by name.
async fn every_call(
    backend: &Arc<dyn Backend>,
) -> Vec<(&'static str, Duration, Result<(), StreamError>)> {
    let (stream, group, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let (delays, lease, holder) = (delays("later"), lease("lease"), holder("ann"));
    let fence = Fence { lease: lease.clone(), epoch: headwater_stream::Epoch(1) };
    let ids = [EntryId::new(1, 1)];
    let done = [Settlement::ack(ids[0])];
    let settle = SettleBatch {
        stream: &stream,
        group: &group,
        consumer: &ann,
        fence: None,
        entries: &done,
    };
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
    let aside = [ScheduleRequest {
        to: stream.clone(),
        due: DueTime::After(Duration::ZERO),
        fields: one(),
    }];
    let keep = Retention::KEEP_ALL;
    let wait = Duration::from_millis(100);
    let hour = Duration::from_secs(3600);
    let fields = headwater_stream::RegistryMap::from([("a".to_owned(), "b".into())]);
    let mut answers = Vec::new();
    macro_rules! ask {
        ($name:literal, $call:expr) => {{
            let start = Instant::now();
            let answer = $call.await.map(drop);
            answers.push(($name, start.elapsed(), answer));
        }};
    }
    ask!("append", backend.append(&stream, &[one()], &keep));
    let once = [headwater_stream::IdempotentEntry { id: "a".to_owned(), fields: one() }];
    ask!("append_once", backend.append_once(&stream, &once, hour, &keep));
    ask!("appended", backend.appended(&stream, &["a"]));
    ask!("silence", backend.disconnect_reader(&stream, &group, &ann));
    ask!("ensure_group", backend.ensure_group(&stream, &group, GroupStart::Beginning));
    ask!("remove_group", backend.remove_group(&stream, &group));
    ask!("reset_group", backend.reset_group(&stream, &group, GroupStart::Beginning));
    ask!("settle", backend.settle(settle));
    ask!("settle with a fence", backend.settle(SettleBatch { fence: Some(&fence), ..settle }));
    ask!("keep_alive", backend.keep_alive(&stream, &group, &ann, &ids));
    ask!("reclaim", backend.reclaim(reclaim));
    ask!("pending", backend.pending(query));
    ask!("range", backend.range(&stream, Range::first(1)));
    ask!("trim", backend.trim(&stream, &Retention::max_len(1), TrimGuard::Safe));
    ask!("delete_entries", backend.delete_entries(&stream, &ids));
    ask!("delete_stream", backend.delete_stream(&stream));
    ask!("stats", backend.stats(&stream));
    ask!("remove_idle_consumers", backend.remove_idle_consumers(&stream, &group, hour));
    ask!("schedule", backend.schedule(&delays, &aside));
    ask!("cancel", backend.cancel(&delays, headwater_stream::DelayId(1)));
    ask!("promote_due", backend.promote_due(&delays, 1));
    ask!("wait_until_due", backend.wait_until_due(&delays, wait));
    ask!("delay_stats", backend.delay_stats(&delays));
    ask!("delayed", backend.delayed(&delays, 0, 1));
    ask!("delete_delay_set", backend.delete_delay_set(&delays));
    ask!("acquire", backend.acquire(&lease, &holder, hour));
    ask!("renew", backend.renew(&holder, std::slice::from_ref(&fence), hour));
    ask!("release", backend.release(&holder, std::slice::from_ref(&fence)));
    ask!("leases", backend.leases(std::slice::from_ref(&lease)));
    ask!("watch", backend.watch("lease"));
    ask!("set_add", backend.set_add(&set("topics"), &["a"], None));
    ask!("set_members", backend.set_members(&set("topics")));
    ask!("map_create", backend.map_create(&map("meta"), &fields));
    ask!("map_get", backend.map_get(&map("meta")));
    ask!("dedup_begin", backend.dedup_begin(&scope("mail"), &["a"], hour));
    ask!("now", backend.now());
    if let Ok(mut reader) = backend.reader(&group, &ann).await {
        ask!("read", reader.read(std::slice::from_ref(&stream), 1, wait));
        ask!("close of a reader", reader.close());
    }
    if let Ok(mut tail) = backend.tail().await {
        ask!("tail", tail.read(&[(stream.clone(), EntryId::MIN)], 1, wait));
    }
    answers
}

fn assert_unavailable_in_time(answers: Vec<(&'static str, Duration, Result<(), StreamError>)>) {
    for (name, took, answer) in answers {
        assert!(took < DEADLINE + GRACE, "{name} took {took:?}");
        // A reader that never got a connection has nothing to give up.
        if name != "close of a reader" {
            assert!(matches!(answer, Err(StreamError::Unavailable { .. })), "{name}: {answer:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_a_server_that_stands_still_ends_by_its_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let backend = connect_impatient(&redis.url()).await?;
    goes_on(&backend).await?;

    redis.pause()?;
    let answers = every_call(&backend).await;
    redis.resume()?;

    assert_unavailable_in_time(answers);
    goes_on(&backend).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_through_a_network_that_forwards_nothing_ends_by_its_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = connect_impatient(&redis.url_at(proxy.addr())).await?;

    proxy.stall()?;
    let answers = every_call(&backend).await;
    proxy.heal()?;

    assert_unavailable_in_time(answers);
    goes_on(&backend).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_a_server_that_is_gone_ends_by_its_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let backend = connect_impatient(&redis.url()).await?;

    redis.kill9()?;

    assert_unavailable_in_time(every_call(&backend).await);
    redis.restart()?;
    goes_on(&backend).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connecting_to_nobody_ends_by_the_deadline() -> Result<()> {
    let start = Instant::now();
    let answer = connect("redis://127.0.0.1:1/", &impatient()).await;
    assert!(matches!(answer.map(drop), Err(StreamError::Unavailable { .. })));
    ensure!(start.elapsed() < DEADLINE + GRACE);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_and_a_restart_everything_goes_on() -> Result<()> {
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
    // What was under way when the server died may show as one failed read.
    let found = match read_ids(&mut *reader, &orders).await {
        Ok(found) => found,
        Err(_) => read_ids(&mut *reader, &orders).await?,
    };
    assert_eq!(found, second, "a script and a read after the restart");
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
async fn a_reader_that_waits_while_the_server_dies_fails_once_and_goes_on() -> Result<()> {
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
        "the group was lost with the server and is there again"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_whose_reply_is_lost_is_reported_and_not_repeated() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: PATIENT, ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    let orders = stream("orders");
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;

    proxy.drop_reply()?;
    let start = Instant::now();
    let answer = backend.append(&orders, &[one()], &Retention::KEEP_ALL).await;

    assert!(matches!(answer, Err(StreamError::Unavailable { .. })), "{answer:?}");
    ensure!(start.elapsed() < PATIENT / 2, "a closed connection is noticed at once");
    assert_eq!(backend.range(&orders, Range::first(10)).await?.len(), 2, "it happened, once");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_of_facts_whose_reply_is_lost_is_simply_repeated() -> Result<()> {
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
async fn a_connection_cut_in_the_middle_of_a_command_harms_only_that_call() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = open(&redis.url_at(proxy.addr())).await?;
    let orders = stream("orders");
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;

    proxy.drop_after(100)?;
    let big = headwater_stream::Fields::new([("payload", vec![b'x'; 100_000])]);
    let answer = backend.append(&orders, &[big], &Retention::KEEP_ALL).await;

    assert!(matches!(answer, Err(StreamError::Unavailable { .. })), "{answer:?}");
    assert_eq!(backend.range(&orders, Range::first(10)).await?.len(), 1, "half a command is none");
    backend.append(&orders, &[one()], &Retention::KEEP_ALL).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_busy_for_a_while_is_waited_for() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    redis.pause()?;
    let paused = tokio::time::sleep(Duration::from_millis(700));
    let (answer, ()) = tokio::join!(
        async {
            let (orders, one) = (stream("orders"), [one()]);
            backend.append(&orders, &one, &Retention::KEEP_ALL).await
        },
        async {
            paused.await;
            redis.resume().expect("the server is there");
        }
    );
    answer?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_disturbs_nobody() -> Result<()> {
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
        assert_eq!(found[0].fields, numbered(round as usize), "replies go to whom they belong");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_backend_refuses_calls_and_ends_waits() -> Result<()> {
    let redis = Redis::start()?;
    let backend = connect_impatient(&redis.url()).await?;
    let (workers, ann) = (group("workers"), consumer("ann"));
    let mut reader = patiently(async || backend.reader(&workers, &ann).await).await?;
    let waiting = tokio::spawn(async move {
        reader.read(&[stream("orders")], 1, Duration::from_secs(30)).await.map(drop)
    });
    tokio::time::sleep(Duration::from_millis(200)).await;

    backend.close().await?;

    assert!(matches!(waiting.await?, Err(StreamError::Unavailable { .. })));
    for (name, _, answer) in every_call(&backend).await {
        assert!(matches!(answer, Err(StreamError::Unavailable { .. })), "{name}: {answer:?}");
    }
    Ok(())
}

async fn won(backend: &Arc<dyn Backend>, lease: &LeaseName, name: &str) -> Result<Fence> {
    match backend.acquire(lease, &holder(name), Duration::from_secs(60)).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease: lease.clone(), epoch }),
        held => anyhow::bail!("{held:?}"),
    }
}
