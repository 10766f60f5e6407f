//! Concurrency: groups, settles and reclaims with many callers on one stream.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use headwater_stream::{
    EntryId, ReclaimFrom, ReclaimRequest, Retention, SettleAction, SettleBatch, Settlement,
};

use super::env::{StreamTestEnv, consumer};
use super::steps::{contents, done, fields_in, ids_of, ms, numbered, numbers, soon};
use crate::failure::TestResult;

/// Counts how often each id occurs.
fn count(all: impl IntoIterator<Item = EntryId>) -> HashMap<EntryId, usize> {
    let mut counts = HashMap::new();
    for id in all {
        *counts.entry(id).or_default() += 1;
    }
    counts
}

pub async fn concurrent_consumers_process_every_entry_once(env: StreamTestEnv) -> TestResult {
    const COUNT: usize = 600;
    let flow = Arc::new(env.flow().await?);
    let left = Arc::new(AtomicUsize::new(COUNT));
    let workers: Vec<_> = (0..6)
        .map(|worker| {
            let backend = Arc::clone(if worker % 2 == 0 { &env.backend } else { &env.second });
            let (flow, left) = (Arc::clone(&flow), Arc::clone(&left));
            tokio::spawn(async move {
                let me = consumer(&format!("c{worker}"));
                let mut reader = backend.reader(&flow.group, &me).await?;
                let mut mine = Vec::new();
                while left.load(Ordering::SeqCst) > 0 {
                    let streams = std::slice::from_ref(&flow.stream);
                    for batch in reader.read(streams, 16, ms(20)).await? {
                        let ids = ids_of(&batch.entries);
                        left.fetch_sub(ids.len(), Ordering::SeqCst);
                        let settle = SettleBatch {
                            stream: &flow.stream,
                            group: &flow.group,
                            consumer: &me,
                            fence: None,
                            entries: &done(&ids),
                        };
                        backend.settle(settle).await?;
                        mine.extend(ids);
                    }
                }
                TestResult::Ok(mine)
            })
        })
        .collect();
    let mut appended = Vec::new();
    for _ in 0..COUNT / 20 {
        appended.extend(flow.append(20).await?);
    }

    let mut seen = Vec::new();
    for worker in workers {
        seen.extend(soon("the workers to end", worker).await??);
    }

    assert_eq!(count(seen), count(appended), "each entry went to one worker");
    assert_eq!(flow.pending_ids().await?, [], "each was settled");
    Ok(())
}

pub async fn one_of_eight_concurrent_settles_of_an_entry_writes_the_follow_up(
    env: StreamTestEnv,
) -> TestResult {
    const COUNT: usize = 50;
    let (flow, ids) = env.flow_with_pending(COUNT).await?;
    let (flow, dead) = (Arc::new(flow), env.stream("dead"));
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let backend = Arc::clone(if task % 2 == 0 { &env.backend } else { &env.second });
            let (flow, ids, dead) = (Arc::clone(&flow), ids.clone(), dead.clone());
            tokio::spawn(async move {
                let mut applied = 0;
                for (number, id) in ids.into_iter().enumerate() {
                    let then = SettleAction::Append { to: dead.clone(), fields: numbered(number) };
                    let settle = SettleBatch {
                        stream: &flow.stream,
                        group: &flow.group,
                        consumer: &consumer("ann"),
                        fence: None,
                        entries: &[Settlement { id, action: then }],
                    };
                    applied += backend.settle(settle).await?.applied;
                }
                TestResult::Ok(applied)
            })
        })
        .collect();
    let mut applied = 0;
    for task in tasks {
        applied += task.await??;
    }

    assert!(applied == COUNT || env.is_faulty(), "expected {COUNT}, found {applied}");
    let mut found: Vec<String> =
        fields_in(&*env.second, &dead).await?.iter().map(|fields| format!("{fields:?}")).collect();
    found.sort();
    let mut expected: Vec<String> =
        numbers(COUNT).iter().map(|fields| format!("{fields:?}")).collect();
    expected.sort();
    assert_eq!(found, expected, "one follow-up each");
    Ok(())
}

pub async fn eight_concurrent_reclaims_assign_each_entry_to_one_consumer(
    env: StreamTestEnv,
) -> TestResult {
    const COUNT: usize = 200;
    let (flow, ids) = env.flow_with_pending(COUNT).await?;
    let flow = Arc::new(flow);
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let backend = Arc::clone(if task % 2 == 0 { &env.backend } else { &env.second });
            let flow = Arc::clone(&flow);
            tokio::spawn(async move {
                let (me, ann) = (consumer(&format!("c{task}")), consumer("ann"));
                let from = ReclaimFrom::Consumer(&ann);
                let found =
                    backend.reclaim(ReclaimRequest { from, ..flow.reclaim_any(&me) }).await?;
                TestResult::Ok(ids_of(&found.entries))
            })
        })
        .collect();
    let mut reclaimed = Vec::new();
    for task in tasks {
        reclaimed.extend(task.await??);
    }

    let counts = count(reclaimed);
    assert!(counts.values().all(|hands| *hands == 1), "one consumer each, found {counts:?}");
    let owned = flow.pending_owners().await?;
    assert_eq!(owned.len(), COUNT, "nothing was lost");
    assert!(owned.iter().all(|(_, owner, deliveries)| owner != "ann" && *deliveries == 2));
    if !env.is_faulty() {
        assert_eq!(counts, count(ids), "each was returned to its consumer");
    }
    Ok(())
}

pub async fn concurrent_batches_keep_their_internal_order(env: StreamTestEnv) -> TestResult {
    const EACH: usize = 50;
    let stream = env.stream("orders");
    let tasks: Vec<_> = (0..16)
        .map(|task| {
            let backend = Arc::clone(if task % 2 == 0 { &env.backend } else { &env.second });
            let stream = stream.clone();
            tokio::spawn(async move {
                let entries: Vec<_> = (task * EACH..(task + 1) * EACH).map(numbered).collect();
                backend.append(&stream, &entries, &Retention::KEEP_ALL).await
            })
        })
        .collect();
    let mut all = HashMap::new();
    for (task, handle) in tasks.into_iter().enumerate() {
        let ids = handle.await??;
        assert!(ids.is_sorted_by(|a, b| a < b), "expected ids that grow, found {ids:?}");
        all.extend(ids.into_iter().zip((task * EACH..).map(numbered)));
    }

    let found: HashMap<_, _> =
        contents(&*env.second, &stream).await?.into_iter().map(|e| (e.id, e.fields)).collect();
    assert_eq!(all.len(), 16 * EACH, "every id is unique");
    for (id, fields) in all {
        assert_eq!(found.get(&id), Some(&fields), "{id}");
    }
    Ok(())
}

pub async fn entries_released_during_concurrent_reads_are_all_processed(
    env: StreamTestEnv,
) -> TestResult {
    const COUNT: usize = 120;
    let flow = Arc::new(env.flow().await?);
    flow.append(COUNT).await?;
    // Ann releases what she gets; bob and cid settle what they find.
    let ann = {
        let (flow, backend) = (Arc::clone(&flow), Arc::clone(&env.backend));
        tokio::spawn(async move {
            let me = consumer("ann");
            let mut reader = backend.reader(&flow.group, &me).await?;
            for _ in 0..6 {
                for batch in reader.read(std::slice::from_ref(&flow.stream), 10, ms(20)).await? {
                    let entries: Vec<Settlement> = ids_of(&batch.entries)
                        .into_iter()
                        .map(|id| Settlement { id, action: SettleAction::Release })
                        .collect();
                    flow.settle("ann", &entries).await?;
                }
            }
            reader.close().await.map(drop)
        })
    };
    let finishing = async {
        loop {
            for name in ["bob", "cid"] {
                let me = consumer(name);
                let mut ids = ids_of(&flow.deliver(name, 10).await?);
                let reclaim = ReclaimRequest {
                    min_idle: super::steps::HOUR,
                    from: ReclaimFrom::Others,
                    ..flow.reclaim_any(&me)
                };
                ids.extend(ids_of(&env.second.reclaim(reclaim).await?.entries));
                flow.settle(name, &done(&ids)).await?;
            }
            super::steps::sleep_ms(5).await;
            let stats = flow.group_stats().await?;
            if ann.is_finished() && stats.pending == 0 && stats.lag == Some(0) {
                return TestResult::Ok(());
            }
        }
    };
    soon("every entry to be handled", finishing).await?;
    soon("ann to end", ann).await??;

    assert_eq!(flow.pending_ids().await?, []);
    assert_eq!(flow.group_stats().await?.last_delivered, flow.ids().await?[COUNT - 1]);
    Ok(())
}
