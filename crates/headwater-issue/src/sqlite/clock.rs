//! Handles steps of the machine's clock: ends all waits and renews all leases.

use headwater_stream::clock::Timestamp;
use sqlx::sqlite::SqliteConnection;
use sqlx::{Error, Row, SqlitePool};

use super::SqliteStore;
use super::statements::to_column;
use crate::row_decoding::{ms, timestamp};

impl SqliteStore {
    /// Reads the clock. After a step, ends all waits and renews all leases, in one transaction.
    pub(super) async fn check_clock(&self) -> Result<(), Error> {
        // Read the monotonic time first: the wall clock is read after it.
        let requested_at = self.watch.monotonic();
        let Some(detected) = self.watch.read(self.clock.now(), requested_at) else {
            return Ok(());
        };
        let mut transaction = self.writer.begin_with("BEGIN IMMEDIATE").await?;
        // Another caller may have handled it while this one waited for the writer.
        if self.watch.is_handled(detected) {
            return transaction.rollback().await;
        }
        let (claim_ttl, outbox_ttl) = self.watch.ttls();
        let (claim_ttl, outbox_ttl) = (ms(claim_ttl), ms(outbox_ttl));
        restart_deadlines(&mut transaction, self.clock.now(), claim_ttl, outbox_ttl).await?;
        transaction.commit().await?;
        self.watch.handled(detected);
        Ok(())
    }

    /// Stores the time at intervals, for processes that open the file later.
    pub(super) async fn store_time(&self) -> Result<(), Error> {
        if self.watch.should_store() {
            let (claim_ttl, outbox_ttl) = self.watch.ttls();
            sqlx::query(
                "UPDATE headwater_clock SET seen_at = ?1, claim_ttl_ms = max(claim_ttl_ms, ?2),
                     outbox_ttl_ms = max(outbox_ttl_ms, ?3)",
            )
            .bind(to_column(self.clock.now()))
            .bind(ms(claim_ttl))
            .bind(ms(outbox_ttl))
            .execute(&self.writer)
            .await?;
        }
        Ok(())
    }
}

/// The time last stored by any process.
pub(super) async fn stored(writer: &SqlitePool) -> Result<Timestamp, Error> {
    let row = sqlx::query("SELECT seen_at FROM headwater_clock").fetch_one(writer).await?;
    Ok(timestamp(row.try_get(0)?))
}

/// Ends all waits, and renews all claims and taken rows. A deadline set after the step, within its TTL, is not changed.
async fn restart_deadlines(
    connection: &mut SqliteConnection,
    now: Timestamp,
    claim_ttl_ms: i64,
    outbox_ttl_ms: i64,
) -> Result<(), Error> {
    let now = to_column(now);
    // Other processes may use longer TTLs.
    let row = sqlx::query("SELECT claim_ttl_ms, outbox_ttl_ms FROM headwater_clock")
        .fetch_one(&mut *connection)
        .await?;
    let longest = |ours: i64, stored: i64| ours.max(stored);
    let statements = [
        (
            // Make nudges overdue: none may be in the stream.
            "UPDATE issues SET not_before = iif(not_before > ?1, NULL, not_before),
                 first_pending_at = iif(first_pending_at > ?1, ?1, first_pending_at),
                 nudged_at = iif(processing_status = 'queued', NULL, min(nudged_at, ?1)),
                 updated_at = ?1
             WHERE processing_status != 'idle' AND ?2 >= 0
                 AND (not_before > ?1 OR first_pending_at > ?1 OR nudged_at > ?1)",
            0,
        ),
        (
            "UPDATE issues SET claim_expires_at = ?1 + ?2, updated_at = ?1
             WHERE processing_status = 'processing'
                 AND (claim_expires_at <= ?1 OR claim_expires_at > ?1 + ?2)",
            longest(claim_ttl_ms, row.try_get(0)?),
        ),
        (
            "UPDATE outbox SET due_at = ?1 + iif(status = 'taken', ?2, 0)
             WHERE (status = 'taken' AND (due_at <= ?1 OR due_at > ?1 + ?2))
                 OR (status IN ('waiting', 'pending') AND due_at > ?1)",
            longest(outbox_ttl_ms, row.try_get(1)?),
        ),
        (
            "UPDATE workers SET expires_at = ?1 + expires_at - seen_at, seen_at = ?1 WHERE ?2 >= 0",
            0,
        ),
        ("UPDATE headwater_clock SET seen_at = ?1 WHERE ?2 >= 0", 0),
    ];
    for (statement, ttl_ms) in statements {
        sqlx::query(statement).bind(now).bind(ttl_ms).execute(&mut *connection).await?;
    }
    Ok(())
}
