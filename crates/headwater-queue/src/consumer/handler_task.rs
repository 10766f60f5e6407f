//! The handler task: calls the handler on one message after the other.
//!
//! Upstream: `partition_consumer` starts a handler task when messages are ready. Downstream: the application's handler.
//! Guarantees: a panic or a timeout of the handler counts as a failed attempt; a handler that blocks its thread or never
//! returns delays only its own task, because tasks that were woken run before the next handler.

use std::any::Any;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::CatchUnwind;
use headwater_stream::clock::{Clock, SystemClock};
use tokio::time::Instant;
use tracing::{Instrument, debug, warn};

use super::key_queues::InFlightMessage;
use super::partition_consumer::{HandlerSlot, PartitionConsumer};
use super::retry_or_dead_letter::{DeliveryResult, Disposition};
use crate::handler::Outcome;
use crate::message::Message;
use crate::trace::{self, TracedSpan};

/// A task whose handlers never wait yields after this many messages.
const YIELD_EVERY: u32 = 128;

/// Handles messages until none is ready.
pub(super) async fn run(consumer: Arc<PartitionConsumer>, slot: HandlerSlot) {
    let mut next = consumer.first_message(slot);
    let mut handled = 0;
    while let Some(item) = next {
        let (disposition, took) = handle(&consumer, &item).await;
        let step = consumer.finish_message(slot, item, disposition, took);
        handled += 1;
        // Tokio keeps the task that was woken last in the LIFO slot of this thread, where it cannot be stolen. It must
        // run first, because the next handler may block the thread.
        if step.should_yield || u32::is_multiple_of(handled, YIELD_EVERY) {
            yield_to_queue().await;
        }
        next = step.next;
    }
}

/// Re-queues this task on the run queue. `yield_now` would keep it on its current thread, where it cannot be stolen.
pub(super) async fn yield_to_queue() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Handles one message. Returns its disposition and how long the handler took; `None` if the handler was not called.
async fn handle(
    consumer: &Arc<PartitionConsumer>,
    item: &InFlightMessage,
) -> (Disposition, Option<Duration>) {
    let message = match consumer.policy.accept(item) {
        Ok(message) => message,
        Err(finished) => {
            let entry_id = item.delivery.id;
            if finished.result == DeliveryResult::Skipped {
                debug!(
                    topic = %consumer.context.topic, partition = consumer.policy.partition, %entry_id,
                    "skipped: the message is retried for another group"
                );
                return (Disposition::Settle(finished), None);
            }
            warn!(
                topic = %consumer.context.topic, partition = consumer.policy.partition, %entry_id, result = ?finished.result,
                "message moved to the dead letters without calling the handler"
            );
            return (Disposition::Settle(finished), None);
        }
    };
    let (sent_at, attempt) = (message.sent_at, message.attempt);
    let started = Instant::now();
    let outcome = call_handler(consumer, message, started).await;
    let took = started.elapsed();
    if let Some(sent_at) = sent_at {
        consumer.metrics.record_end_to_end(SystemClock.now().since(sent_at));
    }
    let disposition = match outcome {
        // The common case does not parse the message again.
        Outcome::Done => consumer.policy.decide(item, Outcome::Done),
        outcome => {
            debug!(
                topic = %consumer.context.topic, partition = consumer.policy.partition, entry_id = %item.delivery.id, attempt,
                ?outcome, "handler did not complete the message"
            );
            consumer.policy.decide(item, outcome)
        }
    };
    (disposition, Some(took))
}

/// Calls the handler; a panic becomes [`Outcome::Retry`].
async fn call_handler(
    consumer: &Arc<PartitionConsumer>,
    message: Message,
    started: Instant,
) -> Outcome {
    let bridge = consumer.context.trace.as_deref();
    let TracedSpan { span, context } =
        trace::handle_span(bridge, &message, &consumer.context.group);
    let handler = Arc::clone(&consumer.context.handler);
    // The call itself is inside: it may panic before it returns a future.
    let handling = trace::with_context(context, async move { handler.handle(message).await });
    let handling = AssertUnwindSafe(handling).catch_unwind();
    let outcome = if span.is_disabled() {
        with_timeout(consumer, handling, started).await
    } else {
        with_timeout(consumer, handling, started).instrument(span).await
    };
    outcome.unwrap_or_else(|panic| {
        let text = panic_text(panic.as_ref());
        consumer.metrics.record_anomaly("panic", 1);
        warn!(topic = %consumer.context.topic, partition = consumer.policy.partition, error = text, "handler panicked");
        Outcome::retry(format!("the handler panicked: {text}"))
    })
}

/// Runs the handler for at most `handler_timeout`.
async fn with_timeout<F: Future<Output = Outcome>>(
    consumer: &Arc<PartitionConsumer>,
    handling: CatchUnwind<AssertUnwindSafe<F>>,
    started: Instant,
) -> Result<Outcome, Box<dyn Any + Send>> {
    let limit = consumer.context.config.handler_timeout;
    let ended = |outcome| {
        // A handler that blocks its thread cannot be interrupted; it is only counted.
        if limit.is_some_and(|limit| started.elapsed() > limit) {
            consumer.metrics.record_handler_timeout("late");
        }
        outcome
    };
    // Pinned on the stack: one allocation per message is a large part of the cost of a fast handler.
    let mut storage = pin!(Some(handling));
    let mut handling = storage.as_mut().as_pin_mut().expect("it was set on the line above");
    // A handler that never waits ends here.
    if let Poll::Ready(outcome) = futures_util::poll!(handling.as_mut()) {
        return ended(outcome);
    }
    consumer.settle_now();
    let Some(limit) = limit else { return handling.await };
    match tokio::time::timeout(limit, handling).await {
        Ok(outcome) => ended(outcome),
        Err(_) => {
            consumer.metrics.record_anomaly("timeout", 1);
            consumer.metrics.record_handler_timeout("dropped");
            // Dropping the future may panic, too.
            std::panic::catch_unwind(AssertUnwindSafe(|| storage.set(None)))?;
            Ok(Outcome::retry(format!("the handler took longer than {limit:?}")))
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
