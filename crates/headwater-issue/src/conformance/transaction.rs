//! Transactions of the caller: rows of runs and of his own, one after the other, all or nothing.

use std::sync::Arc;
use std::time::Duration;

use super::env::{StoreTestEnv, StoreTestResult, TTL, completion, event, reply, text_of};
use crate::limits::{NAME_BYTES_MAX, OUTBOX_PER_RUN_MAX};
use crate::{
    CompletionOutcome, DebounceWindow, IssueError, IssueId, KeyedOutboxRow, NewOutboxRow,
    OutboxDelivery, OutboxSettlement, RunCompletion,
};

fn keyed(key: &str, text: &str) -> KeyedOutboxRow {
    KeyedOutboxRow { key: key.into(), row: reply(text) }
}

/// The texts of all rows in the order of delivery, and their keys.
async fn deliver_all(env: &StoreTestEnv) -> StoreTestResult<Vec<(String, String)>> {
    let mut delivered = Vec::new();
    loop {
        let rows = env.store.take_outbox("deliverer", 10, TTL).await?;
        if rows.is_empty() {
            return Ok(delivered);
        }
        for row in rows {
            let (id, deliveries, delivery) = (row.id, row.deliveries, OutboxDelivery::Delivered);
            env.store.settle_outbox(&[OutboxSettlement { id, deliveries, delivery }]).await?;
            delivered.push((text_of(&row.payload), row.idempotency_key));
        }
    }
}

async fn texts(env: &StoreTestEnv) -> StoreTestResult<Vec<String>> {
    Ok(deliver_all(env).await?.into_iter().map(|(text, _)| text).collect())
}

async fn write(env: &StoreTestEnv, issue: IssueId, rows: &[KeyedOutboxRow]) -> StoreTestResult {
    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, rows).await?;
    Ok(transaction.commit().await?)
}

pub async fn what_a_transaction_wrote_is_there_when_it_is_committed(
    env: StoreTestEnv,
) -> StoreTestResult {
    let mut transaction = env.store.begin().await?;
    let recorded =
        transaction.record(&[event("42", "a")], &DebounceWindow::default()).await.remove(0)?;
    assert!(recorded.nudge);
    let rows = [keyed("created", "one"), keyed("greeted", "two")];
    let written = transaction.write_outbox(recorded.issue_id, &rows).await?;
    assert!(written[0].id < written[1].id && !written[0].duplicate, "{written:?}");
    transaction.commit().await?;
    assert_eq!(env.issue(recorded.issue_id).await?.pending_events, 1);
    assert_eq!(texts(&env).await?, ["one", "two"]);
    env.assert_sound().await
}

pub async fn a_transaction_that_is_dropped_leaves_nothing(env: StoreTestEnv) -> StoreTestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let mut transaction = env.store.begin().await?;
    transaction.record(&[event("42", "b")], &DebounceWindow::default()).await.remove(0)?;
    transaction.write_outbox(issue, &[keyed("k", "never")]).await?;
    drop(transaction);
    assert_eq!(env.store.check_consistency(1).await?.recorded, 1);
    assert_eq!(texts(&env).await?, [""; 0]);
    Ok(())
}

pub async fn a_row_is_written_once_however_often_its_transaction_is_repeated(
    env: StoreTestEnv,
) -> StoreTestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let other = env.record("2", "b").await?.issue_id;
    write(&env, issue, &[keyed("k", "one")]).await?;
    let mut transaction = env.store.begin().await?;
    let again = [keyed("k", "one"), keyed("l", "two")];
    let written = transaction.write_outbox(issue, &again).await?;
    assert_eq!((written[0].duplicate, written[1].duplicate), (true, false));
    assert_eq!(transaction.write_outbox(issue, &again).await?[1].id, written[1].id);
    // Another issue has keys of its own.
    assert!(!transaction.write_outbox(other, &[keyed("k", "three")]).await?[0].duplicate);
    transaction.commit().await?;
    let delivered = deliver_all(&env).await?;
    assert_eq!(delivered.len(), 3, "{delivered:?}");
    // Delivered ones count, too.
    write(&env, issue, &again).await?;
    assert_eq!(deliver_all(&env).await?, []);
    Ok(())
}

pub async fn a_key_of_another_row_is_refused_and_nothing_is_written(
    env: StoreTestEnv,
) -> StoreTestResult {
    let issue = env.record("1", "a").await?.issue_id;
    write(&env, issue, &[keyed("k", "one")]).await?;
    let mut transaction = env.store.begin().await?;
    let rows = [keyed("l", "two"), keyed("k", "other")];
    let refused = transaction.write_outbox(issue, &rows).await;
    let conflict = IssueError::OutboxConflict { issue_id: issue, key: "k".into() };
    assert_eq!(refused.expect_err("a conflict").to_string(), conflict.to_string());
    transaction.write_outbox(issue, &[keyed("m", "three")]).await?;
    transaction.commit().await?;
    assert_eq!(texts(&env).await?, ["one", "three"]);
    Ok(())
}

pub async fn bad_rows_are_refused_and_leave_the_transaction_usable(
    env: StoreTestEnv,
) -> StoreTestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let mut transaction = env.store.begin().await?;
    let with = |change: fn(&mut NewOutboxRow)| {
        let mut one = keyed("k", "x");
        change(&mut one.row);
        vec![one]
    };
    let bad = [
        vec![keyed("", "no key")],
        vec![keyed("nul \0", "x")],
        vec![keyed(&"k".repeat(NAME_BYTES_MAX + 1), "x")],
        vec![keyed("k", "x"), keyed("k", "x")],
        (0..=OUTBOX_PER_RUN_MAX).map(|n| keyed(&n.to_string(), "x")).collect(),
        with(|row| row.payload = "{".into()),
        with(|row| row.target = "nul \0".into()),
    ];
    for rows in bad {
        let refused = transaction.write_outbox(issue, &rows).await;
        assert!(matches!(refused, Err(IssueError::Invalid { .. })), "{refused:?}");
    }
    let missing = transaction.write_outbox(IssueId(i64::MAX), &[keyed("k", "x")]).await;
    assert!(matches!(missing, Err(IssueError::NotFound { .. })), "{missing:?}");
    assert_eq!(transaction.write_outbox(issue, &[]).await?, []);
    transaction.write_outbox(issue, &[keyed("k", "good")]).await?;
    transaction.commit().await?;
    assert_eq!(texts(&env).await?, ["good"]);
    Ok(())
}

pub async fn rows_of_transactions_and_of_runs_come_in_the_order_of_their_commits(
    env: StoreTestEnv,
) -> StoreTestResult {
    let issue = env.replied("1", &["run 1"]).await?;
    write(&env, issue, &[keyed("a", "transaction 1")]).await?;
    env.record("1", "next").await?;
    let claimed = env.claim(issue).await?;
    let run = RunCompletion { outbox: vec![reply("run 2")], ..completion(&claimed) };

    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, &[keyed("b", "transaction 2")]).await?;
    let store = Arc::clone(&env.second);
    let mut completing = tokio::spawn(async move {
        // Again, if it has waited for as long as a call waits for a lock.
        loop {
            match store.complete(std::slice::from_ref(&run)).await {
                Err(error) if error.is_transient() => {}
                answer => return answer,
            }
        }
    });
    // A run that does not wait would overtake a row that has its place before it.
    let overtakes = tokio::time::timeout(Duration::from_millis(200), &mut completing).await;
    assert!(overtakes.is_err(), "{overtakes:?}");
    transaction.commit().await?;
    let completed = completing.await??.remove(0);
    assert!(matches!(completed, CompletionOutcome::Committed { .. }), "{completed:?}");
    assert_eq!(texts(&env).await?, ["run 1", "transaction 1", "transaction 2", "run 2"]);
    Ok(())
}

pub async fn a_row_written_while_the_one_before_it_is_settled_is_not_left_behind(
    env: StoreTestEnv,
) -> StoreTestResult {
    let issue = env.replied("1", &["first"]).await?;
    let row = env.store.take_outbox("deliverer", 1, TTL).await?.remove(0);
    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, &[keyed("a", "second")]).await?;
    // The first one goes while the second waits for it and cannot be seen yet.
    let store = Arc::clone(&env.second);
    let (id, deliveries, delivery) = (row.id, row.deliveries, OutboxDelivery::Delivered);
    let settlement = OutboxSettlement { id, deliveries, delivery };
    let mut settling = tokio::spawn(async move {
        // Again, if it has waited for as long as a call waits for a lock.
        loop {
            match store.settle_outbox(std::slice::from_ref(&settlement)).await {
                Err(error) if error.is_transient() => {}
                answer => return answer,
            }
        }
    });
    // Long enough for one that does not wait to be done.
    let _ = tokio::time::timeout(Duration::from_millis(200), &mut settling).await;
    transaction.commit().await?;
    if !settling.is_finished() {
        settling.await??;
    }
    assert_eq!(texts(&env).await?, ["second"]);
    Ok(())
}

pub async fn a_committed_transaction_wakes_who_waits_for_the_outbox(
    env: StoreTestEnv,
) -> StoreTestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, &[keyed("k", "x")]).await?;
    let store = Arc::clone(&env.store);
    let waiter = tokio::spawn(async move {
        let started = tokio::time::Instant::now();
        // The first wait may end for what came before, or because listening has begun.
        while store.take_outbox("deliverer", 1, TTL).await?.is_empty() {
            store.outbox_wake(Duration::from_secs(60)).await;
        }
        Ok::<_, IssueError>(started.elapsed())
    });
    transaction.commit().await?;
    assert!(waiter.await?? < Duration::from_secs(30));
    Ok(())
}
