//! Callers at the same time share one call: many requests, one round trip or one commit.
//!
//! Upstream: whoever has many concurrent callers, each with one small request. Downstream: a function over a batch.
//! Promises: requests are taken in the order they were made, and calls begin in that order. A caller that goes away
//! disturbs nobody: its request is dropped if it was not taken yet, and carried out if it was. A lone caller waits for
//! nobody unless `linger` says so.
//! Not here: retries. Whether a request had its effect after [`Gone`] is for the function's owner to find out.

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::error;

use crate::error::{Result, StreamError};
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX};

/// The longest time a request can be made to wait for company.
const LINGER_MAX: Duration = Duration::from_secs(60);
/// The most calls that can be allowed at once.
const IN_FLIGHT_MAX: usize = 1024;

/// How requests are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoalescerConfig {
    /// Requests in one call. 1024 by default, at most [`BATCH_MAX`].
    pub max_items: usize,
    /// Bytes in one call, by the weight that callers give; a heavier request goes alone. 1 MiB by default, at most
    /// [`BATCH_BYTES_MAX`].
    pub max_bytes: usize,
    /// How long the first request waits for others. Zero by default: what gathers while a call is under way goes with
    /// the next one. At most 60 s.
    pub linger: Duration,
    /// Calls under way at once. 1 by default, so that effects come in the order of requests; at most 1024.
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
            0 => Err(StreamError::invalid(what, "it is 0; allow at least 1")),
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

/// There is no response: the call that took the request panicked or gave too few, or the runtime of the coalescer has
/// ended. Whether the request had its effect is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the shared call ended without a response; it may have happened")]
pub struct Gone;

/// Gathers the requests of concurrent callers and carries them out together.
///
/// Its task ends when it is dropped, after the calls that are under way.
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
    shared: Arc<Shared<Request, Response>>,
    task: Option<JoinHandle<()>>,
}

struct Shared<Request, Response> {
    config: CoalescerConfig,
    carry_out: CarryOut<Request, Response>,
    state: Mutex<State<Request, Response>>,
    /// Wakes the task: there is something to take, or nobody to wait for.
    changed: Notify,
}

type CarryOut<Request, Response> =
    Box<dyn Fn(Vec<Request>) -> BoxFuture<'static, Vec<Response>> + Send + Sync>;

struct State<Request, Response> {
    /// Requests that are not taken yet, oldest first. There are never more than callers that wait.
    queue: VecDeque<Queued<Request, Response>>,
    /// What they weigh together.
    bytes: usize,
    next_number: u64,
    is_closing: bool,
    /// Whether the task is no more, so that nobody would take a request.
    has_ended: bool,
}

struct Queued<Request, Response> {
    number: u64,
    request: Request,
    bytes: usize,
    since: Instant,
    promise: Promise<Response>,
}

impl<Request, Response> Coalescer<Request, Response>
where
    Request: Send + 'static,
    Response: Send + 'static,
{
    /// Starts the task, on the runtime of the caller. `carry_out` returns one response for each request, in order; where
    /// all fail together, each gets the same error as its response.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new<F, Carrying>(config: CoalescerConfig, carry_out: F) -> Result<Self>
    where
        F: Fn(Vec<Request>) -> Carrying + Send + Sync + 'static,
        Carrying: Future<Output = Vec<Response>> + Send + 'static,
    {
        config.validate()?;
        let state = State {
            queue: VecDeque::new(),
            bytes: 0,
            next_number: 0,
            is_closing: false,
            has_ended: false,
        };
        let shared = Arc::new(Shared {
            config,
            carry_out: Box::new(move |requests| carry_out(requests).boxed()),
            state: Mutex::new(state),
            changed: Notify::new(),
        });
        let task = tokio::spawn(run(Ending(Arc::clone(&shared))));
        Ok(Self { shared, task: Some(task) })
    }

    /// Has a request carried out together with those of other callers. Cancel-safe: dropped before the request was
    /// taken, it has no effect; afterwards it is carried out, and nobody gets the response.
    pub async fn call(&self, request: Request) -> Result<Response, Gone> {
        self.call_weighing(request, 0).await
    }

    /// The same for a request that counts for so many bytes.
    pub async fn call_weighing(&self, request: Request, bytes: usize) -> Result<Response, Gone> {
        let (number, response) = self.shared.enqueue(request, bytes);
        Call { shared: &self.shared, number, response }.await
    }

    #[cfg(feature = "redis")]
    /// Whether its task is no more, because its runtime has ended: nobody will get a response from it.
    pub(crate) fn has_ended(&self) -> bool {
        self.shared.lock().has_ended
    }

    /// Waits until the calls that are under way have ended.
    pub async fn close(mut self) {
        self.shared.close();
        if let Some(task) = self.task.take() {
            // The task catches panics of the function it calls; if its runtime ended it, it has ended.
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

/// Takes requests and carries them out, until nobody can make any more.
async fn run<Request: Send + 'static, Response: Send + 'static>(ending: Ending<Request, Response>) {
    let shared = &ending.0;
    let mut under_way: FuturesUnordered<BoxFuture<'static, usize>> = FuturesUnordered::new();
    let mut answered = 0;
    loop {
        // A crowd that was answered just now comes again with its next requests. Letting it run, without waiting for
        // time, is what makes one call of many.
        if answered > 1 {
            tokio::task::yield_now().await;
            answered = 0;
        }
        let mut wake_at = None;
        while under_way.len() < shared.config.in_flight_max {
            match shared.take() {
                Next::Batch(batch) => {
                    let mut call = carry(Arc::clone(shared), batch).boxed();
                    // Begun here and now, so that calls begin in the order of their requests.
                    match futures_util::poll!(&mut call) {
                        Poll::Ready(count) => answered += count,
                        Poll::Pending => under_way.push(call),
                    }
                }
                Next::At(instant) => {
                    wake_at = Some(instant);
                    break;
                }
                Next::Nothing => break,
                Next::End if under_way.is_empty() => return,
                Next::End => break,
            }
        }
        if answered > 1 {
            continue;
        }
        tokio::select! {
            Some(count) = under_way.next() => answered = count,
            () = shared.changed.notified() => {}
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
        }
    }
}

/// Tells callers when the task ends, also with its runtime: nobody will take their requests.
struct Ending<Request, Response>(Arc<Shared<Request, Response>>);

impl<Request, Response> Drop for Ending<Request, Response> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.has_ended = true;
        let left = std::mem::take(&mut state.queue);
        drop(state);
        drop(left);
    }
}

/// Carries out one batch and hands out the responses. Returns how many requests it had.
async fn carry<Request, Response>(
    shared: Arc<Shared<Request, Response>>,
    batch: Vec<Queued<Request, Response>>,
) -> usize {
    let count = batch.len();
    let (requests, promises): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|queued| (queued.request, queued.promise)).unzip();
    // One bad batch must not end the task: others rely on it.
    let carrying = AssertUnwindSafe(async { (shared.carry_out)(requests).await });
    let responses = carrying.catch_unwind().await.unwrap_or_else(|_| {
        error!("a shared call panicked, its callers get no response");
        Vec::new()
    });
    // Promises without a response say so when they are dropped.
    promises.into_iter().zip(responses).for_each(|(promise, response)| promise.keep(response));
    count
}

/// What the task can do next.
enum Next<Request, Response> {
    /// Carry these out.
    Batch(Vec<Queued<Request, Response>>),
    /// Wait for company until then.
    At(Instant),
    /// Wait for a request.
    Nothing,
    /// There will be no more requests.
    End,
}

impl<Request, Response> Shared<Request, Response> {
    fn enqueue(&self, request: Request, bytes: usize) -> (u64, Arc<Place<Response>>) {
        let place = Arc::<Place<Response>>::default();
        let promise = Promise(Some(Arc::clone(&place)));
        // What is heavier goes alone, however much heavier it is.
        let (bytes, since) = (bytes.min(self.config.max_bytes), Instant::now());
        let mut state = self.lock();
        let number = state.next_number;
        if state.has_ended {
            return (number, place);
        }
        state.next_number += 1;
        let was_full = self.is_full(&state);
        state.bytes += bytes;
        state.queue.push_back(Queued { number, request, bytes, since, promise });
        // In between, the task knows enough: it waits for time, or for a call to end.
        let wakes = state.queue.len() == 1 || (!was_full && self.is_full(&state));
        drop(state);
        if wakes {
            self.changed.notify_one();
        }
        (number, place)
    }

    fn is_full(&self, state: &State<Request, Response>) -> bool {
        state.queue.len() >= self.config.max_items || state.bytes >= self.config.max_bytes
    }

    fn take(&self) -> Next<Request, Response> {
        let mut state = self.lock();
        let Some(oldest) = state.queue.front() else {
            return if state.is_closing { Next::End } else { Next::Nothing };
        };
        let go_at = oldest.since + self.config.linger;
        let waits = !self.config.linger.is_zero() && !self.is_full(&state);
        if waits && go_at > Instant::now() {
            return Next::At(go_at);
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
        Next::Batch(state.queue.drain(..count).collect())
    }

    /// Drops a request that was not taken yet.
    fn forget(&self, number: u64) {
        let mut state = self.lock();
        let found = state.queue.binary_search_by_key(&number, |queued| queued.number);
        let forgotten = found.ok().and_then(|index| state.queue.remove(index));
        if let Some(queued) = &forgotten {
            state.bytes -= queued.bytes;
        }
        // The request is foreign code: it is not dropped under the lock.
        drop(state);
        drop(forgotten);
    }

    fn close(&self) {
        self.lock().is_closing = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State<Request, Response>> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

/// A caller that waits for its response.
struct Call<'a, Request, Response> {
    shared: &'a Shared<Request, Response>,
    number: u64,
    response: Arc<Place<Response>>,
}

impl<Request, Response> Future for Call<'_, Request, Response> {
    type Output = Result<Response, Gone>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut content = self.response.lock();
        match std::mem::take(&mut *content) {
            Content::Kept(response) => Poll::Ready(Ok(response)),
            Content::Gone => Poll::Ready(Err(Gone)),
            Content::Awaited(_) => {
                *content = Content::Awaited(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl<Request, Response> Drop for Call<'_, Request, Response> {
    fn drop(&mut self) {
        // Whoever has a response, or would never get one, was taken.
        if Arc::strong_count(&self.response) > 1 {
            self.shared.forget(self.number);
        }
    }
}

/// A place for one response.
struct Place<Response>(Mutex<Content<Response>>);

enum Content<Response> {
    Awaited(Option<Waker>),
    Kept(Response),
    Gone,
}

impl<Response> Default for Content<Response> {
    fn default() -> Self {
        Self::Awaited(None)
    }
}

impl<Response> Default for Place<Response> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<Response> Place<Response> {
    fn put(&self, content: Content<Response>) {
        let before = std::mem::replace(&mut *self.lock(), content);
        if let Content::Awaited(Some(caller)) = before {
            caller.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Content<Response>> {
        self.0.lock().expect("no code panics while it holds this lock")
    }
}

/// The task's end of a place. If it is dropped, there is no response.
struct Promise<Response>(Option<Arc<Place<Response>>>);

impl<Response> Promise<Response> {
    fn keep(mut self, response: Response) {
        if let Some(place) = self.0.take() {
            place.put(Content::Kept(response));
        }
    }
}

impl<Response> Drop for Promise<Response> {
    fn drop(&mut self) {
        if let Some(place) = self.0.take() {
            place.put(Content::Gone);
        }
    }
}
