//! Events recorded inside a transaction of the caller.

use anyhow::Result;
use headwater_issue::{IssueError, NewEvent, Quiet, postgres, sqlite};
use headwater_testkit::Postgres;
use sqlx::{Connection, PgConnection, SqliteConnection};

use super::{File, event, open, record};

fn with_bad_ones() -> Vec<NewEvent> {
    vec![
        event("1", "a"),
        NewEvent { integration: "nobody".into(), ..event("1", "x") },
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
        let recorded = postgres::record_in(&mut transaction, &events, &Quiet::default()).await;
        check(&recorded);
        assert!(recorded[4].as_ref().is_ok_and(|one| one.duplicate));
        sqlx::query("INSERT INTO mine VALUES (1)").execute(&mut *transaction).await?;
        assert_eq!(store.audit(10).await?.recorded, 1, "nothing shows before the commit");
        if commits {
            transaction.commit().await?;
        } else {
            transaction.rollback().await?;
        }
        let expected = if commits { (3, "1") } else { (1, "0") };
        assert_eq!(store.audit(10).await?.recorded, expected.0);
        assert_eq!(database.query("SELECT count(*) FROM mine")?, expected.1);
    }
    assert_eq!(store.audit(10).await?.discrepancies, []);
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
        let recorded = sqlite::record_in(&mut transaction, &events, &Quiet::default()).await;
        check(&recorded);
        assert!(recorded[4].as_ref().is_ok_and(|one| one.duplicate));
        sqlx::query("INSERT INTO mine VALUES (1)").execute(&mut *transaction).await?;
        assert_eq!(store.audit(10).await?.recorded, 1, "nothing shows before the commit");
        if commits {
            transaction.commit().await?;
        } else {
            transaction.rollback().await?;
        }
        assert_eq!(store.audit(10).await?.recorded, if commits { 3 } else { 1 });
    }
    let rows = sqlx::query("SELECT n FROM mine").fetch_all(&mut connection).await?;
    assert_eq!(rows.len(), 1);
    assert_eq!(store.audit(10).await?.discrepancies, []);
    Ok(())
}
