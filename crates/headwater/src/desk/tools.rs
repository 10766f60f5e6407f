//! The tools that a model may call, and all it can do.
//!
//! Upstream: `handler` carries out what a model asks for. Downstream: the ticket store, by way of [`TicketSearch`], and the
//! resolution of the run: closing and handing over happen when the run is committed, or not at all.
//! Promises: arguments are checked; a tool that does not exist or is called wrongly is an answer to the model, no failure.

use async_trait::async_trait;
use headwater_issue::Issue;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::desk::model::{ToolCall, ToolSpec};
use crate::desk::prompt::escaped_json;
use crate::limits::{SEARCH_RESULTS_MAX, TOOL_TEXT_BYTES_MAX};
use crate::text;

/// Looks for earlier tickets.
pub const SEARCH_TICKETS: &str = "search_tickets";
/// Closes the ticket.
pub const CLOSE_TICKET: &str = "close_ticket";
/// Gives the issue to a person.
pub const HAND_OVER: &str = "hand_over";

/// Which tickets a search may show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SearchScope {
    /// Those of the same user; none if the user is not known. What one user wrote is not for another.
    #[default]
    OwnTickets,
    /// All of them: for a desk whose users may see each other's tickets.
    AllTickets,
}

/// A search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchQuery {
    /// Words, in the model's choice.
    pub words: String,
    /// Only tickets of this user; `None`: all of them.
    pub user_id: Option<String>,
    /// Not this ticket: the one that the run is about.
    pub except: String,
}

/// A ticket that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundTicket {
    /// Which.
    pub ticket_id: String,
    /// Its title.
    pub title: String,
    /// `open` or `closed`.
    pub status: String,
    /// The beginning of the last answer in it.
    pub answer: Option<String>,
}

/// Finds past tickets.
#[async_trait]
pub trait TicketSearch: Send + Sync + std::fmt::Debug {
    /// The best at most [`SEARCH_RESULTS_MAX`] tickets, newest first.
    async fn search(&self, query: &SearchQuery) -> Result<Vec<FoundTicket>, String>;
}

/// For a desk without tickets: finds nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoTickets;

#[async_trait]
impl TicketSearch for NoTickets {
    async fn search(&self, _query: &SearchQuery) -> Result<Vec<FoundTicket>, String> {
        Ok(Vec::new())
    }
}

/// What a run does besides answering, when it is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Closes the ticket.
    Close {
        /// Why, in the model's words.
        reason: String,
    },
    /// Gives the issue to a person.
    HandOver {
        /// Why, in the model's words.
        reason: String,
    },
}

/// What a call came to.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOutcome {
    /// What the model is told: JSON, escaped.
    pub told: String,
    /// Whether it worked.
    pub success: bool,
    /// What it was called with, as far as it could be read.
    pub arguments: Json,
    /// What it does.
    pub effect: Option<Effect>,
}

/// The tools for an issue: only tickets of the desk can be searched and closed.
pub fn specs(issue: &Issue) -> Vec<ToolSpec> {
    let text = |name: &str, description: &str| {
        json!({"type": "object", "additionalProperties": false, "required": [name],
            "properties": {name: {"type": "string", "maxLength": TOOL_TEXT_BYTES_MAX, "description": description}}})
    };
    let mut specs = Vec::new();
    if issue.provider == "desk" {
        specs.push(ToolSpec {
            name: SEARCH_TICKETS,
            description: "Finds earlier tickets by words, with the last answer in each.",
            parameters: text("query", "a few words to look for"),
        });
        specs.push(ToolSpec {
            name: CLOSE_TICKET,
            description: "Closes this ticket after your reply. Only if the user says that the matter is settled.",
            parameters: text("reason", "why it can be closed"),
        });
    }
    specs.push(ToolSpec {
        name: HAND_OVER,
        description: "Hands this issue over to a person, who answers from now on.",
        parameters: text("reason", "what the person should know"),
    });
    specs
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueryArguments {
    query: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReasonArguments {
    reason: String,
}

/// Carries out a call. `user_id` is whose tickets a search may show, see [`SearchScope`].
pub async fn call(
    call: &ToolCall,
    allowed: &[ToolSpec],
    issue: &Issue,
    search: &dyn TicketSearch,
    scope: SearchScope,
    user_id: Option<&str>,
) -> ToolOutcome {
    if !allowed.iter().any(|tool| tool.name == call.name) {
        return refused(call, "there is no such tool here");
    }
    let short = |text: &str| text::cut(&text::cleaned(text), TOOL_TEXT_BYTES_MAX).to_owned();
    match call.name.as_str() {
        SEARCH_TICKETS => match serde_json::from_str::<QueryArguments>(&call.arguments) {
            Ok(QueryArguments { query }) => {
                let words = short(&query);
                find(call, issue, search, words, scope, user_id).await
            }
            Err(error) => refused(call, &error.to_string()),
        },
        CLOSE_TICKET => match serde_json::from_str::<ReasonArguments>(&call.arguments) {
            Ok(ReasonArguments { reason }) => {
                let effect = Effect::Close { reason: short(&reason) };
                accepted(call, "the ticket is closed with your reply", effect)
            }
            Err(error) => refused(call, &error.to_string()),
        },
        HAND_OVER => match serde_json::from_str::<ReasonArguments>(&call.arguments) {
            Ok(ReasonArguments { reason }) => {
                let effect = Effect::HandOver { reason: short(&reason) };
                accepted(call, "a person takes over after your reply; say so", effect)
            }
            Err(error) => refused(call, &error.to_string()),
        },
        _ => refused(call, "there is no such tool here"),
    }
}

async fn find(
    call: &ToolCall,
    issue: &Issue,
    search: &dyn TicketSearch,
    words: String,
    scope: SearchScope,
    user_id: Option<&str>,
) -> ToolOutcome {
    let user_id = match (scope, user_id) {
        (SearchScope::AllTickets, _) => None,
        (SearchScope::OwnTickets, Some(user)) => Some(user.to_owned()),
        (SearchScope::OwnTickets, None) => {
            return told(
                call,
                &json!({"tickets": [], "note": "the user is not known"}),
                true,
                None,
            );
        }
    };
    let query = SearchQuery { words, user_id, except: issue.external_issue_id.clone() };
    match search.search(&query).await {
        Ok(mut found) => {
            found.truncate(SEARCH_RESULTS_MAX);
            told(call, &json!({"tickets": found}), true, None)
        }
        Err(error) => {
            tracing::warn!(issue_id = %issue.id, %error, "tickets were not searched");
            refused(call, "the search does not work now")
        }
    }
}

fn accepted(call: &ToolCall, note: &str, effect: Effect) -> ToolOutcome {
    told(call, &json!({"ok": true, "note": note}), true, Some(effect))
}

fn refused(call: &ToolCall, problem: &str) -> ToolOutcome {
    told(call, &json!({"ok": false, "error": text::cut(problem, 300)}), false, None)
}

fn told(call: &ToolCall, value: &Json, success: bool, effect: Option<Effect>) -> ToolOutcome {
    let arguments = serde_json::from_str(&call.arguments).unwrap_or(Json::Null);
    ToolOutcome { told: escaped_json(value), success, arguments, effect }
}
