//! The task of a link: reads replies, writes what callers left to it, keeps the deadlines.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use tokio::time::{Instant, Sleep};

use super::{Broken, Shared, State, Waiting, closed, timed_out};
use crate::redis::reply::{Replies, Scanner};
use crate::redis::wire::Wire;

pub(super) struct Driver {
    wire: Wire,
    shared: Arc<Shared>,
    /// Requests without a reply, oldest first.
    waiting: VecDeque<Waiting>,
    scanner: Scanner,
    /// Rings when the oldest request may be overdue; never later than that.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Whether the task has the right to write.
    writing: bool,
    /// Whether it has let others run before it writes.
    yielded: bool,
    /// Room for requests whose replies are in.
    done: Vec<(Waiting, Replies)>,
    /// Room for those who wait for them.
    callers: Vec<Waker>,
}

/// What is to be done with the outbox.
enum Writing {
    Nothing,
    Yield,
    Write,
}

impl Driver {
    pub(super) fn new(wire: Wire, shared: Arc<Shared>) -> Self {
        Self {
            wire,
            shared,
            waiting: VecDeque::new(),
            scanner: Scanner::default(),
            alarm: None,
            writing: false,
            yielded: false,
            done: Vec::new(),
            callers: Vec::new(),
        }
    }

    pub(super) async fn run(mut self) {
        let end = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.end(end.err().unwrap_or_else(closed));
    }

    /// Tells everybody who waits, and everybody to come, that the link is no more.
    fn end(&mut self, error: io::Error) {
        let error = Arc::new(error);
        let handed_to_writer = {
            let mut state = self.shared.lock();
            if state.dead.is_some() {
                return;
            }
            state.dead = Some(Arc::clone(&error));
            state.socket = None;
            self.waiting.extend(state.incoming.drain(..));
            state.handed_to_writer
        };
        self.shared.open.store(false, Ordering::Release);
        self.shared.room.close();
        for waiting in std::mem::take(&mut self.waiting) {
            let sent = waiting.starts_at < handed_to_writer;
            let broken = if sent { Broken::Lost } else { Broken::NotSent };
            if let Some(caller) = waiting.promise.keep(Err(broken(Arc::clone(&error)))) {
                caller.wake();
            }
        }
    }

    /// Ready when the link is at its end: in good order, or by an error.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let (writing, closing) = self.look_at_requests(cx);
            let read = self.wire.poll_read(cx, self.scanner.wanted());
            if let Poll::Ready(read) = read {
                read?;
                self.hand_out_replies()?;
                continue;
            }
            match writing {
                Writing::Nothing => {}
                Writing::Yield => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Writing::Write => {
                    if self.write(cx)? {
                        continue;
                    }
                }
            }
            if closing && self.waiting.is_empty() && !self.writing {
                return Poll::Ready(Ok(()));
            }
            if self.overdue(cx) {
                return Poll::Ready(Err(timed_out()));
            }
            return Poll::Pending;
        }
    }

    /// Takes over new requests and decides about the outbox. Also tells whether nobody can want anything any more.
    fn look_at_requests(&mut self, cx: &Context<'_>) -> (Writing, bool) {
        let mut state = self.shared.lock();
        if !state.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            state.task = Some(cx.waker().clone());
        }
        take_incoming(&mut state, &mut self.waiting, &mut self.scanner, &mut self.alarm);
        state.alarm_set = self.alarm.is_some();
        let idle = state.outbox.is_empty() && state.leftover.is_empty();
        if self.writing {
            return (Writing::Write, state.closing);
        }
        if idle || (state.writing && state.leftover.is_empty()) {
            self.yielded = false;
            state.woken = false;
            return (Writing::Nothing, state.closing && idle);
        }
        // The first caller that got its reply wakes us before the others could run. Letting them run, without waiting
        // for time, is what makes one write of many.
        if state.crowded && !self.yielded && state.leftover.is_empty() {
            self.yielded = true;
            state.woken = true;
            return (Writing::Yield, false);
        }
        self.yielded = false;
        state.woken = false;
        self.writing = true;
        self.wire.outbox = std::mem::take(&mut state.leftover);
        let outbox = state.take_outbox();
        self.wire.outbox.unsplit(outbox);
        (Writing::Write, false)
    }

    /// Writes as much as the system takes. Returns whether all is written.
    fn write(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        match self.wire.poll_write(cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(written) => {
                written?;
                self.writing = false;
                self.shared.lock().writing = false;
                Ok(true)
            }
        }
    }

    fn hand_out_replies(&mut self) -> io::Result<()> {
        let mut done = std::mem::take(&mut self.done);
        while !self.wire.inbox.is_empty() {
            if self.waiting.is_empty() {
                // A caller may have written by itself and got its reply before we knew of it.
                let mut state = self.shared.lock();
                take_incoming(&mut state, &mut self.waiting, &mut self.scanner, &mut self.alarm);
            }
            if self.waiting.is_empty() {
                let problem = "a reply that nobody asked for";
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            let found = self.scanner.scan(&self.wire.inbox).map_err(io::Error::other)?;
            let Some(length) = found else { break };
            let bytes = self.wire.take(length);
            let replies = Replies::new(bytes, self.scanner.refusals());
            done.extend(self.waiting.pop_front().map(|waiting| (waiting, replies)));
            self.scanner.begin(self.waiting.front().map_or(0, |next| next.replies));
        }
        {
            // Told before the first caller runs, so that it knows whether it is alone.
            let mut state = self.shared.lock();
            state.in_flight -= done.len();
            state.crowded = done.len() > 1 || state.in_flight > 0;
        }
        let kib = done.iter().map(|(waiting, _)| waiting.kib as usize).sum();
        self.shared.room.add_permits(kib);
        let kept = |(waiting, replies): (Waiting, Replies)| waiting.promise.keep(Ok(replies));
        self.callers.extend(done.drain(..).filter_map(kept));
        self.done = done;
        self.callers.drain(..).for_each(Waker::wake);
        Ok(())
    }

    /// Whether a request waits beyond its deadline. Sets the alarm for the next one.
    fn overdue(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(alarm) = &mut self.alarm {
            if alarm.as_mut().poll(cx).is_pending() {
                return false;
            }
            match self.waiting.iter().map(|waiting| waiting.deadline).min() {
                None => {
                    self.alarm = None;
                    let mut state = self.shared.lock();
                    state.alarm_set = false;
                    // Somebody came meanwhile and relied on the alarm: look again.
                    if !state.incoming.is_empty() {
                        cx.waker().wake_by_ref();
                    }
                }
                Some(earliest) if earliest <= Instant::now() => return true,
                Some(earliest) => alarm.as_mut().reset(earliest),
            }
        }
        false
    }
}

/// A task that its runtime drops has callers, too, and the link may be used by another runtime.
impl Drop for Driver {
    fn drop(&mut self) {
        self.end(io::Error::new(io::ErrorKind::NotConnected, "the runtime of the link has ended"));
    }
}

/// Takes over requests that callers have put into the outbox, and watches over their deadlines.
fn take_incoming(
    state: &mut State,
    waiting: &mut VecDeque<Waiting>,
    scanner: &mut Scanner,
    alarm: &mut Option<Pin<Box<Sleep>>>,
) {
    if waiting.is_empty() {
        scanner.begin(state.incoming.first().map_or(0, |first| first.replies));
    }
    for request in state.incoming.drain(..) {
        if alarm.as_ref().is_none_or(|alarm| alarm.deadline() > request.deadline) {
            *alarm = Some(Box::pin(tokio::time::sleep_until(request.deadline)));
        }
        waiting.push_back(request);
    }
}
