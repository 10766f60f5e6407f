//! How many rows of a list match, up to [`COUNT_MAX`] and one more: a page says `10,000+` instead of counting all.
//!
//! Upstream: the lists of tickets and outbox rows. Downstream: read connections of the store; one text for both databases.
//! Guarantees: a count reads at most so many rows where its filter has an index, and never their contents.

use std::sync::Arc;

use headwater_issue::{IssueError, OutboxFilter, OutboxStatus, SqlValue, Store};

use crate::http::paging::COUNT_MAX;
use crate::tickets::{TicketFilter, TicketStatus};

/// Tickets that match. `$known` is the part of the filter that has an index, as a literal, as in the list of tickets.
macro_rules! tickets_count {
    ($known:literal) => {
        concat!(
            "SELECT count(*) FROM (SELECT 1 FROM tickets WHERE ",
            $known,
            " ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR user_id = $3)
              AND ($4::text IS NULL OR ticket_id::text LIKE $4)
              AND ($5::boolean IS NULL OR handed_over = $5) AND ($6::text IS NULL OR assignee = $6)
              AND (NOT $7::boolean OR assignee IS NULL) LIMIT $1) AS matching"
        )
    };
}

/// Outbox rows that match.
macro_rules! outbox_count {
    ($known:literal) => {
        concat!(
            "SELECT count(*) FROM (SELECT 1 FROM outbox o WHERE ",
            $known,
            " ($2::text IS NULL OR o.status = $2) AND ($3::bigint IS NULL OR o.issue_id = $3)
              AND ($4::text IS NULL OR o.integration_id IN (SELECT id FROM integrations
                  WHERE name IN (SELECT value FROM headwater_each($4)))) LIMIT $1) AS matching"
        )
    };
}

async fn count(
    store: &dyn Store,
    what: &str,
    sql: &'static str,
    filter: &[SqlValue<'_>],
) -> Result<usize, IssueError> {
    let max = i64::try_from(COUNT_MAX + 1).unwrap_or(i64::MAX);
    let parameters = [&[max.into()][..], filter].concat();
    let mut reading = store.read_connection().await?;
    let rows = reading.connection().fetch_all(sql, &parameters).await;
    reading.release().await;
    let counted = rows.and_then(|rows| rows.first().map_or(Ok(0), |row| row.get::<i64>(0)));
    let counted = counted.map_err(|error| {
        let problem = format!("failed to count {what}: {error}");
        IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
    })?;
    Ok(usize::try_from(counted).unwrap_or_default())
}

/// A count as a page shows it: unknown if the database did not finish it in time, so that the rows are shown all the same.
pub(super) fn or_unknown(count: Result<usize, IssueError>) -> Result<Option<usize>, IssueError> {
    match count {
        Err(error) if error.is_transient() => {
            tracing::debug!(%error, "the rows of a list were not counted");
            Ok(None)
        }
        count => count.map(Some),
    }
}

/// Tickets that match a filter on all pages.
pub(super) async fn tickets(store: &dyn Store, filter: &TicketFilter) -> Result<usize, IssueError> {
    let is_in_queue =
        filter.handed_over == Some(true) || filter.assignee.is_some() || filter.unassigned;
    let sql = match (is_in_queue, filter.user_id.is_some(), filter.status) {
        (true, ..) => tickets_count!("handed_over AND"),
        (_, true, _) => tickets_count!("user_id = $3 AND"),
        (_, _, Some(TicketStatus::Closed)) => tickets_count!("status = 'closed' AND"),
        (_, _, Some(TicketStatus::Open)) => tickets_count!("status = 'open' AND"),
        _ => tickets_count!(""),
    };
    let id_pattern = filter.id_prefix.as_ref().map(|prefix| format!("{prefix}%"));
    let parameters = [
        filter.status.map(TicketStatus::as_str).into(),
        filter.user_id.as_deref().into(),
        id_pattern.as_deref().into(),
        filter.handed_over.into(),
        filter.assignee.as_deref().into(),
        filter.unassigned.into(),
    ];
    count(store, "tickets", sql, &parameters).await
}

/// Outbox rows that match a filter on all pages, of these integrations; `None` for all.
pub(super) async fn outbox_rows(
    store: &dyn Store,
    filter: &OutboxFilter,
    integrations: Option<&[String]>,
) -> Result<usize, IssueError> {
    let sql = match (filter.issue.is_some(), filter.status) {
        (true, _) => outbox_count!("o.issue_id = $3 AND"),
        (_, Some(OutboxStatus::Dead)) => outbox_count!("o.status = 'dead' AND"),
        (_, Some(OutboxStatus::Delivered)) => outbox_count!("o.status = 'delivered' AND"),
        (_, Some(_)) => outbox_count!("o.status IN ('waiting', 'pending', 'taken') AND"),
        _ => outbox_count!(""),
    };
    let integrations = integrations.map(|names| serde_json::json!(names).to_string());
    let parameters = [
        filter.status.map(OutboxStatus::as_str).into(),
        filter.issue.map(|issue| issue.0).into(),
        integrations.as_deref().into(),
    ];
    count(store, "outbox rows", sql, &parameters).await
}
