//! `headwater tail`: prints new messages of a topic without joining a group.

use futures_util::StreamExt;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output;
use crate::cli::units::{at_least_one, tail_start};
use crate::exit::CliError;

/// Follow a topic.
#[derive(Debug, clap::Args)]
pub(crate) struct TailArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Name of the topic.
    topic: String,
    /// Start: `beginning`, an entry id, a time such as 2026-11-15T10:00:00Z, or an age such as 5m. By default only new
    /// messages.
    #[arg(long, value_name = "ID|TIME", value_parser = tail_start)]
    from: Option<String>,
    /// Only this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// Exit after this many messages.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    count: Option<u64>,
}

impl TailArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let mut query = Vec::new();
        query.extend(self.from.clone().map(|from| ("from", from)));
        query.extend(self.partition.map(|partition| ("partition", partition.to_string())));
        let topic = format!("/topics/{}", escape(&self.topic));
        if client.get_optional(&topic, &[]).await?.is_none() {
            let name = &self.topic;
            output::note(&format!(
                "topic `{name}` does not exist yet; waiting for its first message"
            ));
        }
        let path = format!("{topic}/tail");
        let mut events = client.events(&path, &query).await?;
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0
            && let Some(message) = events.next().await
        {
            output::message(self.connection.style(), &message?)?;
            left -= 1;
        }
        if self.count.is_none() || left == 0 {
            return Ok(());
        }
        Err(CliError::Unreachable("the server closed the stream".to_owned()))
    }
}
