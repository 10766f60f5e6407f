//! What happens when the server dies, stands still, forgets or is full, and when the network breaks in the middle.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_stream::{
    DelayName, Delivery, Due, EntryId, Fields, HolderName, LeaseName, MapName, PendingQuery,
    PutAside, Range, StreamError,
};
use headwater_testkit::{Persistence, Proxy, Redis, wait_until};

use crate::{DEADLINE, Desk, RECOVERY_MAX};

#[tokio::test]
async fn work_goes_on_after_the_server_was_killed_and_started_again() -> Result<()> {
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let desk = Desk::open(&redis.url()).await?;
    let mut reader = desk.reader().await?;
    for number in 0..10 {
        desk.append(&format!("before {number}")).await?;
    }

    redis.kill9()?;
    let error = desk.append("nobody is there").await.err().context("somebody answered")?;
    assert!(matches!(error, StreamError::Unavailable { .. }), "{error}");
    redis.restart()?;

    desk.append_patiently("after").await?;
    let mut seen = Vec::new();
    while seen.len() < 11 {
        let entries = desk.read_patiently(reader.as_mut()).await?;
        desk.settle(&entries).await?;
        seen.extend(entries.iter().map(|entry| crate::payload(&entry.fields)));
    }
    assert_eq!(seen.len(), 11, "{seen:?}");
    assert_eq!(seen[10], "after");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_blocked_during_a_restart_goes_on() -> Result<()> {
    let redis = Redis::start()?;
    let desk = Desk::open(&redis.url()).await?;
    let mut reader = desk.reader().await?;
    let outage = tokio::task::spawn_blocking(move || {
        wait_until("the reader to be blocked at the server", RECOVERY_MAX, || {
            let clients = redis.command(&["INFO", "clients"]);
            clients.is_ok_and(|reply| reply.text().contains("blocked_clients:1"))
        })?;
        redis.kill9()?;
        redis.restart()?;
        anyhow::Ok(redis)
    });
    let ended = desk.read(reader.as_mut(), Duration::from_secs(60)).await;
    assert!(matches!(ended, Err(StreamError::Unavailable { .. })), "{ended:?}");
    let _redis = outage.await??;

    // The server has nothing: the group comes back from the beginning.
    desk.append_patiently("after").await?;
    let entries = desk.read_patiently(reader.as_mut()).await?;

    assert_eq!(crate::payload(&entries[0].fields), "after");
    Ok(())
}

#[tokio::test]
async fn a_flush_costs_the_group_and_nothing_else() -> Result<()> {
    let redis = Redis::start()?;
    let desk = Desk::open(&redis.url()).await?;
    let mut reader = desk.reader().await?;
    desk.append("before").await?;
    desk.settle(&desk.read(reader.as_mut(), Duration::ZERO).await?).await?;

    redis.command(&["FLUSHALL"])?.ok()?;
    desk.append("after").await?;

    let entries = desk.read(reader.as_mut(), Duration::from_secs(5)).await?;
    assert_eq!(crate::payload(&entries[0].fields), "after");
    Ok(())
}

#[tokio::test]
async fn scripts_the_server_forgot_are_taught_again() -> Result<()> {
    let redis = Redis::start()?;
    let desk = Desk::open(&redis.url()).await?;
    let (lease, holder) = (LeaseName::new("lease")?, HolderName::new("ada")?);
    desk.backend.acquire(&lease, &holder, Duration::from_secs(5)).await?;

    redis.command(&["SCRIPT", "FLUSH"])?.ok()?;

    desk.backend.acquire(&lease, &holder, Duration::from_secs(5)).await?;
    Ok(())
}

/// Checks that a call ends in time, and with `Unavailable`.
async fn in_time<T>(
    what: &str,
    call: impl Future<Output = headwater_stream::Result<T>>,
) -> Result<()> {
    let started = Instant::now();
    let Err(error) = call.await else { anyhow::bail!("{what} succeeded") };
    ensure!(matches!(error, StreamError::Unavailable { .. }), "{what}: {error}");
    // Far beyond the deadline, so that a busy machine does not matter, and far below "for ever".
    ensure!(started.elapsed() < DEADLINE + Duration::from_secs(10), "{what} took its time");
    Ok(())
}

/// Makes one call of every kind to a server that does not answer.
async fn every_call_is_unavailable_in_time(desk: &Desk) -> Result<()> {
    let (backend, stream) = (desk.backend.as_ref(), &desk.stream);
    let (lease, holder) = (LeaseName::new("lease")?, HolderName::new("ada")?);
    let (delays, map) = (DelayName::new("delays")?, MapName::new("map")?);
    let due = Due::After(Duration::from_secs(1));
    let fields = Fields::new([("payload", "x")]);
    let later = [PutAside { to: stream.clone(), due, fields }];
    let pending = PendingQuery {
        stream,
        group: &desk.group,
        consumer: None,
        min_idle: Duration::ZERO,
        after: None,
        count: 10,
    };
    let one_entry =
        [Delivery { id: EntryId::new(1, 0), fields: Fields::new([("a", "b")]), deliveries: 1 }];

    in_time("append", desk.append("x")).await?;
    in_time("settle", desk.settle(&one_entry)).await?;
    in_time("pending", backend.pending(pending)).await?;
    in_time("range", backend.range(stream, Range::first(1))).await?;
    in_time("stats", backend.stats(stream)).await?;
    in_time("put_aside", backend.put_aside(&delays, &later)).await?;
    in_time("take_due", backend.take_due(&delays, 10)).await?;
    in_time("wait_due", backend.wait_due(&delays, Duration::from_millis(100))).await?;
    in_time("acquire", backend.acquire(&lease, &holder, Duration::from_secs(5))).await?;
    in_time("map_get", backend.map_get(&map)).await?;
    in_time("now", backend.now()).await?;
    let read = async {
        let mut reader = backend.reader(&desk.group, &desk.consumer).await?;
        desk.read(reader.as_mut(), Duration::from_millis(100)).await
    };
    in_time("read", read).await?;
    let tail = async {
        let position = [(stream.clone(), EntryId::MIN)];
        backend.tail().await?.read(&position, 10, Duration::from_millis(100)).await
    };
    in_time("tail", tail).await
}

#[tokio::test]
async fn a_server_that_stands_still_is_unavailable_in_time_and_works_again_afterwards() -> Result<()>
{
    let redis = Redis::start()?;
    let desk = Desk::open(&redis.url()).await?;
    desk.round_trip().await?;

    redis.pause()?;
    every_call_is_unavailable_in_time(&desk).await?;
    redis.resume()?;

    desk.append_patiently("after").await?;
    let mut reader = desk.reader().await?;
    desk.read_patiently(reader.as_mut()).await?;
    Ok(())
}

#[tokio::test]
async fn a_network_that_swallows_everything_is_unavailable_in_time() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let desk = Desk::open(&redis.url_at(proxy.addr())).await?;
    desk.round_trip().await?;

    proxy.stall()?;
    every_call_is_unavailable_in_time(&desk).await?;
    proxy.heal()?;

    desk.append_patiently("after").await?;
    Ok(())
}

#[tokio::test]
async fn an_append_whose_reply_is_lost_is_unavailable_and_not_sent_again() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let desk = Desk::open(&redis.url_at(proxy.addr())).await?;

    proxy.drop_reply()?;
    let error = desk.append("once").await.err().context("a reply came")?;

    assert!(matches!(error, StreamError::Unavailable { .. }), "{error}");
    desk.append_patiently("afterwards").await?;
    assert_eq!(desk.payloads().await?, ["once", "afterwards"]);
    Ok(())
}

#[tokio::test]
async fn an_append_cut_in_the_middle_leaves_no_half_entry() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let desk = Desk::open(&redis.url_at(proxy.addr())).await?;

    proxy.drop_after(50)?;
    let error = desk.append(&"x".repeat(10_000)).await.err().context("it arrived whole")?;

    assert!(matches!(error, StreamError::Unavailable { .. }), "{error}");
    desk.append_patiently("afterwards").await?;
    assert_eq!(desk.payloads().await?, ["afterwards"]);
    Ok(())
}

#[tokio::test]
async fn a_read_whose_reply_is_lost_leaves_its_entries_pending() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let desk = Desk::open(&redis.url_at(proxy.addr())).await?;
    let mut reader = desk.reader().await?;
    // The connection of the reader is there before its reply gets lost.
    desk.read(reader.as_mut(), Duration::ZERO).await?;
    let id = desk.append("espresso").await?;

    proxy.drop_reply()?;
    let lost = desk.read(reader.as_mut(), Duration::ZERO).await;

    assert!(matches!(lost, Err(StreamError::Unavailable { .. })), "{lost:?}");
    let query = PendingQuery {
        stream: &desk.stream,
        group: &desk.group,
        consumer: Some(&desk.consumer),
        min_idle: Duration::ZERO,
        after: None,
        count: 10,
    };
    let pending = crate::patiently("pending", async || desk.backend.pending(query).await).await?;
    assert_eq!(pending.iter().map(|entry| entry.id).collect::<Vec<_>>(), [id]);
    Ok(())
}

#[tokio::test]
async fn a_full_server_says_so_and_loses_nothing() -> Result<()> {
    let redis = Redis::builder().maxmemory(4 * 1024 * 1024).start()?;
    let desk = Desk::open(&redis.url()).await?;
    let large = "x".repeat(100_000);

    let mut accepted = 0;
    let error = loop {
        match desk.append(&large).await {
            Ok(_) => accepted += 1,
            Err(error) => break error,
        }
        ensure!(accepted < 1_000, "the server is never full");
    };

    assert!(matches!(error, StreamError::Full { .. }), "{error}");
    assert_eq!(desk.payloads().await?.len(), accepted);
    // Reading and settling is how room is made, so it works.
    let mut reader = desk.reader().await?;
    let entries = desk.read(reader.as_mut(), Duration::ZERO).await?;
    assert_eq!(desk.settle(&entries).await?.applied, entries.len());
    Ok(())
}
