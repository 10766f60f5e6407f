//! Search over issues, tickets, topics, groups, messages and sessions.
//!
//! Upstream: the console. Guarantees: each source has [`SOURCE_TIMEOUT`] and says how far it looked or why it could not;
//! at most [`RESULTS_MAX`] results.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_issue::IssueId;
use headwater_queue::{Bound, MessageQuery, Queue, QueueError};
use headwater_stream::EntryId;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::Operations;
use crate::desk::tools::{SearchQuery, TicketSearch};
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::http::extract::QueryParams;
use crate::server::app_state::App;
use crate::text;
use crate::tickets::INTEGRATION;

/// Time for each source.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum results, and characters of the words.
const RESULTS_MAX: usize = 100;
const WORDS_CHARS_MAX: usize = 200;

/// Maximum topics in which an entry id is looked up.
const TOPICS_MAX: usize = 50;

/// Bytes of a title or of details.
const TEXT_BYTES_MAX: usize = 200;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(search))
}

/// What to look for.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SearchListQuery {
    /// A number, an id, a name, or words of a ticket; at most 200 characters.
    q: Option<String>,
}

/// What was found.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SearchResponse {
    results: Vec<SearchResult>,
    sources: Vec<SearchSource>,
}

/// One result.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct SearchResult {
    /// `issue`, `ticket`, `topic`, `group` or `message`.
    kind: &'static str,
    id: String,
    /// Topic of a group or message.
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<String>,
    title: String,
    details: String,
}

/// Where was looked.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SearchSource {
    name: &'static str,
    /// How far it looked.
    scope: String,
    /// Why it could not be searched.
    problem: Option<String>,
}

/// Results of a source, and how far it looked.
type SourceResults = Result<(Vec<SearchResult>, String), String>;

/// Find issues, tickets, topics, groups and messages.
#[utoipa::path(get, path = "/search", tag = "console", params(SearchListQuery), responses((status = 200, body = SearchResponse)))]
async fn search(
    State(app): State<App>,
    principal: Principal,
    Extension(operations): Extension<Operations>,
    QueryParams(query): QueryParams<SearchListQuery>,
) -> JsonResult<SearchResponse> {
    let words = query.q.unwrap_or_default();
    let words = words.trim().to_owned();
    if words.is_empty() || words.chars().count() > WORDS_CHARS_MAX {
        let message = format!("`q` must have 1 to {WORDS_CHARS_MAX} characters");
        return Err(ApiError::invalid(message));
    }
    let (for_issues, for_tickets) = (Arc::clone(&app), Arc::clone(&app));
    let (number, sought) = (words.parse::<i64>().ok(), words.clone());
    // On tasks of their own: a query is not dropped half-way.
    let caller = principal.clone();
    let issues = tokio::spawn(async move { find_issue(&for_issues, &caller, number).await });
    let (sees_tickets, sees_topics) =
        (principal.allows(INTEGRATION), principal.integrations.is_none());
    let not_searched = || Ok((Vec::new(), "not visible for this token".to_owned()));
    let tickets = tokio::spawn(async move {
        if sees_tickets { find_tickets(&for_tickets, &sought).await } else { not_searched() }
    });
    let topics = async {
        match sees_topics {
            true => find_in_topics(operations.queue(), &words).await,
            false => Ok((Vec::new(), "not visible for this token".to_owned())),
        }
    };
    let (issues, tickets, topics) = tokio::join!(
        timeout(SOURCE_TIMEOUT, issues),
        timeout(SOURCE_TIMEOUT, tickets),
        timeout(SOURCE_TIMEOUT, topics)
    );
    let failed = |_| Err(ApiError::internal().message().to_owned());
    let topics =
        topics.map(|found| found.map_err(|error| ApiError::from(error).message().to_owned()));
    let found: [(&'static str, Result<SourceResults, _>); 3] = [
        ("Issues", issues.map(|found| found.unwrap_or_else(failed))),
        ("Tickets", tickets.map(|found| found.unwrap_or_else(failed))),
        ("Topics", topics),
    ];
    let (mut results, mut sources) = (Vec::new(), Vec::new());
    for (name, found) in found {
        let late = |_| Err(format!("no answer within {} s", SOURCE_TIMEOUT.as_secs()));
        let (scope, problem) = match found.unwrap_or_else(late) {
            Ok((found, scope)) => {
                results.extend(found);
                (scope, None)
            }
            Err(problem) => (String::new(), Some(problem)),
        };
        sources.push(SearchSource { name, scope, problem });
    }
    results.truncate(RESULTS_MAX);
    Ok(Json(SearchResponse { results, sources }))
}

async fn find_issue(app: &App, caller: &Principal, number: Option<i64>) -> SourceResults {
    let Some(number) = number else {
        return Ok((Vec::new(), "searched by number only".to_owned()));
    };
    let issue = app.store.issue(IssueId(number)).await;
    let issue = issue.map_err(|error| ApiError::from(error).message().to_owned())?;
    let issue = issue.filter(|issue| caller.allows(&issue.integration));
    let results = issue.into_iter().map(|issue| SearchResult {
        kind: "issue",
        id: issue.id.0.to_string(),
        topic: None,
        title: format!("Issue {}", issue.id.0),
        details: short(&format!(
            "{} {}#{}, {}",
            issue.integration,
            issue.external_project_id,
            issue.external_issue_id,
            issue.status.as_str()
        )),
    });
    Ok((results.collect(), format!("looked up number {number}")))
}

async fn find_tickets(app: &App, words: &str) -> SourceResults {
    if let Ok(id) = Uuid::parse_str(words) {
        let ticket = app.tickets.ticket(id).await;
        let ticket = ticket.map_err(|error| ApiError::from(error).message().to_owned())?;
        let results = ticket.into_iter().map(|ticket| SearchResult {
            kind: "ticket",
            id: ticket.ticket_id.to_string(),
            topic: None,
            title: short(&ticket.title),
            details: ticket.status.as_str().to_owned(),
        });
        return Ok((results.collect(), "looked up the id".to_owned()));
    }
    let query = SearchQuery { words: words.to_owned(), user_id: None, except: String::new() };
    let found = app.tickets.search(&query).await.map_err(|error| {
        tracing::warn!(error, "search over tickets failed");
        "database did not answer; try again later".to_owned()
    })?;
    let results = found.into_iter().map(|ticket| SearchResult {
        kind: "ticket",
        id: ticket.ticket_id,
        topic: None,
        title: short(&ticket.title),
        details: short(&format!("{} {}", ticket.status, ticket.answer.unwrap_or_default())),
    });
    Ok((
        results.collect(),
        "title and messages of the newest tickets; words of 3 letters or more".to_owned(),
    ))
}

async fn find_in_topics(
    queue: &Queue,
    words: &str,
) -> Result<(Vec<SearchResult>, String), QueueError> {
    let mut names = queue.topics().list().await?;
    names.sort();
    let lower = words.to_lowercase();
    let mut results: Vec<_> = names
        .iter()
        .filter(|name| name.to_lowercase().contains(&lower))
        .take(RESULTS_MAX)
        .map(|name| SearchResult {
            kind: "topic",
            id: name.clone(),
            topic: None,
            title: short(name),
            details: String::new(),
        })
        .collect();
    let scope = format!("names of {} topics", names.len());
    // `5` is an entry id too, but means a number.
    let Some(entry) = words.parse::<EntryId>().ok().filter(|_| words.contains('-')) else {
        return Ok((results, scope));
    };
    let searched = names.len().min(TOPICS_MAX);
    for topic in names.into_iter().take(TOPICS_MAX) {
        let at = Some(Bound::Id(entry));
        let query = MessageQuery { from: at, to: at, limit: 10, ..MessageQuery::default() };
        let page = match queue.inspect().messages(&topic, &query).await {
            Ok(page) => page,
            // Deleted in the meantime.
            Err(QueueError::NoTopic { .. }) => continue,
            Err(error) => return Err(error),
        };
        results.extend(page.items.into_iter().map(|stored| SearchResult {
            kind: "message",
            id: stored.id.to_string(),
            topic: Some(topic.clone()),
            title: stored.id.to_string(),
            details: short(&format!("topic {topic}, partition {}", stored.partition)),
        }));
    }
    Ok((results, format!("{scope}, and entry {entry} in {searched} of them")))
}

fn short(text: &str) -> String {
    text::cut(text, TEXT_BYTES_MAX).to_owned()
}
