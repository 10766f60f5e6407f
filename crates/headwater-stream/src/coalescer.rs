//! Coalesces the requests of concurrent callers into batches: many requests, one round trip or one commit.
//!
//! Upstream: code with many concurrent callers, each with one small request. Downstream: a function over a batch.
//! Guarantees: requests are taken in the order they were made, and batches start in that order. A caller that is dropped does
//! not affect the others: its request is removed if it was not taken yet, and executed if it was. A single caller is not
//! delayed unless `linger` is set.
//! Not here: retries. After [`BatchError`] the owner of the function decides whether a request took effect.

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::error;

use crate::error::{Result, StreamError};
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX};

/// Maximum of [`CoalescerConfig::linger`].
const LINGER_MAX: Duration = Duration::from_secs(60);
/// Maximum of [`CoalescerConfig::in_flight_max`].
const IN_FLIGHT_MAX: usize = 1024;

/// How requests are batched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoalescerConfig {
    /// Requests per batch. Default: 1024. At most [`BATCH_MAX`].
    pub max_items: usize,
    /// Bytes per batch, by the sizes that callers give; a larger request gets a batch of its own. Default: 1 MiB. At most
    /// [`BATCH_BYTES_MAX`].
    pub max_bytes: usize,
    /// How long the first request waits for others. Default: zero; requests made while a batch is in flight share the next
    /// one. At most 60 s.
    pub linger: Duration,
    /// Batches in flight. Default: 1, so that requests take effect in order. At most 1024.
    pub in_flight_max: usize,
}

impl Default for CoalescerConfig {
    fn default() -> Self {
        Self { max_items: 1024, max_bytes: 1024 * 1024, linger: Duration::ZERO, in_flight_max: 1 }
    }
}

impl CoalescerConfig {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        let within = |what: &str, value: usize, max: usize| match value {
            0 => Err(StreamError::invalid(what, "0; the minimum is 1")),
            _ if value > max => {
                Err(StreamError::invalid(what, format!("{value}; the limit is {max}")))
            }
            _ => Ok(()),
        };
        within("max_items", self.max_items, BATCH_MAX)?;
        within("max_bytes", self.max_bytes, BATCH_BYTES_MAX)?;
        within("in_flight_max", self.in_flight_max, IN_FLIGHT_MAX)?;
        if self.linger > LINGER_MAX {
            let problem = format!("{:?}; the limit is {LINGER_MAX:?}", self.linger);
            return Err(StreamError::invalid("linger", problem));
        }
        Ok(())
    }
}

/// There is no response: the batch panicked or returned too few responses, or the runtime of the coalescer has shut down.
/// Whether the request took effect is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the batch ended without a response; it may have been executed")]
pub struct BatchError;

/// Batches the requests of concurrent callers.
///
/// Its task ends when it is dropped, after the batches in flight.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use headwater_stream::{Coalescer, CoalescerConfig};
///
/// let double = |numbers: Vec<u32>| async move { numbers.iter().map(|number| number * 2).collect() };
/// let coalescer = Coalescer::new(CoalescerConfig::default(), double)?;
/// assert_eq!(coalescer.call(21).await?, 42);
/// # Ok(()) }
/// ```
pub struct Coalescer<Request, Response> {
    shared: Arc<CoalescerShared<Request, Response>>,
    task: Option<JoinHandle<()>>,
}

struct CoalescerShared<Request, Response> {
    config: CoalescerConfig,
    execute_batch: ExecuteBatch<Request, Response>,
    state: Mutex<CoalescerState<Request, Response>>,
    /// Wakes the task: there is a request to take, or the coalescer is closing.
    changed: Notify,
}

type ExecuteBatch<Request, Response> =
    Box<dyn Fn(Vec<Request>) -> BoxFuture<'static, Vec<Response>> + Send + Sync>;

struct CoalescerState<Request, Response> {
    /// Requests that were not taken yet, oldest first. Never more than there are waiting callers.
    queue: VecDeque<QueuedRequest<Request, Response>>,
    /// Sum of their sizes.
    bytes: usize,
    next_number: u64,
    is_closing: bool,
    /// Whether the task has ended, so that no request will be taken.
    has_ended: bool,
}

struct QueuedRequest<Request, Response> {
    number: u64,
    request: Request,
    bytes: usize,
    since: Instant,
    completer: oneshot::Sender<Response>,
}

impl<Request, Response> Coalescer<Request, Response>
where
    Request: Send + 'static,
    Response: Send + 'static,
{
    /// Starts the task, on the runtime of the caller. `execute_batch` returns one response per request, in order; if the
    /// whole batch fails, it returns the error as the response of each request.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new<F, Batch>(config: CoalescerConfig, execute_batch: F) -> Result<Self>
    where
        F: Fn(Vec<Request>) -> Batch + Send + Sync + 'static,
        Batch: Future<Output = Vec<Response>> + Send + 'static,
    {
        config.validate()?;
        let state = CoalescerState {
            queue: VecDeque::new(),
            bytes: 0,
            next_number: 0,
            is_closing: false,
            has_ended: false,
        };
        let shared = Arc::new(CoalescerShared {
            config,
            execute_batch: Box::new(move |requests| execute_batch(requests).boxed()),
            state: Mutex::new(state),
            changed: Notify::new(),
        });
        let task = tokio::spawn(run(EndOnDrop(Arc::clone(&shared))));
        Ok(Self { shared, task: Some(task) })
    }

    /// Executes a request in a batch with those of other callers. Cancel-safe: dropped before the request was taken, it has
    /// no effect; afterwards it is executed and its response discarded.
    pub async fn call(&self, request: Request) -> Result<Response, BatchError> {
        self.call_with_size(request, 0).await
    }

    /// Like [`call`](Self::call), for a request that counts for `bytes` bytes.
    pub async fn call_with_size(
        &self,
        request: Request,
        bytes: usize,
    ) -> Result<Response, BatchError> {
        let (number, response) = self.shared.enqueue(request, bytes);
        let mut cancel = CancelOnDrop { shared: &self.shared, number: Some(number) };
        let response = response.await;
        cancel.number = None;
        response.map_err(|_| BatchError)
    }

    #[cfg(feature = "redis")]
    /// Whether the task has ended because its runtime shut down: no call will get a response.
    pub(crate) fn has_ended(&self) -> bool {
        self.shared.lock().has_ended
    }

    /// Waits until the batches in flight have ended.
    pub async fn close(mut self) {
        self.shared.close();
        if let Some(task) = self.task.take() {
            // The task catches panics of `execute_batch`; if its runtime aborted it, it has ended.
            let _ = task.await;
        }
    }
}

impl<Request, Response> Drop for Coalescer<Request, Response> {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl<Request, Response> fmt::Debug for Coalescer<Request, Response> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coalescer").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

/// Takes requests and executes them in batches, until the coalescer is closed.
async fn run<Request: Send + 'static, Response: Send + 'static>(
    guard: EndOnDrop<Request, Response>,
) {
    let shared = &guard.0;
    let mut in_flight: FuturesUnordered<BoxFuture<'static, usize>> = FuturesUnordered::new();
    let mut completed = 0;
    loop {
        // Callers that just got their responses are about to make their next requests. One yield lets them do so, which
        // makes batches large without waiting for time to pass.
        if completed > 1 {
            tokio::task::yield_now().await;
            completed = 0;
        }
        let mut wake_at = None;
        while in_flight.len() < shared.config.in_flight_max {
            match shared.next_step() {
                NextStep::Execute(batch) => {
                    let mut call = execute(Arc::clone(shared), batch).boxed();
                    // Polled here, so that batches start in the order of their requests.
                    match futures_util::poll!(&mut call) {
                        Poll::Ready(count) => completed += count,
                        Poll::Pending => in_flight.push(call),
                    }
                }
                NextStep::WaitUntil(instant) => {
                    wake_at = Some(instant);
                    break;
                }
                NextStep::Idle => break,
                NextStep::Closed if in_flight.is_empty() => return,
                NextStep::Closed => break,
            }
        }
        if completed > 1 {
            continue;
        }
        tokio::select! {
            Some(count) = in_flight.next() => completed = count,
            () = shared.changed.notified() => {}
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
        }
    }
}

/// Fails waiting callers when the task ends, also when its runtime shuts down.
struct EndOnDrop<Request, Response>(Arc<CoalescerShared<Request, Response>>);

impl<Request, Response> Drop for EndOnDrop<Request, Response> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.has_ended = true;
        let left = std::mem::take(&mut state.queue);
        drop(state);
        drop(left);
    }
}

/// Executes one batch and completes its calls. Returns the number of requests.
async fn execute<Request, Response>(
    shared: Arc<CoalescerShared<Request, Response>>,
    batch: Vec<QueuedRequest<Request, Response>>,
) -> usize {
    let count = batch.len();
    let (requests, completers): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|queued| (queued.request, queued.completer)).unzip();
    // A panic in one batch must not end the task: other callers depend on it.
    let execution = AssertUnwindSafe(async { (shared.execute_batch)(requests).await });
    let responses = execution.catch_unwind().await.unwrap_or_else(|_| {
        error!("a batch panicked, its callers get an error");
        Vec::new()
    });
    // Completers without a response fail their calls when they are dropped.
    let calls = completers.into_iter().zip(responses);
    // A caller that is gone does not need it.
    calls.for_each(|(completer, response)| drop(completer.send(response)));
    count
}

/// What the task does next.
enum NextStep<Request, Response> {
    /// Execute these requests.
    Execute(Vec<QueuedRequest<Request, Response>>),
    /// Linger until then.
    WaitUntil(Instant),
    /// Wait for a request.
    Idle,
    /// There will be no more requests.
    Closed,
}

impl<Request, Response> CoalescerShared<Request, Response> {
    fn enqueue(&self, request: Request, bytes: usize) -> (u64, oneshot::Receiver<Response>) {
        let (completer, response) = oneshot::channel();
        // A larger request gets a batch of its own, whatever its size.
        let (bytes, since) = (bytes.min(self.config.max_bytes), Instant::now());
        let mut state = self.lock();
        let number = state.next_number;
        if state.has_ended {
            return (number, response);
        }
        state.next_number += 1;
        let was_full = self.is_full(&state);
        state.bytes += bytes;
        state.queue.push_back(QueuedRequest { number, request, bytes, since, completer });
        // Otherwise the task already waits for the right event: the linger time, or the end of a batch.
        let wakes = state.queue.len() == 1 || (!was_full && self.is_full(&state));
        drop(state);
        if wakes {
            self.changed.notify_one();
        }
        (number, response)
    }

    fn is_full(&self, state: &CoalescerState<Request, Response>) -> bool {
        state.queue.len() >= self.config.max_items || state.bytes >= self.config.max_bytes
    }

    fn next_step(&self) -> NextStep<Request, Response> {
        let mut state = self.lock();
        let Some(oldest) = state.queue.front() else {
            return if state.is_closing { NextStep::Closed } else { NextStep::Idle };
        };
        let linger_until = oldest.since + self.config.linger;
        let lingers = !self.config.linger.is_zero() && !self.is_full(&state);
        if lingers && linger_until > Instant::now() {
            return NextStep::WaitUntil(linger_until);
        }
        let (mut count, mut bytes) = (0, 0);
        for queued in state.queue.iter().take(self.config.max_items) {
            if bytes + queued.bytes > self.config.max_bytes {
                break;
            }
            bytes += queued.bytes;
            count += 1;
        }
        state.bytes -= bytes;
        NextStep::Execute(state.queue.drain(..count).collect())
    }

    /// Removes a request that was not taken yet.
    fn cancel(&self, number: u64) {
        let mut state = self.lock();
        let found = state.queue.binary_search_by_key(&number, |queued| queued.number);
        let cancelled = found.ok().and_then(|index| state.queue.remove(index));
        if let Some(queued) = &cancelled {
            state.bytes -= queued.bytes;
        }
        // Dropping the request runs the caller's code: not under the lock.
        drop(state);
        drop(cancelled);
    }

    fn close(&self) {
        self.lock().is_closing = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, CoalescerState<Request, Response>> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

/// Removes the request of a caller that was dropped before its response arrived.
struct CancelOnDrop<'a, Request, Response> {
    shared: &'a CoalescerShared<Request, Response>,
    /// `None` once the response has arrived.
    number: Option<u64>,
}

impl<Request, Response> Drop for CancelOnDrop<'_, Request, Response> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.shared.cancel(number);
        }
    }
}
