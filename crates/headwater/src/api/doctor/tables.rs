//! Which setting bounds which table of the database.
//!
//! Upstream: the deletion in `server/retention.rs`, and the doctor, which names the tables that grow. Guarantees: no table of the
//! migrations is missing.

use std::time::Duration;

use headwater_issue::Store;
use headwater_stream::clock::{Clock, SystemClock};
use tracing::debug;

use crate::api::doctor::Finding;
use crate::config::{RetentionSettings, Settings};
use crate::text;

/// A setting of how long rows are kept, and the tables that grow without a limit if it is 0.
#[derive(Debug)]
pub(crate) struct TableRetention {
    setting: &'static str,
    /// How long rows are kept; `None` is forever.
    pub(crate) keep: fn(&RetentionSettings) -> Option<Duration>,
    tables: &'static [&'static str],
}

/// What an issue that continues to get events accumulates.
pub(crate) const EVENTS: TableRetention = TableRetention {
    setting: "retention.events",
    keep: |settings| settings.events,
    tables: &["event_logs", "event_log_originals", "issue_runs"],
};

/// Issues with everything that is deleted with them, and what is kept as long.
pub(crate) const ISSUES: TableRetention = TableRetention {
    setting: "retention.issues",
    keep: |settings| settings.issues,
    tables: &[
        "issues",
        "tickets",
        "ticket_messages",
        "drafts",
        "tool_effects",
        "desk_usage",
        "model_runs",
        "model_run_days",
    ],
};

/// Names the tables that grow without a limit.
pub(super) fn retention(settings: &Settings) -> Finding {
    let is_unlimited = |it: &&TableRetention| (it.keep)(&settings.retention).is_none();
    let unlimited: Vec<_> = [&EVENTS, &ISSUES].into_iter().filter(is_unlimited).collect();
    if unlimited.is_empty() {
        return Finding::ok("retention", "every table has a retention");
    }
    let names = unlimited.iter().flat_map(|it| it.tables);
    let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
    let set: Vec<_> = unlimited.iter().map(|it| format!("`{}`", it.setting)).collect();
    Finding::warning(
        "retention",
        format!("these tables grow without a limit: {}", names.join(", ")),
        &format!("set {}", set.join(" and ")),
    )
}

/// Open tickets that are looked at, from the oldest on.
const OPEN_TICKETS_MAX: i64 = 10_000;

/// Tickets stay as long as they are open: names how many have not changed for longer than `retention.issues`.
pub(super) async fn open_tickets(settings: &Settings, store: &dyn Store) -> Option<Finding> {
    let keep = (ISSUES.keep)(&settings.retention)?;
    match count_open_before(store, SystemClock.now().before(keep).as_millis()).await {
        Ok(0) => None,
        Ok(count) => Some(Finding::warning(
            "tickets",
            text::counted(
                count,
                "ticket has been open and unchanged for longer than `retention.issues`",
                "tickets have been open and unchanged for longer than `retention.issues`",
            ),
            "list them with `headwater ticket list --status open --oldest-first`, and close those that need no answer: open tickets are \
             never deleted",
        )),
        // For example because this is the database of a program without tickets. What is wrong with the database is another finding.
        Err(error) => {
            debug!(%error, "open tickets were not counted");
            None
        }
    }
}

async fn count_open_before(store: &dyn Store, time_ms: u64) -> anyhow::Result<u64> {
    let select = "SELECT count(*) FROM (SELECT updated_at FROM tickets WHERE status = 'open' ORDER BY number LIMIT $2) AS oldest
         WHERE headwater_ms(updated_at) < $1";
    let parameters = [i64::try_from(time_ms)?.into(), OPEN_TICKETS_MAX.into()];
    let mut connection = store.read_connection().await?;
    let rows = connection.connection().fetch_all(select, &parameters).await;
    connection.release().await;
    Ok(u64::try_from(rows?[0].get::<i64>(0)?)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    /// Tables whose limit cannot be turned off.
    const BOUNDED: [&str; 16] = [
        // One row for each `[[integration]]` that was ever configured, and at most 200 versions of its prompt.
        "integrations",
        "prompts",
        "prompt_versions",
        // `retention.outbox`, at least an hour. Rows that are dead, and quarantined issues, are findings of their own.
        "outbox",
        "dead_letters",
        // Deleted when they expire.
        "workers",
        "desk_reservations",
        "budget_waits",
        // `history.keep`; 0 stores nothing.
        "metrics_history",
        // `audit.rows_max`.
        "audit_log",
        // 1,000 plans for 30 days; the letters of a plan are deleted with it.
        "replay_plans",
        "replay_plan_letters",
        // One row.
        "replay_plan_lock",
        "headwater_identity",
        "headwater_clock",
        "headwater_functions",
    ];

    /// The tables that migrations create, in either database.
    fn tables_of_migrations() -> BTreeSet<String> {
        let mut created = BTreeSet::new();
        let mut renamed = BTreeSet::new();
        for database in ["postgres", "sqlite"] {
            for folder in [
                format!("../headwater-issue/src/{database}/migrations"),
                format!("src/tickets/sql/migrations/{database}"),
            ] {
                let folder = format!("{}/{folder}", env!("CARGO_MANIFEST_DIR"));
                for file in fs::read_dir(&folder).unwrap() {
                    let text = fs::read_to_string(file.unwrap().path()).unwrap();
                    for line in text.lines() {
                        match line.split([' ', '(', ';']).collect::<Vec<_>>()[..] {
                            ["CREATE", "TABLE", name, ..] => created.insert(name.to_owned()),
                            ["ALTER", "TABLE", name, "RENAME", "TO", ..] => {
                                renamed.insert(name.to_owned())
                            }
                            _ => false,
                        };
                    }
                }
            }
        }
        created.difference(&renamed).cloned().collect()
    }

    #[test]
    fn every_table_of_the_migrations_has_a_limit_or_a_setting() {
        let known = [EVENTS.tables, ISSUES.tables, &BOUNDED].concat();
        let listed: BTreeSet<String> = known.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(listed.len(), known.len(), "a table is listed twice");
        assert_eq!(listed, tables_of_migrations());
    }
}
