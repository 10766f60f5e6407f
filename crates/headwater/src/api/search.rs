//! Search over issues, events, outbox rows, tickets, sessions, topics, groups and messages.
//!
//! Upstream: the console. Guarantees: each source has [`SOURCE_TIMEOUT`] and says how far it looked or why it could not;
//! at most [`RESULTS_MAX`] results.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::{Extension, Json};
use headwater_issue::{EventLogId, IssueError, IssueId, OutboxId};
use headwater_queue::{Bound, MessageQuery, Queue, QueueError};
use headwater_stream::{Direction, EntryId};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::Operations;
use crate::api::message_filter::MessageFilter;
use crate::api::sessions::{self, parse_session_id};
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

/// Messages of a topic that are looked at, newest first, and the time for all topics.
const MESSAGES_OF_TOPIC: usize = 200;
const MESSAGES_TIME: Duration = Duration::from_millis(1500);

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
    /// `issue`, `event`, `outbox_row`, `ticket`, `session`, `topic`, `group` or `message`.
    kind: &'static str,
    /// Number, id or name; of an event the number of its issue.
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

/// Find issues, events, outbox rows, tickets, sessions, topics, groups and messages.
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
    let issues = tokio::spawn(async move { find_number(&for_issues, &caller, number).await });
    let (for_sessions, of_sessions, named) = (Arc::clone(&app), principal.clone(), words.clone());
    let sessions =
        tokio::spawn(async move { find_session(&for_sessions, &of_sessions, &named).await });
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
    let messages = async {
        match sees_topics {
            true => find_messages(operations.queue(), &words).await,
            false => Ok((Vec::new(), "not visible for this token".to_owned())),
        }
    };
    let (issues, tickets, sessions, topics, messages) = tokio::join!(
        timeout(SOURCE_TIMEOUT, issues),
        timeout(SOURCE_TIMEOUT, tickets),
        timeout(SOURCE_TIMEOUT, sessions),
        timeout(SOURCE_TIMEOUT, topics),
        timeout(SOURCE_TIMEOUT, messages)
    );
    let failed = |_| Err(ApiError::internal().message().to_owned());
    let refused = |error: QueueError| ApiError::from(error).message().to_owned();
    let found: [(&'static str, Result<SourceResults, _>); 5] = [
        ("Issues, events, outbox rows", issues.map(|found| found.unwrap_or_else(failed))),
        ("Tickets", tickets.map(|found| found.unwrap_or_else(failed))),
        ("Sessions", sessions.map(|found| found.unwrap_or_else(failed))),
        ("Topics and groups", topics.map(|found| found.map_err(refused))),
        ("Messages", messages.map(|found| found.map_err(refused))),
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

/// The issue, the event and the outbox row with a number.
async fn find_number(app: &App, caller: &Principal, number: Option<i64>) -> SourceResults {
    let Some(number) = number else {
        return Ok((Vec::new(), "searched by number only".to_owned()));
    };
    let read = async {
        let issue = app.store.issue(IssueId(number)).await?;
        let event = app.store.event_log(EventLogId(number)).await?;
        let row = app.store.outbox_facts(OutboxId(number)).await?;
        let of_event = match &event {
            Some(event) => app.store.issue(event.issue_id).await?,
            None => None,
        };
        Ok::<_, IssueError>((issue, event.zip(of_event), row))
    };
    let (issue, event, row) =
        read.await.map_err(|error| ApiError::from(error).message().to_owned())?;
    let issue = issue.filter(|issue| caller.allows(&issue.integration));
    let event = event.filter(|(_, issue)| caller.allows(&issue.integration));
    let row = row.filter(|row| caller.allows(&row.integration));
    let mut results: Vec<SearchResult> = Vec::new();
    results.extend(issue.into_iter().map(|issue| SearchResult {
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
    }));
    results.extend(event.into_iter().map(|(event, issue)| SearchResult {
        kind: "event",
        id: issue.id.0.to_string(),
        topic: None,
        title: format!("Event {number}"),
        details: short(&format!("{} of issue {}", event.event_type, issue.id.0)),
    }));
    results.extend(row.into_iter().map(|row| SearchResult {
        kind: "outbox_row",
        id: number.to_string(),
        topic: None,
        title: format!("Outbox row {number}"),
        details: short(&format!("{} of issue {}", row.status.as_str(), row.issue_id.0)),
    }));
    Ok((results, format!("looked up number {number}")))
}

/// The session with a name.
async fn find_session(app: &App, caller: &Principal, name: &str) -> SourceResults {
    let scope = "looked up the name".to_owned();
    let Ok(session) = parse_session_id(name) else { return Ok((Vec::new(), scope)) };
    let message = |error: ApiError| error.message().to_owned();
    let found = match sessions::find(app, &session).await {
        Ok(info) if sessions::is_visible(app, caller, name).await.map_err(message)? => Some(info),
        Ok(_) => None,
        Err(error) if error.is_transient() => return Err(message(error.into())),
        // No session has this name.
        Err(_) => None,
    };
    let results = found.into_iter().map(|info| SearchResult {
        kind: "session",
        id: info.session.to_string(),
        topic: None,
        title: short(info.session.as_str()),
        details: format!("{} entries", info.length),
    });
    Ok((results.collect(), scope))
}

/// The newest messages with a key, or with a text such as a trace id in a header.
async fn find_messages(
    queue: &Queue,
    words: &str,
) -> Result<(Vec<SearchResult>, String), QueueError> {
    let mut names = queue.topics().list().await?;
    names.sort();
    let count = names.len().min(TOPICS_MAX);
    let filter = MessageFilter::anywhere(words);
    let (until, mut searched, mut scanned) = (Instant::now() + MESSAGES_TIME, 0, 0);
    let mut results = Vec::new();
    for topic in names.iter().take(TOPICS_MAX) {
        if Instant::now() >= until || results.len() >= RESULTS_MAX {
            break;
        }
        let query = MessageQuery {
            direction: Direction::Backward,
            limit: MESSAGES_OF_TOPIC,
            ..MessageQuery::default()
        };
        let page = match queue.inspect().messages(topic, &query).await {
            Ok(page) => page,
            // Deleted in the meantime.
            Err(QueueError::NoTopic { .. }) => continue,
            Err(error) => return Err(error),
        };
        (searched, scanned) = (searched + 1, scanned + page.items.len());
        results.extend(page.items.iter().filter(|stored| filter.matches(stored)).map(|stored| {
            let key = stored.message.as_ref().ok().and_then(|message| message.key.clone());
            SearchResult {
                kind: "message",
                id: stored.id.to_string(),
                topic: Some(topic.clone()),
                title: stored.id.to_string(),
                details: short(&format!(
                    "topic {topic}, partition {}, key {}",
                    stored.partition,
                    key.unwrap_or_default()
                )),
            }
        }));
    }
    Ok((
        results,
        format!(
            "keys and headers of the newest {scanned} messages in {searched} of {count} topics"
        ),
    ))
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
    let scope = format!("names of {} topics and their groups", names.len());
    for topic in names.iter().take(TOPICS_MAX) {
        let groups = match queue.inspect().topic(topic).await {
            Ok(view) => view.groups,
            // Deleted in the meantime.
            Err(QueueError::NoTopic { .. }) => continue,
            Err(error) => return Err(error),
        };
        let groups = groups.into_iter().filter(|group| group.to_lowercase().contains(&lower));
        results.extend(groups.map(|group| SearchResult {
            kind: "group",
            topic: Some(topic.clone()),
            title: short(&group),
            details: short(&format!("group of topic {topic}")),
            id: group,
        }));
    }
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
