//! Tickets over HTTP: create, list, show, post, close, reopen.
//!
//! Upstream: `router`, behind access and the audit log. Downstream: `tickets`.
//! Promises: a call that is repeated with the same `message_id` changes nothing and gets the same ids; what is wrong is
//! refused before anything happens. Texts are shown as they were written, in JSON.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::tickets_sse;
use crate::http::ApiError;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::http::paging;
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::server::app_state::App;
use crate::tickets::Author;
use crate::tickets::{
    NewTicket, NewTicketMessage, Posted, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus,
};

/// Below `/api/v1`.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show))
        .routes(routes!(messages, add))
        .routes(routes!(close))
        .routes(routes!(reopen))
        .routes(routes!(tickets_sse::listen))
}

/// A ticket to open.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateBody {
    title: String,
    /// Its first message.
    content: String,
    user_id: Option<String>,
    /// The same at every try.
    message_id: Option<Uuid>,
}

/// Opens a ticket.
#[utoipa::path(post, path = "/tickets", tag = "tickets", request_body = CreateBody,
    responses((status = 201, body = PostedView), (status = 200, body = PostedView, description = "It was there before."),
        (status = 409, description = "The `message_id` belongs to something else.")))]
async fn create(
    State(app): State<App>,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, Json<PostedView>), ApiError> {
    let CreateBody { title, content, user_id, message_id } = body;
    let new = NewTicket { title, content, user_id, message_id };
    Ok(posted(app.tickets.create(new).await?))
}

/// A message to add.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageBody {
    content: String,
    /// `user` by default; what a person of ours writes is of an `agent`.
    #[schema(value_type = Option<String>)]
    author: Option<Author>,
    /// The same at every try.
    message_id: Option<Uuid>,
}

/// Adds a message to a ticket.
#[utoipa::path(post, path = "/tickets/{id}/messages", tag = "tickets", params(("id" = Uuid, Path)), request_body = MessageBody,
    responses((status = 201, body = PostedView), (status = 200, body = PostedView, description = "It was there before."),
        (status = 404), (status = 409, description = "The `message_id` belongs to something else.")))]
async fn add(
    State(app): State<App>,
    PathOf(id): PathOf<Uuid>,
    JsonBody(body): JsonBody<MessageBody>,
) -> Result<(StatusCode, Json<PostedView>), ApiError> {
    let MessageBody { content, author, message_id } = body;
    let author = author.unwrap_or(Author::User);
    let new = NewTicketMessage { content, author, message_id };
    Ok(posted(app.tickets.post(id, new).await?))
}

/// What was stored.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PostedView {
    ticket_id: Uuid,
    message_id: Uuid,
    issue_id: i64,
    /// Whether it was there before.
    duplicate: bool,
}

/// 201; or 200 for what was there before.
fn posted(posted: Posted) -> (StatusCode, Json<PostedView>) {
    let status = if posted.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    let Posted { ticket_id, message_id, issue_id, duplicate, .. } = posted;
    (status, Json(PostedView { ticket_id, message_id, issue_id: issue_id.0, duplicate }))
}

/// Which tickets.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// `open` or `closed`.
    status: Option<String>,
    user_id: Option<String>,
    /// `next_cursor` of the page before.
    cursor: Option<i64>,
    /// At most this many; 50 by default, 200 at most.
    limit: Option<usize>,
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketPage {
    tickets: Vec<TicketView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// Tickets, newest first.
#[utoipa::path(get, path = "/tickets", tag = "tickets", params(ListQuery), responses((status = 200, body = TicketPage)))]
async fn list(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Answer<TicketPage> {
    let status = query.status.as_deref().map(|name| {
        TicketStatus::parse(name)
            .ok_or_else(|| ApiError::invalid("`status` must be `open` or `closed`"))
    });
    if query.user_id.as_ref().is_some_and(|user| user.contains('\0')) {
        return Err(ApiError::invalid("`user_id` holds a control character"));
    }
    let filter =
        TicketFilter { status: status.transpose()?, user_id: query.user_id, before: query.cursor };
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let tickets = app.tickets.list(&filter, limit).await?;
    let next = tickets.last().filter(|_| tickets.len() == limit).map(|ticket| ticket.number);
    Ok(Json(TicketPage { tickets: tickets.iter().map(describe).collect(), next_cursor: next }))
}

/// Which messages.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MessagesQuery {
    /// `next_cursor` of the page before.
    cursor: Option<i64>,
    /// At most this many; 50 by default, 200 at most.
    limit: Option<usize>,
}

/// A ticket with messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketWithMessages {
    #[serde(flatten)]
    ticket: TicketView,
    messages: Vec<TicketMessageView>,
    /// Leads to the messages that follow: pass it as `cursor` to `/messages`.
    next_cursor: Option<i64>,
}

/// A ticket with its first messages; the cursor leads to those that follow.
#[utoipa::path(get, path = "/tickets/{id}", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = TicketWithMessages), (status = 404)))]
async fn show(State(app): State<App>, PathOf(id): PathOf<Uuid>) -> Answer<TicketWithMessages> {
    let ticket = app.tickets.ticket(id).await?.ok_or(TicketError::NotFound(id))?;
    let TicketMessagePage { messages, next_cursor } = page_of(&app, id, 0, PAGE_MAX).await?;
    Ok(Json(TicketWithMessages { ticket: describe(&ticket), messages, next_cursor }))
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketMessagePage {
    messages: Vec<TicketMessageView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// The messages of a ticket, oldest first.
#[utoipa::path(get, path = "/tickets/{id}/messages", tag = "tickets", params(("id" = Uuid, Path), MessagesQuery),
    responses((status = 200, body = TicketMessagePage), (status = 404)))]
async fn messages(
    State(app): State<App>,
    PathOf(id): PathOf<Uuid>,
    QueryOf(query): QueryOf<MessagesQuery>,
) -> Answer<TicketMessagePage> {
    app.tickets.ticket(id).await?.ok_or(TicketError::NotFound(id))?;
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    page_of(&app, id, query.cursor.unwrap_or(0), limit).await.map(Json)
}

async fn page_of(
    app: &App,
    id: Uuid,
    after: i64,
    limit: usize,
) -> Result<TicketMessagePage, ApiError> {
    let messages = app.tickets.messages(id, after, limit).await?;
    let next = messages.last().filter(|_| messages.len() == limit).map(|message| message.seq);
    Ok(TicketMessagePage {
        messages: messages.iter().map(describe_message).collect(),
        next_cursor: next,
    })
}

/// What a change of the status did.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StatusChange {
    ticket_id: Uuid,
    /// `open` or `closed`.
    status: &'static str,
    /// Whether it was something else before.
    changed: bool,
}

/// Closes a ticket.
#[utoipa::path(post, path = "/tickets/{id}/close", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = StatusChange), (status = 404)))]
async fn close(State(app): State<App>, PathOf(id): PathOf<Uuid>) -> Answer<StatusChange> {
    let changed = app.tickets.close(id).await?;
    Ok(Json(StatusChange { ticket_id: id, status: "closed", changed }))
}

/// Opens a closed ticket again.
#[utoipa::path(post, path = "/tickets/{id}/reopen", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, body = StatusChange), (status = 404)))]
async fn reopen(State(app): State<App>, PathOf(id): PathOf<Uuid>) -> Answer<StatusChange> {
    let changed = app.tickets.reopen(id).await?;
    Ok(Json(StatusChange { ticket_id: id, status: "open", changed }))
}

/// A ticket.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketView {
    ticket_id: Uuid,
    issue_id: i64,
    title: String,
    user_id: Option<String>,
    /// `open` or `closed`.
    status: &'static str,
    /// Whether a person has taken over.
    handed_over: bool,
    created_at: String,
    updated_at: String,
}

fn describe(ticket: &Ticket) -> TicketView {
    TicketView {
        ticket_id: ticket.ticket_id,
        issue_id: ticket.issue_id.0,
        title: ticket.title.clone(),
        user_id: ticket.user_id.clone(),
        status: ticket.status.as_str(),
        handed_over: ticket.handed_over,
        created_at: ticket.created_at.to_rfc3339(),
        updated_at: ticket.updated_at.to_rfc3339(),
    }
}

/// A message of a ticket.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TicketMessageView {
    message_id: Uuid,
    author: &'static str,
    content: String,
    created_at: String,
}

/// A message as everybody sees it.
pub(crate) fn describe_message(message: &TicketMessage) -> TicketMessageView {
    TicketMessageView {
        message_id: message.message_id,
        author: message.author.as_str(),
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
            TicketError::Issue(problem) => problem.into(),
        }
    }
}
