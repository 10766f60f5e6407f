//! The conformance suite for every store.
#![cfg(any(feature = "sqlite", feature = "postgres"))]

use std::sync::Arc;

use headwater_conformance::issue::{StoreTestEnv, TestResult};
use headwater_issue::{Store, StoreOptions, connect};

async fn open(url: &str, options: &StoreOptions) -> TestResult<Arc<dyn Store>> {
    Ok(connect(url, options).await?)
}

#[cfg(feature = "sqlite")]
mod sqlite_memory {
    use headwater_stream::clock::TestClock;

    use super::*;

    async fn setup() -> TestResult<StoreTestEnv> {
        let clock = TestClock::default();
        let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
        let store = open("sqlite::memory:", &options).await?;
        StoreTestEnv::new(Arc::clone(&store), store, move |duration| {
            clock.advance(duration);
            async { Ok(()) }
        })
        .await
    }

    headwater_conformance::store_suite!(setup());
}

#[cfg(feature = "sqlite")]
mod sqlite_file {
    use headwater_stream::clock::TestClock;

    use super::*;

    async fn setup() -> TestResult<StoreTestEnv> {
        let clock = TestClock::default();
        let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
        let directory = tempfile::tempdir()?;
        let url = format!("sqlite:{}", directory.path().join("issues.db").display());
        let (store, second) = (open(&url, &options).await?, open(&url, &options).await?);
        let env = StoreTestEnv::new(store, second, move |duration| {
            clock.advance(duration);
            async { Ok(()) }
        });
        Ok(env.await?.keep(directory))
    }

    headwater_conformance::store_suite!(setup());
}

#[cfg(feature = "postgres")]
mod postgres {
    use std::time::Duration;

    use headwater_testkit::Postgres;
    use sqlx::postgres::{PgPool, PgPoolOptions};

    use super::*;

    /// Converts an error of the testkit.
    fn testkit<T>(result: anyhow::Result<T>) -> TestResult<T> {
        Ok(result.map_err(|error| std::io::Error::other(format!("{error:#}")))?)
    }

    /// The server's clock cannot be moved, so all stored times are moved into the past instead.
    async fn advance(pool: PgPool, duration: Duration) -> TestResult {
        let ms = i64::try_from(duration.as_millis())?;
        let statements = [
            "UPDATE issues SET claim_expires_at = claim_expires_at - headwater_interval($1),
                 not_before = not_before - headwater_interval($1),
                 processing_started_at = processing_started_at - headwater_interval($1),
                 first_pending_at = first_pending_at - headwater_interval($1),
                 quarantined_at = quarantined_at - headwater_interval($1),
                 nudged_at = nudged_at - headwater_interval($1)
             WHERE processing_status != 'idle' OR quarantined_at IS NOT NULL",
            "UPDATE outbox SET due_at = due_at - headwater_interval($1),
                 created_at = created_at - headwater_interval($1),
                 delivered_at = delivered_at - headwater_interval($1)",
            "UPDATE dead_letters SET released_at = released_at - headwater_interval($1)",
            "UPDATE issue_runs SET claimed_at = claimed_at - headwater_interval($1),
                 ended_at = ended_at - headwater_interval($1)",
            "UPDATE event_logs SET processed_at = processed_at - headwater_interval($1)
             WHERE processed_at IS NOT NULL",
            "UPDATE workers SET expires_at = expires_at - headwater_interval($1)",
        ];
        for statement in statements {
            sqlx::query(statement).bind(ms).execute(&pool).await?;
        }
        Ok(())
    }

    async fn setup() -> TestResult<StoreTestEnv> {
        let database = testkit(testkit(Postgres::shared())?.database())?;
        let options = StoreOptions {
            call_deadline: Duration::from_secs(60),
            connections_max: 6,
            ..StoreOptions::default()
        };
        let (store, second) =
            (open(&database.url(), &options).await?, open(&database.url(), &options).await?);
        let pool = PgPoolOptions::new().max_connections(1).connect(&database.url()).await?;
        let env = StoreTestEnv::new(store, second, move |duration| advance(pool.clone(), duration));
        Ok(env.await?.keep(database))
    }

    headwater_conformance::store_suite!(setup());
}
