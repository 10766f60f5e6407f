//! Runs a handler on one message after the other.
//!
//! Upstream: `worker` starts a runner when there is something to do. Downstream: the application's handler.
//! Promises: a panic is a failure, and so is a handler that takes too long; a handler that blocks its thread or never
//! returns holds up its own runner and nobody else: whoever was woken runs before the next handler does.

use std::any::Any;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::CatchUnwind;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::time::Instant;
use tracing::{Instrument, debug, warn};

use super::lanes::Item;
use super::verdict::{Ended, Verdict};
use super::worker::{Slot, Worker};
use crate::message::Message;
use crate::retry::Outcome;
use crate::trace::{self, Traced};

/// Messages handled before others get a turn, for handlers that never wait.
const TURN: u32 = 128;

/// Handles messages until there is none.
pub(super) async fn run(worker: Arc<Worker>, slot: Slot) {
    let mut next = worker.begin(slot);
    let mut handled = 0;
    while let Some(item) = next {
        let (verdict, took) = handle(&worker, &item).await;
        let step = worker.finish(slot, item, verdict, took);
        handled += 1;
        // Tokio keeps who was woken last on this thread, where nobody else can fetch it: it goes first, for the next
        // handler may block the thread.
        if step.has_woken || u32::is_multiple_of(handled, TURN) {
            let_others_run().await;
        }
        next = step.next;
    }
}

/// Goes to the end of the line. Not `yield_now`: who yields so waits at its thread, where nobody can fetch it either.
pub(super) async fn let_others_run() {
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

/// Handles one message: what becomes of it, and how long its handler took.
async fn handle(worker: &Arc<Worker>, item: &Item) -> (Verdict, Option<Duration>) {
    let message = match worker.rules.admit(item) {
        Ok(message) => message,
        Err(ending) => {
            let entry_id = item.delivery.id;
            if ending.result == Ended::Skipped {
                debug!(
                    topic = %worker.job.topic, partition = worker.rules.partition, %entry_id,
                    "another group tries this message again"
                );
                return (Verdict::End(ending), None);
            }
            warn!(
                topic = %worker.job.topic, partition = worker.rules.partition, %entry_id, result = ?ending.result,
                "message goes to the dead letters unhandled"
            );
            return (Verdict::End(ending), None);
        }
    };
    let (sent_at, attempt) = (message.sent_at, message.attempt);
    let started = Instant::now();
    let outcome = call(worker, message, started).await;
    let took = started.elapsed();
    if let Some(sent_at) = sent_at {
        worker.meters.end_to_end(since(sent_at));
    }
    let verdict = match outcome {
        // The usual case needs no second look at the message.
        Outcome::Done => worker.rules.judge(item, Outcome::Done),
        outcome => {
            debug!(
                topic = %worker.job.topic, partition = worker.rules.partition, entry_id = %item.delivery.id, attempt,
                ?outcome, "message was not done"
            );
            worker.rules.judge(item, outcome)
        }
    };
    (verdict, Some(took))
}

/// Calls the handler and catches what goes wrong in it.
async fn call(worker: &Arc<Worker>, message: Message, started: Instant) -> Outcome {
    let bridge = worker.job.trace.as_deref();
    let Traced { span, context } = trace::handling(bridge, &message, &worker.job.group);
    let handler = Arc::clone(&worker.job.handler);
    // Calling it is inside, too: it may panic before it returns a future.
    let handling = trace::within(context, async move { handler.handle(message).await });
    let handling = AssertUnwindSafe(handling).catch_unwind();
    let outcome = if span.is_disabled() {
        in_time(worker, handling, started).await
    } else {
        in_time(worker, handling, started).instrument(span).await
    };
    outcome.unwrap_or_else(|panic| {
        let text = panic_text(panic.as_ref());
        worker.meters.anomaly("panic", 1);
        warn!(topic = %worker.job.topic, partition = worker.rules.partition, error = text, "handler panicked");
        Outcome::retry(format!("the handler panicked: {text}"))
    })
}

async fn in_time<F: Future<Output = Outcome>>(
    worker: &Arc<Worker>,
    handling: CatchUnwind<AssertUnwindSafe<F>>,
    started: Instant,
) -> Result<Outcome, Box<dyn Any + Send>> {
    let limit = worker.job.config.handler_timeout;
    let ended = |outcome| {
        // Nobody can interrupt a handler that blocks its thread; at least somebody says so.
        if limit.is_some_and(|limit| started.elapsed() > limit) {
            worker.meters.handler_timeout("late");
        }
        outcome
    };
    // Not in a box of its own: an allocation for each message is a good part of what a quick one costs.
    let mut place = pin!(Some(handling));
    let mut handling = place.as_mut().as_pin_mut().expect("it was put there just now");
    // Most handlers that wait for nothing end here.
    if let Poll::Ready(outcome) = futures_util::poll!(handling.as_mut()) {
        return ended(outcome);
    }
    worker.settle_soon();
    let Some(limit) = limit else { return handling.await };
    match tokio::time::timeout(limit, handling).await {
        Ok(outcome) => ended(outcome),
        Err(_) => {
            worker.meters.anomaly("timeout", 1);
            worker.meters.handler_timeout("dropped");
            // What it holds is dropped here, and may panic as well.
            std::panic::catch_unwind(AssertUnwindSafe(|| place.set(None)))?;
            Ok(Outcome::retry(format!("the handler took longer than {limit:?}")))
        }
    }
}

fn since(sent_at: Timestamp) -> Duration {
    SystemClock.now().since(sent_at)
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
