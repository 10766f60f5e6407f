//! Databases that exist already: those of other migrations, of before there were checksums, of before an order changed.

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{IssueError, OutboxDelivery, OutboxSettlement, Store, StoreOptions, connect};
use headwater_testkit::{Database, Postgres};
use sqlx::{AssertSqlSafe, Connection, Row};

use super::{File, open, record};

/// One that is there before the store is opened.
enum Before {
    Sqlite(File),
    Postgres(Database),
}

impl Before {
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

const COUNT: &str = "SELECT count(*) FROM headwater_migration_checksums";

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_other_migrations_made_is_refused_and_left_alone() -> Result<()> {
    for before in Before::both()? {
        open(&before.url()).await?.close().await;
        before
            .run("UPDATE headwater_migration_checksums SET sha256 = 'x' WHERE version = 2")
            .await?;
        before.run("DELETE FROM headwater_migration_checksums WHERE version = 1").await?;
        let count = before.ask(COUNT).await?;
        let refused = connect(&before.url(), &StoreOptions::default()).await;
        let Err(error @ IssueError::Schema { .. }) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("migration 2"), "{error}");
        assert_eq!(before.ask(COUNT).await?, count, "nothing is written down");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_before_there_were_checksums_gets_them_once() -> Result<()> {
    for before in Before::both()? {
        let store = open(&before.url()).await?;
        let recorded = record(&*store, "42", "a").await?;
        store.close().await;
        let count = before.ask(COUNT).await?;
        before.run("DROP TABLE headwater_migration_checksums").await?;
        for _ in 0..2 {
            let store = open(&before.url()).await?;
            assert_eq!(store.issue(recorded.issue_id).await?.unwrap().pending_events, 1);
            store.close().await;
            assert_eq!(before.ask(COUNT).await?, count);
        }
    }
    Ok(())
}

/// Delivers all that can go now, and what can go then, to the end. Returns the keys in order.
async fn deliver_all(store: &dyn Store) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    loop {
        let rows = store.take_outbox("d", 10, Duration::from_secs(60)).await?;
        if rows.is_empty() {
            return Ok(keys);
        }
        for row in rows {
            keys.push(row.idempotency_key.clone());
            let (id, deliveries, delivery) = (row.id, row.deliveries, OutboxDelivery::Delivered);
            store.settle_outbox(&[OutboxSettlement { id, deliveries, delivery }]).await?;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waited_behind_a_row_of_another_kind_goes_after_an_upgrade() -> Result<()> {
    for before in Before::both()? {
        let store = open(&before.url()).await?;
        let issues = [record(&*store, "1", "a").await?, record(&*store, "2", "b").await?];
        let [one, two] = issues.map(|recorded| recorded.issue_id);
        let is_sqlite = before.url().starts_with("sqlite:");
        store.close().await;
        // As it was: one order for all rows of an issue, whatever their kind.
        let (version, now) = if is_sqlite { (1, "1") } else { (2, "now()") };
        let row = |key: &str, issue: String, kind: &str, status: &str| {
            format!("('{key}', {issue}, '{kind}', '', '{{}}', '{status}', {now}, {now})")
        };
        let rows = [
            row("1", one.to_string(), "reply", "pending"),
            row("2", one.to_string(), "event", "waiting"),
            row("3", one.to_string(), "event", "waiting"),
            row("4", one.to_string(), "reply", "waiting"),
            row("5", two.to_string(), "event", "waiting"),
            row("6", two.to_string(), "reply", "pending"),
        ];
        let old = format!(
            "INSERT INTO outbox (idempotency_key, issue_id, kind, target, payload, status, due_at, created_at)
             VALUES {};
             DROP TABLE headwater_migration_checksums;
             DELETE FROM headwater_migrations WHERE version > {version};
             ALTER TABLE issues DROP COLUMN completed_event_log_id;
             ALTER TABLE outbox DROP COLUMN newest_event_log_id;
             DROP TABLE headwater_clock;
             DROP INDEX idx_outbox_order;
             CREATE INDEX idx_outbox_order ON outbox (issue_id, id) WHERE status IN ('waiting', 'pending', 'taken')",
            rows.join(", ")
        );
        before.run(&old).await?;
        if is_sqlite {
            // What SQLite cannot create only if it is missing.
            let newer = "DROP TABLE event_log_originals; DROP TRIGGER outbox_integration;
                 DROP INDEX idx_outbox_target; ALTER TABLE outbox DROP COLUMN integration_id";
            before.run(newer).await?;
        }

        let store = open(&before.url()).await?;
        let statuses = "SELECT sum(CASE status WHEN 'pending' THEN 1 ELSE 10 END) FROM outbox";
        assert_eq!(before.ask(statuses).await?, "24", "of each kind and issue one can go");
        let mut keys = deliver_all(&*store).await?;
        let of = |wanted: [&str; 2]| {
            keys.iter().filter(|key| wanted.contains(&key.as_str())).cloned().collect::<Vec<_>>()
        };
        assert_eq!(
            (of(["2", "3"]), of(["1", "4"])),
            (vec!["2".into(), "3".into()], vec!["1".into(), "4".into()])
        );
        keys.sort();
        assert_eq!(keys, ["1", "2", "3", "4", "5", "6"]);
    }
    Ok(())
}
