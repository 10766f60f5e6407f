//! `headwater webhook`: what became of the webhooks of a server.
//!
//! Upstream: `cli/mod.rs`. Downstream: the route `/webhooks`. Guarantees: read-only. The counts are in the memory of the process that
//! received the webhooks, so a server must be named.

use clap::Subcommand;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, OutputRows};
use crate::exit::CliError;

/// Show what became of webhooks.
#[derive(Debug, clap::Args)]
pub(crate) struct WebhookArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: WebhookCommand,
}

#[derive(Debug, Subcommand)]
enum WebhookCommand {
    /// Count the webhooks of each integration since the server started.
    List,
    /// List the latest webhooks that were rejected or ignored, with the reason.
    Rejected,
}

impl WebhookArgs {
    /// Fails without a server: only it knows its webhooks.
    pub(in crate::cli) fn require_server(&self) -> Result<(), CliError> {
        self.connection.require_server("webhooks are counted by the server that receives them")
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        let webhooks = client.get("/webhooks", &[]).await?;
        let (mut rows, list, nothing) = match self.command {
            WebhookCommand::List => {
                let columns = &[
                    ("INTEGRATION", "/integration"),
                    ("PROVIDER", "/provider"),
                    ("PATH", "/path"),
                    ("RECORDED", "/recorded"),
                    ("DUPLICATE", "/duplicate"),
                    ("IGNORED", "/ignored"),
                    ("REJECTED", "/rejected"),
                    ("LAST", "/last_at"),
                ];
                let nothing =
                    "no integration receives webhooks; add an [[integration]] to headwater.toml";
                (OutputRows::new(style, columns), "integrations", nothing)
            }
            WebhookCommand::Rejected => {
                let columns = &[
                    ("AT", "/at"),
                    ("INTEGRATION", "/integration"),
                    ("RESULT", "/result"),
                    ("REASON", "/reason"),
                ];
                let nothing = "no webhook was rejected or ignored since the server started";
                (OutputRows::new(style, columns), "recent", nothing)
            }
        };
        let found = webhooks[list].as_array().map(Vec::as_slice).unwrap_or_default();
        if found.is_empty() && !style.json {
            output::note(nothing);
            return Ok(());
        }
        found.iter().for_each(|one| rows.add(one));
        rows.finish()
    }
}
