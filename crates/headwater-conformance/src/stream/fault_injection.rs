//! Fault injection: guarantees that hold although replies are lost and connections are cut.
//!
//! The cases run everywhere; on a faulty network they continue until enough faults have occurred.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use headwater_stream::{
    AcquireResult, DueTime, EntryId, Fence, ReclaimFrom, ReclaimRequest, Result, Retention,
    ScheduleRequest, SettleAction, Settlement, StreamError,
};

use super::env::{StreamTestEnv, consumer, holder};
use super::steps::{ALL, HOUR, contents, done, fields_in, ids_of, ms, numbered, numbers, sleep_ms};
use crate::failure::TestResult;

/// Rounds without faults.
const ROUNDS: u64 = 20;
/// Faults that a case must survive on a faulty network, and how many rounds it waits for them.
const FAULTS: u64 = 5;
const ROUNDS_MAX: u64 = 2_000;

/// Whether to continue: until there were enough rounds, and enough faults if the network is faulty.
fn go_on(env: &StreamTestEnv, round: u64) -> bool {
    match env.faults() {
        None => round < ROUNDS,
        Some(faults) => {
            assert!(round < ROUNDS_MAX, "expected {FAULTS} faults, found {faults}");
            round < ROUNDS || faults < FAULTS
        }
    }
}

/// The result, or `None` if the effect of the call is unknown.
fn known<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(StreamError::Unavailable { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Retries a call until it returns a result, up to a time limit.
async fn repeat<T, F: Future<Output = Result<T>>>(call: impl Fn() -> F) -> Result<T> {
    for _ in 0..200 {
        if let Some(value) = known(call().await)? {
            return Ok(value);
        }
        sleep_ms(10).await;
    }
    call().await
}

pub async fn every_append_that_returned_is_stored(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let mut returned = BTreeMap::new();
    let mut round = 0;
    while go_on(&env, round) {
        let number = round as usize * 3;
        let entries = [numbered(number), numbered(number + 1), numbered(number + 2)];
        if let Some(ids) = known(env.raw.append(&stream, &entries, &Retention::KEEP_ALL).await)? {
            assert_eq!(ids.len(), 3);
            let newest = returned.keys().next_back();
            assert!(newest < Some(&ids[0]), "expected ids after {newest:?}, found {ids:?}");
            returned.extend(ids.into_iter().zip(entries));
        }
        round += 1;
    }

    let found: HashMap<_, _> =
        contents(&*env.second, &stream).await?.into_iter().map(|e| (e.id, e.fields)).collect();
    for (id, fields) in returned {
        assert_eq!(found.get(&id), Some(&fields), "the entry {id}");
    }
    Ok(())
}

pub async fn a_failed_append_stored_a_prefix_of_its_batch_or_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let mut round = 0;
    while go_on(&env, round) {
        let stream = env.stream(&round.to_string());
        let answer = known(env.raw.append(&stream, &numbers(50), &Retention::KEEP_ALL).await)?;
        if answer.is_none() {
            sleep_ms(50).await;
            let found = fields_in(&*env.second, &stream).await?;
            assert!(found.len() <= 50, "expected at most the batch, found {}", found.len());
            assert_eq!(found, numbers(found.len()), "a beginning, in order");
        }
        round += 1;
    }
    Ok(())
}

pub async fn a_retried_settle_writes_its_follow_up_once(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let dead = env.stream("dead");
    let mut round = 0;
    while go_on(&env, round) {
        flow.append(2).await?;
        let ids = ids_of(&flow.deliver("ann", ALL).await?);
        let ann = consumer("ann");
        let then = [
            SettleAction::Append { to: dead.clone(), fields: numbered(round as usize) },
            SettleAction::Reschedule {
                delays: env.delays("later"),
                to: flow.stream.clone(),
                due: DueTime::After(HOUR),
                fields: numbered(round as usize),
            },
        ];
        let entries: Vec<Settlement> =
            ids.iter().zip(then).map(|(id, then)| Settlement { id: *id, action: then }).collect();
        let settle = headwater_stream::SettleBatch {
            stream: &flow.stream,
            group: &flow.group,
            consumer: &ann,
            fence: None,
            entries: &entries,
        };
        repeat(|| env.raw.settle(settle)).await?;
        round += 1;
    }

    let expected = numbers(round as usize);
    assert_eq!(fields_in(&*env.second, &dead).await?, expected, "one dead letter each, in order");
    let waiting = env.second.delayed(&env.delays("later"), 0, ALL).await?;
    let mut waiting: Vec<String> =
        waiting.iter().map(|delayed| format!("{:?}", delayed.fields)).collect();
    let mut expected: Vec<String> = expected.iter().map(|fields| format!("{fields:?}")).collect();
    waiting.sort();
    expected.sort();
    assert_eq!(waiting, expected, "one scheduled entry each");
    assert_eq!(flow.pending_ids().await?, []);
    Ok(())
}

pub async fn a_failed_settle_was_applied_completely_or_not_at_all(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let mut round = 0;
    while go_on(&env, round) {
        let dead = env.stream(&format!("dead{round}"));
        flow.append(20).await?;
        let ids = ids_of(&flow.deliver("ann", ALL).await?);
        let entries: Vec<Settlement> = (ids.iter().enumerate())
            .map(|(n, id)| Settlement {
                id: *id,
                action: SettleAction::Append { to: dead.clone(), fields: numbered(n) },
            })
            .collect();
        let settle = headwater_stream::SettleBatch {
            stream: &flow.stream,
            group: &flow.group,
            consumer: &consumer("ann"),
            fence: None,
            entries: &entries,
        };
        if known(env.raw.settle(settle).await)?.is_none() {
            sleep_ms(50).await;
        }
        let pending = flow.pending_ids().await?;
        let written = fields_in(&*env.second, &dead).await?;
        if pending.is_empty() {
            assert_eq!(written, numbers(20), "acknowledged, so every follow-up exists");
        } else {
            assert_eq!((pending, written), (ids.clone(), vec![]), "nothing happened");
            env.second.settle(settle).await?;
        }
        round += 1;
    }
    Ok(())
}

pub async fn entries_delivered_to_a_failed_read_are_pending_for_its_consumer(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let ann = consumer("ann");
    let mut reader = repeat(|| env.raw.reader(&flow.group, &ann)).await?;
    let mut appended = Vec::new();
    let mut seen = Vec::new();
    let mut round = 0;
    while go_on(&env, round) {
        appended.extend(flow.append(3).await?);
        let read = reader.read(std::slice::from_ref(&flow.stream), ALL, ms(20)).await;
        for batch in known(read)?.into_iter().flatten() {
            seen.extend(ids_of(&batch.entries));
        }
        round += 1;
    }
    sleep_ms(50).await;
    // Close may fail; entries it fetched are then pending, too.
    for batch in known(reader.close().await)?.into_iter().flatten() {
        seen.extend(ids_of(&batch.entries));
    }

    let pending: Vec<EntryId> = flow.pending_ids().await?;
    let owned: HashSet<EntryId> = seen.iter().copied().collect();
    assert_eq!(owned.len(), seen.len(), "nothing was returned twice");
    assert!(owned.is_subset(&pending.iter().copied().collect()), "what was returned is pending");

    // Entries never returned are listed as pending; undelivered ones come with the next read.
    let lost: Vec<EntryId> = pending.iter().copied().filter(|id| !owned.contains(id)).collect();
    let from = ReclaimFrom::Ids(&lost);
    let found = env.second.reclaim(ReclaimRequest { from, ..flow.reclaim_any(&ann) }).await?;
    seen.extend(ids_of(&found.entries));
    seen.extend(ids_of(&flow.deliver("bob", ALL).await?));
    seen.sort();
    assert_eq!(seen, appended, "nothing is lost");
    Ok(())
}

pub async fn a_reader_recovers_from_every_disconnect(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ann = consumer("ann");
    let mut reader = repeat(|| env.raw.reader(&flow.group, &ann)).await?;
    let mut round = 0;
    while go_on(&env, round) {
        flow.append(1).await?;
        // However many reads fail, a later one returns the entry, or it is pending for ann.
        let started = tokio::time::Instant::now();
        loop {
            let read = reader.read(std::slice::from_ref(&flow.stream), ALL, ms(50)).await;
            if known(read)?.is_some_and(|batches| !batches.is_empty()) {
                break;
            }
            let stats = flow.group_stats().await?;
            if stats.pending > round {
                break;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "round {round}: {stats:?}");
        }
        round += 1;
    }
    assert_eq!(flow.pending_ids().await?.len() as u64, round);
    Ok(())
}

pub async fn a_retrying_reader_sees_every_entry_once_and_in_order(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let mut reader = env.backend.reader(&flow.group, &consumer("ann")).await?;
    let (mut appended, mut seen) = (Vec::new(), Vec::new());
    let mut round = 0;
    while go_on(&env, round) {
        appended.extend(flow.append(2).await?);
        for batch in reader.read(std::slice::from_ref(&flow.stream), ALL, ms(20)).await? {
            seen.extend(ids_of(&batch.entries));
        }
        round += 1;
    }
    while seen.len() < appended.len() {
        let rest = reader.read(std::slice::from_ref(&flow.stream), ALL, ms(2_000)).await?;
        assert!(!rest.is_empty(), "expected {} entries, found {}", appended.len(), seen.len());
        seen.extend(rest.iter().flat_map(|batch| ids_of(&batch.entries)));
    }
    assert_eq!(seen, appended);
    Ok(())
}

pub async fn a_lease_acquired_twice_after_a_lost_reply_is_one_lease(
    env: StreamTestEnv,
) -> TestResult {
    let mut round = 0;
    while go_on(&env, round) {
        let lease = env.lease(&round.to_string());
        let ann = holder("ann");
        let answer = repeat(|| env.raw.acquire(&lease, &ann, HOUR)).await?;
        let AcquireResult::Won(epoch) = answer else {
            panic!("expected a free lease, found {answer:?}")
        };
        let again = repeat(|| env.raw.acquire(&lease, &ann, HOUR)).await?;
        assert_eq!(again, AcquireResult::Won(epoch), "the epoch stays");
        let bob = env.second.acquire(&lease, &holder("bob"), HOUR).await?;
        assert!(matches!(bob, AcquireResult::Held { .. }), "found {bob:?}");
        round += 1;
    }
    Ok(())
}

pub async fn a_fenced_settle_stays_fenced_on_every_retry(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let lease = env.lease("orders");
    let AcquireResult::Won(epoch) = env.second.acquire(&lease, &holder("ann"), ms(60)).await?
    else {
        panic!("expected a free lease");
    };
    sleep_ms(120).await;
    env.second.acquire(&lease, &holder("bob"), HOUR).await?;
    let fence = Fence { lease, epoch };
    let (ann, entries) = (consumer("ann"), done(&ids));

    let mut round = 0;
    while go_on(&env, round) {
        let settle = headwater_stream::SettleBatch {
            stream: &flow.stream,
            group: &flow.group,
            consumer: &ann,
            fence: Some(&fence),
            entries: &entries,
        };
        match env.raw.settle(settle).await {
            Err(StreamError::Fenced { .. } | StreamError::Unavailable { .. }) => {}
            other => panic!("expected Fenced, found {other:?}"),
        }
        round += 1;
    }

    assert_eq!(flow.pending_ids().await?, ids);
    Ok(())
}

pub async fn an_entry_promoted_without_a_reply_is_promoted_once(env: StreamTestEnv) -> TestResult {
    let (delays, to) = (env.delays("later"), env.stream("orders"));
    let mut round = 0;
    while go_on(&env, round) {
        let due = DueTime::After(Duration::ZERO);
        let item = ScheduleRequest { to: to.clone(), due, fields: numbered(round as usize) };
        env.second.schedule(&delays, &[item]).await?;
        repeat(|| env.raw.promote_due(&delays, 10)).await?;
        round += 1;
    }
    env.second.promote_due(&delays, ALL).await?;

    assert_eq!(fields_in(&*env.second, &to).await?, numbers(round as usize));
    assert_eq!(env.second.delay_stats(&delays).await?.waiting, 0);
    Ok(())
}

pub async fn a_batch_scheduled_without_a_reply_is_stored_completely_or_not_at_all(
    env: StreamTestEnv,
) -> TestResult {
    let to = env.stream("orders");
    let mut round = 0;
    while go_on(&env, round) {
        let delays = env.delays(&round.to_string());
        let due = DueTime::After(HOUR);
        let items: Vec<ScheduleRequest> = numbers(20)
            .into_iter()
            .map(|fields| ScheduleRequest { to: to.clone(), due, fields })
            .collect();
        let expected: &[u64] = match known(env.raw.schedule(&delays, &items).await)? {
            Some(ids) => {
                assert_eq!(ids.len(), 20);
                &[20]
            }
            None => {
                sleep_ms(50).await;
                &[0, 20]
            }
        };
        let waiting = env.second.delay_stats(&delays).await?.waiting;
        assert!(expected.contains(&waiting), "expected one of {expected:?}, found {waiting}");
        round += 1;
    }
    Ok(())
}

pub async fn a_reclaim_without_a_reply_assigned_the_entries_to_its_consumer(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(5).await?;
    let mut owner = "ann".to_owned();
    let mut round = 0;
    while go_on(&env, round) {
        let name = format!("c{round}");
        let me = consumer(&name);
        let reclaim = ReclaimRequest { from: ReclaimFrom::Others, ..flow.reclaim_any(&me) };
        let reclaimed = known(env.raw.reclaim(reclaim).await)?;
        if reclaimed.is_none() {
            sleep_ms(50).await;
        }
        let owned = flow.pending_owners().await?;
        let owners: HashSet<&str> = owned.iter().map(|(_, owner, _)| owner.as_str()).collect();
        assert_eq!(owned.iter().map(|x| x.0).collect::<Vec<_>>(), ids, "nothing is lost");
        if let Some(reclaimed) = reclaimed {
            assert_eq!(ids_of(&reclaimed.entries), ids);
            assert_eq!(
                owners,
                HashSet::from([name.as_str()]),
                "all of it belongs to the reclaiming consumer"
            );
        }
        assert!(owners.iter().all(|who| *who == name || *who == owner), "found {owners:?}");
        if owners.contains(name.as_str()) {
            owner = name;
        }
        round += 1;
    }
    Ok(())
}
