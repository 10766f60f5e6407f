//! Databases that exist already: with other migrations, with newer functions, with the tables of an application.

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{IssueError, Migration, StoreOptions, WorkerConfig, connect};
use headwater_testkit::{Database, Postgres};
use sqlx::{AssertSqlSafe, Connection, Row};

use super::{File, open};

/// A database that exists before the store is opened.
enum Existing {
    Sqlite(File),
    Postgres(Database),
}

impl Existing {
    fn both() -> Result<[Self; 2]> {
        Ok([Self::Sqlite(File::new()?), Self::Postgres(Postgres::shared()?.database()?)])
    }

    fn url(&self) -> String {
        match self {
            Self::Sqlite(file) => file.url.clone(),
            Self::Postgres(database) => database.url(),
        }
    }

    /// Carries out statements as another program would.
    async fn run(&self, sql: &str) -> Result<()> {
        match self {
            Self::Sqlite(file) => {
                let mut sqlite = sqlx::SqliteConnection::connect(&file.url).await?;
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut sqlite).await?;
                sqlite.close().await?;
            }
            Self::Postgres(database) => drop(database.query(sql)?),
        }
        Ok(())
    }

    /// The numbers that a query gives, as text.
    async fn ask(&self, sql: &str) -> Result<String> {
        match self {
            Self::Sqlite(file) => {
                let mut sqlite = sqlx::SqliteConnection::connect(&file.url).await?;
                let row = sqlx::query(AssertSqlSafe(sql)).fetch_one(&mut sqlite).await?;
                let number: i64 = row.try_get(0)?;
                sqlite.close().await?;
                Ok(number.to_string())
            }
            Self::Postgres(database) => database.query(sql),
        }
    }
}

const COUNT: &str = "SELECT count(*) FROM headwater_migrations";

#[tokio::test(flavor = "multi_thread")]
async fn a_database_with_another_text_of_a_migration_is_refused_and_unchanged() -> Result<()> {
    for existing in Existing::both()? {
        open(&existing.url()).await?.close().await;
        existing.run("UPDATE headwater_migrations SET checksum = '' WHERE version = 1").await?;
        let refused = connect(&existing.url(), &StoreOptions::default()).await;
        let Err(error @ IssueError::Schema { .. }) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("migration 1"), "{error}");
        assert_eq!(existing.ask(COUNT).await?, "3");
    }
    Ok(())
}

const NOTES: Migration = Migration {
    version: 7001,
    description: "notes",
    postgres: "CREATE TABLE notes (id bigint)",
    sqlite: "CREATE TABLE notes (id INTEGER)",
};
const TITLES: Migration = Migration {
    version: 7002,
    description: "titles",
    postgres: "ALTER TABLE notes ADD COLUMN title text",
    sqlite: "ALTER TABLE notes ADD COLUMN title TEXT",
};

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_an_application_are_migrated_in_order_and_refused_if_newer() -> Result<()> {
    for existing in Existing::both()? {
        let store = open(&existing.url()).await?;
        store.migrate(&[NOTES]).await?;
        store.migrate(&[NOTES, TITLES]).await?;
        store.migrate(&[NOTES, TITLES]).await?;
        existing.run("INSERT INTO notes (id, title) VALUES (1, 'a')").await?;
        assert_eq!(existing.ask(COUNT).await?, "5");

        // A program of the version before.
        let refused = store.migrate(&[NOTES]).await;
        let Err(error @ IssueError::Schema { .. }) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("version 7002"), "{error}");
        let changed = Migration { postgres: "SELECT 1", sqlite: "SELECT 1", ..NOTES };
        let refused = store.migrate(&[changed, TITLES]).await;
        let Err(error @ IssueError::Schema { .. }) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("migration 7001"), "{error}");
        store.close().await;

        // A program that does not know these tables.
        open(&existing.url()).await?.close().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_fails_leaves_nothing() -> Result<()> {
    let broken = "CREATE TABLE half (id bigint); CREATE TABLE notes (id bigint)";
    let broken = Migration { postgres: broken, sqlite: broken, ..TITLES };
    for existing in Existing::both()? {
        let store = open(&existing.url()).await?;
        store.migrate(&[NOTES, broken]).await.unwrap_err();
        assert_eq!(existing.ask(COUNT).await?, "3");
        existing.run("CREATE TABLE half (id bigint); CREATE TABLE notes (id bigint)").await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_are_installed_anew_unless_the_database_has_newer_ones() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    open(&database.url()).await?.close().await;
    let break_functions = |revision: i64| {
        // One that opening a store does not call.
        database.query("CREATE OR REPLACE FUNCTION headwater_interval(bigint) RETURNS interval LANGUAGE sql AS 'SELECT NULL::interval'")?;
        database
            .query(&format!("UPDATE headwater_functions SET revision = {revision}, sha256 = 'x'"))
    };
    let is_broken = || database.query("SELECT headwater_interval(1) IS NULL");
    break_functions(0)?;
    open(&database.url()).await?.close().await;
    assert_eq!(is_broken()?, "f");
    break_functions(1000)?;
    open(&database.url()).await?.close().await;
    assert_eq!(
        (
            is_broken()?.as_str(),
            database.query("SELECT revision FROM headwater_functions")?.as_str()
        ),
        ("t", "1000")
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_a_build_before_the_first_release_is_rejected() -> Result<()> {
    for existing in Existing::both()? {
        if let Existing::Sqlite(file) = &existing {
            std::fs::write(file.url.trim_start_matches("sqlite:"), "")?;
        }
        existing.run("CREATE TABLE headwater_migrations (version bigint)").await?;
        existing.run("CREATE TABLE headwater_migration_checksums (version bigint)").await?;
        let rejected = connect(&existing.url(), &StoreOptions::default()).await;
        let Err(error @ IssueError::Schema { .. }) = rejected else { panic!("{rejected:?}") };
        assert!(error.to_string().contains("create a new database"), "{error}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_of_an_application_ascend_within_its_own_range() -> Result<()> {
    let version = |version| Migration { version, ..NOTES };
    for existing in Existing::both()? {
        let store = open(&existing.url()).await?;
        let lists =
            [&[][..], &[version(2)], &[TITLES, NOTES], &[NOTES, NOTES], &[NOTES, version(8001)]];
        for list in lists {
            let rejected = store.migrate(list).await;
            assert!(matches!(rejected, Err(IssueError::Invalid { .. })), "{rejected:?}");
        }
        assert_eq!(existing.ask(COUNT).await?, "3");
    }
    Ok(())
}

/// Rows that every run and every heartbeat updates: free space in the pages keeps those updates out of the indexes, and
/// autovacuum does not wait for a fifth of the table. Without a fill factor, pages are filled.
#[tokio::test(flavor = "multi_thread")]
async fn tables_that_are_updated_often_have_room_in_their_pages_and_are_vacuumed_early()
-> Result<()> {
    let database = Postgres::shared()?.database()?;
    open(&database.url()).await?.close().await;
    let found = database.query(
        "SELECT c.relname, option.option_name, option.option_value
         FROM pg_class c, pg_options_to_table(c.reloptions) option
         WHERE c.relname IN ('issues', 'event_logs', 'outbox', 'workers') AND c.relkind = 'r'
         ORDER BY 1, 2",
    )?;
    let expected = [
        "event_logs|autovacuum_analyze_scale_factor|0.02",
        "event_logs|autovacuum_vacuum_scale_factor|0.02",
        "issues|autovacuum_analyze_scale_factor|0.05",
        "issues|autovacuum_vacuum_scale_factor|0.02",
        "issues|fillfactor|70",
        "outbox|autovacuum_analyze_scale_factor|0.05",
        "outbox|autovacuum_vacuum_scale_factor|0.02",
        "outbox|fillfactor|80",
        "workers|autovacuum_vacuum_scale_factor|0",
        "workers|autovacuum_vacuum_threshold|100",
        "workers|fillfactor|50",
    ];
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
    // How often each running issue and each worker are updated.
    assert_eq!(WorkerConfig::default().heartbeat_every, Duration::from_secs(15));
    Ok(())
}

/// A migration of a large file may take longer than a call.
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_on_sqlite_has_no_deadline_of_a_call() -> Result<()> {
    const SLOW: Migration = Migration {
        version: 2001,
        description: "many rows",
        postgres: "SELECT 1",
        sqlite: "CREATE TABLE counted AS WITH RECURSIVE numbers (n) AS
             (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 20000000) SELECT count(*) AS n FROM numbers",
    };
    let call_deadline = Duration::from_secs(1);
    let options = StoreOptions { call_deadline, ..Default::default() };
    let store = connect("sqlite::memory:", &options).await?;
    let start = std::time::Instant::now();
    store.migrate(&[SLOW]).await?;
    assert!(start.elapsed() > call_deadline, "too fast to show anything");
    Ok(())
}
