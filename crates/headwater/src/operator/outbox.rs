//! `headwater outbox`: replies and events that were given up, and another try.

use clap::Subcommand;
use serde_json::json;

use super::client::Client;
use super::print::{self, Rows};
use super::progress::Progress;
use super::{Confirm, Reach, number};
use crate::failure::Failure;

/// What was given up.
#[derive(Debug, clap::Args)]
pub(crate) struct Outbox {
    #[command(flatten)]
    pub(super) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List what was given up after its last try.
    List {
        /// At most this many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Send one of them again, or all.
    Retry {
        /// The row; `headwater outbox list` shows the ids.
        #[arg(value_parser = number)]
        id: Option<i64>,
        /// All that were given up.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        /// Of these, only those of this integration.
        #[arg(long, requires = "all")]
        integration: Option<String>,
        #[command(flatten)]
        confirm: Confirm,
    },
}

impl Outbox {
    pub(super) fn is_look(&self) -> bool {
        matches!(self.what, What::List { .. })
    }

    pub(super) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::List { limit } => {
                let columns = &[
                    ("ID", "/id"),
                    ("ISSUE", "/issue_id"),
                    ("KIND", "/kind"),
                    ("TARGET", "/target"),
                    ("ATTEMPTS", "/attempts"),
                    ("CREATED", "/created_at"),
                    ("ERROR", "/error"),
                ];
                client
                    .show_pages(Rows::new(json, columns), "/outbox/dead", &[], "rows", *limit)
                    .await
            }
            What::Retry { id: Some(id), .. } => {
                let answer = client.post(&format!("/outbox/{id}/retry"), json!({})).await?;
                print::object(json, &answer)
            }
            What::Retry { all: false, .. } => Err(Failure::usage("say which: an ID, or --all")),
            What::Retry { integration, confirm, .. } => {
                confirm.ask("Send everything again that was given up?")?;
                let (progress, mut cursor, mut queued) = (Progress::new("queued", None), None, 0);
                loop {
                    let wish = json!({"integration": integration, "cursor": cursor});
                    let answer = client.post("/outbox/retry", wish).await?;
                    let some = answer["queued"].as_u64().unwrap_or(0);
                    progress.add(some);
                    queued += some;
                    cursor = answer["next_cursor"].as_i64();
                    if cursor.is_none() {
                        break;
                    }
                }
                drop(progress);
                print::object(json, &json!({"queued": queued}))
            }
        }
    }
}
