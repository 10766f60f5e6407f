//! `headwater outbox`: replies and events that were given up, and another try.

use clap::Subcommand;
use serde_json::json;

use super::Reach;
use super::client::Client;
use super::print::{self, Rows};
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
    /// Send one of them again.
    Retry { id: i64 },
}

impl Outbox {
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
            What::Retry { id } => {
                let answer = client.post(&format!("/outbox/{id}/retry"), json!({})).await?;
                print::object(json, &answer)
            }
        }
    }
}
