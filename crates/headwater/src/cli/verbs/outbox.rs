//! `headwater outbox`: list and show replies and events, retry dead ones, and explain why one is not delivered.

use clap::Subcommand;
use serde_json::json;

use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, OutputRows};
use crate::cli::progress;
use crate::cli::units::{limit, number};
use crate::cli::verbs::issue::show_why;
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::exit::CliError;
use crate::text::counted;

/// Manage dead replies and events.
#[derive(Debug, clap::Args)]
pub(crate) struct OutboxArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: OutboxCommand,
}

#[derive(Debug, Subcommand)]
enum OutboxCommand {
    /// List replies and events: dead ones, or those with another status or of an issue.
    List {
        /// Status: waiting, pending, taken, delivered, dead or any [default: dead, with --issue any].
        #[arg(long, value_parser = ["waiting", "pending", "taken", "delivered", "dead", "any"])]
        status: Option<String>,
        /// Only those of this issue.
        #[arg(long, value_parser = number)]
        issue: Option<i64>,
        /// Largest ids first.
        #[arg(long)]
        newest_first: bool,
        /// Maximum number of rows.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show the state of a reply or event, without its payload.
    Show {
        /// Row id; see `headwater outbox list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Explain why a reply or event is not delivered, and name the command that helps.
    Why {
        /// Row id; `headwater issue why` names those of an issue.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Retry one or all dead rows.
    Retry {
        /// Row id; see `headwater outbox list`.
        #[arg(value_parser = number)]
        id: Option<i64>,
        /// Retry all dead rows.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        /// With --all: only those of this integration.
        #[arg(long, requires = "all")]
        integration: Option<String>,
        /// With --all: only those of this issue.
        #[arg(long, requires = "all", value_parser = number)]
        issue: Option<i64>,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

impl OutboxArgs {
    pub(crate) fn is_read_only(&self) -> bool {
        !matches!(self.command, OutboxCommand::Retry { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            OutboxCommand::List { status, issue, newest_first, limit }
                if issue.is_some()
                    || *newest_first
                    || status.as_ref().is_some_and(|status| status != "dead") =>
            {
                let columns = &[
                    ("ID", "/id"),
                    ("ISSUE", "/issue_id"),
                    ("KIND", "/kind"),
                    ("TARGET", "/target"),
                    ("STATUS", "/status"),
                    ("ATTEMPTS", "/attempts"),
                    ("CREATED", "/created_at"),
                    ("DUE", "/due_at"),
                    ("ERROR", "/error"),
                ];
                let dead = (status.is_none() && issue.is_none()).then(|| "dead".to_owned());
                let status = status.clone().or(dead).filter(|status| status != "any");
                let mut query = Vec::new();
                query.extend(newest_first.then(|| ("newest_first", "true".to_owned())));
                query.extend(status.map(|status| ("status", status)));
                query.extend(issue.map(|issue| ("issue", issue.to_string())));
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, "/outbox", &query, "rows", *limit).await
            }
            OutboxCommand::List { limit, .. } => {
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
                    .show_pages(
                        OutputRows::new(style, columns),
                        "/outbox/dead",
                        &[],
                        "rows",
                        *limit,
                    )
                    .await
            }
            OutboxCommand::Show { id } => {
                output::object(style, &client.get(&format!("/outbox/{id}"), &[]).await?)
            }
            OutboxCommand::Why { id } => {
                show_why(style, &client.get(&format!("/outbox/{id}/why"), &[]).await?)
            }
            OutboxCommand::Retry { id: Some(id), .. } => {
                let answer = client.post(&format!("/outbox/{id}/retry"), json!({})).await?;
                output::changed(style, &answer, format!("queued row {id} for delivery"))
            }
            OutboxCommand::Retry { all: false, .. } => {
                Err(CliError::usage("specify an ID or --all"))
            }
            OutboxCommand::Retry { integration, issue, confirm, .. } => {
                confirm.ask("Retry all dead replies and events?")?;
                let (progress, mut cursor, mut queued) = (progress::start("queued", None), None, 0);
                loop {
                    let request =
                        json!({"integration": integration, "issue": issue, "cursor": cursor});
                    let answer = client.post("/outbox/retry", request).await?;
                    let some = answer["queued"].as_u64().unwrap_or(0);
                    progress.inc(some);
                    queued += some;
                    cursor = answer["next_cursor"].as_i64();
                    if cursor.is_none() {
                        break;
                    }
                }
                drop(progress);
                let rows = counted(queued, "dead reply or event", "dead replies and events");
                let sentence = format!("queued {rows} for delivery");
                output::changed(style, &json!({"queued": queued}), sentence)
            }
        }
    }
}
