//! `headwater ticket`: open, list, show, reply to, close and reopen tickets.

use clap::Subcommand;
use serde_json::json;
use uuid::Uuid;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows};
use crate::exit::CliError;

/// Manage tickets.
#[derive(Debug, clap::Args)]
pub(crate) struct TicketArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: TicketCommand,
}

#[derive(Debug, Subcommand)]
enum TicketCommand {
    /// Open a ticket.
    New {
        #[arg(long)]
        title: String,
        /// First message; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// User id.
        #[arg(long)]
        user: Option<String>,
        /// Idempotency id: repeat it with every retry, and the ticket is opened once.
        #[arg(long, value_name = "UUID")]
        message_id: Option<Uuid>,
    },
    /// List tickets, newest first.
    List {
        #[arg(long, value_parser = ["open", "closed"])]
        status: Option<String>,
        /// Only those of this user.
        #[arg(long)]
        user: Option<String>,
        /// Maximum number of tickets.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Show a ticket with its messages.
    Show {
        /// Ticket id; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
        /// Maximum number of messages.
        #[arg(long, default_value_t = 1000)]
        messages: usize,
    },
    /// Add a message to a ticket.
    Reply {
        /// Ticket id; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
        /// Message text; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// Author. An agent's message goes to the user, and the model does not reply.
        #[arg(long, value_parser = ["user", "agent"], default_value = "agent")]
        author: String,
        /// Idempotency id: repeat it with every retry, and the message is added once.
        #[arg(long, value_name = "UUID")]
        message_id: Option<Uuid>,
    },
    /// Close a ticket.
    Close {
        /// Ticket id; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
    },
    /// Reopen a closed ticket, or return one that a person took over to the desk.
    Reopen {
        /// Ticket id; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
    },
}

impl TicketArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        match self.command {
            TicketCommand::List { .. } | TicketCommand::Show { .. } => Requirements::database(true),
            TicketCommand::New { .. }
            | TicketCommand::Reply { .. }
            | TicketCommand::Close { .. }
            | TicketCommand::Reopen { .. } => Requirements::everything(false),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let json = self.connection.json;
        match &self.command {
            TicketCommand::New { title, content, user, message_id } => {
                let request = json!({
                    "title": title, "content": content_or_stdin(content)?, "user_id": user, "message_id": message_id,
                });
                output::object(json, &client.post("/tickets", request).await?)
            }
            TicketCommand::List { status, user, limit } => {
                let mut query = Vec::new();
                query.extend(status.clone().map(|status| ("status", status)));
                query.extend(user.clone().map(|user| ("user_id", user)));
                let columns = &[
                    ("TICKET", "/ticket_id"),
                    ("STATUS", "/status"),
                    ("HANDED OVER", "/handed_over"),
                    ("USER", "/user_id"),
                    ("UPDATED", "/updated_at"),
                    ("TITLE", "/title"),
                ];
                client
                    .show_pages(
                        OutputRows::new(json, columns),
                        "/tickets",
                        &query,
                        "tickets",
                        *limit,
                    )
                    .await
            }
            TicketCommand::Show { id, messages } => {
                let mut ticket = client.get(&path(*id), &[]).await?;
                let of = format!("{}/messages", path(*id));
                let messages = client.all_pages(&of, "messages", *messages).await?;
                if let Some(fields) = ticket.as_object_mut() {
                    fields.remove("next_cursor");
                }
                ticket["messages"] = messages;
                output::object(json, &ticket)
            }
            TicketCommand::Reply { id, content, author, message_id } => {
                let request = json!({"content": content_or_stdin(content)?, "author": author, "message_id": message_id});
                let answer = client.post(&format!("{}/messages", path(*id)), request).await?;
                output::object(json, &answer)
            }
            TicketCommand::Close { id } => {
                let answer = client.post(&format!("{}/close", path(*id)), json!({})).await?;
                output::object(json, &answer)
            }
            TicketCommand::Reopen { id } => {
                let answer = client.post(&format!("{}/reopen", path(*id)), json!({})).await?;
                output::object(json, &answer)
            }
        }
    }
}

/// The text, or standard input for `-`.
fn content_or_stdin(content: &str) -> Result<String, CliError> {
    if content != "-" {
        return Ok(content.to_owned());
    }
    std::io::read_to_string(std::io::stdin().lock())
        .map_err(|error| CliError::new(format!("cannot read standard input: {error}")))
}

fn ticket_id(text: &str) -> Result<Uuid, String> {
    text.parse().map_err(|_| "expected a UUID; `headwater ticket list` shows the ids".to_owned())
}

fn path(id: Uuid) -> String {
    format!("/tickets/{id}")
}
