//! The data of one user: export it, or erase it.
//!
//! Upstream: `headwater export` and `headwater erase`. Downstream: `tickets`, sessions, the stream `ticket_events`. The user
//! is the `user_id` of tickets. Guarantees: both require the role `admin`; the user id is in no path, so it is not in the audit
//! log. An erased ticket is gone with its messages, events, replies, sessions and published entries, whatever is pending; a
//! ticket whose run or delivery is in progress is reported as busy. Entries that a consumer has in hand do not open it again, and are not
//! forwarded; those of a ticket that stays are. Interrupted, or busy: repeat it. Not here: the DuckDB file, backups, and streams of
//! other programs.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use futures_util::stream;
use headwater_bus::SessionId;
use headwater_issue::history::{self, DeleteCondition};
use headwater_issue::{EventLogFilter, IssueId};
use headwater_queue::{Queue, QueueError};
use headwater_stream::clock::Timestamp;
use headwater_stream::{DelayId, DelayName, DelayedEntry, EntryId, Fields, Range, StreamName};
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
use crate::desk::provisional::PROVISIONAL_STREAM;
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

/// Entries of a delay set that two pages have in common: so many may leave the set between the reads of them.
const SCAN_OVERLAP: usize = SCAN_PAGE / 2;

/// How often a scan of a delay set goes back because more entries left it.
const SCAN_RETURNS_MAX: u32 = 1000;

/// Streams with published events of tickets.
const EVENT_STREAMS: [&str; 5] =
    [TICKET_EVENTS, "ticket_events:dlq", DESK_EVENTS, "desk_events:dlq", PROVISIONAL_STREAM];

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
        filter.after = Some(last.number);
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
    let filter = TicketFilter { user_id, after: request.cursor, ..TicketFilter::default() };
    run_to_completion(async move { erase_page(&app, &filter).await }).await.map(Json)
}

async fn erase_page(app: &App, filter: &TicketFilter) -> Result<EraseUserResponse, ApiError> {
    let tickets = app.tickets.list(filter, ERASE_BATCH).await?;
    let next_cursor = tickets.last().filter(|_| tickets.len() == ERASE_BATCH);
    let next_cursor = next_cursor.map(|ticket| ticket.number);
    // Before SQL, which knows what is left if this is interrupted; and after it, because a reply may have been published meanwhile.
    let mut sessions = erase_streams(app, &tickets).await?;
    let (mut erased, mut busy) = (0, 0);
    for ticket in &tickets {
        match erase_ticket(app, ticket).await? {
            true => erased += 1,
            false => busy += 1,
        }
    }
    sessions += erase_streams(app, &tickets).await?;
    Ok(EraseUserResponse { tickets: erased, sessions, busy, next_cursor })
}

/// Erases a ticket in SQL. Returns false if it stays in use.
async fn erase_ticket(app: &App, ticket: &Ticket) -> Result<bool, ApiError> {
    for _ in 0..BUSY_TRIES {
        // Not before the ticket can be deleted: forwarders drop the notifications of a marked ticket.
        if is_deletable(app, ticket.issue_id).await? {
            mark_erased(&*app.streams, ticket.ticket_id).await.map_err(QueueError::from)?;
            if app.tickets.delete_issue(ticket.issue_id, DeleteCondition::NotInUse).await? {
                return Ok(true);
            }
        }
        sleep(BUSY_PAUSE).await;
    }
    Ok(false)
}

/// Whether neither a run nor a delivery of an issue is in progress.
async fn is_deletable(app: &App, issue_id: IssueId) -> Result<bool, ApiError> {
    let mut transaction = app.store.begin().await?;
    Ok(history::lock_deletable(transaction.as_mut(), issue_id, DeleteCondition::NotInUse).await?)
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
    // Before the streams, to which entries move when they are due.
    for topic in [TICKET_EVENTS, DESK_EVENTS] {
        erase_delayed(app, topic, &ids).await?;
    }
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
            .filter(|entry| is_of(&entry.fields, tickets))
            .map(|entry| entry.id)
            .collect();
        if !ids.is_empty() {
            app.streams.delete_entries(&stream, &ids).await?;
        }
    }
}

/// Cancels the delayed copies of the entries of tickets.
async fn erase_delayed(app: &App, topic: &str, tickets: &HashSet<Uuid>) -> Result<(), ApiError> {
    let topic = Queue::new(Arc::clone(&app.streams)).topics().describe(topic).await?;
    // Without a cluster, one set for all partitions.
    let sets: BTreeSet<String> = topic.partitions.into_iter().map(|one| one.delays_key).collect();
    for set in sets {
        let set = DelayName::new(set).map_err(QueueError::from)?;
        let mut scan = DelayScan::default();
        while !scan.is_complete {
            let page = app.streams.delayed(&set, scan.offset, SCAN_PAGE).await;
            let page = page.map_err(QueueError::from)?;
            let (erased, kept): (Vec<_>, Vec<_>) =
                page.iter().partition(|entry| is_of(&entry.fields, tickets));
            for entry in erased {
                app.streams.cancel(&set, entry.id).await.map_err(QueueError::from)?;
            }
            scan.advance(&page, kept.len());
            if scan.returns > SCAN_RETURNS_MAX {
                return Err(ApiError::unavailable(format!(
                    "entries leave the delay set `{set}` faster than they are searched for those to erase; repeat the request"
                )));
            }
        }
    }
    Ok(())
}

/// Position in a delay set that is read page by page, by rank, while due entries leave it at its beginning and the ranks of the
/// others decrease. Guarantees: an entry that stays in the set from the first page to the last is on one of them.
#[derive(Default)]
struct DelayScan {
    /// Rank at which the next page begins.
    offset: usize,
    /// The last entry of the pages so far, in the order of the set.
    last_seen: Option<(Timestamp, DelayId)>,
    /// How often a page did not continue those before it.
    returns: u32,
    is_complete: bool,
}

impl DelayScan {
    /// Continues after a page that was read at `offset`, and of which `kept` entries stay in the set.
    fn advance(&mut self, page: &[DelayedEntry], kept: usize) {
        let position = |entry: &DelayedEntry| (entry.due_at, entry.id);
        let continues = page.first().is_some_and(|first| Some(position(first)) <= self.last_seen);
        if self.offset > 0 && !continues {
            // Entries between the pages moved to ranks before this one.
            self.offset = self.offset.saturating_sub(SCAN_PAGE);
            self.returns += 1;
            return;
        }
        self.last_seen = self.last_seen.max(page.last().map(position));
        self.is_complete = page.len() < SCAN_PAGE;
        self.offset = (self.offset + kept).saturating_sub(SCAN_OVERLAP);
    }
}

/// Whether an entry is an event of one of these tickets.
fn is_of(fields: &Fields, tickets: &HashSet<Uuid>) -> bool {
    let data = fields.get("data").map_or(&[][..], |data| &data[..]);
    let event: Value = serde_json::from_slice(data).unwrap_or_default();
    let ticket = event["ticket_id"].as_str().and_then(|id| id.parse().ok());
    ticket.is_some_and(|ticket: Uuid| tickets.contains(&ticket))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64) -> DelayedEntry {
        DelayedEntry {
            id: DelayId(number),
            to: StreamName::new("ticket_events").unwrap(),
            // Several are due at the same time.
            due_at: Timestamp::from_millis(number / 700),
            fields: Fields::new([("data", "x")]),
        }
    }

    /// Scans a set of which this many of the first entries leave before each page after the first one, and in which every third
    /// entry is to be cancelled. Returns those of them that are left, and the number of pages.
    fn scan(mut set: Vec<DelayedEntry>, leaving: &dyn Fn(u32) -> usize) -> (Vec<u64>, u32) {
        let is_erased = |entry: &DelayedEntry| entry.id.0.is_multiple_of(3);
        let (mut scan, mut pages) = (DelayScan::default(), 0);
        while !scan.is_complete {
            let begin = scan.offset.min(set.len());
            let page = set[begin..(begin + SCAN_PAGE).min(set.len())].to_vec();
            set.retain(|entry| !(is_erased(entry) && page.contains(entry)));
            scan.advance(&page, page.iter().filter(|entry| !is_erased(entry)).count());
            pages += 1;
            set.drain(..leaving(pages).min(set.len()));
        }
        (set.iter().filter(|entry| is_erased(entry)).map(|entry| entry.id.0).collect(), pages)
    }

    #[test]
    fn a_scan_of_a_delay_set_skips_no_entry_while_others_leave_it() {
        for count in [0, 1, 400, SCAN_PAGE as u64, 501, 5000] {
            let set: Vec<_> = (0..count).map(entry).collect();
            for leaving in [0, 1, 100, SCAN_OVERLAP, SCAN_PAGE, 2000] {
                // Always, and once.
                let (left, pages) = scan(set.clone(), &|_| leaving);
                assert!(left.is_empty() && pages < 100, "{count} {leaving}: {left:?}, {pages}");
                let (left, pages) = scan(set.clone(), &|page| if page == 4 { leaving } else { 0 });
                assert!(left.is_empty() && pages < 100, "{count} {leaving}: {left:?}, {pages}");
            }
        }
    }
}
