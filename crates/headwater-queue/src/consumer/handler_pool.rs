//! The handler pool of a partition: tasks that call the application's handler on one message after the other.
//!
//! Upstream: `partition_driver` adds messages. Downstream: the application's handler; the driver takes what is finished.
//! Guarantees: at most `concurrency` handlers at once; no handler starts while the subscription is paused or the lease is
//! not valid; a panic or a timeout of the handler counts as a failed attempt; a handler that blocks its thread or never
//! returns delays only its own task, because tasks that were woken run before the next handler.
//! An idle pool has no tasks, and while handlers are quick, it has few. Messages go in and results come out in batches, so
//! that a fast handler costs no task switch per message.

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
use tokio::runtime::Handle;
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
/// A handler is quick if it never waits and takes less than this.
const QUICK_HANDLER: Duration = Duration::from_micros(100);
/// After so many quick handlers in a row, the next ones are expected to be quick, too.
const QUICK_HANDLERS_MIN: u32 = 64;
/// Tasks for each thread of the runtime while handlers are quick. More would not be faster: most of them would find no message.
const QUICK_TASKS_PER_THREAD: usize = 2;
/// While messages wait for one of these tasks, the driver looks this often whether all of them are blocked.
pub(super) const STALL_CHECK_EVERY: Duration = Duration::from_millis(5);

pub(super) struct HandlerPool {
    context: Arc<PartitionContext>,
    state: Mutex<PoolState>,
    /// Notified when messages are finished.
    has_finished: Notify,
    /// Maximum of tasks while handlers are quick.
    quick_tasks_max: usize,
}

#[derive(Default)]
struct PoolState {
    /// Not started.
    waiting: VecDeque<InFlightMessage>,
    finished: Vec<FinishedMessage>,
    oldest_finished: Option<Instant>,
    /// Tasks that are running, and those of them whose handler waits.
    workers: usize,
    parked: usize,
    tasks: JoinSet<()>,
    /// How many quick handlers have finished since another one was called.
    quick_in_a_row: u32,
    /// Handlers that have finished, and how many had at the last check.
    handled: u64,
    handled_before: u64,
    /// Draining: messages are handled although the subscription is paused.
    ignores_pause: bool,
    is_closed: bool,
}

impl PoolState {
    fn is_quick(&self) -> bool {
        self.quick_in_a_row >= QUICK_HANDLERS_MIN
    }
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
        let quick_tasks_max = QUICK_TASKS_PER_THREAD * Handle::current().metrics().num_workers();
        Self { context, state: Mutex::default(), has_finished: Notify::new(), quick_tasks_max }
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

    /// Whether messages wait although `concurrency` permits more tasks, because handlers are quick.
    pub(super) fn is_limited(&self) -> bool {
        if self.context.subscription.config.concurrency <= self.quick_tasks_max {
            return false;
        }
        let state = self.lock();
        let may_have_more = state.workers < self.context.subscription.config.concurrency;
        state.is_quick() && may_have_more && !state.waiting.is_empty()
    }

    /// Like [`resume`](Self::resume). If no handler has finished since the last check, handlers are no longer quick: each of the
    /// few tasks may be in one that blocks its thread, which cannot tell.
    pub(super) fn check(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.handled == state.handled_before {
            state.quick_in_a_row = 0;
        }
        state.handled_before = state.handled;
        self.start_tasks(&mut state);
    }

    /// From now on, messages are handled although the subscription is paused.
    pub(super) fn ignore_pause(self: &Arc<Self>) {
        let mut state = self.lock();
        state.ignores_pause = true;
        self.start_tasks(&mut state);
    }

    /// Starts the tasks that the waiting messages need. Returns whether there are any.
    fn start_tasks(self: &Arc<Self>, state: &mut PoolState) -> bool {
        let concurrency = self.context.subscription.config.concurrency;
        let tasks_max = match state.is_quick() {
            // Beside those whose handlers wait, which handle no other message.
            true => concurrency.min(self.quick_tasks_max + state.parked),
            false => concurrency,
        };
        let missing = tasks_max.saturating_sub(state.workers).min(state.waiting.len());
        if missing == 0 || !self.may_start(state) || !self.is_lease_valid() {
            return false;
        }
        while state.tasks.try_join_next().is_some() {}
        for _ in 0..missing {
            state.workers += 1;
            state.tasks.spawn(Arc::clone(self).work());
        }
        true
    }

    /// Whether a handler may start.
    fn may_start(&self, state: &PoolState) -> bool {
        let is_paused = self.context.subscription.is_paused() && !state.ignores_pause;
        !state.is_closed && !is_paused
    }

    /// Whether the lease is valid. No handler starts after it ran out: side effects of a handler are not fenced. Reads several
    /// clocks, so a task asks before it locks the pool for its next message.
    fn is_lease_valid(&self) -> bool {
        self.context.lease.is_valid()
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
        let mut step = self.next(false);
        // The end of one handler is the start of the next, if nothing comes in between: reading a clock takes time, too.
        let mut now = Instant::now();
        loop {
            let message = match step {
                WorkerStep::Handle(message) => message,
                WorkerStep::Linger => {
                    yield_to_queue().await;
                    step = self.next(true);
                    now = Instant::now();
                    continue;
                }
                WorkerStep::End => return,
            };
            let started = now;
            let (disposition, ended) = self.handle(&message, started).await;
            now = ended.unwrap_or(started);
            let took = ended.map(|ended| ended - started);
            let finished = FinishedMessage { id: message.delivery.id, disposition, took };
            let (next, has_woken) = self.finish(finished, now);
            step = next;
            handled += 1;
            // Tokio keeps the task that was woken last in the LIFO slot of this thread, where it cannot be stolen. It
            // must run first, because the next handler may block the thread.
            if has_woken || handled.is_multiple_of(YIELD_EVERY) {
                yield_to_queue().await;
                if matches!(step, WorkerStep::Linger) {
                    step = self.next(true);
                }
                now = Instant::now();
            }
        }
    }

    fn next(&self, has_lingered: bool) -> WorkerStep {
        let is_lease_valid = self.is_lease_valid();
        self.next_of(&mut self.lock(), is_lease_valid, has_lingered)
    }

    fn next_of(
        &self,
        state: &mut PoolState,
        is_lease_valid: bool,
        has_lingered: bool,
    ) -> WorkerStep {
        if is_lease_valid
            && self.may_start(state)
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

    /// Records a message that finished now. Returns the next step, and whether another task was woken or started.
    fn finish(self: &Arc<Self>, finished: FinishedMessage, now: Instant) -> (WorkerStep, bool) {
        let is_slow = finished.took.is_some_and(|took| took >= SLOW_HANDLER);
        let is_quick = finished.took.is_none_or(|took| took < QUICK_HANDLER);
        let is_lease_valid = self.is_lease_valid();
        let mut state = self.lock();
        state.finished.push(finished);
        let next = self.next_of(&mut state, is_lease_valid, false);
        state.handled += 1;
        let has_started = if is_quick {
            state.quick_in_a_row = state.quick_in_a_row.saturating_add(1);
            false
        } else {
            self.end_quick(&mut state)
        };
        let count = state.finished.len();
        let is_due = match state.oldest_finished {
            None => {
                state.oldest_finished = Some(now);
                false
            }
            Some(oldest) => count.is_multiple_of(16) && now - oldest >= REPORT_AFTER,
        };
        let is_last = !matches!(next, WorkerStep::Handle(_));
        let should_report = is_last || is_slow || is_due || count.is_multiple_of(REPORT_BATCH);
        drop(state);
        if should_report {
            self.has_finished.notify_one();
        }
        (next, should_report || has_started)
    }

    /// A handler is not quick: all tasks that the messages need are started. Returns whether there are any.
    fn end_quick(self: &Arc<Self>, state: &mut PoolState) -> bool {
        let was_quick = state.is_quick();
        state.quick_in_a_row = 0;
        was_quick && self.start_tasks(state)
    }

    /// Reports what is finished before this task waits, and lets other tasks go on.
    fn before_wait(self: &Arc<Self>) {
        let mut state = self.lock();
        state.parked += 1;
        self.end_quick(&mut state);
        let has_finished = !state.finished.is_empty();
        drop(state);
        if has_finished {
            self.has_finished.notify_one();
        }
    }

    /// Handles one message, which starts now. Returns its disposition and when the handler ended; `None` if it was not called.
    async fn handle(
        self: &Arc<Self>,
        item: &InFlightMessage,
        started: Instant,
    ) -> (Disposition, Option<Instant>) {
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
        let outcome = self.call_handler(message, started).await;
        let ended = Instant::now();
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
        (disposition, Some(ended))
    }

    /// Calls the handler; a panic becomes [`Outcome::Retry`].
    async fn call_handler(self: &Arc<Self>, message: Message, started: Instant) -> Outcome {
        let subscription = &self.context.subscription;
        let bridge = subscription.trace.as_deref();
        let TracedSpan { span, context } =
            trace::handle_span(bridge, &message, &subscription.group);
        let handler = &subscription.handler;
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
        self: &Arc<Self>,
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
        self.before_wait();
        let waited = match limit {
            None => Ok(handling.await),
            Some(limit) => tokio::time::timeout(limit, handling).await.map_err(|_| limit),
        };
        self.lock().parked -= 1;
        match waited {
            Ok(outcome) => ended(outcome),
            Err(limit) => {
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
