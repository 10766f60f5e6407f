//! The task of a shared connection: dispatches replies, writes what callers left unwritten, enforces deadlines, and checks a
//! silent server with `PING`.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use tokio::time::{Instant, Sleep};

use super::{
    ConnectionShared, ConnectionState, InFlightRequest, RequestError, SILENCE_MIN, closed,
    timed_out,
};
use crate::redis::connection::LivenessCheck;
use crate::redis::metrics;
use crate::redis::reply::{RespReplies, Scanner};
use crate::redis::transport::Transport;

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

pub(super) struct ConnectionTask {
    transport: Transport,
    shared: Arc<ConnectionShared>,
    /// Requests without a reply, oldest first.
    in_flight: VecDeque<InFlightRequest>,
    scanner: Scanner,
    /// Fires at or before the earliest deadline.
    deadline_timer: Option<Pin<Box<Sleep>>>,
    liveness: LivenessCheck,
    /// When something was last received.
    heard_at: Instant,
    /// Fires when the server may have been silent for too long.
    silence_timer: Pin<Box<Sleep>>,
    /// Whether the task holds the right to write.
    writing: bool,
    /// Whether it has yielded to other callers before it writes.
    yielded: bool,
    /// Reused buffer of requests whose replies are complete.
    completed: Vec<(InFlightRequest, RespReplies)>,
    /// Reused buffer of the callers to wake.
    callers: Vec<Waker>,
}

/// What to do with the write buffer.
enum WriteStep {
    Nothing,
    Yield,
    Write,
}

impl ConnectionTask {
    pub(super) fn new(
        transport: Transport,
        shared: Arc<ConnectionShared>,
        liveness: LivenessCheck,
    ) -> Self {
        let heard_at = Instant::now();
        Self {
            liveness,
            heard_at,
            silence_timer: Box::pin(tokio::time::sleep_until(heard_at + liveness.silence_max)),
            transport,
            shared,
            in_flight: VecDeque::new(),
            scanner: Scanner::default(),
            deadline_timer: None,
            writing: false,
            yielded: false,
            completed: Vec::new(),
            callers: Vec::new(),
        }
    }

    pub(super) async fn run(mut self) {
        let end = std::future::poll_fn(|cx| self.poll(cx)).await;
        if end.is_err() {
            ::metrics::counter!(metrics::DISCONNECTS).increment(1);
        }
        self.fail_all(end.err().unwrap_or_else(closed));
    }

    /// Closes the connection and fails all current and future requests.
    fn fail_all(&mut self, error: io::Error) {
        let error = Arc::new(error);
        let handed_to_writer = {
            let mut state = self.shared.lock();
            if state.dead.is_some() {
                return;
            }
            state.dead = Some(Arc::clone(&error));
            state.socket = None;
            self.in_flight.extend(state.incoming.drain(..));
            state.handed_to_writer
        };
        self.shared.open.store(false, Ordering::Release);
        self.shared.permits.close();
        self.shared.set_silent(false);
        self.shared.in_flight_gauge.decrement(self.in_flight.len() as f64);
        for request in std::mem::take(&mut self.in_flight) {
            let sent = request.starts_at < handed_to_writer;
            let reason = if sent { RequestError::ReplyLost } else { RequestError::NotSent };
            let Some(response) = request.response else { continue };
            if let Some(caller) = response.complete(Err(reason(Arc::clone(&error)))) {
                caller.wake();
            }
        }
    }

    /// Ready when the connection has ended: closed by its users, or by an error.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let (write, closing) = self.take_requests(cx);
            let read = self.transport.poll_read(cx, self.scanner.wanted());
            if let Poll::Ready(read) = read {
                read?;
                self.heard_at = Instant::now();
                self.shared.set_silent(false);
                self.dispatch_replies()?;
                continue;
            }
            match write {
                WriteStep::Nothing => {}
                WriteStep::Yield => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                WriteStep::Write => {
                    if self.write(cx)? {
                        continue;
                    }
                }
            }
            if closing && self.in_flight.is_empty() && !self.writing {
                return Poll::Ready(Ok(()));
            }
            if self.check_silence(cx) {
                continue;
            }
            if self.fail_late(cx) {
                return Poll::Ready(Err(timed_out()));
            }
            return Poll::Pending;
        }
    }

    /// Takes new requests and decides what to do with the write buffer. Also returns whether all users are gone and
    /// nothing is left to write.
    fn take_requests(&mut self, cx: &Context<'_>) -> (WriteStep, bool) {
        let mut state = self.shared.lock();
        if !state.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            state.task = Some(cx.waker().clone());
        }
        take_incoming(&mut state, &mut self.in_flight, &mut self.scanner, &mut self.deadline_timer);
        state.timer_set = self.deadline_timer.is_some();
        let idle = state.write_buffer.is_empty() && state.unwritten.is_empty();
        if self.writing {
            return (WriteStep::Write, state.closing);
        }
        if idle || (state.writing && state.unwritten.is_empty()) {
            self.yielded = false;
            state.woken = false;
            return (WriteStep::Nothing, state.closing && idle);
        }
        // The first caller that got its reply wakes this task before the others have run. One yield lets them add their
        // requests to the same write, without waiting for time to pass.
        if state.batching && !self.yielded && state.unwritten.is_empty() {
            self.yielded = true;
            state.woken = true;
            return (WriteStep::Yield, false);
        }
        self.yielded = false;
        state.woken = false;
        self.writing = true;
        self.transport.write_buffer = std::mem::take(&mut state.unwritten);
        let bytes = state.take_write_buffer();
        self.transport.write_buffer.unsplit(bytes);
        (WriteStep::Write, false)
    }

    /// Writes as much as the socket accepts. Returns whether everything is written.
    fn write(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        match self.transport.poll_write(cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(written) => {
                written?;
                self.writing = false;
                self.shared.lock().writing = false;
                Ok(true)
            }
        }
    }

    fn dispatch_replies(&mut self) -> io::Result<()> {
        let mut completed = std::mem::take(&mut self.completed);
        // The replies before a malformed one are valid.
        let mut result = Ok(());
        while !self.transport.read_buffer.is_empty() {
            if self.in_flight.is_empty() {
                // A caller may have written its request and got the reply before this task took the request.
                let mut state = self.shared.lock();
                take_incoming(
                    &mut state,
                    &mut self.in_flight,
                    &mut self.scanner,
                    &mut self.deadline_timer,
                );
            }
            if self.in_flight.is_empty() {
                let problem = "reply without a request";
                result = Err(io::Error::new(io::ErrorKind::InvalidData, problem));
                break;
            }
            let length = match self.scanner.scan(&self.transport.read_buffer) {
                Ok(Some(length)) => length,
                Ok(None) => break,
                Err(error) => {
                    result = Err(io::Error::other(error));
                    break;
                }
            };
            let bytes = self.transport.take(length);
            let replies = RespReplies::new(bytes, self.scanner.has_errors());
            completed.extend(self.in_flight.pop_front().map(|request| (request, replies)));
            self.scanner.begin(self.in_flight.front().map_or(0, |next| next.replies));
        }
        {
            // Updated before the first caller runs, so that it knows whether it is the only one.
            let mut state = self.shared.lock();
            state.in_flight -= completed.len();
            state.batching = completed.len() > 1 || state.in_flight > 0;
        }
        self.shared.in_flight_gauge.decrement(completed.len() as f64);
        let kib = completed.iter().map(|(request, _)| request.kib as usize).sum();
        self.shared.permits.add_permits(kib);
        let complete = |(request, replies): (InFlightRequest, RespReplies)| {
            request.response.and_then(|response| response.complete(Ok(replies)))
        };
        self.callers.extend(completed.drain(..).filter_map(complete));
        self.completed = completed;
        self.callers.drain(..).for_each(Waker::wake);
        result
    }

    /// Marks the connection silent when nothing was received for too long. If no request is in flight, a `PING` finds out whether
    /// the server is still there; otherwise the replies do. Returns whether a `PING` was added to the write buffer.
    fn check_silence(&mut self, cx: &mut Context<'_>) -> bool {
        let mut added = false;
        while self.silence_timer.as_mut().poll(cx).is_ready() {
            let (now, silent_at) = (Instant::now(), self.heard_at + self.liveness.silence_max);
            if now < silent_at {
                self.silence_timer.as_mut().reset(silent_at);
                continue;
            }
            self.silence_timer.as_mut().reset(now + self.liveness.silence_max);
            self.shared.set_silent(true);
            let mut state = self.shared.lock();
            if state.in_flight > 0 || state.closing {
                continue;
            }
            let starts_at = state.accepted;
            state.accepted += PING.len() as u64;
            state.write_buffer.extend_from_slice(PING);
            // Without a caller. If it stays unanswered, the connection is closed.
            state.incoming.push(InFlightRequest {
                replies: 1,
                starts_at,
                kib: 0,
                started_at: now,
                deadline: now + self.liveness.ping_timeout,
                response: None,
            });
            state.in_flight += 1;
            self.shared.in_flight_gauge.increment(1.0);
            added = true;
        }
        added
    }

    /// Fails requests past their deadline and sets the timer to the next one. Returns whether the server has been silent for
    /// too long.
    fn fail_late(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(timer) = &mut self.deadline_timer {
            if timer.as_mut().poll(cx).is_pending() {
                return false;
            }
            let now = Instant::now();
            let Some(oldest) = self.in_flight.front() else {
                self.deadline_timer = None;
                let mut state = self.shared.lock();
                state.timer_set = false;
                // A request arrived meanwhile and relied on the timer: poll again.
                if !state.incoming.is_empty() {
                    cx.waker().wake_by_ref();
                }
                return false;
            };
            let had = oldest.deadline.saturating_duration_since(oldest.started_at);
            let mut next = oldest.started_at.max(self.heard_at) + had.max(SILENCE_MIN);
            if next <= now {
                return true;
            }
            for request in &mut self.in_flight {
                if request.deadline > now {
                    next = next.min(request.deadline);
                } else if let Some(response) = request.response.take() {
                    let late = RequestError::ReplyLost(Arc::new(timed_out()));
                    self.callers.extend(response.complete(Err(late)));
                }
            }
            timer.as_mut().reset(next);
            self.callers.drain(..).for_each(Waker::wake);
        }
        false
    }
}

/// The task may be dropped by its runtime while callers on another runtime still use the connection.
impl Drop for ConnectionTask {
    fn drop(&mut self) {
        self.fail_all(io::Error::new(
            io::ErrorKind::NotConnected,
            "the runtime of the connection task has shut down",
        ));
    }
}

/// Takes new requests over and sets the timer for their deadlines.
fn take_incoming(
    state: &mut ConnectionState,
    in_flight: &mut VecDeque<InFlightRequest>,
    scanner: &mut Scanner,
    deadline_timer: &mut Option<Pin<Box<Sleep>>>,
) {
    if in_flight.is_empty() {
        scanner.begin(state.incoming.first().map_or(0, |first| first.replies));
    }
    for request in state.incoming.drain(..) {
        if deadline_timer.as_ref().is_none_or(|timer| timer.deadline() > request.deadline) {
            *deadline_timer = Some(Box::pin(tokio::time::sleep_until(request.deadline)));
        }
        in_flight.push_back(request);
    }
}
