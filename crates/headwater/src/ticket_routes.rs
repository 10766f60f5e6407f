//! Tickets over HTTP: create, list, show, post, close, reopen.
//!
//! Upstream: `router`, behind access and the audit log. Downstream: `tickets`.
//! Promises: a call that is repeated with the same `message_id` changes nothing and gets the same ids; what is wrong is
//! refused before anything happens. Texts are shown as they were written, in JSON.

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::app::App;
use crate::http::ApiError;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::ticket_events::Author;
use crate::ticket_listening;
use crate::tickets::{
    NewTicket, NewTicketMessage, Posted, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus,
};

/// Below `/api/v1`.
pub(crate) fn routes() -> Router<App> {
    Router::new()
        .route("/tickets", get(list).post(create))
        .route("/tickets/{id}", get(show))
        .route("/tickets/{id}/messages", get(messages).post(add))
        .route("/tickets/{id}/close", post(close))
        .route("/tickets/{id}/reopen", post(reopen))
        .route("/tickets/{id}/events", get(ticket_listening::listen))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateBody {
    title: String,
    content: String,
    user_id: Option<String>,
    message_id: Option<Uuid>,
}

async fn create(
    State(app): State<App>,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let CreateBody { title, content, user_id, message_id } = body;
    let new = NewTicket { title, content, user_id, message_id };
    Ok(posted(app.tickets.create(new).await?))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageBody {
    content: String,
    author: Option<Author>,
    message_id: Option<Uuid>,
}

async fn add(
    State(app): State<App>,
    PathOf(id): PathOf<Uuid>,
    JsonBody(body): JsonBody<MessageBody>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let MessageBody { content, author, message_id } = body;
    let author = author.unwrap_or(Author::User);
    let new = NewTicketMessage { content, author, message_id };
    Ok(posted(app.tickets.post(id, new).await?))
}

/// 201; or 200 for what was there before.
fn posted(posted: Posted) -> (StatusCode, Json<Value>) {
    let status = if posted.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    let body = json!({
        "ticket_id": posted.ticket_id, "message_id": posted.message_id,
        "issue_id": posted.issue_id.0, "duplicate": posted.duplicate,
    });
    (status, Json(body))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    status: Option<String>,
    user_id: Option<String>,
    cursor: Option<i64>,
    limit: Option<usize>,
}

async fn list(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Answer<Value> {
    let status = query.status.as_deref().map(|name| {
        TicketStatus::parse(name)
            .ok_or_else(|| ApiError::invalid("`status` must be `open` or `closed`"))
    });
    if query.user_id.as_ref().is_some_and(|user| user.contains('\0')) {
        return Err(ApiError::invalid("`user_id` holds a control character"));
    }
    let filter =
        TicketFilter { status: status.transpose()?, user_id: query.user_id, before: query.cursor };
    let limit = page(query.limit)?;
    let tickets = app.tickets.list(&filter, limit).await?;
    let next = tickets.last().filter(|_| tickets.len() == limit).map(|ticket| ticket.number);
    let tickets: Vec<_> = tickets.iter().map(describe).collect();
    Ok(Json(json!({"tickets": tickets, "next_cursor": next})))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessagesQuery {
    cursor: Option<i64>,
    limit: Option<usize>,
}

/// A ticket with its first messages; the cursor leads to those that follow.
async fn show(State(app): State<App>, PathOf(id): PathOf<Uuid>) -> Answer<Value> {
    let ticket = app.tickets.ticket(id).await?.ok_or(TicketError::NotFound(id))?;
    let (messages, next) = page_of(&app, id, 0, PAGE_MAX).await?;
    let mut body = describe(&ticket);
    body["messages"] = messages;
    body["next_cursor"] = next;
    Ok(Json(body))
}

async fn messages(
    State(app): State<App>,
    PathOf(id): PathOf<Uuid>,
    QueryOf(query): QueryOf<MessagesQuery>,
) -> Answer<Value> {
    app.tickets.ticket(id).await?.ok_or(TicketError::NotFound(id))?;
    let limit = page(query.limit)?;
    let (messages, next) = page_of(&app, id, query.cursor.unwrap_or(0), limit).await?;
    Ok(Json(json!({"messages": messages, "next_cursor": next})))
}

async fn page_of(
    app: &App,
    id: Uuid,
    after: i64,
    limit: usize,
) -> Result<(Value, Value), ApiError> {
    let messages = app.tickets.messages(id, after, limit).await?;
    let next = messages.last().filter(|_| messages.len() == limit).map(|message| message.seq);
    Ok((messages.iter().map(describe_message).collect(), json!(next)))
}

async fn close(State(app): State<App>, PathOf(id): PathOf<Uuid>) -> Answer<Value> {
    let changed = app.tickets.close(id).await?;
    Ok(Json(json!({"ticket_id": id, "status": "closed", "changed": changed})))
}

async fn reopen(State(app): State<App>, PathOf(id): PathOf<Uuid>) -> Answer<Value> {
    let changed = app.tickets.reopen(id).await?;
    Ok(Json(json!({"ticket_id": id, "status": "open", "changed": changed})))
}

fn page(limit: Option<usize>) -> Result<usize, ApiError> {
    let limit = limit.unwrap_or(PAGE_DEFAULT);
    if (1..=PAGE_MAX).contains(&limit) {
        return Ok(limit);
    }
    Err(ApiError::invalid(format!("`limit` must be from 1 to {PAGE_MAX}")))
}

fn describe(ticket: &Ticket) -> Value {
    json!({
        "ticket_id": ticket.ticket_id,
        "issue_id": ticket.issue_id.0,
        "title": ticket.title,
        "user_id": ticket.user_id,
        "status": ticket.status.as_str(),
        "handed_over": ticket.handed_over,
        "created_at": ticket.created_at.to_rfc3339(),
        "updated_at": ticket.updated_at.to_rfc3339(),
    })
}

/// A message as everybody sees it.
pub(crate) fn describe_message(message: &TicketMessage) -> Value {
    json!({
        "message_id": message.message_id,
        "author": message.author.as_str(),
        "content": message.content,
        "created_at": message.created_at.to_rfc3339(),
    })
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
