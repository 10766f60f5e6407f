//! `headwater analytics rebuild`, and access to analytics for `sql` and `report`: over the network, or to a local
//! file.
//!
//! Downstream: the routes of `api/analytics.rs`, or `analytics` itself. Guarantees: both return the same results; if a
//! server has the file open, the error says how to query that server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use headwater_analytics::{AnalyticsError, Report, Table};
use serde_json::{Value, json};

use crate::analytics::{self, AnalyticsRequestError};
use crate::cli::api_client::ApiClient;
use crate::cli::in_process;
use crate::cli::local_audit;
use crate::cli::output::{self, OutputStyle};
use crate::cli::progress;
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::config::Settings;
use crate::exit::CliError;
use crate::http::audit::AuditLog;
use crate::server::startup;
use crate::tickets;

/// Poll interval of a rebuild.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Manage the DuckDB file.
#[derive(Debug, clap::Args)]
pub(crate) struct AnalyticsArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(subcommand)]
    command: AnalyticsCommand,
}

#[derive(Debug, Subcommand)]
enum AnalyticsCommand {
    /// Replace all events in the DuckDB file by those of the database, atomically.
    Rebuild {
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

impl AnalyticsArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let AnalyticsCommand::Rebuild { confirm } = &self.command;
        confirm.ask("Replace all events in the DuckDB file by those of the database?")?;
        let source = match self.connection.url() {
            Some(url) => AnalyticsSource::Network(ApiClient::network(&url)?),
            None => {
                let opening = AnalyticsSource::open_for_rebuild(settings);
                progress::waiting("opening database and DuckDB file", opening).await?
            }
        };
        let rebuild = watch(&source).await?;
        if let Some(problem) = rebuild["problem"].as_str() {
            return Err(CliError::new(format!("{problem}; nothing was changed")));
        }
        let done = json!({"read": rebuild["read"], "removed": rebuild["removed"], "stored": rebuild["stored"]});
        let sentence = format!(
            "rebuilt the DuckDB file: read {}, removed {}, stored {} events",
            done["read"], done["removed"], done["stored"]
        );
        output::changed(self.connection.style(), &done, sentence)
    }
}

/// Starts a rebuild and shows its progress until it ends.
async fn watch(source: &AnalyticsSource) -> Result<Value, CliError> {
    let mut rebuild = source.begin_rebuild().await?;
    let mut bar = None;
    while rebuild["is_running"] == true {
        // The total is known once the events are counted.
        if let Some(total) = rebuild["total"].as_u64().filter(|total| *total > 0) {
            let bar = bar.get_or_insert_with(|| progress::start("events", Some(total)));
            bar.set_position(rebuild["read"].as_u64().unwrap_or(bar.position()));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        rebuild = source.rebuild().await?;
    }
    Ok(rebuild)
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Aligned columns.
    Table,
    /// CSV with a header line.
    Csv,
    /// One JSON object per line.
    Json,
    /// SVG chart.
    Svg,
}

impl OutputFormat {
    /// The requested format. `--json` and another format are a usage error.
    pub(crate) fn of(connection: &ConnectionArgs, format: Option<Self>) -> Result<Self, CliError> {
        match (connection.json, format) {
            (true, Some(format)) if format != Self::Json => {
                let name = format.to_possible_value();
                let name = name.as_ref().map_or("", |value| value.get_name());
                Err(CliError::usage(format!(
                    "--json and --format {name} ask for different formats; give one of them"
                )))
            }
            (true, _) => Ok(Self::Json),
            (false, format) => Ok(format.unwrap_or(Self::Table)),
        }
    }
}

/// Where analytics is queried.
pub(crate) enum AnalyticsSource {
    Network(ApiClient),
    Local(analytics::Analytics),
}

impl AnalyticsSource {
    /// Connects to a server, or opens the file of the settings.
    pub(crate) async fn open(
        connection: &ConnectionArgs,
        settings: &Settings,
    ) -> Result<Self, CliError> {
        if let Some(url) = connection.url() {
            return Ok(Self::Network(ApiClient::network(&url)?));
        }
        let opened = analytics::Analytics::open_for_queries(&settings.analytics).await;
        opened.map(Self::Local).map_err(open_error)
    }

    /// Opens the file of the settings for a rebuild.
    async fn open_for_rebuild(settings: &Settings) -> Result<Self, CliError> {
        // Fails early if analytics is disabled, before the database is opened.
        analytics::Analytics::check(&settings.analytics)?;
        let store = in_process::store(settings).await?;
        let prepared = tickets::ensure_schema(&store).await;
        prepared
            .map_err(|error| CliError::new(format!("failed to open the ticket tables: {error}")))?;
        let opened =
            analytics::Analytics::open_for_rebuild(&settings.analytics, Arc::clone(&store)).await;
        let opened = opened.map_err(open_error)?;
        let audit = AuditLog::open_append_only(store).await;
        let audit = audit
            .map_err(|error| CliError::new(format!("failed to open the audit log: {error}")))?;
        // Recorded like the route that does the same.
        let change = ("POST", "/api/v1/analytics/rebuild");
        let recorded = audit.record_local(&local_audit::principal(), change, 202).await;
        recorded.map_err(|refusal| CliError::Unreachable(refusal.message().to_owned()))?;
        Ok(Self::Local(opened))
    }

    /// Runs an SQL query.
    pub(crate) async fn query(&self, sql: &str) -> Result<Table, CliError> {
        match self {
            Self::Network(client) => table(client.get("/sql", &[("query", sql.to_owned())]).await?),
            Self::Local(analytics) => Ok(analytics.query(sql).await?),
        }
    }

    /// Runs a built-in report.
    pub(crate) async fn report(&self, report: &Report) -> Result<Table, CliError> {
        match self {
            Self::Network(client) => {
                table(client.get(&format!("/reports/{}", report.name), &[]).await?)
            }
            Self::Local(analytics) => Ok(analytics.report(report).await?),
        }
    }

    async fn begin_rebuild(&self) -> Result<Value, CliError> {
        match self {
            Self::Network(client) => client.post("/analytics/rebuild", json!({})).await,
            Self::Local(analytics) => Ok(json!(analytics.rebuild()?)),
        }
    }

    async fn rebuild(&self) -> Result<Value, CliError> {
        match self {
            Self::Network(client) => Ok(client.get("/analytics", &[]).await?["rebuild"].take()),
            Self::Local(analytics) => Ok(json!(analytics.rebuild_progress())),
        }
    }
}

fn table(answer: Value) -> Result<Table, CliError> {
    serde_json::from_value(answer)
        .map_err(|error| CliError::new(format!("unexpected response format: {error}")))
}

fn open_error(problem: AnalyticsRequestError) -> CliError {
    match &problem {
        AnalyticsRequestError::Analytics(AnalyticsError::InUse { path }) => {
            startup::analytics_in_use(Path::new(path))
        }
        AnalyticsRequestError::Analytics(AnalyticsError::Missing { path }) => {
            CliError::new(format!(
                "DuckDB file `{path}` does not exist; create it with `headwater serve` or `headwater analytics rebuild`"
            ))
        }
        _ => problem.into(),
    }
}

/// Prints a result in any format except SVG.
pub(in crate::cli) fn show(
    format: OutputFormat,
    style: OutputStyle,
    table: &Table,
) -> Result<(), CliError> {
    match format {
        OutputFormat::Table => columns(table, style)?,
        OutputFormat::Csv => output::exact(table.to_csv().trim_end_matches('\n'))?,
        OutputFormat::Json | OutputFormat::Svg => {
            table.to_json_lines().lines().try_for_each(output::exact)?;
        }
    }
    if table.truncated {
        output::note(&format!("result truncated to the first {} rows", table.rows.len()));
    }
    Ok(())
}

fn columns(table: &Table, style: OutputStyle) -> Result<(), CliError> {
    let headings: Vec<String> =
        table.columns.iter().map(|column| output::plain(column).to_uppercase()).collect();
    // The columns of a query have no units that this program knows.
    let cells = |row: &Vec<Value>| row.iter().map(|value| output::cell("", value)).collect();
    let rows = table.rows.iter().map(cells);
    let lines: Vec<Vec<String>> = std::iter::once(headings).chain(rows).collect();
    output::print_table(&lines, style.width(), "")
}
