//! Forwards ticket events and events of the desk to receivers: those of `[[notification]]` sections (`notification_sinks`), or a
//! [`NotificationSink`] of an embedding program.
//!
//! Upstream: the streams `ticket_events` and `desk_events`, each read in one consumer group per receiver that chose events of it,
//! beside the groups of the desk and of analytics. Downstream: the receiver.
//! Guarantees: an event is acknowledged after its receiver has accepted it, so that a crash repeats it under the same id (at
//! least once). A failed attempt is repeated in place, with backoff, and adds no entry to the shared stream; at the attempt
//! limit, or if the receiver rejects the event, it goes to the dead letters of its stream; so does an event that fails while the receiver
//! accepts others, so that it does not keep them waiting. A slow or failing receiver delays only its own group. An event of an
//! erased ticket is dropped; while it is unknown whether the ticket was erased, the event is released without an attempt, so that
//! others are sent meanwhile. Entries that are not ticket events are skipped: the group of the desk keeps them as dead letters.
//! Not here: replies of the desk, which the outbox delivers (`callback.rs`); order: the receiver may see events of a ticket
//! in another order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use headwater_issue::DeliverError;
use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Queue, RetryPolicy, Subscription};
use headwater_stream::{Backend, Backoff, GroupStart};
use metrics::counter;
use sha2::{Digest, Sha256};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::inbound::ticket_events_consumer;
use crate::limits::ENTRY_BYTES_MAX;
use crate::tickets::desk_events::{DESK_EVENTS, DeskEvent, DeskEventType};
use crate::tickets::{TICKET_EVENTS, TicketEvent, TicketEventType, Tickets};

/// The consumer group of a receiver is this, followed by its id.
pub const NOTIFICATION_GROUP_PREFIX: &str = "notification:";

/// Counter of notifications. Labels: notification, result (`delivered`; `retried`; `dead`; `skipped`; `waiting`: released because
/// it is unknown whether the ticket was erased).
pub const NOTIFICATIONS: &str = "headwater_notifications_total";

/// Default of [`NotificationConfig::attempts`].
pub const ATTEMPTS_DEFAULT: u32 = 50;
/// Largest [`NotificationConfig::attempts`].
pub const ATTEMPTS_MAX: u32 = 1000;
/// Default and maximum of [`NotificationConfig::timeout`].
pub const TIMEOUT_MAX: Duration = Duration::from_secs(10);

/// Events of one receiver that are sent concurrently.
const CONCURRENCY: usize = 8;
/// Delays between attempts; with them, the default attempts take several hours.
const BACKOFF: Backoff = Backoff::doubling(Duration::from_secs(1), Duration::from_secs(15 * 60));
/// Attempts of an event that the receiver does not accept although it accepted others meanwhile. They take a quarter of an
/// hour, in which the event keeps others waiting.
const EVENT_ATTEMPTS_MAX: u32 = 10;
/// Pause before an attempt that does not count is repeated, unless the receiver asked for another one.
const UNCOUNTED_PAUSE: Duration = Duration::from_secs(30);
/// Pause before an unavailable stream backend is asked again.
const SUBSCRIBE_PAUSE: Duration = Duration::from_secs(1);
/// Timeout of a question to the stream backend or the database whether a ticket was erased.
const ERASURE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before an event is released because it is unknown whether its ticket was erased. It paces the redeliveries, and is
/// short, because the event keeps others waiting in it.
const ERASURE_PAUSE: Duration = Duration::from_millis(500);
/// How long shutdown waits for a request in flight.
const DRAIN: Duration = Duration::from_secs(12);
/// Deliveries without an outcome, because processes were killed. Sending cannot kill a process, so the limit is high.
const CRASHES_MAX: u32 = 1000;

const _: () = assert!(TIMEOUT_MAX.as_millis() < DRAIN.as_millis());

/// One event for a receiver.
#[derive(Clone, Debug, PartialEq)]
pub struct TicketNotification {
    /// Id of the event: the same for every attempt, redelivery and replay, so that the receiver can detect duplicates.
    pub id: String,
    /// The event, cleaned.
    pub event: TicketEvent,
}

/// One event of the desk for a receiver.
#[derive(Clone, Debug, PartialEq)]
pub struct DeskNotification {
    /// Id of the event: the same for every attempt, redelivery and replay, so that the receiver can detect duplicates.
    pub id: String,
    /// The event.
    pub event: DeskEvent,
}

/// Receives ticket events in the process.
#[async_trait]
pub trait NotificationSink: Send + Sync + 'static {
    /// Handles one event. It is repeated until it succeeds, with the same id: an implementation with effects checks it. Of the
    /// errors, `Retry` and `Denied` count an attempt and `Dead` makes a dead letter at once; the others are repeated without a
    /// limit. A call over [`NotificationConfig::timeout`] is dropped and counts an attempt.
    async fn notify(&self, notification: &TicketNotification) -> Result<(), DeliverError>;

    /// Handles one event of the desk, like [`notify`](Self::notify). Only called for the types in
    /// [`NotificationConfig::desk_events`]. The default makes a dead letter.
    async fn notify_desk(&self, notification: &DeskNotification) -> Result<(), DeliverError> {
        let event_type = notification.event.event_type.as_str();
        Err(DeliverError::Dead(format!("this receiver does not handle `{event_type}`")))
    }
}

/// Settings of one receiver.
#[derive(Clone, Debug)]
pub struct NotificationConfig {
    /// Id of the receiver: 1 to 64 letters, digits, `-`, `_` and `.`. Part of the name of its group.
    pub id: String,
    /// Types of the ticket events that it gets. Default: all four.
    pub events: Vec<TicketEventType>,
    /// Types of the events of the desk that it gets. Default: none.
    pub desk_events: Vec<DeskEventType>,
    /// Attempts until an event becomes a dead letter, 1 to [`ATTEMPTS_MAX`]. Counted anew after a restart. Default:
    /// [`ATTEMPTS_DEFAULT`].
    pub attempts: u32,
    /// Timeout of one attempt, at most [`TIMEOUT_MAX`], which is the default.
    pub timeout: Duration,
    /// Which events a new group begins with. Default: those after its creation.
    pub start: GroupStart,
}

impl NotificationConfig {
    /// A receiver of all types of events with the defaults.
    pub fn new(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            events: TicketEventType::PUBLIC.to_vec(),
            desk_events: Vec::new(),
            attempts: ATTEMPTS_DEFAULT,
            timeout: TIMEOUT_MAX,
            start: GroupStart::End,
        }
    }

    /// Checks every limit.
    pub fn validate(&self) -> Result<(), String> {
        let (id, attempts) = (&self.id, self.attempts);
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        if !(1..=64).contains(&id.len()) || !id.chars().all(is_plain) {
            return Err(format!(
                "invalid id `{}`; allowed: 1 to 64 letters, digits, `-`, `_` and `.`",
                crate::text::one_line(id, 64)
            ));
        }
        let has_none = self.events.is_empty() && self.desk_events.is_empty();
        if has_none || self.events.contains(&TicketEventType::TicketReopened) {
            return Err(format!(
                "`events` of `{id}` must name at least one of `{}`",
                notification_event_names().join("`, `")
            ));
        }
        if !(1..=ATTEMPTS_MAX).contains(&attempts) {
            return Err(format!(
                "`attempts` of `{id}` is {attempts}; allowed: 1 to {ATTEMPTS_MAX}"
            ));
        }
        if self.timeout.is_zero() || self.timeout > TIMEOUT_MAX {
            return Err(format!(
                "`timeout` of `{id}` is {:?}; allowed: more than zero, at most {TIMEOUT_MAX:?}",
                self.timeout
            ));
        }
        Ok(())
    }

    /// Its consumer group.
    pub fn group(&self) -> String {
        format!("{NOTIFICATION_GROUP_PREFIX}{}", self.id)
    }
}

/// The names of all events that a receiver can choose.
pub(crate) fn notification_event_names() -> Vec<&'static str> {
    let of_tickets = TicketEventType::PUBLIC.into_iter().map(TicketEventType::as_str);
    of_tickets.chain(DeskEventType::ALL.into_iter().map(DeskEventType::as_str)).collect()
}

/// An event for a receiver, from either stream.
enum NotifiedEvent {
    Ticket(TicketNotification),
    Desk(DeskNotification),
}

/// Forwards events to one receiver.
#[derive(Clone)]
pub struct NotificationForwarder {
    config: Arc<NotificationConfig>,
    sink: Arc<dyn NotificationSink>,
    shutdown: CancellationToken,
    /// Decides about tickets that are marked as erased; see [`with_tickets`](Self::with_tickets).
    tickets: Option<Tickets>,
    /// Events that the receiver has accepted.
    accepted: Arc<AtomicU64>,
}

impl std::fmt::Debug for NotificationForwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotificationForwarder")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl NotificationForwarder {
    /// Creates a forwarder that runs until `shutdown` is cancelled.
    pub fn new(
        config: NotificationConfig,
        sink: Arc<dyn NotificationSink>,
        shutdown: CancellationToken,
    ) -> Result<Self, String> {
        config.validate()?;
        let (config, accepted) = (Arc::new(config), Arc::default());
        Ok(Self { config, sink, shutdown, tickets: None, accepted })
    }

    /// Lets the database decide about a ticket that is marked as erased, or whose mark cannot be read: while it exists, its events
    /// are sent. Without tickets, the mark decides, which also a ticket has whose erasure was interrupted.
    pub fn with_tickets(self, tickets: Tickets) -> Self {
        Self { tickets: Some(tickets), ..self }
    }

    /// Runs until shutdown, then waits for requests in flight. Events that wait for their next attempt are released for other
    /// processes. Retries while streams are unavailable.
    pub async fn run(&self, queue: &Queue) {
        let of_tickets = (!self.config.events.is_empty()).then_some(TICKET_EVENTS);
        let of_the_desk = (!self.config.desk_events.is_empty()).then_some(DESK_EVENTS);
        let topics = of_tickets.into_iter().chain(of_the_desk);
        join_all(topics.map(|topic| self.run_topic(queue, topic))).await;
    }

    async fn run_topic(&self, queue: &Queue, topic: &'static str) {
        let subscription = loop {
            let error = match self.subscribe(queue, topic).await {
                Ok(subscription) => break subscription,
                Err(error) => error,
            };
            warn!(notification = self.config.id, topic, %error, "subscribing to events failed; retrying");
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = sleep(SUBSCRIBE_PAUSE) => {}
            }
        };
        self.shutdown.cancelled().await;
        subscription.stop().await;
    }

    async fn subscribe(
        &self,
        queue: &Queue,
        topic: &'static str,
    ) -> headwater_queue::Result<Subscription> {
        let config = ConsumerConfig {
            // Every process forwards; a dead one is replaced by all others.
            mode: Mode::Shared,
            start: self.config.start,
            concurrency: CONCURRENCY,
            read_ahead: Some(CONCURRENCY),
            retry: RetryPolicy { max_crashes: CRASHES_MAX, ..RetryPolicy::default() },
            drain: DRAIN,
            ..ConsumerConfig::default()
        };
        let (forwarder, streams) = (self.clone(), Arc::clone(queue.backend()));
        let handler = move |message: Message| {
            let (forwarder, streams) = (forwarder.clone(), Arc::clone(&streams));
            async move { forwarder.forward(&*streams, topic, &message).await }
        };
        queue.subscribe(topic, &self.config.group(), handler, config).await
    }

    /// Sends one event until the receiver accepts or rejects it, the attempts are used up, its ticket is erased or that is unknown,
    /// or the process shuts down.
    async fn forward(&self, streams: &dyn Backend, topic: &str, message: &Message) -> Outcome {
        let received = match topic {
            DESK_EVENTS => self.read_desk(message).map(NotifiedEvent::Desk),
            _ => self.read(message).map(NotifiedEvent::Ticket),
        };
        let Some(received) = received else {
            return self.counted("skipped", Outcome::Done);
        };
        let ticket_id = match &received {
            NotifiedEvent::Ticket(notification) => Some(notification.event.ticket_id),
            NotifiedEvent::Desk(notification) => notification.event.ticket_id,
        };
        let (mut attempts, mut delays) = (0, BACKOFF.timer());
        let accepted_before = self.accepted.load(Ordering::Relaxed);
        loop {
            if let Some(outcome) = self.withhold(streams, ticket_id, message).await {
                return outcome;
            }
            let sending = async {
                match &received {
                    NotifiedEvent::Ticket(event) => self.sink.notify(event).await,
                    NotifiedEvent::Desk(event) => self.sink.notify_desk(event).await,
                }
            };
            let sent = timeout(self.config.timeout, sending).await.unwrap_or_else(|_| {
                Err(DeliverError::Retry(format!("no answer within {:?}", self.config.timeout)))
            });
            let (problem, pause) = match sent {
                Ok(()) => {
                    self.accepted.fetch_add(1, Ordering::Relaxed);
                    return self.counted("delivered", Outcome::Done);
                }
                Err(DeliverError::Dead(problem)) => {
                    return self.dead_letter(streams, ticket_id, topic, message, &problem).await;
                }
                Err(DeliverError::Retry(problem) | DeliverError::Denied(problem)) => {
                    attempts += 1;
                    let accepts_others = self.accepted.load(Ordering::Relaxed) > accepted_before;
                    let is_event_at_fault = accepts_others && attempts >= EVENT_ATTEMPTS_MAX;
                    if attempts >= self.config.attempts || is_event_at_fault {
                        let problem = format!("{problem} (attempt {attempts})");
                        return self
                            .dead_letter(streams, ticket_id, topic, message, &problem)
                            .await;
                    }
                    (problem, delays.next_delay())
                }
                Err(DeliverError::Paused { problem, after }) => (problem, after),
                Err(DeliverError::Held(problem) | DeliverError::Unavailable(problem)) => {
                    (problem, UNCOUNTED_PAUSE)
                }
                Err(other) => (other.to_string(), UNCOUNTED_PAUSE),
            };
            warn!(
                notification = self.config.id, entry_id = %message.id, attempt = attempts, error = problem,
                "notification failed; it will be retried"
            );
            tokio::select! {
                () = self.shutdown.cancelled() => return Outcome::Release,
                () = sleep(pause) => self.count("retried"),
            }
        }
    }

    /// The notification of an entry; `None` if it is not for this receiver.
    fn read(&self, message: &Message) -> Option<TicketNotification> {
        let mut event = match ticket_events_consumer::parse(message) {
            Ok(event) => event,
            Err(error) => {
                debug!(entry_id = %message.id, error, "entry is not a ticket event; not forwarded");
                return None;
            }
        };
        if !self.config.events.contains(&event.event_type) {
            return None;
        }
        // Only our own events have them.
        let data = message.fields.get("data").map(|data| serde_json::from_slice(data));
        if let Some(Ok(TicketEvent { payload, .. })) = data {
            event.payload.run = payload.run;
        }
        Some(TicketNotification { id: notification_id(&event), event })
    }

    /// The notification of an entry of `desk_events`; `None` if it is not for this receiver.
    fn read_desk(&self, message: &Message) -> Option<DeskNotification> {
        let data = message.fields.get("data").filter(|data| data.len() <= ENTRY_BYTES_MAX)?;
        let event: DeskEvent = match serde_json::from_slice(data) {
            Ok(event) => event,
            Err(error) => {
                debug!(entry_id = %message.id, %error, "entry is not an event of the desk; not forwarded");
                return None;
            }
        };
        let is_chosen = self.config.desk_events.contains(&event.event_type);
        let id = format!("evt_{}", event.event_id.simple());
        is_chosen.then_some(DeskNotification { id, event })
    }

    /// The outcome of an event that must not be sent, because its ticket was erased or that is unknown; `None` if it may be sent.
    async fn withhold(
        &self,
        streams: &dyn Backend,
        ticket_id: Option<Uuid>,
        message: &Message,
    ) -> Option<Outcome> {
        let error = match self.is_erased(streams, ticket_id?).await {
            Ok(false) => return None,
            Ok(true) => return Some(self.counted("skipped", Outcome::Done)),
            Err(error) => error,
        };
        warn!(
            notification = self.config.id, entry_id = %message.id, error,
            "it is unknown whether the ticket was erased; the notification waits until the stream backend or the database answers"
        );
        tokio::select! {
            () = self.shutdown.cancelled() => {}
            () = sleep(ERASURE_PAUSE) => {}
        }
        // Released, because an event that waits here would keep those of other tickets waiting.
        Some(self.counted("waiting", Outcome::Release))
    }

    /// Whether a ticket was erased; an error says why that is unknown.
    async fn is_erased(&self, streams: &dyn Backend, ticket_id: Uuid) -> Result<bool, String> {
        let late = |of: &str| format!("{of}: no answer within {ERASURE_TIMEOUT:?}");
        let mark = ticket_events_consumer::is_erased(streams, ticket_id);
        let marked = match timeout(ERASURE_TIMEOUT, mark).await {
            Ok(Ok(false)) => return Ok(false),
            Ok(Ok(true)) => Ok(true),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(late("stream backend")),
        };
        let Some(tickets) = &self.tickets else { return marked };
        // The mark is set before the ticket is deleted, and stays if the deletion fails. A ticket that does not exist and is not
        // marked is one of another program that is not imported yet.
        match timeout(ERASURE_TIMEOUT, tickets.ticket(ticket_id)).await {
            Ok(Ok(Some(_))) => Ok(false),
            Ok(Ok(None)) => marked,
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(late("database")),
        }
    }

    async fn dead_letter(
        &self,
        streams: &dyn Backend,
        ticket_id: Option<Uuid>,
        topic: &str,
        message: &Message,
        problem: &str,
    ) -> Outcome {
        if let Some(outcome) = self.withhold(streams, ticket_id, message).await {
            return outcome;
        }
        warn!(
            notification = self.config.id, topic, entry_id = %message.id, error = problem,
            "notification moved to dead letters; fix the receiver, then run `headwater dlq replay TOPIC`"
        );
        let reason = format!("notification `{}`: {problem}", self.config.id);
        self.counted("dead", Outcome::dead_letter(reason))
    }

    fn counted(&self, result: &'static str, outcome: Outcome) -> Outcome {
        self.count(result);
        outcome
    }

    fn count(&self, result: &'static str) {
        let notification = self.config.id.clone();
        counter!(NOTIFICATIONS, "notification" => notification, "result" => result).increment(1);
    }
}

/// The id of an event: its ticket, type and message, so that a repeated entry of the same event has the same one.
fn notification_id(event: &TicketEvent) -> String {
    let TicketEvent { event_type, ticket_id, message_id, .. } = event;
    let hash = Sha256::digest(format!("{}/{ticket_id}/{message_id}", event_type.as_str()));
    format!("evt_{}", hex::encode(&hash[..16]))
}
