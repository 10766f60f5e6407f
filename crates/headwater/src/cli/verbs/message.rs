//! `headwater message`: list, show and explain stored messages.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes below `/topics/TOPIC/messages`. Guarantees: read-only; a search says how far it looked.

use clap::Subcommand;
use serde_json::Value;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::units::{limit, position};
use crate::cli::verbs::issue::show_why;
use crate::exit::CliError;
use crate::text::counted;

/// Messages of one request.
const PAGE: usize = 100;

/// List, show or explain messages.
#[derive(Debug, clap::Args)]
pub(crate) struct MessageArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: MessageCommand,
}

#[derive(Debug, Subcommand)]
enum MessageCommand {
    /// List stored messages, handled or not; look for a key, a header or a text.
    List {
        /// Name of the topic.
        topic: String,
        #[command(flatten)]
        filter: MessageFilterArgs,
        /// Newest first.
        #[arg(long)]
        newest_first: bool,
        /// Maximum number of messages.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// List messages that wait for their time, earliest first, each with why it waits.
    Delayed {
        /// Name of the topic.
        topic: String,
        /// Maximum number of messages, at most 500.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a message, and its neighbours of the same key.
    Show {
        /// Name of the topic.
        topic: String,
        /// Entry id, such as 1700000000000-0; see `headwater message list`.
        id: String,
        /// Its partition, if several have a message with this id.
        #[arg(long)]
        partition: Option<u16>,
    },
    /// Explain what became of a message in each group, and name the command that helps.
    Why {
        /// Name of the topic.
        topic: String,
        /// Entry id, such as 1700000000000-0; see `headwater message list`.
        id: String,
        /// Its partition, if several have a message with this id.
        #[arg(long)]
        partition: Option<u16>,
    },
}

/// Which messages are listed.
#[derive(Debug, clap::Args)]
struct MessageFilterArgs {
    /// Oldest: an entry id, a time such as 2026-11-15T10:00:00Z, or an age such as 5m.
    #[arg(long, value_name = "ID|TIME", value_parser = position)]
    from: Option<String>,
    /// Newest: an entry id, a time, or an age.
    #[arg(long, value_name = "ID|TIME", value_parser = position)]
    to: Option<String>,
    /// Only this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// Only those with this key.
    #[arg(long)]
    key: Option<String>,
    /// Only those with this header, NAME or NAME=VALUE.
    #[arg(long, value_name = "HEADER")]
    header: Option<String>,
    /// Only those whose payload contains this text.
    #[arg(long)]
    text: Option<String>,
}

impl MessageArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            MessageCommand::List { topic, filter, newest_first, limit } => {
                let path = format!("/topics/{}/messages", escape(topic));
                let mut query = filter.query();
                query.extend(newest_first.then(|| ("newest_first", "true".to_owned())));
                self.list(client, &path, &query, *limit).await
            }
            MessageCommand::Delayed { topic, limit } => {
                let columns = &[
                    ("DUE", "/due_at"),
                    ("PARTITION", "/partition"),
                    ("KEY", "/key"),
                    ("ATTEMPT", "/attempt"),
                    ("GROUP", "/group"),
                    ("WHY", "/sentence"),
                ];
                let path = format!("/topics/{}/delayed", escape(topic));
                let page = client.get(&path, &[("limit", limit.to_string())]).await?;
                let mut rows = OutputRows::new(style, columns);
                page["delayed"].as_array().into_iter().flatten().for_each(|one| rows.add(one));
                rows.finish()
            }
            MessageCommand::Show { topic, id, partition } => {
                let query = partition.map(|partition| ("partition", partition.to_string()));
                let path = format!("/topics/{}/messages/{}", escape(topic), escape(id));
                output::object(style, &client.get(&path, query.as_slice()).await?)
            }
            MessageCommand::Why { topic, id, partition } => {
                let query = partition.map(|partition| ("partition", partition.to_string()));
                let path = format!("/topics/{}/messages/{}/why", escape(topic), escape(id));
                show_why(style, &client.get(&path, query.as_slice()).await?)
            }
        }
    }

    async fn list(
        &self,
        client: &ApiClient,
        path: &str,
        query: &[(&'static str, String)],
        limit: usize,
    ) -> Result<(), CliError> {
        let style = self.connection.style();
        let (mut cursor, mut shown, mut scanned, mut total) = (None, 0, 0, None);
        loop {
            let count = PAGE.min(limit - shown);
            let mut asked = query.to_vec();
            asked.push(("limit", count.to_string()));
            asked.extend(cursor.map(|cursor: String| ("cursor", cursor)));
            let page = client.get(path, &asked).await?;
            let messages = page["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
            messages.iter().try_for_each(|message: &Value| output::message(style, message))?;
            shown += messages.len();
            scanned += page["search"]["scanned"].as_u64().unwrap_or(0);
            total = page["search"]["total"].as_u64().or(total);
            cursor = page["next_cursor"].as_str().map(str::to_owned);
            if cursor.is_none() || shown >= limit {
                break;
            }
        }
        if let Some(total) = total
            && !style.json
        {
            output::note(&format!(
                "scanned {scanned} of {}",
                counted(total, "message", "messages")
            ));
        }
        if cursor.is_some() && !style.json {
            output::note("more results available; raise --limit");
        }
        Ok(())
    }
}

impl MessageFilterArgs {
    fn query(&self) -> Vec<(&'static str, String)> {
        let partition = self.partition.map(|partition| partition.to_string());
        let given = [
            ("from", &self.from),
            ("to", &self.to),
            ("partition", &partition),
            ("key", &self.key),
            ("header", &self.header),
            ("text", &self.text),
        ];
        given.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect()
    }
}
