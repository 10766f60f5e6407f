//! `headwater audit`: consistency check of all events, and the log of changes.

use clap::Subcommand;
use serde_json::Value;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, OutputRows};
use crate::exit::CliError;

/// Check consistency or list changes.
#[derive(Debug, clap::Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: Option<AuditCommand>,
}

#[derive(Debug, Subcommand)]
enum AuditCommand {
    /// Check that recorded = processed + pending + quarantined for all events (default).
    Books,
    /// List changes made over HTTP and by commands, newest first.
    Log {
        /// Maximum number of entries.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
}

impl AuditArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let json = self.connection.json;
        match self.command.as_ref().unwrap_or(&AuditCommand::Books) {
            AuditCommand::Books => {
                let books = client.get("/audit/books", &[]).await?;
                output::object(json, &books)?;
                match books["balances"] {
                    Value::Bool(true) => Ok(()),
                    _ => Err(CliError::new("events are not fully accounted for; see above")),
                }
            }
            AuditCommand::Log { limit } => {
                let columns = &[
                    ("AT", "/at"),
                    ("CALLER", "/caller"),
                    ("ROLE", "/role"),
                    ("CLIENT", "/client"),
                    ("METHOD", "/method"),
                    ("PATH", "/path"),
                    ("STATUS", "/status"),
                ];
                client
                    .show_pages(OutputRows::new(json, columns), "/audit", &[], "entries", *limit)
                    .await
            }
        }
    }
}
