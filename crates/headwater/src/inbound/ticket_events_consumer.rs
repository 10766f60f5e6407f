//! Consumer of `ticket_events` in the group `ai_processor_group`: entries of other programs become tickets and
//! messages.
//!
//! Upstream: the stream, shared with other programs and processes. Downstream: `tickets`.
//!
//! Guarantees: an entry is acknowledged after the SQL commit, so a crash redelivers it, and its message id makes the
//! import idempotent. The set `processed_messages:TICKET` is written after the commit and only saves work: a hit is
//! verified in SQL, so a lost or wrong set loses no message. It also marks an erased ticket, for entries in hand. Invalid entries go to `ticket_events:dlq` unchanged, and so do
//! those whose ticket does not exist after some retries; an unavailable database counts no attempt. Several processes
//! import the entries of one ticket in any order, with the same result. Entries of this program are read as well; their messages are duplicates.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Queue, Subscription};
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{Backend, EntryId, SetName};
use metrics::counter;
use sha2::{Digest, Sha256};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::limits::{ENTRY_BYTES_MAX, PROCESSED_KEPT};
use crate::tickets::{ImportOutcome, Tickets};
use crate::tickets::{TICKET_EVENTS, TicketEvent, TicketEventType};

/// Consumer group of the desk.
pub const AI_PROCESSOR_GROUP: &str = "ai_processor_group";

/// Counter of consumed `ticket_events` entries. Label: result (`new`; `known`, also if the ticket was erased; `refused`; `later`).
pub const TICKET_ENTRIES: &str = "headwater_ticket_entries_total";

/// Timeout of a cache call; the cache is skipped after it.
const CACHE_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before an unavailable database or stream is tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Imports ticket events of other programs.
#[derive(Clone)]
pub struct TicketEventsConsumer {
    tickets: Tickets,
    streams: Arc<dyn Backend>,
    reclaim_idle: Duration,
}

impl std::fmt::Debug for TicketEventsConsumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TicketEventsConsumer").finish_non_exhaustive()
    }
}

impl TicketEventsConsumer {
    /// Creates a consumer. Entries that a consumer without heartbeats has read and not acknowledged for `reclaim_idle`
    /// are reclaimed.
    pub fn new(tickets: Tickets, streams: Arc<dyn Backend>, reclaim_idle: Duration) -> Self {
        Self { tickets, streams, reclaim_idle }
    }

    /// Runs until `shutdown` completes, then drains entries in flight. Retries while streams are unavailable.
    pub async fn run(&self, queue: &Queue, shutdown: impl Future<Output = ()>) {
        tokio::pin!(shutdown);
        let subscription = loop {
            let error = match self.subscribe(queue).await {
                Ok(subscription) => break subscription,
                Err(error) => error,
            };
            warn!(%error, "subscribing to `ticket_events` failed; retrying");
            tokio::select! {
                () = &mut shutdown => return,
                () = sleep(RETRY_PAUSE) => {}
            }
        };
        shutdown.await;
        subscription.stop().await;
    }

    async fn subscribe(&self, queue: &Queue) -> headwater_queue::Result<Subscription> {
        let config = ConsumerConfig {
            mode: Mode::Shared,
            reclaim_idle: self.reclaim_idle,
            ..ConsumerConfig::default()
        };
        let consumer = self.clone();
        let handler = move |message: Message| {
            let consumer = consumer.clone();
            async move { consumer.handle(&message).await }
        };
        queue.subscribe(TICKET_EVENTS, AI_PROCESSOR_GROUP, handler, config).await
    }

    /// Handles one entry.
    async fn handle(&self, message: &Message) -> Outcome {
        let event = match parse(message) {
            Ok(event) => event,
            Err(reason) => return dead_letter(message, reason),
        };
        // `TICKET_CREATED` may have the id of a message that was imported before, and still has a title and a user.
        let is_cacheable = event.event_type != TicketEventType::TicketCreated;
        let was_seen = is_cacheable && self.is_cached(&event).await;
        let known =
            if was_seen { self.tickets.has_message(event.message_id).await } else { Ok(false) };
        let imported = match known {
            Ok(true) => return counted("known", Outcome::Done),
            Ok(false) => self.tickets.import_into_existing(&event, entry_id(message)).await,
            Err(error) => Err(error),
        };
        let imported = match imported {
            Ok(ImportOutcome::NoTicket) => match is_erased(&*self.streams, event.ticket_id).await {
                Ok(false) => self.tickets.import_event(&event, entry_id(message)).await,
                Ok(true) => {
                    debug!(entry_id = %message.id, "the ticket was erased; its event is dropped");
                    return counted("known", Outcome::Done);
                }
                Err(error) => {
                    warn!(entry_id = %message.id, %error, "it is unknown whether the ticket was erased; retrying");
                    sleep(RETRY_PAUSE).await;
                    return counted("later", Outcome::Release);
                }
            },
            imported => imported,
        };
        match imported {
            Ok(ImportOutcome::Rejected(reason)) => dead_letter(message, reason),
            // Another process may be about to import the entry that opens the ticket.
            Ok(ImportOutcome::NoTicket) => {
                counted("later", Outcome::retry("the ticket does not exist"))
            }
            Ok(outcome) => {
                // Only after the commit: otherwise a crash would leave a cache entry for a message that is not stored.
                self.cache(&event).await;
                let result = if outcome == ImportOutcome::Imported { "new" } else { "known" };
                debug!(entry_id = %message.id, result, "ticket event imported");
                counted(result, Outcome::Done)
            }
            Err(error) if error.is_transient() => {
                warn!(entry_id = %message.id, %error, "storing a ticket event failed; retrying");
                sleep(RETRY_PAUSE).await;
                counted("later", Outcome::Release)
            }
            Err(error) => dead_letter(message, error.to_string()),
        }
    }

    async fn is_cached(&self, event: &TicketEvent) -> bool {
        let Some((set, message_id)) = cache_key(event) else { return false };
        let members = [message_id.as_str()];
        let asking = self.streams.set_contains(&set, &members);
        let answer = timeout(CACHE_TIMEOUT, asking).await;
        answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.first() == Some(&true)))
    }

    async fn cache(&self, event: &TicketEvent) {
        let Some((set, message_id)) = cache_key(event) else { return };
        let members = [message_id.as_str()];
        let adding = self.streams.set_add(&set, &members, Some(PROCESSED_KEPT));
        if !timeout(CACHE_TIMEOUT, adding).await.is_ok_and(|added| added.is_ok()) {
            debug!(ticket_id = %event.ticket_id, "message could not be cached; duplicates are detected in SQL");
        }
    }
}

/// The cache set and its member.
fn cache_key(event: &TicketEvent) -> Option<(SetName, String)> {
    Some((processed_messages(event.ticket_id).ok()?, event.message_id.to_string()))
}

fn processed_messages(ticket_id: Uuid) -> headwater_stream::Result<SetName> {
    SetName::new(format!("processed_messages:{ticket_id}"))
}

/// Member of the set of a ticket that was erased.
const ERASED: &str = "erased";

/// Marks a ticket as erased, before it is: entries of it that a consumer has in hand then do not open it again.
pub(crate) async fn mark_erased(
    streams: &dyn Backend,
    ticket_id: Uuid,
) -> headwater_stream::Result<()> {
    streams.set_add(&processed_messages(ticket_id)?, &[ERASED], Some(PROCESSED_KEPT)).await?;
    Ok(())
}

/// Whether a ticket was erased, within the last 24 hours.
pub(crate) async fn is_erased(
    streams: &dyn Backend,
    ticket_id: Uuid,
) -> headwater_stream::Result<bool> {
    let found = streams.set_contains(&processed_messages(ticket_id)?, &[ERASED]).await?;
    Ok(found.first() == Some(&true))
}

/// The ticket event of an entry, cleaned, or why it is none.
pub(crate) fn parse(message: &Message) -> Result<TicketEvent, String> {
    let data = message.fields.get("data").ok_or("field `data` is missing")?;
    if data.len() > ENTRY_BYTES_MAX {
        return Err(format!("`data` is longer than {ENTRY_BYTES_MAX} bytes"));
    }
    TicketEvent::parse_external(data, fallback_message_id(message), SystemClock.now())
}

/// The entry as it was appended first; a retry has another id.
fn entry_id(message: &Message) -> EntryId {
    message.original_id.unwrap_or(message.id)
}

/// A message id for an event without one, derived from the entry id, so that it is stable across redeliveries.
fn fallback_message_id(message: &Message) -> Uuid {
    let hash = Sha256::digest(format!("{TICKET_EVENTS}/{}", entry_id(message)).as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

fn dead_letter(message: &Message, reason: String) -> Outcome {
    warn!(entry_id = %message.id, error = reason, "invalid ticket event moved to dead letters");
    counted("refused", Outcome::dead_letter(reason))
}

fn counted(result: &'static str, outcome: Outcome) -> Outcome {
    counter!(TICKET_ENTRIES, "result" => result).increment(1);
    outcome
}
