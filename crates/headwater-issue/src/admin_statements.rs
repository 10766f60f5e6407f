//! The statements of lists of issues and outbox rows: one for each filter that has an index.
//!
//! Upstream: `admin_queries.rs` executes them, on both databases. Guarantees: a list that a filter makes short reads only its rows.

use crate::admin::{IssueFilter, OutboxFilter, OutboxStatus};
use crate::issue::ProcessingStatus;
use crate::row_decoding::issue_columns;

/// The facts of outbox rows; `o` is the row.
macro_rules! outbox_facts_select {
    () => {
        "SELECT o.id, o.issue_id, g.name, o.kind, o.target, o.status, o.attempts, o.crashes,
             headwater_ms(o.due_at), o.taken_by, o.last_error, headwater_ms(o.created_at),
             headwater_ms(o.delivered_at),
             (SELECT min(f.id) FROM outbox f WHERE f.issue_id = o.issue_id AND f.kind = o.kind
                  AND f.status IN ('waiting', 'pending', 'taken') AND f.id < o.id),
             headwater_ms(headwater_now())
         FROM outbox o JOIN integrations g ON g.id = o.integration_id"
    };
}

pub(crate) use outbox_facts_select;

/// Issues that a filter matches. `$known` is the part of the filter that has an index, as a literal: parameters alone, which may be
/// null, would make the database read all issues. `$order` compares with the last id of the previous page, `$direction` sorts.
macro_rules! issues_select {
    ($known:literal, $order:literal, $direction:literal) => {
        concat!(
            "SELECT ",
            issue_columns!(),
            " FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE ",
            $known,
            " i.id ",
            $order,
            " $1 AND ($2::text IS NULL OR i.processing_status = $2)
                  AND ($3::boolean IS NULL OR (i.quarantined_at IS NOT NULL) = $3)
                  AND ($4::text IS NULL OR g.name = $4)
                  AND ($5::text IS NULL OR lower(i.last_error) LIKE $5 ESCAPE '!')
              ORDER BY i.id ",
            $direction,
            " LIMIT $6"
        )
    };
}

/// How many issues match, up to a limit. The parameters are those of a list, with the limit first.
macro_rules! issues_count {
    ($known:literal) => {
        concat!(
            "SELECT count(*) FROM (SELECT 1 FROM issues i WHERE ",
            $known,
            " ($2::text IS NULL OR i.processing_status = $2)
                  AND ($3::boolean IS NULL OR (i.quarantined_at IS NOT NULL) = $3)
                  AND ($4::text IS NULL OR i.integration_id = (SELECT id FROM integrations WHERE name = $4))
                  AND ($5::text IS NULL OR lower(i.last_error) LIKE $5 ESCAPE '!') LIMIT $1) AS matching"
        )
    };
}

/// Outbox rows that a filter matches, as for issues.
macro_rules! outbox_select {
    ($known:literal, $order:literal, $direction:literal) => {
        concat!(
            outbox_facts_select!(),
            " WHERE ",
            $known,
            "o.id ",
            $order,
            " $1 AND ($2::text IS NULL OR o.status = $2)
                  AND ($3::bigint IS NULL OR o.issue_id = $3) ORDER BY o.id",
            $direction,
            " LIMIT $4"
        )
    };
}

/// Counts of open work. `processing_status != 'idle'` names the partial index, which SQLite does not infer from another status.
pub(crate) const BACKLOG: &str = "SELECT
         (SELECT count(*) FROM issues WHERE processing_status = 'queued' AND processing_status != 'idle'),
         (SELECT count(*) FROM issues WHERE processing_status = 'processing' AND processing_status != 'idle'),
         (SELECT count(*) FROM issues WHERE quarantined_at IS NOT NULL),
         (SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')),
         (SELECT count(*) FROM outbox WHERE status = 'dead'),
         (SELECT headwater_ms(min(created_at)) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')),
         (SELECT headwater_ms(min(first_pending_at)) FROM (SELECT first_pending_at FROM issues
          WHERE processing_status = 'queued' AND processing_status != 'idle' ORDER BY id LIMIT $1) AS longest_known),
         headwater_ms(headwater_now())";

/// A statement for issues that wait. `processing_status != 'idle'` names the partial index, as above.
macro_rules! of_waiting_issues {
    ($statement:ident $(, $further:literal)*) => {
        $statement!(
            "i.processing_status = 'queued' AND i.processing_status != 'idle' AND i.not_before IS NOT NULL
                  AND i.quarantined_at IS NULL AND"
            $(, $further)*
        )
    };
}

/// The statement for the issues of a filter.
pub(crate) fn issues_statement(filter: &IssueFilter) -> &'static str {
    let is_active = filter.status.is_some_and(|status| status != ProcessingStatus::Idle);
    let (is_quarantined, has_error) = (filter.quarantined == Some(true), filter.error.is_some());
    if filter.waiting {
        return match filter.newest_first {
            false => of_waiting_issues!(issues_select, ">", ""),
            true => of_waiting_issues!(issues_select, "<", "DESC"),
        };
    }
    match (is_quarantined, has_error, is_active, filter.newest_first) {
        (true, _, _, false) => issues_select!("i.quarantined_at IS NOT NULL AND", ">", ""),
        (true, _, _, true) => issues_select!("i.quarantined_at IS NOT NULL AND", "<", "DESC"),
        (_, true, _, false) => issues_select!("i.last_error IS NOT NULL AND", ">", ""),
        (_, true, _, true) => issues_select!("i.last_error IS NOT NULL AND", "<", "DESC"),
        (_, _, true, false) => issues_select!(
            "i.processing_status = $2 AND i.processing_status != 'idle' AND",
            ">",
            ""
        ),
        (_, _, true, true) => issues_select!(
            "i.processing_status = $2 AND i.processing_status != 'idle' AND",
            "<",
            "DESC"
        ),
        (.., false) => issues_select!("", ">", ""),
        (.., true) => issues_select!("", "<", "DESC"),
    }
}

/// The statement that counts the issues of a filter.
pub(crate) fn issues_count_statement(filter: &IssueFilter) -> &'static str {
    let is_active = filter.status.is_some_and(|status| status != ProcessingStatus::Idle);
    if filter.waiting {
        return of_waiting_issues!(issues_count);
    }
    match (filter.quarantined == Some(true), filter.error.is_some(), is_active) {
        (true, ..) => issues_count!("i.quarantined_at IS NOT NULL AND"),
        (_, true, _) => issues_count!("i.last_error IS NOT NULL AND"),
        (_, _, true) => {
            issues_count!("i.processing_status = $2 AND i.processing_status != 'idle' AND")
        }
        _ if filter.integration.is_some() => {
            issues_count!("i.integration_id = (SELECT id FROM integrations WHERE name = $4) AND")
        }
        _ => issues_count!(""),
    }
}

/// The statement for the outbox rows of a filter.
pub(crate) fn outbox_statement(filter: &OutboxFilter) -> &'static str {
    let is_open = matches!(filter.status, Some(status) if !matches!(status, OutboxStatus::Delivered | OutboxStatus::Dead));
    let is_dead = filter.status == Some(OutboxStatus::Dead);
    match (filter.issue.is_some(), is_dead, is_open, filter.newest_first) {
        (true, _, _, false) => outbox_select!("o.issue_id = $3 AND ", ">", ""),
        (true, _, _, true) => outbox_select!("o.issue_id = $3 AND ", "<", " DESC"),
        (_, true, _, false) => outbox_select!("o.status = 'dead' AND ", ">", ""),
        (_, true, _, true) => outbox_select!("o.status = 'dead' AND ", "<", " DESC"),
        (_, _, true, false) => {
            outbox_select!("o.status IN ('waiting', 'pending', 'taken') AND ", ">", "")
        }
        (_, _, true, true) => {
            outbox_select!("o.status IN ('waiting', 'pending', 'taken') AND ", "<", " DESC")
        }
        (.., false) => outbox_select!("", ">", ""),
        (.., true) => outbox_select!("", "<", " DESC"),
    }
}

#[cfg(all(test, feature = "sqlite"))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use sqlx::{Connection, SqliteConnection};

    use super::*;
    use crate::issue::IssueId;
    use crate::migrations::ISSUES;
    use crate::sql::{SqlValue, sqlite_rows};

    /// How SQLite would execute a statement.
    async fn plan(connection: &mut SqliteConnection, sql: &str, parameters: usize) -> String {
        let sql = format!("EXPLAIN QUERY PLAN {}", sql.replace("headwater_now()", "0"));
        let none = vec![SqlValue::Text(None); parameters];
        let rows = sqlite_rows(connection, &sql, &none).await.unwrap();
        let steps: Vec<String> = rows.iter().map(|row| row.get(3).unwrap()).collect();
        steps.join("; ")
    }

    async fn with_schema() -> SqliteConnection {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        for migration in ISSUES {
            sqlx::raw_sql(migration.sqlite).execute(&mut connection).await.unwrap();
        }
        connection
    }

    #[tokio::test]
    async fn counting_open_work_reads_no_idle_issue() {
        let found = plan(&mut with_schema().await, BACKLOG, 1).await;
        assert!(!found.contains("SCAN issues;") && !found.ends_with("SCAN issues"), "{found}");
        assert_eq!(found.matches("idx_issues_status_id").count(), 3, "{found}");
    }

    #[tokio::test]
    async fn a_list_with_a_filter_for_few_rows_reads_only_those() {
        let mut connection = with_schema().await;
        for newest_first in [false, true] {
            let all = IssueFilter { newest_first, ..IssueFilter::default() };
            let queued = Some(ProcessingStatus::Queued);
            let with_error = IssueFilter { error: Some("refused".to_owned()), ..all.clone() };
            for (filter, index) in [
                (IssueFilter { quarantined: Some(true), ..all.clone() }, "idx_issues_quarantined"),
                (IssueFilter { status: queued, ..with_error.clone() }, "idx_issues_error"),
                (with_error.clone(), "idx_issues_error"),
                (IssueFilter { status: queued, ..all.clone() }, "idx_issues_status_id"),
                (IssueFilter { waiting: true, ..all.clone() }, "idx_issues_status_id"),
                (IssueFilter { waiting: true, ..with_error }, "idx_issues_"),
                (all, "INTEGER PRIMARY KEY"),
            ] {
                let found = plan(&mut connection, issues_statement(&filter), 6).await;
                let is_sorted = !found.contains("TEMP B-TREE");
                assert!(found.contains(index) && is_sorted, "{filter:?}: {found}");
                if index.starts_with("idx_") {
                    let counted = plan(&mut connection, issues_count_statement(&filter), 5).await;
                    assert!(counted.contains(index), "{filter:?}: {counted}");
                }
            }
            let all = OutboxFilter { newest_first, ..OutboxFilter::default() };
            let with = |status| OutboxFilter { status: Some(status), ..all };
            for (filter, index) in [
                (with(OutboxStatus::Dead), "o USING INDEX idx_outbox_dead"),
                (with(OutboxStatus::Pending), "o USING INDEX idx_outbox_open"),
                (with(OutboxStatus::Waiting), "o USING INDEX idx_outbox_open"),
                (OutboxFilter { issue: Some(IssueId(1)), ..all }, "o USING INDEX idx_outbox_issue"),
                (all, "o USING INTEGER PRIMARY KEY"),
            ] {
                let found = plan(&mut connection, outbox_statement(&filter), 4).await;
                let is_sorted = !found.contains("TEMP B-TREE");
                assert!(found.contains(index) && is_sorted, "{filter:?}: {found}");
            }
        }
    }
}
