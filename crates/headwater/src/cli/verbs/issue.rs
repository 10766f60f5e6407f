//! `headwater issue`: list, show, explain, retry and release issues, and show one event.

use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows, OutputStyle};
use crate::cli::progress;
use crate::cli::units::{limit, number};
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::exit::CliError;
use crate::text::counted;

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
        /// Only those with this status; quarantined ones are also queued.
        #[arg(long, value_parser = ["idle", "queued", "processing", "quarantined"])]
        status: Option<String>,
        /// Only quarantined issues, like `--status quarantined`.
        #[arg(long)]
        quarantined: bool,
        /// Only those that wait: for a backoff, a budget or further events.
        #[arg(long)]
        waiting: bool,
        /// Only those of this integration.
        #[arg(long)]
        integration: Option<String>,
        /// Only those whose last error contains this text.
        #[arg(long, value_name = "TEXT")]
        error: Option<String>,
        /// Largest ids first.
        #[arg(long)]
        newest_first: bool,
        /// Maximum number of issues.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show an issue with its events.
    Show {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: i64,
        /// Maximum number of events.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        events: usize,
        /// The newest events first.
        #[arg(long)]
        newest_first: bool,
    },
    /// Show one event by its id.
    Event {
        /// Event log id; see `headwater issue show`.
        #[arg(value_parser = number)]
        id: i64,
        /// Print only the payload as it was received.
        #[arg(long)]
        original: bool,
    },
    /// Explain why an issue has no answer, step by step, and name the command that helps.
    Why {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Show the runs of an issue, newest first: worker, result, events, tokens and session.
    Timeline {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number)]
        id: i64,
        /// Maximum number of runs.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Process one or all issues now: ends a backoff, a wait for a budget, or a quarantine.
    Retry {
        /// Issue id; see `headwater issue list`.
        #[arg(value_parser = number, required_unless_present = "all")]
        id: Option<i64>,
        /// Retry all issues that wait or are quarantined.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        /// With --all: only those that wait, not quarantined ones.
        #[arg(long, requires = "all")]
        waiting: bool,
        /// With --all: only those of this integration.
        #[arg(long, requires = "all")]
        integration: Option<String>,
        /// With --all: only those whose last error contains this text.
        #[arg(long, value_name = "TEXT", requires = "all")]
        error: Option<String>,
        #[command(flatten)]
        confirm: ConfirmArgs,
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
        /// With --all: only those whose last error contains this text.
        #[arg(long, value_name = "TEXT", requires = "all")]
        error: Option<String>,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

impl IssueArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        match self.command {
            IssueCommand::List { .. }
            | IssueCommand::Show { .. }
            | IssueCommand::Event { .. }
            | IssueCommand::Why { .. }
            | IssueCommand::Timeline { .. } => Requirements::database(true),
            IssueCommand::Retry { .. } | IssueCommand::Release { .. } => {
                Requirements::database_and_nudges()
            }
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            IssueCommand::List {
                status,
                quarantined,
                waiting,
                integration,
                error,
                newest_first,
                limit,
            } => {
                let mut query = Vec::new();
                query.extend(waiting.then(|| ("waiting", "true".to_owned())));
                query.extend(newest_first.then(|| ("newest_first", "true".to_owned())));
                query.extend(error.clone().map(|error| ("error", error)));
                let is_quarantined = status.as_deref() == Some("quarantined");
                let status = status.clone().filter(|_| !is_quarantined);
                query.extend(status.map(|status| ("status", status)));
                let quarantined = *quarantined || is_quarantined;
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
                    .show_pages(
                        OutputRows::new(style, columns),
                        "/issues",
                        &query,
                        "issues",
                        *limit,
                    )
                    .await
            }
            IssueCommand::Show { id, events, newest_first } => {
                let mut issue = client.get(&path(*id), &[]).await?;
                let of = format!("{}/events", path(*id));
                let query: &[_] =
                    if *newest_first { &[("newest_first", "true".to_owned())] } else { &[] };
                issue["events"] = client.all_pages(&of, query, "events", *events).await?;
                output::object(style, &issue)
            }
            IssueCommand::Event { id, original: false } => {
                output::object(style, &client.get(&format!("/event-logs/{id}"), &[]).await?)
            }
            IssueCommand::Event { id, original: true } => {
                output::exact(&client.text(&format!("/event-logs/{id}/original")).await?)
            }
            IssueCommand::Why { id } => {
                show_why(style, &client.get(&format!("{}/why", path(*id)), &[]).await?)
            }
            IssueCommand::Timeline { id, limit } => {
                let columns = &[
                    ("RUN", "/epoch"),
                    ("RESULT", "/result"),
                    ("WORKER", "/worker"),
                    ("CLAIMED", "/claimed_at"),
                    ("ENDED", "/ended_at"),
                    ("EVENTS", "/processed_events"),
                    ("TOKENS IN", "/models/0/tokens_in"),
                    ("TOKENS OUT", "/models/0/tokens_out"),
                    ("SESSION", "/models/0/session"),
                    ("REASON", "/reason"),
                ];
                let rows = OutputRows::new(style, columns);
                let of = format!("{}/timeline", path(*id));
                client.show_pages(rows, &of, &[], "runs", *limit).await
            }
            IssueCommand::Retry { id: Some(id), .. } => self.change(client, *id, "retry").await,
            IssueCommand::Retry { waiting, integration, error, confirm, .. } => {
                let also = if *waiting { "" } else { " and end all quarantines" };
                confirm.ask(&format!("Process all waiting issues now{also}?"))?;
                let (progress, mut cursor, mut retried) =
                    (progress::start("retried", None), None, 0);
                loop {
                    let request = json!({"integration": integration, "error": error, "waiting": waiting, "cursor": cursor});
                    let answer = client.post("/issues/retry", request).await?;
                    let some = answer["retried"].as_u64().unwrap_or(0);
                    progress.inc(some);
                    retried += some;
                    cursor = answer["next_cursor"].as_i64();
                    if cursor.is_none() {
                        break;
                    }
                }
                drop(progress);
                let sentence = format!("retried {}", counted(retried, "issue", "issues"));
                output::changed(style, &json!({"retried": retried}), sentence)
            }
            IssueCommand::Release { id: Some(id), .. } => self.change(client, *id, "release").await,
            IssueCommand::Release { all: false, .. } => {
                Err(CliError::usage("specify an ID or --all"))
            }
            IssueCommand::Release { integration, error, confirm, .. } => {
                confirm.ask("Release all quarantined issues?")?;
                let (progress, mut cursor, mut released) =
                    (progress::start("released", None), None, 0);
                loop {
                    let request =
                        json!({"integration": integration, "error": error, "cursor": cursor});
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
                let issues = counted(released, "quarantined issue", "quarantined issues");
                let sentence = format!("released {issues}");
                output::changed(style, &json!({"released": released}), sentence)
            }
        }
    }

    /// Fails if nothing was changed, so that scripts notice.
    async fn change(&self, client: &ApiClient, id: i64, request: &str) -> Result<(), CliError> {
        let answer = client.post(&format!("{}/{request}", path(id)), json!({})).await?;
        let style = self.connection.style();
        let problem = match answer["result"].as_str() {
            Some("processing") => "is already being processed",
            Some("not_quarantined") => "is not quarantined",
            Some("idle") if request == "retry" => "has no pending events",
            Some("idle") => {
                let sentence = format!("released issue {id}; it has no pending events");
                return output::changed(style, &answer, sentence);
            }
            _ => {
                let done = if request == "retry" { "retried" } else { "released" };
                let sentence = format!("{done} issue {id}; it is queued and can be claimed now");
                return output::changed(style, &answer, sentence);
            }
        };
        if style.json {
            output::object(style, &answer)?;
        }
        Err(CliError::new(format!("issue `{id}` {problem}")))
    }
}

/// The explanation as a sentence, then each step; or as JSON.
pub(super) fn show_why(style: OutputStyle, why: &Value) -> Result<(), CliError> {
    if style.json {
        return output::object(style, why);
    }
    output::print_wrapped(style, "", why["sentence"].as_str().unwrap_or_default())?;
    for step in why["steps"].as_array().into_iter().flatten() {
        let text = |name: &str| step[name].as_str().unwrap_or_default().to_owned();
        let start = format!("  {:<10} ", text("step").replace('_', "-"));
        output::print_wrapped(style, &start, &output::plain(&text("found")))?;
    }
    Ok(())
}

fn path(id: i64) -> String {
    format!("/issues/{id}")
}
