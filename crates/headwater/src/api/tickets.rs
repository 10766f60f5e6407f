//! Tickets: create, list, show, add messages, close, reopen, and the queue of those that are handed over.
//!
//! Upstream: `http/router.rs`. Downstream: `tickets`. Guarantees: a call repeated with the same `message_id` changes
//! nothing and returns the same ids; invalid input is rejected before it has any effect. Texts are returned
//! unchanged, as JSON.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::BUSY_RETRY_AFTER;
use crate::api::issues::UsageDto;
use crate::api::list_counts;
use crate::api::tickets_sse;
use crate::api::why::{self, WhyResponse};
use crate::desk::provisional::ProvisionalAnswer;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::server::app_state::App;
use crate::tickets::Author;
use crate::tickets::hand_overs::{AssignedTicket, TicketAssignment};
use crate::tickets::{
    NewTicket, NewTicketMessage, PostedMessage, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus, TicketWords, sort_imported,
};

/// How long a search for words may take. Shorter than the time that a page of the console has.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(6);

/// Routes below `/api/v1`.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show))
        .routes(routes!(messages, add))
        .routes(routes!(close))
        .routes(routes!(reopen))
        .routes(routes!(take))
        .routes(routes!(assign))
        .routes(routes!(unassign))
        .routes(routes!(why))
        .routes(routes!(tickets_sse::listen))
}

/// A new ticket.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateTicketRequest {
    title: String,
    /// Its first message.
    content: String,
    user_id: Option<String>,
    /// Idempotency id; repeat it with every retry.
    message_id: Option<Uuid>,
}

/// Open a ticket.
#[utoipa::path(post, path = "/tickets", tag = "tickets", request_body = CreateTicketRequest,
    responses((status = 201, body = TicketPostedResponse), (status = 200, body = TicketPostedResponse, description = "Duplicate of an earlier request."),
        (status = 409, description = "The `message_id` belongs to another message.")))]
async fn create(
    State(app): State<App>,
    JsonBody(body): JsonBody<CreateTicketRequest>,
) -> Result<(StatusCode, Json<TicketPostedResponse>), ApiError> {
    let CreateTicketRequest { title, content, user_id, message_id } = body;
    let new = NewTicket { title, content, user_id, message_id };
    Ok(posted(app.tickets.create(new).await?))
}

/// A new message.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AddMessageRequest {
    content: String,
    /// `user` by default; `agent` for a person who answers the user.
    #[schema(value_type = Option<String>)]
    author: Option<Author>,
    /// Name of the person who answers, as the model sees it; with it, `author` is `agent` by default.
    agent: Option<String>,
    /// Idempotency id; repeat it with every retry.
    message_id: Option<Uuid>,
}

/// Add a message to a ticket.
#[utoipa::path(post, path = "/tickets/{id}/messages", tag = "tickets", params(("id" = Uuid, Path)), request_body = AddMessageRequest,
    responses((status = 201, body = TicketPostedResponse), (status = 200, body = TicketPostedResponse, description = "Duplicate of an earlier request."),
        (status = 404), (status = 409, description = "The `message_id` belongs to another message.")))]
async fn add(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
    JsonBody(body): JsonBody<AddMessageRequest>,
) -> Result<(StatusCode, Json<TicketPostedResponse>), ApiError> {
    let AddMessageRequest { content, author, agent, message_id } = body;
    let default = if agent.is_some() { Author::Agent } else { Author::User };
    let author = author.unwrap_or(default);
    let new = NewTicketMessage { content, author, agent, message_id };
    Ok(posted(app.tickets.post(id, new).await?))
}

/// Ids of a stored message.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketPostedResponse {
    ticket_id: Uuid,
    message_id: Uuid,
    issue_id: i64,
    /// Whether it was stored by an earlier request.
    duplicate: bool,
}

/// 201 if created, 200 for a duplicate.
fn posted(posted: PostedMessage) -> (StatusCode, Json<TicketPostedResponse>) {
    let status = if posted.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    let PostedMessage { ticket_id, message_id, issue_id, duplicate, .. } = posted;
    (status, Json(TicketPostedResponse { ticket_id, message_id, issue_id: issue_id.0, duplicate }))
}

/// Filter of tickets.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TicketListQuery {
    /// `open` or `closed`.
    status: Option<String>,
    user_id: Option<String>,
    /// `true`: only those that are handed over to a person; `false`: only the others.
    handed_over: Option<bool>,
    /// Only those that are assigned to this person.
    assignee: Option<String>,
    /// `true`: only those that are handed over and assigned to nobody.
    unassigned: Option<bool>,
    /// Only those whose id begins so: hexadecimal digits and dashes.
    id_prefix: Option<String>,
    /// Only those with one of these words in the title or a message, in upper or lower case; words of less than 3 letters are
    /// ignored. A page searches 1000 tickets of the list at most, so it may be empty although it has a `next_cursor`.
    words: Option<String>,
    /// The oldest one first.
    #[serde(default)]
    oldest_first: bool,
    /// Also count all that match.
    #[serde(default)]
    count: bool,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 200 at most.
    limit: Option<usize>,
}

/// A page of tickets.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketPage {
    tickets: Vec<TicketDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
    /// With `count`: how many tickets match on all pages; 10001 if these are more than 10000, `null` if the database did not count them in time. With `words`, too: how many of the
    /// `searched` ones match.
    #[serde(skip_serializing_if = "Option::is_none")]
    matching: Option<usize>,
    /// With `words`: how many tickets of the list were searched for this page, from `cursor` on. If `next_cursor` is not `null`, the
    /// next page continues with further ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    searched: Option<usize>,
}

/// List tickets, newest first unless asked otherwise.
#[utoipa::path(get, path = "/tickets", tag = "tickets", params(TicketListQuery), responses((status = 200, body = TicketPage)))]
async fn list(
    State(app): State<App>,
    QueryParams(query): QueryParams<TicketListQuery>,
) -> JsonResult<TicketPage> {
    let status = query.status.as_deref().map(|name| {
        TicketStatus::parse(name)
            .ok_or_else(|| ApiError::invalid("`status` must be `open` or `closed`"))
    });
    if query.user_id.as_ref().is_some_and(|user| user.contains('\0')) {
        return Err(ApiError::invalid("`user_id` contains a control character"));
    }
    if query.assignee.as_ref().is_some_and(|name| name.contains('\0')) {
        return Err(ApiError::invalid("`assignee` contains a control character"));
    }
    let is_part = |c: char| c.is_ascii_hexdigit() || c == '-';
    if query.id_prefix.as_ref().is_some_and(|prefix| !prefix.chars().all(is_part)) {
        return Err(ApiError::invalid("`id_prefix` must be hexadecimal digits and dashes"));
    }
    let filter = TicketFilter {
        status: status.transpose()?,
        user_id: query.user_id,
        handed_over: query.handed_over,
        assignee: query.assignee,
        unassigned: query.unassigned.unwrap_or_default(),
        id_prefix: query.id_prefix.map(|prefix| prefix.to_lowercase()),
        after: query.cursor,
        oldest_first: query.oldest_first,
    };
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    if let Some(words) = query.words {
        let words = TicketWords::parse(&words)?;
        return search(&app, &filter, &words, limit, query.count).await;
    }
    let counting = async {
        match query.count {
            true => {
                list_counts::or_unknown(list_counts::tickets(app.store.as_ref(), &filter).await)
            }
            false => Ok(None),
        }
    };
    let (tickets, matching) = tokio::join!(app.tickets.list(&filter, limit), counting);
    let (tickets, matching) = (tickets?, matching?);
    let next_cursor = tickets.last().filter(|_| tickets.len() == limit).map(|ticket| ticket.number);
    Ok(Json(TicketPage {
        tickets: tickets.iter().map(ticket_to_dto).collect(),
        next_cursor,
        matching,
        searched: None,
    }))
}

/// A page of the tickets of a list that have one of the words.
async fn search(
    app: &App,
    filter: &TicketFilter,
    words: &TicketWords,
    limit: usize,
    counts: bool,
) -> JsonResult<TicketPage> {
    let searching = app.tickets.search_list(filter, words, limit);
    let found = timeout(SEARCH_TIMEOUT, searching).await.map_err(|_| {
        let seconds = SEARCH_TIMEOUT.as_secs();
        let message =
            format!("the search took longer than {seconds} s; narrow it, for example to a user");
        ApiError::unavailable(message)
    })??;
    Ok(Json(TicketPage {
        tickets: found.tickets.iter().map(ticket_to_dto).collect(),
        next_cursor: found.next,
        matching: counts.then_some(found.matching),
        searched: Some(found.searched),
    }))
}

/// Page of messages.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TicketMessagesQuery {
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// `previous_cursor` of a later page: the newest messages before it, oldest first. Not together with `cursor`.
    before: Option<i64>,
    /// Maximum number: 50 by default, 200 at most.
    limit: Option<usize>,
}

/// What to show of a ticket.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TicketShowQuery {
    /// Also the text so far of the answer that the model is writing, for callers that ask every second. Others use
    /// `/tickets/{id}/events`.
    provisional: Option<bool>,
    /// The newest messages instead of the first ones.
    newest: Option<bool>,
}

/// A ticket with its first or newest messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketResponse {
    #[serde(flatten)]
    ticket: TicketDto,
    usage: UsageDto,
    /// With `provisional=true`: the text so far of the answer that the model is writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    provisional: Option<String>,
    messages: Vec<TicketMessageDto>,
    /// Cursor of further messages: pass it to `/messages`.
    next_cursor: Option<i64>,
    /// With `newest=true`: cursor of earlier messages, or `null`: pass it to `/messages` as `before`.
    #[serde(skip_serializing_if = "Option::is_none")]
    previous_cursor: Option<i64>,
}

/// Show a ticket with its first or newest messages.
#[utoipa::path(get, path = "/tickets/{id}", tag = "tickets", params(("id" = Uuid, Path), TicketShowQuery),
    responses((status = 200, body = TicketResponse), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
    QueryParams(query): QueryParams<TicketShowQuery>,
) -> JsonResult<TicketResponse> {
    let ticket = app.tickets.ticket(id).await?.ok_or(TicketError::NotFound(id))?;
    let read = async {
        match query.newest {
            Some(true) => earlier_messages(&app, id, i64::MAX, PAGE_MAX).await,
            _ => message_page(&app, id, 0, PAGE_MAX).await,
        }
    };
    let (page, usage) = tokio::join!(read, app.tickets.issue_usage(ticket.issue_id));
    let (page, usage) = (page?, usage?.into());
    let TicketMessagePage { messages, next_cursor, previous_cursor } = page;
    let ticket = ticket_to_dto(&ticket);
    let is_shown = query.provisional.unwrap_or_default();
    let provisional = is_shown.then(|| app.provisional.peek(id)).flatten();
    // Its message has replaced it.
    let is_posted = |found: &ProvisionalAnswer| {
        messages.iter().any(|message| message.message_id == found.message_id)
    };
    let provisional = provisional.filter(|found| !is_posted(found)).and_then(|found| found.content);
    Ok(Json(TicketResponse { ticket, usage, provisional, messages, next_cursor, previous_cursor }))
}

/// A page of messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketMessagePage {
    messages: Vec<TicketMessageDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
    /// With `before`: cursor of earlier messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    previous_cursor: Option<i64>,
}

/// List the messages of a ticket, oldest first.
#[utoipa::path(get, path = "/tickets/{id}/messages", tag = "tickets", params(("id" = Uuid, Path), TicketMessagesQuery),
    responses((status = 200, body = TicketMessagePage), (status = 404)))]
async fn messages(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
    QueryParams(query): QueryParams<TicketMessagesQuery>,
) -> JsonResult<TicketMessagePage> {
    app.tickets.ticket(id).await?.ok_or(TicketError::NotFound(id))?;
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let page = match (query.cursor, query.before) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("give `cursor` or `before`, not both"));
        }
        (None, Some(before)) => earlier_messages(&app, id, before, limit).await,
        (cursor, None) => message_page(&app, id, cursor.unwrap_or(0), limit).await,
    };
    page.map(Json)
}

async fn message_page(
    app: &App,
    id: Uuid,
    after: i64,
    limit: usize,
) -> Result<TicketMessagePage, ApiError> {
    let mut messages = app.tickets.messages(id, after, limit).await?;
    let next = messages.last().filter(|_| messages.len() == limit).map(|message| message.seq);
    sort_imported(&mut messages, |message| message.entry.clone());
    Ok(TicketMessagePage {
        messages: messages.iter().map(message_to_dto).collect(),
        next_cursor: next,
        previous_cursor: None,
    })
}

/// The newest messages before a sequence number, oldest first.
async fn earlier_messages(
    app: &App,
    id: Uuid,
    before: i64,
    limit: usize,
) -> Result<TicketMessagePage, ApiError> {
    // One more, to know whether there are earlier ones.
    let mut messages = app.tickets.messages_before(id, before, limit + 1).await?;
    let has_earlier = messages.len() > limit;
    messages.drain(..messages.len().saturating_sub(limit));
    let previous = messages.first().filter(|_| has_earlier).map(|message| message.seq);
    sort_imported(&mut messages, |message| message.entry.clone());
    Ok(TicketMessagePage {
        messages: messages.iter().map(message_to_dto).collect(),
        next_cursor: None,
        previous_cursor: previous,
    })
}

/// Result of a status change.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketStatusResponse {
    ticket_id: Uuid,
    /// `open` or `closed`.
    status: &'static str,
    /// Whether the status was different before.
    changed: bool,
}

/// Close a ticket.
#[utoipa::path(post, path = "/tickets/{id}/close", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = TicketStatusResponse), (status = 404)))]
async fn close(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
) -> JsonResult<TicketStatusResponse> {
    let changed = app.tickets.close(id).await?;
    Ok(Json(TicketStatusResponse { ticket_id: id, status: "closed", changed }))
}

/// Reopen a closed ticket.
#[utoipa::path(post, path = "/tickets/{id}/reopen", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = TicketStatusResponse), (status = 404)))]
async fn reopen(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
) -> JsonResult<TicketStatusResponse> {
    let changed = app.tickets.reopen(id).await?;
    Ok(Json(TicketStatusResponse { ticket_id: id, status: "open", changed }))
}

/// Result of an assignment.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketAssignedResponse {
    #[serde(flatten)]
    ticket: TicketDto,
    /// Whether the assignee was different before.
    changed: bool,
}

/// A new assignee.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AssignTicketRequest {
    /// Name of the person.
    assignee: String,
}

/// Take a ticket that is handed over, under the name of the token.
#[utoipa::path(post, path = "/tickets/{id}/take", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = TicketAssignedResponse), (status = 404),
        (status = 409, description = "`not_handed_over`: the desk answers it. `assigned`: another person has taken it.")))]
async fn take(
    State(app): State<App>,
    principal: Principal,
    PathParams(id): PathParams<Uuid>,
) -> JsonResult<TicketAssignedResponse> {
    change_assignee(&app, id, TicketAssignment::Take(principal.name)).await
}

/// Assign a ticket that is handed over to a person, whoever has it.
#[utoipa::path(post, path = "/tickets/{id}/assign", tag = "tickets", params(("id" = Uuid, Path)), request_body = AssignTicketRequest,
    responses((status = 200, body = TicketAssignedResponse), (status = 404),
        (status = 409, description = "`not_handed_over`: the desk answers it.")))]
async fn assign(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
    JsonBody(body): JsonBody<AssignTicketRequest>,
) -> JsonResult<TicketAssignedResponse> {
    change_assignee(&app, id, TicketAssignment::Assign(body.assignee)).await
}

/// Assign a ticket that is handed over to nobody.
#[utoipa::path(post, path = "/tickets/{id}/unassign", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = TicketAssignedResponse), (status = 404),
        (status = 409, description = "`not_handed_over`: the desk answers it.")))]
async fn unassign(
    State(app): State<App>,
    PathParams(id): PathParams<Uuid>,
) -> JsonResult<TicketAssignedResponse> {
    change_assignee(&app, id, TicketAssignment::Unassign).await
}

async fn change_assignee(
    app: &App,
    id: Uuid,
    assignment: TicketAssignment,
) -> JsonResult<TicketAssignedResponse> {
    let AssignedTicket { ticket, changed } = app.tickets.assign(id, assignment).await?;
    Ok(Json(TicketAssignedResponse { ticket: ticket_to_dto(&ticket), changed }))
}

/// Explain why a ticket has no answer: inbox, wait, claim, run, model, hand-over, outbox.
#[utoipa::path(get, path = "/tickets/{id}/why", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = WhyResponse), (status = 404)))]
async fn why(State(app): State<App>, PathParams(id): PathParams<Uuid>) -> JsonResult<WhyResponse> {
    Ok(Json(why::of_ticket(&app, id).await?))
}

/// A ticket.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketDto {
    ticket_id: Uuid,
    issue_id: i64,
    title: String,
    user_id: Option<String>,
    /// `open` or `closed`.
    status: &'static str,
    /// Whether a person has taken over.
    handed_over: bool,
    /// Since when; `null` if it is not handed over.
    handed_over_at: Option<String>,
    /// Why it was handed over.
    hand_over_reason: Option<String>,
    /// The person who answers it; `null` if nobody has taken it.
    assignee: Option<String>,
    created_at: String,
    updated_at: String,
}

/// Converts a ticket to JSON.
pub(crate) fn ticket_to_dto(ticket: &Ticket) -> TicketDto {
    TicketDto {
        ticket_id: ticket.ticket_id,
        issue_id: ticket.issue_id.0,
        title: ticket.title.clone(),
        user_id: ticket.user_id.clone(),
        status: ticket.status.as_str(),
        handed_over: ticket.handed_over,
        handed_over_at: ticket.handed_over_at.map(|at| at.to_rfc3339()),
        hand_over_reason: ticket.hand_over_reason.clone(),
        assignee: ticket.assignee.clone(),
        created_at: ticket.created_at.to_rfc3339(),
        updated_at: ticket.updated_at.to_rfc3339(),
    }
}

/// A message of a ticket.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketMessageDto {
    message_id: Uuid,
    /// `user`, `agent` or `assistant`.
    author: &'static str,
    /// Name of the agent, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
    content: String,
    created_at: String,
}

/// Converts a message to JSON.
pub(crate) fn message_to_dto(message: &TicketMessage) -> TicketMessageDto {
    TicketMessageDto {
        message_id: message.message_id,
        author: message.author.as_str(),
        agent: message.agent.clone(),
        content: message.content.clone(),
        created_at: message.created_at.to_rfc3339(),
    }
}

impl From<TicketError> for ApiError {
    fn from(problem: TicketError) -> Self {
        match problem {
            TicketError::Invalid(problem) => Self::invalid(problem),
            TicketError::NotFound(_) => Self::not_found(problem.to_string()),
            TicketError::Conflict(_) => {
                Self::new(StatusCode::CONFLICT, "conflict", problem.to_string())
            }
            TicketError::NotHandedOver(_) => {
                Self::new(StatusCode::CONFLICT, "not_handed_over", problem.to_string())
            }
            TicketError::Assigned { .. } => {
                Self::new(StatusCode::CONFLICT, "assigned", problem.to_string())
            }
            TicketError::SearchesBusy(_) => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "busy", problem.to_string())
                    .retry_after(BUSY_RETRY_AFTER)
            }
            TicketError::Issue(problem) => problem.into(),
        }
    }
}
