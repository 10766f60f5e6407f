//! `headwater dlq`: the dead letters of a topic: list, show, replay, purge.

use std::num::NonZeroU32;

use clap::Subcommand;
use futures_util::StreamExt;
use serde_json::{Value, json};

use crate::cli::api_client::{Client, escape, refused_line};
use crate::cli::output::{self, Rows};
use crate::cli::progress::Progress;
use crate::cli::{Confirm, Reach};
use crate::exit::Failure;
use crate::text::counted;

/// Dead letters.
#[derive(Debug, clap::Args)]
pub(crate) struct Dlq {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List dead letters.
    List {
        topic: String,
        #[command(flatten)]
        filter: Filter,
        /// The newest first.
        #[arg(long)]
        newest_first: bool,
        /// At most this many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Show one with all its fields.
    Show { topic: String, id: String },
    /// Send dead letters to their partitions again.
    Replay {
        topic: String,
        #[command(flatten)]
        which: Which,
        /// At most so many a second.
        #[arg(long, value_name = "N")]
        rate: Option<NonZeroU32>,
        /// At most so many.
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        /// Letters that were replayed so often are left alone.
        #[arg(long, value_name = "N")]
        max_replays: Option<u32>,
        /// Only say what would happen.
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove dead letters for good.
    Purge {
        topic: String,
        #[command(flatten)]
        which: Which,
        /// Only say what would happen.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confirm: Confirm,
    },
}

#[derive(Debug, clap::Args)]
struct Filter {
    /// Those whose reason holds this text.
    #[arg(long)]
    reason: Option<String>,
    /// Those with this key.
    #[arg(long)]
    key: Option<String>,
    /// Those of this partition.
    #[arg(long)]
    partition: Option<u16>,
    /// Given up at this time or later.
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Given up at this time or earlier.
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Which {
    /// These.
    ids: Vec<String>,
    #[command(flatten)]
    filter: Filter,
    /// All there are.
    #[arg(long)]
    all: bool,
}

impl Which {
    fn wish(&self) -> Result<Value, Failure> {
        let Filter { reason, key, partition, from, to } = &self.filter;
        let texts = [reason, key, from, to];
        let is_filtered = texts.iter().any(|text| text.is_some()) || partition.is_some();
        if !is_filtered && !self.all && self.ids.is_empty() {
            return Err(Failure::usage("say which: IDS, --all, or a filter such as --reason"));
        }
        let ids = (!self.ids.is_empty()).then_some(&self.ids);
        Ok(json!({
            "ids": ids, "reason": reason, "key": key, "partition": partition, "from": from, "to": to, "all": self.all,
        }))
    }
}

impl Dlq {
    pub(crate) fn is_look(&self) -> bool {
        matches!(self.what, What::List { .. } | What::Show { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::List { topic, filter, newest_first, limit } => {
                let Filter { reason, key, partition, from, to } = filter;
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
                        Rows::new(json, columns),
                        &path(topic),
                        &query,
                        "dead_letters",
                        *limit,
                    )
                    .await
            }
            What::Show { topic, id } => {
                let letter = client.get(&format!("{}/{}", path(topic), escape(id)), &[]).await?;
                output::object(json, &letter)
            }
            What::Replay { topic, which, rate, limit, max_replays, dry_run } => {
                let mut wish = which.wish()?;
                wish["per_second"] = json!(rate);
                wish["limit"] = json!(limit);
                wish["max_replays"] = json!(max_replays);
                wish["dry_run"] = json!(dry_run);
                let to = format!("{}/replay", path(topic));
                let answer = carry_out(client, &to, wish, "replayed").await?;
                if *dry_run && !json {
                    would(&answer["replayed"], "replayed")?;
                }
                output::object(json, &answer)
            }
            What::Purge { topic, which, dry_run, confirm } => {
                if !dry_run {
                    confirm.ask(&format!("Remove dead letters of `{topic}` for good?"))?;
                }
                let mut wish = which.wish()?;
                wish["dry_run"] = json!(dry_run);
                let to = format!("{}/purge", path(topic));
                let answer = carry_out(client, &to, wish, "purged").await?;
                if *dry_run && !json {
                    would(&answer["purged"], "purged")?;
                }
                output::object(json, &answer)
            }
        }
    }
}

/// Does it, and shows on a terminal how far it is. What is wrong with named ones is told before anything is done, so they are
/// asked for without lines: they are few.
async fn carry_out(
    client: &Client,
    to: &str,
    mut wish: Value,
    what: &'static str,
) -> Result<Value, Failure> {
    if !wish["ids"].is_null() {
        return client.post(to, wish).await;
    }
    wish["progress"] = json!(true);
    let (progress, mut shown) = (Progress::new(what, None), 0);
    let mut lines = client.post_lines(to, wish).await?;
    while let Some(line) = lines.next().await {
        let mut line: Value = serde_json::from_str(&line?).unwrap_or_default();
        if let Some(failure) = refused_line(&line) {
            return Err(failure);
        }
        if line.get("end").is_some() {
            return Ok(line["end"].take());
        }
        let done = line["progress"]["done"].as_u64().unwrap_or(shown);
        progress.add(done.saturating_sub(shown));
        shown = done;
    }
    Err(Failure::Unreachable("it was cut off before its end; do it again".to_owned()))
}

/// What a dry run found.
fn would(count: &Value, what: &str) -> Result<(), Failure> {
    let letters = counted(count.as_u64().unwrap_or(0), "dead letter", "dead letters");
    output::line(&format!("dry run: {letters} would be {what}\n"))
}

fn path(topic: &str) -> String {
    format!("/topics/{}/dead-letters", escape(topic))
}
