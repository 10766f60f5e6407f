//! `headwater ticket`: open, list, show, follow, reply to, close and reopen tickets, and decide who answers those that are handed over.

use clap::Subcommand;
use futures_util::StreamExt;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows, OutputStyle};
use crate::cli::units::{at_least_one, limit, uuid};
use crate::cli::verbs::issue::show_why;
use crate::exit::CliError;
use crate::text::printable;

/// Minimum digits of a ticket id that is given by its beginning.
const PREFIX_MIN: usize = 4;

/// Columns of a list.
const COLUMNS: &[(&str, &str)] = &[
    ("TICKET", "/ticket_id"),
    ("STATUS", "/status"),
    ("HANDED OVER", "/handed_over"),
    ("USER", "/user_id"),
    ("UPDATED", "/updated_at"),
    ("TITLE", "/title"),
];

/// Columns of a list of tickets that are handed over.
const QUEUE_COLUMNS: &[(&str, &str)] = &[
    ("TICKET", "/ticket_id"),
    ("STATUS", "/status"),
    ("SINCE", "/handed_over_at"),
    ("ASSIGNEE", "/assignee"),
    ("REASON", "/hand_over_reason"),
    ("TITLE", "/title"),
];

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
        /// Subject.
        #[arg(long)]
        title: String,
        /// First message; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// User id.
        #[arg(long)]
        user: Option<String>,
        /// Idempotency id: repeat it with every retry, and the ticket is opened once.
        #[arg(long, value_name = "UUID", value_parser = uuid)]
        message_id: Option<Uuid>,
    },
    /// List tickets, newest first.
    List {
        /// Only those with this status.
        #[arg(long, value_parser = ["open", "closed"])]
        status: Option<String>,
        /// Only those of this user.
        #[arg(long)]
        user: Option<String>,
        /// Only those that are handed over to a person; open ones, unless --status says otherwise.
        #[arg(long)]
        handed_over: bool,
        /// Only those that are assigned to this person.
        #[arg(long, value_name = "NAME", conflicts_with = "unassigned")]
        assignee: Option<String>,
        /// Only those that are handed over and assigned to nobody; open ones, unless --status says otherwise.
        #[arg(long)]
        unassigned: bool,
        /// Only those with one of these words in the title or a message; words of less than 3 letters are ignored.
        #[arg(long, value_name = "TEXT")]
        words: Option<String>,
        /// The oldest one first.
        #[arg(long)]
        oldest_first: bool,
        /// Maximum number of tickets.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a ticket as a conversation, and why it has no answer yet.
    Show {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: String,
        /// Maximum number of messages.
        #[arg(long, value_name = "N", default_value = "1000", value_parser = limit)]
        messages: usize,
    },
    /// Follow a ticket: its messages, its status, and the answer while the model writes it.
    Follow {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: String,
        /// Exit after this many messages.
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        count: Option<u64>,
    },
    /// Explain why a ticket has no answer, step by step, and name the command that helps.
    Why {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: String,
    },
    /// Add a message to a ticket.
    Reply {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: String,
        /// Message text; `-` reads standard input.
        #[arg(long, allow_hyphen_values = true)]
        content: String,
        /// Author. An agent's message goes to the user, and the model does not reply.
        #[arg(long, value_parser = ["user", "agent"], default_value = "agent")]
        author: String,
        /// Name of the agent, as the model sees it.
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// Idempotency id: repeat it with every retry, and the message is added once.
        #[arg(long, value_name = "UUID", value_parser = uuid)]
        message_id: Option<Uuid>,
    },
    /// Close a ticket.
    Close {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: String,
    },
    /// Take a ticket that is handed over, under the name of your token.
    Take {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list --handed-over`.
        #[arg(value_parser = ticket_id)]
        id: String,
    },
    /// Assign a ticket that is handed over to a person, or to nobody.
    Assign {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list --handed-over`.
        #[arg(value_parser = ticket_id)]
        id: String,
        /// Name of the person.
        #[arg(long, value_name = "NAME", required_unless_present = "nobody")]
        to: Option<String>,
        /// Remove the assignee.
        #[arg(long, conflicts_with = "to")]
        nobody: bool,
    },
    /// Reopen a closed ticket, or return one that a person took over to the desk.
    Reopen {
        /// Ticket id, or its beginning if no other ticket has the same; see `headwater ticket list`.
        #[arg(value_parser = ticket_id)]
        id: String,
    },
}

impl TicketArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        match self.command {
            TicketCommand::List { .. } | TicketCommand::Show { .. } | TicketCommand::Why { .. } => {
                Requirements::database(true)
            }
            TicketCommand::Follow { .. } => Requirements::everything(true),
            TicketCommand::Take { .. } | TicketCommand::Assign { .. } => {
                Requirements::database(false)
            }
            TicketCommand::New { .. }
            | TicketCommand::Reply { .. }
            | TicketCommand::Close { .. }
            | TicketCommand::Reopen { .. } => Requirements::database_and_nudges(),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            TicketCommand::New { title, content, user, message_id } => {
                let request = json!({
                    "title": title, "content": content_or_stdin(content)?, "user_id": user, "message_id": message_id,
                });
                let answer = client.post("/tickets", request).await?;
                let id = answer["ticket_id"].as_str().unwrap_or_default();
                let sentence = match answer["duplicate"].as_bool() {
                    Some(true) => format!("ticket {id} was opened before"),
                    _ => format!("opened ticket {id} (issue {})", answer["issue_id"]),
                };
                output::changed(style, &answer, sentence)
            }
            TicketCommand::List {
                status,
                user,
                handed_over,
                assignee,
                unassigned,
                words,
                oldest_first,
                limit,
            } => {
                let mut query = Vec::new();
                query.extend(oldest_first.then(|| ("oldest_first", "true".to_owned())));
                let is_queue = *handed_over || *unassigned;
                let status = status.clone().or_else(|| is_queue.then(|| "open".to_owned()));
                query.extend(handed_over.then(|| ("handed_over", "true".to_owned())));
                query.extend(unassigned.then(|| ("unassigned", "true".to_owned())));
                query.extend(assignee.clone().map(|name| ("assignee", name)));
                query.extend(status.clone().map(|status| ("status", status)));
                query.extend(user.clone().map(|user| ("user_id", user)));
                query.extend(words.clone().map(|words| ("words", words)));
                let rows = match is_queue || assignee.is_some() {
                    true => OutputRows::new(style, QUEUE_COLUMNS),
                    false => OutputRows::new(style, COLUMNS),
                };
                client.show_pages(rows, "/tickets", &query, "tickets", *limit).await
            }
            TicketCommand::Show { id, messages } => {
                let path = path(client, id).await?;
                let mut ticket = client.get(&path, &[]).await?;
                let of = format!("{path}/messages");
                let messages = client.all_pages(&of, &[], "messages", *messages).await?;
                if let Some(fields) = ticket.as_object_mut() {
                    fields.remove("next_cursor");
                }
                ticket["messages"] = messages;
                if style.json {
                    return output::object(style, &ticket);
                }
                let waits = ticket["status"] == "open"
                    && ticket["handed_over"] == false
                    && last_author(&ticket) == Some("user");
                let why = match waits {
                    true => client.get(&format!("{path}/why"), &[]).await?,
                    false => Value::Null,
                };
                conversation(style, &ticket, &why)
            }
            TicketCommand::Follow { id, count } => follow(client, style, id, *count).await,
            TicketCommand::Why { id } => {
                let path = path(client, id).await?;
                show_why(style, &client.get(&format!("{path}/why"), &[]).await?)
            }
            TicketCommand::Reply { id, content, author, agent, message_id } => {
                let path = path(client, id).await?;
                let request = json!({"content": content_or_stdin(content)?, "author": author, "agent": agent, "message_id": message_id});
                let answer = client.post(&format!("{path}/messages"), request).await?;
                let id = answer["ticket_id"].as_str().unwrap_or_default();
                let sentence = match answer["duplicate"].as_bool() {
                    Some(true) => format!("the message was added to ticket {id} before"),
                    _ => format!("added a message of the {author} to ticket {id}"),
                };
                output::changed(style, &answer, sentence)
            }
            TicketCommand::Take { id } => {
                let path = path(client, id).await?;
                let answer = client.post(&format!("{path}/take"), json!({})).await?;
                output::changed(style, &answer, assigned(&answer))
            }
            TicketCommand::Assign { id, to, .. } => {
                let path = path(client, id).await?;
                let answer = match to {
                    Some(name) => {
                        client.post(&format!("{path}/assign"), json!({"assignee": name})).await?
                    }
                    None => client.post(&format!("{path}/unassign"), json!({})).await?,
                };
                output::changed(style, &answer, assigned(&answer))
            }
            TicketCommand::Close { id } => self.change(client, id, "close").await,
            TicketCommand::Reopen { id } => self.change(client, id, "reopen").await,
        }
    }

    async fn change(&self, client: &ApiClient, id: &str, change: &str) -> Result<(), CliError> {
        let path = path(client, id).await?;
        let answer = client.post(&format!("{path}/{change}"), json!({})).await?;
        let id = answer["ticket_id"].as_str().unwrap_or_default();
        let status = answer["status"].as_str().unwrap_or_default();
        let sentence = match (answer["changed"].as_bool(), change) {
            (Some(true), "close") => format!("closed ticket {id}"),
            (Some(true), _) => format!("reopened ticket {id}"),
            _ => format!("ticket {id} is already {status}"),
        };
        output::changed(self.connection.style(), &answer, sentence)
    }
}

/// Prints the events of a ticket. A provisional text is printed when it has grown by a line; the message follows as a whole.
async fn follow(
    client: &ApiClient,
    style: OutputStyle,
    id: &str,
    count: Option<u64>,
) -> Result<(), CliError> {
    let path = path(client, id).await?;
    let mut events = client.named_events(&format!("{path}/events"), &[]).await?;
    let (mut left, mut lines_shown) = (count.unwrap_or(u64::MAX), 0);
    while left > 0
        && let Some(event) = events.next().await
    {
        let (name, mut data) = event?;
        left -= u64::from(name == "message");
        if style.json {
            data["event"] = json!(name);
            output::json(style, &data)?;
            continue;
        }
        match name.as_str() {
            "message" => message(style, &data)?,
            "provisional" => {
                let content = data["content"].as_str().unwrap_or_default();
                let lines: Vec<&str> = content.lines().collect();
                if lines_shown == 0 {
                    output::exact("\nassistant writes:")?;
                }
                // The last line may not be complete; the first one shows that there is an answer.
                let until = lines.len().saturating_sub(1).max(1);
                for line in lines.iter().take(until).skip(lines_shown) {
                    output::print_wrapped(style, "  ~ ", line)?;
                }
                lines_shown = until.max(lines_shown);
            }
            "withdrawn" => {
                lines_shown = 0;
                if data["reason"] != "replaced" {
                    output::exact("(withdrawn)")?;
                }
            }
            _ => {
                let status = output::plain(data["status"].as_str().unwrap_or_default());
                let person = if data["handed_over"] == true { ", handed over" } else { "" };
                output::exact(&format!("\nstatus: {status}{person}"))?;
            }
        }
    }
    if count.is_none() || left == 0 {
        return Ok(());
    }
    Err(CliError::Unreachable("the server closed the stream".to_owned()))
}

fn last_author(ticket: &Value) -> Option<&str> {
    ticket["messages"].as_array()?.last()?["author"].as_str()
}

/// Prints a ticket as a conversation: who said what, and when; then its state.
fn conversation(style: OutputStyle, ticket: &Value, why: &Value) -> Result<(), CliError> {
    let word = |name: &str| output::plain(ticket[name].as_str().unwrap_or_default());
    output::exact(&output::heading(&word("title")))?;
    let user = ticket["user_id"].as_str().map(|user| format!(", user {}", output::plain(user)));
    let about = format!(
        "ticket {}, issue {}{}, opened {}",
        word("ticket_id"),
        ticket["issue_id"],
        user.unwrap_or_default(),
        moment(ticket["created_at"].as_str()),
    );
    output::print_wrapped(style, "", &about)?;
    if ticket["usage"]["runs"].as_i64() > Some(0) {
        output::print_wrapped(style, "", &usage(&ticket["usage"]))?;
    }
    for one in ticket["messages"].as_array().into_iter().flatten() {
        message(style, one)?;
    }
    output::exact("")?;
    match (word("status").as_str(), &ticket["handed_over"]) {
        ("closed", _) => {
            output::exact(&format!("closed {}", moment(ticket["updated_at"].as_str())))
        }
        (_, Value::Bool(true)) => output::print_wrapped(
            style,
            "",
            &format!(
                "handed over to a person ({}) since {}, assigned to {}: the model does not answer until `headwater ticket reopen {}`",
                ticket["hand_over_reason"].as_str().unwrap_or("reason unknown"),
                moment(ticket["handed_over_at"].as_str()),
                ticket["assignee"].as_str().unwrap_or("nobody"),
                word("ticket_id")
            ),
        ),
        _ if why.is_null() => output::exact("open; answered"),
        _ => {
            let sentence = why["sentence"].as_str().unwrap_or_default();
            output::print_wrapped(style, "", &format!("open; no answer yet: {sentence}"))
        }
    }
}

/// What the models used for a ticket.
fn usage(usage: &Value) -> String {
    let count = |name: &str| usage[name].as_u64().unwrap_or_default();
    let runs = crate::text::counted(count("runs"), "run", "runs");
    let unanswered = match count("unanswered") {
        0 => String::new(),
        some => format!(" ({some} without an answer)"),
    };
    let cost = usage["cost"].as_f64().map_or(String::new(), |cost| format!(", cost {cost}"));
    let (tokens_in, tokens_out) = (count("tokens_in"), count("tokens_out"));
    format!("model: {runs}{unanswered}, {tokens_in} tokens in, {tokens_out} out{cost}")
}

/// Prints a message: who said what, and when.
fn message(style: OutputStyle, message: &Value) -> Result<(), CliError> {
    let mut author = output::plain(message["author"].as_str().unwrap_or_default());
    if let Some(agent) = message["agent"].as_str() {
        author = format!("{author} {}", output::plain(agent));
    }
    let at = moment(message["created_at"].as_str());
    output::exact(&format!("\n{}  {at}", output::heading(&author)))?;
    let content = message["content"].as_str().unwrap_or_default();
    output::print_wrapped(style, "  ", content)
}

/// What an assignment did.
fn assigned(answer: &Value) -> String {
    let id = answer["ticket_id"].as_str().unwrap_or_default();
    let to = answer["assignee"].as_str().unwrap_or("nobody");
    match answer["changed"].as_bool() {
        Some(false) => format!("ticket {id} was assigned to {to} before; nothing was changed"),
        _ => format!("assigned ticket {id} to {to}"),
    }
}

/// A time to the second, in UTC.
fn moment(at: Option<&str>) -> String {
    let at = printable(at.unwrap_or_default());
    let seconds = at.split_once('.').map_or(at.as_str(), |(seconds, _)| seconds);
    format!("{} UTC", seconds.replacen('T', " ", 1))
}

/// The text, or standard input for `-`.
pub(super) fn content_or_stdin(content: &str) -> Result<String, CliError> {
    if content != "-" {
        return Ok(content.to_owned());
    }
    std::io::read_to_string(std::io::stdin().lock())
        .map_err(|error| CliError::new(format!("cannot read standard input: {error}")))
}

/// Checks that a text is a ticket id or its beginning.
fn ticket_id(text: &str) -> Result<String, String> {
    let digits = text.chars().filter(|c| *c != '-').count();
    let is_hex = text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    if text.parse::<Uuid>().is_ok() || is_hex && (PREFIX_MIN..32).contains(&digits) {
        return Ok(text.to_lowercase());
    }
    Err(format!(
        "expected a UUID or at least its first {PREFIX_MIN} digits; `headwater ticket list` shows the ids"
    ))
}

/// The path of a ticket. Completes the beginning of an id.
async fn path(client: &ApiClient, id: &str) -> Result<String, CliError> {
    if let Ok(id) = id.parse::<Uuid>() {
        return Ok(format!("/tickets/{id}"));
    }
    let query = [("id_prefix", id.to_owned()), ("limit", "2".to_owned())];
    let found = client.get("/tickets", &query).await?;
    let ids = found["tickets"].as_array().into_iter().flatten();
    let ids: Vec<&str> = ids.filter_map(|ticket| ticket["ticket_id"].as_str()).collect();
    match ids[..] {
        [] => Err(CliError::NotFound(format!("no ticket id begins with `{id}`"))),
        [one] => Ok(format!("/tickets/{one}")),
        _ => Err(CliError::usage(format!(
            "several ticket ids begin with `{id}`; give more digits, see `headwater ticket list`"
        ))),
    }
}
