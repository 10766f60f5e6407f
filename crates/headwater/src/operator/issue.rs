//! `headwater issue`: list, show, why, retry, release.

use clap::Subcommand;
use serde_json::json;

use super::Reach;
use super::client::Client;
use super::print::{self, Rows};
use crate::failure::Failure;

/// Issues.
#[derive(Debug, clap::Args)]
pub(crate) struct Issue {
    #[command(flatten)]
    pub(super) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List issues.
    List {
        /// Only those that stand here.
        #[arg(long, value_parser = ["idle", "queued", "processing"])]
        status: Option<String>,
        /// Only those that wait for an operator.
        #[arg(long)]
        quarantined: bool,
        /// Only those of this integration.
        #[arg(long)]
        integration: Option<String>,
        /// At most this many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Show an issue with its events.
    Show {
        id: i64,
        /// Events, at most.
        #[arg(long, default_value_t = 100)]
        events: usize,
    },
    /// Say why an issue is not being worked on.
    Why { id: i64 },
    /// Let an issue be worked on now: ends a wait or a quarantine.
    Retry { id: i64 },
    /// End a quarantine.
    Release { id: i64 },
}

impl Issue {
    pub(super) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::List { status, quarantined, integration, limit } => {
                let mut query = Vec::new();
                query.extend(status.clone().map(|status| ("status", status)));
                query.extend(quarantined.then(|| ("quarantined", "true".to_owned())));
                query.extend(integration.clone().map(|name| ("integration", name)));
                let columns = &[
                    ("ID", "/id"),
                    ("INTEGRATION", "/integration"),
                    ("PROJECT", "/external_project_id"),
                    ("ISSUE", "/external_issue_id"),
                    ("STATUS", "/processing_status"),
                    ("PENDING", "/pending_events"),
                    ("ATTEMPTS", "/attempts"),
                    ("QUARANTINED", "/quarantined_at"),
                    ("LAST ERROR", "/last_error"),
                ];
                client
                    .show_pages(Rows::new(json, columns), "/issues", &query, "issues", *limit)
                    .await
            }
            What::Show { id, events } => {
                let mut issue = client.get(&path(*id), &[]).await?;
                let of = format!("{}/events", path(*id));
                issue["events"] = client.all(&of, "events", *events).await?;
                print::object(json, &issue)
            }
            What::Why { id } => {
                let why = client.get(&format!("{}/why", path(*id)), &[]).await?;
                match why["sentence"].as_str().filter(|_| !json) {
                    Some(sentence) => print::text(sentence),
                    None => print::object(json, &why),
                }
            }
            What::Retry { id } => self.change(client, *id, "retry").await,
            What::Release { id } => self.change(client, *id, "release").await,
        }
    }

    /// A wish that changed nothing is a failure, so that a script notices.
    async fn change(&self, client: &Client, id: i64, wish: &str) -> Result<(), Failure> {
        let answer = client.post(&format!("{}/{wish}", path(id)), json!({})).await?;
        print::object(self.reach.json, &answer)?;
        match answer["result"].as_str() {
            Some("processing") => Err(Failure::new(format!("a worker has issue {id} already"))),
            Some("not_quarantined") => Err(Failure::new(format!("issue {id} is not quarantined"))),
            Some("idle") if wish == "retry" => {
                Err(Failure::new(format!("nothing of issue {id} is pending")))
            }
            _ => Ok(()),
        }
    }
}

fn path(id: i64) -> String {
    format!("/issues/{id}")
}
