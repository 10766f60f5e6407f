//! `headwater group` and `headwater pending`: consumer groups of a topic and their pending messages.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::verbs::session::or_interrupted;
use crate::cli::{ConfirmArgs, ConnectionArgs, milliseconds, time};
use crate::exit::CliError;

/// Manage the groups of a topic.
#[derive(Debug, clap::Args)]
pub(crate) struct GroupArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Debug, Subcommand)]
enum GroupCommand {
    /// List the groups of a topic.
    List { topic: String },
    /// Describe a group: lag, pending messages, consumers, owners.
    Describe { topic: String, group: String },
    /// Delete a group; retention no longer waits for it. Refused while it has active members.
    Delete {
        topic: String,
        group: String,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Move a group to another position.
    Reset {
        topic: String,
        group: String,
        /// `beginning`, `end`, an entry id, or a time such as 2026-11-15T10:00:00Z.
        #[arg(long, value_name = "WHERE")]
        to: String,
        /// Only this partition.
        #[arg(long)]
        partition: Option<u16>,
        /// Only print what would happen.
        #[arg(long)]
        dry_run: bool,
        /// Reset even if the group has active members.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

impl GroupArgs {
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.command, GroupCommand::List { .. } | GroupCommand::Describe { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let json = self.connection.json;
        match &self.command {
            GroupCommand::List { topic } => {
                let columns = &[("GROUP", "/group"), ("LAG", "/lag"), ("PENDING", "/pending")];
                let mut rows = OutputRows::new(json, columns);
                let answer = client.get(&format!("/topics/{}/groups", escape(topic)), &[]).await?;
                answer["groups"].as_array().into_iter().flatten().for_each(|group| rows.add(group));
                rows.finish()
            }
            GroupCommand::Describe { topic, group } => {
                output::object(json, &client.get(&path(topic, group), &[]).await?)
            }
            GroupCommand::Delete { topic, group, confirm } => {
                confirm.ask(&format!(
                    "Delete group `{group}` of topic `{topic}`? Its unread and pending messages are skipped."
                ))?;
                let interrupted = format!(
                    "interrupted; the group may be deleted from some partitions only. Run the same command again to finish, or check with `headwater group describe {topic} {group}`"
                );
                let path = path(topic, group);
                output::object(json, &or_interrupted(client.delete(&path), interrupted).await?)
            }
            GroupCommand::Reset { topic, group, to, partition, dry_run, force, confirm } => {
                if !dry_run {
                    confirm.ask(&format!("Move group `{group}` of topic `{topic}` to {to}?"))?;
                }
                let request =
                    json!({"to": to, "partition": partition, "dry_run": dry_run, "force": force});
                let interrupted = format!(
                    "interrupted; the reset may be done on some partitions only. Run the same command again to finish, or check with `headwater group describe {topic} {group}`"
                );
                let to = format!("{}/reset", path(topic, group));
                let answer = or_interrupted(client.post(&to, request), interrupted).await?;
                if *dry_run && !json {
                    let count = |of: &str| {
                        let more = if answer[of]["or_more"] == true { " or more" } else { "" };
                        format!("{}{more}", answer[of]["count"])
                    };
                    let (again, skipped) = (count("again"), count("skipped"));
                    output::line(&format!(
                        "dry run: {again} messages would be redelivered, {skipped} would be skipped\n"
                    ))?;
                }
                output::object(json, &answer)
            }
        }
    }
}

/// List the pending messages of a group.
#[derive(Debug, clap::Args)]
pub(crate) struct PendingArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    topic: String,
    #[arg(long)]
    group: String,
    /// Only this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// Only those of this consumer.
    #[arg(long)]
    consumer: Option<String>,
    /// Only those idle for at least this time, such as 5m.
    #[arg(long, value_name = "TIME", value_parser = time)]
    min_idle: Option<Duration>,
    /// Maximum number of messages.
    #[arg(long, default_value_t = 1000)]
    limit: usize,
}

impl PendingArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
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
            .show_pages(
                OutputRows::new(self.connection.json, columns),
                &path,
                &query,
                "pending",
                self.limit,
            )
            .await
    }
}

fn path(topic: &str, group: &str) -> String {
    format!("/topics/{}/groups/{}", escape(topic), escape(group))
}
