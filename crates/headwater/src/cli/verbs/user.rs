//! `headwater export` and `headwater erase`: the data of one user.

use std::path::PathBuf;

use serde_json::json;

use crate::cli::api_client::ApiClient;
use crate::cli::verbs::session;
use crate::cli::{ConfirmArgs, ConnectionArgs, output, progress};
use crate::exit::CliError;
use crate::text::counted;

/// Export the data of a user as JSON lines.
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// User id of the tickets.
    #[arg(long)]
    user: String,
    /// Output file; standard output by default.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl ExportArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let lines = client.lines("/export", &[("user", self.user.clone())]).await?;
        match &self.output {
            None => session::each(lines, |line, _| output::exact(line)).await,
            Some(file) => session::save(lines, file, self.connection.style()).await,
        }
    }
}

/// Erase the data of a user.
#[derive(Debug, clap::Args)]
pub(crate) struct EraseArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// User id of the tickets.
    #[arg(long)]
    user: String,
    #[command(flatten)]
    confirm: ConfirmArgs,
}

impl EraseArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let user = &self.user;
        self.confirm.ask(&format!(
            "Erase all tickets of user `{user}`, with everything that belongs to them?"
        ))?;
        let progress = progress::start("erased", None);
        let (mut tickets, mut sessions, mut busy) = (0, 0, 0);
        let mut cursor = None;
        loop {
            let request = json!({"user": self.user, "cursor": cursor});
            let answer = client.post_long("/erase", request).await?;
            let count = |name: &str| answer[name].as_u64().unwrap_or(0);
            tickets += count("tickets");
            progress.set_position(tickets);
            sessions += count("sessions");
            busy += count("busy");
            cursor = answer["next_cursor"].as_i64();
            if cursor.is_none() {
                break;
            }
        }
        drop(progress);
        let erased = json!({"tickets": tickets, "sessions": sessions, "busy": busy});
        let tickets = counted(tickets, "ticket", "tickets");
        let sessions = counted(sessions, "session", "sessions");
        let sentence = format!("erased {tickets} and {sessions} of user `{}`", self.user);
        output::changed(self.connection.style(), &erased, sentence)?;
        match busy {
            0 => Ok(()),
            _ => Err(CliError::new("some tickets are in use; run the command again")),
        }
    }
}
