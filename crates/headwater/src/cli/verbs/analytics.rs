//! `headwater analytics rebuild`, and the way that questions to analytics take: over the network, or to a file of this
//! machine.
//!
//! Downstream: the routes of `analytics_routes`, or `analytics` itself. Promises: both give the same answers; a file that a
//! server has is refused with the way to ask that server.

use std::sync::Arc;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use headwater_analytics::{AnalyticsError, Report, Table};
use serde_json::{Value, json};

use crate::analytics::{self, Problem};
use crate::cli::api_client::Client;
use crate::cli::in_process;
use crate::cli::local_audit;
use crate::cli::output;
use crate::cli::progress::Progress;
use crate::cli::{Confirm, Reach};
use crate::config::Settings;
use crate::exit::Failure;
use crate::http::audit::Audit;
use crate::tickets;

/// How often to look how far a rebuild is.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The DuckDB file.
#[derive(Debug, clap::Args)]
pub(crate) struct Analytics {
    #[command(flatten)]
    reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Replace all events in the DuckDB file by those of the database, in one step.
    Rebuild {
        #[command(flatten)]
        confirm: Confirm,
    },
}

impl Analytics {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let What::Rebuild { confirm } = &self.what;
        confirm.ask("Replace all events in the DuckDB file by those of the database?")?;
        let way = match self.reach.url() {
            Some(url) => Way::Network(Client::network(&url)?),
            None => Way::to_rebuild(settings).await?,
        };
        let rebuild = watch(&way).await?;
        if let Some(problem) = rebuild["problem"].as_str() {
            return Err(Failure::new(format!("{problem}; nothing has changed")));
        }
        let done = json!({"read": rebuild["read"], "removed": rebuild["removed"], "stored": rebuild["stored"]});
        output::object(self.reach.json, &done)
    }
}

/// Begins a rebuild and shows how far it is, until it has ended.
async fn watch(way: &Way) -> Result<Value, Failure> {
    let mut rebuild = way.begin_rebuild().await?;
    let (mut progress, mut shown) = (None, 0);
    while rebuild["is_running"] == true {
        // The total is known once the events are counted.
        if let Some(total) = rebuild["total"].as_u64().filter(|total| *total > 0) {
            let progress = progress.get_or_insert_with(|| Progress::new("events", Some(total)));
            let read = rebuild["read"].as_u64().unwrap_or(shown);
            progress.add(read.saturating_sub(shown));
            shown = read;
        }
        tokio::time::sleep(LOOK_EVERY).await;
        rebuild = way.rebuild().await?;
    }
    Ok(rebuild)
}

/// How an answer looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people.
    Table,
    /// With a header line.
    Csv,
    /// One object a line.
    Json,
    /// A chart.
    Svg,
}

impl Format {
    /// The one that was asked for.
    pub(crate) fn of(reach: &Reach, format: Option<Self>) -> Self {
        if reach.json { Self::Json } else { format.unwrap_or(Self::Table) }
    }
}

/// The way to analytics.
pub(crate) enum Way {
    Network(Client),
    Here(analytics::Analytics),
}

impl Way {
    /// To ask a server, or the file of the settings.
    pub(crate) async fn to_ask(reach: &Reach, settings: &Settings) -> Result<Self, Failure> {
        if let Some(url) = reach.url() {
            return Ok(Self::Network(Client::network(&url)?));
        }
        let opened = analytics::Analytics::to_ask(settings.analytics_path.as_deref()).await;
        opened.map(Self::Here).map_err(|problem| not_opened(problem, settings))
    }

    /// To rebuild the file of the settings.
    async fn to_rebuild(settings: &Settings) -> Result<Self, Failure> {
        // What is missing is told before a database is asked for.
        analytics::Analytics::check(settings.analytics_path.as_deref())?;
        let store = in_process::store(settings).await?;
        let prepared = tickets::prepare(&store).await;
        prepared.map_err(|error| Failure::new(format!("the tables of tickets: {error}")))?;
        let path = settings.analytics_path.as_deref();
        let opened = analytics::Analytics::to_rebuild(path, Arc::clone(&store)).await;
        let opened = opened.map_err(|problem| not_opened(problem, settings))?;
        let audit = Audit::open_to_add(store).await;
        let audit = audit.map_err(|error| Failure::new(format!("the audit log: {error}")))?;
        // As the route is written down that does the same.
        let change = ("POST", "/api/v1/analytics/rebuild");
        let noted = audit.note(&local_audit::caller(), change, 202).await;
        noted.map_err(|refusal| Failure::Unreachable(refusal.message().to_owned()))?;
        Ok(Self::Here(opened))
    }

    /// The answer to a question.
    pub(crate) async fn ask(&self, sql: &str) -> Result<Table, Failure> {
        match self {
            Self::Network(client) => table(client.get("/sql", &[("query", sql.to_owned())]).await?),
            Self::Here(analytics) => Ok(analytics.query(sql).await?),
        }
    }

    /// The answer to a report.
    pub(crate) async fn report(&self, report: &Report) -> Result<Table, Failure> {
        match self {
            Self::Network(client) => {
                table(client.get(&format!("/reports/{}", report.name), &[]).await?)
            }
            Self::Here(analytics) => Ok(analytics.query(report.sql).await?),
        }
    }

    async fn begin_rebuild(&self) -> Result<Value, Failure> {
        match self {
            Self::Network(client) => client.post("/analytics/rebuild", json!({})).await,
            Self::Here(analytics) => Ok(json!(analytics.rebuild()?)),
        }
    }

    async fn rebuild(&self) -> Result<Value, Failure> {
        match self {
            Self::Network(client) => Ok(client.get("/analytics", &[]).await?["rebuild"].take()),
            Self::Here(analytics) => Ok(json!(analytics.rebuilding())),
        }
    }
}

fn table(answer: Value) -> Result<Table, Failure> {
    serde_json::from_value(answer)
        .map_err(|error| Failure::new(format!("the answer is not the table it should be: {error}")))
}

fn not_opened(problem: Problem, settings: &Settings) -> Failure {
    match &problem {
        Problem::Analytics(AnalyticsError::InUse { .. }) => Failure::new(format!(
            "{problem}: `--url http://{}` asks the server of these settings",
            settings.http.listen
        )),
        Problem::Analytics(AnalyticsError::Missing { .. }) => Failure::new(format!(
            "{problem}; `headwater serve` makes it, and so does `headwater analytics rebuild`"
        )),
        _ => problem.into(),
    }
}

/// Shows an answer in any of the forms but a chart.
pub(crate) fn show(format: Format, table: &Table) -> Result<(), Failure> {
    match format {
        Format::Table => columns(table)?,
        Format::Csv => output::exact(table.to_csv().trim_end_matches('\n'))?,
        Format::Json | Format::Svg => table.to_json_lines().lines().try_for_each(output::exact)?,
    }
    if table.is_cut {
        output::note(&format!("there is more; only the first {} rows are shown", table.rows.len()));
    }
    Ok(())
}

fn columns(table: &Table) -> Result<(), Failure> {
    let headings: Vec<String> = table.columns.iter().map(|column| column.to_uppercase()).collect();
    let rows = table.rows.iter().map(|row| row.iter().map(output::cell).collect::<Vec<_>>());
    let lines: Vec<Vec<String>> = std::iter::once(headings).chain(rows).collect();
    output::columns(&lines).iter().try_for_each(|line| output::line(line))
}
