//! `headwater history`: how metrics changed.
//!
//! Upstream: `cli/mod.rs`. Downstream: the route `/history`. Guarantees: read-only.

use std::time::Duration;

use serde_json::Value;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, cell};
use crate::cli::units::{milliseconds, moment, time};
use crate::exit::CliError;
use crate::text::counted;

/// Show how metrics changed over time.
#[derive(Debug, clap::Args)]
pub(crate) struct HistoryArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Names, separated by commas; an unknown name lists all.
    #[arg(
        long,
        value_name = "NAMES",
        default_value = "events,runs,runs_failed,run_p50_ms,run_p95_ms,queued,outbox_lag_ms"
    )]
    series: String,
    /// Only this topic: messages added and settled, and the lag of each group, in the last hour. Only with --url.
    #[arg(long, conflicts_with = "series")]
    topic: Option<String>,
    /// With --topic: only this group.
    #[arg(long, requires = "topic")]
    group: Option<String>,
    /// Begin: a time such as 2026-11-15T10:00:00Z, or an age such as 2h.
    #[arg(long, value_name = "WHEN", default_value = "1h", value_parser = moment)]
    from: String,
    /// End: a time, or an age [default: now].
    #[arg(long, value_name = "WHEN", value_parser = moment)]
    to: Option<String>,
    /// Length of a step: a multiple of 10s. Below 1m only with --url, of that process [default: chosen by the range].
    #[arg(long, value_name = "TIME", value_parser = time)]
    step: Option<Duration>,
}

impl HistoryArgs {
    /// Fails without a server if only a server knows the answer.
    pub(in crate::cli) fn require_server(&self) -> Result<(), CliError> {
        match self.topic {
            Some(_) => self.connection.require_server("topics are measured by servers"),
            None => Ok(()),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        let mut query = vec![("from", self.from.clone())];
        query.push(match &self.topic {
            Some(topic) => ("topic", topic.clone()),
            None => ("series", self.series.clone()),
        });
        query.extend(self.group.clone().map(|group| ("group", group)));
        query.extend(self.to.clone().map(|to| ("to", to)));
        query.extend(self.step.map(|step| ("step", format!("{}ms", milliseconds(step)))));
        let history = client.get("/history", &query).await?;
        let list = |name: &str| history[name].as_array().map(Vec::as_slice).unwrap_or_default();
        if style.json {
            return list("points").iter().try_for_each(|point| output::json(style, point));
        }
        for mark in list("marks") {
            let shown = |name: &str| cell(name, &mark[name]);
            let [at, process, version] = ["at", "process", "version"].map(shown);
            let what = match mark["kind"].as_str() {
                Some("plan") => format!("replay plan {} was made", shown("plan")),
                Some("rebalance") => {
                    let moved = mark["partitions"].as_u64().unwrap_or(0);
                    let moved =
                        counted(moved, "partition has a new owner", "partitions have new owners");
                    format!("{moved} in group {} of topic {}", shown("group"), shown("topic"))
                }
                _ => format!("process {process} started, version {version}"),
            };
            output::exact(&format!("{at}  {what}"))?;
        }
        if let Some(problem) = history["problem"].as_str() {
            output::note(problem);
        }
        if list("points").is_empty() {
            output::note("no history in this range; a running server records a minute at a time");
            return Ok(());
        }
        let names = list("series").iter().filter_map(|one| one["name"].as_str());
        output::print_table(&table(&names.collect::<Vec<_>>(), list("points")), style.width(), "")
    }
}

/// A row for each point.
fn table(names: &[&str], points: &[Value]) -> Vec<Vec<String>> {
    let heading = |name: &&str| name.trim_end_matches("_ms").replace('_', " ").to_uppercase();
    let mut rows =
        vec![std::iter::once("AT".to_owned()).chain(names.iter().map(heading)).collect()];
    for point in points {
        let values = names.iter().map(|name| match &point["values"][*name] {
            Value::Null => "–".to_owned(),
            // Latencies have tenths of milliseconds.
            Value::Number(number) if name.ends_with("_ms") => {
                format!("{} ms", number.as_f64().unwrap_or_default())
            }
            value => cell(name, value),
        });
        rows.push(std::iter::once(cell("at", &point["at"])).chain(values).collect());
    }
    rows
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_has_the_values_of_a_step_and_unknown_ones_are_marked() {
        let points = [
            json!({"at": "2026-11-15T10:00:00.000Z", "values": {"events": 3, "run_p95_ms": 81.3, "queued": null}}),
        ];
        let rows = table(&["events", "run_p95_ms", "queued"], &points);
        assert_eq!(rows[0], ["AT", "EVENTS", "RUN P95", "QUEUED"]);
        assert_eq!(rows[1][1..], ["3", "81.3 ms", "–"]);
    }
}
