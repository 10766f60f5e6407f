//! Delivers an event to the handlers of a durable subscription, with retries.
//!
//! Upstream: an entry of a consumer group. Downstream: `handler`.
//! Guarantees: a failed event is retried in place: it stays unacknowledged, and no copy is appended to the stream, where
//! other readers would see it twice. Only the handlers that failed run again. When the bus closes, events waiting for
//! their next attempt are released.

use std::time::Duration;

use headwater_queue::{Outcome, RetryPolicy};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::handler::{DeliveredEvent, HandlerResult, TypedHandler};

/// Attempts, if the retry policy does not set them.
const ATTEMPTS_DEFAULT: u32 = 5;

/// The handlers of one durable subscription and their retry policy.
#[derive(Clone)]
pub(crate) struct EventDelivery {
    pub(crate) handlers: Vec<TypedHandler>,
    pub(crate) handler_timeout: Duration,
    pub(crate) retry: RetryPolicy,
    /// Cancelled when the bus closes or is dropped.
    pub(crate) closing: CancellationToken,
}

impl EventDelivery {
    /// Whether a handler is registered for this event type.
    pub(crate) fn handles(&self, event_type: &str) -> bool {
        self.handlers.iter().any(|handler| handler.event_type == event_type)
    }

    /// Runs the handlers of an event until all succeed, the attempts are used up (a dead letter), or the bus closes (a
    /// release).
    pub(crate) async fn run(&self, delivered: &DeliveredEvent) -> Outcome {
        let event_type = &delivered.envelope.event_type;
        let mut remaining: Vec<&TypedHandler> =
            self.handlers.iter().filter(|handler| handler.event_type == event_type).collect();
        let attempts = self.retry.max_attempts.unwrap_or(ATTEMPTS_DEFAULT);
        let mut attempt = 0;
        loop {
            attempt += 1;
            let mut result = DeliveryAttempt::default();
            for handler in remaining {
                let handled = handler.run(delivered.clone(), "durable", self.handler_timeout).await;
                result.record(handler, handled);
            }
            if result.is_released {
                return Outcome::Release;
            }
            let Some(reason) = result.reason else { return Outcome::Done };
            if result.is_permanent || attempt >= attempts {
                return Outcome::dead_letter(format!("{reason} (attempt {attempt})"));
            }
            warn!(
                event_type,
                event_id = %delivered.envelope.event_id,
                attempt,
                error = reason,
                "durable handler failed; the event will be retried"
            );
            let wait =
                result.after.unwrap_or_else(|| self.retry.backoff.delay(attempt, fastrand::f64()));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.closing.cancelled() => return Outcome::Release,
            }
            remaining = result.failed;
        }
    }
}

/// Result of one attempt of all remaining handlers.
#[derive(Default)]
struct DeliveryAttempt<'a> {
    failed: Vec<&'a TypedHandler>,
    /// Reason of the first failure.
    reason: Option<String>,
    after: Option<Duration>,
    is_permanent: bool,
    is_released: bool,
}

impl<'a> DeliveryAttempt<'a> {
    fn record(&mut self, handler: &'a TypedHandler, handled: HandlerResult) {
        match handled {
            HandlerResult::Done => {}
            HandlerResult::Release => self.is_released = true,
            HandlerResult::Failed { reason, after, is_permanent, .. } => {
                self.failed.push(handler);
                self.is_permanent |= is_permanent;
                self.after = self.after.max(after);
                self.reason.get_or_insert(reason);
            }
        }
    }
}
