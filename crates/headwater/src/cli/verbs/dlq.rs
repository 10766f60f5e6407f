//! `headwater dlq`: list, show, replay and purge the dead letters of a topic.

use std::num::NonZeroU32;

use clap::Subcommand;
use futures_util::StreamExt;
use serde_json::{Value, json};

use crate::cli::api_client::{ApiClient, error_in_line, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::progress;
use crate::cli::units::{at_least_one, limit, moment};
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::exit::CliError;
use crate::text::counted;

/// Manage the dead letters of a topic.
#[derive(Debug, clap::Args)]
pub(crate) struct DlqArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: DlqCommand,
}

#[derive(Debug, Subcommand)]
enum DlqCommand {
    /// List dead letters.
    List {
        /// Name of the topic.
        topic: String,
        #[command(flatten)]
        filter: DeadLetterFilterArgs,
        /// Newest first.
        #[arg(long)]
        newest_first: bool,
        /// Maximum number of dead letters.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a dead letter with all its fields.
    Show {
        /// Name of the topic.
        topic: String,
        /// Entry id; see `headwater dlq list`.
        id: String,
    },
    /// Send dead letters to their partitions again.
    Replay {
        /// Name of the topic.
        topic: String,
        #[command(flatten)]
        selection: DeadLetterSelectionArgs,
        /// Maximum rate per second.
        #[arg(long, value_name = "N")]
        rate: Option<NonZeroU32>,
        /// Maximum number of dead letters.
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        limit: Option<u64>,
        /// Skip dead letters that were already replayed this often.
        #[arg(long, value_name = "N")]
        max_replays: Option<u32>,
        /// Replay one dead letter with this payload instead of its own.
        #[arg(long, allow_hyphen_values = true, conflicts_with_all = ["rate", "limit", "max_replays", "dry_run"])]
        payload: Option<String>,
        /// Only print what would happen.
        #[arg(long)]
        dry_run: bool,
    },
    /// Delete dead letters permanently.
    Purge {
        /// Name of the topic.
        topic: String,
        #[command(flatten)]
        selection: DeadLetterSelectionArgs,
        /// Only print what would happen.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

#[derive(Debug, clap::Args)]
struct DeadLetterFilterArgs {
    /// Only those whose reason contains this text.
    #[arg(long)]
    reason: Option<String>,
    /// Only those with this key.
    #[arg(long)]
    key: Option<String>,
    /// Only those of this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// Only those that failed at this time or later: 2026-11-15T10:00:00Z, or an age such as 1h.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    from: Option<String>,
    /// Only those that failed at this time or earlier: 2026-11-15T10:00:00Z, or an age such as 1h.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    to: Option<String>,
}

#[derive(Debug, clap::Args)]
struct DeadLetterSelectionArgs {
    /// Entry ids; see `headwater dlq list`.
    ids: Vec<String>,
    #[command(flatten)]
    filter: DeadLetterFilterArgs,
    /// Select all.
    #[arg(long)]
    all: bool,
}

impl DeadLetterSelectionArgs {
    fn request_body(&self) -> Result<Value, CliError> {
        let DeadLetterFilterArgs { reason, key, partition, from, to } = &self.filter;
        let texts = [reason, key, from, to];
        let is_filtered = texts.iter().any(|text| text.is_some()) || partition.is_some();
        if !is_filtered && !self.all && self.ids.is_empty() {
            return Err(CliError::usage(
                "select dead letters: IDS, --all, or a filter such as --reason",
            ));
        }
        let ways = [!self.ids.is_empty(), self.all, is_filtered];
        if ways.into_iter().filter(|is_given| *is_given).count() > 1 {
            return Err(CliError::usage(
                "IDS, --all and filters such as --reason exclude each other; give one of them",
            ));
        }
        let ids = (!self.ids.is_empty()).then_some(&self.ids);
        Ok(json!({
            "ids": ids, "reason": reason, "key": key, "partition": partition, "from": from, "to": to, "all": self.all,
        }))
    }
}

impl DlqArgs {
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.command, DlqCommand::List { .. } | DlqCommand::Show { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            DlqCommand::List { topic, filter, newest_first, limit } => {
                let DeadLetterFilterArgs { reason, key, partition, from, to } = filter;
                let mut query = Vec::new();
                let texts = [("reason", reason), ("key", key), ("from", from), ("to", to)];
                query.extend(
                    texts.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))),
                );
                query.extend(partition.map(|partition| ("partition", partition.to_string())));
                query.extend(newest_first.then(|| ("newest_first", "true".to_owned())));
                let columns = &[
                    ("ID", "/id"),
                    ("PARTITION", "/partition"),
                    ("KEY", "/key"),
                    ("FAILURES", "/failures"),
                    ("FAILED AT", "/failed_at"),
                    ("REASON", "/reason"),
                ];
                client
                    .show_pages(
                        OutputRows::new(style, columns),
                        &path(topic),
                        &query,
                        "dead_letters",
                        *limit,
                    )
                    .await
            }
            DlqCommand::Show { topic, id } => {
                let letter = client.get(&format!("{}/{}", path(topic), escape(id)), &[]).await?;
                output::object(style, &letter)
            }
            DlqCommand::Replay { topic, selection, payload: Some(payload), .. } => {
                selection.request_body()?;
                let [id] = selection.ids.as_slice() else {
                    return Err(CliError::usage("--payload is for one dead letter; give its id"));
                };
                let to = format!("{}/{}/replay", path(topic), escape(id));
                let answer = client.post(&to, json!({"payload": payload})).await?;
                let entry = answer["id"].as_str().unwrap_or_default();
                let sentence = match answer["replayed"].as_bool() {
                    Some(false) => format!(
                        "dead letter {id} had been replayed before, as message {entry}; nothing was sent"
                    ),
                    _ => format!(
                        "replayed dead letter {id} of topic `{topic}` with another payload, as message {entry}"
                    ),
                };
                output::changed(style, &answer, sentence)
            }
            DlqCommand::Replay { topic, selection, rate, limit, max_replays, dry_run, .. } => {
                let mut request = selection.request_body()?;
                request["per_second"] = json!(rate);
                request["limit"] = json!(limit);
                request["max_replays"] = json!(max_replays);
                request["dry_run"] = json!(dry_run);
                let to = format!("{}/replay", path(topic));
                let answer = run_with_progress(client, &to, request, "replayed").await?;
                let verb = if *dry_run { "would replay" } else { "replayed" };
                let mut left_out = String::new();
                if answer["already_replayed"] != 0 {
                    left_out = format!("; {} had been replayed before", answer["already_replayed"]);
                }
                if answer["refused"] != 0 {
                    let problem = answer["refusals"][0]["problem"].as_str().unwrap_or_default();
                    left_out = format!("{left_out}; refused {}: {problem}", answer["refused"]);
                }
                let letters = letters(&answer["replayed"]);
                let sentence = format!("{verb} {letters} of topic `{topic}`{left_out}");
                output::changed(style, &answer, sentence)
            }
            DlqCommand::Purge { topic, selection, dry_run, confirm } => {
                let mut request = selection.request_body()?;
                request["dry_run"] = json!(dry_run);
                if !dry_run && confirm.is_needed() {
                    let found = client.get(&format!("/topics/{}", escape(topic)), &[]).await?;
                    let which = if selection.all { "all" } else { "selected ones of" };
                    let letters = letters(&found["dead_letters"]);
                    confirm.ask(&format!(
                        "Permanently delete {which} {letters} of topic `{topic}`?"
                    ))?;
                }
                let to = format!("{}/purge", path(topic));
                let answer = run_with_progress(client, &to, request, "purged").await?;
                let verb = if *dry_run { "would purge" } else { "purged" };
                let sentence = format!("{verb} {} of topic `{topic}`", letters(&answer["purged"]));
                output::changed(style, &answer, sentence)
            }
        }
    }
}

/// Runs a replay or purge and shows its progress on a terminal. Selections by id are small and are sent without
/// progress, so that invalid ids are reported before anything is done.
async fn run_with_progress(
    client: &ApiClient,
    to: &str,
    mut request: Value,
    what: &'static str,
) -> Result<Value, CliError> {
    if !request["ids"].is_null() {
        return client.post(to, request).await;
    }
    request["progress"] = json!(true);
    let progress = progress::start(what, None);
    let mut lines = client.post_lines(to, request).await?;
    while let Some(line) = lines.next().await {
        let mut line: Value = serde_json::from_str(&line?).unwrap_or_default();
        if let Some(failure) = error_in_line(&line) {
            return Err(failure);
        }
        if line.get("end").is_some() {
            return Ok(line["end"].take());
        }
        if let Some(done) = line["progress"]["done"].as_u64() {
            progress.set_position(done);
        }
    }
    Err(CliError::Unreachable("the connection was lost before the end; run it again".to_owned()))
}

fn letters(count: &Value) -> String {
    counted(count.as_u64().unwrap_or(0), "dead letter", "dead letters")
}

fn path(topic: &str) -> String {
    format!("/topics/{}/dead-letters", escape(topic))
}
