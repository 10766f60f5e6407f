//! `headwater effect`: list and show the calls of tools that change something.

use clap::Subcommand;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows};
use crate::cli::units::{limit, number};
use crate::exit::CliError;

/// Show what tools were asked to change.
#[derive(Debug, clap::Args)]
pub(crate) struct EffectArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: EffectCommand,
}

#[derive(Debug, Subcommand)]
enum EffectCommand {
    /// List calls of tools that change something, newest first.
    List {
        /// Only those with this status.
        #[arg(long, value_parser = ["approved", "started", "done", "failed", "rejected", "unknown"])]
        status: Option<String>,
        /// Only those of this tool.
        #[arg(long, value_name = "NAME")]
        tool: Option<String>,
        /// Only those of this issue.
        #[arg(long, value_name = "ID", value_parser = number)]
        issue: Option<i64>,
        /// Maximum number of calls.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a call with its arguments, its idempotency key and its outcome.
    Show {
        /// Effect id; see `headwater effect list`.
        #[arg(value_parser = number)]
        id: i64,
    },
}

impl EffectArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        Requirements::database(true)
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            EffectCommand::List { status, tool, issue, limit } => {
                let mut query = Vec::new();
                query.extend(status.clone().map(|status| ("status", status)));
                query.extend(tool.clone().map(|name| ("tool", name)));
                query.extend(issue.map(|issue| ("issue_id", issue.to_string())));
                let columns = &[
                    ("ID", "/id"),
                    ("STATUS", "/status"),
                    ("TOOL", "/tool"),
                    ("INTEGRATION", "/integration"),
                    ("ISSUE", "/issue_id"),
                    ("ATTEMPTS", "/attempts"),
                    ("CREATED", "/created_at"),
                ];
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, "/effects", &query, "effects", *limit).await
            }
            EffectCommand::Show { id } => {
                let effect = client.get(&format!("/effects/{id}"), &[]).await?;
                output::object(style, &effect)
            }
        }
    }
}
