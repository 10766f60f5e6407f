//! Server-sent events of one ticket: its messages and its status.
//!
//! Upstream: `tickets.rs`. Downstream: `tickets`. Guarantees: a client receives every message once and in order,
//! starting with the first or after `Last-Event-ID`; messages of other processes arrive within a second. The stream
//! ends at shutdown. In-process change notifications reduce latency; polling guarantees delivery.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::time::sleep;
use tracing::warn;
use uuid::Uuid;

use crate::api::tickets::message_to_dto;
use crate::http::ApiError;
use crate::http::extract::PathParams;
use crate::limits::{LISTENERS_MAX, PAGE_MAX};
use crate::server::app_state::App;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::tickets::{Ticket, TicketError, TicketStatus, Tickets};

/// Poll interval for changes made by other processes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Keep-alive interval of an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Limits open event streams of this process.
#[derive(Clone, Debug)]
pub(crate) struct SseListeners(Arc<Semaphore>);

impl Default for SseListeners {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LISTENERS_MAX)))
    }
}

/// One open event stream.
struct TicketEventStream {
    tickets: Tickets,
    ticket_id: Uuid,
    changes: broadcast::Receiver<Uuid>,
    after: i64,
    last_status: Option<(TicketStatus, bool)>,
    ready: VecDeque<Event>,
    shutdown: ShutdownSignal,
    _permit: OwnedSemaphorePermit,
}

/// Stream messages and status changes as server-sent events; `Last-Event-ID` resumes an earlier stream.
#[utoipa::path(get, path = "/tickets/{id}/events", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, content_type = "text/event-stream", body = String), (status = 404),
        (status = 503, description = "Too many open event streams.")))]
pub(crate) async fn listen(
    State(app): State<App>,
    PathParams(ticket_id): PathParams<Uuid>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let after = match headers.get("last-event-id") {
        None => 0,
        Some(id) => {
            let number = id.to_str().ok().and_then(|id| id.parse().ok());
            number.ok_or_else(|| ApiError::invalid("invalid `Last-Event-ID`"))?
        }
    };
    app.tickets.ticket(ticket_id).await?.ok_or(TicketError::NotFound(ticket_id))?;
    let permit = Arc::clone(&app.listeners.0).try_acquire_owned().map_err(|_| {
        let message = format!("{LISTENERS_MAX} event streams are open; try again later");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_listeners", message)
            .retry_after(Duration::from_secs(5))
    })?;
    let events_of_ticket = TicketEventStream {
        // Subscribed before the first poll, so that no change is missed.
        changes: app.tickets.changes(),
        tickets: app.tickets.clone(),
        ticket_id,
        after,
        last_status: None,
        ready: VecDeque::new(),
        shutdown: app.shutdown.clone(),
        _permit: permit,
    };
    let events = stream::unfold(events_of_ticket, |events_of_ticket| async {
        events_of_ticket.next().await.map(|(event, events_of_ticket)| (Ok(event), events_of_ticket))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

impl TicketEventStream {
    async fn next(mut self) -> Option<(Event, Self)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some((event, self));
            }
            if self.shutdown.is_triggered() {
                return None;
            }
            if let Err(error) = self.poll().await {
                warn!(ticket_id = %self.ticket_id, %error, "database unavailable, ticket event stream waits");
                self.ready.clear();
                sleep(POLL_INTERVAL).await;
            } else if self.ready.is_empty() {
                self.wait().await;
            }
        }
    }

    /// Reads all changes: messages first, so that a status never precedes the messages that caused it.
    async fn poll(&mut self) -> Result<(), TicketError> {
        let ticket = self.tickets.ticket(self.ticket_id).await?;
        let messages = self.tickets.messages(self.ticket_id, self.after, PAGE_MAX).await?;
        for message in &messages {
            let data = json!(message_to_dto(message)).to_string();
            self.ready.push_back(
                Event::default().event("message").id(message.seq.to_string()).data(data),
            );
            self.after = message.seq;
        }
        if let Some(Ticket { status, handed_over, .. }) = ticket
            && self.last_status != Some((status, handed_over))
        {
            self.last_status = Some((status, handed_over));
            let data = json!({"status": status.as_str(), "handed_over": handed_over}).to_string();
            self.ready.push_back(Event::default().event("status").data(data));
        }
        Ok(())
    }

    async fn wait(&mut self) {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            () = shutdown.wait() => {}
            () = sleep(POLL_INTERVAL) => {}
            () = changed(&mut self.changes, self.ticket_id) => {}
        }
    }
}

/// Waits until this process changes the ticket, or until notifications were missed. Cancel-safe.
async fn changed(changes: &mut broadcast::Receiver<Uuid>, ticket_id: Uuid) {
    loop {
        match changes.recv().await {
            Ok(other) if other != ticket_id => {}
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => return,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}
