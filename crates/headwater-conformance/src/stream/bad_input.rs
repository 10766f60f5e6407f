//! Bad input: a call over a limit fails with the argument and the limit, without effect.

use std::fmt::{Debug, Display};
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::limits::*;
use headwater_stream::{
    Delays, DueTime, EntryId, Epoch, Fence, Fields, IdempotentEntry, LeaseName,
    PendingDeliveryQuery, Range, ReclaimFrom, ReclaimRequest, RegistryMap, Result, Retention,
    ScheduleRequest, SettleAction, Settlement, StreamError, StreamName, TrimGuard,
};

use super::env::{StreamTestEnv, consumer, holder};
use super::steps::{HOUR, numbered, numbers};
use crate::failure::TestResult;

/// Fails unless the call was rejected because of the argument `what`, with `limit` in the reason.
fn assert_invalid<T: Debug>(call: &str, answer: Result<T>, what: &str, limit: &dyn Display) {
    let limit = limit.to_string();
    match answer {
        Err(StreamError::Invalid { what: argument, problem }) => {
            assert_eq!(argument, what, "{call}: the argument ({problem})");
            assert!(problem.contains(&limit), "{call}: expected {limit:?} in {problem:?}");
        }
        other => panic!("{call}: expected Invalid because of {what}, found {other:?}"),
    }
}

fn one_byte_more(than: usize) -> Fields {
    Fields::new([(Bytes::new(), Bytes::from(vec![b'x'; than + 1]))])
}

/// Entries that exceed each limit: label, entries, argument and limit.
fn bad_entries() -> Vec<(&'static str, Vec<Fields>, &'static str, String)> {
    bad_entries_beyond(FIELDS_MAX, ENTRY_BYTES_MAX)
}

fn bad_entries_beyond(
    fields_max: usize,
    bytes_max: usize,
) -> Vec<(&'static str, Vec<Fields>, &'static str, String)> {
    let no_fields = Fields::new::<Bytes, Bytes>([]);
    let many_fields = Fields::new((0..=fields_max).map(|n| (n.to_string(), "")));
    let mebibyte = Fields::new([("x", vec![0; 1024 * 1024])]);
    vec![
        ("no fields", vec![numbered(0), no_fields], "an entry", "no fields".to_owned()),
        ("many fields", vec![numbered(0), many_fields], "an entry", fields_max.to_string()),
        (
            "a large entry",
            vec![numbered(0), one_byte_more(bytes_max)],
            "an entry",
            bytes_max.to_string(),
        ),
        ("many entries", numbers(BATCH_MAX + 1), "entries", BATCH_MAX.to_string()),
        ("many bytes", vec![mebibyte; 32], "entries", BATCH_BYTES_MAX.to_string()),
    ]
}

pub async fn entries_beyond_a_limit_are_not_appended(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    for (case, entries, what, limit) in bad_entries() {
        let answer = env.backend.append(&stream, &entries, &Retention::KEEP_ALL).await;
        assert_invalid(case, answer, what, &limit);
    }
    assert_eq!(env.second.stats(&stream).await?, None, "nothing was appended");
    Ok(())
}

pub async fn entries_beyond_a_limit_are_not_appended_once(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let keep = &Retention::KEEP_ALL;
    let once =
        |(number, fields): (usize, Fields)| IdempotentEntry { id: number.to_string(), fields };
    for (case, entries, what, limit) in bad_entries() {
        let entries: Vec<IdempotentEntry> = entries.into_iter().enumerate().map(once).collect();
        let answer = env.backend.append_once(&stream, &entries, HOUR, keep).await;
        assert_invalid(case, answer, what, &limit);
    }
    let long = "i".repeat(NAME_BYTES_MAX + 1);
    for (id, limit) in [("", "empty".to_owned()), (&long, NAME_BYTES_MAX.to_string())] {
        let entries =
            ["0", id].map(|id| IdempotentEntry { id: id.to_owned(), fields: numbered(0) });
        let answer = env.backend.append_once(&stream, &entries, HOUR, keep).await;
        assert_invalid("append", answer, "an entry's id", &limit);
        let answer = env.backend.appended(&stream, &["0", id]).await;
        assert_invalid("ask", answer, "an entry's id", &limit);
    }
    let answer = env.backend.appended(&stream, &vec!["i"; BATCH_MAX + 1]).await;
    assert_invalid("ask", answer, "ids", &BATCH_MAX);
    let entries = [once((0, numbered(0)))];
    for time in [Duration::ZERO, KEEP_MAX + Duration::from_millis(1)] {
        let answer = env.backend.append_once(&stream, &entries, time, keep).await;
        assert_invalid("append", answer, "keep", &format!("{KEEP_MAX:?}"));
    }
    let never = Retention { max_bytes: Some(0), ..Retention::KEEP_ALL };
    let answer = env.backend.append_once(&stream, &entries, HOUR, &never).await;
    assert_invalid("append", answer, "max_bytes", &"zero");
    assert_eq!(env.second.appended(&stream, &["0"]).await?, [None], "no id was recorded");
    assert_eq!(env.second.stats(&stream).await?, None, "nothing was appended");
    Ok(())
}

pub async fn a_batch_of_the_maximum_bytes_is_appended(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let mebibyte = Fields::new([("", vec![b'x'; 1024 * 1024])]);
    let entries = vec![mebibyte; BATCH_BYTES_MAX / (1024 * 1024)];
    let ids = env.backend.append(&stream, &entries, &Retention::KEEP_ALL).await?;
    assert_eq!(ids.len(), 32);
    env.second.delete_stream(&stream).await?;
    Ok(())
}

pub async fn a_zero_retention_is_rejected(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.second.append(&stream, &numbers(3), &Retention::KEEP_ALL).await?;
    let cases = [
        ("max_age", Retention { max_age: Some(Duration::ZERO), ..Retention::KEEP_ALL }),
        ("max_bytes", Retention { max_bytes: Some(0), ..Retention::KEEP_ALL }),
    ];
    for (what, retention) in cases {
        let answer = env.backend.append(&stream, &numbers(1), &retention).await;
        assert_invalid("append", answer, what, &"zero");
        for guard in [TrimGuard::Safe, TrimGuard::Force] {
            assert_invalid(
                "trim",
                env.backend.trim(&stream, &retention, guard).await,
                what,
                &"zero",
            );
        }
    }
    let left = env.second.range(&stream, Range::first(10)).await?;
    assert_eq!(left.iter().map(|entry| entry.id).collect::<Vec<_>>(), ids);
    Ok(())
}

pub async fn a_read_beyond_a_limit_delivers_nothing(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(3).await?;
    let one = vec![flow.stream.clone()];
    let many: Vec<StreamName> = vec![flow.stream.clone(); READ_STREAMS_MAX + 1];
    let wait = WAIT_MAX + Duration::from_millis(1);
    let none = Duration::ZERO;
    let cases = [
        ("no streams", vec![], 1, none, "streams", "empty".to_owned()),
        ("many streams", many, 1, none, "streams", READ_STREAMS_MAX.to_string()),
        ("count 0", one.clone(), 0, none, "count", "the minimum is 1".to_owned()),
        ("a large count", one.clone(), COUNT_MAX + 1, none, "count", COUNT_MAX.to_string()),
        ("a long wait", one, 1, wait, "wait", "60s".to_owned()),
    ];
    let mut reader = env.backend.reader(&flow.group, &consumer("ann")).await?;
    let mut tail = env.backend.tail().await?;
    for (case, streams, count, wait, what, limit) in cases {
        let answer = reader.read(&streams, count, wait).await;
        assert_invalid(case, answer, what, &limit);
        let positions: Vec<_> = streams.into_iter().map(|stream| (stream, EntryId::MIN)).collect();
        let answer = tail.read(&positions, count, wait).await;
        assert_invalid(case, answer, what, &limit);
    }
    assert_eq!(flow.pending_ids().await?, [], "nothing was delivered");
    let read = super::steps::read_all(&mut *reader, &[flow.stream], 3).await?;
    assert_eq!(super::steps::ids_of(&read[0].entries), ids, "the reader continues");
    Ok(())
}

pub async fn a_settle_beyond_a_limit_changes_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let dead = env.stream("dead");
    let too_many = vec![Settlement::ack(ids[0]); BATCH_MAX + 1];
    assert_invalid("many", flow.settle("ann", &too_many).await, "entries", &BATCH_MAX);

    for (case, entries, what, limit) in
        bad_entries_beyond(FOLLOW_UP_FIELDS_MAX, FOLLOW_UP_BYTES_MAX)
    {
        if entries.len() > BATCH_MAX {
            continue;
        }
        let mut settlements = vec![Settlement::ack(ids[0])];
        settlements.extend(entries.into_iter().map(|fields| {
            let then = SettleAction::Append { to: dead.clone(), fields };
            Settlement { id: ids[1], action: then }
        }));
        assert_invalid(case, flow.settle("ann", &settlements).await, what, &limit);
    }

    for (what, due, limit) in bad_due_times() {
        let (delays, to) = (env.delays("later"), flow.stream.clone());
        let then = SettleAction::Reschedule { delays, to, due, fields: numbered(1) };
        let settlements = [Settlement::ack(ids[0]), Settlement { id: ids[1], action: then }];
        assert_invalid("a due time", flow.settle("ann", &settlements).await, what, &limit);
    }
    assert_eq!(flow.pending_ids().await?, ids);
    assert_eq!(env.second.stats(&dead).await?, None);
    Ok(())
}

fn bad_due_times() -> [(&'static str, DueTime, String); 2] {
    let beyond = DELAY_MAX + Duration::from_millis(1);
    let exact = (1 << 53) + 1;
    [
        ("the delay", DueTime::After(beyond), format!("{DELAY_MAX:?}")),
        ("the due time", DueTime::At(Timestamp::from_millis(exact)), exact.to_string()),
    ]
}

pub async fn calls_by_id_are_limited(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let many = vec![ids[0]; COUNT_MAX + 1];
    let (ann, bob) = (consumer("ann"), consumer("bob"));
    let answer = env.backend.keep_alive(&flow.stream, &flow.group, &ann, &many).await;
    assert_invalid("keep_alive", answer, "ids", &COUNT_MAX);
    let answer = env.backend.delete_entries(&flow.stream, &many).await;
    assert_invalid("delete_entries", answer, "ids", &COUNT_MAX);
    let from = ReclaimFrom::Ids(&many);
    let answer = env.backend.reclaim(ReclaimRequest { from, ..flow.reclaim_any(&bob) }).await;
    assert_invalid("reclaim", answer, "ids", &COUNT_MAX);

    assert_eq!(flow.ids().await?, ids);
    assert!(flow.pending_owners().await?.iter().all(|(_, owner, _)| owner == "ann"));
    Ok(())
}

pub async fn counts_are_at_least_one_and_limited(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(2).await?;
    let (bob, delays) = (consumer("bob"), env.delays("later"));
    let due = DueTime::At(Timestamp::from_millis(1));
    let item = ScheduleRequest { to: flow.stream.clone(), due, fields: numbered(1) };
    env.second.schedule(&delays, &[item]).await?;

    for (count, limit) in
        [(0, "the minimum is 1".to_owned()), (COUNT_MAX + 1, COUNT_MAX.to_string())]
    {
        let range = Range { count, ..Range::first(1) };
        assert_invalid("range", env.backend.range(&flow.stream, range).await, "count", &limit);
        let query = PendingDeliveryQuery { count, ..flow.pending_query() };
        assert_invalid("pending", env.backend.pending(query).await, "count", &limit);
        let reclaim = ReclaimRequest { count, ..flow.reclaim_any(&bob) };
        assert_invalid("reclaim", env.backend.reclaim(reclaim).await, "count", &limit);
        assert_invalid(
            "promote_due",
            env.backend.promote_due(&delays, count).await,
            "count",
            &limit,
        );
        assert_invalid("delayed", env.backend.delayed(&delays, 0, count).await, "count", &limit);
    }
    assert!(flow.pending_owners().await?.iter().all(|(_, owner, _)| owner == "ann"));
    assert_eq!(env.second.delay_stats(&delays).await?.waiting, 1, "nothing was promoted");
    Ok(())
}

pub async fn entries_beyond_a_limit_are_not_scheduled(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let items = |entries: Vec<Fields>, due: DueTime| -> Vec<ScheduleRequest> {
        entries.into_iter().map(|fields| ScheduleRequest { to: to.clone(), due, fields }).collect()
    };
    for (case, entries, what, limit) in bad_entries() {
        let answer = env.backend.schedule(&delays, &items(entries, DueTime::After(HOUR))).await;
        let what = if what == "entries" { "items" } else { what };
        assert_invalid(case, answer, what, &limit);
    }
    for (what, due, limit) in bad_due_times() {
        let answer = env.backend.schedule(&delays, &items(numbers(1), due)).await;
        assert_invalid("schedule", answer, what, &limit);
    }
    let wait = WAIT_MAX + Duration::from_millis(1);
    assert_invalid(
        "wait_until_due",
        env.backend.wait_until_due(&delays, wait).await,
        "wait",
        &"60s",
    );
    assert_eq!(env.second.delay_stats(&delays).await?.waiting, 0, "nothing was scheduled");
    Ok(())
}

pub async fn an_entry_can_be_scheduled_with_the_maximum_delay(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let latest = Timestamp::from_millis(1 << 53);
    for due in [DueTime::After(DELAY_MAX), DueTime::At(latest)] {
        let item = ScheduleRequest { to: to.clone(), due, fields: numbered(1) };
        env.second.schedule(&delays, &[item]).await?;
    }
    let found = env.backend.delayed(&delays, 0, 10).await?;
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[1].due_at, latest, "to the millisecond");
    Delays::promote_due(&*env.backend, &delays, 10).await?;
    assert_eq!(env.second.delay_stats(&delays).await?.waiting, 2, "neither is due");
    Ok(())
}

pub async fn the_ttl_of_a_lease_has_a_minimum_and_a_maximum(env: StreamTestEnv) -> TestResult {
    let (lease, ann) = (env.lease("orders"), holder("ann"));
    let fence = Fence { lease: lease.clone(), epoch: Epoch(1) };
    let tick = Duration::from_millis(1);
    for (ttl, limit) in
        [(LEASE_TTL_MIN - tick, LEASE_TTL_MIN), (LEASE_TTL_MAX + tick, LEASE_TTL_MAX)]
    {
        let limit = format!("{limit:?}");
        let answer = env.backend.acquire(&lease, &ann, ttl).await;
        assert_invalid("acquire", answer, "ttl", &limit);
        let answer = env.backend.renew(&ann, std::slice::from_ref(&fence), ttl).await;
        assert_invalid("renew", answer, "ttl", &limit);
    }
    assert_eq!(env.second.leases(&[lease]).await?, [None], "the lease is free");
    Ok(())
}

pub async fn leases_in_one_call_are_limited(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let names: Vec<LeaseName> = vec![lease.clone(); LEASES_MAX + 1];
    let fences = vec![Fence { lease, epoch: Epoch(1) }; LEASES_MAX + 1];
    let ann = holder("ann");
    let answer = env.backend.renew(&ann, &fences, HOUR).await;
    assert_invalid("renew", answer, "leases", &LEASES_MAX);
    assert_invalid("release", env.backend.release(&ann, &fences).await, "leases", &LEASES_MAX);
    assert_invalid("leases", env.backend.leases(&names).await, "leases", &LEASES_MAX);
    Ok(())
}

pub async fn a_map_beyond_a_limit_is_not_written(env: StreamTestEnv) -> TestResult {
    let map = env.map("topic");
    let field = |name: &str, bytes: usize| (name.to_owned(), Bytes::from(vec![b'x'; bytes]));
    let before = RegistryMap::from([field("a", 1)]);
    env.second.map_create(&map, &before).await?;
    let many: RegistryMap = (0..=FIELDS_MAX).map(|n| field(&n.to_string(), 0)).collect();
    let long_name = "n".repeat(VALUE_BYTES_MAX + 1);
    let cases = [
        (RegistryMap::new(), "fields", "empty".to_owned()),
        (many, "fields", FIELDS_MAX.to_string()),
        (RegistryMap::from([field(&long_name, 0)]), "a field name", VALUE_BYTES_MAX.to_string()),
        (
            RegistryMap::from([field("a", VALUE_BYTES_MAX + 1)]),
            "a field",
            VALUE_BYTES_MAX.to_string(),
        ),
    ];
    let other = env.map("other");
    for (fields, what, limit) in cases {
        assert_invalid("map_create", env.backend.map_create(&other, &fields).await, what, &limit);
        let answer = env.backend.map_update(&map, None, &fields).await;
        assert_invalid("map_update", answer, what, &limit);
    }
    assert_eq!(env.second.map_get(&other).await?, None);
    assert_eq!(env.second.map_get(&map).await?, Some(before));
    Ok(())
}

pub async fn set_members_beyond_a_limit_are_not_added(env: StreamTestEnv) -> TestResult {
    let set = env.set("topics");
    let long = "m".repeat(VALUE_BYTES_MAX + 1);
    let many = vec!["m"; BATCH_MAX + 1];
    for (members, what, limit) in
        [(vec!["a", &long], "a member", VALUE_BYTES_MAX), (many, "members", BATCH_MAX)]
    {
        assert_invalid("add", env.backend.set_add(&set, &members, None).await, what, &limit);
        assert_invalid("remove", env.backend.set_remove(&set, &members).await, what, &limit);
        assert_invalid("contains", env.backend.set_contains(&set, &members).await, what, &limit);
    }
    for ttl in [Duration::ZERO, KEEP_MAX + Duration::from_millis(1)] {
        let answer = env.backend.set_add(&set, &["a"], Some(ttl)).await;
        assert_invalid("add", answer, "ttl", &format!("{KEEP_MAX:?}"));
    }
    assert_eq!(env.second.set_members(&set).await?, [""; 0]);
    Ok(())
}

pub async fn ids_beyond_a_limit_are_not_begun(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    let long = "i".repeat(NAME_BYTES_MAX + 1);
    let many = vec!["i"; BATCH_MAX + 1];
    let id = "a de-duplication id";
    for (ids, what, limit) in [
        (vec!["m1", ""], id, "empty".to_owned()),
        (vec!["m1", &long], id, NAME_BYTES_MAX.to_string()),
        (many, "ids", BATCH_MAX.to_string()),
    ] {
        assert_invalid("begin", env.backend.dedup_begin(&scope, &ids, HOUR).await, what, &limit);
        let done: Vec<(&str, Bytes)> = ids.iter().map(|id| (*id, Bytes::new())).collect();
        assert_invalid("finish", env.backend.dedup_finish(&scope, &done, HOUR).await, what, &limit);
        assert_invalid("abandon", env.backend.dedup_abandon(&scope, &ids).await, what, &limit);
    }
    let large = [("m1", Bytes::from(vec![0; VALUE_BYTES_MAX + 1]))];
    let answer = env.backend.dedup_finish(&scope, &large, HOUR).await;
    assert_invalid("finish", answer, "a de-duplication value", &VALUE_BYTES_MAX);
    for time in [Duration::ZERO, KEEP_MAX + Duration::from_millis(1)] {
        let limit = format!("{KEEP_MAX:?}");
        let what = "the time to live";
        let answer = env.backend.dedup_begin(&scope, &["m1"], time).await;
        assert_invalid("begin", answer, what, &limit);
        let answer = env.backend.dedup_finish(&scope, &[("m1", Bytes::new())], time).await;
        assert_invalid("finish", answer, what, &limit);
    }
    let found = env.second.dedup_begin(&scope, &["m1"], HOUR).await?;
    assert_eq!(found, [headwater_stream::DedupStatus::New], "no id was recorded");
    Ok(())
}
