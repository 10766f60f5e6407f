//! `headwater overview`, `headwater me` and `headwater process`: what the overview of the console shows.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes `/overview`, `/me`, `/processes` and `/settings`. Guarantees: read-only.

use clap::Subcommand;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, OutputRows};
use crate::exit::CliError;

/// Say whether all is well, and what should be done.
#[derive(Debug, clap::Args)]
pub(crate) struct OverviewArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

impl OverviewArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        output::object(self.connection.style(), &client.get("/overview", &[]).await?)
    }
}

/// Show name and role of the token.
#[derive(Debug, clap::Args)]
pub(crate) struct MeArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

impl MeArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        output::object(self.connection.style(), &client.get("/me", &[]).await?)
    }
}

/// Show the processes that work on issues, and the settings of a server.
#[derive(Debug, clap::Args)]
pub(crate) struct ProcessArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: ProcessCommand,
}

#[derive(Debug, Subcommand)]
enum ProcessCommand {
    /// List the processes that work on issues.
    List,
    /// Show the settings that a server runs with, and their sources; secrets are hidden.
    Settings,
}

impl ProcessArgs {
    /// Fails without a server if only a server knows the answer.
    pub(in crate::cli) fn require_server(&self) -> Result<(), CliError> {
        match self.command {
            ProcessCommand::List => Ok(()),
            ProcessCommand::Settings => self.connection.require_server(
                "`headwater config` prints the settings of this command; those of a server are known to it",
            ),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let (path, list, columns): (_, _, &'static [_]) = match self.command {
            ProcessCommand::List => (
                "/processes",
                "processes",
                &[
                    ("NAME", "/name"),
                    ("ALIVE", "/alive"),
                    ("STARTED", "/started_at"),
                    ("SEEN", "/seen_at"),
                    ("CLAIMS", "/claims"),
                ],
            ),
            ProcessCommand::Settings => (
                "/settings",
                "settings",
                &[("NAME", "/name"), ("VALUE", "/value"), ("SOURCE", "/source")],
            ),
        };
        let mut rows = OutputRows::new(self.connection.style(), columns);
        let page = client.get(path, &[]).await?;
        page[list].as_array().into_iter().flatten().for_each(|one| rows.add(one));
        rows.finish()
    }
}
