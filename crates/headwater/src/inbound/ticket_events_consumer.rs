//! `ai_processor_group`: what other programs append to `ticket_events` becomes tickets and messages.
//!
//! Upstream: the stream, shared with other programs and processes. Downstream: `tickets`.
//!
//! Promises: an entry is acknowledged after the SQL commit, so a crash brings it again and the message id makes it count once.
//! The seed's set `processed_messages:TICKET` is written after the commit and only ever saves work: what it says is believed
//! only if SQL says so, too, so neither a lost set nor a wrong one loses a message. Entries that make no sense go to
//! `ticket_events:dlq` with their bytes; a database that is away costs an entry no attempt.
//! Our own entries come by here as well: their messages are known.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Queue, Subscription};
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{Backend, SetName};
use metrics::counter;
use sha2::{Digest, Sha256};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::limits::{ENTRY_BYTES_MAX, PROCESSED_KEPT};
use crate::tickets::{TICKET_EVENTS, TicketEvent};
use crate::tickets::{TakenIn, Tickets};

/// The group that answers.
pub const AI_PROCESSOR_GROUP: &str = "ai_processor_group";

/// Entries of `ticket_events` taken in. Label: result (`new`, `known`, `refused`, `later`).
pub const TICKET_ENTRIES: &str = "headwater_ticket_entries_total";

/// How long the cache may take; then we do without.
const CACHE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait before a database that is away is asked again, or a stream.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Takes in what other programs say.
#[derive(Clone)]
pub struct TicketIntake {
    tickets: Tickets,
    streams: Arc<dyn Backend>,
    reclaim_idle: Duration,
}

impl std::fmt::Debug for TicketIntake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TicketIntake").finish_non_exhaustive()
    }
}

impl TicketIntake {
    /// Takes entries in. After `reclaim_idle`, those that a program without heartbeats has read and left are taken over.
    pub fn new(tickets: Tickets, streams: Arc<dyn Backend>, reclaim_idle: Duration) -> Self {
        Self { tickets, streams, reclaim_idle }
    }

    /// Works until `shutdown` completes, and returns when what is in hand has ended. Waits for streams that are away.
    pub async fn run(&self, queue: &Queue, shutdown: impl Future<Output = ()>) {
        tokio::pin!(shutdown);
        let subscription = loop {
            let error = match self.subscribe(queue).await {
                Ok(subscription) => break subscription,
                Err(error) => error,
            };
            warn!(%error, "ticket_events cannot be read yet, trying again");
            tokio::select! {
                () = &mut shutdown => return,
                () = sleep(AGAIN_AFTER) => {}
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
        let intake = self.clone();
        let handler = move |message: Message| {
            let intake = intake.clone();
            async move { intake.take(&message).await }
        };
        queue.subscribe(TICKET_EVENTS, AI_PROCESSOR_GROUP, handler, config).await
    }

    /// One entry.
    async fn take(&self, message: &Message) -> Outcome {
        let event = match read(message) {
            Ok(event) => event,
            Err(reason) => return refused(message, reason),
        };
        let was_seen = self.is_cached(&event).await;
        let known = if was_seen { self.tickets.knows(event.message_id).await } else { Ok(false) };
        let taken = match known {
            Ok(true) => return counted("known", Outcome::Done),
            Ok(false) => self.tickets.take_in(&event).await,
            Err(error) => Err(error),
        };
        match taken {
            Ok(TakenIn::Refused(reason)) => refused(message, reason),
            Ok(taken) => {
                // After the commit: before it, a crash would make us believe that the message is there.
                self.cache(&event).await;
                let result = if taken == TakenIn::New { "new" } else { "known" };
                debug!(entry_id = %message.id, result, "ticket event taken in");
                counted(result, Outcome::Done)
            }
            Err(error) if error.is_transient() => {
                warn!(entry_id = %message.id, %error, "ticket event was not stored, trying again");
                sleep(AGAIN_AFTER).await;
                counted("later", Outcome::Release)
            }
            Err(error) => refused(message, error.to_string()),
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
            debug!(ticket_id = %event.ticket_id, "message is not in the cache; SQL knows it");
        }
    }
}

/// The seed's name.
fn cache_key(event: &TicketEvent) -> Option<(SetName, String)> {
    let set = SetName::new(format!("processed_messages:{}", event.ticket_id)).ok()?;
    Some((set, event.message_id.to_string()))
}

fn read(message: &Message) -> Result<TicketEvent, String> {
    let data = message.fields.get("data").ok_or("the field `data` is missing")?;
    if data.len() > ENTRY_BYTES_MAX {
        return Err(format!("`data` is longer than {ENTRY_BYTES_MAX} bytes"));
    }
    TicketEvent::read_foreign(data, place_id(message), SystemClock.now())
}

/// An id for an event that has none: the same whenever this entry comes.
fn place_id(message: &Message) -> Uuid {
    let place = message.original_id.unwrap_or(message.id);
    let hash = Sha256::digest(format!("{TICKET_EVENTS}/{place}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

fn refused(message: &Message, reason: String) -> Outcome {
    warn!(entry_id = %message.id, error = reason, "ticket event makes no sense, it is a dead letter");
    counted("refused", Outcome::dead_letter(reason))
}

fn counted(result: &'static str, outcome: Outcome) -> Outcome {
    counter!(TICKET_ENTRIES, "result" => result).increment(1);
    outcome
}
