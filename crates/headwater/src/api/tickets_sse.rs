//! Server-sent events of one ticket: its messages as they come, and its status.
//!
//! Upstream: `ticket_routes`. Downstream: `tickets`. Promises: a listener gets every message once and in order, those that were
//! there before included, or those after `Last-Event-ID`; other processes' messages within a second. It ends with the server.
//! The wake-up inside this process is a hint; looking again is the guarantee.

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

use crate::api::tickets::describe_message;
use crate::http::ApiError;
use crate::http::extract::PathOf;
use crate::limits::{LISTENERS_MAX, PAGE_MAX};
use crate::server::app_state::App;
use crate::server::shutdown::Stopping;
use crate::tickets::{Ticket, TicketError, TicketStatus, Tickets};

/// How often to look for what other processes did.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often a silent connection is kept alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Listeners of this process.
#[derive(Clone, Debug)]
pub(crate) struct Listeners(Arc<Semaphore>);

impl Default for Listeners {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LISTENERS_MAX)))
    }
}

/// One listener.
struct Listening {
    tickets: Tickets,
    ticket_id: Uuid,
    changes: broadcast::Receiver<Uuid>,
    after: i64,
    told: Option<(TicketStatus, bool)>,
    ready: VecDeque<Event>,
    stopping: Stopping,
    _place: OwnedSemaphorePermit,
}

/// Messages and changes of status as they come, as server-sent events; `Last-Event-ID` goes on where another ended.
#[utoipa::path(get, path = "/tickets/{id}/events", tag = "tickets", params(("id" = Uuid, Path)),
    responses((status = 200, content_type = "text/event-stream", body = String), (status = 404),
        (status = 503, description = "Too many listen already.")))]
pub(crate) async fn listen(
    State(app): State<App>,
    PathOf(ticket_id): PathOf<Uuid>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let after = match headers.get("last-event-id") {
        None => 0,
        Some(id) => {
            let number = id.to_str().ok().and_then(|id| id.parse().ok());
            number.ok_or_else(|| ApiError::invalid("`Last-Event-ID` is not one of ours"))?
        }
    };
    app.tickets.ticket(ticket_id).await?.ok_or(TicketError::NotFound(ticket_id))?;
    let place = Arc::clone(&app.listeners.0).try_acquire_owned().map_err(|_| {
        let message = format!("more than {LISTENERS_MAX} listen already; try again later");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_listeners", message)
            .retry_after(Duration::from_secs(5))
    })?;
    let listening = Listening {
        // Before the first look, so that nothing falls between.
        changes: app.tickets.changes(),
        tickets: app.tickets.clone(),
        ticket_id,
        after,
        told: None,
        ready: VecDeque::new(),
        stopping: app.stopping.clone(),
        _place: place,
    };
    let events = stream::unfold(listening, |listening| async {
        listening.next().await.map(|(event, listening)| (Ok(event), listening))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

impl Listening {
    async fn next(mut self) -> Option<(Event, Self)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some((event, self));
            }
            if self.stopping.has_begun() {
                return None;
            }
            if let Err(error) = self.look().await {
                warn!(ticket_id = %self.ticket_id, %error, "a listener waits for the database");
                self.ready.clear();
                sleep(LOOK_EVERY).await;
            } else if self.ready.is_empty() {
                self.wait().await;
            }
        }
    }

    /// Everything that is new: messages first, so that a status never comes before what led to it.
    async fn look(&mut self) -> Result<(), TicketError> {
        let ticket = self.tickets.ticket(self.ticket_id).await?;
        let messages = self.tickets.messages(self.ticket_id, self.after, PAGE_MAX).await?;
        for message in &messages {
            let data = json!(describe_message(message)).to_string();
            self.ready.push_back(
                Event::default().event("message").id(message.seq.to_string()).data(data),
            );
            self.after = message.seq;
        }
        if let Some(Ticket { status, handed_over, .. }) = ticket
            && self.told != Some((status, handed_over))
        {
            self.told = Some((status, handed_over));
            let data = json!({"status": status.as_str(), "handed_over": handed_over}).to_string();
            self.ready.push_back(Event::default().event("status").data(data));
        }
        Ok(())
    }

    async fn wait(&mut self) {
        let stopping = self.stopping.clone();
        tokio::select! {
            () = stopping.begun() => {}
            () = sleep(LOOK_EVERY) => {}
            () = changed(&mut self.changes, self.ticket_id) => {}
        }
    }
}

/// Returns when the ticket was changed by this process, or when so much was that nobody knows. Cancel-safe.
async fn changed(changes: &mut broadcast::Receiver<Uuid>, ticket_id: Uuid) {
    loop {
        match changes.recv().await {
            Ok(other) if other != ticket_id => {}
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => return,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}
