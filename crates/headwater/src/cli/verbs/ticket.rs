//! `headwater ticket`: new, list, show, reply, close, reopen.

use clap::Subcommand;
use serde_json::json;
use uuid::Uuid;

use crate::cli::Reach;
use crate::cli::api_client::Client;
use crate::cli::in_process::Needs;
use crate::cli::output::{self, Rows};
use crate::exit::Failure;

/// Tickets.
#[derive(Debug, clap::Args)]
pub(crate) struct Ticket {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Open a ticket.
    New {
        #[arg(long)]
        title: String,
        /// Its first message; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// Whose it is.
        #[arg(long)]
        user: Option<String>,
        /// The same at every try: a ticket is opened once.
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
        /// At most this many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Show a ticket with its messages.
    Show {
        /// The ticket; `headwater ticket list` shows the ids.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
        /// Messages, at most.
        #[arg(long, default_value_t = 1000)]
        messages: usize,
    },
    /// Add a message to a ticket.
    Reply {
        /// The ticket; `headwater ticket list` shows the ids.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
        /// What it says; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// Who says it: what an agent says goes to the user, and the model keeps quiet.
        #[arg(long, value_parser = ["user", "agent"], default_value = "agent")]
        author: String,
        /// The same at every try: a message is added once.
        #[arg(long, value_name = "UUID")]
        message_id: Option<Uuid>,
    },
    /// Close a ticket.
    Close {
        /// The ticket; `headwater ticket list` shows the ids.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
    },
    /// Open a closed ticket again, and give one that a person took over back to the desk.
    Reopen {
        /// The ticket; `headwater ticket list` shows the ids.
        #[arg(value_parser = ticket_id)]
        id: Uuid,
    },
}

impl Ticket {
    pub(in crate::cli) fn needs(&self) -> Needs {
        match self.what {
            What::List { .. } | What::Show { .. } => Needs::database(true),
            What::New { .. } | What::Reply { .. } | What::Close { .. } | What::Reopen { .. } => {
                Needs::everything(false)
            }
        }
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::New { title, content, user, message_id } => {
                let wish = json!({
                    "title": title, "content": given(content)?, "user_id": user, "message_id": message_id,
                });
                output::object(json, &client.post("/tickets", wish).await?)
            }
            What::List { status, user, limit } => {
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
                    .show_pages(Rows::new(json, columns), "/tickets", &query, "tickets", *limit)
                    .await
            }
            What::Show { id, messages } => {
                let mut ticket = client.get(&path(*id), &[]).await?;
                let of = format!("{}/messages", path(*id));
                let messages = client.all(&of, "messages", *messages).await?;
                if let Some(fields) = ticket.as_object_mut() {
                    fields.remove("next_cursor");
                }
                ticket["messages"] = messages;
                output::object(json, &ticket)
            }
            What::Reply { id, content, author, message_id } => {
                let wish =
                    json!({"content": given(content)?, "author": author, "message_id": message_id});
                let answer = client.post(&format!("{}/messages", path(*id)), wish).await?;
                output::object(json, &answer)
            }
            What::Close { id } => {
                let answer = client.post(&format!("{}/close", path(*id)), json!({})).await?;
                output::object(json, &answer)
            }
            What::Reopen { id } => {
                let answer = client.post(&format!("{}/reopen", path(*id)), json!({})).await?;
                output::object(json, &answer)
            }
        }
    }
}

/// A text, or what stands on standard input.
fn given(content: &str) -> Result<String, Failure> {
    if content != "-" {
        return Ok(content.to_owned());
    }
    std::io::read_to_string(std::io::stdin().lock())
        .map_err(|error| Failure::new(format!("standard input cannot be read: {error}")))
}

fn ticket_id(text: &str) -> Result<Uuid, String> {
    text.parse().map_err(|_| "a ticket id is a UUID; `headwater ticket list` shows them".to_owned())
}

fn path(id: Uuid) -> String {
    format!("/tickets/{id}")
}
