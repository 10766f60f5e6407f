//! Opening a store: several processes at once, invalid URLs, and incompatible databases.

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{IssueError, StoreOptions, connect};
use headwater_testkit::{Child, Postgres};
use sqlx::Connection;

use super::{File, open, record};

const PROCESSES: usize = 6;
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn opener() -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let store = open(&std::env::var("STORE_URL")?).await?;
        record(&*store, "42", &std::env::var("STORE_KEY")?).await?;
        println!("OPENED");
        Ok(())
    })
}

/// Starts processes that open the same empty database at once and record one event each.
async fn start_at_once(url: &str) -> Result<()> {
    let keys: Vec<String> = (0..PROCESSES).map(|n| format!("key-{n}")).collect();
    let children = keys
        .iter()
        .map(|key| Child::spawn_self("start::opener", &[("STORE_URL", url), ("STORE_KEY", key)]))
        .collect::<Result<Vec<_>>>()?;
    for child in &children {
        child.line_after("OPENED", TIMEOUT)?;
        assert!(child.wait(TIMEOUT)?.success());
    }
    let report = open(url).await?.check_consistency(10).await?;
    assert_eq!((report.issues, report.recorded), (1, PROCESSES as u64));
    assert_eq!(report.discrepancies, []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn six_processes_started_at_once_share_a_new_sqlite_file() -> Result<()> {
    let file = File::new()?;
    start_at_once(&file.url).await
}

#[tokio::test(flavor = "multi_thread")]
async fn six_processes_started_at_once_share_a_new_postgres_database() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    start_at_once(&database.url()).await?;
    assert_eq!(database.query("SELECT count(*) FROM headwater_migrations")?, "3");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_url_is_distinguished_from_an_unavailable_server() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let text = directory.path().join("notes.txt");
    std::fs::write(&text, "no database, but long enough to be taken for one\n".repeat(50))?;
    let database = Postgres::shared()?.database()?;
    let missing = database.url().replace(database.name(), "nobody_made_this");
    for (url, said) in [
        (missing, "does not exist"),
        (format!("sqlite:{}", text.display()), "not a SQLite database"),
        (format!("sqlite:{}/missing/issues.db", directory.path().display()), "cannot be opened"),
    ] {
        let error = connect(&url, &StoreOptions::default()).await.unwrap_err();
        let IssueError::Invalid { what, problem } = &error else { panic!("{url}: {error}") };
        assert!(what == "the database URL" && problem.contains(said), "{url}: {error}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_events_exist_after_the_store_is_reopened() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        let recorded = record(&*store, "42", "a").await?;
        store.close().await;
        assert!(record(&*store, "42", "b").await.unwrap_err().is_transient());
        let store = open(&url).await?;
        assert_eq!(store.issue(recorded.issue_id).await?.unwrap().pending_events, 1);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_a_newer_version_is_rejected_and_unchanged() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    open(&file.url).await?.close().await;
    let mut sqlite = sqlx::SqliteConnection::connect(&file.url).await?;
    let newer =
        "INSERT INTO headwater_migrations (version, description, success, checksum, execution_time)
        VALUES (99, '', true, '', 0)";
    sqlx::query(newer).execute(&mut sqlite).await?;
    open(&database.url()).await?.close().await;
    database.query(newer)?;
    for url in [file.url.clone(), database.url()] {
        let rejected = connect(&url, &StoreOptions::default()).await;
        assert!(matches!(rejected, Err(IssueError::Schema { .. })), "{rejected:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_with_an_unknown_scheme_is_rejected() -> Result<()> {
    for url in ["", "mysql://x", "postgres://[", "sqlite"] {
        let rejected = connect(url, &StoreOptions::default()).await;
        assert!(matches!(rejected, Err(IssueError::Invalid { .. })), "{url}: {rejected:?}");
    }
    Ok(())
}
