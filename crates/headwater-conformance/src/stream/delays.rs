//! Delays: scheduled entries move to their stream once, when they are due.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::limits::BATCH_MAX;
use headwater_stream::{
    DelayId, DelayStats, DueTime, Fields, PromotedEntry, ScheduleRequest, StreamError, StreamName,
};
use tokio::time::Instant;

use super::env::StreamTestEnv;
use super::steps::{
    ALL, HOUR, LONG, TICK, contents, fields_in, ms, numbered, numbers, sleep_ms, soon,
};
use crate::failure::TestResult;

const PAST: DueTime = DueTime::At(Timestamp::from_millis(1));

fn item(to: &StreamName, due: DueTime, number: usize) -> ScheduleRequest {
    ScheduleRequest { to: to.clone(), due, fields: numbered(number) }
}

pub async fn delay_ids_are_ascending(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let mut all: Vec<DelayId> = Vec::new();
    for count in [3, 1, 10] {
        let items: Vec<ScheduleRequest> =
            (0..count).map(|n| item(&to, DueTime::After(HOUR), n)).collect();
        let ids = env.backend.schedule(&delays, &items).await?;
        assert_eq!(ids.len(), count, "one id for each entry");
        all.extend(ids);
    }
    assert!(all.is_sorted_by(|a, b| a < b), "expected ascending ids, found {all:?}");
    Ok(())
}

pub async fn scheduling_nothing_does_nothing(env: StreamTestEnv) -> TestResult {
    let delays = env.delays("later");
    assert_eq!(env.backend.schedule(&delays, &[]).await?, []);
    assert_eq!(env.second.delay_stats(&delays).await?, DelayStats::default());
    assert!(!env.second.delete_delay_set(&delays).await?, "no set was created");
    Ok(())
}

pub async fn an_entry_is_not_promoted_before_it_is_due(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let due = DueTime::After(ms(150));
    env.second.schedule(&delays, &[item(&to, due, 1)]).await?;
    let due_at = env.second.delayed(&delays, 0, 1).await?[0].due_at;

    let taking = async {
        loop {
            env.backend.promote_due(&delays, 10).await?;
            if let Some(entry) = contents(&*env.second, &to).await?.first() {
                return TestResult::Ok(entry.id);
            }
            sleep_ms(5).await;
        }
    };
    let id = soon("the entry to be due", taking).await?;

    assert!(id.ms >= due_at.as_millis(), "expected it not before {due_at}, found it at {id}");
    assert_eq!(env.second.delay_stats(&delays).await?, DelayStats::default());
    Ok(())
}

pub async fn a_delay_starts_now_by_the_backend_clock(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let before = env.second.now().await?;
    env.backend.schedule(&delays, &[item(&to, DueTime::After(HOUR), 1)]).await?;
    let after = env.second.now().await?;

    let due_at = env.second.delayed(&delays, 0, 1).await?[0].due_at;

    let expected = before.after(HOUR)..=after.after(HOUR);
    assert!(expected.contains(&due_at), "expected {expected:?}, found {due_at}");
    Ok(())
}

pub async fn due_entries_are_promoted_earliest_first(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let at = |ms: u64| DueTime::At(Timestamp::from_millis(ms));
    let items = [
        item(&to, at(3_000), 3),
        item(&to, at(1_000), 1),
        item(&to, DueTime::After(HOUR), 9),
        item(&to, at(4_000), 4),
        item(&to, at(2_000), 2),
        item(&to, at(0), 0),
    ];
    env.second.schedule(&delays, &items).await?;

    let mut promoted = 0;
    while promoted < 5 {
        env.backend.promote_due(&delays, 2).await?;
        promoted = contents(&*env.second, &to).await?.len();
    }

    assert_eq!(fields_in(&*env.second, &to).await?, numbers(5));
    assert_eq!(env.second.delay_stats(&delays).await?.waiting, 1, "the last one is not due");
    Ok(())
}

pub async fn entries_with_equal_due_times_keep_their_scheduling_order(
    env: StreamTestEnv,
) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    // More than nine, to detect an order by text.
    for first in [0, 60] {
        let items: Vec<ScheduleRequest> = (first..first + 60).map(|n| item(&to, PAST, n)).collect();
        env.second.schedule(&delays, &items).await?;
    }

    env.backend.promote_due(&delays, ALL).await?;

    assert_eq!(fields_in(&*env.second, &to).await?, numbers(120));
    Ok(())
}

pub async fn at_most_count_entries_are_promoted(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let items: Vec<ScheduleRequest> = (0..10).map(|n| item(&to, PAST, n)).collect();
    let ids = env.second.schedule(&delays, &items).await?;

    let returned = env.backend.promote_due(&delays, 4).await?;

    let found = contents(&*env.second, &to).await?;
    let expected: Vec<PromotedEntry> = (ids.iter().zip(&found))
        .map(|(delay, entry)| PromotedEntry { delay: *delay, stream: to.clone(), id: entry.id })
        .collect();
    assert_eq!(returned, expected, "each is returned with its old and its new id");
    assert_eq!(returned.len(), 4);
    assert_eq!(env.backend.promote_due(&delays, ALL).await?.len(), 6);
    assert_eq!(env.backend.promote_due(&delays, ALL).await?, []);
    Ok(())
}

pub async fn a_due_time_in_the_past_is_due_at_once(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    for due in [PAST, DueTime::After(Duration::ZERO), DueTime::At(Timestamp::from_millis(0))] {
        env.second.schedule(&delays, &[item(&to, due, 1)]).await?;
        assert!(env.backend.wait_until_due(&delays, Duration::ZERO).await?, "{due:?}");
        env.backend.promote_due(&delays, 10).await?;
        assert_eq!(env.second.delay_stats(&delays).await?.waiting, 0, "{due:?}");
    }
    assert_eq!(contents(&*env.second, &to).await?.len(), 3);
    Ok(())
}

pub async fn entries_are_promoted_to_their_target_streams(env: StreamTestEnv) -> TestResult {
    let delays = env.delays("later");
    let streams: Vec<StreamName> = (0..5).map(|n| env.stream(&n.to_string())).collect();
    let items: Vec<ScheduleRequest> = (0..20).map(|n| item(&streams[n % 5], PAST, n)).collect();
    env.second.schedule(&delays, &items).await?;

    env.backend.promote_due(&delays, ALL).await?;

    for (first, stream) in streams.iter().enumerate() {
        let expected: Vec<Fields> = (first..20).step_by(5).map(numbered).collect();
        assert_eq!(fields_in(&*env.second, stream).await?, expected, "{stream}");
    }
    Ok(())
}

pub async fn delayed_entries_are_preserved_byte_for_byte(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let bytes: Bytes = (0..=u8::MAX).collect();
    let large: Vec<u8> =
        (0..headwater_stream::limits::PAYLOAD_BYTES_MAX).map(|at| ((at * 13) >> 5) as u8).collect();
    let awkward = [
        Fields::new([(bytes.clone(), Bytes::new()), (Bytes::new(), bytes)]),
        Fields::new([("a", "1"), ("a", "2"), ("", "")]),
        Fields::new([(Bytes::from_static(b"large"), Bytes::from(large))]),
    ];
    let items = awkward.clone().map(|fields| ScheduleRequest { to: to.clone(), due: PAST, fields });
    env.backend.schedule(&delays, &items).await?;

    let waiting: Vec<Fields> =
        env.backend.delayed(&delays, 0, 3).await?.into_iter().map(|item| item.fields).collect();
    assert!(waiting == awkward, "expected the same bytes while they wait");
    env.second.promote_due(&delays, 10).await?;
    let found = fields_in(&*env.second, &to).await?;
    assert!(found[..3] == awkward, "expected the same bytes in the stream");
    Ok(())
}

pub async fn a_cancelled_entry_is_never_promoted(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let items = [item(&to, PAST, 0), item(&to, PAST, 1), item(&to, DueTime::After(HOUR), 2)];
    let ids = env.second.schedule(&delays, &items).await?;

    for id in [ids[1], ids[2]] {
        let cancelled = env.backend.cancel(&delays, id).await?;
        assert!(cancelled || env.is_faulty(), "it was still scheduled");
        assert!(!env.backend.cancel(&delays, id).await?, "now it is cancelled");
    }
    assert!(!env.backend.cancel(&delays, DelayId(u64::MAX)).await?, "it never existed");

    env.second.promote_due(&delays, 10).await?;
    assert_eq!(fields_in(&*env.second, &to).await?, numbers(1));
    assert_eq!(env.second.delay_stats(&delays).await?, DelayStats::default());
    assert!(!env.backend.cancel(&delays, ids[0]).await?, "it was promoted");
    Ok(())
}

pub async fn eight_concurrent_callers_promote_each_entry_once(env: StreamTestEnv) -> TestResult {
    const COUNT: usize = 200;
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let items: Vec<ScheduleRequest> = (0..COUNT).map(|n| item(&to, PAST, n)).collect();
    env.second.schedule(&delays, &items).await?;

    let takers = (0..8).map(|taker| {
        let backend = if taker % 2 == 0 { &env.backend } else { &env.second };
        let (backend, delays) = (Arc::clone(backend), delays.clone());
        tokio::spawn(async move {
            let mut all = Vec::new();
            loop {
                let returned = backend.promote_due(&delays, 7).await?;
                if returned.is_empty() {
                    return TestResult::Ok(all);
                }
                all.extend(returned);
            }
        })
    });
    let mut reported = HashSet::new();
    for taker in takers.collect::<Vec<_>>() {
        for PromotedEntry { delay, .. } in taker.await?? {
            assert!(reported.insert(delay), "expected {delay} to be returned once");
        }
    }

    assert!(
        reported.len() == COUNT || env.is_faulty(),
        "expected {COUNT}, found {}",
        reported.len()
    );
    let mut found: Vec<String> =
        fields_in(&*env.second, &to).await?.iter().map(|fields| format!("{fields:?}")).collect();
    let mut expected: Vec<String> =
        numbers(COUNT).iter().map(|fields| format!("{fields:?}")).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "each entry is in the stream once");
    Ok(())
}

pub async fn waiting_for_a_due_entry_returns_when_it_is_due(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    env.second.schedule(&delays, &[item(&to, DueTime::After(ms(150)), 1)]).await?;
    let due_at = env.second.delayed(&delays, 0, 1).await?[0].due_at;

    let started = Instant::now();
    assert!(env.backend.wait_until_due(&delays, LONG).await?, "one is due");

    assert!(env.second.now().await? >= due_at, "expected to wait until {due_at}");
    assert!(started.elapsed() < LONG, "expected to wake early, found {:?}", started.elapsed());
    Ok(())
}

pub async fn waiting_returns_early_when_an_earlier_entry_is_scheduled(
    env: StreamTestEnv,
) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    for first in [None, Some(item(&to, DueTime::After(HOUR), 1))] {
        if let Some(first) = first {
            env.second.schedule(&delays, &[first]).await?;
        }
        let (second, set, sooner) =
            (Arc::clone(&env.second), delays.clone(), item(&to, DueTime::After(ms(50)), 2));
        let writer = tokio::spawn(async move {
            sleep_ms(100).await;
            second.schedule(&set, &[sooner]).await
        });

        let started = Instant::now();
        assert!(env.backend.wait_until_due(&delays, LONG).await?, "one is due");
        assert!(started.elapsed() < LONG, "expected to wake early, found {:?}", started.elapsed());
        writer.await??;
        env.second.promote_due(&delays, 10).await?;
    }
    Ok(())
}

pub async fn waiting_returns_early_when_a_settle_reschedules_an_entry(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let delays = env.delays("later");
    let then = headwater_stream::SettleAction::Reschedule {
        delays: delays.clone(),
        to: flow.stream.clone(),
        due: DueTime::After(ms(50)),
        fields: numbered(1),
    };
    let (backend, set) = (Arc::clone(&env.backend), delays.clone());
    let waiter = tokio::spawn(async move {
        let started = Instant::now();
        TestResult::Ok((backend.wait_until_due(&set, LONG).await?, started.elapsed()))
    });
    sleep_ms(80).await;
    flow.settle_one("ann", ids[0], then).await?;

    let (due, waited) = waiter.await??;
    assert!(due && waited < LONG, "expected to wake early, found {due} after {waited:?}");
    Ok(())
}

pub async fn waiting_returns_after_its_timeout_if_nothing_is_due(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    for round in 0..2 {
        let started = Instant::now();
        assert!(!env.backend.wait_until_due(&delays, ms(120)).await?, "nothing is due");
        let waited = started.elapsed();
        assert!(waited + TICK >= ms(120), "expected 120 ms, found {waited:?} in round {round}");
        // The first round waits on a missing set, the second on one whose entry is due much later.
        env.second.schedule(&delays, &[item(&to, DueTime::After(HOUR), 1)]).await?;
    }
    let at_once = env.backend.wait_until_due(&delays, Duration::ZERO);
    assert!(!soon("a wait of no time to end", at_once).await?);
    Ok(())
}

pub async fn delay_stats_are_up_to_date(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    assert_eq!(env.backend.delay_stats(&delays).await?, DelayStats::default());
    let at = |ms| Timestamp::from_millis(ms);
    let far = at(4_000_000_000_000);
    let ids = env
        .second
        .schedule(&delays, &[item(&to, DueTime::At(far), 1), item(&to, DueTime::At(at(5_000)), 2)])
        .await?;

    let stats = |waiting, next_due| DelayStats { waiting, next_due };
    assert_eq!(env.backend.delay_stats(&delays).await?, stats(2, Some(at(5_000))));
    env.second.promote_due(&delays, 10).await?;
    assert_eq!(env.backend.delay_stats(&delays).await?, stats(1, Some(far)));
    env.second.cancel(&delays, ids[0]).await?;
    assert_eq!(env.backend.delay_stats(&delays).await?, stats(0, None));
    Ok(())
}

pub async fn delayed_entries_are_listed_earliest_first(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let at = |n: usize| DueTime::At(Timestamp::from_millis(4_000_000_000_000 + n as u64));
    let items: Vec<ScheduleRequest> = [3, 1, 4, 0, 2].map(|n| item(&to, at(n), n)).into();
    let ids = env.second.schedule(&delays, &items).await?;

    let all = env.backend.delayed(&delays, 0, ALL).await?;

    let fields: Vec<Fields> = all.iter().map(|delayed| delayed.fields.clone()).collect();
    assert_eq!(fields, numbers(5));
    let found: Vec<DelayId> = all.iter().map(|delayed| delayed.id).collect();
    assert_eq!(found, [ids[3], ids[1], ids[4], ids[0], ids[2]]);
    assert!(all.iter().all(|delayed| delayed.to == to), "{all:?}");
    assert_eq!(all[4].due_at, Timestamp::from_millis(4_000_000_000_004));
    assert_eq!(env.backend.delayed(&delays, 1, 2).await?, all[1..3], "by offset and count");
    assert_eq!(env.backend.delayed(&delays, 5, 2).await?, [], "beyond the end");
    Ok(())
}

pub async fn deleting_a_delay_set_removes_its_entries(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let ids = env.second.schedule(&delays, &[item(&to, PAST, 0), item(&to, PAST, 1)]).await?;

    let deleted = env.backend.delete_delay_set(&delays).await?;

    assert!(deleted || env.is_faulty(), "the set existed");
    assert!(!env.backend.delete_delay_set(&delays).await?, "now it does not exist");
    assert_eq!(env.second.delay_stats(&delays).await?, DelayStats::default());
    assert_eq!(env.second.promote_due(&delays, 10).await?, []);
    assert!(!env.second.cancel(&delays, ids[0]).await?);
    Ok(())
}

pub async fn delay_sets_are_independent(env: StreamTestEnv) -> TestResult {
    let to = env.stream("orders");
    let [a, b] = [env.delays("a"), env.delays("b")];
    let in_a = env.second.schedule(&a, &[item(&to, PAST, 1)]).await?;
    env.second.schedule(&b, &[item(&to, PAST, 2)]).await?;

    env.backend.delete_delay_set(&b).await?;

    assert_eq!(env.backend.delayed(&a, 0, 10).await?.len(), 1);
    assert!(env.second.cancel(&a, in_a[0]).await?);
    Ok(())
}

pub async fn an_entry_whose_stream_rejects_it_stays_scheduled(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    env.second.set_add(&env.set("foreign"), &["x"], None).await?;
    let foreign = StreamName::new(env.set("foreign").as_str())?;
    let at = |ms| DueTime::At(Timestamp::from_millis(ms));
    let items = [item(&to, at(1), 0), item(&foreign, at(2), 7), item(&to, at(3), 1)];
    env.second.schedule(&delays, &items).await?;

    // Whether the call reports the error or not, the other entries are promoted and this one stays.
    for _ in 0..3 {
        match env.backend.promote_due(&delays, 10).await {
            Ok(_) | Err(StreamError::WrongType { .. }) => {}
            Err(other) => return Err(other.into()),
        }
    }

    assert_eq!(fields_in(&*env.second, &to).await?, numbers(2));
    let left = env.second.delayed(&delays, 0, 10).await?;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].to, foreign);
    assert_eq!(env.second.set_members(&env.set("foreign")).await?, ["x"]);
    Ok(())
}

pub async fn an_entry_for_another_slot_is_rejected_at_once_or_promoted(
    env: StreamTestEnv,
) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream_elsewhere("orders"));
    match env.backend.schedule(&delays, &[item(&to, PAST, 0)]).await {
        Err(StreamError::Invalid { .. }) => {
            assert_eq!(env.second.delay_stats(&delays).await?.waiting, 0);
        }
        answer => {
            answer?;
            env.second.promote_due(&delays, 10).await?;
            assert_eq!(fields_in(&*env.second, &to).await?[..1], numbers(1));
        }
    }
    Ok(())
}

pub async fn the_maximum_number_of_entries_is_scheduled_in_one_call(
    env: StreamTestEnv,
) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let items: Vec<ScheduleRequest> = (0..BATCH_MAX).map(|n| item(&to, PAST, n)).collect();
    env.backend.schedule(&delays, &items).await?;
    let mut promoted = 0;
    while promoted < BATCH_MAX {
        let returned = env.backend.promote_due(&delays, ALL).await?.len();
        assert!(returned > 0, "expected {BATCH_MAX} entries, found {promoted}");
        promoted += returned;
    }
    assert_eq!(fields_in(&*env.second, &to).await?, numbers(BATCH_MAX));
    Ok(())
}
