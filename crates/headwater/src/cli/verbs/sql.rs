//! `headwater sql`: a question of your own.

use std::io::Read;

use crate::cli::Reach;
use crate::cli::verbs::analytics::{Format, Way, show};
use crate::config::Settings;
use crate::exit::Failure;

/// A question.
#[derive(Debug, clap::Args)]
pub(crate) struct Sql {
    #[command(flatten)]
    reach: Reach,
    /// One SELECT over `ticket_events` and `dead_letters`, in the dialect of DuckDB; `-` reads it from standard input.
    query: String,
    /// How the answer looks.
    #[arg(long, value_enum)]
    format: Option<Format>,
}

impl Sql {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let format = Format::of(&self.reach, self.format);
        if format == Format::Svg {
            return Err(Failure::usage(
                "only a report has a chart; take --format table, csv or json, or see `headwater report list`",
            ));
        }
        let mut query = self.query.clone();
        if query == "-" {
            query.clear();
            let read = std::io::stdin().read_to_string(&mut query);
            read.map_err(|error| Failure::new(format!("standard input cannot be read: {error}")))?;
        }
        let way = Way::to_ask(&self.reach, settings).await?;
        show(format, &way.ask(&query).await?)
    }
}
