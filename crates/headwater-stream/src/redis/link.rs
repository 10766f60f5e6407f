//! A link is one connection shared by many callers.
//!
//! Upstream: `node`. Requests that are made at the same time leave in one write, and their replies arrive in few reads:
//! this is what makes 64 callers as fast as one that packs its commands together.
//!
//! Promises: replies go to whom they belong; a caller that is gone disturbs nobody; a request that got no reply by its
//! deadline ends the link, and every caller learns whether its request can have reached the server.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep};

use super::connection::Connection;
use super::reply::{Replies, Scanner};
use super::wire::Wire;

/// Requests that wait to be written.
const QUEUE_MAX: usize = 1024;
/// Requests that wait for their replies.
const IN_FLIGHT_MAX: usize = 4096;
/// Bytes that wait to be written, before the next request is taken.
const OUTBOX_BYTES_MAX: usize = 1024 * 1024;
/// Requests taken from the queue at once.
const TAKE_MAX: usize = 256;

/// What a link makes of a request.
pub(super) type Outcome = Result<Replies, Broken>;

/// A request that got no reply.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Broken {
    /// Not a byte of it was sent.
    #[error("the request was not sent: {0}")]
    NotSent(Arc<io::Error>),
    /// The server may have got it.
    #[error("the reply was lost, the call may have happened: {0}")]
    Lost(Arc<io::Error>),
}

/// One caller's commands.
pub(super) struct Request {
    pub(super) bytes: Bytes,
    pub(super) replies: usize,
    pub(super) deadline: Instant,
    pub(super) outcome: oneshot::Sender<Outcome>,
}

/// The callers' end of a link.
#[derive(Clone)]
pub(super) struct Link {
    queue: mpsc::Sender<Request>,
}

impl Link {
    /// Makes a connection shared; the task ends when the last clone is dropped and the last reply is in.
    pub(super) fn new(connection: Connection) -> (Self, JoinHandle<()>) {
        let (queue, requests) = mpsc::channel(QUEUE_MAX);
        let driver = Driver {
            wire: connection.into_wire(),
            requests,
            taken: Vec::with_capacity(TAKE_MAX),
            waiting: VecDeque::new(),
            accepted: 0,
            scanner: Scanner::default(),
            alarm: None,
            crowded: false,
            yielded: false,
        };
        (Self { queue }, tokio::spawn(driver.run()))
    }

    /// Sends commands and waits for their replies, which come by the deadline or not at all. Cancel-safe in that a
    /// dropped call disturbs nobody; whether it had its effect is then unknown.
    pub(super) async fn send(&self, bytes: Bytes, replies: usize, deadline: Instant) -> Outcome {
        let (outcome, answer) = oneshot::channel();
        let request = Request { bytes, replies, deadline, outcome };
        match self.queue.try_send(request) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(not_sent()),
            Err(mpsc::error::TrySendError::Full(request)) => {
                match tokio::time::timeout_at(deadline, self.queue.send(request)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return Err(not_sent()),
                    Err(_) => return Err(Broken::NotSent(Arc::new(timed_out()))),
                }
            }
        }
        // The driver keeps the deadline, for all callers with one timer.
        answer.await.unwrap_or_else(|_| Err(not_sent_or_lost()))
    }

    /// Whether the link still takes requests.
    pub(super) fn is_open(&self) -> bool {
        !self.queue.is_closed()
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.queue.same_channel(&other.queue)
    }
}

/// A request that is being written or waits for its replies.
struct Waiting {
    replies: usize,
    /// How many bytes of other requests come before it on this connection.
    starts_at: u64,
    deadline: Instant,
    outcome: oneshot::Sender<Outcome>,
}

/// The connection's end of a link.
struct Driver {
    wire: Wire,
    requests: mpsc::Receiver<Request>,
    taken: Vec<Request>,
    waiting: VecDeque<Waiting>,
    /// Bytes of all requests ever accepted.
    accepted: u64,
    scanner: Scanner,
    /// Rings when the oldest request may be overdue; never later than that.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Whether several callers had replies at once, so that several requests are about to come.
    crowded: bool,
    /// Whether the driver has let them come before it writes.
    yielded: bool,
}

impl Driver {
    async fn run(mut self) {
        let end = std::future::poll_fn(|cx| self.poll(cx)).await;
        let error = Arc::new(end.err().unwrap_or_else(closed));
        // No more requests from now on; those in the queue were not sent.
        self.requests.close();
        for waiting in self.waiting {
            let sent = waiting.starts_at < self.wire.written;
            let broken = if sent { Broken::Lost } else { Broken::NotSent };
            let _ = waiting.outcome.send(Err(broken(Arc::clone(&error))));
        }
        while let Ok(request) = self.requests.try_recv() {
            let _ = request.outcome.send(Err(Broken::NotSent(Arc::clone(&error))));
        }
    }

    /// Ready when the link is at its end: in good order, or by an error.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let closing = self.take_requests(cx);
            // The first caller that got its reply wakes us before the others could run. Waiting for them, without
            // waiting for time, is what makes one write of many.
            if self.crowded && !self.yielded && !self.wire.outbox.is_empty() {
                self.yielded = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.yielded = false;
            let written = self.wire.poll_write(cx)?.is_ready();
            if written && closing && self.waiting.is_empty() {
                return Poll::Ready(Ok(()));
            }
            match self.wire.poll_read(cx, self.scanner.wanted()) {
                Poll::Ready(read) => {
                    read?;
                    self.hand_out_replies()?;
                }
                Poll::Pending => {
                    if self.overdue(cx) {
                        return Poll::Ready(Err(timed_out()));
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    /// Takes what callers want to send. Returns whether nobody can want anything any more.
    fn take_requests(&mut self, cx: &mut Context<'_>) -> bool {
        while self.wire.outbox.len() < OUTBOX_BYTES_MAX && self.waiting.len() < IN_FLIGHT_MAX {
            match self.requests.poll_recv_many(cx, &mut self.taken, TAKE_MAX) {
                Poll::Pending => return false,
                Poll::Ready(0) => return true,
                Poll::Ready(_) => {}
            }
            let mut taken = std::mem::take(&mut self.taken);
            for request in taken.drain(..) {
                self.accept(request);
            }
            self.taken = taken;
        }
        false
    }

    fn accept(&mut self, request: Request) {
        // Nobody waits for it any more, and nothing was sent: it need not happen.
        if request.outcome.is_closed() {
            return;
        }
        let starts_at = self.accepted;
        self.accepted += request.bytes.len() as u64;
        self.wire.outbox.extend_from_slice(&request.bytes);
        if self.waiting.is_empty() {
            self.scanner.begin(request.replies);
        }
        let Request { replies, deadline, outcome, .. } = request;
        match &mut self.alarm {
            Some(alarm) if alarm.deadline() <= deadline => {}
            alarm => *alarm = Some(Box::pin(tokio::time::sleep_until(deadline))),
        }
        self.waiting.push_back(Waiting { replies, starts_at, deadline, outcome });
    }

    fn hand_out_replies(&mut self) -> io::Result<()> {
        let mut handed_out = 0;
        while let Some(first) = self.waiting.front() {
            debug_assert_ne!(first.replies, 0, "a request has a reply");
            self.crowded = handed_out + self.waiting.len() > 1;
            handed_out += 1;
            let Some(length) = self.scanner.scan(&self.wire.inbox).map_err(io::Error::other)?
            else {
                return Ok(());
            };
            let bytes = self.wire.inbox.split_to(length).freeze();
            let replies = Replies::new(bytes, self.scanner.refusals());
            if let Some(done) = self.waiting.pop_front() {
                let _ = done.outcome.send(Ok(replies));
            }
            self.scanner.begin(self.waiting.front().map_or(0, |next| next.replies));
        }
        if self.wire.inbox.is_empty() {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "a reply that nobody asked for"))
    }

    /// Whether a request waits beyond its deadline. Sets the alarm for the next one.
    fn overdue(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(alarm) = &mut self.alarm {
            if alarm.as_mut().poll(cx).is_pending() {
                return false;
            }
            match self.waiting.iter().map(|waiting| waiting.deadline).min() {
                None => self.alarm = None,
                Some(earliest) if earliest <= Instant::now() => return true,
                Some(earliest) => alarm.as_mut().reset(earliest),
            }
        }
        false
    }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no reply within the deadline")
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the connection is closed")
}

fn not_sent() -> Broken {
    Broken::NotSent(Arc::new(closed()))
}

/// The task is gone without a word, which only the end of its runtime explains.
fn not_sent_or_lost() -> Broken {
    Broken::Lost(Arc::new(closed()))
}
