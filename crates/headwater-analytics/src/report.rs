//! Built-in reports: an SQL query and its chart.
//!
//! Upstream: command line and HTTP interface. Downstream: `store` runs the SQL, `chart` draws the result.
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
    pub chart: Chart,
}

/// A bar chart: the columns `bars` for each `label`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chart {
    /// The column with the labels below the bars.
    pub label: &'static str,
    /// The columns drawn as bars, side by side.
    pub bars: &'static [&'static str],
}

/// All reports.
pub const REPORTS: &[Report] = &[
    Report {
        name: "tickets-per-day",
        title: "Tickets opened per day",
        // Another program may open a ticket with only a message event.
        sql: "WITH opened AS (
                SELECT ticket_id, min(occurred_at) AS at FROM ticket_events
                WHERE event_type IN ('TICKET_CREATED', 'MESSAGE_RECEIVED') GROUP BY ticket_id
              )
              SELECT CAST(opened.at AS DATE) AS day, count(*) AS tickets
              FROM opened GROUP BY day ORDER BY day",
        chart: Chart { label: "day", bars: &["tickets"] },
    },
    Report {
        name: "first-response",
        title: "Seconds from the first message to the first answer, per day",
        sql: "WITH opened AS (
                SELECT ticket_id, min(occurred_at) AS at FROM ticket_events
                WHERE event_type IN ('TICKET_CREATED', 'MESSAGE_RECEIVED') GROUP BY ticket_id
              ), answered AS (
                SELECT ticket_id, min(occurred_at) AS at FROM ticket_events
                WHERE event_type = 'AI_RESPONSE_GENERATED' GROUP BY ticket_id
              )
              SELECT CAST(opened.at AS DATE) AS day, count(*) AS answered,
                round(quantile_cont(epoch(answered.at) - epoch(opened.at), 0.5), 3) AS p50_seconds,
                round(quantile_cont(epoch(answered.at) - epoch(opened.at), 0.95), 3) AS p95_seconds
              FROM opened JOIN answered USING (ticket_id)
              GROUP BY day ORDER BY day",
        chart: Chart { label: "day", bars: &["p50_seconds", "p95_seconds"] },
    },
    Report {
        name: "events-per-run",
        title: "Events answered per run",
        sql: "SELECT run_events AS events, count(*) AS runs
              FROM ticket_events WHERE event_type = 'AI_RESPONSE_GENERATED' AND run_events IS NOT NULL
              GROUP BY events ORDER BY events",
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
