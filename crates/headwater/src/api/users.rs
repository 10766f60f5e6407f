//! The data of one user: export it, or erase it.
//!
//! Upstream: `headwater export` and `headwater erase`. Downstream: `tickets`, sessions, the stream `ticket_events`. The user
//! is the `user_id` of tickets. Guarantees: both require the role `admin`; the user id is in no path, so it is not in the audit
//! log. An erased ticket is gone with its messages, events, replies, sessions and published entries, whatever is pending; a
//! ticket whose run or delivery is in progress is reported as busy. Entries that a consumer has in hand do not open it again. Interrupted, or busy: repeat it. Not here: the
//! DuckDB file, backups, and streams of other programs.

use std::collections::HashSet;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use futures_util::stream;
use headwater_bus::SessionId;
use headwater_issue::history::DeleteCondition;
use headwater_issue::{EventLogFilter, IssueId};
use headwater_queue::QueueError;
use headwater_stream::{EntryId, Range, StreamName};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::sleep;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::drafts::draft_to_dto;
use crate::api::effects::effect_to_dto;
use crate::api::issues::event_to_dto;
use crate::api::ndjson::{error_line, lines};
use crate::api::run_to_completion;
use crate::api::tickets::{message_to_dto, ticket_to_dto};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::QueryParams;
use crate::inbound::ticket_events_consumer::mark_erased;
use crate::limits::PAGE_MAX;
use crate::server::app_state::App;
use crate::tickets::desk_events::DESK_EVENTS;
use crate::tickets::drafts::DraftFilter;
use crate::tickets::effects::EffectFilter;
use crate::tickets::{TICKET_EVENTS, Ticket, TicketFilter, checked_user};

/// Tickets of one erase request.
const ERASE_BATCH: usize = 50;

/// How often, and how often in vain, a ticket in use is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(200);
const BUSY_TRIES: u32 = 10;

/// Sessions and stream entries read at once.
const SCAN_PAGE: usize = 500;

/// Streams with published events of tickets.
const EVENT_STREAMS: [&str; 4] =
    [TICKET_EVENTS, "ticket_events:dlq", DESK_EVENTS, "desk_events:dlq"];

/// Routes below `/api/v1`.
pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(export)).routes(routes!(erase))
}

/// The user to export.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ExportUserQuery {
    /// `user_id` of the tickets; required.
    user: Option<String>,
}

/// Export the tickets, messages, drafts, tool calls, events and sessions of a user as JSON lines. The last line is `end` with the number of tickets.
#[utoipa::path(get, path = "/export", tag = "users", params(ExportUserQuery),
    responses((status = 200, content_type = "application/x-ndjson", body = String), (status = 403)))]
async fn export(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<ExportUserQuery>,
) -> Result<Response, ApiError> {
    principal.require_role(Role::Admin)?;
    let user = query.user.ok_or_else(|| ApiError::invalid("`user` is missing"))?;
    let user = checked_user(Some(user))?;
    let (sender, receiver) = mpsc::channel(16);
    // Ends when the client disconnects: then nothing receives its lines.
    tokio::spawn(async move {
        let last = match export_lines(&app, user, &sender).await {
            Ok(tickets) => json!({"end": {"tickets": tickets}}).to_string(),
            Err(error) => error_line(&error),
        };
        let _ = sender.send(last).await;
    });
    Ok(lines(stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|line| (line, receiver))
    })))
}

/// Sends one line for each object. Returns the number of tickets.
async fn export_lines(
    app: &App,
    user_id: Option<String>,
    sender: &mpsc::Sender<String>,
) -> Result<usize, ApiError> {
    let mut filter = TicketFilter { user_id, ..TicketFilter::default() };
    let (mut count, mut issues) = (0, HashSet::new());
    let send = async |line: Value| match sender.send(line.to_string()).await {
        Ok(()) => Ok(()),
        Err(_) => Err(ApiError::unavailable("the client is gone")),
    };
    loop {
        let tickets = app.tickets.list(&filter, PAGE_MAX).await?;
        let Some(last) = tickets.last() else { break };
        filter.before = Some(last.number);
        for ticket in &tickets {
            (count, _) = (count + 1, issues.insert(ticket.issue_id));
            send(json!({"ticket": ticket_to_dto(ticket)})).await?;
            let ticket_id = ticket.ticket_id;
            let mut after = 0;
            loop {
                let messages = app.tickets.messages(ticket_id, after, PAGE_MAX).await?;
                let Some(last) = messages.last() else { break };
                after = last.seq;
                for message in &messages {
                    let message = message_to_dto(message);
                    send(json!({"message": message, "ticket_id": ticket_id})).await?;
                }
            }
            let issue_id = Some(ticket.issue_id.0);
            let mut drafts = DraftFilter { issue_id, ..DraftFilter::default() };
            loop {
                let page = app.tickets.drafts(&drafts, PAGE_MAX).await?;
                let Some(last) = page.last() else { break };
                drafts.before = Some(last.number);
                for draft in page {
                    send(json!({"draft": draft_to_dto(draft), "ticket_id": ticket_id})).await?;
                }
            }
            let mut effects = EffectFilter { issue_id, ..EffectFilter::default() };
            loop {
                let page = app.tickets.effects(&effects, PAGE_MAX).await?;
                let Some(last) = page.last() else { break };
                effects.before = Some(last.number);
                for effect in page {
                    send(json!({"effect": effect_to_dto(effect), "ticket_id": ticket_id})).await?;
                }
            }
            let mut events = EventLogFilter::default();
            loop {
                let page = app.store.event_logs(ticket.issue_id, &events, SCAN_PAGE).await?;
                let Some(last) = page.last() else { break };
                events.after = Some(last.id);
                for event in &page {
                    send(json!({"event": event_to_dto(event)})).await?;
                }
            }
        }
    }
    for session in sessions_of(app, &issues).await? {
        let mut export = app.sessions.export(&session).await?;
        while let Some(line) = export.next_line().await? {
            let line: Value = serde_json::from_str(&line).unwrap_or(Value::String(line));
            send(json!({"session": session.as_str(), "line": line})).await?;
        }
    }
    Ok(count)
}

/// The user to erase.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EraseUserRequest {
    /// `user_id` of the tickets.
    user: String,
    /// `next_cursor` of the previous response.
    cursor: Option<i64>,
}

/// What was erased.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EraseUserResponse {
    /// Tickets with everything that belongs to them.
    tickets: u64,
    /// Sessions of their runs.
    sessions: u64,
    /// Tickets whose run or delivery is in progress; repeat the request.
    busy: u64,
    /// Cursor for the next request, or `null`.
    next_cursor: Option<i64>,
}

/// Erase tickets of a user, up to 50 in one request, with messages, drafts, tool calls, events, replies, sessions and published entries.
#[utoipa::path(post, path = "/erase", tag = "users", request_body = EraseUserRequest,
    responses((status = 200, body = EraseUserResponse), (status = 403)))]
async fn erase(
    State(app): State<App>,
    principal: Principal,
    JsonBody(request): JsonBody<EraseUserRequest>,
) -> JsonResult<EraseUserResponse> {
    principal.require_role(Role::Admin)?;
    let user_id = checked_user(Some(request.user))?;
    let filter = TicketFilter { user_id, before: request.cursor, ..TicketFilter::default() };
    run_to_completion(async move { erase_page(&app, &filter).await }).await.map(Json)
}

async fn erase_page(app: &App, filter: &TicketFilter) -> Result<EraseUserResponse, ApiError> {
    let tickets = app.tickets.list(filter, ERASE_BATCH).await?;
    let next_cursor = tickets.last().filter(|_| tickets.len() == ERASE_BATCH);
    let next_cursor = next_cursor.map(|ticket| ticket.number);
    for ticket in &tickets {
        mark_erased(&*app.streams, ticket.ticket_id).await.map_err(QueueError::from)?;
    }
    // Before SQL, which knows what is left if this is interrupted; and after it, because a reply may have been published meanwhile.
    let mut sessions = erase_streams(app, &tickets).await?;
    let (mut erased, mut busy) = (0, 0);
    for ticket in &tickets {
        match erase_ticket(app, ticket.issue_id).await? {
            true => erased += 1,
            false => busy += 1,
        }
    }
    sessions += erase_streams(app, &tickets).await?;
    Ok(EraseUserResponse { tickets: erased, sessions, busy, next_cursor })
}

/// Erases the ticket of an issue in SQL. Returns false if it stays in use.
async fn erase_ticket(app: &App, issue_id: IssueId) -> Result<bool, ApiError> {
    for _ in 0..BUSY_TRIES {
        if app.tickets.delete_issue(issue_id, DeleteCondition::NotInUse).await? {
            return Ok(true);
        }
        sleep(BUSY_PAUSE).await;
    }
    Ok(false)
}

/// Deletes the sessions and the published entries of tickets. Returns the number of sessions.
async fn erase_streams(app: &App, tickets: &[Ticket]) -> Result<u64, ApiError> {
    if tickets.is_empty() {
        return Ok(0);
    }
    let issues = tickets.iter().map(|ticket| ticket.issue_id).collect();
    let mut count = 0;
    for session in sessions_of(app, &issues).await? {
        count += u64::from(app.sessions.delete(&session).await?);
    }
    let ids: HashSet<Uuid> = tickets.iter().map(|ticket| ticket.ticket_id).collect();
    for stream in EVENT_STREAMS {
        erase_entries(app, stream, &ids).await.map_err(QueueError::from)?;
    }
    Ok(count)
}

async fn erase_entries(
    app: &App,
    stream: &str,
    tickets: &HashSet<Uuid>,
) -> headwater_stream::Result<()> {
    let stream = StreamName::new(stream)?;
    let mut range = Range::first(SCAN_PAGE);
    loop {
        let entries = app.streams.range(&stream, range).await?;
        let Some(last) = entries.last() else { return Ok(()) };
        range.from = last.id.next();
        let ids: Vec<EntryId> = entries
            .iter()
            .filter(|entry| {
                let data = entry.fields.get("data").map_or(&[][..], |data| &data[..]);
                let event: Value = serde_json::from_slice(data).unwrap_or_default();
                let ticket = event["ticket_id"].as_str().and_then(|id| id.parse().ok());
                ticket.is_some_and(|ticket: Uuid| tickets.contains(&ticket))
            })
            .map(|entry| entry.id)
            .collect();
        if !ids.is_empty() {
            app.streams.delete_entries(&stream, &ids).await?;
        }
    }
}

/// The sessions of the runs of these issues.
async fn sessions_of(app: &App, issues: &HashSet<IssueId>) -> Result<Vec<SessionId>, ApiError> {
    let (mut found, mut after) = (Vec::new(), EntryId::MIN);
    loop {
        let page = app.sessions.list(after, SCAN_PAGE).await?;
        let Some(last) = page.last() else { return Ok(found) };
        after = last.index;
        found.extend(page.into_iter().map(|info| info.session).filter(|session| {
            let issue =
                session.as_str().strip_prefix("issue-").and_then(|id| id.split_once("-run-"));
            let issue = issue.and_then(|(issue, _)| issue.parse().ok());
            issue.is_some_and(|issue| issues.contains(&IssueId(issue)))
        }));
    }
}
