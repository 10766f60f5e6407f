//! `headwater outbox`: replies and events that were given up, and another try.

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::Client;
use crate::cli::output::{self, Rows};
use crate::cli::progress::Progress;
use crate::cli::{Confirm, Reach, number};
use crate::exit::Failure;

/// What was given up.
#[derive(Debug, clap::Args)]
pub(crate) struct Outbox {
    #[command(flatten)]
    pub(crate) reach: Reach,
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
    pub(crate) fn is_look(&self) -> bool {
        matches!(self.what, What::List { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
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
                output::object(json, &answer)
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
                output::object(json, &json!({"queued": queued}))
            }
        }
    }
}
