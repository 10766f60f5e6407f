//! `headwater search`: finds issues, events, outbox rows, tickets, sessions, topics, groups and messages.
//!
//! Upstream: `cli/mod.rs`. Downstream: the route `/search`. Guarantees: read-only; says which source could not be searched.

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, OutputRows};
use crate::exit::CliError;

/// Find anything by number, id, name, key or word.
#[derive(Debug, clap::Args)]
pub(crate) struct SearchArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// A number, an id, a name, a key, a trace id, or words of a ticket.
    words: String,
}

impl SearchArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        let found = client.get("/search", &[("q", self.words.clone())]).await?;
        let columns = &[
            ("KIND", "/kind"),
            ("ID", "/id"),
            ("TOPIC", "/topic"),
            ("TITLE", "/title"),
            ("DETAILS", "/details"),
        ];
        let mut rows = OutputRows::new(style, columns);
        let results = found["results"].as_array().map(Vec::as_slice).unwrap_or_default();
        results.iter().for_each(|result| rows.add(result));
        for source in found["sources"].as_array().into_iter().flatten() {
            let name = source["name"].as_str().unwrap_or_default();
            if let Some(problem) = source["problem"].as_str() {
                output::note(&format!("{name}: not searched: {problem}"));
            }
        }
        if results.is_empty() && !style.json {
            output::note("nothing was found");
            return Ok(());
        }
        rows.finish()
    }
}
