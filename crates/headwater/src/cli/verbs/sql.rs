//! `headwater sql`: runs an SQL query on the DuckDB file.

use std::io::Read;

use crate::cli::ConnectionArgs;
use crate::cli::progress;
use crate::cli::verbs::analytics::{AnalyticsSource, OutputFormat, show};
use crate::config::Settings;
use crate::exit::CliError;

/// Run an SQL query on the DuckDB file.
#[derive(Debug, clap::Args)]
pub(crate) struct SqlArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    /// One SELECT on `ticket_events` and `dead_letters` in the DuckDB dialect; `-` reads it from standard input.
    query: String,
    /// Output format; --json is short for --format json.
    #[arg(long, value_enum)]
    format: Option<OutputFormat>,
}

impl SqlArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let format = OutputFormat::of(&self.connection, self.format)?;
        if format == OutputFormat::Svg {
            return Err(CliError::usage(
                "only reports have charts; use --format table, csv or json, or see `headwater report list`",
            ));
        }
        let mut query = self.query.clone();
        if query == "-" {
            query.clear();
            let read = std::io::stdin().read_to_string(&mut query);
            read.map_err(|error| CliError::new(format!("cannot read standard input: {error}")))?;
        }
        let source = AnalyticsSource::open(&self.connection, settings).await?;
        let querying = source.query(&query);
        let table = progress::waiting("running the query", querying).await?;
        show(format, self.connection.style(), &table)
    }
}
