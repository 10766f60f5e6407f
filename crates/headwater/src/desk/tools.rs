//! The tools that a model may call. They bound what a model can do.
//!
//! Upstream: `handler` runs the calls of a model. Downstream: the ticket store through [`TicketSearch`], and the
//! resolution of the run: closing and handing over happen when the run is committed, or not at all.
//! Guarantees: arguments are validated; an unknown tool or an invalid call is reported to the model and does not fail
//! the run.

use async_trait::async_trait;
use headwater_issue::Issue;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::desk::model::{ToolCall, ToolSpec};
use crate::desk::prompt::escaped_json;
use crate::limits::{SEARCH_RESULTS_MAX, TOOL_TEXT_BYTES_MAX};
use crate::text;

/// Name of the tool that searches earlier tickets.
pub const SEARCH_TICKETS: &str = "search_tickets";
/// Closes the ticket.
pub const CLOSE_TICKET: &str = "close_ticket";
/// Hands the issue over to a person.
pub const HAND_OVER: &str = "hand_over";

/// Names of the built-in tools.
pub const BUILT_IN: [&str; 3] = [SEARCH_TICKETS, CLOSE_TICKET, HAND_OVER];

/// Which tickets a search may return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SearchScope {
    /// Tickets of the same user; none if the user is unknown.
    #[default]
    OwnTickets,
    /// All tickets, for a desk whose users may see each other's tickets.
    AllTickets,
}

/// Parameters of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchQuery {
    /// Words to search for, chosen by the model.
    pub words: String,
    /// Only tickets of this user; `None`: of all users.
    pub user_id: Option<String>,
    /// Excludes this ticket: the one of the run.
    pub except: String,
}

/// A ticket that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundTicket {
    /// Id of the ticket.
    pub ticket_id: String,
    /// Its title.
    pub title: String,
    /// `open` or `closed`.
    pub status: String,
    /// The beginning of its last answer.
    pub answer: Option<String>,
}

/// Searches earlier tickets.
#[async_trait]
pub trait TicketSearch: Send + Sync + std::fmt::Debug {
    /// At most [`SEARCH_RESULTS_MAX`] matching tickets, newest first.
    async fn search(&self, query: &SearchQuery) -> Result<Vec<FoundTicket>, String>;
}

/// A search without results, for a desk without tickets.
#[derive(Clone, Copy, Debug)]
pub struct NoTickets;

#[async_trait]
impl TicketSearch for NoTickets {
    async fn search(&self, _query: &SearchQuery) -> Result<Vec<FoundTicket>, String> {
        Ok(Vec::new())
    }
}

/// What a run does besides answering. Applied when the run is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolEffect {
    /// Closes the ticket.
    Close {
        /// Why, in the model's words.
        reason: String,
    },
    /// Hands the issue over to a person.
    HandOver {
        /// Why, in the model's words.
        reason: String,
    },
}

/// Result of a tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOutcome {
    /// Result for the model: escaped JSON.
    pub content: String,
    /// Whether the call succeeded.
    pub success: bool,
    /// The parsed arguments; null if they are not JSON.
    pub arguments: Json,
    /// What the run does when it is committed.
    pub effect: Option<ToolEffect>,
}

/// The tools for an issue. Only tickets of the desk can be searched and closed.
pub fn specs(issue: &Issue) -> Vec<ToolSpec> {
    let text = |name: &str, description: &str| {
        json!({"type": "object", "additionalProperties": false, "required": [name],
            "properties": {name: {"type": "string", "maxLength": TOOL_TEXT_BYTES_MAX, "description": description}}})
    };
    let mut specs = Vec::new();
    if issue.provider == "desk" {
        specs.push(ToolSpec {
            name: SEARCH_TICKETS.to_owned(),
            description: "Finds earlier tickets by words, with the last answer in each.".to_owned(),
            parameters: text("query", "a few words to look for"),
        });
        specs.push(ToolSpec {
            name: CLOSE_TICKET.to_owned(),
            description: "Closes this ticket after your reply. Only if the user says that the matter is settled."
                .to_owned(),
            parameters: text("reason", "why it can be closed"),
        });
    }
    specs.push(ToolSpec {
        name: HAND_OVER.to_owned(),
        description: "Hands this issue over to a person, who answers from now on.".to_owned(),
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

/// Runs a tool call. `user_id` limits a search, see [`SearchScope`].
pub async fn call(
    call: &ToolCall,
    allowed: &[ToolSpec],
    issue: &Issue,
    search: &dyn TicketSearch,
    scope: SearchScope,
    user_id: Option<&str>,
) -> ToolOutcome {
    if !allowed.iter().any(|tool| tool.name == call.name) {
        return rejected(call, "there is no such tool");
    }
    let short = |text: &str| text::cut(&text::cleaned(text), TOOL_TEXT_BYTES_MAX).to_owned();
    match call.name.as_str() {
        SEARCH_TICKETS => match serde_json::from_str::<QueryArguments>(&call.arguments) {
            Ok(QueryArguments { query }) => {
                let words = short(&query);
                run_search(call, issue, search, words, scope, user_id).await
            }
            Err(error) => rejected(call, &error.to_string()),
        },
        CLOSE_TICKET => match serde_json::from_str::<ReasonArguments>(&call.arguments) {
            Ok(ReasonArguments { reason }) => {
                let effect = ToolEffect::Close { reason: short(&reason) };
                accepted(call, "the ticket is closed with your reply", effect)
            }
            Err(error) => rejected(call, &error.to_string()),
        },
        HAND_OVER => match serde_json::from_str::<ReasonArguments>(&call.arguments) {
            Ok(ReasonArguments { reason }) => {
                let effect = ToolEffect::HandOver { reason: short(&reason) };
                accepted(call, "a person takes over after your reply; say so", effect)
            }
            Err(error) => rejected(call, &error.to_string()),
        },
        _ => rejected(call, "there is no such tool"),
    }
}

async fn run_search(
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
            return outcome(
                call,
                &json!({"tickets": [], "note": "the user is unknown"}),
                true,
                None,
            );
        }
    };
    let query = SearchQuery { words, user_id, except: issue.external_issue_id.clone() };
    match search.search(&query).await {
        Ok(mut found) => {
            found.truncate(SEARCH_RESULTS_MAX);
            outcome(call, &json!({"tickets": found}), true, None)
        }
        Err(error) => {
            tracing::warn!(issue_id = %issue.id, %error, "ticket search failed");
            rejected(call, "the search is unavailable")
        }
    }
}

fn accepted(call: &ToolCall, note: &str, effect: ToolEffect) -> ToolOutcome {
    outcome(call, &json!({"ok": true, "note": note}), true, Some(effect))
}

pub(super) fn rejected(call: &ToolCall, problem: &str) -> ToolOutcome {
    outcome(call, &json!({"ok": false, "error": text::cut(problem, 300)}), false, None)
}

fn outcome(
    call: &ToolCall,
    value: &Json,
    success: bool,
    effect: Option<ToolEffect>,
) -> ToolOutcome {
    let arguments = serde_json::from_str(&call.arguments).unwrap_or(Json::Null);
    ToolOutcome { content: escaped_json(value), success, arguments, effect }
}
