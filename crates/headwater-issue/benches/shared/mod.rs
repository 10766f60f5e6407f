//! Shared by the benchmarks: databases, events, clients and the report.

mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Result;
use headwater_issue::{NewEvent, Store, StoreOptions, connect};
use headwater_testkit::Postgres;
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use tokio::task::JoinSet;

pub(crate) use self::raw::Raw;

pub(crate) const CLIENTS: usize = 64;
pub(crate) const ROUNDS: usize = 3;
pub(crate) const ISSUES: usize = 512;

/// Measures a store and raw SQL on the same tables, on PostgreSQL and SQLite.
pub(crate) fn on_each_store(
    measure: impl AsyncFn(&str, Arc<dyn Store>, Raw) -> Result<()>,
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let postgres = Postgres::start()?;
        let database = postgres.database()?;
        let store = connect(&database.url(), &StoreOptions::default()).await?;
        store.ensure_integration("main", "github").await?;
        let pool = PgPoolOptions::new()
            .max_connections(CLIENTS as u32)
            .test_before_acquire(false)
            .connect(&database.url())
            .await?;
        measure("postgres", store, Raw::Postgres(pool)).await?;

        let directory = tempfile::tempdir()?;
        let file = directory.path().join("issues.db");
        let url = format!("sqlite:{}", file.display());
        let store = connect(&url, &StoreOptions::default()).await?;
        store.ensure_integration("main", "github").await?;
        let options = SqliteConnectOptions::new()
            .filename(&file)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true);
        // One connection: SQLite has one writer, and a queue is faster than polling for the lock.
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .test_before_acquire(false)
            .connect_with(options)
            .await?;
        measure("sqlite", store, Raw::Sqlite(pool)).await
    })
}

/// Number of events per round.
pub(crate) fn events_of_a_round() -> usize {
    let events = std::env::var("HEADWATER_BENCH_EVENTS").ok().and_then(|text| text.parse().ok());
    events.unwrap_or(4000)
}

pub(crate) fn report(store: &str, path: &str, ours: f64, raw: f64, wanted: f64) {
    let ratio = ours / raw;
    let status = if ratio >= wanted { "reached" } else { "MISSED" };
    println!(
        "{store:9} {path:20} {ours:8.0}/s  raw {raw:8.0}/s  ratio {ratio:5.2} (to reach {wanted}: {status})"
    );
}

/// Event number `n` of one of `issues` issues. Issues other than the default number belong to the prefix.
pub(crate) fn event(prefix: &str, n: usize, issues: usize) -> NewEvent {
    NewEvent {
        integration: "main".into(),
        external_project_id: if issues == ISSUES { "project".into() } else { prefix.into() },
        external_issue_id: (n % issues).to_string(),
        source: "github".into(),
        event_type: "comment".into(),
        dedup_key: Some(format!("{prefix}-{n}")),
        trace: None,
        payload: format!(r#"{{"action":"created","number":{n},"body":"{}"}}"#, "x".repeat(200)),
    }
}

/// Runs `one` for every number below `total` with `clients` concurrent clients, and returns the rate per second.
pub(crate) async fn per_second<F>(
    clients: usize,
    total: usize,
    one: impl Fn(usize) -> F + Clone + Send + 'static,
) -> Result<f64>
where
    F: Future<Output = Result<()>> + Send,
{
    let next = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        let (next, one) = (Arc::clone(&next), one.clone());
        tasks.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= total {
                    return anyhow::Ok(());
                }
                one(n).await?;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(total as f64 / started.elapsed().as_secs_f64())
}
