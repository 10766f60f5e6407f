//! The sweep on PostgreSQL: expired claims, overdue nudges, and rows after their retention.

use sqlx::postgres::PgConnection;
use sqlx::{Error, Row};
use tracing::warn;

use crate::claim::{Nudge, SweepOptions, SweepReport};
use crate::error::Result;
use crate::issue::{EventLogId, IssueId};
use crate::row_decoding::{count, ms, to_i64};

async fn prune(connection: &mut PgConnection, options: &SweepOptions) -> Result<usize, Error> {
    let row = sqlx::query("SELECT headwater_prune($1, $2)")
        .bind(to_i64(options.limit))
        .bind(ms(options.keep))
        .fetch_one(connection)
        .await?;
    count(row.try_get(0)?)
}

pub(super) async fn sweep(
    connection: &mut PgConnection,
    options: &SweepOptions,
) -> Result<SweepReport, Error> {
    // Before the sweep: its result must not be lost by a later error, because it is already committed.
    let pruned = prune(&mut *connection, options).await.unwrap_or_else(|error| {
        warn!(%error, "expired rows were not removed, the next sweep retries");
        0
    });
    let rows = sqlx::query("SELECT * FROM headwater_sweep($1, $2, $3)")
        .bind(to_i64(options.limit))
        .bind(ms(options.nudge_overdue))
        .bind(i64::from(options.crashes_max))
        .fetch_all(connection)
        .await?;
    let mut swept = SweepReport { pruned, ..SweepReport::default() };
    let mut overdue = 0;
    for row in &rows {
        let issue_id = IssueId(row.try_get(0)?);
        let (requeued, quarantined): (bool, bool) = (row.try_get(2)?, row.try_get(3)?);
        swept.requeued += usize::from(requeued);
        overdue += usize::from(!requeued && !quarantined);
        if quarantined {
            swept.quarantined.push(issue_id);
        }
        if row.try_get(4)? {
            swept.nudges.push(Nudge { issue_id, event_log_id: EventLogId(row.try_get(1)?) });
        }
    }
    let expired = swept.requeued + swept.quarantined.len();
    swept.more = [expired, overdue, swept.pruned].iter().any(|found| *found >= options.limit);
    Ok(swept)
}
