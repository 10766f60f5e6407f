//! Statements that list tickets by a filter, and that search them for words.
//!
//! Upstream: `store` and `search`, on a read connection. Downstream: `StoreConnection`, as for `statements`. Guarantees: a search
//! compares the texts of at most [`SEARCHED_MAX`] tickets, so its cost does not grow with their number.

use headwater_issue::{SqlRow, SqlValue, StoreConnection};

use crate::desk::tools::FoundTicket;
use crate::tickets::sql::statements::{list, read_ticket, select_ticket};
use crate::tickets::ticket::{Ticket, TicketError, TicketFilter, TicketStatus};

/// Number of tickets that one search scans.
pub(crate) const SEARCHED_MAX: usize = 1000;

/// What is read of a ticket: all its columns, or what a search needs.
macro_rules! select_part {
    (columns) => {
        select_ticket!("WHERE ")
    };
    (title) => {
        "SELECT number, ticket_id, title FROM tickets WHERE "
    };
}

/// Tickets that a filter matches. `$known` is the part of the filter that has an index, as a literal: parameters alone, which may be
/// null, would make the database read all tickets.
macro_rules! select_filtered {
    ($part:ident, $known:literal, $order:literal, $direction:literal) => {
        concat!(
            select_part!($part),
            $known,
            " number ",
            $order,
            " $1 AND ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR user_id = $3)
             AND ($5::text IS NULL OR ticket_id::text LIKE $5)
             AND ($6::boolean IS NULL OR handed_over = $6) AND ($7::text IS NULL OR assignee = $7)
             AND (NOT $8::boolean OR assignee IS NULL)
         ORDER BY number ",
            $direction,
            " LIMIT $4"
        )
    };
}

macro_rules! list_statement {
    ($known:literal, $order:literal, $direction:literal) => {
        select_filtered!(columns, $known, $order, $direction)
    };
}

/// Whether the ticket `t` has one of the words in its title or messages. The words are a parameter: a JSON array of `LIKE` patterns
/// that are escaped with a backslash.
macro_rules! has_word {
    ($words:literal) => {
        concat!(
            "EXISTS (SELECT 1 FROM headwater_each(",
            $words,
            ") w
             WHERE lower(t.title) LIKE lower(w.value) ESCAPE '\\' OR EXISTS (
                 SELECT 1 FROM ticket_messages m
                 WHERE m.ticket_id = t.ticket_id AND lower(m.content) LIKE lower(w.value) ESCAPE '\\'))"
        )
    };
}

macro_rules! search_statement {
    ($known:literal, $order:literal, $direction:literal) => {
        concat!(
            "SELECT t.number, ",
            has_word!("$9"),
            " FROM (",
            select_filtered!(title, $known, $order, $direction),
            ") AS t ORDER BY t.number ",
            $direction
        )
    };
}

/// The statement for the part of a filter that has an index, and for its order.
macro_rules! statement_for {
    ($statement:ident, $filter:expr) => {{
        let filter: &TicketFilter = $filter;
        let of_queue =
            filter.handed_over == Some(true) || filter.assignee.is_some() || filter.unassigned;
        match (of_queue, filter.user_id.is_some(), filter.status, filter.oldest_first) {
            (true, _, _, false) => $statement!("handed_over AND", "<", "DESC"),
            (true, _, _, true) => $statement!("handed_over AND", ">", ""),
            (_, true, _, false) => $statement!("user_id = $3 AND", "<", "DESC"),
            (_, true, _, true) => $statement!("user_id = $3 AND", ">", ""),
            (_, _, Some(TicketStatus::Open), false) => {
                $statement!("status = 'open' AND", "<", "DESC")
            }
            (_, _, Some(TicketStatus::Open), true) => $statement!("status = 'open' AND", ">", ""),
            (_, _, Some(TicketStatus::Closed), false) => {
                $statement!("status = 'closed' AND", "<", "DESC")
            }
            (_, _, Some(TicketStatus::Closed), true) => {
                $statement!("status = 'closed' AND", ">", "")
            }
            (_, _, None, false) => $statement!("", "<", "DESC"),
            (_, _, None, true) => $statement!("", ">", ""),
        }
    }};
}

/// The search of the model. `$known` decides about the user: one with an index, or `$1` is null.
macro_rules! select_for_model {
    ($known:literal) => {
        concat!(
            "SELECT t.ticket_id::text, t.title, t.status, (
             SELECT m.content FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.author <> 'user'
             ORDER BY m.seq DESC LIMIT 1)
         FROM (SELECT number, ticket_id, title, status FROM tickets WHERE ",
            $known,
            " ORDER BY number DESC LIMIT $2) t
         WHERE t.ticket_id::text <> $3 AND ",
            has_word!("$4"),
            " ORDER BY t.number DESC LIMIT $5"
        )
    };
}

/// The statement for the search of the model, in the tickets of one user or of all.
fn model_search_statement(user_id: Option<&str>) -> &'static str {
    match user_id {
        Some(_) => select_for_model!("user_id = $1"),
        None => select_for_model!("$1::text IS NULL"),
    }
}

fn tickets_statement(filter: &TicketFilter) -> &'static str {
    statement_for!(list_statement, filter)
}

fn search_list_statement(filter: &TicketFilter) -> &'static str {
    statement_for!(search_statement, filter)
}

/// A ticket whose texts were compared.
pub(crate) struct SearchedTicket {
    pub(crate) number: i64,
    pub(crate) has_word: bool,
}

/// A search of the model. `patterns` are `LIKE` patterns, escaped with a backslash.
pub(crate) struct SearchParameters<'a> {
    pub(crate) patterns: &'a [String],
    pub(crate) user_id: Option<&'a str>,
    pub(crate) except: &'a str,
    pub(crate) limit: i64,
}

pub(crate) async fn tickets(
    connection: StoreConnection<'_>,
    filter: &TicketFilter,
    limit: i64,
) -> Result<Vec<Ticket>, TicketError> {
    let id_pattern = id_pattern(filter);
    let parameters = filter_parameters(filter, id_pattern.as_deref(), limit);
    list(connection, "tickets", tickets_statement(filter), &parameters, read_ticket).await
}

/// Looks for words in the first [`SEARCHED_MAX`] tickets of a list, in its order.
pub(crate) async fn search_list(
    connection: StoreConnection<'_>,
    filter: &TicketFilter,
    patterns: &[String],
) -> Result<Vec<SearchedTicket>, TicketError> {
    let id_pattern = id_pattern(filter);
    let patterns = serde_json::json!(patterns).to_string();
    let filtered = filter_parameters(filter, id_pattern.as_deref(), SEARCHED_MAX as i64);
    let parameters = [&filtered[..], &[(&patterns).into()]].concat();
    let select = search_list_statement(filter);
    let read =
        |row: &SqlRow| Ok(SearchedTicket { number: row.get(0)?, has_word: row.get::<bool>(1)? });
    list(connection, "search tickets", select, &parameters, read).await
}

/// The tickets with these numbers, ascending; those that do not exist any more are left out.
pub(crate) async fn numbered_tickets(
    connection: StoreConnection<'_>,
    numbers: &[i64],
) -> Result<Vec<Ticket>, TicketError> {
    let select = select_ticket!(
        "WHERE number IN (SELECT value::bigint FROM headwater_each($1)) ORDER BY number"
    );
    let numbers = serde_json::json!(numbers).to_string();
    list(connection, "numbered tickets", select, &[(&numbers).into()], read_ticket).await
}

/// Scans only the newest tickets.
pub(crate) async fn search(
    connection: StoreConnection<'_>,
    search: &SearchParameters<'_>,
) -> Result<Vec<FoundTicket>, TicketError> {
    let patterns = serde_json::json!(search.patterns).to_string();
    let parameters = [
        search.user_id.into(),
        (SEARCHED_MAX as i64).into(),
        search.except.into(),
        (&patterns).into(),
        search.limit.into(),
    ];
    let read = |row: &SqlRow| {
        let (ticket_id, title, status) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok(FoundTicket { ticket_id, title, status, answer: row.get(3)? })
    };
    let select = model_search_statement(search.user_id);
    list(connection, "search", select, &parameters, read).await
}

/// Digits and dashes: there is nothing to escape.
fn id_pattern(filter: &TicketFilter) -> Option<String> {
    filter.id_prefix.as_ref().map(|prefix| format!("{prefix}%"))
}

/// The parameters of `select_filtered`.
fn filter_parameters<'a>(
    filter: &'a TicketFilter,
    id_pattern: Option<&'a str>,
    limit: i64,
) -> [SqlValue<'a>; 8] {
    let first = if filter.oldest_first { i64::MIN } else { i64::MAX };
    [
        filter.after.unwrap_or(first).into(),
        filter.status.map(TicketStatus::as_str).into(),
        filter.user_id.as_deref().into(),
        limit.into(),
        id_pattern.into(),
        filter.handed_over.into(),
        filter.assignee.as_deref().into(),
        filter.unassigned.into(),
    ]
}

#[cfg(test)]
mod tests {
    use headwater_issue::{DebounceWindow, Nudger, StoreOptions, connect};

    use super::*;
    use crate::tickets::Tickets;

    /// How SQLite would execute a statement.
    async fn plan(tickets: &Tickets, sql: &str, parameters: usize) -> String {
        let sql: &'static str = format!("EXPLAIN QUERY PLAN {sql}").leak();
        let none = vec![SqlValue::Text(None); parameters];
        let read = |row: &SqlRow| row.get::<String>(3);
        let steps =
            tickets.read(async |connection| list(connection, "plan", sql, &none, read).await);
        steps.await.unwrap().join("; ")
    }

    #[tokio::test]
    async fn a_list_and_a_search_with_a_filter_that_has_an_index_read_only_its_tickets() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("a.db").display());
        let store = connect(&url, &StoreOptions::default()).await.unwrap();
        let streams =
            headwater_stream::connect("embedded:memory", &Default::default()).await.unwrap();
        let debounce = DebounceWindow::default();
        let tickets = Tickets::open(store, Nudger::new(streams), debounce).await.unwrap();
        for oldest_first in [false, true] {
            let all = TicketFilter { oldest_first, ..TicketFilter::default() };
            let with = |status| TicketFilter { status: Some(status), ..all.clone() };
            let of_ada = TicketFilter { user_id: Some("ada".to_owned()), ..all.clone() };
            let handed_over = TicketFilter { handed_over: Some(true), ..all.clone() };
            for (filter, found_by) in [
                (with(TicketStatus::Open), "idx_tickets_status (status=? AND number"),
                (with(TicketStatus::Closed), "idx_tickets_status (status=? AND number"),
                (of_ada, "idx_tickets_user (user_id=? AND number"),
                (handed_over, "idx_tickets_handed_over"),
                (all, "INTEGER PRIMARY KEY (rowid"),
            ] {
                let listed = plan(&tickets, tickets_statement(&filter), 8).await;
                let is_sorted = !listed.contains("TEMP B-TREE");
                assert!(listed.contains(found_by) && is_sorted, "{filter:?}: {listed}");
                let searched = plan(&tickets, search_list_statement(&filter), 9).await;
                assert!(searched.contains(found_by), "{filter:?}: {searched}");
            }
        }
        let searched = plan(&tickets, model_search_statement(Some("ada")), 5).await;
        assert!(searched.contains("idx_tickets_user (user_id=?"), "{searched}");
    }
}
