//! The sweep on SQLite: expired claims, overdue nudges, and rows after their retention.

use headwater_stream::clock::Timestamp;
use sqlx::sqlite::SqliteConnection;
use sqlx::{Error, Row};

use super::WriteTx;
use super::state_batch::StateBatch;
use super::statements::{json_rows, to_column};
use crate::claim::{Nudge, SweepOptions, SweepReport};
use crate::error::Result;
use crate::issue::{EventLogId, IssueId};
use crate::row_decoding::to_i64;
use crate::state::{Transition, TransitionEffect};

/// Whether there is anything to sweep.
pub(super) async fn is_needed(
    connection: &mut SqliteConnection,
    options: &SweepOptions,
    now: Timestamp,
) -> Result<bool, Error> {
    let options = SweepOptions { limit: 1, ..*options };
    Ok(!expired(connection, &options, now).await?.is_empty()
        || !overdue(connection, &options, now).await?.is_empty()
        || has_expired_rows(connection, now.before(options.keep)).await?)
}

async fn has_expired_rows(
    connection: &mut SqliteConnection,
    old: Timestamp,
) -> Result<bool, Error> {
    let row = sqlx::query(
        "SELECT EXISTS (SELECT 1 FROM outbox WHERE status = 'delivered' AND delivered_at <= ?1)
             OR EXISTS (SELECT 1 FROM dead_letters WHERE released_at <= ?1)",
    )
    .bind(to_column(old))
    .fetch_one(connection)
    .await?;
    row.try_get(0)
}

/// Removes rows after their retention, and returns the larger of the two counts.
async fn prune(tx: &mut WriteTx, options: &SweepOptions) -> Result<usize, Error> {
    let statements = [
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox
             WHERE status = 'delivered' AND delivered_at <= ?1 ORDER BY delivered_at LIMIT ?2)",
        "DELETE FROM dead_letters WHERE id IN (SELECT id FROM dead_letters
             WHERE released_at <= ?1 ORDER BY released_at LIMIT ?2)",
    ];
    let mut most = 0;
    for statement in statements {
        let removed = sqlx::query(statement)
            .bind(to_column(tx.now.before(options.keep)))
            .bind(to_i64(options.limit))
            .execute(&mut *tx.transaction)
            .await?;
        most = removed.rows_affected().max(most);
    }
    Ok(usize::try_from(most).unwrap_or(usize::MAX))
}

pub(super) async fn sweep(tx: &mut WriteTx, options: &SweepOptions) -> Result<SweepReport, Error> {
    let now = tx.now;
    let expired = expired(&mut tx.transaction, options, now).await?;
    let overdue = overdue(&mut tx.transaction, options, now).await?;
    let issues = expired.iter().chain(&overdue).copied();
    let mut states = StateBatch::load(&mut tx.transaction, issues, now).await?;

    let pruned = prune(tx, options).await?;
    let more = [expired.len(), overdue.len(), pruned].contains(&options.limit);
    let mut swept = SweepReport { pruned, more, ..SweepReport::default() };
    let mut nudged = Vec::new();
    for issue in &expired {
        match states.apply(*issue, &Transition::Expire { crashes_max: options.crashes_max }) {
            Some(TransitionEffect::Queued) => {
                swept.requeued += 1;
                let not_before = states.get(*issue).and_then(|state| state.not_before);
                if not_before.is_none_or(|not_before| not_before <= now) {
                    nudged.push(issue.0);
                }
            }
            Some(TransitionEffect::Quarantined) => swept.quarantined.push(*issue),
            _ => {}
        }
    }
    for issue in &overdue {
        let transition = Transition::Nudge { overdue: options.nudge_overdue };
        if states.apply(*issue, &transition) == Some(TransitionEffect::Queued) {
            nudged.push(issue.0);
        }
    }
    states.save(&mut tx.transaction).await?;
    swept.nudges = nudges(&mut tx.transaction, nudged).await?;
    Ok(swept)
}

async fn expired(
    connection: &mut SqliteConnection,
    options: &SweepOptions,
    now: Timestamp,
) -> Result<Vec<IssueId>, Error> {
    let rows = sqlx::query(
        // The first condition is that of the index.
        "SELECT id FROM issues WHERE processing_status != 'idle' AND processing_status = 'processing'
             AND coalesce(claim_expires_at, 0) <= ?1
         ORDER BY id LIMIT ?2",
    )
    .bind(to_column(now))
    .bind(to_i64(options.limit))
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| Ok(IssueId(row.try_get(0)?))).collect()
}

async fn overdue(
    connection: &mut SqliteConnection,
    options: &SweepOptions,
    now: Timestamp,
) -> Result<Vec<IssueId>, Error> {
    let rows = sqlx::query(
        "SELECT id FROM issues WHERE processing_status = 'queued'
             AND max(coalesce(nudged_at, 0), coalesce(not_before, 0)) <= ?1
         ORDER BY max(coalesce(nudged_at, 0), coalesce(not_before, 0)) LIMIT ?2",
    )
    .bind(to_column(now.before(options.nudge_overdue)))
    .bind(to_i64(options.limit))
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| Ok(IssueId(row.try_get(0)?))).collect()
}

async fn nudges(connection: &mut SqliteConnection, issues: Vec<i64>) -> Result<Vec<Nudge>, Error> {
    let rows = sqlx::query(
        "SELECT asked.value, coalesce((SELECT min(e.id) FROM event_logs AS e
             WHERE e.issue_id = asked.value AND e.processed_at IS NULL), 0)
         FROM json_each(?1) AS asked",
    )
    .bind(json_rows(issues.into_iter().map(Into::into).collect()))
    .fetch_all(connection)
    .await?;
    let read = |row: &sqlx::sqlite::SqliteRow| {
        Ok(Nudge { issue_id: IssueId(row.try_get(0)?), event_log_id: EventLogId(row.try_get(1)?) })
    };
    rows.iter().map(read).collect()
}
