//! `headwater issue`: list, show, why, retry, release one or all.

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::Client;
use crate::cli::in_process::Needs;
use crate::cli::output::{self, Rows};
use crate::cli::progress::Progress;
use crate::cli::{Confirm, Reach, number};
use crate::exit::Failure;

/// Issues.
#[derive(Debug, clap::Args)]
pub(crate) struct Issue {
    #[command(flatten)]
    pub(crate) reach: Reach,
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
        /// The issue; `headwater issue list` shows the ids.
        #[arg(value_parser = number)]
        id: i64,
        /// Events, at most.
        #[arg(long, default_value_t = 100)]
        events: usize,
    },
    /// Say why an issue is not being worked on.
    Why {
        /// The issue; `headwater issue list` shows the ids.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Let an issue be worked on now: ends a wait or a quarantine.
    Retry {
        /// The issue; `headwater issue list` shows the ids.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// End a quarantine, or all of them.
    Release {
        /// The issue; `headwater issue list` shows the ids.
        #[arg(value_parser = number)]
        id: Option<i64>,
        /// All that wait for an operator.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        /// Of these, only those of this integration.
        #[arg(long, requires = "all")]
        integration: Option<String>,
        #[command(flatten)]
        confirm: Confirm,
    },
}

impl Issue {
    pub(in crate::cli) fn needs(&self) -> Needs {
        match self.what {
            What::List { .. } | What::Show { .. } | What::Why { .. } => Needs::database(true),
            What::Retry { .. } | What::Release { .. } => Needs::everything(false),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
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
                output::object(json, &issue)
            }
            What::Why { id } => {
                let why = client.get(&format!("{}/why", path(*id)), &[]).await?;
                match why["sentence"].as_str().filter(|_| !json) {
                    Some(sentence) => output::line(sentence),
                    None => output::object(json, &why),
                }
            }
            What::Retry { id } => self.change(client, *id, "retry").await,
            What::Release { id: Some(id), .. } => self.change(client, *id, "release").await,
            What::Release { all: false, .. } => Err(Failure::usage("say which: an ID, or --all")),
            What::Release { integration, confirm, .. } => {
                confirm.ask("Let every quarantined issue be worked on again?")?;
                let (progress, mut cursor, mut released) =
                    (Progress::new("released", None), None, 0);
                loop {
                    let wish = json!({"integration": integration, "cursor": cursor});
                    let answer = client.post("/issues/release", wish).await?;
                    let some = answer["released"].as_u64().unwrap_or(0);
                    progress.add(some);
                    released += some;
                    cursor = answer["next_cursor"].as_i64();
                    if cursor.is_none() {
                        break;
                    }
                }
                drop(progress);
                output::object(json, &json!({"released": released}))
            }
        }
    }

    /// A wish that changed nothing is a failure, so that a script notices.
    async fn change(&self, client: &Client, id: i64, wish: &str) -> Result<(), Failure> {
        let answer = client.post(&format!("{}/{wish}", path(id)), json!({})).await?;
        output::object(self.reach.json, &answer)?;
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
