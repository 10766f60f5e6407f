//! Caller's transactions.

use std::sync::Arc;
use std::time::Duration;

use super::env::{StoreTestEnv, TTL, completion, event, reply, text_of};
use crate::TestResult;
use headwater_issue::limits::{NAME_BYTES_MAX, OUTBOX_PER_RUN_MAX};
use headwater_issue::{
    CompletionOutcome, DebounceWindow, IssueError, IssueId, KeyedOutboxRow, NewOutboxRow,
    OutboxDelivery, OutboxSettlement, RunCompletion,
};

fn keyed(key: &str, text: &str) -> KeyedOutboxRow {
    KeyedOutboxRow { key: key.into(), row: reply(text) }
}

/// Texts and keys of all rows in delivery order.
async fn deliver_all(env: &StoreTestEnv) -> TestResult<Vec<(String, String)>> {
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

async fn texts(env: &StoreTestEnv) -> TestResult<Vec<String>> {
    Ok(deliver_all(env).await?.into_iter().map(|(text, _)| text).collect())
}

async fn write(env: &StoreTestEnv, issue: IssueId, rows: &[KeyedOutboxRow]) -> TestResult {
    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, rows).await?;
    Ok(transaction.commit().await?)
}

pub async fn changes_of_a_transaction_are_visible_after_the_commit(
    env: StoreTestEnv,
) -> TestResult {
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
    env.assert_consistent().await
}

pub async fn a_dropped_transaction_is_rolled_back(env: StoreTestEnv) -> TestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let mut transaction = env.store.begin().await?;
    transaction.record(&[event("42", "b")], &DebounceWindow::default()).await.remove(0)?;
    transaction.write_outbox(issue, &[keyed("k", "never")]).await?;
    drop(transaction);
    assert_eq!(env.store.check_consistency(1).await?.recorded, 1);
    assert_eq!(texts(&env).await?, [""; 0]);
    Ok(())
}

pub async fn an_outbox_row_is_written_once_however_often_its_transaction_is_repeated(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let other = env.record("2", "b").await?.issue_id;
    write(&env, issue, &[keyed("k", "one")]).await?;
    let mut transaction = env.store.begin().await?;
    let again = [keyed("k", "one"), keyed("l", "two")];
    let written = transaction.write_outbox(issue, &again).await?;
    assert_eq!((written[0].duplicate, written[1].duplicate), (true, false));
    assert_eq!(transaction.write_outbox(issue, &again).await?[1].id, written[1].id);
    // Keys are unique per issue.
    assert!(!transaction.write_outbox(other, &[keyed("k", "three")]).await?[0].duplicate);
    transaction.commit().await?;
    let delivered = deliver_all(&env).await?;
    assert_eq!(delivered.len(), 3, "{delivered:?}");
    // Delivered rows count as duplicates too.
    write(&env, issue, &again).await?;
    assert_eq!(deliver_all(&env).await?, []);
    Ok(())
}

pub async fn a_key_used_for_a_different_row_is_a_conflict_and_nothing_is_written(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.record("1", "a").await?.issue_id;
    write(&env, issue, &[keyed("k", "one")]).await?;
    let mut transaction = env.store.begin().await?;
    let rows = [keyed("l", "two"), keyed("k", "other")];
    let rejected = transaction.write_outbox(issue, &rows).await;
    let conflict = IssueError::OutboxConflict { issue_id: issue, key: "k".into() };
    assert_eq!(rejected.expect_err("a conflict").to_string(), conflict.to_string());
    transaction.write_outbox(issue, &[keyed("m", "three")]).await?;
    transaction.commit().await?;
    assert_eq!(texts(&env).await?, ["one", "three"]);
    Ok(())
}

pub async fn invalid_rows_are_rejected_and_the_transaction_stays_usable(
    env: StoreTestEnv,
) -> TestResult {
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
        let rejected = transaction.write_outbox(issue, &rows).await;
        assert!(matches!(rejected, Err(IssueError::Invalid { .. })), "{rejected:?}");
    }
    let missing = transaction.write_outbox(IssueId(i64::MAX), &[keyed("k", "x")]).await;
    assert!(matches!(missing, Err(IssueError::NotFound { .. })), "{missing:?}");
    assert_eq!(transaction.write_outbox(issue, &[]).await?, []);
    transaction.write_outbox(issue, &[keyed("k", "good")]).await?;
    transaction.commit().await?;
    assert_eq!(texts(&env).await?, ["good"]);
    Ok(())
}

pub async fn rows_of_transactions_and_runs_are_delivered_in_commit_order(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.replied("1", &["run 1"]).await?;
    write(&env, issue, &[keyed("a", "transaction 1")]).await?;
    env.record("1", "next").await?;
    let claimed = env.claim(issue).await?;
    let run = RunCompletion { outbox: vec![reply("run 2")], ..completion(&claimed) };

    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, &[keyed("b", "transaction 2")]).await?;
    let store = Arc::clone(&env.second);
    let mut completing = tokio::spawn(async move {
        // Retry after a lock timeout.
        loop {
            match store.complete(std::slice::from_ref(&run)).await {
                Err(error) if error.is_transient() => {}
                result => return result,
            }
        }
    });
    // The completion waits for the lock; otherwise it would overtake a row that was written before it.
    let overtakes = tokio::time::timeout(Duration::from_millis(200), &mut completing).await;
    assert!(overtakes.is_err(), "{overtakes:?}");
    transaction.commit().await?;
    let completed = completing.await??.remove(0);
    assert!(matches!(completed, CompletionOutcome::Committed { .. }), "{completed:?}");
    assert_eq!(texts(&env).await?, ["run 1", "transaction 1", "transaction 2", "run 2"]);
    Ok(())
}

pub async fn a_row_written_while_the_previous_one_is_settled_is_delivered(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.replied("1", &["first"]).await?;
    let row = env.store.take_outbox("deliverer", 1, TTL).await?.remove(0);
    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, &[keyed("a", "second")]).await?;
    // The first row is settled while the second is not visible yet.
    let store = Arc::clone(&env.second);
    let (id, deliveries, delivery) = (row.id, row.deliveries, OutboxDelivery::Delivered);
    let settlement = OutboxSettlement { id, deliveries, delivery };
    let mut settling = tokio::spawn(async move {
        // Retry after a lock timeout.
        loop {
            match store.settle_outbox(std::slice::from_ref(&settlement)).await {
                Err(error) if error.is_transient() => {}
                result => return result,
            }
        }
    });
    // Long enough for a call that does not wait for the lock.
    let _ = tokio::time::timeout(Duration::from_millis(200), &mut settling).await;
    transaction.commit().await?;
    if !settling.is_finished() {
        settling.await??;
    }
    assert_eq!(texts(&env).await?, ["second"]);
    Ok(())
}

pub async fn a_committed_transaction_wakes_a_waiting_deliverer(env: StoreTestEnv) -> TestResult {
    let issue = env.record("1", "a").await?.issue_id;
    let mut transaction = env.store.begin().await?;
    transaction.write_outbox(issue, &[keyed("k", "x")]).await?;
    let store = Arc::clone(&env.store);
    let waiter = tokio::spawn(async move {
        let started = tokio::time::Instant::now();
        // The first wait may complete for an earlier row, or because LISTEN has started.
        while store.take_outbox("deliverer", 1, TTL).await?.is_empty() {
            store.outbox_wake(Duration::from_secs(60)).await;
        }
        Ok::<_, IssueError>(started.elapsed())
    });
    transaction.commit().await?;
    assert!(waiter.await?? < Duration::from_secs(30));
    Ok(())
}
