//! `headwater report`: runs built-in reports.

use headwater_analytics::{REPORTS, Table, report, svg};
use serde_json::json;

use crate::cli::ConnectionArgs;
use crate::cli::output;
use crate::cli::verbs::analytics::{AnalyticsSource, OutputFormat, show};
use crate::config::Settings;
use crate::exit::CliError;

/// Run a built-in report.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Report name; `list` shows all.
    #[arg(default_value = "list")]
    name: String,
    /// Output format.
    #[arg(long, value_enum)]
    format: Option<OutputFormat>,
}

impl ReportArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let format = OutputFormat::of(&self.connection, self.format);
        if self.name.eq_ignore_ascii_case("list") {
            return list(format);
        }
        let report = report(&self.name).map_err(|error| CliError::usage(error.to_string()))?;
        let source = AnalyticsSource::open(&self.connection, settings).await?;
        let table = source.report(report).await?;
        match format {
            OutputFormat::Svg => output::exact(svg(report.title, &report.chart, &table).trim_end()),
            format => show(format, &table),
        }
    }
}

/// All servers of this version have the same reports.
fn list(format: OutputFormat) -> Result<(), CliError> {
    if format == OutputFormat::Svg {
        return Err(CliError::usage("the list of reports has no chart; specify a report"));
    }
    let columns = vec!["name".to_owned(), "title".to_owned()];
    let rows = REPORTS.iter().map(|report| vec![json!(report.name), json!(report.title)]);
    show(format, &Table { columns, rows: rows.collect(), truncated: false })
}
