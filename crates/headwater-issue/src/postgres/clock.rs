//! Handles steps of the server's clock: ends all waits and renews all leases.

use std::time::Duration;

use headwater_stream::clock::Timestamp;
use sqlx::postgres::PgConnection;
use sqlx::{Error, Row};

use super::PostgresStore;
use crate::clock_watch::ClockWatch;
use crate::error::Result;
use crate::row_decoding::{ms, timestamp, to_i64};

/// Maximum number of rows of each table that one call changes.
const RESTART_BATCH_MAX: usize = 1000;

/// How long another process may take to handle a step, and the pause between two looks.
const OTHER_PROCESS_MAX: Duration = Duration::from_secs(1);
const OTHER_PROCESS_PAUSE: Duration = Duration::from_millis(20);

/// The times of the server's clock.
struct ServerTimes {
    now: Timestamp,
    /// Last stored by any process.
    stored: Timestamp,
}

/// Gives `watch` its first reading, with which every later one is compared.
pub(super) async fn read_first(
    watch: &ClockWatch,
    connection: &mut PgConnection,
) -> Result<(), Error> {
    let requested_at = watch.monotonic();
    let times = read(connection).await?;
    // A step that happened before this process began is handled by the first check.
    let _ = watch.read(times.now, requested_at).or_else(|| watch.compare(times.now, times.stored));
    Ok(())
}

async fn read(connection: &mut PgConnection) -> Result<ServerTimes, Error> {
    let select = "SELECT headwater_ms(headwater_now()), headwater_ms(seen_at) FROM headwater_clock";
    let row = sqlx::query(select).fetch_one(connection).await?;
    Ok(ServerTimes { now: timestamp(row.try_get(0)?), stored: timestamp(row.try_get(1)?) })
}

impl PostgresStore {
    /// Reads the clock. After a step, ends all waits and renews all leases.
    pub(super) async fn check_clock(&self) -> Result<()> {
        let what = "checking the clock of the database";
        self.transition(what, || {
            self.connections.run(async |connection| check_clock(&self.watch, connection).await)
        })
        .await
    }
}

async fn check_clock(watch: &ClockWatch, connection: &mut PgConnection) -> Result<(), Error> {
    let requested_at = watch.monotonic();
    let ServerTimes { now, stored } = read(connection).await?;
    let detected = watch.read(now, requested_at).or_else(|| watch.compare(now, stored));
    let Some(detected) = detected else {
        if watch.should_store() {
            // Never decrease the stored time: other processes have to detect a step back with it.
            let (claim_ttl, outbox_ttl) = watch.ttls();
            sqlx::query(
                "UPDATE headwater_clock SET seen_at = greatest(seen_at, headwater_now()),
                     claim_ttl_ms = greatest(claim_ttl_ms, $1), outbox_ttl_ms = greatest(outbox_ttl_ms, $2)",
            )
            .bind(ms(claim_ttl))
            .bind(ms(outbox_ttl))
            .execute(&mut *connection)
            .await?;
        }
        return Ok(());
    };
    let (claim_ttl, outbox_ttl) = watch.ttls();
    let mut left_before = i64::MAX;
    let give_up_at = watch.monotonic() + OTHER_PROCESS_MAX;
    loop {
        let row = sqlx::query("SELECT headwater_restart_deadlines($1, $2, $3)")
            .bind(ms(claim_ttl))
            .bind(ms(outbox_ttl))
            .bind(to_i64(RESTART_BATCH_MAX))
            .fetch_one(&mut *connection)
            .await?;
        match row.try_get::<i64, _>(0)? {
            0 => break,
            // Another process, or another store of this one, is handling the step. Until it has, deadlines mislead.
            left if left < 0 && watch.monotonic() < give_up_at => {
                tokio::time::sleep(OTHER_PROCESS_PAUSE).await;
            }
            // It takes long, or others have locked the remaining rows: continue at the next reading.
            left if left < 0 || left >= left_before => return Ok(()),
            left => left_before = left,
        }
    }
    watch.handled(detected);
    Ok(())
}
