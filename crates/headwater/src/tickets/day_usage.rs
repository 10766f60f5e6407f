//! Tokens that each integration has used today, for `headwater status`.
//!
//! Upstream: `api/status.rs`. Guarantees: read-only; counts as the budget does (`ledger.rs`): used tokens and open
//! reservations.

use crate::desk::budget::{day_of, day_scope_prefix};
use crate::tickets::sql::statements::{list, to_ms};
use crate::tickets::store::{Tickets, now};
use crate::tickets::ticket::TicketError;

/// Maximum number of integrations.
const INTEGRATIONS_MAX: i64 = 100;

impl Tickets {
    /// Integrations with their tokens of this UTC day, most tokens first.
    pub(crate) async fn tokens_of_day(&self) -> Result<Vec<(String, u64)>, TicketError> {
        let now = now();
        let prefix = day_scope_prefix(day_of(now));
        let select = "SELECT scope, sum(tokens)::bigint FROM (
                 SELECT scope, tokens FROM desk_usage WHERE scope LIKE $1
                 UNION ALL
                 SELECT day_scope, CASE WHEN settled_at IS NULL AND expires_at <= $2 THEN tokens_if_lost ELSE tokens END
                 FROM desk_reservations WHERE day_scope LIKE $1 AND NOT rolled_up
             ) AS counted
             GROUP BY scope ORDER BY sum(tokens) DESC, scope LIMIT $3";
        let pattern = format!("{prefix}%");
        let parameters = [(&pattern).into(), to_ms(now).into(), INTEGRATIONS_MAX.into()];
        let rows = self
            .read(async |connection| {
                list(connection, "tokens_of_day", select, &parameters, |row| {
                    Ok((row.get::<String>(0)?, row.get::<i64>(1)?))
                })
                .await
            })
            .await?;
        let integration = |scope: String| scope.strip_prefix(&prefix).unwrap_or(&scope).to_owned();
        let tokens = |tokens: i64| u64::try_from(tokens).unwrap_or(0);
        Ok(rows.into_iter().map(|(scope, used)| (integration(scope), tokens(used))).collect())
    }
}
