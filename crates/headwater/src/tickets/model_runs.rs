//! Runs of models and issues that wait for a budget, in SQL.
//!
//! Upstream: `ledger` stores runs and waits; the report `tokens-and-cost`, `why` and the start of a process read them.
//! Guarantees: a run is stored once. Runs of days that are over are summed up, so that the report of all days reads only the runs
//! of the last ones. An issue that waits for the end of the day is released by a process whose limit is
//! higher than the one that the issue met.

use std::time::Duration;

use headwater_analytics::Table;
use headwater_issue::{ClaimEpoch, IssueError, IssueId, SqlRow, Store, StoreConnection};
use headwater_stream::clock::Timestamp;
use serde_json::{Value, json};
use tracing::info;

use crate::desk::budget::{ModelRun, ReserveDecision, TokenBudget, TokenReservation};
use crate::tickets::sql::statements::{self, execute, list, to_ms};
use crate::tickets::store::{Tickets, now};
use crate::tickets::ticket::TicketError;

const DAY_MS: i64 = 24 * 60 * 60 * 1000;

/// A day is summed up when so many further days have begun: a run belongs to the day on which it began, and is stored when it ends.
const SUMMED_AFTER_DAYS: i64 = 2;

/// The first day that is not summed up, in days since 1970.
const FIRST_OPEN_DAY: &str = "SELECT coalesce(max(day) + 1, 0)::bigint FROM model_run_days";

/// Maximum rows of the report; older days are left out.
const REPORT_ROWS_MAX: i64 = 10_000;

/// Maximum rows of one call of `model_runs`.
const MODEL_RUNS_MAX: i64 = 1000;

/// Rows deleted, and waits released, in one transaction.
const BATCH: i64 = 1000;

/// The last run of a model for an issue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LastModelRun {
    pub(crate) at: Timestamp,
    pub(crate) model: String,
    pub(crate) result: String,
    pub(crate) calls: i64,
    pub(crate) prompt_version: i64,
}

/// What one model used in one run of an issue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredModelRun {
    pub(crate) epoch: ClaimEpoch,
    pub(crate) model: String,
    pub(crate) result: String,
    pub(crate) calls: i64,
    pub(crate) tokens_in: i64,
    pub(crate) tokens_out: i64,
    pub(crate) cost_micros: Option<i64>,
    pub(crate) prompt_version: i64,
    pub(crate) session: Option<String>,
}

/// What the models used for one issue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IssueUsage {
    /// Runs, counted for each model that they called.
    pub(crate) runs: i64,
    /// Those of them that failed or were superseded.
    pub(crate) unanswered: i64,
    pub(crate) calls: i64,
    pub(crate) tokens_in: i64,
    pub(crate) tokens_out: i64,
    /// In millionths of the currency of the prices; `None` if no price is known.
    pub(crate) cost_micros: Option<i64>,
}

fn column(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl Tickets {
    pub(super) async fn store_model_run(&self, run: &ModelRun) -> Result<(), TicketError> {
        let insert = "INSERT INTO model_runs
                 (id, at, issue_id, integration, model, result, calls, tokens_in, tokens_out, cost_micros, prompt_version,
                  epoch, session)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) ON CONFLICT (id) DO NOTHING";
        let id = run.id.to_string();
        let parameters = [
            (&id).into(),
            to_ms(run.at).into(),
            run.issue_id.0.into(),
            (&run.integration).into(),
            (&run.model).into(),
            run.result.as_str().into(),
            column(run.calls).into(),
            column(run.tokens_in).into(),
            column(run.tokens_out).into(),
            run.cost_micros.map(column).into(),
            run.prompt_version.into(),
            run.epoch.0.into(),
            (&run.session).into(),
        ];
        let mut transaction = self.store.begin().await?;
        execute(transaction.connection(), "store_model_run", insert, &parameters).await?;
        Ok(transaction.commit().await?)
    }

    /// Remembers that an issue waits for the end of the day, and which limit it met.
    pub(super) async fn store_budget_wait(
        &self,
        reservation: &TokenReservation,
        decision: ReserveDecision,
        budget: &TokenBudget,
    ) -> Result<(), TicketError> {
        let (name, tokens_max) = match decision {
            ReserveDecision::DayBudgetExceeded => ("day", budget.day_tokens_max),
            ReserveDecision::UserBudgetExceeded => ("user", budget.user_tokens_max),
            ReserveDecision::StrangersBudgetExceeded => ("strangers", budget.strangers_tokens_max),
            _ => return Ok(()),
        };
        let upsert = "INSERT INTO budget_waits (issue_id, budget, tokens_max, until_at)
             VALUES ($1, $2, $3, $4) ON CONFLICT (issue_id) DO UPDATE
             SET budget = excluded.budget, tokens_max = excluded.tokens_max, until_at = excluded.until_at";
        let now = now();
        let until = now.after(reservation.rest_of_day(now));
        let parameters = [
            reservation.issue_id.0.into(),
            name.into(),
            column(tokens_max).into(),
            to_ms(until).into(),
        ];
        let mut transaction = self.store.begin().await?;
        execute(transaction.connection(), "store_budget_wait", upsert, &parameters).await?;
        Ok(transaction.commit().await?)
    }

    /// Releases the issues that wait for a budget whose limit is higher now. Returns how many. Call it at the start.
    pub(crate) async fn release_budget_waits(
        &self,
        budget: &TokenBudget,
    ) -> Result<u64, TicketError> {
        let select = "SELECT issue_id FROM budget_waits
             WHERE until_at > $1 AND tokens_max <
                 CASE budget WHEN 'day' THEN $2 WHEN 'user' THEN $3 ELSE $5 END::bigint
             ORDER BY issue_id LIMIT $4";
        let delete = "DELETE FROM budget_waits WHERE issue_id = $1";
        let limits = [budget.day_tokens_max, budget.user_tokens_max, budget.strangers_tokens_max];
        let limits = limits.map(column);
        let mut released = 0;
        loop {
            let time = to_ms(now());
            let parameters =
                [time.into(), limits[0].into(), limits[1].into(), BATCH.into(), limits[2].into()];
            let read = |row: &SqlRow| row.get::<i64>(0);
            let waiting = self
                .read(async |connection| {
                    list(connection, "budget waits", select, &parameters, read).await
                })
                .await?;
            for issue_id in &waiting {
                let retried =
                    headwater_issue::retry(self.store.as_ref(), &self.nudger, IssueId(*issue_id));
                match retried.await {
                    Ok(_) => released += 1,
                    // Deleted in the meantime.
                    Err(IssueError::NotFound { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                let mut transaction = self.store.begin().await?;
                let parameters = [(*issue_id).into()];
                execute(transaction.connection(), "budget waits", delete, &parameters).await?;
                transaction.commit().await?;
            }
            if waiting.is_empty() {
                break;
            }
        }
        if released > 0 {
            info!(
                issues = released,
                "a token budget was raised; issues that waited for it continue"
            );
        }
        Ok(released)
    }

    /// Sums up the runs of each day that is over, in a transaction for each day. Idempotent; several processes may call it at once.
    pub(crate) async fn sum_model_runs(&self) -> Result<(), TicketError> {
        let next = "SELECT (min(at) / 86400000)::bigint FROM model_runs WHERE at >= $1";
        let sum = "INSERT INTO model_run_days
                 (day, integration, model, runs, unanswered, tokens_in, tokens_out, cost_micros)
             SELECT at / 86400000, integration, model, count(*)::bigint,
                 sum(CASE WHEN result IN ('failed', 'superseded') THEN 1 ELSE 0 END)::bigint,
                 sum(tokens_in)::bigint, sum(tokens_out)::bigint, sum(cost_micros)::bigint
             FROM model_runs WHERE at >= $1 AND at < $2 GROUP BY at / 86400000, integration, model
             ON CONFLICT (day, integration, model) DO NOTHING";
        let last = to_ms(now()) / DAY_MS - SUMMED_AFTER_DAYS;
        loop {
            let day = self.read(async |connection| first_open_day(connection).await).await?;
            let parameters = [(day * DAY_MS).into()];
            let read = |row: &SqlRow| row.get::<Option<i64>>(0);
            let next = self
                .read(async |connection| {
                    list(connection, "sum_model_runs", next, &parameters, read).await
                })
                .await?;
            let Some(day) = next.into_iter().flatten().next().filter(|day| *day <= last) else {
                return Ok(());
            };
            let mut transaction = self.store.begin().await?;
            let parameters = [(day * DAY_MS).into(), ((day + 1) * DAY_MS).into()];
            execute(transaction.connection(), "sum_model_runs", sum, &parameters).await?;
            transaction.commit().await?;
        }
    }

    /// Deletes runs of models that began longer ago than `keep`, and the sums of days before.
    pub(crate) async fn delete_model_runs(&self, keep: Duration) -> Result<(), TicketError> {
        let delete =
            "DELETE FROM model_runs WHERE id IN (SELECT id FROM model_runs WHERE at < $1 LIMIT $2)";
        let before = to_ms(now().before(keep));
        self.delete_in_batches(delete, &[before.into()]).await?;
        let delete = "DELETE FROM model_run_days WHERE day IN
             (SELECT day FROM model_run_days WHERE day < $1 / 86400000 LIMIT $2)";
        self.delete_in_batches(delete, &[before.into()]).await
    }

    /// Deletes waits for a budget that are over.
    pub(crate) async fn delete_budget_waits(&self) -> Result<(), TicketError> {
        let delete = "DELETE FROM budget_waits WHERE issue_id IN
             (SELECT issue_id FROM budget_waits WHERE until_at <= $1 LIMIT $2)";
        self.delete_in_batches(delete, &[to_ms(now()).into()]).await
    }

    /// What the models used in runs of an issue, from one epoch to another, in the order of their beginning; at most
    /// [`MODEL_RUNS_MAX`].
    pub(crate) async fn model_runs(
        &self,
        issue_id: IssueId,
        (from, to): (ClaimEpoch, ClaimEpoch),
    ) -> Result<Vec<StoredModelRun>, TicketError> {
        let select = "SELECT epoch, model, result, calls, tokens_in, tokens_out, cost_micros, prompt_version, session
             FROM model_runs WHERE issue_id = $1 AND epoch >= $2 AND epoch <= $3 ORDER BY at, id LIMIT $4";
        let read = |row: &SqlRow| {
            Ok(StoredModelRun {
                epoch: ClaimEpoch(row.get(0)?),
                model: row.get(1)?,
                result: row.get(2)?,
                calls: row.get(3)?,
                tokens_in: row.get(4)?,
                tokens_out: row.get(5)?,
                cost_micros: row.get(6)?,
                prompt_version: row.get(7)?,
                session: row.get(8)?,
            })
        };
        let parameters = [issue_id.0.into(), from.0.into(), to.0.into(), MODEL_RUNS_MAX.into()];
        self.read(async |connection| {
            list(connection, "model_runs", select, &parameters, read).await
        })
        .await
    }

    /// What the models used for an issue, in all of its runs that are kept (`retention.events`).
    pub(crate) async fn issue_usage(&self, issue_id: IssueId) -> Result<IssueUsage, TicketError> {
        let select = "SELECT count(*)::bigint,
                 coalesce(sum(CASE WHEN result IN ('failed', 'superseded') THEN 1 ELSE 0 END), 0)::bigint,
                 coalesce(sum(calls), 0)::bigint, coalesce(sum(tokens_in), 0)::bigint,
                 coalesce(sum(tokens_out), 0)::bigint, sum(cost_micros)::bigint
             FROM model_runs WHERE issue_id = $1";
        let read = |row: &SqlRow| {
            Ok(IssueUsage {
                runs: row.get(0)?,
                unanswered: row.get(1)?,
                calls: row.get(2)?,
                tokens_in: row.get(3)?,
                tokens_out: row.get(4)?,
                cost_micros: row.get(5)?,
            })
        };
        let parameters = [issue_id.0.into()];
        let found = self
            .read(async |connection| {
                list(connection, "issue_usage", select, &parameters, read).await
            })
            .await?;
        Ok(found.into_iter().next().unwrap_or_default())
    }

    /// The last run of a model for an issue.
    pub(crate) async fn last_model_run(
        &self,
        issue_id: IssueId,
    ) -> Result<Option<LastModelRun>, TicketError> {
        let select = "SELECT at, model, result, calls, prompt_version FROM model_runs
             WHERE issue_id = $1 ORDER BY at DESC, id DESC LIMIT 1";
        let read = |row: &SqlRow| {
            let (at, model, result) = (statements::from_ms(row.get(0)?), row.get(1)?, row.get(2)?);
            let (calls, prompt_version) = (row.get(3)?, row.get(4)?);
            Ok(LastModelRun { at, model, result, calls, prompt_version })
        };
        let parameters = [issue_id.0.into()];
        let found = self
            .read(async |connection| {
                list(connection, "last_model_run", select, &parameters, read).await
            })
            .await?;
        Ok(found.into_iter().next())
    }
}

async fn first_open_day(connection: StoreConnection<'_>) -> Result<i64, TicketError> {
    let read = |row: &SqlRow| row.get::<i64>(0);
    let found = list(connection, "first_open_day", FIRST_OPEN_DAY, &[], read).await?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// The report `tokens-and-cost`: every run of a model, per day, integration and model.
pub(crate) async fn tokens_and_cost(store: &dyn Store) -> Result<Table, TicketError> {
    let select =
        "SELECT day, integration, model, runs, unanswered, tokens_in, tokens_out, cost_micros
         FROM model_run_days WHERE day < $1
         UNION ALL
         SELECT at / 86400000, integration, model, count(*)::bigint,
             sum(CASE WHEN result IN ('failed', 'superseded') THEN 1 ELSE 0 END)::bigint,
             sum(tokens_in)::bigint, sum(tokens_out)::bigint, sum(cost_micros)::bigint
         FROM model_runs WHERE at >= $2 GROUP BY at / 86400000, integration, model
         ORDER BY 1 DESC, 2, 3 LIMIT $3";
    let read = |row: &SqlRow| {
        let day = statements::from_ms(row.get::<i64>(0)?.saturating_mul(DAY_MS)).to_rfc3339();
        let cost = row.get::<Option<i64>>(7)?.unwrap_or_default() as f64 / 1e6;
        Ok(vec![
            json!(&day[..10]),
            json!(row.get::<String>(1)?),
            json!(row.get::<String>(2)?),
            json!(row.get::<i64>(3)?),
            json!(row.get::<i64>(4)?),
            json!(row.get::<i64>(5)?),
            json!(row.get::<i64>(6)?),
            json!(cost),
        ])
    };
    let mut connection = store.read_connection().await?;
    let what = "reading model runs";
    // A statement of its own: with its value, the database uses the index on the time of the runs.
    let rows = match first_open_day(connection.connection()).await {
        Ok(day) => {
            let parameters = [day.into(), (day * DAY_MS).into(), REPORT_ROWS_MAX.into()];
            list(connection.connection(), what, select, &parameters, read).await
        }
        Err(error) => Err(error),
    };
    connection.release().await;
    let mut rows = rows?;
    // By day, integration and model; these are texts.
    rows.sort_by_key(|row: &Vec<Value>| {
        [0, 1, 2].map(|at| row[at].as_str().unwrap_or_default().to_owned())
    });
    let columns =
        ["day", "integration", "model", "runs", "unanswered", "tokens_in", "tokens_out", "cost"];
    let truncated = rows.len() as i64 >= REPORT_ROWS_MAX;
    Ok(Table { columns: columns.map(str::to_owned).to_vec(), rows, truncated })
}
