//! `headwater dlq`: the dead letters of a topic: list, show, replay, purge.

use std::num::NonZeroU32;

use clap::Subcommand;
use serde_json::{Value, json};

use super::client::{Client, escape};
use super::print::{self, Rows};
use super::{Confirm, Reach};
use crate::failure::Failure;

/// Dead letters.
#[derive(Debug, clap::Args)]
pub(crate) struct Dlq {
    #[command(flatten)]
    pub(super) reach: Reach,
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
    fn wish(&self) -> Value {
        let Filter { reason, key, partition, from, to } = &self.filter;
        let ids = (!self.ids.is_empty()).then_some(&self.ids);
        json!({
            "ids": ids, "reason": reason, "key": key, "partition": partition, "from": from, "to": to, "all": self.all,
        })
    }
}

impl Dlq {
    pub(super) async fn run(&self, client: &Client) -> Result<(), Failure> {
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
                let mut rows = Rows::new(json, columns);
                let show = |item: Value| rows.add(&item);
                client.pages(&path(topic), &query, "dead_letters", *limit, show).await?;
                rows.finish()
            }
            What::Show { topic, id } => {
                let letter = client.get(&format!("{}/{}", path(topic), escape(id)), &[]).await?;
                print::object(json, &letter)
            }
            What::Replay { topic, which, rate, limit, max_replays, dry_run } => {
                let mut wish = which.wish();
                wish["per_second"] = json!(rate);
                wish["limit"] = json!(limit);
                wish["max_replays"] = json!(max_replays);
                wish["dry_run"] = json!(dry_run);
                print::object(json, &client.post(&format!("{}/replay", path(topic)), wish).await?)
            }
            What::Purge { topic, which, dry_run, confirm } => {
                if !dry_run {
                    confirm.ask(&format!("Remove dead letters of `{topic}` for good?"))?;
                }
                let mut wish = which.wish();
                wish["dry_run"] = json!(dry_run);
                print::object(json, &client.post(&format!("{}/purge", path(topic)), wish).await?)
            }
        }
    }
}

fn path(topic: &str) -> String {
    format!("/topics/{}/dead-letters", escape(topic))
}
