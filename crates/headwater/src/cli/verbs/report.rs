//! `headwater report`: the questions that have names.

use headwater_analytics::{REPORTS, Table, report, svg};
use serde_json::json;

use crate::cli::Reach;
use crate::cli::output;
use crate::cli::verbs::analytics::{Format, Way, show};
use crate::config::Settings;
use crate::exit::Failure;

/// A question that has a name.
#[derive(Debug, clap::Args)]
pub(crate) struct Report {
    #[command(flatten)]
    reach: Reach,
    /// Its name; `list` shows all.
    #[arg(default_value = "list")]
    name: String,
    /// How the answer looks.
    #[arg(long, value_enum)]
    format: Option<Format>,
}

impl Report {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let format = Format::of(&self.reach, self.format);
        if self.name.eq_ignore_ascii_case("list") {
            return list(format);
        }
        let report = report(&self.name).map_err(|error| Failure::usage(error.to_string()))?;
        let way = Way::to_ask(&self.reach, settings).await?;
        let table = way.report(report).await?;
        match format {
            Format::Svg => output::exact(svg(report.title, &report.chart, &table).trim_end()),
            format => show(format, &table),
        }
    }
}

/// They are the same on every server of this version.
fn list(format: Format) -> Result<(), Failure> {
    if format == Format::Svg {
        return Err(Failure::usage("a list has no chart; name a report"));
    }
    let columns = vec!["name".to_owned(), "title".to_owned()];
    let rows = REPORTS.iter().map(|report| vec![json!(report.name), json!(report.title)]);
    show(format, &Table { columns, rows: rows.collect(), is_cut: false })
}
