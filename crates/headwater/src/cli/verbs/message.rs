//! `headwater message`: what became of one message.
//!
//! Upstream: `cli/mod.rs`. Downstream: the route `/topics/TOPIC/messages/ID/why`. Guarantees: read-only.

use clap::Subcommand;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::verbs::issue::show_why;
use crate::exit::CliError;

/// Explain one message.
#[derive(Debug, clap::Args)]
pub(crate) struct MessageArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: MessageCommand,
}

#[derive(Debug, Subcommand)]
enum MessageCommand {
    /// Explain what became of a message in each group, and name the command that helps.
    Why {
        /// Name of the topic.
        topic: String,
        /// Entry id, such as 1700000000000-0; see `headwater tail`.
        id: String,
        /// Its partition, if several have a message with this id.
        #[arg(long)]
        partition: Option<u16>,
    },
}

impl MessageArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let MessageCommand::Why { topic, id, partition } = &self.command;
        let query = partition.map(|partition| ("partition", partition.to_string()));
        let path = format!("/topics/{}/messages/{}/why", escape(topic), escape(id));
        show_why(self.connection.style(), &client.get(&path, query.as_slice()).await?)
    }
}
