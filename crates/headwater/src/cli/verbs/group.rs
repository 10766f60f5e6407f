//! `headwater group` and `headwater pending`: consumer groups of a topic and their pending messages.

use std::time::Duration;

use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::progress;
use crate::cli::units::{limit, milliseconds, reset_target, time};
use crate::cli::verbs::issue::show_why;
use crate::cli::verbs::session::or_interrupted;
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::exit::CliError;
use crate::text::{counted, shell_word};

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
    List {
        /// Name of the topic.
        topic: String,
    },
    /// Describe a group: lag, pending messages, consumers, owners.
    Describe {
        /// Name of the topic.
        topic: String,
        /// Name of the group.
        group: String,
    },
    /// Explain why a group has messages left, and name the command that helps.
    Why {
        /// Name of the topic.
        topic: String,
        /// Name of the group.
        group: String,
    },
    /// List who owns which partition, with lease and lag: of all topics or of one.
    Owners {
        /// Name of the topic [default: all topics].
        topic: Option<String>,
        /// Maximum number of groups.
        #[arg(long, value_name = "N", default_value = "1000", value_parser = limit)]
        limit: usize,
    },
    /// List the partitions that had a new owner in the last hour, as a server noticed them.
    Moves {
        /// Name of the topic [default: all topics].
        topic: Option<String>,
        /// Only those of this group.
        #[arg(long)]
        group: Option<String>,
        /// Maximum number of moves, at most 1000.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Delete a group; retention no longer waits for it. Refused while it has active members.
    Delete {
        /// Name of the topic.
        topic: String,
        /// Name of the group.
        group: String,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Move a group to another position.
    Reset {
        /// Name of the topic.
        topic: String,
        /// Name of the group.
        group: String,
        /// `beginning`, `end`, an entry id, a time such as 2026-11-15T10:00:00Z, or an age such as 5m.
        #[arg(long, value_name = "WHERE", value_parser = reset_target)]
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
        matches!(
            self.command,
            GroupCommand::List { .. }
                | GroupCommand::Describe { .. }
                | GroupCommand::Why { .. }
                | GroupCommand::Owners { .. }
                | GroupCommand::Moves { .. }
        )
    }

    /// Fails without a server if only a server knows the answer.
    pub(in crate::cli) fn require_server(&self) -> Result<(), CliError> {
        match self.command {
            GroupCommand::Moves { .. } => {
                self.connection.require_server("moves of partitions are noticed by servers")
            }
            _ => Ok(()),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            GroupCommand::List { topic } => {
                let columns = &[("GROUP", "/group"), ("LAG", "/lag"), ("PENDING", "/pending")];
                let mut rows = OutputRows::new(style, columns);
                let answer = client.get(&format!("/topics/{}/groups", escape(topic)), &[]).await?;
                let groups = answer["groups"].as_array().map(Vec::as_slice).unwrap_or_default();
                groups.iter().for_each(|group| rows.add(group));
                groups.iter().for_each(note_unread);
                rows.finish()
            }
            GroupCommand::Describe { topic, group } => {
                let mut described = client.get(&path(topic, group), &[]).await?;
                note_unread(&described);
                if !style.json {
                    flatten_owners(&mut described);
                }
                output::object(style, &described)
            }
            GroupCommand::Why { topic, group } => {
                show_why(style, &client.get(&format!("{}/why", path(topic, group)), &[]).await?)
            }
            GroupCommand::Owners { topic, limit } => {
                let columns = &[
                    ("TOPIC", "/topic"),
                    ("GROUP", "/group"),
                    ("MODE", "/mode"),
                    ("OWNERS", "/owners"),
                    ("ORPHANS", "/orphans"),
                    ("SKEW", "/skew"),
                ];
                let mut rows = OutputRows::new(style, columns);
                let mut query: Vec<_> =
                    topic.iter().map(|topic| ("topic", topic.clone())).collect();
                let mut left = *limit;
                loop {
                    let page = client.get("/assignment", &query).await?;
                    let groups = page["groups"].as_array().map(Vec::as_slice).unwrap_or_default();
                    for group in groups.iter().take(left) {
                        rows.add(&with_owners(style.json, group));
                        note_unread(group);
                    }
                    let unread = page["unread_topics"].as_array().into_iter().flatten();
                    for topic in unread.filter_map(Value::as_str) {
                        output::note(&format!(
                            "the groups of topic `{topic}` are not listed: a server of the stream backend does not answer"
                        ));
                    }
                    left = left.saturating_sub(groups.len());
                    match page["next_cursor"].as_str().filter(|_| left > 0) {
                        Some(next) => query = vec![("cursor", next.to_owned())],
                        None => return rows.finish(),
                    }
                }
            }
            GroupCommand::Moves { topic, group, limit } => {
                let columns = &[
                    ("AT", "/at"),
                    ("TOPIC", "/topic"),
                    ("GROUP", "/group"),
                    ("PARTITION", "/partition"),
                    ("FROM", "/from"),
                    ("TO", "/to"),
                    ("EPOCH", "/epoch"),
                ];
                let mut query = vec![("limit", limit.to_string())];
                query.extend(topic.clone().map(|topic| ("topic", topic)));
                query.extend(group.clone().map(|group| ("group", group)));
                let answer = client.get("/assignment/moves", &query).await?;
                let moves = answer["moves"].as_array().map(Vec::as_slice).unwrap_or_default();
                if !style.json && answer["complete"] == false {
                    output::note("not all groups are watched, or there are more moves than shown");
                }
                if moves.is_empty() && !style.json {
                    output::note("no partition has moved in the last hour");
                    return Ok(());
                }
                let mut rows = OutputRows::new(style, columns);
                moves.iter().for_each(|one| rows.add(one));
                rows.finish()
            }
            GroupCommand::Delete { topic, group, confirm } => {
                if confirm.is_needed() {
                    let found = open_messages(&client.get(&path(topic, group), &[]).await?);
                    confirm.ask(&format!(
                        "Delete group `{group}` of topic `{topic}`? It skips {found}."
                    ))?;
                }
                let interrupted = format!(
                    "interrupted; the group may be deleted from some partitions only. Run the same command again to finish, or check with `headwater group describe {} {}`",
                    shell_word(topic),
                    shell_word(group)
                );
                let to = path(topic, group);
                let deleting = or_interrupted(client.delete(&to), interrupted);
                let answer =
                    progress::waiting(format!("deleting group `{group}`"), deleting).await?;
                let sentence = format!(
                    "deleted group `{group}` of topic `{topic}`; it skipped {}",
                    open_messages(&answer)
                );
                output::changed(style, &answer, sentence)
            }
            GroupCommand::Reset { topic, group, to, partition, dry_run, force, confirm } => {
                if !dry_run && confirm.is_needed() {
                    client.get(&path(topic, group), &[]).await?;
                    confirm.ask(&format!("Move group `{group}` of topic `{topic}` to {to}?"))?;
                }
                let request =
                    json!({"to": to, "partition": partition, "dry_run": dry_run, "force": force});
                let interrupted = format!(
                    "interrupted; the reset may be done on some partitions only. Run the same command again to finish, or check with `headwater group describe {} {}`",
                    shell_word(topic),
                    shell_word(group)
                );
                let address = format!("{}/reset", path(topic, group));
                let resetting = or_interrupted(client.post(&address, request), interrupted);
                let answer =
                    progress::waiting(format!("moving group `{group}`"), resetting).await?;
                let moved = if *dry_run { "would move" } else { "moved" };
                let [again, skipped, dropped] =
                    ["again", "skipped", "dropped"].map(|name| bounded(&answer[name]));
                let sentence = format!(
                    "{moved} group `{group}` of topic `{topic}` to {to}: {again} redelivered, {skipped} skipped, {dropped} in flight ignored"
                );
                output::changed(style, &answer, sentence)
            }
        }
    }
}

/// A count that may be a lower bound.
fn bounded(count: &Value) -> String {
    let more = if count["or_more"] == true { " or more" } else { "" };
    format!("{}{more}", count["count"])
}

/// Messages that a group has not done.
fn open_messages(group: &Value) -> String {
    let pending = group["pending"].as_u64().unwrap_or(0);
    let pending = counted(pending, "pending message", "pending messages");
    match group["lag"].as_u64() {
        Some(lag) => format!("{} and {pending}", counted(lag, "unread message", "unread messages")),
        None => format!("its unread messages and {pending}"),
    }
}

/// List the pending messages of a group.
#[derive(Debug, clap::Args)]
pub(crate) struct PendingArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Name of the topic.
    topic: String,
    /// Name of the group.
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
    #[arg(long, value_name = "N", default_value = "1000", value_parser = limit)]
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
            ("STATE", "/state"),
            ("CONSUMER", "/consumer"),
            ("IDLE", "/idle_ms"),
            ("DELIVERIES", "/deliveries"),
        ];
        let path = format!("{}/pending", path(&self.topic, &self.group));
        client
            .show_pages(
                OutputRows::new(self.connection.style(), columns),
                &path,
                &query,
                "pending",
                self.limit,
            )
            .await
    }
}

/// Notes which partitions of a group could not be read.
fn note_unread(group: &Value) {
    let partitions = group["partitions"].as_array().into_iter().flatten();
    let unread = partitions.filter(|partition| partition["problem"].is_string());
    let unread: Vec<String> = unread.map(|one| one["partition"].to_string()).collect();
    if let [one, more @ ..] = &unread[..] {
        let partitions = match more.is_empty() {
            true => format!("partition {one} is"),
            false => format!("partitions {} are", unread.join(", ")),
        };
        output::note(&format!(
            "{partitions} not in the counts of group `{}` of topic `{}`: a server of the stream backend does not answer",
            group["group"].as_str().unwrap_or_default(),
            group["topic"].as_str().unwrap_or_default()
        ));
    }
}

/// Shows the owner and the oldest pending message of each partition as columns instead of objects.
fn flatten_owners(group: &mut Value) {
    for partition in group["partitions"].as_array_mut().into_iter().flatten() {
        let owner = partition["owner"].take();
        partition["owner"] = owner["holder"].clone();
        partition["owner_epoch"] = owner["epoch"].clone();
        partition["owner_heartbeat_age_ms"] = owner["heartbeat_age_ms"].clone();
        if let Some(fields) = partition.as_object_mut()
            && let Some(oldest) = fields.remove("oldest_pending")
        {
            fields.insert("oldest_pending_age_ms".to_owned(), oldest["age_ms"].clone());
            fields.insert("oldest_pending_deliveries".to_owned(), oldest["deliveries"].clone());
        }
    }
}

fn path(topic: &str, group: &str) -> String {
    format!("/topics/{}/groups/{}", escape(topic), escape(group))
}

/// A group with its owners and their partitions in words, for people.
fn with_owners(is_json: bool, group: &Value) -> Value {
    let mut group = group.clone();
    if !is_json {
        let partitions = group["partitions"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut owners: std::collections::BTreeMap<&str, Vec<String>> = Default::default();
        for one in partitions {
            let unowned = if one["problem"].is_string() { "unknown owner" } else { "no owner" };
            let owner = one["owner"].as_str().unwrap_or(unowned);
            owners.entry(owner).or_default().push(one["partition"].to_string());
        }
        let owners = owners.iter().map(|(owner, of)| format!("{owner}: {}", of.join(" ")));
        group["owners"] = owners.collect::<Vec<_>>().join("; ").into();
    }
    group
}
