//! `headwater audit`: whether every event is accounted for, and who changed what.

use clap::Subcommand;
use serde_json::Value;

use crate::cli::Reach;
use crate::cli::api_client::Client;
use crate::cli::output::{self, Rows};
use crate::exit::Failure;

/// The audit.
#[derive(Debug, clap::Args)]
pub(crate) struct Audit {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Count every event there ever was: recorded = processed + pending + quarantined. Without a word, this is done.
    Books,
    /// List who changed what, over HTTP and by verbs, newest first.
    Log {
        /// At most this many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
}

impl Audit {
    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match self.what.as_ref().unwrap_or(&What::Books) {
            What::Books => {
                let books = client.get("/audit/books", &[]).await?;
                output::object(json, &books)?;
                match books["balances"] {
                    Value::Bool(true) => Ok(()),
                    _ => Err(Failure::new("the books do not balance, see above")),
                }
            }
            What::Log { limit } => {
                let columns = &[
                    ("AT", "/at"),
                    ("CALLER", "/caller"),
                    ("ROLE", "/role"),
                    ("CLIENT", "/client"),
                    ("METHOD", "/method"),
                    ("PATH", "/path"),
                    ("STATUS", "/status"),
                ];
                client.show_pages(Rows::new(json, columns), "/audit", &[], "entries", *limit).await
            }
        }
    }
}
