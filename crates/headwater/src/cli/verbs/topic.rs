//! `headwater topic`: create, list, describe, grow, trim and delete topics.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::verbs::session::or_interrupted;
use crate::cli::{ConfirmArgs, ConnectionArgs, milliseconds, time};
use crate::exit::CliError;

/// Manage topics.
#[derive(Debug, clap::Args)]
pub(crate) struct TopicArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: TopicCommand,
}

#[derive(Debug, Subcommand)]
enum TopicCommand {
    /// Create a topic.
    Create {
        name: String,
        /// Number of partitions, 1 to 1024; can grow later but not shrink.
        #[arg(long, default_value_t = 1)]
        partitions: u16,
        /// Retention: messages per partition, kept after all groups have processed them.
        #[arg(long, value_name = "N")]
        retention_count: Option<u64>,
        /// Retention: age such as 7d, after all groups have processed them.
        #[arg(long, value_name = "TIME", value_parser = time)]
        retention_age: Option<Duration>,
        /// Retention: bytes per partition, kept after all groups have processed them.
        #[arg(long, value_name = "BYTES")]
        retention_bytes: Option<u64>,
        /// Byte budget of the topic; sends above it are rejected.
        #[arg(long, value_name = "BYTES")]
        byte_budget: Option<u64>,
        /// Maximum retries of a failed message.
        #[arg(long, value_name = "N")]
        max_retries: Option<u32>,
    },
    /// List topics.
    List {
        /// Maximum number of topics.
        #[arg(long, default_value_t = 1000)]
        limit: usize,
    },
    /// Describe a topic with its keys and slots.
    Describe { name: String },
    /// Add partitions.
    Grow {
        name: String,
        #[arg(long)]
        partitions: u16,
    },
    /// Remove the oldest messages.
    Trim {
        name: String,
        /// Keep this many messages of each partition.
        #[arg(long, value_name = "N", required_unless_present_any = ["age", "bytes"])]
        count: Option<u64>,
        /// Keep messages up to this age, such as 24h.
        #[arg(long, value_name = "TIME", value_parser = time)]
        age: Option<Duration>,
        /// Keep about this many bytes of each partition.
        #[arg(long)]
        bytes: Option<u64>,
        /// Only this partition.
        #[arg(long)]
        partition: Option<u16>,
        /// Also remove messages that a group has not read or acknowledged; they are lost.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Delete a topic with its messages and dead letters.
    Delete {
        name: String,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

impl TopicArgs {
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.command, TopicCommand::List { .. } | TopicCommand::Describe { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let json = self.connection.json;
        match &self.command {
            TopicCommand::Create {
                name,
                partitions,
                retention_count,
                retention_age,
                retention_bytes,
                byte_budget,
                max_retries,
            } => {
                let request = json!({
                    "name": name,
                    "partitions": partitions,
                    "retention_count": retention_count,
                    "retention_age_ms": retention_age.map(milliseconds),
                    "retention_bytes": retention_bytes,
                    "byte_budget": byte_budget,
                    "max_retries": max_retries,
                });
                output::object(json, &client.post("/topics", request).await?)
            }
            TopicCommand::List { limit } => {
                client
                    .show_pages(
                        OutputRows::new(
                            json,
                            &[
                                ("NAME", "/name"),
                                ("PARTITIONS", "/partitions"),
                                ("LENGTH", "/length"),
                                ("DELAYED", "/delayed"),
                                ("DEAD LETTERS", "/dead_letters"),
                                ("GROUPS", "/groups"),
                                ("DELETING SINCE", "/deleting_since"),
                            ],
                        ),
                        "/topics",
                        &[],
                        "topics",
                        *limit,
                    )
                    .await
            }
            TopicCommand::Describe { name } => {
                output::object(json, &client.get(&path(name), &[]).await?)
            }
            TopicCommand::Grow { name, partitions } => {
                let request = json!({"partitions": partitions});
                let answer = client.post(&format!("{}/grow", path(name)), request).await?;
                output::object(json, &answer)
            }
            TopicCommand::Trim { name, count, age, bytes, partition, force, confirm } => {
                let lost = if *force { ", including unread ones" } else { "" };
                confirm.ask(&format!("Remove the oldest messages of topic `{name}`{lost}?"))?;
                let request = json!({
                    "count": count,
                    "age_ms": age.map(milliseconds),
                    "bytes": bytes,
                    "partition": partition,
                    "force": force,
                });
                let answer = client.post(&format!("{}/trim", path(name)), request).await?;
                output::object(json, &answer)
            }
            TopicCommand::Delete { name, confirm } => {
                confirm.ask(&format!("Delete topic `{name}` with all its messages?"))?;
                let interrupted = format!(
                    "interrupted; the topic may be partially deleted. Run the same command again to finish, or check with `headwater topic describe {name}`"
                );
                let path = path(name);
                let answer = or_interrupted(client.delete(&path), interrupted).await?;
                output::object(json, &answer)?;
                match answer["deleted"].as_bool() {
                    Some(true) => Ok(()),
                    _ => Err(CliError::new(format!("topic `{name}` not found"))),
                }
            }
        }
    }
}

fn path(topic: &str) -> String {
    format!("/topics/{}", escape(topic))
}
