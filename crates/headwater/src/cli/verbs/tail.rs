//! `headwater tail`: messages as they arrive, without taking part in any group.

use futures_util::StreamExt;

use crate::cli::Reach;
use crate::cli::api_client::{Client, escape};
use crate::cli::output;
use crate::exit::Failure;

/// Follows a topic.
#[derive(Debug, clap::Args)]
pub(crate) struct Tail {
    #[command(flatten)]
    pub(crate) reach: Reach,
    topic: String,
    /// `beginning`, an entry id, or a time such as 2026-11-15T10:00:00Z. By default: what comes after now.
    #[arg(long, value_name = "ID|TIME")]
    from: Option<String>,
    /// Only this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// End after so many messages.
    #[arg(long)]
    count: Option<u64>,
}

impl Tail {
    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let mut query = Vec::new();
        query.extend(self.from.clone().map(|from| ("from", from)));
        query.extend(self.partition.map(|partition| ("partition", partition.to_string())));
        let topic = format!("/topics/{}", escape(&self.topic));
        if client.find(&topic, &[]).await?.is_none() {
            let name = &self.topic;
            output::note(&format!("there is no topic `{name}` yet; waiting for its first message"));
        }
        let path = format!("{topic}/tail");
        let mut events = client.events(&path, &query).await?;
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0
            && let Some(message) = events.next().await
        {
            // A message a line, for people, too: a table would have to wait for its end.
            output::json(self.reach.json, &message?)?;
            left -= 1;
        }
        if self.count.is_none() || left == 0 {
            return Ok(());
        }
        Err(Failure::Unreachable("the server ended the stream".to_owned()))
    }
}
