//! Server-sent events of one ticket: its messages, its status, and the answer that is being written.
//!
//! Upstream: `tickets.rs`. Downstream: `tickets`, `desk/provisional.rs`. Guarantees: a client receives every message once and in order,
//! starting with the first or after `Last-Event-ID`; messages of other processes arrive within a second. The stream
//! ends at shutdown. In-process change notifications reduce latency; polling guarantees delivery: one query per second for all
//! open streams of the process, and two more for a ticket that changed. A provisional text is withdrawn before the message that
//! replaces it, and at the latest when its writer was silent for some seconds.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;
use uuid::Uuid;

use crate::api::tickets::message_to_dto;
use crate::desk::provisional::{EXPIRES_AFTER, ProvisionalAnswer, ProvisionalListener};
use crate::http::ApiError;
use crate::http::extract::PathParams;
use crate::limits::{LISTENERS_MAX, PAGE_MAX};
use crate::server::app_state::App;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::tickets::{Author, Ticket, TicketError, TicketStatus, Tickets};

/// Poll interval for changes made by other processes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Keep-alive interval of an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Open event streams of this process: their limit, and the poll that they share.
#[derive(Clone, Debug)]
pub(crate) struct SseListeners {
    permits: Arc<Semaphore>,
    watched: Arc<Mutex<WatchedTickets>>,
}

#[derive(Debug, Default)]
struct WatchedTickets {
    /// Number of event streams of each ticket.
    streams: HashMap<Uuid, usize>,
    /// Whether the poll runs. It ends when no stream is open.
    is_polling: bool,
}

impl Default for SseListeners {
    fn default() -> Self {
        Self { permits: Arc::new(Semaphore::new(LISTENERS_MAX)), watched: Arc::default() }
    }
}

impl SseListeners {
    fn lock(&self) -> MutexGuard<'_, WatchedTickets> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a ticket until the result is dropped; `None` at the limit.
    fn watch(&self, tickets: &Tickets, ticket_id: Uuid) -> Option<WatchedTicket> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let mut watched = self.lock();
        *watched.streams.entry(ticket_id).or_default() += 1;
        if !std::mem::replace(&mut watched.is_polling, true) {
            tokio::spawn(self.clone().poll(tickets.clone()));
        }
        drop(watched);
        Some(WatchedTicket { listeners: self.clone(), ticket_id, _permit: permit })
    }

    /// Notifies the streams of tickets that other processes changed, until no stream is open.
    async fn poll(self, tickets: Tickets) {
        let mut known = HashMap::new();
        loop {
            sleep(POLL_INTERVAL).await;
            let watched: Vec<Uuid> = {
                let mut watched = self.lock();
                watched.is_polling = !watched.streams.is_empty();
                if !watched.is_polling {
                    return;
                }
                watched.streams.keys().copied().collect()
            };
            let versions = match tickets.versions(&watched).await {
                Ok(versions) => HashMap::<_, _>::from_iter(versions),
                Err(error) => {
                    warn!(%error, "database unavailable, ticket event streams wait");
                    continue;
                }
            };
            // A ticket that is new here counts as changed: it may have changed after its stream read it.
            for (ticket_id, version) in &versions {
                if known.get(ticket_id) != Some(version) {
                    tickets.notify_changed(*ticket_id);
                }
            }
            known = versions;
        }
    }
}

/// A ticket that is watched for one event stream.
#[derive(Debug)]
struct WatchedTicket {
    listeners: SseListeners,
    ticket_id: Uuid,
    _permit: OwnedSemaphorePermit,
}

impl Drop for WatchedTicket {
    fn drop(&mut self) {
        let mut watched = self.listeners.lock();
        if let Entry::Occupied(mut streams) = watched.streams.entry(self.ticket_id) {
            *streams.get_mut() -= 1;
            if *streams.get() == 0 {
                streams.remove();
            }
        }
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
    /// Whether the ticket may have changed since it was read.
    has_changed: bool,
    provisional: ProvisionalListener,
    /// The message whose provisional text the client shows, and when it expires.
    shown: Option<(Uuid, Instant)>,
    /// The newest message of the model that was sent: updates of its text that arrive later are not.
    answered: Option<Uuid>,
    shutdown: ShutdownSignal,
    _watched: WatchedTicket,
}

/// Stream messages and status changes as server-sent events; `Last-Event-ID` resumes an earlier stream.
///
/// `provisional` has the text so far of an answer that the model is writing, only if it will be posted without approval;
/// `withdrawn` says that it is void: `discarded`, `replaced` by the `message` that follows, or `expired`.
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
    // Before the first poll, so that no change is missed.
    let changes = app.tickets.changes();
    let watched = app.listeners.watch(&app.tickets, ticket_id).ok_or_else(|| {
        let message = format!("{LISTENERS_MAX} event streams are open; try again later");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_listeners", message)
            .retry_after(Duration::from_secs(5))
    })?;
    let events_of_ticket = TicketEventStream {
        changes,
        tickets: app.tickets.clone(),
        ticket_id,
        after,
        last_status: None,
        ready: VecDeque::new(),
        has_changed: true,
        provisional: app.provisional.listen(ticket_id),
        shown: None,
        answered: None,
        shutdown: app.shutdown.clone(),
        _watched: watched,
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
            if self.has_changed
                && let Err(error) = self.poll().await
            {
                warn!(ticket_id = %self.ticket_id, %error, "database unavailable, ticket event stream waits");
                self.ready.clear();
                sleep(POLL_INTERVAL).await;
                continue;
            }
            if let Some(answer) = self.provisional.take() {
                self.update(answer);
            }
            if self.ready.is_empty() {
                self.wait().await;
            }
        }
    }

    /// Shows or withdraws a provisional text.
    fn update(&mut self, answer: ProvisionalAnswer) {
        let ProvisionalAnswer { message_id, epoch, sequence, content, .. } = answer;
        if self.answered == Some(message_id) {
            return;
        }
        let is_shown = self.shown.is_some_and(|(shown, _)| shown == message_id);
        if !is_shown || content.is_none() {
            self.withdraw("discarded");
        }
        let Some(content) = content else { return };
        self.shown = Some((message_id, Instant::now() + EXPIRES_AFTER));
        let data = json!({
            "message_id": message_id, "epoch": epoch, "sequence": sequence, "content": content,
        });
        self.ready.push_back(Event::default().event("provisional").data(data.to_string()));
    }

    /// Says that the provisional text is void, if the client shows one.
    fn withdraw(&mut self, reason: &str) {
        if let Some((message_id, _)) = self.shown.take() {
            let data = json!({"message_id": message_id, "reason": reason}).to_string();
            self.ready.push_back(Event::default().event("withdrawn").data(data));
        }
    }

    /// Reads all changes: messages first, so that a status never precedes the messages that caused it.
    async fn poll(&mut self) -> Result<(), TicketError> {
        let ticket = self.tickets.ticket(self.ticket_id).await?;
        let messages = self.tickets.messages(self.ticket_id, self.after, PAGE_MAX).await?;
        // A full page may not be the last one.
        self.has_changed = messages.len() >= PAGE_MAX;
        for message in &messages {
            if message.author == Author::Assistant {
                self.withdraw("replaced");
                self.answered = Some(message.message_id);
            }
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
        let expires_at = self.shown.map(|(_, at)| at);
        let expired = async {
            match expires_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shutdown.wait() => {}
            () = changed(&mut self.changes, self.ticket_id) => self.has_changed = true,
            () = self.provisional.changed() => {}
            () = expired => self.withdraw("expired"),
        }
    }
}

/// Waits until the ticket was changed, or until notifications were missed. Cancel-safe.
async fn changed(changes: &mut broadcast::Receiver<Uuid>, ticket_id: Uuid) {
    loop {
        match changes.recv().await {
            Ok(other) if other != ticket_id => {}
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => return,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}
