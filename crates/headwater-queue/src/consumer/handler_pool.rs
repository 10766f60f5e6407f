//! The handler pool of a partition: tasks that call the application's handler on one message after the other.
//!
//! Upstream: `partition_driver` adds messages. Downstream: the application's handler; the driver takes what is finished.
//! Guarantees: at most `concurrency` handlers at once; no handler starts while the subscription is paused or the lease is
//! not valid; a panic or a timeout of the handler counts as a failed attempt; a handler that blocks its thread or never
//! returns delays only its own task, because tasks that were woken run before the next handler.
//! An idle pool has no tasks. Messages go in and results come out in batches, so that a fast handler costs no task switch
//! per message.

use std::any::Any;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::CatchUnwind;
use headwater_stream::EntryId;
use headwater_stream::clock::{Clock, SystemClock};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{Instrument, debug, warn};

use super::key_queues::InFlightMessage;
use super::partition_context::PartitionContext;
use super::partition_state::{FinishedMessage, SLOW_HANDLER};
use super::retry_or_dead_letter::{DeliveryResult, Disposition};
use crate::handler::Outcome;
use crate::message::Message;
use crate::trace::{self, TracedSpan};

/// So many finished messages are reported at once.
const REPORT_BATCH: usize = 256;
/// A finished message waits at most this long for a larger batch, while handlers do not wait.
const REPORT_AFTER: Duration = Duration::from_millis(1);
/// A task whose handlers never wait yields after this many messages.
const YIELD_EVERY: u32 = 128;

pub(super) struct HandlerPool {
    context: Arc<PartitionContext>,
    state: Mutex<PoolState>,
    /// Notified when messages are finished.
    has_finished: Notify,
}

#[derive(Default)]
struct PoolState {
    /// Not started.
    waiting: VecDeque<InFlightMessage>,
    finished: Vec<FinishedMessage>,
    oldest_finished: Option<Instant>,
    /// Tasks that are running.
    workers: usize,
    tasks: JoinSet<()>,
    /// Draining: messages are handled although the subscription is paused.
    ignores_pause: bool,
    is_closed: bool,
}

/// What a task does next.
enum WorkerStep {
    Handle(InFlightMessage),
    /// The driver may have more in a moment.
    Linger,
    End,
}

impl HandlerPool {
    pub(super) fn new(context: Arc<PartitionContext>) -> Self {
        Self { context, state: Mutex::default(), has_finished: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().expect("no code panics while it holds the pool")
    }

    /// Adds messages. One that failed before comes first, because its key waits for it.
    pub(super) fn add(self: &Arc<Self>, messages: Vec<InFlightMessage>) {
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        for message in messages {
            if message.failures > 0 {
                state.waiting.push_front(message);
            } else {
                state.waiting.push_back(message);
            }
        }
        self.start_tasks(&mut state);
    }

    /// Starts handlers that could not start while the subscription was paused or the lease was not trusted.
    pub(super) fn resume(self: &Arc<Self>) {
        self.start_tasks(&mut self.lock());
    }

    /// From now on, messages are handled although the subscription is paused.
    pub(super) fn ignore_pause(self: &Arc<Self>) {
        let mut state = self.lock();
        state.ignores_pause = true;
        self.start_tasks(&mut state);
    }

    fn start_tasks(self: &Arc<Self>, state: &mut PoolState) {
        if state.waiting.is_empty() || !self.may_start(state) {
            return;
        }
        let free = self.context.subscription.config.concurrency.saturating_sub(state.workers);
        while state.tasks.try_join_next().is_some() {}
        for _ in 0..free.min(state.waiting.len()) {
            state.workers += 1;
            state.tasks.spawn(Arc::clone(self).work());
        }
    }

    /// Whether a handler may start. Never after the lease ran out: side effects of a handler are not fenced.
    fn may_start(&self, state: &PoolState) -> bool {
        let is_paused = self.context.subscription.is_paused() && !state.ignores_pause;
        !state.is_closed && !is_paused && self.context.lease.is_valid()
    }

    /// Takes back the messages that no handler has started.
    pub(super) fn withdraw(&self) -> Vec<EntryId> {
        self.lock().waiting.drain(..).map(|message| message.delivery.id).collect()
    }

    /// Aborts all handlers and starts no more. One that blocks its thread keeps running, but is not reported.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.waiting.clear();
        state.tasks.abort_all();
    }

    /// Waits until messages are finished. Cancel-safe.
    pub(super) async fn has_finished(&self) {
        self.has_finished.notified().await;
    }

    /// Takes what is finished.
    pub(super) fn take_finished(&self) -> Vec<FinishedMessage> {
        let mut state = self.lock();
        state.oldest_finished = None;
        std::mem::take(&mut state.finished)
    }

    /// Handles messages until none is left.
    async fn work(self: Arc<Self>) {
        let mut handled = 0_u32;
        let mut step = self.next(&mut self.lock(), false);
        loop {
            let message = match step {
                WorkerStep::Handle(message) => message,
                WorkerStep::Linger => {
                    yield_to_queue().await;
                    step = self.next(&mut self.lock(), true);
                    continue;
                }
                WorkerStep::End => return,
            };
            let (disposition, took) = self.handle(&message).await;
            let finished = FinishedMessage { id: message.delivery.id, disposition, took };
            let (next, is_reported) = self.finish(finished);
            step = next;
            handled += 1;
            // Tokio keeps the task that was woken last in the LIFO slot of this thread, where it cannot be stolen. It
            // must run first, because the next handler may block the thread.
            if is_reported || handled.is_multiple_of(YIELD_EVERY) {
                yield_to_queue().await;
                if matches!(step, WorkerStep::Linger) {
                    step = self.next(&mut self.lock(), true);
                }
            }
        }
    }

    fn next(&self, state: &mut PoolState, has_lingered: bool) -> WorkerStep {
        if self.may_start(state)
            && let Some(message) = state.waiting.pop_front()
        {
            return WorkerStep::Handle(message);
        }
        if !has_lingered {
            return WorkerStep::Linger;
        }
        state.workers -= 1;
        WorkerStep::End
    }

    /// Records a finished message. Returns the next step, and whether the driver was woken.
    fn finish(&self, finished: FinishedMessage) -> (WorkerStep, bool) {
        let is_slow = finished.took.is_some_and(|took| took >= SLOW_HANDLER);
        let mut state = self.lock();
        state.finished.push(finished);
        let next = self.next(&mut state, false);
        let count = state.finished.len();
        let is_due = match state.oldest_finished {
            None => {
                state.oldest_finished = Some(Instant::now());
                false
            }
            Some(oldest) => count.is_multiple_of(16) && oldest.elapsed() >= REPORT_AFTER,
        };
        let is_last = !matches!(next, WorkerStep::Handle(_));
        let should_report = is_last || is_slow || is_due || count.is_multiple_of(REPORT_BATCH);
        drop(state);
        if should_report {
            self.has_finished.notify_one();
        }
        (next, should_report)
    }

    /// Reports what is finished before this task waits.
    fn report_finished(&self) {
        if !self.lock().finished.is_empty() {
            self.has_finished.notify_one();
        }
    }

    /// Handles one message. Returns its disposition and how long the handler took; `None` if the handler was not called.
    async fn handle(&self, item: &InFlightMessage) -> (Disposition, Option<Duration>) {
        let context = &self.context;
        let message = match context.policy.accept(item) {
            Ok(message) => message,
            Err(finished) => {
                let entry_id = item.delivery.id;
                if finished.result == DeliveryResult::Skipped {
                    debug!(
                        topic = %context.subscription.topic, partition = context.policy.partition, %entry_id,
                        "skipped: the message is retried for another group"
                    );
                    return (Disposition::Settle(finished), None);
                }
                warn!(
                    topic = %context.subscription.topic, partition = context.policy.partition, %entry_id, result = ?finished.result,
                    "message moved to the dead letters without calling the handler"
                );
                return (Disposition::Settle(finished), None);
            }
        };
        let (sent_at, attempt) = (message.sent_at, message.attempt);
        let started = Instant::now();
        let outcome = self.call_handler(message, started).await;
        let took = started.elapsed();
        context.metrics.record_end_to_end(SystemClock.now().since(sent_at));
        let disposition = match outcome {
            // The common case does not parse the message again.
            Outcome::Done => context.policy.decide(item, Outcome::Done),
            outcome => {
                debug!(
                    topic = %context.subscription.topic, partition = context.policy.partition, entry_id = %item.delivery.id, attempt,
                    ?outcome, "handler did not complete the message"
                );
                context.policy.decide(item, outcome)
            }
        };
        (disposition, Some(took))
    }

    /// Calls the handler; a panic becomes [`Outcome::Retry`].
    async fn call_handler(&self, message: Message, started: Instant) -> Outcome {
        let subscription = &self.context.subscription;
        let bridge = subscription.trace.as_deref();
        let TracedSpan { span, context } =
            trace::handle_span(bridge, &message, &subscription.group);
        let handler = Arc::clone(&subscription.handler);
        // The call itself is inside: it may panic before it returns a future.
        let handling = trace::with_context(context, async move { handler.handle(message).await });
        let handling = AssertUnwindSafe(handling).catch_unwind();
        let outcome = if span.is_disabled() {
            self.with_timeout(handling, started).await
        } else {
            self.with_timeout(handling, started).instrument(span).await
        };
        outcome.unwrap_or_else(|panic| {
            let text = panic_text(panic.as_ref());
            self.context.metrics.record_anomaly("panic", 1);
            warn!(topic = %subscription.topic, partition = self.context.policy.partition, error = text, "handler panicked");
            Outcome::retry(format!("the handler panicked: {text}"))
        })
    }

    /// Runs the handler for at most `handler_timeout`.
    async fn with_timeout<F: Future<Output = Outcome>>(
        &self,
        handling: CatchUnwind<AssertUnwindSafe<F>>,
        started: Instant,
    ) -> Result<Outcome, Box<dyn Any + Send>> {
        let context = &self.context;
        let limit = context.subscription.config.handler_timeout;
        let ended = |outcome| {
            // A handler that blocks its thread cannot be interrupted; it is only counted.
            if limit.is_some_and(|limit| started.elapsed() > limit) {
                context.metrics.record_handler_timeout("late");
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
        self.report_finished();
        let Some(limit) = limit else { return handling.await };
        match tokio::time::timeout(limit, handling).await {
            Ok(outcome) => ended(outcome),
            Err(_) => {
                context.metrics.record_anomaly("timeout", 1);
                context.metrics.record_handler_timeout("dropped");
                // Dropping the future may panic, too.
                std::panic::catch_unwind(AssertUnwindSafe(|| storage.set(None)))?;
                Ok(Outcome::retry(format!("the handler took longer than {limit:?}")))
            }
        }
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

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
