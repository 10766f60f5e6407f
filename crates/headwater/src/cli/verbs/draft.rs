//! `headwater draft`: list, show, link, approve, edit and reject answers that wait for a person.

use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows};
use crate::cli::units::{limit, number};
use crate::cli::verbs::ticket::content_or_stdin;
use crate::exit::CliError;

/// Manage answers that wait for a person.
#[derive(Debug, clap::Args)]
pub(crate) struct DraftArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: DraftCommand,
}

#[derive(Debug, Subcommand)]
enum DraftCommand {
    /// List drafts and notes, newest first.
    List {
        /// Only those with this status.
        #[arg(long, default_value = "pending",
            value_parser = ["pending", "approved", "rejected", "outdated", "note", "all"])]
        status: String,
        /// Only those of this integration.
        #[arg(long)]
        integration: Option<String>,
        /// Only those of this issue.
        #[arg(long, value_name = "ID", value_parser = number)]
        issue: Option<i64>,
        /// Maximum number of drafts.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a draft with its texts and the decision about it.
    Show {
        /// Draft id; see `headwater draft list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Make links that approve or reject a draft without a token.
    Link {
        /// Draft id; see `headwater draft list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Post a draft, or another text instead of it.
    Approve {
        /// Draft id; see `headwater draft list`.
        #[arg(value_parser = number)]
        id: i64,
        /// Post this text instead; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: Option<String>,
        /// Version that you have read; another one is refused.
        #[arg(long, value_name = "N", value_parser = number)]
        version: Option<i64>,
    },
    /// Replace the text of a draft; it still waits for an approval.
    Edit {
        /// Draft id; see `headwater draft list`.
        #[arg(value_parser = number)]
        id: i64,
        /// New text; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// Version that you have read; another one is refused.
        #[arg(long, value_name = "N", value_parser = number)]
        version: Option<i64>,
    },
    /// Reject a draft, which is never posted then.
    Reject {
        /// Draft id; see `headwater draft list`.
        #[arg(value_parser = number)]
        id: i64,
        /// Why; the model sees it in its next run.
        #[arg(long, allow_hyphen_values = true)]
        reason: Option<String>,
    },
}

impl DraftArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        let is_read_only = !matches!(
            self.command,
            DraftCommand::Approve { .. } | DraftCommand::Edit { .. } | DraftCommand::Reject { .. }
        );
        Requirements::database(is_read_only)
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            DraftCommand::List { status, integration, issue, limit } => {
                let mut query = Vec::new();
                query.extend((status != "all").then(|| ("status", status.clone())));
                query.extend(integration.clone().map(|name| ("integration", name)));
                query.extend(issue.map(|issue| ("issue_id", issue.to_string())));
                let columns = &[
                    ("ID", "/id"),
                    ("STATUS", "/status"),
                    ("INTEGRATION", "/integration"),
                    ("ISSUE", "/issue_id"),
                    ("CREATED", "/created_at"),
                    ("TEXT", "/content"),
                ];
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, "/drafts", &query, "drafts", *limit).await
            }
            DraftCommand::Show { id } => {
                let mut draft = client.get(&format!("/drafts/{id}"), &[]).await?;
                if style.json {
                    return output::object(style, &draft);
                }
                let difference = draft["difference"].take();
                output::object(style, &draft)?;
                if difference.is_null() {
                    return Ok(());
                }
                output::line("\n--- text of the model\n+++ text of a person")?;
                output::difference(&difference)
            }
            DraftCommand::Link { id } => {
                let links = client.get(&format!("/drafts/{id}/link"), &[]).await?;
                if style.json {
                    return output::object(style, &links);
                }
                // Not as a table, which would break them.
                for name in ["approve", "reject", "expires_at"] {
                    let text = links[name].as_str().unwrap_or_default();
                    output::line(&format!("{}: {text}", name.replace('_', " ")))?;
                }
                Ok(())
            }
            DraftCommand::Approve { id, content, version } => {
                let content = content.as_deref().map(content_or_stdin).transpose()?;
                let request = json!({"content": content, "version": version});
                let answer = client.post(&format!("/drafts/{id}/approve"), request).await?;
                let sentence = sentence(&answer, id, "approved", "it is posted");
                output::changed(style, &answer, sentence)
            }
            DraftCommand::Edit { id, content, version } => {
                let request = json!({"content": content_or_stdin(content)?, "version": version});
                let answer = client.post(&format!("/drafts/{id}/edit"), request).await?;
                let next = format!("`headwater draft approve {id}` posts it");
                let sentence = sentence(&answer, id, "edited", &next);
                output::changed(style, &answer, sentence)
            }
            DraftCommand::Reject { id, reason } => {
                let request = json!({"reason": reason});
                let answer = client.post(&format!("/drafts/{id}/reject"), request).await?;
                let sentence = sentence(&answer, id, "rejected", "it is never posted");
                output::changed(style, &answer, sentence)
            }
        }
    }
}

fn sentence(answer: &Value, id: &i64, what: &str, next: &str) -> String {
    match answer["changed"].as_bool() {
        Some(false) => format!("draft {id} was {what} before; nothing was changed"),
        _ => format!("{what} draft {id}; {next}"),
    }
}
