//! Concurrent calls: nothing is lost, nothing takes effect twice, and nothing deadlocks.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::env::{StoreTestEnv, TTL, completion, event, options, reply, text_of, won};
use super::random::{SeededRandom, seed};
use crate::TestResult;
use headwater_issue::{
    Claim, CompletionOutcome, DebounceWindow, IssueId, KeyedOutboxRow, NewEvent, OutboxDelivery,
    OutboxSettlement, Recorded, RunCompletion, Store, SweepOptions,
};

/// The two connections in turn.
fn store(env: &StoreTestEnv, n: usize) -> Arc<dyn Store> {
    Arc::clone(if n.is_multiple_of(2) { &env.store } else { &env.second })
}

pub async fn events_recorded_by_64_concurrent_callers_are_stored_once(
    env: StoreTestEnv,
) -> TestResult {
    let mut tasks = JoinSet::new();
    for n in 0..64 {
        let store = store(&env, n);
        tasks.spawn(async move {
            // Every event is sent twice, by two senders, to few issues.
            let sender = n / 2;
            let events: Vec<NewEvent> = (0..8)
                .map(|k| event(&((sender + k) % 5).to_string(), &format!("{sender}-{k}")))
                .collect();
            with_retries(|| async {
                let recorded = store.record(&events, &DebounceWindow::default()).await;
                recorded.into_iter().collect::<headwater_issue::Result<Vec<_>>>()
            })
            .await
        });
    }
    let mut new = 0;
    while let Some(recorded) = tasks.join_next().await {
        let recorded = recorded??;
        assert_eq!(recorded.len(), 8);
        new += recorded.iter().filter(|one| !one.duplicate).count();
    }
    // Fewer only if a call was repeated after its first reply was lost.
    assert!(new <= 32 * 8, "{new} events were reported as new");
    assert_eq!(env.store.check_consistency(10).await?.recorded, 32 * 8);
    env.assert_consistent().await
}

pub async fn concurrent_duplicates_are_stored_once(env: StoreTestEnv) -> TestResult {
    for round in 0..20 {
        let mut tasks = JoinSet::new();
        for n in 0..4 {
            let (store, event) = (store(&env, n), event(&round.to_string(), &round.to_string()));
            tasks.spawn(async move { record(&*store, &event).await });
        }
        let mut new = 0;
        while let Some(recorded) = tasks.join_next().await {
            new += usize::from(!recorded??.duplicate);
        }
        assert!(new <= 1, "round {round}: {new} events were reported as new");
        assert_eq!(env.store.check_consistency(10).await?.recorded, round + 1);
    }
    env.assert_consistent().await
}

pub async fn one_of_eight_concurrent_claims_wins(env: StoreTestEnv) -> TestResult {
    for round in 0..20 {
        let issue = env.record(&round.to_string(), &round.to_string()).await?.issue_id;
        let mut tasks = JoinSet::new();
        for n in 0..8 {
            let store = store(&env, n);
            let (worker, issues) = (options(&format!("w{n}")), [issue]);
            tasks.spawn(async move { with_retries(|| store.claim(&issues, &worker)).await });
        }
        let mut wins = 0;
        while let Some(claims) = tasks.join_next().await {
            wins += usize::from(matches!(claims??[0], Claim::Won(_)));
        }
        assert_eq!(wins, 1);
    }
    Ok(())
}

pub async fn a_consistency_check_during_changes_reports_no_inconsistency(
    env: StoreTestEnv,
) -> TestResult {
    const ISSUES: usize = 7;
    let mut recorders = JoinSet::new();
    for n in 0..4 {
        let store = store(&env, n);
        recorders.spawn(async move {
            for k in 0..40 {
                let event = event(&(k % ISSUES).to_string(), &format!("{n}-{k}"));
                record(&*store, &event).await?;
            }
            Ok::<_, headwater_issue::IssueError>(())
        });
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut workers = JoinSet::new();
    for n in 0..2 {
        let (store, stopped) = (store(&env, n), stopped.clone());
        workers.spawn(async move { work(&*store, n, &stopped).await });
    }
    // Pages smaller than the number of issues: the issues change between the pages of one check.
    let (mut pages, mut after) = (0_u32, None);
    loop {
        let check = || env.second.check_consistency_page(after, 3);
        let page = with_retries(check).await?;
        assert!(page.is_consistent(), "page {pages}: {page}");
        pages += 1;
        after = page.resume_after;
        if after.is_none() && recorders.is_empty() {
            break;
        }
        while let Some(recorded) = recorders.try_join_next() {
            recorded??;
        }
    }
    let _ = stop.send(true);
    while let Some(worked) = workers.join_next().await {
        worked??;
    }
    env.assert_consistent().await
}

pub async fn concurrent_recorders_and_workers_lose_and_repeat_nothing(
    env: StoreTestEnv,
) -> TestResult {
    const ISSUES: u64 = 6;
    const EVENTS: usize = 240;
    let seed = seed();
    let mut recorders = JoinSet::new();
    for n in 0..4 {
        let store = store(&env, n);
        recorders.spawn(async move {
            let mut random = SeededRandom::seeded(seed.wrapping_add(n as u64));
            for k in 0..EVENTS / 4 {
                let issue = random.below(ISSUES).to_string();
                let event = event(&issue, &format!("{n}-{k}"));
                record(&*store, &event).await?;
            }
            Ok::<_, headwater_issue::IssueError>(())
        });
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut workers = JoinSet::new();
    for n in 0..4 {
        let (store, stopped) = (store(&env, n), stopped.clone());
        workers.spawn(async move { work(&*store, n, &stopped).await });
    }
    while let Some(done) = recorders.join_next().await {
        done??;
    }
    // There are no nudges: workers poll all issues until everything is processed.
    loop {
        let report = env.store.check_consistency(1).await?;
        if report.processed == EVENTS as u64 {
            break;
        }
        if let Some(ended) = workers.try_join_next() {
            panic!("a worker stopped before the end: {:?}", ended?);
        }
        tokio::task::yield_now().await;
    }
    stop.send_replace(true);
    let mut handled: HashMap<String, u32> = HashMap::new();
    while let Some(keys) = workers.join_next().await {
        for key in keys?? {
            *handled.entry(key).or_default() += 1;
        }
    }
    assert_eq!(handled.len(), EVENTS);
    assert!(handled.values().all(|times| *times == 1));
    env.assert_consistent().await
}

/// Claims and completes whatever is queued; returns the keys of the events whose run was committed.
async fn work(
    store: &dyn Store,
    n: usize,
    stopped: &tokio::sync::watch::Receiver<bool>,
) -> headwater_issue::Result<Vec<String>> {
    let mut handled = Vec::new();
    while !*stopped.borrow() {
        let issues: Vec<IssueId> =
            store.issues(&Default::default(), 100).await?.iter().map(|issue| issue.id).collect();
        let mut runs: Vec<RunCompletion> = Vec::new();
        let mut keys = Vec::new();
        let worker = options(&format!("w{n}"));
        for claim in with_retries(|| store.claim(&issues, &worker)).await? {
            if let Claim::Won(claimed) = claim {
                keys.push(
                    claimed.events.iter().map(|log| log.dedup_key.clone()).collect::<Vec<_>>(),
                );
                runs.push(completion(&claimed));
            }
        }
        let completed = with_retries(|| store.complete(&runs)).await?;
        for (completed, keys) in completed.into_iter().zip(keys) {
            assert!(matches!(completed, CompletionOutcome::Committed { repeated: false, .. }));
            handled.extend(keys);
        }
    }
    Ok(handled)
}

pub async fn batches_in_any_order_do_not_deadlock(env: StoreTestEnv) -> TestResult {
    const ISSUES: u64 = 24;
    let seed = seed();
    let events: Vec<NewEvent> =
        (0..ISSUES).map(|n| event(&n.to_string(), &format!("first-{n}"))).collect();
    let issues: Vec<IssueId> =
        env.record_all(&events).await?.iter().map(|one| one.issue_id).collect();
    let mut tasks = JoinSet::new();
    for n in 0..8 {
        let (store, mut issues) = (store(&env, n), issues.clone());
        tasks.spawn(async move {
            let mut random = SeededRandom::seeded(seed.wrapping_add(n as u64));
            for round in 0..15 {
                random.shuffle(&mut issues);
                // Existing and new issues in any order.
                let mut events: Vec<NewEvent> = (0..ISSUES * 2)
                    .map(|k| event(&(k + round).to_string(), &format!("{n}-{round}-{k}")))
                    .collect();
                random.shuffle(&mut events);
                with_retries(|| async {
                    let recorded = store.record(&events, &DebounceWindow::default()).await;
                    recorded.into_iter().collect::<headwater_issue::Result<Vec<_>>>()
                })
                .await?;
                let worker = options(&format!("w{n}"));
                let claims = with_retries(|| store.claim(&issues, &worker)).await?;
                let claims = claims.into_iter().filter(|claim| matches!(claim, Claim::Won(_)));
                let mut runs: Vec<RunCompletion> =
                    claims.map(|claim| completion(&won(claim))).collect();
                random.shuffle(&mut runs);
                let sweep = SweepOptions::default();
                with_retries(|| store.sweep(&sweep)).await?;
                with_retries(|| store.complete(&runs)).await?;
            }
            Ok::<_, headwater_issue::IssueError>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    env.assert_consistent().await
}

async fn record(store: &dyn Store, event: &NewEvent) -> headwater_issue::Result<Recorded> {
    with_retries(|| async {
        store.record(std::slice::from_ref(event), &DebounceWindow::default()).await.remove(0)
    })
    .await
}

/// Retries transient errors of a busy machine.
async fn with_retries<T, F>(call: impl Fn() -> F) -> headwater_issue::Result<T>
where
    F: Future<Output = headwater_issue::Result<T>>,
{
    loop {
        match call().await {
            Err(error) if error.is_transient() => tokio::task::yield_now().await,
            result => return result,
        }
    }
}

async fn write(
    store: &dyn Store,
    issue: IssueId,
    row: &KeyedOutboxRow,
) -> headwater_issue::Result<()> {
    let mut transaction = store.begin().await?;
    transaction.write_outbox(issue, std::slice::from_ref(row)).await?;
    transaction.commit().await
}

pub async fn rows_written_during_deliveries_are_delivered_in_order(
    env: StoreTestEnv,
) -> TestResult {
    const ISSUES: usize = 3;
    const ROWS: usize = 40;
    let mut writers = JoinSet::new();
    for issue in 0..ISSUES {
        let id = env.record(&issue.to_string(), &issue.to_string()).await?.issue_id;
        let store = store(&env, issue);
        writers.spawn(async move {
            for n in 0..ROWS {
                let row = KeyedOutboxRow { key: n.to_string(), row: reply(&n.to_string()) };
                with_retries(|| write(&*store, id, &row)).await?;
            }
            Ok::<_, headwater_issue::IssueError>(())
        });
    }
    let mut delivered: HashMap<IssueId, Vec<usize>> = HashMap::new();
    let seed = seed();
    let mut random = SeededRandom::seeded(seed);
    // Until all writers are done and nothing is left: a row that is never unblocked would end this too early.
    loop {
        let writes = !writers.is_empty();
        while let Some(done) = writers.try_join_next() {
            done??;
        }
        let rows = with_retries(|| env.store.take_outbox("deliverer", 10, TTL)).await?;
        if rows.is_empty() && !writes {
            break;
        }
        let mut settlements = Vec::new();
        for row in rows {
            let delivery = match random.below(4) {
                0 => OutboxDelivery::Release,
                1 => OutboxDelivery::Dead { error: "gone".into() },
                _ => OutboxDelivery::Delivered,
            };
            if delivery != OutboxDelivery::Release {
                let number = text_of(&row.payload).parse()?;
                delivered.entry(row.issue_id).or_default().push(number);
            }
            let (id, deliveries) = (row.id, row.deliveries);
            settlements.push(OutboxSettlement { id, deliveries, delivery });
        }
        with_retries(|| env.second.settle_outbox(&settlements)).await?;
    }
    let in_order: Vec<usize> = (0..ROWS).collect();
    assert_eq!(delivered.len(), ISSUES);
    assert!(delivered.values().all(|numbers| *numbers == in_order), "{delivered:?}");
    assert_eq!(env.store.backlog().await?.outbox_pending, 0);
    Ok(())
}
