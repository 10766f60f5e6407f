//! The token ledger in SQL, shared by all processes.
//!
//! Upstream: `desk::token_reservations`. Guarantees: no reservation waits for another one: each is a row, and a budget is a sum
//! over rows. A reservation is inserted before the sums are checked a second time, so of two reservations that together
//! exceed a budget at least one sees the other. Both may be rejected; the desk retries.

use async_trait::async_trait;
use headwater_stream::clock::Timestamp;
use metrics::gauge;
use tracing::debug;

use crate::desk::budget::{
    self, BudgetUsage, LAPSED_RESERVATION_TTL, Ledger, ModelRun, RESERVATION_TTL, ReserveDecision,
    TokenBudget, TokenReservation,
};
use crate::tickets::sql::statements::{self, ReservationRow, to_ms};
use crate::tickets::store::{Tickets, now};
use crate::tickets::ticket::TicketError;

/// Gauges of the token budget of the day, as of the last model call of this process: tokens used and reserved, and the
/// limit. Label: integration.
pub(crate) const TOKEN_BUDGET_USED: &str = "headwater_token_budget_used";
pub(crate) const TOKEN_BUDGET_MAX: &str = "headwater_token_budget_max";

/// Larger than any allowed budget; keeps sums within the column type.
const TOKENS_MAX: i64 = 10_000_000_000_000;

#[async_trait]
impl Ledger for Tickets {
    async fn reserve(
        &self,
        reservation: &TokenReservation,
        budget: &TokenBudget,
    ) -> Result<ReserveDecision, String> {
        let reserved = self.try_reserve(reservation, budget).await;
        let reserved = reserved.map_err(|error| error.to_string())?;
        // Only for the release after a raised limit: without it, the issue waits until the day ends.
        if let Err(error) = self.store_budget_wait(reservation, reserved, budget).await {
            debug!(issue_id = %reservation.issue_id, %error, "wait for a budget not stored");
        }
        Ok(reserved)
    }

    async fn record_run(&self, run: &ModelRun) -> Result<(), String> {
        self.store_model_run(run).await.map_err(|error| error.to_string())
    }

    async fn settle(&self, reservation: &TokenReservation, used: u64) -> Result<(), String> {
        self.try_settle(reservation, used).await.map_err(|error| error.to_string())
    }

    async fn maintain(&self) -> Result<(), String> {
        self.roll_up(now()).await.map_err(|error| error.to_string())
    }
}

impl Tickets {
    async fn try_reserve(
        &self,
        reservation: &TokenReservation,
        budget: &TokenBudget,
    ) -> Result<ReserveDecision, TicketError> {
        let row = reservation_row(reservation, now());
        let decide = |usage: [BudgetUsage; 4]| budget::decide(usage, reservation.tokens, budget);
        let mut transaction = self.store.begin().await?;
        // An issue has one run at a time: what it has reserved before belongs to a run that has ended.
        let lapsed_at = to_ms(now().after(LAPSED_RESERVATION_TTL));
        statements::lapse_reservations(transaction.connection(), &row, lapsed_at).await?;
        let before = statements::token_usage(transaction.connection(), &row, to_ms(now())).await?;
        note_budget(reservation, budget, before);
        let reserved = decide(before);
        if reserved == ReserveDecision::Granted {
            statements::insert_reservation(transaction.connection(), &row).await?;
        }
        transaction.commit().await?;
        if reserved != ReserveDecision::Granted {
            return Ok(reserved);
        }
        // Concurrent reservations may have been committed; this read sees all that were committed before it.
        let after = self
            .read(async |connection| statements::token_usage(connection, &row, to_ms(now())).await)
            .await?;
        let reserved = decide(after);
        if reserved != ReserveDecision::Granted {
            let mut transaction = self.store.begin().await?;
            statements::remove_reservation(transaction.connection(), &row).await?;
            transaction.commit().await?;
        }
        Ok(reserved)
    }

    async fn try_settle(
        &self,
        reservation: &TokenReservation,
        used: u64,
    ) -> Result<(), TicketError> {
        let now = now();
        let row = reservation_row(reservation, now);
        let mut transaction = self.store.begin().await?;
        statements::settle_reservation(transaction.connection(), &row, to_column(used), to_ms(now))
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Aggregates settled reservations, so that a budget is a sum over few rows.
    async fn roll_up(&self, now: Timestamp) -> Result<(), TicketError> {
        let mut transaction = self.store.begin().await?;
        statements::roll_up_reservations(transaction.as_mut(), to_ms(now)).await?;
        Ok(transaction.commit().await?)
    }
}

/// Sets the gauges of the budget of the day of an integration.
fn note_budget(reservation: &TokenReservation, budget: &TokenBudget, usage: [BudgetUsage; 4]) {
    let [_, day, ..] = usage;
    let integration = || reservation.integration.clone();
    gauge!(TOKEN_BUDGET_USED, "integration" => integration()).set(day.total as f64);
    gauge!(TOKEN_BUDGET_MAX, "integration" => integration()).set(budget.day_tokens_max as f64);
}

fn reservation_row(reservation: &TokenReservation, now: Timestamp) -> ReservationRow {
    ReservationRow {
        id: reservation.id.to_string(),
        issue_id: reservation.issue_id.0,
        day_scope: reservation.day_scope(),
        user_scope: reservation.user_scope().unwrap_or_default(),
        strangers_scope: reservation.strangers_scope().unwrap_or_default(),
        tokens: to_column(reservation.tokens),
        tokens_if_lost: to_column(reservation.prompt_tokens.min(reservation.tokens)),
        expires_at: to_ms(now.after(RESERVATION_TTL)),
    }
}

fn to_column(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(TOKENS_MAX).min(TOKENS_MAX)
}
