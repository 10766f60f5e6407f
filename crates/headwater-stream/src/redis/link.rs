//! A link is one connection shared by many callers.
//!
//! Upstream: `node`. A caller puts its bytes into the common outbox. It writes them itself when nobody else is about, or when
//! enough have gathered; else the link's task does, after it let those run who were woken with it. So requests made at
//! the same time leave in few writes, a lone caller pays no detour, and the server has work while callers prepare more.
//! Replies are read by the task.
//!
//! Promises: replies go to whom they belong; a caller that is gone disturbs nobody; a request that got no reply by its
//! deadline ends the link, and every caller learns whether its request can have reached the server.

mod answer;
mod driver;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use bytes::{Buf, BytesMut};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

pub(super) use self::answer::Answer;
use self::answer::{Promise, answer};
use self::driver::Driver;
use super::connection::Connection;
use super::reply::Replies;

/// KiB of requests that are waiting to be written or to be answered; each counts as one at least.
const ROOM_KIB: usize = 64 * 1024;
/// When this much has gathered, the next caller writes it.
const WRITE_BYTES: usize = 8 * 1024;

// The largest request there is must fit, or it would wait for ever.
const _: () = assert!(ROOM_KIB * 1024 > crate::limits::BATCH_BYTES_MAX * 3 / 2);

/// What a link makes of a request.
pub(super) type Outcome = Result<Replies, Broken>;

/// Whether a request waits for others that may leave with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haste {
    /// As is best for all.
    None,
    /// It leaves now: there is enough of it to be worth a write.
    Now,
}

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

/// The callers' end of a link.
#[derive(Clone)]
pub(super) struct Link {
    handle: Arc<Handle>,
}

/// Ends the link with its last user.
struct Handle {
    shared: Arc<Shared>,
}

/// What callers and the task have in common.
struct Shared {
    state: Mutex<State>,
    room: Semaphore,
    open: AtomicBool,
}

#[derive(Default)]
struct State {
    /// What is to be written; whoever has set `writing` writes what came before it.
    outbox: BytesMut,
    writing: bool,
    /// What a caller could not write at once. The task goes on with it, and has taken over `writing`.
    leftover: BytesMut,
    /// Requests that the task does not know yet, in the order of their bytes.
    incoming: Vec<Waiting>,
    /// Requests without a reply, those that the task knows included.
    in_flight: usize,
    /// Bytes of all requests ever accepted, and of those that were handed to a writer.
    accepted: u64,
    handed_to_writer: u64,
    /// Whether several callers got replies at once, so that several requests are about to come.
    crowded: bool,
    /// Whether the task will look at the outbox without being woken again.
    woken: bool,
    /// Whether the task watches the deadlines.
    alarm_set: bool,
    task: Option<Waker>,
    /// The socket, where callers may write to it: not with TLS, which cannot be shared.
    socket: Option<Arc<TcpStream>>,
    closing: bool,
    dead: Option<Arc<io::Error>>,
}

/// A request that waits for its replies.
struct Waiting {
    replies: usize,
    /// How many bytes of other requests come before it on this connection.
    starts_at: u64,
    kib: u32,
    deadline: Instant,
    promise: Promise,
}

impl Link {
    /// Makes a connection shared; the task ends when the last clone is dropped and the last reply is in.
    pub(super) fn new(connection: Connection) -> (Self, JoinHandle<()>) {
        let wire = connection.into_wire();
        let state = State { socket: wire.socket(), ..State::default() };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            room: Semaphore::new(ROOM_KIB),
            open: AtomicBool::new(true),
        });
        let driver = Driver::new(wire, Arc::clone(&shared));
        let task = tokio::spawn(driver.run());
        (Self { handle: Arc::new(Handle { shared }) }, task)
    }

    /// Sends commands and waits for their replies, which come by the deadline or not at all. A dropped call disturbs
    /// nobody; whether it had its effect is then unknown.
    pub(super) async fn send(&self, bytes: &[u8], replies: usize, deadline: Instant) -> Outcome {
        let shared = &self.handle.shared;
        let kib = kib_of(bytes);
        match timeout_at(deadline, shared.room.acquire_many(kib)).await {
            Ok(Ok(permit)) => permit.forget(),
            Ok(Err(_)) => return Err(not_sent(closed())),
            Err(_) => return Err(not_sent(timed_out())),
        }
        shared.accept(bytes, replies, kib, deadline, Haste::None)?.await
    }

    /// Sends commands if the link is open and has room.
    pub(super) fn try_send(
        &self,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
        haste: Haste,
    ) -> Option<Answer> {
        let shared = &self.handle.shared;
        let kib = kib_of(bytes);
        shared.room.try_acquire_many(kib).ok()?.forget();
        shared.accept(bytes, replies, kib, deadline, haste).ok()
    }

    /// Whether the link still takes requests.
    pub(super) fn is_open(&self) -> bool {
        self.handle.shared.open.load(Ordering::Acquire)
    }
}

impl Drop for Handle {
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

impl Shared {
    /// Puts a request into the outbox, and sees to it that somebody writes it.
    fn accept(
        &self,
        bytes: &[u8],
        replies: usize,
        kib: u32,
        deadline: Instant,
        haste: Haste,
    ) -> Result<Answer, Broken> {
        let (promise, answer) = answer();
        let mut state = self.lock();
        if let Some(error) = &state.dead {
            return Err(Broken::NotSent(Arc::clone(error)));
        }
        let starts_at = state.accepted;
        state.accepted += bytes.len() as u64;
        state.outbox.extend_from_slice(bytes);
        state.incoming.push(Waiting { replies, starts_at, kib, deadline, promise });
        state.in_flight += 1;
        let alone = state.in_flight == 1 && !state.crowded;
        if (alone || haste == Haste::Now || state.outbox.len() >= WRITE_BYTES)
            && !state.writing
            && let Some(socket) = state.socket.clone()
        {
            state = self.write(state, &socket);
        }
        let needs_task = !state.outbox.is_empty() || !state.leftover.is_empty() || !state.alarm_set;
        if needs_task && !state.woken {
            state.woken = true;
            let task = state.task.clone();
            drop(state);
            if let Some(task) = task {
                task.wake();
            }
        }
        Ok(answer)
    }

    /// Writes the outbox from the task of a caller. What does not fit into the system's buffer is left to our task.
    fn write<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        socket: &TcpStream,
    ) -> MutexGuard<'a, State> {
        let mut bytes = state.take_outbox();
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
            // Its memory serves for the next requests.
            if state.outbox.is_empty() && state.outbox.capacity() < bytes.capacity() {
                state.outbox = bytes;
            }
        } else {
            state.leftover = bytes;
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

impl State {
    /// Takes the bytes to write and the right to do so. From now on they count as sent.
    fn take_outbox(&mut self) -> BytesMut {
        self.writing = true;
        self.handed_to_writer = self.accepted;
        std::mem::take(&mut self.outbox)
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

fn not_sent(error: io::Error) -> Broken {
    Broken::NotSent(Arc::new(error))
}
