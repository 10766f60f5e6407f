//! `headwater group` and `headwater pending`: who reads a topic, how far they are, and what they have in hand.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::{Client, escape};
use crate::cli::output::{self, Rows};
use crate::cli::verbs::session::unless_stopped;
use crate::cli::{Confirm, Reach, milliseconds, time};
use crate::exit::Failure;

/// Groups of a topic.
#[derive(Debug, clap::Args)]
pub(crate) struct Group {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List the groups of a topic.
    List { topic: String },
    /// Describe a group: lag, pending, consumers, owners.
    Describe { topic: String, group: String },
    /// Remove a group: nothing is kept for it any more. Refused while a member of it lives.
    Delete {
        topic: String,
        group: String,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Move a group to another place.
    Reset {
        topic: String,
        group: String,
        /// `beginning`, `end`, an entry id, or a time such as 2026-11-15T10:00:00Z.
        #[arg(long, value_name = "WHERE")]
        to: String,
        /// Only this partition.
        #[arg(long)]
        partition: Option<u16>,
        /// Only say what would happen.
        #[arg(long)]
        dry_run: bool,
        /// Also while members are at work.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: Confirm,
    },
}

impl Group {
    pub(crate) fn is_look(&self) -> bool {
        matches!(self.what, What::List { .. } | What::Describe { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::List { topic } => {
                let columns = &[("GROUP", "/group"), ("LAG", "/lag"), ("PENDING", "/pending")];
                let mut rows = Rows::new(json, columns);
                let answer = client.get(&format!("/topics/{}/groups", escape(topic)), &[]).await?;
                answer["groups"].as_array().into_iter().flatten().for_each(|group| rows.add(group));
                rows.finish()
            }
            What::Describe { topic, group } => {
                output::object(json, &client.get(&path(topic, group), &[]).await?)
            }
            What::Delete { topic, group, confirm } => {
                confirm.ask(&format!(
                    "Remove group `{group}` of `{topic}`, and whatever it has not read or settled?"
                ))?;
                let cut = format!(
                    "stopped waiting; the group may be removed from some partitions only. Run the same command again to finish, or look: `headwater group describe {topic} {group}`"
                );
                let path = path(topic, group);
                output::object(json, &unless_stopped(client.delete(&path), cut).await?)
            }
            What::Reset { topic, group, to, partition, dry_run, force, confirm } => {
                if !dry_run {
                    confirm.ask(&format!("Move group `{group}` of `{topic}` to {to}?"))?;
                }
                let wish =
                    json!({"to": to, "partition": partition, "dry_run": dry_run, "force": force});
                let cut = format!(
                    "stopped waiting; the reset may be done on some partitions only. Run the same command again to finish, or look: `headwater group describe {topic} {group}`"
                );
                let to = format!("{}/reset", path(topic, group));
                let answer = unless_stopped(client.post(&to, wish), cut).await?;
                if *dry_run && !json {
                    let count = |of: &str| {
                        let more = if answer[of]["or_more"] == true { " or more" } else { "" };
                        format!("{}{more}", answer[of]["count"])
                    };
                    let (again, skipped) = (count("again"), count("skipped"));
                    output::line(&format!(
                        "dry run: {again} messages would come again, {skipped} would be skipped\n"
                    ))?;
                }
                output::object(json, &answer)
            }
        }
    }
}

/// Messages that a group has in hand.
#[derive(Debug, clap::Args)]
pub(crate) struct Pending {
    #[command(flatten)]
    pub(crate) reach: Reach,
    topic: String,
    #[arg(long)]
    group: String,
    /// Only this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// Only those of this consumer.
    #[arg(long)]
    consumer: Option<String>,
    /// Only those that were not touched for this time, such as 5m.
    #[arg(long, value_name = "TIME", value_parser = time)]
    min_idle: Option<Duration>,
    /// At most this many.
    #[arg(long, default_value_t = 1000)]
    limit: usize,
}

impl Pending {
    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let mut query = Vec::new();
        query.extend(self.partition.map(|partition| ("partition", partition.to_string())));
        query.extend(self.consumer.clone().map(|consumer| ("consumer", consumer)));
        query.extend(self.min_idle.map(|idle| ("min_idle_ms", milliseconds(idle).to_string())));
        let columns = &[
            ("ID", "/id"),
            ("PARTITION", "/partition"),
            ("CONSUMER", "/consumer"),
            ("IDLE MS", "/idle_ms"),
            ("DELIVERIES", "/deliveries"),
        ];
        let path = format!("{}/pending", path(&self.topic, &self.group));
        client
            .show_pages(Rows::new(self.reach.json, columns), &path, &query, "pending", self.limit)
            .await
    }
}

fn path(topic: &str, group: &str) -> String {
    format!("/topics/{}/groups/{}", escape(topic), escape(group))
}
