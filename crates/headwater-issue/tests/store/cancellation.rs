//! Cancelled calls: everything confirmed afterwards is committed, on any connection.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures_util::FutureExt;
use headwater_issue::{
    CommitVerifier, DebounceWindow, IssueError, Store, StoreConnection, StoreOptions,
};
use headwater_testkit::{Postgres, Proxy, TestRandom};

use super::{File, event, open, open_with, record};

const DEADLINE: Duration = Duration::from_millis(500);

/// One connection, so that a call uses the connection of the previous call.
fn one_connection() -> StoreOptions {
    StoreOptions { call_deadline: DEADLINE, connections_max: 1, ..StoreOptions::default() }
}

/// Records an event until it is confirmed, like a sender.
async fn confirmed(store: &dyn Store, issue: &str, key: &str) -> Result<()> {
    for _ in 0..60 {
        match record(store, issue, key).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_transient() => tokio::task::yield_now().await,
            Err(error) => return Err(error.into()),
        }
    }
    anyhow::bail!("`{key}` could not be recorded")
}

async fn pending(store: &dyn Store, issue: &str) -> Result<u64> {
    let issue = store.find_issue("main", "project", issue).await?;
    Ok(issue.map_or(0, |issue| issue.pending_events))
}

async fn execute(
    connection: StoreConnection<'_>,
    statement: &'static str,
) -> Result<(), sqlx::Error> {
    match connection {
        StoreConnection::Postgres(postgres) => {
            sqlx::query(statement).execute(postgres).await.map(|_| ())
        }
        StoreConnection::Sqlite(sqlite) => sqlx::query(statement).execute(sqlite).await.map(|_| ()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_confirmed_after_an_abandoned_begin_is_committed() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let direct = open(&database.url()).await?;
    let proxy = Proxy::start(Postgres::shared()?.addr())?;
    let store = open_with(&database.url_at(proxy.addr()), &one_connection()).await?;
    record(&*store, "1", "before").await?;

    proxy.hold("BEGIN", 1, DEADLINE + Duration::from_millis(300))?;
    let abandoned = store.begin().await;
    assert!(abandoned.as_ref().is_err_and(IssueError::is_transient), "{abandoned:?}");
    assert_eq!(proxy.held(), 1);
    proxy.heal()?;

    confirmed(&*store, "1", "after").await?;
    let issue = record(&*direct, "1", "last").await?.issue_id;
    assert_eq!(direct.issue(issue).await?.unwrap().pending_events, 3, "none was rolled back");
    Ok(())
}

/// Drops calls of every kind after a random time while replies are delayed, and confirms events in between.
async fn drops_calls_at_random(store: &Arc<dyn Store>, random: &mut TestRandom) -> Result<u64> {
    let mut count = 0;
    for round in 0..120_u32 {
        let (issue, key) = (format!("{}", round % 7), format!("{round}"));
        let pause = Duration::from_micros(random.between(0..4_000));
        let (calling, kind) = (Arc::clone(store), random.between(0..4));
        let abandoned = async move {
            match kind {
                0 => drop(calling.begin().await),
                1 => drop(record(&*calling, "abandoned", &key).await),
                2 => drop(calling.check_consistency(10).await),
                _ => {
                    let Ok(mut transaction) = calling.begin().await else { return };
                    let event = event("abandoned", &key);
                    drop(transaction.record(&[event], &DebounceWindow::default()).await);
                    drop(execute(transaction.connection(), "SELECT 1").await);
                    drop(transaction.commit().await);
                }
            }
        };
        let _ = tokio::time::timeout(pause, abandoned).await;
        confirmed(&**store, &issue, &format!("confirmed {round}")).await?;
        count += 1;
    }
    Ok(count)
}

async fn counted(store: &dyn Store) -> Result<u64> {
    let mut sum = 0;
    for issue in 0..7 {
        sum += pending(store, &issue.to_string()).await?;
    }
    Ok(sum)
}

#[tokio::test(flavor = "multi_thread")]
async fn events_confirmed_between_calls_that_are_dropped_at_random_are_committed_on_postgres()
-> Result<()> {
    let mut random = TestRandom::for_test();
    let database = Postgres::shared()?.database()?;
    let direct = open(&database.url()).await?;
    let proxy = Proxy::start(Postgres::shared()?.addr())?;
    let options = StoreOptions { connections_max: 2, ..StoreOptions::default() };
    let store = open_with(&database.url_at(proxy.addr()), &options).await?;
    proxy.delay(Duration::from_micros(700))?;
    let confirmed = drops_calls_at_random(&store, &mut random).await?;
    store.close().await;
    assert_eq!(counted(&*direct).await?, confirmed);
    assert!(direct.check_consistency(10).await?.is_consistent());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn events_confirmed_between_calls_that_are_dropped_at_random_are_committed_on_sqlite()
-> Result<()> {
    let mut random = TestRandom::for_test();
    let file = File::new()?;
    let store = open(&file.url).await?;
    let confirmed = drops_calls_at_random(&store, &mut random).await?;
    store.close().await;
    let store = open(&file.url).await?;
    assert_eq!(counted(&*store).await?, confirmed);
    assert!(store.check_consistency(10).await?.is_consistent());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commit_of_a_failed_transaction_is_an_error() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        // On PostgreSQL a transaction with a failed statement is rolled back by `COMMIT`, which reports no error.
        let mut transaction = store.begin().await?;
        transaction.record(&[event("1", "a")], &DebounceWindow::default()).await.remove(0)?;
        let failed = execute(transaction.connection(), "SELECT * FROM no_such_table").await;
        assert!(failed.is_err());
        let committed = transaction.commit().await.is_ok();
        assert_eq!(pending(&*store, "1").await?, u64::from(committed), "{url}");

        // A transaction that the caller ended is not confirmed.
        let mut transaction = store.begin().await?;
        transaction.record(&[event("2", "b")], &DebounceWindow::default()).await.remove(0)?;
        execute(transaction.connection(), "ROLLBACK").await?;
        assert!(transaction.commit().await.is_err(), "{url}");
        assert_eq!(pending(&*store, "2").await?, 0, "{url}");
        record(&*store, "3", "c").await?;
        assert_eq!(pending(&*store, "3").await?, 1, "{url}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_with_a_cancelled_call_cannot_be_committed() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        let debounce = DebounceWindow::default();
        // So many that the first poll hardly ever completes the call. If it does, because this thread had to wait for a processor, it
        // is tried again.
        let cancelled: Vec<_> = (0..200).map(|n| event("1", &format!("b{n}"))).collect();
        let mut tries = 0;
        let mut transaction = loop {
            let mut transaction = store.begin().await?;
            transaction.record(&[event("1", "a")], &debounce).await.remove(0)?;
            if transaction.record(&cancelled, &debounce).now_or_never().is_none() {
                break transaction;
            }
            tries += 1;
            assert!(tries < 100, "{url}: no call is cancelled");
        };
        let refused = transaction.record(&[event("1", "c")], &debounce).await.remove(0);
        assert!(refused.is_err_and(|error| error.is_transient()), "{url}");
        assert!(transaction.commit().await.is_err(), "{url}");
        assert_eq!(pending(&*store, "1").await?, 0, "{url}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_left_inside_a_transaction_confirms_nothing() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let direct = open(&database.url()).await?;
    let store = open_with(&database.url(), &one_connection()).await?;
    // Like after a cancelled BEGIN: sqlx does not know of the transaction.
    let mut reading = store.read_connection().await?;
    execute(reading.connection(), "BEGIN").await?;
    reading.release().await;
    confirmed(&*store, "1", "a").await?;
    assert_eq!(pending(&*direct, "1").await?, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commit_verifier_finds_a_confirmed_event_that_is_not_committed() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        let commit_verifier = CommitVerifier::default();
        assert_eq!(commit_verifier.verify_once(&*store).await?, []);
        let committed = record(&*store, "1", "a").await?.event_log_id;
        let mut transaction = store.begin().await?;
        let recorded = transaction.record(&[event("2", "b")], &DebounceWindow::default()).await;
        let uncommitted = recorded.into_iter().next().unwrap()?.event_log_id;
        commit_verifier.add(committed);
        commit_verifier.add(uncommitted);
        assert_eq!(commit_verifier.verify_once(&*store).await?, [uncommitted], "{url}");
        transaction.commit().await?;
        commit_verifier.add(uncommitted);
        assert_eq!(commit_verifier.verify_once(&*store).await?, [], "{url}");
    }
    Ok(())
}
