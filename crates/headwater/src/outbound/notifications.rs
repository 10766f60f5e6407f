//! Forwards ticket events to receivers: signed webhooks of `[[notification]]` sections, or a [`NotificationSink`] of an
//! embedding program.
//!
//! Upstream: the stream `ticket_events`, read in one consumer group per receiver, beside the groups of the desk and of
//! analytics. Downstream: the receiver.
//! Guarantees: an event is acknowledged after its receiver has accepted it, so that a crash repeats it under the same id (at
//! least once). A failed attempt is repeated in place, with backoff, and adds no entry to the shared stream; at the attempt
//! limit, or if the receiver rejects the event, it goes to `ticket_events:dlq`; so does an event that fails while the receiver
//! accepts others, so that it does not keep them waiting. A slow or failing receiver delays only its own group. Entries that are not ticket events are skipped: the group of the desk keeps them as dead letters.
//! Not here: replies of the desk, which the outbox delivers (`callback.rs`); order: the receiver may see events of a ticket
//! in another order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::DeliverError;
use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Queue, RetryPolicy, Subscription};
use headwater_stream::{Backoff, GroupStart};
use metrics::counter;
use reqwest::Client;
use secrecy::SecretString;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::http_client;
use crate::inbound::ticket_events_consumer;
use crate::outbound::{callback, http};
use crate::tickets::{TICKET_EVENTS, TicketEvent, TicketEventType};

/// The consumer group of a receiver is this, followed by its id.
pub const NOTIFICATION_GROUP_PREFIX: &str = "notification:";

/// Counter of notifications. Labels: notification, result (`delivered`, `retried`, `dead`, `skipped`).
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
/// Pause before an unavailable stream is tried again.
const SUBSCRIBE_PAUSE: Duration = Duration::from_secs(1);
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

/// Receives ticket events in the process.
#[async_trait]
pub trait NotificationSink: Send + Sync + 'static {
    /// Handles one event. It is repeated until it succeeds, with the same id: an implementation with effects checks it. Of the
    /// errors, `Retry` and `Denied` count an attempt and `Dead` makes a dead letter at once; the others are repeated without a
    /// limit. A call over [`NotificationConfig::timeout`] is dropped and counts an attempt.
    async fn notify(&self, notification: &TicketNotification) -> Result<(), DeliverError>;
}

/// Settings of one receiver.
#[derive(Clone, Debug)]
pub struct NotificationConfig {
    /// Id of the receiver: 1 to 64 letters, digits, `-`, `_` and `.`. Part of the name of its group.
    pub id: String,
    /// Types of the events that it gets. Default: all four.
    pub events: Vec<TicketEventType>,
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
        if self.events.is_empty() || self.events.contains(&TicketEventType::TicketReopened) {
            return Err(format!(
                "`events` of `{id}` must name at least one of {}",
                TicketEventType::PUBLIC.map(|one| format!("`{}`", one.as_str())).join(", ")
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

/// Forwards events to one receiver.
#[derive(Clone)]
pub struct NotificationForwarder {
    config: Arc<NotificationConfig>,
    sink: Arc<dyn NotificationSink>,
    shutdown: CancellationToken,
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
        Ok(Self { config: Arc::new(config), sink, shutdown, accepted: Arc::default() })
    }

    /// Runs until shutdown, then waits for requests in flight. Events that wait for their next attempt are released for other
    /// processes. Retries while streams are unavailable.
    pub async fn run(&self, queue: &Queue) {
        let subscription = loop {
            let error = match self.subscribe(queue).await {
                Ok(subscription) => break subscription,
                Err(error) => error,
            };
            warn!(notification = self.config.id, %error, "subscribing to `ticket_events` failed; retrying");
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = sleep(SUBSCRIBE_PAUSE) => {}
            }
        };
        self.shutdown.cancelled().await;
        subscription.stop().await;
    }

    async fn subscribe(&self, queue: &Queue) -> headwater_queue::Result<Subscription> {
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
        let forwarder = self.clone();
        let handler = move |message: Message| {
            let forwarder = forwarder.clone();
            async move { forwarder.forward(&message).await }
        };
        queue.subscribe(TICKET_EVENTS, &self.config.group(), handler, config).await
    }

    /// Sends one event until the receiver accepts or rejects it, the attempts are used up, or the process shuts down.
    async fn forward(&self, message: &Message) -> Outcome {
        let Some(notification) = self.read(message) else {
            return self.counted("skipped", Outcome::Done);
        };
        let (mut attempts, mut delays) = (0, BACKOFF.timer());
        let accepted_before = self.accepted.load(Ordering::Relaxed);
        loop {
            let sending = self.sink.notify(&notification);
            let sent = timeout(self.config.timeout, sending).await.unwrap_or_else(|_| {
                Err(DeliverError::Retry(format!("no answer within {:?}", self.config.timeout)))
            });
            let (problem, pause) = match sent {
                Ok(()) => {
                    self.accepted.fetch_add(1, Ordering::Relaxed);
                    return self.counted("delivered", Outcome::Done);
                }
                Err(DeliverError::Dead(problem)) => return self.dead_letter(message, &problem),
                Err(DeliverError::Retry(problem) | DeliverError::Denied(problem)) => {
                    attempts += 1;
                    let accepts_others = self.accepted.load(Ordering::Relaxed) > accepted_before;
                    let is_event_at_fault = accepts_others && attempts >= EVENT_ATTEMPTS_MAX;
                    if attempts >= self.config.attempts || is_event_at_fault {
                        let problem = format!("{problem} (attempt {attempts})");
                        return self.dead_letter(message, &problem);
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

    fn dead_letter(&self, message: &Message, problem: &str) -> Outcome {
        warn!(
            notification = self.config.id, entry_id = %message.id, error = problem,
            "notification moved to dead letters; fix the receiver, then run `headwater dlq replay ticket_events`"
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

/// Sends events as signed requests (Standard Webhooks).
pub(crate) struct WebhookSink {
    client: Client,
    url: String,
    secret: SecretString,
}

impl WebhookSink {
    /// Sends to this URL, signed with this secret.
    pub(crate) fn new(url: &str, secret: &SecretString) -> Result<Self, String> {
        Ok(Self { client: http_client::build()?, url: url.to_owned(), secret: secret.clone() })
    }
}

#[async_trait]
impl NotificationSink for WebhookSink {
    async fn notify(&self, notification: &TicketNotification) -> Result<(), DeliverError> {
        let TicketNotification { id, event } = notification;
        let body = json!({
            "type": event.event_type.as_str(),
            "timestamp": event.payload.timestamp,
            "data": event,
        });
        let request = callback::signed(&self.client, &self.url, &self.secret, id, body.to_string());
        http::send(&self.client, request).await.map(drop)
    }
}
