//! `headwater prompt`: list, show, set, compare and roll back the prompts of integrations.

use std::path::PathBuf;

use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows};
use crate::cli::units::{limit, number};
use crate::cli::verbs::ticket::content_or_stdin;
use crate::exit::CliError;
use crate::limits::PROMPT_TEMPLATE_BYTES_MAX;

/// Manage what the model is told about each integration.
#[derive(Debug, clap::Args)]
pub(crate) struct PromptArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: PromptCommand,
}

#[derive(Debug, Subcommand)]
enum PromptCommand {
    /// List the active prompt of each integration, or all versions of one.
    List {
        /// Integration whose versions are listed, newest first.
        integration: Option<String>,
        /// Maximum number of versions.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Print the text of a prompt.
    Show {
        /// Integration; see `headwater prompt list`.
        integration: String,
        /// Version; 0 is the built-in prompt. Default: the active one.
        #[arg(long, value_name = "N", value_parser = number)]
        version: Option<i64>,
    },
    /// Store a new version of a prompt and use it from now on.
    Set {
        /// Integration; see `headwater prompt list`.
        integration: String,
        /// The text; `-` reads standard input. {{integration}}, {{provider}}, {{date}} and {{tools}} are variables.
        #[arg(long, allow_hyphen_values = true, required_unless_present = "file")]
        content: Option<String>,
        /// File with the text.
        #[arg(long, value_name = "FILE", conflicts_with = "content")]
        file: Option<PathBuf>,
        /// Why it is changed.
        #[arg(long, allow_hyphen_values = true)]
        comment: Option<String>,
        /// Active version that you have read; if another one is active, nothing is changed.
        #[arg(long, value_name = "N", value_parser = number)]
        expect: Option<i64>,
    },
    /// Compare two versions of a prompt, line by line.
    Diff {
        /// Integration; see `headwater prompt list`.
        integration: String,
        /// Older version. Default: the one before the newer one.
        #[arg(long, value_name = "N", value_parser = number)]
        from: Option<i64>,
        /// Newer version. Default: the active one.
        #[arg(long, value_name = "N", value_parser = number)]
        to: Option<i64>,
    },
    /// Use an earlier version of a prompt again.
    Rollback {
        /// Integration; see `headwater prompt list`.
        integration: String,
        /// Version; 0 is the built-in prompt. Default: the one before the active one.
        #[arg(long, value_name = "N", value_parser = number)]
        to: Option<i64>,
        /// Active version that you have read; if another one is active, nothing is changed.
        #[arg(long, value_name = "N", value_parser = number)]
        expect: Option<i64>,
    },
}

impl PromptArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        let changes =
            matches!(self.command, PromptCommand::Set { .. } | PromptCommand::Rollback { .. });
        Requirements::database(!changes)
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            PromptCommand::List { integration: None, .. } => {
                let columns = &[
                    ("INTEGRATION", "/integration"),
                    ("VERSION", "/version"),
                    ("NEWEST", "/newest"),
                    ("CHANGED", "/changed_at"),
                    ("BY", "/changed_by"),
                ];
                let mut rows = OutputRows::new(style, columns);
                let answer = client.get("/prompts", &[]).await?;
                answer["prompts"].as_array().into_iter().flatten().for_each(|one| rows.add(one));
                rows.finish()
            }
            PromptCommand::List { integration: Some(integration), limit } => {
                let columns = &[
                    ("VERSION", "/version"),
                    ("ACTIVE", "/is_active"),
                    ("CREATED", "/created_at"),
                    ("BY", "/created_by"),
                    ("COMMENT", "/comment"),
                ];
                let path = format!("{}/versions", path(integration));
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, &path, &[], "versions", *limit).await
            }
            PromptCommand::Show { integration, version } => {
                let query = version.map(|version| ("version", version.to_string()));
                let query: Vec<_> = query.into_iter().collect();
                let prompt = client.get(&path(integration), &query).await?;
                match style.json {
                    true => output::object(style, &prompt),
                    // Without decoration, so that it can be edited and set again.
                    false => output::line(prompt["content"].as_str().unwrap_or_default()),
                }
            }
            PromptCommand::Set { integration, content, file, comment, expect } => {
                let content = match (content, file) {
                    (_, Some(file)) => read(file)?,
                    (content, None) => content_or_stdin(content.as_deref().unwrap_or_default())?,
                };
                let request =
                    json!({"content": content, "comment": comment, "expected_version": expect});
                let answer = client.post(&path(integration), request).await?;
                output::changed(style, &answer, sentence(&answer, integration))
            }
            PromptCommand::Diff { integration, from, to } => {
                let mut query = Vec::new();
                query.extend(from.map(|from| ("from", from.to_string())));
                query.extend(to.map(|to| ("to", to.to_string())));
                let found = client.get(&format!("{}/diff", path(integration)), &query).await?;
                if style.json {
                    return output::object(style, &found);
                }
                output::line(&format!("--- version {}", found["from"]))?;
                output::line(&format!("+++ version {}", found["to"]))?;
                output::difference(&found["lines"])
            }
            PromptCommand::Rollback { integration, to, expect } => {
                let request = json!({"version": to, "expected_version": expect});
                let path = format!("{}/rollback", path(integration));
                let answer = client.post(&path, request).await?;
                output::changed(style, &answer, sentence(&answer, integration))
            }
        }
    }
}

fn path(integration: &str) -> String {
    format!("/prompts/{}", escape(integration))
}

fn sentence(answer: &Value, integration: &str) -> String {
    let version = match answer["version"].as_i64() {
        Some(0) => "the built-in prompt".to_owned(),
        _ => format!("version {} of the prompt", answer["version"]),
    };
    match answer["changed"].as_bool() {
        Some(false) => {
            format!("integration {integration} used {version} before; nothing was changed")
        }
        _ => format!(
            "integration {integration} uses {version}; running processes use it within 5 seconds"
        ),
    }
}

/// Reads a file that is not longer than a prompt.
fn read(file: &std::path::Path) -> Result<String, CliError> {
    let problem = |error: &dyn std::fmt::Display| {
        CliError::usage(format!("cannot read `{}`: {error}", file.display()))
    };
    let bytes = std::fs::metadata(file).map_err(|error| problem(&error))?.len();
    // A line ending of two bytes is stored as one.
    if bytes > 2 * PROMPT_TEMPLATE_BYTES_MAX as u64 {
        return Err(problem(&format!(
            "it has {bytes} bytes; a prompt has at most {PROMPT_TEMPLATE_BYTES_MAX}"
        )));
    }
    std::fs::read_to_string(file).map_err(|error| problem(&error))
}
