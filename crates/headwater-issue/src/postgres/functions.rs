//! Installs the PL/pgSQL functions, each of which is one transition of issues or outbox rows in one round trip.
//!
//! The text of each function is `functions/NAME.sql`; in the database it is called `headwater_NAME`. Every function first
//! locks the issues that it may change, by id, and then reads them: each statement of a function sees what was committed
//! before it began, and the lock order is the same everywhere, so two calls cannot deadlock.
//!
//! Functions are planned for index access (`SET enable_seqscan = off` and so on): PostgreSQL caches their plans, and a plan
//! made while a table was empty would scan it after it has grown. Without these settings a batch of 64 took 20 to 40 times as
//! long on 200,000 issues until the next ANALYZE. `jit` is off because a plan forced onto an index looks expensive. The plans of
//! claims, completions and records are generic (`plan_cache_mode`): planning a call with few items anew costs more than the call.
//!
//! Statements over a batch join an array with a table by an index, never two arrays or results with each other: without hash and
//! merge joins that would compare each with each. What a later statement needs of an earlier one is an array in the order of the
//! call, and exceptions are arrays that are empty as a rule.
//!
//! Upgrades: processes of two versions may run side by side, so a function whose arguments or results change gets a new
//! name, and the old one stays in the database. [`REVISION`] makes sure that an older process does not reinstall its text.

use sha2::{Digest, Sha256};
use sqlx::postgres::PgConnection;
use sqlx::{Executor, Row};

/// Raise it whenever the text of a function changes.
const REVISION: i64 = 4;

const FUNCTIONS: &[&str] = &[
    include_str!("functions/ms.sql"),
    include_str!("functions/interval.sql"),
    include_str!("functions/now.sql"),
    include_str!("functions/time.sql"),
    include_str!("functions/each.sql"),
    include_str!("functions/record_events.sql"),
    include_str!("functions/quarantine.sql"),
    include_str!("functions/expire_claims.sql"),
    include_str!("functions/claim_issues.sql"),
    include_str!("functions/renew_claims.sql"),
    include_str!("functions/complete_runs.sql"),
    include_str!("functions/fail.sql"),
    include_str!("functions/release_claims.sql"),
    include_str!("functions/release_issue.sql"),
    include_str!("functions/sweep.sql"),
    include_str!("functions/prune.sql"),
    include_str!("functions/outbox_status.sql"),
    include_str!("functions/enqueue_outbox.sql"),
    include_str!("functions/take_outbox.sql"),
    include_str!("functions/settle_outbox.sql"),
    include_str!("functions/requeue_dead_outbox.sql"),
    include_str!("functions/restart_deadlines.sql"),
];

/// Installs the functions if the database has an older text. The caller holds the lock of migrations.
pub(super) async fn install(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    if outdated(connection).await?.is_none() {
        return Ok(());
    }
    for function in FUNCTIONS {
        connection.execute(sqlx::raw_sql(*function)).await?;
    }
    connection.execute("DELETE FROM headwater_functions").await?;
    let insert = sqlx::query("INSERT INTO headwater_functions (revision, sha256) VALUES ($1, $2)");
    insert.bind(REVISION).bind(checksum()).execute(connection).await.map(drop)
}

/// How the functions of the database differ from those of this program; `None` if they are the same or newer.
pub(super) async fn outdated(connection: &mut PgConnection) -> Result<Option<String>, sqlx::Error> {
    let select = sqlx::query("SELECT revision, sha256 FROM headwater_functions");
    let Some(row) = select.fetch_optional(connection).await? else {
        return Ok(Some(format!("it has no functions, this program needs revision {REVISION}")));
    };
    let (revision, sha256): (i64, String) = (row.try_get(0)?, row.try_get(1)?);
    if revision > REVISION || (revision == REVISION && sha256 == checksum()) {
        return Ok(None);
    }
    let problem = format!(
        "its functions are older than this program: revision {revision}, this program needs revision {REVISION}"
    );
    Ok(Some(problem))
}

fn checksum() -> String {
    let mut digest = Sha256::new();
    FUNCTIONS.iter().for_each(|function| digest.update(function));
    hex::encode(digest.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_revision_was_raised_if_a_function_changed() {
        let pinned = (4, "b41103c7cf17be5128e721feeab2f9c0e37c07886e46cf29c1d11d3f4753aed1");
        assert_eq!(
            (REVISION, checksum().as_str()),
            pinned,
            "raise the revision, and pin both here"
        );
    }
}
