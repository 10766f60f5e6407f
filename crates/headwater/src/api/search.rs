//! Search over issues, events, outbox rows, tickets, sessions, topics, groups, messages and dead letters.
//!
//! Upstream: the console. Guarantees: each source has [`SOURCE_TIMEOUT`] and says how far it looked or why it could not;
//! at most [`RESULTS_MAX`] results.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_issue::{EventLogId, IssueError, IssueId, OutboxId, SqlRow};
use headwater_queue::{
    Bound, DeadLetter, DeadLetterFilter, DeadLetterQuery, MessageQuery, Queue, QueueError,
    StoredMessage, TraceContext, read_each,
};
use headwater_stream::clock::Timestamp;
use headwater_stream::{Direction, EntryId};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};
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
use crate::tickets::{INTEGRATION, SEARCHED_MAX, Ticket};

/// Time for each source.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum results, and characters of the words.
const RESULTS_MAX: usize = 100;
const WORDS_CHARS_MAX: usize = 200;

/// Maximum topics whose groups and messages are searched, and how many at a time.
const TOPICS_MAX: usize = 50;
const TOPICS_AT_ONCE: usize = 4;

/// Messages of a topic that are looked at, newest first.
const MESSAGES_OF_TOPIC: usize = 200;

/// Dead letters of a topic that are looked at, from the time of the entry on.
const LETTERS_OF_TOPIC: usize = 500;

/// By how much the clock of the server of an entry may be ahead of that of its dead letter.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(60);

/// Time for the topics of a source: those that have not answered then are left out, and the others are shown.
const TOPICS_TIME: Duration = Duration::from_millis(1500);

/// Events whose traces are compared, newest first, and results of a trace.
const TRACED_EVENTS: i64 = 10_000;
const TRACE_RESULTS_MAX: i64 = 50;

/// Searches for a trace at a time. Each reads thousands of rows, and its caller may no longer wait for it.
static TRACE_SEARCHES: Semaphore = Semaphore::const_new(2);

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
    /// A number, an id, a name, a key, a trace id, or words of a ticket; at most 200 characters. The id of a message of a ticket
    /// finds the ticket, and an entry id also the dead letters of the entry.
    q: Option<String>,
}

/// What was found.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SearchResponse {
    results: Vec<SearchResult>,
    sources: Vec<SearchSource>,
}

/// One result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct SearchResult {
    /// `issue`, `event`, `outbox_row`, `ticket`, `session`, `topic`, `group`, `message` or `dead_letter`.
    kind: &'static str,
    /// Number, id or name; of an event the number of its issue.
    id: String,
    /// Topic of a group, message or dead letter.
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
type FoundInScope = (Vec<SearchResult>, String);

/// What a source found, or why it could not be searched.
type SourceResults = Result<FoundInScope, String>;

/// A search, shared by the tasks of its sources.
struct SearchContext {
    app: App,
    caller: Principal,
    words: String,
}

/// Find issues, events, outbox rows, tickets, sessions, topics, groups, messages and dead letters.
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
    let context = Arc::new(SearchContext { app, caller: principal, words });
    let (queue, words) = (operations.queue(), context.words.as_str());
    let in_store = || Arc::clone(&context);
    let (issues, traces, tickets, sessions, topics, letters, messages) = tokio::join!(
        on_task(find_number(in_store())),
        on_task(find_trace(in_store())),
        on_task(find_tickets(in_store())),
        on_task(find_session(in_store())),
        in_topics(&context.caller, find_in_topics(queue, words)),
        in_topics(&context.caller, find_dead_letters(queue, words)),
        in_topics(&context.caller, find_messages(queue, words))
    );
    let (mut results, mut sources) = (Vec::new(), Vec::new());
    for (name, found) in [
        ("Issues, events, outbox rows", issues),
        ("Traces", traces),
        ("Tickets", tickets),
        ("Sessions", sessions),
        ("Topics and groups", topics),
        ("Dead letters", letters),
        ("Messages", messages),
    ] {
        let (scope, problem) = match found {
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

/// Searches the database, on a task of its own: a query is not dropped half-way.
async fn on_task(find: impl Future<Output = SourceResults> + Send + 'static) -> SourceResults {
    match timeout(SOURCE_TIMEOUT, tokio::spawn(find)).await {
        Ok(found) => found.unwrap_or_else(|_| Err(ApiError::internal().message().to_owned())),
        Err(_) => Err(late()),
    }
}

/// Searches the topics, if the caller can see them.
async fn in_topics(
    caller: &Principal,
    find: impl Future<Output = Result<FoundInScope, QueueError>>,
) -> SourceResults {
    if caller.integrations.is_some() {
        return Ok(not_visible());
    }
    match timeout(SOURCE_TIMEOUT, find).await {
        Ok(found) => found.map_err(|error| ApiError::from(error).message().to_owned()),
        Err(_) => Err(late()),
    }
}

fn late() -> String {
    format!("no answer within {} s", SOURCE_TIMEOUT.as_secs())
}

fn not_visible() -> FoundInScope {
    (Vec::new(), "not visible for this token".to_owned())
}

/// The message of an error of the database.
fn store_problem(error: IssueError) -> String {
    ApiError::from(error).message().to_owned()
}

/// The issue, the event and the outbox row with a number.
async fn find_number(context: Arc<SearchContext>) -> SourceResults {
    let SearchContext { app, caller, words } = &*context;
    let Ok(number) = words.parse::<i64>() else {
        return Ok((Vec::new(), "searched by number only".to_owned()));
    };
    let read = async {
        let (issue, event, row) = tokio::try_join!(
            app.store.issue(IssueId(number)),
            app.store.event_log(EventLogId(number)),
            app.store.outbox_facts(OutboxId(number))
        )?;
        let of_event = match &event {
            Some(event) => app.store.issue(event.issue_id).await?,
            None => None,
        };
        Ok::<_, IssueError>((issue, event.zip(of_event), row))
    };
    let (issue, event, row) = read.await.map_err(store_problem)?;
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

/// The newest events of a trace.
async fn find_trace(context: Arc<SearchContext>) -> SourceResults {
    let SearchContext { app, caller, words } = &*context;
    let Some(trace) = trace_id(words) else {
        return Ok((Vec::new(), "searched by trace id only".to_owned()));
    };
    let Ok(_permit) = TRACE_SEARCHES.try_acquire() else {
        return Err("other searches for a trace are running; try again later".to_owned());
    };
    // A stored trace is a `traceparent`: 00-TRACE-SPAN-FLAGS.
    let select = "SELECT e.id, e.issue_id, e.event_type
         FROM (SELECT id, issue_id, integration_id, event_type, trace FROM event_logs
             ORDER BY id DESC LIMIT $2) AS e
         WHERE substr(e.trace, 4, 32) = $1 AND ($4::text IS NULL OR e.integration_id IN (
             SELECT id FROM integrations WHERE name IN (SELECT value FROM headwater_each($4))))
         ORDER BY e.id DESC LIMIT $3";
    let integrations = caller.integrations.as_deref().map(|names| json!(names).to_string());
    let parameters = [
        (&trace).into(),
        TRACED_EVENTS.into(),
        TRACE_RESULTS_MAX.into(),
        integrations.as_deref().into(),
    ];
    let mut reading = app.store.read_connection().await.map_err(store_problem)?;
    let rows = reading.connection().fetch_all(select, &parameters).await;
    reading.release().await;
    let read = |row: &SqlRow| Ok((row.get::<i64>(0)?, row.get::<i64>(1)?, row.get::<String>(2)?));
    let found: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(read).collect());
    let found = found.map_err(|error| {
        let problem = format!("searching the traces of events: {error}");
        store_problem(IssueError::Unavailable { problem, source: Some(Arc::new(error)) })
    })?;
    let results = found.into_iter().map(|(event, issue, event_type)| SearchResult {
        kind: "event",
        id: issue.to_string(),
        topic: None,
        title: format!("Event {event}"),
        details: short(&format!("{event_type} of issue {issue}")),
    });
    let scope = format!(
        "traces of the newest {TRACED_EVENTS} events, of which the newest {TRACE_RESULTS_MAX} that match are shown"
    );
    Ok((results.collect(), scope))
}

/// The id of a trace, given alone or as a `traceparent`.
fn trace_id(words: &str) -> Option<String> {
    let words = words.to_lowercase();
    if let Some(context) = TraceContext::parse(&words) {
        return Some(format!("{:032x}", context.trace_id()));
    }
    let is_id = words.len() == 32 && words.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then_some(words)
}

/// The session with a name.
async fn find_session(context: Arc<SearchContext>) -> SourceResults {
    let SearchContext { app, caller, words: name } = &*context;
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

/// What was read of several topics.
struct TopicReads<T> {
    read: Vec<(String, T)>,
    /// Topics whose server did not answer in time.
    unanswered: usize,
}

impl<T> TopicReads<T> {
    /// The end of a scope, if something is missing.
    fn missing(&self) -> String {
        match self.unanswered {
            0 => String::new(),
            1 => "; one topic did not answer".to_owned(),
            count => format!("; {count} topics did not answer"),
        }
    }
}

/// Reads topics, a few at a time, for [`TOPICS_TIME`] together. A topic whose server does not answer does not hide the others.
/// `None` of a read: it was not needed any more.
async fn read_topics<T, F>(
    names: Vec<String>,
    read: impl Fn(String) -> F,
) -> Result<TopicReads<T>, QueueError>
where
    F: Future<Output = Result<Option<T>, QueueError>>,
{
    let until = Instant::now() + TOPICS_TIME;
    let reads = names.into_iter().map(|name| {
        let reading = read(name.clone());
        async move { (name, timeout_at(until, reading).await) }
    });
    let (mut found, mut unanswered) = (Vec::new(), 0);
    for (name, read) in read_each(TOPICS_AT_ONCE, reads.collect()).await {
        match read {
            Ok(Ok(read)) => found.extend(read.map(|read| (name, read))),
            // Deleted in the meantime.
            Ok(Err(QueueError::NoTopic { .. })) => {}
            Ok(Err(error)) if !error.is_transient() => return Err(error),
            Ok(Err(_)) | Err(_) => unanswered += 1,
        }
    }
    Ok(TopicReads { read: found, unanswered })
}

/// The newest messages with a key, or with a text such as a trace id in a header.
async fn find_messages(queue: &Queue, words: &str) -> Result<FoundInScope, QueueError> {
    let mut names = queue.topics().list().await?;
    names.sort();
    names.truncate(TOPICS_MAX);
    let count = names.len();
    let filter = &MessageFilter::anywhere(words);
    let query = &MessageQuery {
        direction: Direction::Backward,
        limit: MESSAGES_OF_TOPIC,
        ..MessageQuery::default()
    };
    let inspect = &queue.inspect();
    let matching = &AtomicUsize::new(0);
    let reads = read_topics(names, |topic| async move {
        if matching.load(Ordering::Relaxed) >= RESULTS_MAX {
            return Ok(None);
        }
        let mut page = inspect.messages(&topic, query).await?;
        let scanned = page.items.len();
        page.items.retain(|stored| filter.matches(stored));
        matching.fetch_add(page.items.len(), Ordering::Relaxed);
        Ok(Some((scanned, page.items)))
    });
    let reads = reads.await?;
    let searched = reads.read.len();
    let scanned: usize = reads.read.iter().map(|(_, (scanned, _))| scanned).sum();
    let scope = format!(
        "keys and headers of the newest {scanned} messages in {searched} of {count} topics{}",
        reads.missing()
    );
    let of_topic = |(topic, (_, stored)): (String, (usize, Vec<StoredMessage>))| {
        stored.into_iter().map(move |stored| {
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
        })
    };
    Ok((reads.read.into_iter().flat_map(of_topic).collect(), scope))
}

/// The ticket with an id, or with the id of one of its messages; else tickets with one of the words.
async fn find_tickets(context: Arc<SearchContext>) -> SourceResults {
    let SearchContext { app, caller, words } = &*context;
    if !caller.allows(INTEGRATION) {
        return Ok(not_visible());
    }
    if let Ok(id) = Uuid::parse_str(words) {
        let (of_id, of_message) =
            tokio::try_join!(app.tickets.ticket(id), app.tickets.ticket_of_message(id))
                .map_err(|error| ApiError::from(error).message().to_owned())?;
        let found = |ticket: Ticket, details: String| SearchResult {
            kind: "ticket",
            id: ticket.ticket_id.to_string(),
            topic: None,
            title: short(&ticket.title),
            details,
        };
        let of_id = of_id.map(|ticket| {
            let status = ticket.status.as_str().to_owned();
            found(ticket, status)
        });
        let of_message = of_message.map(|ticket| {
            let details = format!("{}, has message {id}", ticket.status.as_str());
            found(ticket, details)
        });
        let scope = "looked up the id of a ticket or message".to_owned();
        return Ok((of_id.into_iter().chain(of_message).collect(), scope));
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
        format!(
            "title and messages of the newest {SEARCHED_MAX} tickets; words of 3 letters or more"
        ),
    ))
}

async fn find_in_topics(queue: &Queue, words: &str) -> Result<FoundInScope, QueueError> {
    let (names, entries) = tokio::try_join!(find_names(queue, words), find_entry(queue, words))?;
    Ok(([names.0, entries.0].concat(), names.1 + &entries.1))
}

/// Topics and groups by a part of their names.
async fn find_names(queue: &Queue, words: &str) -> Result<FoundInScope, QueueError> {
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
    let inspect = &queue.inspect();
    names.truncate(TOPICS_MAX);
    let groups =
        read_topics(
            names.clone(),
            |topic| async move { inspect.group_names(&topic).await.map(Some) },
        );
    let groups = groups.await?;
    let scope = format!("{scope}{}", groups.missing());
    for (topic, groups) in groups.read {
        let groups = groups.into_iter().filter(|group| group.to_lowercase().contains(&lower));
        results.extend(groups.map(|group| SearchResult {
            kind: "group",
            topic: Some(topic.clone()),
            title: short(&group),
            details: short(&format!("group of topic {topic}")),
            id: group,
        }));
    }
    Ok((results, scope))
}

/// The messages with an entry id; without one, nothing.
async fn find_entry(queue: &Queue, words: &str) -> Result<FoundInScope, QueueError> {
    let Some(entry) = entry_id(words) else { return Ok((Vec::new(), String::new())) };
    let mut names = queue.topics().list().await?;
    names.sort();
    names.truncate(TOPICS_MAX);
    let count = names.len();
    let at = Some(Bound::Id(entry));
    let query = &MessageQuery { from: at, to: at, limit: 10, ..MessageQuery::default() };
    let inspect = &queue.inspect();
    let reads = read_topics(names, |topic| async move {
        inspect.messages(&topic, query).await.map(|page| Some(page.items))
    });
    let reads = reads.await?;
    let scope =
        format!(", and entry {entry} in {} of {count} topics{}", reads.read.len(), reads.missing());
    let of_topic = |(topic, stored): (String, Vec<StoredMessage>)| {
        stored.into_iter().map(move |stored| SearchResult {
            kind: "message",
            id: stored.id.to_string(),
            topic: Some(topic.clone()),
            title: stored.id.to_string(),
            details: short(&format!("topic {topic}, partition {}", stored.partition)),
        })
    };
    Ok((reads.read.into_iter().flat_map(of_topic).collect(), scope))
}

/// The dead letter with an entry id, and the dead letters of the message with this entry id.
async fn find_dead_letters(queue: &Queue, words: &str) -> Result<FoundInScope, QueueError> {
    let Some(entry) = entry_id(words) else {
        return Ok((Vec::new(), "searched by entry id only".to_owned()));
    };
    let mut names = queue.topics().list().await?;
    names.sort();
    names.truncate(TOPICS_MAX);
    let count = names.len();
    // A message becomes a dead letter after it was sent.
    let from = Some(Timestamp::from_millis(entry.ms).before(CLOCK_DIFFERENCE));
    let query = &DeadLetterQuery {
        filter: DeadLetterFilter { from, ..DeadLetterFilter::default() },
        limit: LETTERS_OF_TOPIC,
        ..DeadLetterQuery::default()
    };
    let reads = read_topics(names, |topic| async move {
        letters_of(queue, &topic, entry, query).await.map(Some)
    });
    let reads = reads.await?;
    let scanned: usize = reads.read.iter().map(|(_, (_, scanned))| scanned).sum();
    let scope = format!(
        "the dead letter {entry}, and {scanned} dead letters from its time on, at most {LETTERS_OF_TOPIC} of a topic, \
         in {} of {count} topics{}",
        reads.read.len(),
        reads.missing()
    );
    let of_topic = |(topic, (letters, _)): (String, (Vec<DeadLetter>, usize))| {
        letters.into_iter().map(move |letter| {
            let original = letter.original_id.map(|id| format!(", entry {id}"));
            let original = original.unwrap_or_default();
            SearchResult {
                kind: "dead_letter",
                id: letter.id.to_string(),
                topic: Some(topic.clone()),
                title: letter.id.to_string(),
                details: short(&format!("topic {topic}{original}: {}", letter.reason)),
            }
        })
    };
    Ok((reads.read.into_iter().flat_map(of_topic).collect(), scope))
}

/// The dead letters of a topic with an entry id of their own or of their message, and how many were read.
async fn letters_of(
    queue: &Queue,
    topic: &str,
    entry: EntryId,
    query: &DeadLetterQuery,
) -> Result<(Vec<DeadLetter>, usize), QueueError> {
    let letters = queue.dead_letters(topic).await?;
    let own = match letters.show(entry).await {
        Ok(letter) => Some(letter),
        Err(QueueError::NoDeadLetter { .. }) => None,
        Err(error) => return Err(error),
    };
    let page = letters.browse(query).await?;
    let read = page.items.len();
    let is_of_entry = |letter: &DeadLetter| letter.original_id == Some(entry) && letter.id != entry;
    let found = own.into_iter().chain(page.items.into_iter().filter(is_of_entry));
    Ok((found.collect(), read))
}

/// An entry id; `5` is one too, but means a number.
fn entry_id(words: &str) -> Option<EntryId> {
    words.parse().ok().filter(|_| words.contains('-'))
}

fn short(text: &str) -> String {
    text::cut(text, TEXT_BYTES_MAX).to_owned()
}
