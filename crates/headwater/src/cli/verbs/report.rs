//! `headwater report`: runs built-in reports.

use headwater_analytics::{REPORTS, Table, report, svg};
use serde_json::json;

use crate::cli::ConnectionArgs;
use crate::cli::in_process;
use crate::cli::output::{self, OutputStyle};
use crate::cli::progress;
use crate::cli::verbs::analytics::{AnalyticsSource, OutputFormat, show};
use crate::config::Settings;
use crate::exit::CliError;
use crate::tickets;

/// Run a built-in report.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Report name; `list` shows all.
    #[arg(default_value = "list")]
    name: String,
    /// Output format; --json is short for --format json.
    #[arg(long, value_enum)]
    format: Option<OutputFormat>,
}

impl ReportArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let format = OutputFormat::of(&self.connection, self.format)?;
        if self.name.eq_ignore_ascii_case("list") {
            return list(format, self.connection.style());
        }
        let report = report(&self.name).map_err(|error| CliError::usage(error.to_string()))?;
        let running = async {
            match self.connection.url() {
                // Needs no DuckDB file.
                None if report.is_from_database() => from_database(settings).await,
                _ => AnalyticsSource::open(&self.connection, settings).await?.report(report).await,
            }
        };
        let table = progress::waiting("running the report", running).await?;
        match format {
            OutputFormat::Svg => output::exact(svg(report.title, &report.chart, &table).trim_end()),
            format => show(format, self.connection.style(), &table),
        }
    }
}

/// Reads the model runs of the database of the settings.
async fn from_database(settings: &Settings) -> Result<Table, CliError> {
    let store = match in_process::store_read_only(settings).await {
        Ok(store) => store?,
        Err(path) => {
            return Err(CliError::NotFound(format!(
                "no database at `{path}` yet; `headwater serve` creates it"
            )));
        }
    };
    let table = tickets::tokens_and_cost(store.as_ref()).await;
    store.close().await;
    table.map_err(|error| CliError::new(error.to_string()))
}

/// All servers of this version have the same reports.
fn list(format: OutputFormat, style: OutputStyle) -> Result<(), CliError> {
    if format == OutputFormat::Svg {
        return Err(CliError::usage("the list of reports has no chart; specify a report"));
    }
    let columns = vec!["name".to_owned(), "title".to_owned()];
    let rows = REPORTS.iter().map(|report| vec![json!(report.name), json!(report.title)]);
    show(format, style, &Table { columns, rows: rows.collect(), truncated: false })
}
