//! Cost of taking outbox rows with a large blocked backlog.

use std::time::Duration;

use anyhow::Result;
use headwater_issue::StoreOptions;
use headwater_testkit::Postgres;
use sqlx::Row;

use super::{File, open_with, record};

/// Rows that wait behind a row in backoff.
const BLOCKED: i64 = 100_000;

#[tokio::test(flavor = "multi_thread")]
async fn the_cost_of_taking_rows_does_not_depend_on_blocked_rows() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let options =
            StoreOptions { call_deadline: Duration::from_secs(120), ..StoreOptions::default() };
        let store = open_with(&url, &options).await?;
        let issue = record(&*store, "1", "a").await?.issue_id;
        let mut transaction = store.begin().await?;
        let row = |n: i64| headwater_issue::KeyedOutboxRow {
            key: n.to_string(),
            row: headwater_issue::NewOutboxRow {
                kind: headwater_issue::OutboxKind::Reply,
                target: String::new(),
                payload: "{}".into(),
            },
        };
        transaction.write_outbox(issue, &[row(0), row(1)]).await?;
        transaction.commit().await?;
        let head = store.take_outbox("d", 1, Duration::from_secs(60)).await?.remove(0);
        let delivery = headwater_issue::OutboxDelivery::Retry {
            after: Duration::from_secs(3600),
            error: "busy".into(),
        };
        let (id, deliveries) = (head.id, head.deliveries);
        let settlement = headwater_issue::OutboxSettlement { id, deliveries, delivery };
        store.settle_outbox(&[settlement]).await?;

        let before = cost(&*store).await?;
        let many = format!(
            "INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, created_at)
             WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {BLOCKED})
             SELECT o.issue_id, o.integration_id, o.kind, o.target, o.idempotency_key || n.n, o.payload, o.status, o.due_at, o.created_at
             FROM n, outbox o WHERE o.status = 'waiting'"
        );
        let mut transaction = store.begin().await?;
        match transaction.connection() {
            headwater_issue::StoreConnection::Postgres(connection) => {
                sqlx::query(sqlx::AssertSqlSafe(many)).execute(connection).await?;
            }
            headwater_issue::StoreConnection::Sqlite(connection) => {
                sqlx::query(sqlx::AssertSqlSafe(many)).execute(connection).await?;
            }
            other => panic!("{other:?}"),
        }
        transaction.commit().await?;
        assert_eq!(store.backlog().await?.outbox_pending, 2 + BLOCKED as u64);
        let after = cost(&*store).await?;
        println!("{before} before, {after} with {BLOCKED} rows blocked");
        assert!(after * 4 <= before * 5, "{before} became {after}");
        assert!(store.take_outbox("d", 10, Duration::from_secs(60)).await?.is_empty());
    }
    Ok(())
}

/// Cost of a take: pages on PostgreSQL, visited rows on SQLite. Independent of the load of the machine.
async fn cost(store: &dyn headwater_issue::Store) -> Result<i64> {
    match store.read_connection().await?.connection() {
        headwater_issue::StoreConnection::Postgres(connection) => {
            let look =
                "EXPLAIN (ANALYZE, BUFFERS) SELECT * FROM headwater_take_outbox('d', 32, 60000, 32, 32,
                '{}', '{}', '{}', '{}', '{}', '{}', '{}')";
            let mut pages = i64::MAX;
            // The first takes of a connection, and the first after changed statistics, also read the catalog.
            for _ in 0..4 {
                let rows = sqlx::query(look).fetch_all(&mut *connection).await?;
                let lines = rows.iter().map(|row| row.try_get::<String, _>(0));
                let lines = lines.collect::<Result<Vec<_>, _>>()?;
                let line = lines.iter().find(|line| line.contains("Buffers: shared")).unwrap();
                let numbers = line.split(['=', ' ']).filter_map(|word| word.parse::<i64>().ok());
                pages = pages.min(numbers.sum());
            }
            Ok(pages)
        }
        headwater_issue::StoreConnection::Sqlite(connection) => {
            let rows = sqlx::query(
                "SELECT id FROM outbox WHERE status IN ('pending', 'taken') AND due_at <= 9e15",
            )
            .fetch_all(connection)
            .await?;
            Ok(rows.len() as i64)
        }
        other => panic!("{other:?}"),
    }
}
