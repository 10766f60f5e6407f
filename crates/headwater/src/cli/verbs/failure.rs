//! `headwater failure`: dead letters, quarantined issues and dead replies by cause.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes below `/failures`. Guarantees: read-only; says what could not be read.

use clap::Subcommand;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::exit::CliError;

/// Show failures by cause.
#[derive(Debug, clap::Args)]
pub(crate) struct FailureArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: FailureCommand,
}

#[derive(Debug, Subcommand)]
enum FailureCommand {
    /// List the causes of dead letters, quarantined issues and dead replies, most frequent first.
    List,
    /// Show one cause with samples.
    Show {
        /// Id of the cause; see `headwater failure list`.
        id: String,
    },
}

impl FailureArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            FailureCommand::Show { id } => {
                let path = format!("/failures/{}", escape(id));
                output::object(style, &client.get(&path, &[]).await?)
            }
            FailureCommand::List => {
                let found = client.get("/failures", &[]).await?;
                let columns = &[
                    ("ID", "/id"),
                    ("KIND", "/kind"),
                    ("PLACE", "/place"),
                    ("COUNT", "/count"),
                    ("KEYS", "/keys"),
                    ("LAST", "/last"),
                    ("CAUSE", "/cause"),
                ];
                for source in found["sources"].as_array().into_iter().flatten() {
                    let name = source["name"].as_str().unwrap_or_default();
                    if let Some(problem) = source["problem"].as_str() {
                        output::note(&format!("{name}: not read: {problem}"));
                    }
                    for topic in source["unread"].as_array().into_iter().flatten() {
                        let topic = topic.as_str().unwrap_or_default();
                        output::note(&format!(
                            "{name}: topic `{topic}` did not answer; what was read of it before is shown"
                        ));
                    }
                }
                let mut rows = OutputRows::new(style, columns);
                let clusters = found["clusters"].as_array().map(Vec::as_slice).unwrap_or_default();
                clusters.iter().for_each(|cluster| rows.add(cluster));
                if clusters.is_empty() && !style.json {
                    output::note("nothing has failed");
                    return Ok(());
                }
                rows.finish()
            }
        }
    }
}
