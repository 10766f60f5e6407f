//! Outbox rows: taking, settling, order and targets.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use super::env::{StoreTestEnv, TTL, completion, event, options, reply, text_of, won};
use crate::TestResult;
use headwater_issue::{
    DeliveryTarget, IssueError, NewEvent, NewOutboxRow, OutboxDelivery, OutboxFacts, OutboxFilter,
    OutboxId, OutboxKind, OutboxRow, OutboxSettled, OutboxSettlement, OutboxStatus, OutboxTake,
    RunCompletion, TargetState,
};

const LATER: Duration = Duration::from_secs(600);

fn settle(row: &OutboxRow, delivery: OutboxDelivery) -> OutboxSettlement {
    OutboxSettlement { id: row.id, deliveries: row.deliveries, delivery }
}

async fn take(env: &StoreTestEnv) -> TestResult<Vec<OutboxRow>> {
    Ok(env.store.take_outbox("deliverer", 10, TTL).await?)
}

async fn settle_as(
    env: &StoreTestEnv,
    row: &OutboxRow,
    delivery: OutboxDelivery,
) -> TestResult<OutboxSettled> {
    Ok(env.store.settle_outbox(&[settle(row, delivery)]).await?.remove(0))
}

fn texts(rows: &[OutboxRow]) -> Vec<String> {
    rows.iter().map(|row| text_of(&row.payload)).collect()
}

pub async fn replies_of_an_issue_are_taken_in_order_one_at_a_time(env: StoreTestEnv) -> TestResult {
    let issue = env.replied("1", &["a", "b"]).await?;
    env.replied("2", &["c"]).await?;
    let first = take(&env).await?;
    assert_eq!(texts(&first), ["a", "c"]);
    let row = &first[0];
    assert_eq!((row.issue_id, row.deliveries, row.attempts), (issue, 1, 0));
    assert_eq!((row.integration.as_str(), row.provider.as_str()), ("main", "github"));
    assert_eq!(
        (row.external_project_id.as_str(), row.external_issue_id.as_str()),
        ("project", "1")
    );
    assert_eq!(row.target, "comment");
    assert!(take(&env).await?.is_empty(), "b waits for a");
    assert_eq!(settle_as(&env, row, OutboxDelivery::Delivered).await?, OutboxSettled::Done);
    assert_eq!(texts(&take(&env).await?), ["b"]);
    Ok(())
}

pub async fn a_failed_reply_blocks_only_later_replies_of_its_issue(
    env: StoreTestEnv,
) -> TestResult {
    env.replied("1", &["a", "b"]).await?;
    let row = take(&env).await?.remove(0);
    let failed = OutboxDelivery::Retry { after: LATER, error: "busy".into() };
    assert_eq!(settle_as(&env, &row, failed).await?, OutboxSettled::Done);
    env.replied("2", &["c"]).await?;
    assert_eq!(texts(&take(&env).await?), ["c"]);
    env.advance(LATER).await?;
    let again = take(&env).await?;
    assert_eq!(texts(&again), ["a"]);
    assert_eq!((again[0].attempts, again[0].deliveries), (1, 2));
    assert_eq!(again[0].idempotency_key, row.idempotency_key);
    Ok(())
}

pub async fn a_dead_reply_unblocks_later_replies(env: StoreTestEnv) -> TestResult {
    env.replied("1", &["a", "b"]).await?;
    let row = take(&env).await?.remove(0);
    settle_as(&env, &row, OutboxDelivery::Dead { error: "no such issue".into() }).await?;
    assert_eq!(texts(&take(&env).await?), ["b"]);
    let dead = env.second.dead_outbox(None, 10).await?;
    assert_eq!(dead.len(), 1);
    assert_eq!((dead[0].row.id, dead[0].error.as_str()), (row.id, "no such issue"));
    assert!(env.store.dead_outbox(Some(row.id), 10).await?.is_empty());
    Ok(())
}

pub async fn a_dead_reply_can_be_retried(env: StoreTestEnv) -> TestResult {
    env.replied("1", &["a"]).await?;
    let row = take(&env).await?.remove(0);
    settle_as(&env, &row, OutboxDelivery::Dead { error: "gone".into() }).await?;
    env.second.retry_outbox(row.id).await?;
    let again = take(&env).await?.remove(0);
    assert_eq!((again.id, again.attempts), (row.id, 0));
    assert_eq!(again.idempotency_key, row.idempotency_key);
    let missing = env.store.retry_outbox(row.id).await;
    assert!(matches!(missing, Err(IssueError::NotFound { .. })), "{missing:?}");
    Ok(())
}

pub async fn the_facts_about_a_row_follow_its_state(env: StoreTestEnv) -> TestResult {
    let facts = async |id: OutboxId| -> TestResult<OutboxFacts> {
        Ok(env.second.outbox_facts(id).await?.expect("the row exists"))
    };
    let issue = env.replied("1", &["a", "b"]).await?;
    let first = take(&env).await?.remove(0);
    let taken = facts(first.id).await?;
    assert_eq!((taken.status, taken.taken_by.as_deref()), (OutboxStatus::Taken, Some("deliverer")));
    assert_eq!((taken.issue_id, taken.kind, taken.behind), (issue, OutboxKind::Reply, None));
    assert_eq!((&*taken.integration, &*taken.target), ("main", "comment"));
    assert!(taken.due_at > taken.now && taken.created_at <= taken.now);

    // The other reply of the issue comes later.
    let later = env.store.issue_facts(issue).await?.expect("the issue exists").undelivered;
    let later = later.iter().find(|row| row.id != first.id).expect("two rows").id;
    let waiting = facts(later).await?;
    assert_eq!((waiting.status, waiting.behind), (OutboxStatus::Waiting, Some(first.id)));

    let failed = OutboxDelivery::Retry { after: LATER, error: "busy".into() };
    settle_as(&env, &first, failed).await?;
    let pending = facts(first.id).await?;
    assert_eq!((pending.status, pending.attempts), (OutboxStatus::Pending, 1));
    assert_eq!(pending.error.as_deref(), Some("busy"));
    assert!(pending.due_at > pending.now);
    env.advance(LATER).await?;
    let first = take(&env).await?.remove(0);
    settle_as(&env, &first, OutboxDelivery::Dead { error: "gone".into() }).await?;
    let dead = facts(first.id).await?;
    assert_eq!((dead.status, dead.error.as_deref()), (OutboxStatus::Dead, Some("gone")));
    assert_eq!(facts(later).await?.behind, None, "a dead row is not waited for");

    let second = take(&env).await?.remove(0);
    settle_as(&env, &second, OutboxDelivery::Delivered).await?;
    let delivered = facts(later).await?;
    assert_eq!(delivered.status, OutboxStatus::Delivered);
    assert!(delivered.delivered_at.is_some());
    assert!(env.store.outbox_facts(OutboxId(987_654)).await?.is_none());
    Ok(())
}

pub async fn rows_are_listed_by_status_and_issue_in_both_directions(
    env: StoreTestEnv,
) -> TestResult {
    // In the order of ids: delivered, dead, taken, waiting; then one of another issue, taken.
    let issue = env.replied("1", &["a", "b", "c", "d"]).await?;
    let a = take(&env).await?.remove(0);
    settle_as(&env, &a, OutboxDelivery::Delivered).await?;
    let b = take(&env).await?.remove(0);
    settle_as(&env, &b, OutboxDelivery::Dead { error: "no such issue".into() }).await?;
    let c = take(&env).await?.remove(0);
    let other = env.replied("2", &["e"]).await?;
    let e = take(&env).await?.remove(0);
    let list = async |filter: OutboxFilter| -> TestResult<Vec<OutboxId>> {
        let (mut filter, mut listed) = (filter, Vec::new());
        loop {
            let page = env.store.outbox_rows(&filter, 2).await?;
            let Some(last) = page.last() else { return Ok(listed) };
            filter.after = Some(last.id);
            listed.extend(page.iter().map(|row| row.id));
        }
    };
    let all = list(OutboxFilter::default()).await?;
    assert_eq!(all.len(), 5);
    let d = all[3];
    assert_eq!(all, [a.id, b.id, c.id, d, e.id]);
    let with = |status| OutboxFilter { status: Some(status), ..OutboxFilter::default() };
    let of = |issue| OutboxFilter { issue: Some(issue), ..OutboxFilter::default() };
    for (filter, expected) in [
        (OutboxFilter::default(), all.clone()),
        (with(OutboxStatus::Delivered), vec![a.id]),
        (with(OutboxStatus::Dead), vec![b.id]),
        (with(OutboxStatus::Taken), vec![c.id, e.id]),
        (with(OutboxStatus::Waiting), vec![d]),
        (with(OutboxStatus::Pending), vec![]),
        (of(issue), vec![a.id, b.id, c.id, d]),
        (of(other), vec![e.id]),
        (OutboxFilter { status: Some(OutboxStatus::Taken), ..of(other) }, vec![e.id]),
    ] {
        assert_eq!(list(filter).await?, expected, "{filter:?}");
        let mut reversed = list(OutboxFilter { newest_first: true, ..filter }).await?;
        reversed.reverse();
        assert_eq!(reversed, expected, "newest first: {filter:?}");
    }
    Ok(())
}

pub async fn a_reply_of_a_dead_deliverer_is_redelivered_with_the_same_key(
    env: StoreTestEnv,
) -> TestResult {
    env.replied("1", &["a"]).await?;
    let lost = take(&env).await?.remove(0);
    env.advance(TTL).await?;
    let row = env.second.take_outbox("other", 10, TTL).await?.remove(0);
    assert_eq!((row.id, row.deliveries, row.attempts), (lost.id, 2, 0));
    assert_eq!(row.idempotency_key, lost.idempotency_key);
    assert_eq!(settle_as(&env, &lost, OutboxDelivery::Delivered).await?, OutboxSettled::Fenced);
    assert_eq!(settle_as(&env, &row, OutboxDelivery::Delivered).await?, OutboxSettled::Done);
    assert!(take(&env).await?.is_empty());
    Ok(())
}

pub async fn a_released_reply_counts_no_attempt(env: StoreTestEnv) -> TestResult {
    env.replied("1", &["a"]).await?;
    let row = take(&env).await?.remove(0);
    assert_eq!(settle_as(&env, &row, OutboxDelivery::Release).await?, OutboxSettled::Done);
    let again = take(&env).await?.remove(0);
    assert_eq!((again.id, again.attempts), (row.id, 0));
    Ok(())
}

pub async fn an_unavailable_target_counts_no_attempt(env: StoreTestEnv) -> TestResult {
    env.replied("1", &["a", "b"]).await?;
    let row = take(&env).await?.remove(0);
    let unavailable = |after| OutboxDelivery::Unavailable { after, error: "unreachable".into() };
    assert_eq!(settle_as(&env, &row, unavailable(Duration::ZERO)).await?, OutboxSettled::Done);
    let again = take(&env).await?.remove(0);
    assert_eq!((again.id, again.deliveries, again.attempts, again.crashes), (row.id, 2, 0, 0));
    settle_as(&env, &again, unavailable(LATER)).await?;
    assert!(take(&env).await?.is_empty(), "a is not due yet, and b waits for a");
    Ok(())
}

pub async fn no_reply_waits_for_an_event_and_each_kind_keeps_its_order(
    env: StoreTestEnv,
) -> TestResult {
    let event = |text| NewOutboxRow { kind: OutboxKind::Event, ..reply(text) };
    let recorded = env.record("1", "1").await?;
    let claimed = env.claim(recorded.issue_id).await?;
    let outbox = vec![event("fact one"), reply("a"), event("fact two"), reply("b")];
    env.complete(RunCompletion { outbox, ..completion(&claimed) }).await?;
    let first = take(&env).await?;
    assert_eq!(texts(&first), ["fact one", "a"]);
    let error = "the streams are unavailable".to_owned();
    settle_as(&env, &first[0], OutboxDelivery::Unavailable { after: LATER, error }).await?;
    settle_as(&env, &first[1], OutboxDelivery::Delivered).await?;
    let second = take(&env).await?;
    assert_eq!(texts(&second), ["b"], "replies continue, events wait");
    settle_as(&env, &second[0], OutboxDelivery::Dead { error: "no".into() }).await?;
    assert!(take(&env).await?.is_empty());

    // The same for later rows and for a retried one.
    env.store.retry_outbox(second[0].id).await?;
    env.replied("1", &["c"]).await?;
    let third = take(&env).await?;
    assert_eq!(texts(&third), ["b"]);
    settle_as(&env, &third[0], OutboxDelivery::Delivered).await?;
    assert_eq!(texts(&take(&env).await?), ["c"]);
    Ok(())
}

/// Creates `count` replies of an integration, one per issue.
async fn backlog(env: &StoreTestEnv, integration: &str, count: usize) -> TestResult {
    env.store.ensure_integration(integration, "github").await?;
    for first in (0..count).step_by(100) {
        let events: Vec<NewEvent> = (first..count.min(first + 100))
            .map(|n| NewEvent {
                integration: integration.into(),
                ..event(&n.to_string(), &n.to_string())
            })
            .collect();
        let issues: Vec<_> =
            env.record_all(&events).await?.iter().map(|one| one.issue_id).collect();
        let claims = env.store.claim(&issues, &options("a")).await?;
        let complete = |claim| {
            let text = format!("{integration}-reply");
            RunCompletion { outbox: vec![reply(&text)], ..completion(&won(claim)) }
        };
        let completions: Vec<_> = claims.into_iter().map(complete).collect();
        env.store.complete(&completions).await?;
    }
    Ok(())
}

/// Number of rows taken per integration.
async fn taken(env: &StoreTestEnv, take: &OutboxTake) -> TestResult<BTreeMap<String, usize>> {
    let mut taken = BTreeMap::new();
    for row in env.store.take_outbox_from(take).await? {
        *taken.entry(row.integration).or_default() += 1;
    }
    Ok(taken)
}

fn state(integration: &str, in_flight: usize, free_slots: usize) -> TargetState {
    let target = DeliveryTarget {
        integration: integration.into(),
        kind: OutboxKind::Reply,
        target: "comment".into(),
    };
    TargetState { target, in_flight, free_slots, is_failing: false, served: 0 }
}

fn counts<const N: usize>(counts: [(&str, usize); N]) -> BTreeMap<String, usize> {
    counts.map(|(integration, count)| (integration.to_owned(), count)).into()
}

pub async fn a_backlog_of_one_target_does_not_block_another(env: StoreTestEnv) -> TestResult {
    backlog(&env, "slow", 300).await?;
    backlog(&env, "other", 1).await?;
    // Even a small batch includes the single row of the other target.
    let any = OutboxTake::any("deliverer", 2, TTL);
    assert_eq!(taken(&env, &any).await?, counts([("other", 1), ("slow", 1)]));
    backlog(&env, "third", 3).await?;
    let take = OutboxTake {
        per_target: 4,
        targets: vec![state("slow", 1, 0)],
        ..OutboxTake::any("deliverer", 100, TTL)
    };
    assert_eq!(taken(&env, &take).await?, counts([("third", 3)]));
    let take = OutboxTake { targets: vec![], ..take };
    assert_eq!(taken(&env, &take).await?, counts([("slow", 4)]));
    // Every row is taken once in the end.
    let rest = taken(&env, &OutboxTake::any("deliverer", 256, TTL)).await?;
    assert_eq!(rest, counts([("slow", 256)]));
    assert_eq!(taken(&env, &any).await?, counts([("slow", 2)]));
    Ok(())
}

pub async fn free_slots_go_to_the_target_with_the_fewest_in_flight(
    env: StoreTestEnv,
) -> TestResult {
    for integration in ["a", "b", "c"] {
        backlog(&env, integration, 10).await?;
    }
    let take = OutboxTake {
        targets: vec![state("a", 5, 9), state("b", 3, 9), state("c", 0, 2)],
        ..OutboxTake::any("deliverer", 7, TTL)
    };
    // Two of c, which has two free slots; two of b, until it has as many in flight as a; then both in turn.
    assert_eq!(taken(&env, &take).await?, counts([("a", 2), ("b", 3), ("c", 2)]));

    // With equal numbers in flight, the least recently served target.
    let served = |integration, served| TargetState { served, ..state(integration, 1, 9) };
    for (targets, expected) in [
        ([served("a", 7), served("b", 9), served("c", 8)], "a"),
        ([served("a", 9), served("b", 7), served("c", 8)], "b"),
        ([served("a", 9), served("b", 8), served("c", 7)], "c"),
    ] {
        let take = OutboxTake { targets: targets.into(), ..OutboxTake::any("deliverer", 1, TTL) };
        assert_eq!(taken(&env, &take).await?, counts([(expected, 1)]));
    }
    Ok(())
}

pub async fn failing_targets_share_one_limit(env: StoreTestEnv) -> TestResult {
    for integration in ["a", "b", "c", "healthy"] {
        backlog(&env, integration, 2).await?;
    }
    let failing = |integration| TargetState { is_failing: true, ..state(integration, 0, 1) };
    let take = OutboxTake {
        failing_limit: 2,
        targets: vec![failing("a"), failing("b"), failing("c")],
        ..OutboxTake::any("deliverer", 10, TTL)
    };
    let first = taken(&env, &take).await?;
    assert_eq!((first["healthy"], first.values().sum()), (2, 4), "{first:?}");
    let none = OutboxTake { failing_limit: 0, ..take };
    assert_eq!(taken(&env, &none).await?, counts([]));
    Ok(())
}

pub async fn two_deliverers_never_take_the_same_reply(env: StoreTestEnv) -> TestResult {
    for n in 0..40 {
        env.replied(&n.to_string(), &["x"]).await?;
    }
    let takers = (0..8).map(|n| {
        let store = if n % 2 == 0 { &env.store } else { &env.second };
        let store = std::sync::Arc::clone(store);
        tokio::spawn(async move { store.take_outbox(&format!("d{n}"), 10, TTL).await })
    });
    let mut seen = HashSet::new();
    for taker in takers.collect::<Vec<_>>() {
        for row in taker.await?? {
            assert!(seen.insert(row.id), "taken twice: {row:?}");
        }
    }
    for row in take(&env).await? {
        assert!(seen.insert(row.id));
    }
    while let Some(row) = take(&env).await?.pop() {
        assert!(seen.insert(row.id));
    }
    Ok(())
}

pub async fn a_row_settled_twice_is_settled_once(env: StoreTestEnv) -> TestResult {
    env.replied("1", &["a"]).await?;
    let row = take(&env).await?.remove(0);
    let failed = OutboxDelivery::Retry { after: Duration::ZERO, error: "x".into() };
    let both = [settle(&row, OutboxDelivery::Delivered), settle(&row, failed)];
    let settled = env.store.settle_outbox(&both).await?;
    assert_eq!(settled, [OutboxSettled::Done, OutboxSettled::Fenced]);
    assert_eq!(settle_as(&env, &row, OutboxDelivery::Delivered).await?, OutboxSettled::Fenced);
    assert!(take(&env).await?.is_empty());
    Ok(())
}

pub async fn a_new_outbox_row_wakes_a_waiting_deliverer(env: StoreTestEnv) -> TestResult {
    // The timeout only ends a failing test; it is far longer than any wake-up takes.
    let store = std::sync::Arc::clone(&env.store);
    let waiter = tokio::spawn(async move {
        let started = tokio::time::Instant::now();
        store.outbox_wake(Duration::from_secs(60)).await;
        started.elapsed()
    });
    env.replied("1", &["a"]).await?;
    assert!(waiter.await? < Duration::from_secs(30));
    Ok(())
}

pub async fn idempotency_keys_are_unique(env: StoreTestEnv) -> TestResult {
    let mut keys = HashSet::new();
    for round in 0..3 {
        for issue in ["1", "2"] {
            env.record(issue, &format!("{issue}-{round}")).await?;
            let found = env.store.find_issue("main", "project", issue).await?.expect("it exists");
            let claimed = env.claim(found.id).await?;
            let outbox = vec![reply("a"), reply("a")];
            env.complete(RunCompletion { outbox, ..completion(&claimed) }).await?;
        }
    }
    loop {
        let rows = take(&env).await?;
        if rows.is_empty() {
            break;
        }
        for row in rows {
            assert!(keys.insert(row.idempotency_key.clone()));
            settle_as(&env, &row, OutboxDelivery::Delivered).await?;
        }
    }
    assert_eq!(keys.len(), 12);
    Ok(())
}

pub async fn a_wait_for_the_outbox_times_out(env: StoreTestEnv) -> TestResult {
    // An earlier row may complete the first wait at once; the second times out.
    env.store.outbox_wake(Duration::from_millis(10)).await;
    env.store.outbox_wake(Duration::from_millis(10)).await;
    Ok(())
}

pub async fn a_retried_dead_reply_is_the_next_of_its_issue(env: StoreTestEnv) -> TestResult {
    env.replied("1", &["a", "b", "c"]).await?;
    let dead = take(&env).await?.remove(0);
    settle_as(&env, &dead, OutboxDelivery::Dead { error: "gone".into() }).await?;
    let b = take(&env).await?.remove(0);
    env.store.retry_outbox(dead.id).await?;
    assert!(take(&env).await?.is_empty(), "one row per issue at a time");
    settle_as(&env, &b, OutboxDelivery::Delivered).await?;
    let a = take(&env).await?;
    assert_eq!(texts(&a), ["a"]);
    settle_as(&env, &a[0], OutboxDelivery::Delivered).await?;
    assert_eq!(texts(&take(&env).await?), ["c"]);
    Ok(())
}

pub async fn unsettled_deliveries_are_counted_until_an_operator_retries(
    env: StoreTestEnv,
) -> TestResult {
    env.replied("1", &["a"]).await?;
    let mut row = take(&env).await?.remove(0);
    // Only unsettled deliveries count.
    let failed = OutboxDelivery::Retry { after: Duration::ZERO, error: "busy".into() };
    settle_as(&env, &row, failed).await?;
    row = take(&env).await?.remove(0);
    settle_as(&env, &row, OutboxDelivery::Release).await?;
    for crashes in 0..3 {
        row = take(&env).await?.remove(0);
        assert_eq!((row.crashes, row.attempts), (crashes, 1));
        env.advance(TTL).await?;
    }
    row = take(&env).await?.remove(0);
    settle_as(&env, &row, OutboxDelivery::Dead { error: "three died".into() }).await?;
    assert_eq!(env.store.dead_outbox(None, 10).await?[0].row.crashes, 3);
    env.store.retry_outbox(row.id).await?;
    let again = take(&env).await?.remove(0);
    assert_eq!((again.crashes, again.attempts), (0, 0));
    assert_eq!(again.deliveries, row.deliveries + 1, "a fencing token is never reused");
    Ok(())
}
