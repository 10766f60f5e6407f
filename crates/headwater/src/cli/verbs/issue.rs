//! `headwater issue`: list, show, explain, retry and release issues.

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows};
use crate::cli::progress;
use crate::cli::{ConfirmArgs, ConnectionArgs, number};
use crate::exit::CliError;

/// Manage issues.
#[derive(Debug, clap::Args)]
pub(crate) struct IssueArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: IssueCommand,
}

#[derive(Debug, Subcommand)]
enum IssueCommand {
    /// List issues.
    List {
        /// Only those with this status.
        #[arg(long, value_parser = ["idle", "queued", "processing"])]
        status: Option<String>,
        /// Only quarantined issues.
        #[arg(long)]
        quarantined: bool,
        /// Only those of this integration.
        #[arg(long)]
        integration: Option<String>,
        /// Maximum number of issues.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Show an issue with its events.
    Show {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: i64,
        /// Maximum number of events.
        #[arg(long, default_value_t = 100)]
        events: usize,
    },
    /// Explain why an issue is not being processed.
    Why {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Process an issue now: ends a backoff or quarantine.
    Retry {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// End the quarantine of one or all issues.
    Release {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: Option<i64>,
        /// Release all quarantined issues.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        /// With --all: only those of this integration.
        #[arg(long, requires = "all")]
        integration: Option<String>,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

impl IssueArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        match self.command {
            IssueCommand::List { .. } | IssueCommand::Show { .. } | IssueCommand::Why { .. } => {
                Requirements::database(true)
            }
            IssueCommand::Retry { .. } | IssueCommand::Release { .. } => {
                Requirements::everything(false)
            }
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let json = self.connection.json;
        match &self.command {
            IssueCommand::List { status, quarantined, integration, limit } => {
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
                    .show_pages(OutputRows::new(json, columns), "/issues", &query, "issues", *limit)
                    .await
            }
            IssueCommand::Show { id, events } => {
                let mut issue = client.get(&path(*id), &[]).await?;
                let of = format!("{}/events", path(*id));
                issue["events"] = client.all_pages(&of, "events", *events).await?;
                output::object(json, &issue)
            }
            IssueCommand::Why { id } => {
                let why = client.get(&format!("{}/why", path(*id)), &[]).await?;
                match why["sentence"].as_str().filter(|_| !json) {
                    Some(sentence) => output::line(sentence),
                    None => output::object(json, &why),
                }
            }
            IssueCommand::Retry { id } => self.change(client, *id, "retry").await,
            IssueCommand::Release { id: Some(id), .. } => self.change(client, *id, "release").await,
            IssueCommand::Release { all: false, .. } => {
                Err(CliError::usage("specify an ID or --all"))
            }
            IssueCommand::Release { integration, confirm, .. } => {
                confirm.ask("Release all quarantined issues?")?;
                let (progress, mut cursor, mut released) =
                    (progress::start("released", None), None, 0);
                loop {
                    let request = json!({"integration": integration, "cursor": cursor});
                    let answer = client.post("/issues/release", request).await?;
                    let some = answer["released"].as_u64().unwrap_or(0);
                    progress.inc(some);
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

    /// Fails if nothing was changed, so that scripts notice.
    async fn change(&self, client: &ApiClient, id: i64, request: &str) -> Result<(), CliError> {
        let answer = client.post(&format!("{}/{request}", path(id)), json!({})).await?;
        output::object(self.connection.json, &answer)?;
        match answer["result"].as_str() {
            Some("processing") => {
                Err(CliError::new(format!("issue `{id}` is already being processed")))
            }
            Some("not_quarantined") => {
                Err(CliError::new(format!("issue `{id}` is not quarantined")))
            }
            Some("idle") if request == "retry" => {
                Err(CliError::new(format!("issue `{id}` has no pending events")))
            }
            _ => Ok(()),
        }
    }
}

fn path(id: i64) -> String {
    format!("/issues/{id}")
}
