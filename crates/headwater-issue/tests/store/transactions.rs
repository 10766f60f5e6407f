//! Caller's transactions: events, outbox rows and the caller's tables change together.

use anyhow::Result;
use headwater_issue::{
    DebounceWindow, IssueError, KeyedOutboxRow, NewEvent, NewOutboxRow, OutboxKind, Store,
    postgres, sqlite,
};
use headwater_testkit::Postgres;
use sqlx::{Connection, PgConnection, Row, SqliteConnection};

use super::{File, event, open, record};

fn with_bad_ones() -> Vec<NewEvent> {
    vec![
        event("1", "a"),
        NewEvent { integration: "unknown".into(), ..event("1", "x") },
        NewEvent { payload: "{".into(), ..event("1", "y") },
        NewEvent { payload: "{}".into(), ..event("1", "old") },
        event("1", "old"),
        event("2", "b"),
    ]
}

fn check(recorded: &[headwater_issue::Result<headwater_issue::Recorded>]) {
    assert!(recorded[0].as_ref().is_ok_and(|one| !one.duplicate && one.nudge), "{recorded:?}");
    assert!(matches!(recorded[1], Err(IssueError::UnknownIntegration { .. })), "{recorded:?}");
    assert!(matches!(recorded[2], Err(IssueError::Invalid { .. })), "{recorded:?}");
    assert!(matches!(recorded[3], Err(IssueError::DedupConflict { .. })), "{recorded:?}");
    assert!(recorded[5].is_ok(), "{recorded:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_the_callers_own_rows_are_committed_together_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let store = open(&database.url()).await?;
    record(&*store, "9", "old").await?;
    let mut events = with_bad_ones();
    events[4] = event("9", "old");
    database.query("CREATE TABLE mine (n int)")?;
    let mut connection = PgConnection::connect(&database.url()).await?;
    for commits in [false, true] {
        let mut transaction = connection.begin().await?;
        let recorded =
            postgres::record_in(&mut transaction, &events, &DebounceWindow::default()).await;
        check(&recorded);
        assert!(recorded[4].as_ref().is_ok_and(|one| one.duplicate));
        sqlx::query("INSERT INTO mine VALUES (1)").execute(&mut *transaction).await?;
        assert_eq!(
            store.check_consistency(10).await?.recorded,
            1,
            "nothing shows before the commit"
        );
        if commits {
            transaction.commit().await?;
        } else {
            transaction.rollback().await?;
        }
        let expected = if commits { (3, "1") } else { (1, "0") };
        assert_eq!(store.check_consistency(10).await?.recorded, expected.0);
        assert_eq!(database.query("SELECT count(*) FROM mine")?, expected.1);
    }
    assert_eq!(store.check_consistency(10).await?.discrepancies, []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_the_callers_own_rows_are_committed_together_on_sqlite() -> Result<()> {
    let file = File::new()?;
    let store = open(&file.url).await?;
    record(&*store, "9", "old").await?;
    let mut events = with_bad_ones();
    events[4] = event("9", "old");
    let mut connection = SqliteConnection::connect(&file.url).await?;
    sqlx::query("CREATE TABLE mine (n int)").execute(&mut connection).await?;
    for commits in [false, true] {
        let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
        let recorded =
            sqlite::record_in(&mut transaction, &events, &DebounceWindow::default()).await;
        check(&recorded);
        assert!(recorded[4].as_ref().is_ok_and(|one| one.duplicate));
        sqlx::query("INSERT INTO mine VALUES (1)").execute(&mut *transaction).await?;
        assert_eq!(
            store.check_consistency(10).await?.recorded,
            1,
            "nothing shows before the commit"
        );
        if commits {
            transaction.commit().await?;
        } else {
            transaction.rollback().await?;
        }
        assert_eq!(store.check_consistency(10).await?.recorded, if commits { 3 } else { 1 });
    }
    let rows = sqlx::query("SELECT n FROM mine").fetch_all(&mut connection).await?;
    assert_eq!(rows.len(), 1);
    assert_eq!(store.check_consistency(10).await?.discrepancies, []);
    Ok(())
}

fn reply(key: &str, text: &str) -> KeyedOutboxRow {
    let (target, payload) = ("comment".to_owned(), format!(r#"{{"text":"{text}"}}"#));
    KeyedOutboxRow {
        key: key.into(),
        row: NewOutboxRow { kind: OutboxKind::Reply, target, payload },
    }
}

/// Executes a statement on the connection of a transaction.
async fn execute(
    transaction: &mut dyn headwater_issue::Transaction,
    statement: &'static str,
) -> Result<()> {
    match transaction.connection() {
        headwater_issue::StoreConnection::Postgres(postgres) => {
            sqlx::query(statement).execute(postgres).await?;
        }
        headwater_issue::StoreConnection::Sqlite(sqlite) => {
            sqlx::query(statement).execute(sqlite).await?;
        }
        other => anyhow::bail!("{other:?}"),
    }
    Ok(())
}

async fn count(store: &dyn Store, statement: &'static str) -> Result<i64> {
    let mut reading = store.read_connection().await?;
    let count = match reading.connection() {
        headwater_issue::StoreConnection::Postgres(connection) => {
            sqlx::query(statement).fetch_one(connection).await?.try_get(0)?
        }
        headwater_issue::StoreConnection::Sqlite(connection) => {
            sqlx::query(statement).fetch_one(connection).await?.try_get(0)?
        }
        other => anyhow::bail!("{other:?}"),
    };
    reading.release().await;
    Ok(count)
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_the_caller_and_of_the_store_change_together() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        let mut transaction = store.begin().await?;
        execute(&mut *transaction, "CREATE TABLE tickets (id TEXT PRIMARY KEY)").await?;
        transaction.commit().await?;
        for commits in [false, true] {
            let mut transaction = store.begin().await?;
            execute(&mut *transaction, "INSERT INTO tickets VALUES ('42')").await?;
            let recorded =
                transaction.record(&[event("42", "a")], &DebounceWindow::default()).await;
            let issue = recorded[0].as_ref().map_err(Clone::clone)?.issue_id;
            transaction.write_outbox(issue, &[reply("created", "hello")]).await?;
            let seen = count(&*store, "SELECT count(*) FROM tickets").await?;
            assert_eq!((seen, store.backlog().await?.outbox_pending), (0, 0), "not yet");
            if commits {
                transaction.commit().await?;
            }
        }
        assert_eq!(count(&*store, "SELECT count(*) FROM tickets").await?, 1);
        let rows = store.take_outbox("deliverer", 10, std::time::Duration::from_secs(60)).await?;
        assert_eq!(rows.len(), 1);
        assert!(rows[0].idempotency_key.ends_with(":created"), "{rows:?}");
        assert_eq!(store.check_consistency(10).await?.recorded, 1);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn outbox_rows_are_written_on_a_connection_of_the_caller() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    let rows = [reply("a", "one"), reply("b", "two")];
    let store = open(&file.url).await?;
    let issue = record(&*store, "1", "a").await?.issue_id;
    let mut connection = SqliteConnection::connect(&file.url).await?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    assert_eq!(sqlite::outbox_in(&mut transaction, issue, &rows).await?.len(), 2);
    transaction.commit().await?;
    assert_eq!(store.backlog().await?.outbox_pending, 2);

    let store = open(&database.url()).await?;
    let issue = record(&*store, "1", "a").await?.issue_id;
    let mut connection = PgConnection::connect(&database.url()).await?;
    let mut transaction = connection.begin().await?;
    assert_eq!(postgres::outbox_in(&mut transaction, issue, &rows).await?.len(), 2);
    transaction.commit().await?;
    assert_eq!(store.backlog().await?.outbox_pending, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_transaction_is_terminated_by_the_server() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let patient = open(&database.url()).await?;
    let options = headwater_issue::StoreOptions {
        call_deadline: std::time::Duration::from_secs(2),
        ..headwater_issue::StoreOptions::default()
    };
    let store = super::open_with(&database.url(), &options).await?;
    let issue = record(&*store, "1", "a").await?.issue_id;
    let mut forgotten = store.begin().await?;
    forgotten.write_outbox(issue, &[reply("a", "never")]).await?;
    // The issue is locked until the server terminates the transaction.
    let mut recorded = record(&*patient, "1", "b").await;
    for _ in 0..60 {
        if recorded.is_ok() {
            break;
        }
        recorded = record(&*patient, "1", "b").await;
    }
    recorded?;
    assert!(forgotten.commit().await.unwrap_err().is_transient());
    assert_eq!(patient.backlog().await?.outbox_pending, 0);
    Ok(())
}
