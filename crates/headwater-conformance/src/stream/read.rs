//! Group reads: counts, waits, and reads that are dropped.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use headwater_stream::{
    DeliveredEntry, EntryId, GroupReader, GroupStart, Retention, StreamBatch, StreamError,
    StreamName,
};
use tokio::time::{Instant, timeout};

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{LONG, TICK, ids_of, ms, numbered, numbers, read_all, sleep_ms, soon};
use crate::failure::TestResult;

const KEEP: &Retention = &Retention::KEEP_ALL;

fn all_ids(batches: &[StreamBatch<DeliveredEntry>]) -> Vec<EntryId> {
    batches.iter().flat_map(|batch| ids_of(&batch.entries)).collect()
}

/// Three streams, the last two in other slots, with a group on each.
async fn three_streams(env: &StreamTestEnv) -> TestResult<[StreamName; 3]> {
    let streams = [env.stream("a"), env.stream_elsewhere("b"), env.stream_elsewhere("c")];
    for stream in &streams {
        env.second.ensure_group(stream, &group("workers"), GroupStart::Beginning).await?;
    }
    Ok(streams)
}

async fn ann(env: &StreamTestEnv) -> TestResult<Box<dyn GroupReader>> {
    Ok(env.backend.reader(&group("workers"), &consumer("ann")).await?)
}

pub async fn a_first_delivery_has_a_delivery_count_of_one(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(1).await?;

    let read = ann(&env).await?.read(std::slice::from_ref(&flow.stream), 1, LONG).await?;

    let delivery = DeliveredEntry { id: ids[0], fields: numbered(0), deliveries: 1 };
    assert_eq!(read, [StreamBatch { stream: flow.stream.clone(), entries: vec![delivery] }]);
    Ok(())
}

pub async fn a_read_returns_entries_in_id_order(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(50).await?;
    let mut reader = ann(&env).await?;
    let mut found = Vec::new();
    while found.len() < 50 {
        let read = reader.read(std::slice::from_ref(&flow.stream), 8, LONG).await?;
        found.extend(all_ids(&read));
    }
    assert_eq!(found, ids);
    Ok(())
}

pub async fn a_read_returns_at_most_count_entries_per_stream(env: StreamTestEnv) -> TestResult {
    let streams = three_streams(&env).await?;
    for (stream, count) in streams.iter().zip([5, 2, 9]) {
        env.second.append(stream, &numbers(count), KEEP).await?;
    }

    let read = ann(&env).await?.read(&streams, 3, LONG).await?;

    let found: Vec<(&StreamName, usize)> =
        read.iter().map(|batch| (&batch.stream, batch.entries.len())).collect();
    for (stream, found) in &found {
        assert!(*found <= 3, "expected at most 3 of {stream}, found {found}");
    }
    if !env.is_faulty() {
        assert_eq!(found, [(&streams[0], 3), (&streams[1], 2), (&streams[2], 3)]);
    }
    Ok(())
}

pub async fn batches_are_returned_in_request_order_without_empty_ones(
    env: StreamTestEnv,
) -> TestResult {
    let [a, b, c] = three_streams(&env).await?;
    for stream in [&a, &c] {
        env.second.append(stream, &numbers(1), KEEP).await?;
    }
    let order = [c.clone(), b, a.clone()];

    let read = ann(&env).await?.read(&order, 10, LONG).await?;

    let found: Vec<&StreamName> = read.iter().map(|batch| &batch.stream).collect();
    assert_eq!(found, [&c, &a]);
    Ok(())
}

pub async fn streams_in_different_slots_are_read_in_one_call(env: StreamTestEnv) -> TestResult {
    const COUNT: usize = 12;
    let group = group("workers");
    let streams: Vec<StreamName> =
        (0..COUNT).map(|number| env.stream_elsewhere(&number.to_string())).collect();
    for (number, stream) in streams.iter().enumerate() {
        env.second.ensure_group(stream, &group, GroupStart::Beginning).await?;
        env.second.append(stream, &[numbered(number)], KEEP).await?;
    }

    let read = read_all(&mut *ann(&env).await?, &streams, COUNT).await?;

    let mut found: Vec<(String, String)> = Vec::new();
    for StreamBatch { stream, entries } in read {
        found.extend(entries.iter().map(|e| (stream.to_string(), format!("{:?}", e.fields))));
    }
    found.sort();
    let mut expected: Vec<(String, String)> = streams
        .iter()
        .map(StreamName::to_string)
        .zip(numbers(COUNT).iter().map(|fields| format!("{fields:?}")))
        .collect();
    expected.sort();
    assert_eq!(found, expected);
    Ok(())
}

pub async fn a_read_of_200_streams_finds_the_one_with_an_entry(env: StreamTestEnv) -> TestResult {
    let streams: Vec<StreamName> = (0..200).map(|n| env.stream(&n.to_string())).collect();
    let ids = env.second.append(&streams[133], &numbers(1), KEEP).await?;

    let read = read_all(&mut *ann(&env).await?, &streams, 1).await?;

    assert_eq!((&read[0].stream, all_ids(&read)), (&streams[133], ids));
    Ok(())
}

pub async fn a_read_without_wait_returns_at_once(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let mut reader = ann(&env).await?;
    let read = reader.read(std::slice::from_ref(&flow.stream), 1, Duration::ZERO);
    assert_eq!(soon("a read without wait to return", read).await?, []);
    Ok(())
}

pub async fn a_read_waits_for_its_timeout_if_nothing_arrives(env: StreamTestEnv) -> TestResult {
    let streams = three_streams(&env).await?;
    let mut reader = ann(&env).await?;
    for wait in [ms(100), ms(250)] {
        let started = Instant::now();
        let read = soon("the wait to end", reader.read(&streams, 1, wait)).await?;
        let waited = started.elapsed();
        assert_eq!(read, []);
        assert!(waited + TICK >= wait, "expected to wait {wait:?}, found {waited:?}");
    }
    Ok(())
}

pub async fn a_blocked_read_returns_when_an_entry_arrives(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let mut reader = ann(&env).await?;
    let second = Arc::clone(&env.second);
    let stream = flow.stream.clone();
    let writer = tokio::spawn(async move {
        sleep_ms(100).await;
        second.append(&stream, &numbers(1), KEEP).await
    });

    let started = Instant::now();
    let read = reader.read(std::slice::from_ref(&flow.stream), 10, LONG).await?;

    assert_eq!(all_ids(&read), writer.await??);
    assert!(started.elapsed() < LONG, "expected to wake early, found {:?}", started.elapsed());
    Ok(())
}

pub async fn a_blocked_read_on_several_slots_wakes_for_each_of_them(
    env: StreamTestEnv,
) -> TestResult {
    let streams = three_streams(&env).await?;
    let mut reader = ann(&env).await?;
    for stream in &streams {
        let (second, to) = (Arc::clone(&env.second), stream.clone());
        let writer = tokio::spawn(async move {
            sleep_ms(60).await;
            second.append(&to, &numbers(1), KEEP).await
        });
        let started = Instant::now();
        let read = reader.read(&streams, 10, LONG).await?;
        assert_eq!((&read[0].stream, all_ids(&read)), (stream, writer.await??));
        assert!(started.elapsed() < LONG, "expected to wake early for {stream}");
    }
    Ok(())
}

pub async fn a_stream_that_always_has_entries_delays_no_other(env: StreamTestEnv) -> TestResult {
    let [busy, quiet, _] = three_streams(&env).await?;
    let streams = [busy.clone(), quiet.clone()];
    let mut reader = ann(&env).await?;
    assert_eq!(reader.read(&streams, 1, ms(20)).await?, [], "there is nothing yet");
    let (second, to) = (Arc::clone(&env.second), busy.clone());
    let writer = tokio::spawn(async move {
        sleep_ms(60).await;
        second.append(&to, &numbers(1), KEEP).await
    });
    let woken = reader.read(&streams, 1, LONG).await?;
    assert_eq!((&woken[0].stream, all_ids(&woken)), (&busy, writer.await??));

    // The read of the other stream may still be blocked.
    env.second.append(&busy, &numbers(200), KEEP).await?;
    let ids = env.second.append(&quiet, &numbers(1), KEEP).await?;
    let mut reads = 0;
    loop {
        let read = reader.read(&streams, 1, LONG).await?;
        reads += 1;
        if let Some(batch) = read.iter().find(|batch| batch.stream == quiet) {
            assert_eq!(batch.entries[0].id, ids[0]);
            break;
        }
        assert!(reads < 200, "the entry was read only when the busy stream was empty");
    }
    Ok(())
}

pub async fn a_stream_that_does_not_exist_yet_can_be_read(env: StreamTestEnv) -> TestResult {
    let streams = [env.stream("a"), env.stream_elsewhere("b")];
    let mut reader = ann(&env).await?;
    assert_eq!(reader.read(&streams, 10, ms(20)).await?, [], "there is nothing yet");

    for stream in &streams {
        let ids = env.second.append(stream, &numbers(2), KEEP).await?;
        assert_eq!(all_ids(&read_all(&mut *reader, &streams, 2).await?), ids);
    }
    Ok(())
}

pub async fn a_deleted_entry_is_not_delivered(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(5).await?;
    env.second.delete_entries(&flow.stream, &[ids[0], ids[3]]).await?;

    let read = read_all(&mut *ann(&env).await?, std::slice::from_ref(&flow.stream), 3).await?;

    assert_eq!(all_ids(&read), [ids[1], ids[2], ids[4]]);
    Ok(())
}

pub async fn a_deleted_group_is_recreated_from_the_beginning(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let streams = std::slice::from_ref(&flow.stream);
    let ids = flow.append(3).await?;
    let mut reader = ann(&env).await?;
    assert_eq!(all_ids(&read_all(&mut *reader, streams, 3).await?), ids);

    env.second.remove_group(&flow.stream, &flow.group).await?;

    assert_eq!(all_ids(&read_all(&mut *reader, streams, 3).await?), ids, "nothing is lost");
    Ok(())
}

pub async fn a_group_deleted_during_a_blocked_read_is_recreated_from_the_beginning(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let mut reader = ann(&env).await?;
    let (second, stream, group) =
        (Arc::clone(&env.second), flow.stream.clone(), flow.group.clone());
    let writer = tokio::spawn(async move {
        sleep_ms(80).await;
        second.remove_group(&stream, &group).await?;
        second.append(&stream, &numbers(2), KEEP).await
    });

    let read = read_all(&mut *reader, std::slice::from_ref(&flow.stream), 2).await?;

    assert_eq!(all_ids(&read), writer.await??);
    Ok(())
}

pub async fn a_stream_deleted_during_a_blocked_read_does_not_stop_the_reader(
    env: StreamTestEnv,
) -> TestResult {
    let [a, b, _] = three_streams(&env).await?;
    let mut reader = ann(&env).await?;
    let (second, deleted) = (Arc::clone(&env.second), a.clone());
    let writer = tokio::spawn(async move {
        sleep_ms(80).await;
        second.delete_stream(&deleted).await?;
        sleep_ms(80).await;
        second.append(&deleted, &numbers(2), KEEP).await
    });

    let read = read_all(&mut *reader, &[b, a], 2).await?;

    assert_eq!(all_ids(&read), writer.await??);
    Ok(())
}

/// Asserts that the read failed because there is no such group, and that the reader did not create it.
async fn assert_no_group(
    env: &StreamTestEnv,
    stream: &StreamName,
    read: headwater_stream::Result<Vec<StreamBatch<DeliveredEntry>>>,
) -> TestResult {
    assert!(matches!(read, Err(StreamError::NoGroup { .. })), "{read:?}");
    let groups = env.second.stats(stream).await?.map(|stats| stats.groups).unwrap_or_default();
    assert_eq!(groups, []);
    Ok(())
}

pub async fn a_read_of_a_required_group_fails_if_it_is_missing_and_creates_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let streams = std::slice::from_ref(&flow.stream);
    let ids = flow.append(3).await?;
    let mut reader = ann(&env).await?;
    reader.require_groups();
    assert_eq!(all_ids(&read_all(&mut *reader, streams, 3).await?), ids);

    env.second.remove_group(&flow.stream, &flow.group).await?;
    assert_no_group(&env, &flow.stream, reader.read(streams, 10, ms(50)).await).await?;
    env.second.delete_stream(&flow.stream).await?;
    assert_no_group(&env, &flow.stream, reader.read(streams, 10, ms(50)).await).await?;
    assert_eq!(env.second.stats(&flow.stream).await?, None, "the stream is not created");

    env.second.ensure_group(&flow.stream, &flow.group, GroupStart::Beginning).await?;
    let ids = flow.append(2).await?;
    assert_eq!(all_ids(&read_all(&mut *reader, streams, 2).await?), ids, "the reader works again");
    Ok(())
}

pub async fn a_required_group_deleted_during_a_blocked_read_stays_deleted(
    env: StreamTestEnv,
) -> TestResult {
    let [a, b, _] = three_streams(&env).await?;
    let flow_group = group("workers");
    let mut reader = ann(&env).await?;
    reader.require_groups();
    for deletes_stream in [false, true] {
        env.second.ensure_group(&a, &flow_group, GroupStart::End).await?;
        let (second, stream, group) = (Arc::clone(&env.second), a.clone(), flow_group.clone());
        let writer = tokio::spawn(async move {
            sleep_ms(80).await;
            match deletes_stream {
                true => second.delete_stream(&stream).await?,
                false => second.remove_group(&stream, &group).await?,
            };
            second.append(&stream, &numbers(2), KEEP).await
        });

        let read = reader.read(&[b.clone(), a.clone()], 2, LONG).await;

        writer.await??;
        // The read of another server of a cluster may have succeeded.
        let mut failures = reader.take_failures();
        let read = match failures.pop() {
            Some(failure) => Err(failure.error),
            None => read,
        };
        assert_no_group(&env, &a, read).await?;
    }
    Ok(())
}

pub async fn the_next_read_returns_entries_delivered_to_a_dropped_read(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let streams = std::slice::from_ref(&flow.stream);
    let mut reader = ann(&env).await?;
    let dropped = timeout(ms(50), reader.read(streams, 10, LONG)).await;
    assert!(dropped.is_err(), "expected the read to wait, found {dropped:?}");

    // The server may deliver these to the read that was dropped.
    let ids = flow.append(3).await?;
    sleep_ms(100).await;

    assert_eq!(all_ids(&read_all(&mut *reader, streams, 3).await?), ids);
    assert_eq!(flow.pending_ids().await?, ids, "and they are pending once");
    Ok(())
}

pub async fn a_read_dropped_after_a_few_steps_loses_nothing(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let streams = std::slice::from_ref(&flow.stream);
    let mut reader = ann(&env).await?;
    for round in 0..64 {
        let steps = round % 8;
        let ids = flow.append(3).await?;
        let mut found = {
            let mut read = reader.read(streams, 10, LONG);
            poll_some(&mut read, steps).await.transpose()?.unwrap_or_default()
        };
        if found.is_empty() {
            // The server may deliver to the dropped read meanwhile. The next read resumes it or starts another one.
            sleep_ms(2).await;
            let wait = if round % 16 < 8 { LONG } else { ms(100) };
            found = soon("the entries", reader.read(streams, 10, wait)).await?;
        }
        assert_eq!(all_ids(&found), ids, "after {steps} steps");
    }
    Ok(())
}

/// Polls a future `times` times; its output, if it completes.
async fn poll_some<T>(mut future: impl Future<Output = T> + Unpin, steps: usize) -> Option<T> {
    for _ in 0..steps {
        if let Poll::Ready(value) = futures_util::poll!(&mut future) {
            return Some(value);
        }
        tokio::task::yield_now().await;
    }
    None
}

pub async fn reads_dropped_at_random_points_lose_and_duplicate_nothing(
    env: StreamTestEnv,
) -> TestResult {
    const COUNT: usize = 300;
    let flow = env.flow().await?;
    let (second, stream) = (Arc::clone(&env.second), flow.stream.clone());
    let writer = tokio::spawn(async move {
        let mut ids = Vec::new();
        for number in 0..COUNT {
            ids.extend(second.append(&stream, &[numbered(number)], KEEP).await?);
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        TestResult::Ok(ids)
    });

    let mut reader = ann(&env).await?;
    let mut random = fastrand::Rng::with_seed(7);
    let mut found = Vec::new();
    let reading = async {
        while found.len() < COUNT {
            let limit = Duration::from_micros(random.u64(..6_000));
            let read = reader.read(std::slice::from_ref(&flow.stream), 7, ms(20));
            if let Ok(batches) = timeout(limit, read).await {
                let batches = batches?;
                assert!(all_ids(&batches).len() <= 7, "expected at most 7, found {batches:?}");
                found.extend(all_ids(&batches));
            }
        }
        TestResult::Ok(())
    };
    soon("every entry to be delivered", reading).await?;

    let ids = writer.await??;
    assert_eq!(found, ids, "each entry comes once and in order");
    assert_eq!(reader.close().await?, [], "nothing is left over");
    assert_eq!(flow.pending_ids().await?, ids, "and all are pending");
    Ok(())
}

pub async fn a_dropped_read_of_several_slots_loses_nothing(env: StreamTestEnv) -> TestResult {
    let streams = three_streams(&env).await?;
    let mut reader = ann(&env).await?;
    let mut expected = Vec::new();
    let mut found = Vec::new();
    for round in 0..20 {
        let stream = &streams[round % 3];
        expected.extend(env.second.append(stream, &numbers(2), KEEP).await?);
        let limit = Duration::from_micros(300 * round as u64);
        if let Ok(read) = timeout(limit, reader.read(&streams, 5, ms(50))).await {
            found.extend(all_ids(&read?));
        }
    }
    let missing = expected.len() - found.len();
    found.extend(all_ids(&read_all(&mut *reader, &streams, missing).await?));

    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    Ok(())
}

pub async fn close_returns_entries_delivered_to_a_dropped_read(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let mut reader = ann(&env).await?;
    let streams = std::slice::from_ref(&flow.stream);
    let dropped = timeout(ms(50), reader.read(streams, 10, LONG)).await;
    assert!(dropped.is_err(), "expected the read to wait, found {dropped:?}");
    let ids = flow.append(3).await?;
    sleep_ms(100).await;

    let mut found = all_ids(&soon("the reader to close", reader.close()).await?);

    assert_eq!(found, flow.pending_ids().await?, "what is pending was returned");
    found.extend(ids_of(&flow.deliver("bob", 10).await?));
    assert_eq!(found, ids, "the rest goes to other consumers");
    Ok(())
}

pub async fn a_closed_reader_receives_nothing_more(env: StreamTestEnv) -> TestResult {
    let streams = three_streams(&env).await?;
    let mut reader = ann(&env).await?;
    let dropped = timeout(ms(50), reader.read(&streams, 10, LONG)).await;
    assert!(dropped.is_err(), "expected the read to wait, found {dropped:?}");
    assert_eq!(soon("the reader to close", reader.close()).await?, []);

    let mut ids = Vec::new();
    for stream in &streams {
        ids.extend(env.second.append(stream, &numbers(1), KEEP).await?);
    }
    sleep_ms(50).await;

    let mut bob = env.second.reader(&group("workers"), &consumer("bob")).await?;
    let mut found = all_ids(&read_all(&mut *bob, &streams, 3).await?);
    found.sort();
    ids.sort();
    assert_eq!(found, ids, "another consumer gets all of it");
    Ok(())
}

pub async fn closing_an_idle_reader_returns_nothing(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    flow.append(5).await?;
    let mut reader = ann(&env).await?;
    let read = reader.read(std::slice::from_ref(&flow.stream), 2, LONG).await?;

    assert_eq!(reader.close().await?, [], "no read was dropped");

    assert_eq!(flow.pending_ids().await?, all_ids(&read), "nothing was read ahead");
    Ok(())
}

pub async fn two_readers_of_one_process_block_independently(env: StreamTestEnv) -> TestResult {
    let streams = [env.stream("a"), env.stream("b")];
    let [mut first, mut other] = [ann(&env).await?, ann(&env).await?];
    let blocked = {
        let streams = [streams[0].clone()];
        tokio::spawn(async move { first.read(&streams, 1, LONG).await })
    };
    sleep_ms(50).await;

    // A blocked read must not block other calls of the same process.
    soon("the time", env.backend.now()).await?;
    let ids = env.second.append(&streams[1], &numbers(1), KEEP).await?;
    let read = soon("the other reader", read_all(&mut *other, &streams[1..], 1)).await?;
    assert_eq!(all_ids(&read), ids);

    let ids = env.second.append(&streams[0], &numbers(1), KEEP).await?;
    assert_eq!(all_ids(&soon("the waiting reader", blocked).await??), ids);
    Ok(())
}
