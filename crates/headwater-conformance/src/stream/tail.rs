//! Tail: reading after a position, without a consumer group.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Entry, EntryId, Retention, StreamBatch, StreamName};
use tokio::time::{Instant, timeout};

use super::env::StreamTestEnv;
use super::steps::{ALL, LONG, TICK, contents, ms, numbers, sleep_ms, soon};
use crate::failure::TestResult;

const KEEP: &Retention = &Retention::KEEP_ALL;

fn ids(batches: &[StreamBatch<Entry>]) -> Vec<EntryId> {
    batches.iter().flat_map(|batch| batch.entries.iter().map(|entry| entry.id)).collect()
}

pub async fn a_tail_reads_entries_after_its_position(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let all = env.second.append(&stream, &numbers(10), KEEP).await?;
    let mut tail = env.backend.tail().await?;
    for (after, expected) in [(EntryId::MIN, &all[..]), (all[3], &all[4..]), (all[8], &all[9..])] {
        let read = tail.read(&[(stream.clone(), after)], ALL, LONG).await?;
        assert_eq!(ids(&read), expected, "after {after}");
    }
    let read = tail.read(&[(stream.clone(), all[0])], 1, LONG).await?;
    assert_eq!(read[0].entries[0].fields, numbers(2)[1], "the entries are complete");
    Ok(())
}

pub async fn a_tail_follows_a_stream_page_by_page(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let all = env.second.append(&stream, &numbers(20), KEEP).await?;
    let mut tail = env.backend.tail().await?;
    let (mut found, mut after) = (Vec::new(), EntryId::MIN);
    loop {
        let read = tail.read(&[(stream.clone(), after)], 6, Duration::ZERO).await?;
        let page = ids(&read);
        assert!(page.len() <= 6, "expected at most 6, found {page:?}");
        let Some(last) = page.last() else { break };
        after = *last;
        found.extend(page);
    }
    assert_eq!(found, all);
    Ok(())
}

pub async fn a_tail_reads_several_slots_in_request_order(env: StreamTestEnv) -> TestResult {
    let [a, b, c] = [env.stream_elsewhere("a"), env.stream("b"), env.stream_elsewhere("c")];
    let in_a = env.second.append(&a, &numbers(5), KEEP).await?;
    let in_c = env.second.append(&c, &numbers(5), KEEP).await?;
    let positions = [(c.clone(), in_c[1]), (b, EntryId::MIN), (a.clone(), EntryId::MIN)];

    let read = env.backend.tail().await?.read(&positions, 3, LONG).await?;

    let streams: Vec<&StreamName> = read.iter().map(|batch| &batch.stream).collect();
    assert_eq!(streams, [&c, &a], "without empty batches");
    assert_eq!(ids(&read), [&in_c[2..5], &in_a[..3]].concat());
    Ok(())
}

pub async fn a_blocked_tail_wakes_when_an_entry_arrives(env: StreamTestEnv) -> TestResult {
    let [a, b] = [env.stream("a"), env.stream_elsewhere("b")];
    let positions = [(a.clone(), EntryId::MIN), (b.clone(), EntryId::MIN)];
    let mut tail = env.backend.tail().await?;
    let (second, to) = (Arc::clone(&env.second), b.clone());
    let writer = tokio::spawn(async move {
        sleep_ms(80).await;
        second.append(&to, &numbers(1), KEEP).await
    });

    let started = Instant::now();
    let read = tail.read(&positions, 10, LONG).await?;

    assert_eq!((&read[0].stream, ids(&read)), (&b, writer.await??));
    assert!(started.elapsed() < LONG, "expected to wake early, found {:?}", started.elapsed());
    Ok(())
}

pub async fn a_tail_waits_for_its_timeout_if_nothing_arrives(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let all = env.second.append(&stream, &numbers(1), KEEP).await?;
    let mut tail = env.backend.tail().await?;
    let position = [(stream, all[0])];

    let read = soon("a read without wait", tail.read(&position, 1, Duration::ZERO)).await?;
    assert_eq!(read, []);
    let started = Instant::now();
    let read = soon("the wait to end", tail.read(&position, 1, ms(150))).await?;
    assert_eq!(read, []);
    assert!(started.elapsed() + TICK >= ms(150), "found {:?}", started.elapsed());
    Ok(())
}

pub async fn a_tail_changes_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, all) = env.flow_with_pending(3).await?;
    flow.append(2).await?;
    let before = flow.group_stats().await?;
    let missing = env.stream("missing");

    let positions = [(flow.stream.clone(), EntryId::MIN), (missing.clone(), EntryId::MIN)];
    let mut tail = env.backend.tail().await?;
    for _ in 0..3 {
        assert_eq!(ids(&tail.read(&positions, ALL, LONG).await?).len(), 5, "on every read");
    }

    let after = flow.group_stats().await?;
    assert_eq!((after.pending, after.last_delivered), (before.pending, before.last_delivered));
    assert_eq!(after.consumers.len(), before.consumers.len(), "{after:?}");
    assert_eq!(flow.pending_ids().await?, all);
    assert_eq!(env.second.stats(&missing).await?, None, "no stream was created");
    Ok(())
}

pub async fn a_dropped_tail_read_loses_nothing(env: StreamTestEnv) -> TestResult {
    const COUNT: usize = 100;
    let stream = env.stream("orders");
    let (second, to) = (Arc::clone(&env.second), stream.clone());
    let writer = tokio::spawn(async move {
        for _ in 0..COUNT {
            second.append(&to, &numbers(1), KEEP).await?;
            sleep_ms(1).await;
        }
        TestResult::Ok(())
    });

    let mut tail = env.backend.tail().await?;
    let (mut found, mut after) = (Vec::new(), EntryId::MIN);
    let reading = async {
        for limit in (0..8_000).step_by(373).cycle() {
            let position = [(stream.clone(), after)];
            let read = tail.read(&position, 10, LONG);
            if let Ok(read) = timeout(Duration::from_micros(limit), read).await {
                found.extend(ids(&read?));
                after = found.last().copied().unwrap_or(after);
            }
            if found.len() >= COUNT {
                break;
            }
        }
        TestResult::Ok(())
    };
    soon("the tail to see every entry", reading).await?;

    writer.await??;
    let all: Vec<EntryId> =
        contents(&*env.second, &stream).await?.into_iter().map(|entry| entry.id).collect();
    assert_eq!(found, all);
    Ok(())
}

pub async fn a_tail_continues_in_a_stream_that_was_deleted_and_recreated(
    env: StreamTestEnv,
) -> TestResult {
    let stream = env.stream("orders");
    env.second.append(&stream, &numbers(1), KEEP).await?;
    let mut tail = env.backend.tail().await?;
    env.second.delete_stream(&stream).await?;
    let position = [(stream.clone(), EntryId::MIN)];
    assert_eq!(tail.read(&position, 1, ms(20)).await?, []);

    let new = env.second.append(&stream, &numbers(1), KEEP).await?;

    assert_eq!(ids(&tail.read(&position, 1, LONG).await?), new);
    Ok(())
}
