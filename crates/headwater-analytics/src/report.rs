//! Built-in reports: an SQL query and its chart.
//!
//! Upstream: command line and HTTP interface. Downstream: `store` runs the SQL, `chart` draws the result.
//! The reports of tickets read `events`, which has second deliveries of some events, not the view `ticket_events`: the first
//! delivery is found per ticket or answer anyway, and the view sorts all events for it. They group by a hash of 64 bits instead of
//! the id, which takes a third of the memory; the probability that two of 3 * 10^7 tickets have the same one is 3 * 10^-5. Types
//! are compared by their hash, too, which DuckDB computes once for each different type of a block.
//! Not here: ad-hoc queries (see `AnalyticsReader::query`).

use crate::error::{AnalyticsError, Result};

/// A built-in report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Its unique name.
    pub name: &'static str,
    /// Title, one line.
    pub title: &'static str,
    /// The query. Empty: the rows are not in the DuckDB file; the server reads them from its database.
    pub sql: &'static str,
    /// The chart of its result.
    pub chart: Chart<'static>,
}

/// A bar chart: the columns `bars` for each `label`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chart<'a> {
    /// The column with the labels below the bars.
    pub label: &'a str,
    /// The columns drawn as bars, side by side.
    pub bars: &'a [&'a str],
}

/// All reports.
pub const REPORTS: &[Report] = &[
    Report {
        name: "tickets-per-day",
        title: "Tickets opened per day",
        // Another program may open a ticket with only a message event.
        sql: "WITH tickets AS (
                SELECT min(occurred_at) AS opened_at FROM events
                WHERE hash(event_type) IN (hash('TICKET_CREATED'), hash('MESSAGE_RECEIVED'))
                GROUP BY hash(ticket_id)
              )
              SELECT CAST(opened_at AS DATE) AS day, count(*) AS tickets
              FROM tickets GROUP BY day ORDER BY day",
        chart: Chart { label: "day", bars: &["tickets"] },
    },
    Report {
        name: "first-response",
        title: "Seconds from the first message to the first answer, per day",
        sql: "WITH tickets AS (
                SELECT min(CASE WHEN type <> hash('AI_RESPONSE_GENERATED') THEN occurred_at END) AS opened_at,
                  min(CASE WHEN type = hash('AI_RESPONSE_GENERATED') THEN occurred_at END) AS answered_at
                FROM (SELECT hash(event_type) AS type, hash(ticket_id) AS ticket, occurred_at FROM events)
                WHERE type IN (hash('TICKET_CREATED'), hash('MESSAGE_RECEIVED'), hash('AI_RESPONSE_GENERATED'))
                GROUP BY ticket
              ), days AS (
                SELECT CAST(opened_at AS DATE) AS day, count(*) AS answered,
                  quantile_cont(epoch(answered_at) - epoch(opened_at), [0.5, 0.95]) AS seconds
                FROM tickets WHERE opened_at IS NOT NULL AND answered_at IS NOT NULL GROUP BY day
              )
              SELECT day, answered, round(seconds[1], 3) AS p50_seconds, round(seconds[2], 3) AS p95_seconds
              FROM days ORDER BY day",
        chart: Chart { label: "day", bars: &["p50_seconds", "p95_seconds"] },
    },
    Report {
        name: "events-per-run",
        title: "Events answered per run",
        sql: "WITH answers AS (
                SELECT any_value(run_events) AS events FROM events
                WHERE event_type = 'AI_RESPONSE_GENERATED' AND run_events IS NOT NULL
                GROUP BY hash(ticket_id, coalesce(message_id, entry_ms || '-' || entry_seq))
              )
              SELECT events, count(*) AS runs FROM answers GROUP BY events ORDER BY events",
        chart: Chart { label: "events", bars: &["runs"] },
    },
    Report {
        name: "tokens-and-cost",
        title: "Tokens and cost of all model runs, per day, integration and model",
        sql: "",
        chart: Chart { label: "day", bars: &["tokens_in", "tokens_out"] },
    },
    Report {
        name: "dead-letters",
        title: "Dead letters by topic and reason",
        sql: "SELECT topic, reason, count(*) AS letters, max(failed_at) AS last_at
              FROM dead_letters GROUP BY topic, reason ORDER BY letters DESC, topic, reason",
        chart: Chart { label: "reason", bars: &["letters"] },
    },
];

impl Report {
    /// Whether its rows are in the database of the server, not in the DuckDB file.
    pub fn is_from_database(&self) -> bool {
        self.sql.is_empty()
    }
}

/// The report of this name.
pub fn report(name: &str) -> Result<&'static Report> {
    REPORTS.iter().find(|report| report.name == name).ok_or_else(|| {
        let names: Vec<&str> = REPORTS.iter().map(|report| report.name).collect();
        let problem = format!("no report `{name}`; available: {}", names.join(", "));
        AnalyticsError::invalid("a report", problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_report_name_fails_with_the_available_ones() {
        let error = report("tickets").unwrap_err().to_string();
        assert!(error.contains("`tickets`; available: tickets-per-day, first-response"), "{error}");
        assert_eq!(report("dead-letters").unwrap().title, "Dead letters by topic and reason");
    }
}
