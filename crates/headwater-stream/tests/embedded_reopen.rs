//! A backend that is closed or dropped and reopened has the same state, after any calls in any order, with
//! and without snapshots.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::{Clock, TestClock, Timestamp};
use headwater_stream::*;
use proptest::prelude::*;

/// `HEADWATER_CASES` sets the number of sequences.
fn cases() -> u32 {
    std::env::var("HEADWATER_CASES").map_or(60, |cases| cases.parse().unwrap())
}

/// Names are shared by all types, so that they conflict.
const NAMES: [&str; 4] = ["a", "b", "c", "{t}:d"];
const GROUPS: [&str; 2] = ["g", "h"];
const CONSUMERS: [&str; 3] = ["x", "y", "z"];

/// One call with small numbers for its arguments.
#[derive(Clone, Debug)]
struct Step {
    what: u8,
    name: usize,
    other: usize,
    number: u64,
    list: Vec<u64>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step =
        (0u8..32, 0..NAMES.len(), 0..NAMES.len(), 0u64..10, prop::collection::vec(0u64..12, 0..5));
    let step =
        step.prop_map(|(what, name, other, number, list)| Step { what, name, other, number, list });
    prop::collection::vec(step, 1..120)
}

#[derive(Clone, Copy, Debug)]
enum Restart {
    Close,
    Drop,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn a_reopened_backend_behaves_like_one_that_was_never_closed(
        lives in prop::collection::vec((steps(), prop_oneof![Just(Restart::Close), Just(Restart::Drop)]), 1..4),
        compact_bytes in prop_oneof![Just(1u64), Just(300), Just(5_000), Just(1_000_000)],
        sync in prop_oneof![Just("always"), Just("interval")],
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let url = format!(
                "embedded:{}?sync={sync}&compact_bytes={compact_bytes}",
                directory.path().display(),
            );
            let clock = TestClock::default();
            let options = Options { clock: Arc::new(clock.clone()), ..Options::default() };
            let steady = connect("embedded:memory", &options).await.unwrap();
            let mut durable = connect(&url, &options).await.unwrap();
            for (steps, restart) in lives {
                for step in steps {
                    let (expected, found) = (call(&*steady, &step, &clock).await, call(&*durable, &step, &clock).await);
                    prop_assert_eq!(expected, found, "{:?}", step);
                    if step.what == 0 {
                        clock.advance(Duration::from_millis(step.number * step.number * 7));
                    }
                }
                if let Restart::Close = restart {
                    durable.close().await.unwrap();
                }
                drop(durable);
                durable = connect(&url, &options).await.unwrap();
                prop_assert_eq!(dump(&*steady, &clock).await, dump(&*durable, &clock).await);
            }
            Ok(())
        })?;
    }
}

fn name<T>(make: impl Fn(&'static str) -> Result<T>, index: usize) -> T {
    make(NAMES[index]).unwrap()
}

fn fields(number: u64) -> Fields {
    Fields::new([("n", number.to_string()), ("", "x".repeat(number as usize * 9))])
}

fn answer(result: Result<impl Debug>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("error: {error}"),
    }
}

async fn call(backend: &dyn Backend, step: &Step, clock: &TestClock) -> String {
    let Step { what, name: index, other, number, list } = step;
    let (what, index, other, number) = (*what, *index, *other, *number);
    let stream = name(StreamName::new, index);
    let to = name(StreamName::new, other);
    let delays = name(DelayName::new, other);
    let lease = name(LeaseName::new, index);
    let group = GroupName::new(GROUPS[number as usize % GROUPS.len()]).unwrap();
    let consumer = ConsumerName::new(CONSUMERS[number as usize % CONSUMERS.len()]).unwrap();
    let holder = HolderName::new(CONSUMERS[number as usize % CONSUMERS.len()]).unwrap();
    let ids = ids_of(backend, &stream, list).await;
    let texts: Vec<String> = list.iter().map(u64::to_string).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let short = Duration::from_millis(50 + number * 20);
    match what {
        0..=4 => {
            let retention = match number {
                0 => Retention::max_len(3),
                1 => Retention { max_age: Some(short), ..Retention::KEEP_ALL },
                2 => Retention { max_bytes: Some(900), ..Retention::KEEP_ALL },
                _ => Retention::KEEP_ALL,
            };
            let entries: Vec<Fields> = list.iter().map(|number| fields(*number)).collect();
            answer(backend.append(&stream, &entries, &retention).await)
        }
        5 => {
            let start = match number % 3 {
                0 => GroupStart::Beginning,
                1 => GroupStart::End,
                _ => GroupStart::After(EntryId::new(clock.now().as_millis() + number, 0)),
            };
            answer(backend.ensure_group(&stream, &group, start).await)
        }
        6 if number == 0 => answer(backend.remove_group(&stream, &group).await),
        6..=10 => {
            let mut reader = backend.reader(&group, &consumer).await.unwrap();
            let streams = [stream, to];
            answer(
                reader
                    .read(&streams[..1 + number as usize % 2], list.len() + 1, Duration::ZERO)
                    .await,
            )
        }
        11..=15 => {
            let then = |number: u64| match number % 7 {
                0 | 1 => SettleAction::Ack,
                2 => SettleAction::Delete,
                3 => SettleAction::Append { to: to.clone(), fields: fields(number) },
                4 | 5 => SettleAction::Reschedule {
                    delays: delays.clone(),
                    to: to.clone(),
                    due: DueTime::After(short),
                    fields: fields(number),
                },
                _ => SettleAction::Release,
            };
            let entries: Vec<Settlement> = ids
                .iter()
                .zip(list)
                .map(|(id, number)| Settlement { id: *id, action: then(*number) })
                .collect();
            let fence = Fence { lease, epoch: Epoch(clock.now().as_millis()) };
            let fence = (number == 9).then_some(&fence);
            let settle = SettleBatch {
                stream: &stream,
                group: &group,
                consumer: &consumer,
                fence,
                entries: &entries,
            };
            answer(backend.settle(settle).await)
        }
        16 => answer(backend.keep_alive(&stream, &group, &consumer, &ids).await),
        17 | 18 => {
            let from = match list.len() {
                0 => ReclaimFrom::Anyone,
                1 => ReclaimFrom::Others,
                2 => ReclaimFrom::Consumer(&consumer),
                _ => ReclaimFrom::Ids(&ids),
            };
            let reclaim = ReclaimRequest {
                stream: &stream,
                group: &group,
                consumer: &consumer,
                fence: None,
                from,
                min_idle: Duration::from_millis(number * 10),
                after: ids.first().copied(),
                count: 1 + number as usize,
            };
            answer(backend.reclaim(reclaim).await)
        }
        19 => {
            let guard = if number < 5 { TrimGuard::Safe } else { TrimGuard::Force };
            answer(backend.trim(&stream, &Retention::max_len(number), guard).await)
        }
        20 => answer(backend.delete_entries(&stream, &ids).await),
        21 if number == 0 => answer(backend.delete_stream(&stream).await),
        21 => answer(backend.remove_idle_consumers(&stream, &group, Duration::ZERO).await),
        22 => {
            let item = |number: &u64| ScheduleRequest {
                to: to.clone(),
                due: DueTime::At(Timestamp::from_millis(clock.now().as_millis() + number * 10)),
                fields: fields(*number),
            };
            let items: Vec<ScheduleRequest> = list.iter().map(item).collect();
            answer(backend.schedule(&delays, &items).await)
        }
        23 => answer(backend.promote_due(&delays, 1 + number as usize).await),
        24 if number == 0 => answer(backend.delete_delay_set(&delays).await),
        24 => answer(backend.cancel(&delays, DelayId(number)).await),
        25 => answer(backend.acquire(&lease, &holder, short).await),
        26 => {
            let held = backend.leases(std::slice::from_ref(&lease)).await;
            let epoch =
                held.ok().and_then(|held| held[0].clone()).map_or(Epoch(1), |held| held.epoch);
            let fences = [Fence { lease, epoch }];
            match number % 2 {
                0 => answer(backend.renew(&holder, &fences, short).await),
                _ => answer(backend.release(&holder, &fences).await),
            }
        }
        27 => {
            let set = name(SetName::new, index);
            match number {
                0..=6 => answer(backend.set_add(&set, &texts, (number < 3).then_some(short)).await),
                _ => answer(backend.set_remove(&set, &texts).await),
            }
        }
        28 => {
            let map = name(MapName::new, index);
            let fields: RegistryMap = texts
                .iter()
                .map(|text| (text.to_string(), Bytes::from(number.to_string())))
                .collect();
            match number {
                0..=2 => answer(backend.map_create(&map, &fields).await),
                3 => answer(backend.map_delete(&map).await),
                4 => answer(backend.map_update(&map, Some(("1", b"5")), &fields).await),
                _ => answer(backend.map_update(&map, None, &fields).await),
            }
        }
        29 | 30 => {
            let retention = if number == 0 { Retention::max_len(3) } else { Retention::KEEP_ALL };
            let once =
                |number: &u64| IdempotentEntry { id: number.to_string(), fields: fields(*number) };
            let entries: Vec<IdempotentEntry> = list.iter().map(once).collect();
            answer(backend.append_once(&stream, &entries, short * 3, &retention).await)
        }
        _ => {
            let scope = name(DedupScope::new, index);
            let done: Vec<(&str, Bytes)> =
                texts.iter().map(|text| (*text, Bytes::from("v"))).collect();
            match number {
                0..=4 => answer(backend.dedup_begin(&scope, &texts, short).await),
                5..=7 => answer(backend.dedup_finish(&scope, &done, short * 3).await),
                _ => answer(backend.dedup_abandon(&scope, &texts).await),
            }
        }
    }
}

/// Ids of entries in the stream, and some that are not.
async fn ids_of(backend: &dyn Backend, stream: &StreamName, list: &[u64]) -> Vec<EntryId> {
    let found = backend.range(stream, Range::first(100)).await.unwrap_or_default();
    let id = |number: &u64| match found.get(*number as usize) {
        Some(entry) => entry.id,
        None => EntryId::new(*number, 0),
    };
    list.iter().map(id).collect()
}

/// The complete state as text. Idle times of consumers are not persisted.
async fn dump(backend: &dyn Backend, clock: &TestClock) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for (index, text) in NAMES.iter().enumerate() {
        let stream = name(StreamName::new, index);
        let delays = name(DelayName::new, index);
        let mut stats = backend.stats(&stream).await;
        for group in stats.iter_mut().flatten().flat_map(|stats| &mut stats.groups) {
            group.consumers.iter_mut().for_each(|consumer| consumer.idle = Duration::ZERO);
        }
        let mut put = |what: &str, answer: String| all.insert(format!("{text} {what}"), answer);
        put("stats", answer(stats));
        put("range", answer(backend.range(&stream, Range::first(10_000)).await));
        let known: Vec<String> = (0..12).map(|number| number.to_string()).collect();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        put("appended", answer(backend.appended(&stream, &known).await));
        put("delayed", answer(backend.delayed(&delays, 0, 10_000).await));
        put("delay stats", answer(backend.delay_stats(&delays).await));
        put("lease", answer(backend.leases(&[name(LeaseName::new, index)]).await));
        put("set", answer(backend.set_members(&name(SetName::new, index)).await));
        put("map", answer(backend.map_get(&name(MapName::new, index)).await));
        for group in GROUPS {
            let query = PendingDeliveryQuery {
                stream: &stream,
                group: &GroupName::new(group).unwrap(),
                consumer: None,
                min_idle: Duration::ZERO,
                after: None,
                count: 10_000,
            };
            put(&format!("pending {group}"), answer(backend.pending(query).await));
        }
    }
    all.insert("now".to_owned(), clock.now().to_string());
    all
}
