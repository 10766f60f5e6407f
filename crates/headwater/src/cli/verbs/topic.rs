//! `headwater topic`: create, list, describe, grow, trim, delete.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::{Client, escape};
use crate::cli::output::{self, Rows};
use crate::cli::verbs::session::unless_stopped;
use crate::cli::{Confirm, Reach, milliseconds, time};
use crate::exit::Failure;

/// Topics.
#[derive(Debug, clap::Args)]
pub(crate) struct Topic {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Create a topic.
    Create {
        name: String,
        /// 1 to 1024; they can grow later, never shrink.
        #[arg(long, default_value_t = 1)]
        partitions: u16,
        /// Messages that stay in each partition once every group is done with them.
        #[arg(long, value_name = "N")]
        retention_count: Option<u64>,
        /// How long messages stay once every group is done with them, such as 7d.
        #[arg(long, value_name = "TIME", value_parser = time)]
        retention_age: Option<Duration>,
        /// Bytes that stay of each partition once every group is done with them.
        #[arg(long, value_name = "BYTES")]
        retention_bytes: Option<u64>,
        /// Bytes the topic may hold; sends are refused above it.
        #[arg(long, value_name = "BYTES")]
        byte_budget: Option<u64>,
        /// How often a failed message is tried again.
        #[arg(long, value_name = "N")]
        max_retries: Option<u32>,
    },
    /// List topics.
    List {
        /// At most this many.
        #[arg(long, default_value_t = 1000)]
        limit: usize,
    },
    /// Describe a topic, with its keys and slots.
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
        /// Keep the newest messages of each partition.
        #[arg(long, value_name = "N", required_unless_present_any = ["age", "bytes"])]
        count: Option<u64>,
        /// Keep those that are not older, such as 24h.
        #[arg(long, value_name = "TIME", value_parser = time)]
        age: Option<Duration>,
        /// Keep about so many bytes of each partition.
        #[arg(long)]
        bytes: Option<u64>,
        /// Only this partition.
        #[arg(long)]
        partition: Option<u16>,
        /// Also messages that some group has not read or not acknowledged: they are lost.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Delete a topic with all its messages and dead letters.
    Delete {
        name: String,
        #[command(flatten)]
        confirm: Confirm,
    },
}

impl Topic {
    pub(crate) fn is_look(&self) -> bool {
        matches!(self.what, What::List { .. } | What::Describe { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::Create {
                name,
                partitions,
                retention_count,
                retention_age,
                retention_bytes,
                byte_budget,
                max_retries,
            } => {
                let wish = json!({
                    "name": name,
                    "partitions": partitions,
                    "retention_count": retention_count,
                    "retention_age_ms": retention_age.map(milliseconds),
                    "retention_bytes": retention_bytes,
                    "byte_budget": byte_budget,
                    "max_retries": max_retries,
                });
                output::object(json, &client.post("/topics", wish).await?)
            }
            What::List { limit } => {
                client
                    .show_pages(
                        Rows::new(
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
            What::Describe { name } => output::object(json, &client.get(&path(name), &[]).await?),
            What::Grow { name, partitions } => {
                let wish = json!({"partitions": partitions});
                let answer = client.post(&format!("{}/grow", path(name)), wish).await?;
                output::object(json, &answer)
            }
            What::Trim { name, count, age, bytes, partition, force, confirm } => {
                let lost = if *force { ", unread ones included" } else { "" };
                confirm.ask(&format!("Remove the oldest messages of `{name}`{lost}?"))?;
                let wish = json!({
                    "count": count,
                    "age_ms": age.map(milliseconds),
                    "bytes": bytes,
                    "partition": partition,
                    "force": force,
                });
                let answer = client.post(&format!("{}/trim", path(name)), wish).await?;
                output::object(json, &answer)
            }
            What::Delete { name, confirm } => {
                confirm.ask(&format!("Delete topic `{name}` with all its messages?"))?;
                let cut = format!(
                    "stopped waiting; the topic may be deleted in part. Run the same command again to finish, or look: `headwater topic describe {name}`"
                );
                let path = path(name);
                let answer = unless_stopped(client.delete(&path), cut).await?;
                output::object(json, &answer)?;
                match answer["deleted"].as_bool() {
                    Some(true) => Ok(()),
                    _ => Err(Failure::new(format!("there is no topic `{name}`"))),
                }
            }
        }
    }
}

fn path(topic: &str) -> String {
    format!("/topics/{}", escape(topic))
}
