//! `headwater topic`: create, list, describe, alter, grow, trim and delete topics.

use std::time::Duration;

use clap::Subcommand;
use serde_json::{Map, Value, json};

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::progress;
use crate::cli::units::{
    LimitArg, count_or_none, limit, milliseconds, size, size_or_none, time, time_or_none,
};
use crate::cli::verbs::session::or_interrupted;
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::exit::CliError;
use crate::text::{counted, shell_word};

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
        /// Name of the new topic.
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
        /// Retention: size such as 10MB of each partition, kept after all groups have processed them.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        retention_bytes: Option<u64>,
        /// Size such as 1GB of the topic; sends above it are rejected.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        byte_budget: Option<u64>,
        /// Maximum retries of a failed message.
        #[arg(long, value_name = "N")]
        max_retries: Option<u32>,
        /// Fields of its entries: `full` if other programs read the topic. Default: compact.
        #[arg(long, value_name = "FORMAT", value_parser = ["compact", "full"])]
        entry_format: Option<String>,
    },
    /// List topics.
    List {
        /// Only those whose name contains this text.
        #[arg(long, value_name = "TEXT")]
        name: Option<String>,
        /// Maximum number of topics.
        #[arg(long, value_name = "N", default_value = "1000", value_parser = limit)]
        limit: usize,
        /// Also list the streams of the server itself.
        #[arg(long)]
        all: bool,
        /// Show messages added and settled per second, as the server measured them in the last minute. Only with --url.
        #[arg(long)]
        rates: bool,
    },
    /// Describe a topic with its keys and slots.
    Describe {
        /// Name of the topic.
        name: String,
    },
    /// Change retention, budget, retries or entry format of a topic. Options that are not given are kept.
    Alter {
        /// Name of the topic.
        name: String,
        /// Retention: messages per partition, or `none`.
        #[arg(long, value_name = "N", value_parser = count_or_none)]
        retention_count: Option<LimitArg>,
        /// Retention: age such as 7d, or `none`.
        #[arg(long, value_name = "TIME", value_parser = time_or_none)]
        retention_age: Option<LimitArg>,
        /// Retention: size such as 10MB of each partition, or `none`.
        #[arg(long, value_name = "SIZE", value_parser = size_or_none)]
        retention_bytes: Option<LimitArg>,
        /// Size such as 1GB of the topic, or `none`; sends above it are rejected.
        #[arg(long, value_name = "SIZE", value_parser = size_or_none)]
        byte_budget: Option<LimitArg>,
        /// Maximum retries of a failed message.
        #[arg(long, value_name = "N")]
        max_retries: Option<u32>,
        /// Fields of new entries: compact or full.
        #[arg(long, value_name = "FORMAT", value_parser = ["compact", "full"])]
        entry_format: Option<String>,
    },
    /// Add partitions. Takes about 10 s: until every producer knows of them.
    Grow {
        /// Name of the topic.
        name: String,
        /// New number of partitions, at most 1024.
        #[arg(long)]
        partitions: u16,
        /// Only check whether the topic can grow to this number.
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove the oldest messages.
    Trim {
        /// Name of the topic.
        name: String,
        /// Keep this many messages of each partition.
        #[arg(long, value_name = "N", required_unless_present_any = ["age", "bytes"])]
        count: Option<u64>,
        /// Keep messages up to this age, such as 24h.
        #[arg(long, value_name = "TIME", value_parser = time)]
        age: Option<Duration>,
        /// Keep about this size of each partition, such as 10MB.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        bytes: Option<u64>,
        /// Only this partition.
        #[arg(long)]
        partition: Option<u16>,
        /// Also remove messages that a group has not read or acknowledged; they are lost.
        #[arg(long)]
        force: bool,
        /// Only count what would be removed.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Delete a topic with its messages and dead letters.
    Delete {
        /// Name of the topic.
        name: String,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

/// Columns of a list of topics.
const COLUMNS: &[(&str, &str)] = &[
    ("NAME", "/name"),
    ("PARTITIONS", "/partitions"),
    ("LENGTH", "/length"),
    ("DELAYED", "/delayed"),
    ("DEAD LETTERS", "/dead_letters"),
    ("GROUPS", "/groups"),
    ("KIND", "/kind"),
    ("DELETING SINCE", "/deleting_since"),
    ("PROBLEM", "/problem"),
];

/// Columns of a list of topics with rates.
const RATE_COLUMNS: &[(&str, &str)] = &[
    ("NAME", "/name"),
    ("ADDED/S", "/rates/added_per_second"),
    ("SETTLED/S", "/rates/settled_per_second"),
    ("LENGTH", "/length"),
    ("GROUPS", "/groups"),
    ("PROBLEM", "/problem"),
];

impl TopicArgs {
    /// Fails without a server if only a server knows the answer.
    pub(in crate::cli) fn require_server(&self) -> Result<(), CliError> {
        match self.command {
            TopicCommand::List { rates: true, .. } => {
                self.connection.require_server("topics are measured by servers")
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.command, TopicCommand::List { .. } | TopicCommand::Describe { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            TopicCommand::Create {
                name,
                partitions,
                retention_count,
                retention_age,
                retention_bytes,
                byte_budget,
                max_retries,
                entry_format,
            } => {
                let request = json!({
                    "name": name,
                    "partitions": partitions,
                    "retention_count": retention_count,
                    "retention_age_ms": retention_age.map(milliseconds),
                    "retention_bytes": retention_bytes,
                    "byte_budget": byte_budget,
                    "max_retries": max_retries,
                    "entry_format": entry_format,
                });
                let answer = client.post("/topics", request).await?;
                let partitions = counted(u64::from(*partitions), "partition", "partitions");
                let sentence = match answer["created"].as_bool() {
                    Some(true) => format!("created topic `{name}` with {partitions}"),
                    _ => format!("topic `{name}` already exists with these settings"),
                };
                output::changed(style, &answer, sentence)
            }
            TopicCommand::List { name, limit, all, rates } => {
                let flags = [("all", *all), ("rates", *rates)].into_iter().filter(|(_, is)| *is);
                let mut query: Vec<_> = flags.map(|(flag, _)| (flag, "true".to_owned())).collect();
                query.extend(name.clone().map(|name| ("name", name)));
                let columns = if *rates { RATE_COLUMNS } else { COLUMNS };
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, "/topics", &query, "topics", *limit).await
            }
            TopicCommand::Describe { name } => {
                output::object(style, &client.get(&path(name), &[]).await?)
            }
            TopicCommand::Alter {
                name,
                retention_count,
                retention_age,
                retention_bytes,
                byte_budget,
                max_retries,
                entry_format,
            } => {
                let limits = [
                    ("retention_count", retention_count),
                    ("retention_age_ms", retention_age),
                    ("retention_bytes", retention_bytes),
                    ("byte_budget", byte_budget),
                ];
                let given =
                    limits.into_iter().filter_map(|(name, limit)| Some((name, (*limit)?.0)));
                let mut request: Map<String, Value> =
                    given.map(|(name, limit)| (name.to_owned(), json!(limit))).collect();
                if let Some(max_retries) = max_retries {
                    request.insert("max_retries".to_owned(), json!(max_retries));
                }
                if let Some(format) = entry_format {
                    request.insert("entry_format".to_owned(), json!(format));
                }
                if request.is_empty() {
                    return Err(CliError::usage("nothing to change; give a new limit or `none`"));
                }
                let mut changed: Vec<_> =
                    request.iter().map(|(name, limit)| shown(name, limit)).collect();
                changed.sort();
                let request = Value::Object(request);
                let answer = client.post(&format!("{}/alter", path(name)), request).await?;
                let sentence = format!("altered topic `{name}`: {}", changed.join(", "));
                output::changed(style, &answer, sentence)
            }
            TopicCommand::Grow { name, partitions, dry_run } => {
                let request = json!({"partitions": partitions, "dry_run": dry_run});
                let to = format!("{}/grow", path(name));
                let growing = client.post(&to, request);
                let what = format!("growing topic `{name}` until every producer knows of it");
                let answer = progress::waiting(what, growing).await?;
                let partitions = counted(u64::from(*partitions), "partition", "partitions");
                let verb = if *dry_run { "can grow to" } else { "has" };
                output::changed(style, &answer, format!("topic `{name}` {verb} {partitions}"))
            }
            TopicCommand::Trim { name, count, age, bytes, partition, force, dry_run, confirm } => {
                if !dry_run && confirm.is_needed() {
                    let topic = client.get(&path(name), &[]).await?;
                    let messages = messages(&topic["length"]);
                    let lost = if *force { ", including unread ones" } else { "" };
                    confirm.ask(&format!(
                        "Remove the oldest of the {messages} of topic `{name}`{lost}?"
                    ))?;
                }
                let request = json!({
                    "count": count,
                    "age_ms": age.map(milliseconds),
                    "bytes": bytes,
                    "partition": partition,
                    "force": force,
                    "dry_run": dry_run,
                });
                let answer = client.post(&format!("{}/trim", path(name)), request).await?;
                let kept = match answer["held_back"].as_bool() {
                    Some(true) => "; others are kept because a group still needs them",
                    _ => "",
                };
                let removed = messages(&answer["removed"]);
                let verb = match (dry_run, answer["or_more"].as_bool()) {
                    (false, _) => "removed",
                    (true, Some(true)) => "would remove at least",
                    (true, _) => "would remove at most",
                };
                output::changed(style, &answer, format!("{verb} {removed} of topic `{name}`{kept}"))
            }
            TopicCommand::Delete { name, confirm } => {
                if confirm.is_needed() {
                    let topic = client.get(&path(name), &[]).await?;
                    let messages = messages(&topic["length"]);
                    let letters = topic["dead_letters"].as_u64().unwrap_or(0);
                    let letters = counted(letters, "dead letter", "dead letters");
                    confirm
                        .ask(&format!("Delete topic `{name}` with {messages} and {letters}?"))?;
                }
                let interrupted = format!(
                    "interrupted; the topic may be partially deleted. Run the same command again to finish, or check with `headwater topic describe {}`",
                    shell_word(name)
                );
                let to = path(name);
                let deleting = or_interrupted(client.delete(&to), interrupted);
                let what = format!("deleting topic `{name}`");
                let answer = progress::waiting(what, deleting).await?;
                match answer["deleted"].as_bool() {
                    Some(true) => {
                        output::changed(style, &answer, format!("deleted topic `{name}`"))
                    }
                    _ => Err(CliError::NotFound(format!("topic `{name}` does not exist"))),
                }
            }
        }
    }
}

/// A changed limit in words.
fn shown(name: &str, limit: &Value) -> String {
    let value = match limit {
        Value::Null => "none".to_owned(),
        limit => crate::cli::fields::text(name, limit),
    };
    format!("{} {value}", crate::cli::fields::label(name))
}

fn messages(count: &Value) -> String {
    counted(count.as_u64().unwrap_or(0), "message", "messages")
}

fn path(topic: &str) -> String {
    format!("/topics/{}", escape(topic))
}
