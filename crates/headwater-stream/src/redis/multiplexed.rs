//! A connection that many callers share: requests are pipelined, replies are matched in order.
//!
//! Upstream: `node`. A caller adds its bytes to the shared write buffer. It writes the buffer itself if no other request is
//! in flight, or if the buffer is large enough; otherwise the connection task writes it, after a yield that lets other woken
//! callers add theirs. So concurrent requests leave in few writes, an uncontended call is written by the calling task,
//! without a task switch, and the server has work while callers prepare more. The connection task reads the replies.
//!
//! Guarantees: each reply goes to its request; a dropped call does not affect the others. A request without a reply at its
//! deadline fails alone, and its reply is dropped when it comes. A server that has been silent for the whole time that the oldest
//! request had is taken for dead: the connection is closed, and every caller learns whether its request may have reached the
//! server. Nothing is written to a connection that was silent for a while until the server has replied to a `PING`: a
//! connection that a NAT or firewall dropped without a word costs no ambiguous write.

mod connection_task;
mod response_slot;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use ::metrics::Gauge;
use bytes::{Buf, BytesMut};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use self::connection_task::ConnectionTask;
pub(super) use self::response_slot::ResponseFuture;
use self::response_slot::{ResponseSender, response_slot};
use super::connection::{Connection, LivenessCheck};
use super::metrics;
use super::reply::RespReplies;
use super::transport::PlainSocket;

/// KiB of requests that are unwritten or unanswered; each counts as at least one.
const IN_FLIGHT_KIB_MAX: usize = 64 * 1024;
/// A server that is silent for less than this is not taken for dead, however short the deadline of a request is.
const SILENCE_MIN: Duration = Duration::from_secs(2);
/// When the write buffer holds this much, the next caller writes it. Less would cost more writes, for which the connection task is
/// early enough.
const FLUSH_BYTES: usize = 32 * 1024;

// The largest request must fit, or it would wait forever.
const _: () = assert!(IN_FLIGHT_KIB_MAX * 1024 > crate::limits::BATCH_BYTES_MAX * 3 / 2);

/// Result of one request.
pub(super) type RequestResult = Result<RespReplies, RequestError>;

/// Why a request got no reply.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// No byte of it was sent.
    #[error("the request was not sent: {0}")]
    NotSent(Arc<io::Error>),
    /// It may have reached the server.
    #[error("the reply was lost, the call may have been executed: {0}")]
    ReplyLost(Arc<io::Error>),
}

/// A shared connection. Clones use the same one; it closes when the last clone is dropped and the last reply is in.
#[derive(Clone)]
pub(super) struct MultiplexedConnection {
    handle: Arc<CloseOnDrop>,
}

/// Closes the connection when its last user drops it.
struct CloseOnDrop {
    shared: Arc<ConnectionShared>,
}

/// Data shared by the callers and the connection task.
struct ConnectionShared {
    state: Mutex<ConnectionState>,
    permits: Semaphore,
    open: AtomicBool,
    /// Whether nothing was received for so long that a reply is awaited before anything else is written.
    silent: AtomicBool,
    /// Notified when `silent` becomes false.
    heard: Notify,
    in_flight_gauge: Gauge,
}

#[derive(Default)]
struct ConnectionState {
    /// Bytes to write. The holder of `writing` writes bytes that were taken from here earlier.
    write_buffer: BytesMut,
    writing: bool,
    /// What a caller could not write without blocking. The task continues with it and has taken over `writing`.
    unwritten: BytesMut,
    /// Requests that the task has not taken yet, in the order of their bytes.
    incoming: Vec<InFlightRequest>,
    /// Number of requests without a reply, including those that the task has taken.
    in_flight: usize,
    /// Bytes of all requests ever accepted, and of those that were handed to a writer.
    accepted: u64,
    handed_to_writer: u64,
    /// Whether several callers got replies at once, so that several requests are about to follow.
    batching: bool,
    /// Whether the task will check the write buffer without another wake-up.
    woken: bool,
    /// Whether the task has set a deadline timer.
    timer_set: bool,
    task: Option<Waker>,
    /// The socket, if callers may write to it. `None` with TLS, whose state cannot be shared.
    socket: Option<Arc<PlainSocket>>,
    closing: bool,
    dead: Option<Arc<io::Error>>,
}

/// A request without a reply.
struct InFlightRequest {
    replies: usize,
    /// Bytes of earlier requests on this connection.
    starts_at: u64,
    kib: u32,
    started_at: Instant,
    deadline: Instant,
    /// `None` once it has failed.
    response: Option<ResponseSender>,
}

impl MultiplexedConnection {
    /// Makes a connection shared. Returns it with its task.
    pub(super) fn new(connection: Connection, liveness: LivenessCheck) -> (Self, JoinHandle<()>) {
        let transport = connection.into_transport();
        let state = ConnectionState { socket: transport.socket(), ..ConnectionState::default() };
        let shared = Arc::new(ConnectionShared {
            state: Mutex::new(state),
            permits: Semaphore::new(IN_FLIGHT_KIB_MAX),
            open: AtomicBool::new(true),
            silent: AtomicBool::new(false),
            heard: Notify::new(),
            in_flight_gauge: ::metrics::gauge!(metrics::REQUESTS_IN_FLIGHT),
        });
        let task = ConnectionTask::new(transport, Arc::clone(&shared), liveness);
        let task = tokio::spawn(task.run());
        (Self { handle: Arc::new(CloseOnDrop { shared }) }, task)
    }

    /// Sends commands and waits for their replies until the deadline. Dropping the call does not affect other callers;
    /// its effect is then unknown.
    pub(super) async fn send(
        &self,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> RequestResult {
        let shared = &self.handle.shared;
        if timeout_at(deadline, shared.until_heard()).await.is_err() {
            return Err(not_sent(timed_out()));
        }
        let kib = kib_of(bytes);
        match timeout_at(deadline, shared.permits.acquire_many(kib)).await {
            Ok(Ok(permit)) => permit.forget(),
            Ok(Err(_)) => return Err(not_sent(closed())),
            Err(_) => return Err(not_sent(timed_out())),
        }
        shared.enqueue(bytes, replies, kib, deadline)?.await
    }

    /// Sends commands if the connection is open, not silent, and has capacity.
    pub(super) fn try_send(
        &self,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> Option<ResponseFuture> {
        let shared = &self.handle.shared;
        if shared.silent.load(Ordering::Relaxed) {
            return None;
        }
        let kib = kib_of(bytes);
        shared.permits.try_acquire_many(kib).ok()?.forget();
        shared.enqueue(bytes, replies, kib, deadline).ok()
    }

    /// Whether the connection still accepts requests.
    pub(super) fn is_open(&self) -> bool {
        self.handle.shared.open.load(Ordering::Acquire)
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        let task = state.task.clone();
        drop(state);
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl ConnectionShared {
    /// Returns when the connection is not silent, or has ended. Cancel-safe.
    async fn until_heard(&self) {
        while self.silent.load(Ordering::Acquire) {
            let heard = self.heard.notified();
            // Checked again, because it may have changed before `heard` was created.
            if !self.silent.load(Ordering::Acquire) {
                return;
            }
            heard.await;
        }
    }

    /// Sets whether the connection is silent, and lets waiting callers continue.
    fn set_silent(&self, silent: bool) {
        if self.silent.swap(silent, Ordering::AcqRel) && !silent {
            self.heard.notify_waiters();
        }
    }

    /// Adds a request to the write buffer, then writes the buffer or wakes the task to do so.
    fn enqueue(
        &self,
        bytes: &[u8],
        replies: usize,
        kib: u32,
        deadline: Instant,
    ) -> Result<ResponseFuture, RequestError> {
        let (sender, response) = response_slot();
        let mut state = self.lock();
        if let Some(error) = &state.dead {
            return Err(RequestError::NotSent(Arc::clone(error)));
        }
        let starts_at = state.accepted;
        state.accepted += bytes.len() as u64;
        state.write_buffer.extend_from_slice(bytes);
        state.incoming.push(InFlightRequest {
            replies,
            starts_at,
            kib,
            started_at: Instant::now(),
            deadline,
            response: Some(sender),
        });
        state.in_flight += 1;
        self.in_flight_gauge.increment(1.0);
        let alone = state.in_flight == 1 && !state.batching;
        if (alone || state.write_buffer.len() >= FLUSH_BYTES)
            && !state.writing
            && let Some(socket) = state.socket.clone()
        {
            state = self.write_from_caller(state, &socket);
        }
        let needs_task =
            !state.write_buffer.is_empty() || !state.unwritten.is_empty() || !state.timer_set;
        if needs_task && !state.woken {
            state.woken = true;
            let task = state.task.clone();
            drop(state);
            if let Some(task) = task {
                task.wake();
            }
        }
        Ok(response)
    }

    /// Writes the buffer from a caller's task. What the socket buffer cannot take is left to the connection task.
    fn write_from_caller<'a>(
        &'a self,
        mut state: MutexGuard<'a, ConnectionState>,
        socket: &PlainSocket,
    ) -> MutexGuard<'a, ConnectionState> {
        let mut bytes = state.take_write_buffer();
        drop(state);
        while !bytes.is_empty() {
            match socket.try_write(&bytes) {
                Ok(0) | Err(_) => break,
                Ok(written) => bytes.advance(written),
            }
        }
        let mut state = self.lock();
        if bytes.is_empty() {
            state.writing = false;
            // Reuse the allocation.
            if state.write_buffer.is_empty() && state.write_buffer.capacity() < bytes.capacity() {
                state.write_buffer = bytes;
            }
        } else {
            state.unwritten = bytes;
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

impl ConnectionState {
    /// Takes the bytes to write and the exclusive right to write. The bytes count as sent from now on.
    fn take_write_buffer(&mut self) -> BytesMut {
        self.writing = true;
        self.handed_to_writer = self.accepted;
        std::mem::take(&mut self.write_buffer)
    }
}

fn kib_of(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len() / 1024 + 1).unwrap_or(u32::MAX)
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no reply within the deadline")
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the connection is closed")
}

fn not_sent(error: io::Error) -> RequestError {
    RequestError::NotSent(Arc::new(error))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::redis::connection::ConnectionSettings;
    use crate::redis::transport;
    use crate::redis::url::{Topology, Url};

    #[tokio::test]
    async fn a_late_request_fails_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = Url::parse(&format!("redis://{}", listener.local_addr().unwrap())).unwrap();
        let server = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 1024];
            let _ = socket.read(&mut buffer).await.unwrap();
            socket.write_all(b"+OK\r\n:1\r\n+OK\r\n+OK\r\n").await.unwrap();
            let _ = socket.read(&mut buffer).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1200)).await;
            socket.write_all(b"+first\r\n+second\r\n").await.unwrap();
            socket
        });
        let Topology::Single(address) = &url.topology else { panic!("one server") };
        let deadline = Instant::now() + Duration::from_secs(30);
        let tls = transport::tls(&url.params).await.unwrap();
        let minute = Duration::from_secs(60);
        let liveness = LivenessCheck { silence_max: minute, ping_timeout: minute };
        let params = Arc::new(url.params.clone());
        let settings = ConnectionSettings { params, tls, credentials: None, liveness };
        let opened = Connection::open(address, &settings, deadline).await.unwrap();
        let (connection, _task) = MultiplexedConnection::new(opened, liveness);

        let soon = Instant::now() + Duration::from_millis(1000);
        let first = connection.try_send(b"*1\r\n$1\r\na\r\n", 1, soon).unwrap();
        let second = connection.try_send(b"*1\r\n$1\r\nb\r\n", 1, deadline).unwrap();

        assert!(matches!(first.await, Err(RequestError::ReplyLost(_))));
        assert_eq!(second.await.unwrap().cursor().text().unwrap(), b"second");
        assert!(connection.is_open());
        drop(server.await);
    }
}
