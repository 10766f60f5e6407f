//! A call under the lock: what it may look at, and how it changes things.
//!
//! Upstream: the calls in `streams`, `delays` and so on. Downstream: `state` carries effects out, `codec` writes them.

use std::sync::Arc;

use tokio::sync::Notify;

use super::codec;
use super::effect::Effect;
use super::engine::Inner;
use super::hints::{Ears, WaitingReads, Watchers};
use super::log::Log;
use super::state::State;
use crate::clock::Timestamp;
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::leases::HintKind;

/// When a change is done, from the caller's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// When it cannot be lost.
    Durable,
    /// When it survives the process: enough for what only says who works on what.
    Written,
}

/// A call that changes something, under the lock.
pub(super) struct Change<'a> {
    pub(super) now: Timestamp,
    pub(super) max_bytes: u64,
    inner: &'a mut Inner,
    log: Option<&'a Log>,
    commit: u64,
    /// How long the buffer was before.
    began_at: usize,
    woken: Vec<Arc<Notify>>,
    /// The commit that must be durable before the answer may be seen.
    pub(super) shows: u64,
}

/// What is left to do for a call when the lock is free again.
pub(super) struct Ended {
    /// The commit to wait for until it is written; 0 if nothing has changed.
    pub(super) written: u64,
    /// The commit to wait for until it is durable.
    pub(super) durable: u64,
    /// Those to wake.
    pub(super) woken: Vec<Arc<Notify>>,
}

impl<'a> Change<'a> {
    pub(super) fn begin(
        inner: &'a mut Inner,
        log: Option<&'a Log>,
        now: Timestamp,
        max_bytes: u64,
    ) -> Self {
        let began_at = inner.buffer.bytes.len();
        let (commit, shows) = (inner.buffer.commit + 1, inner.buffer.must);
        Self { now, max_bytes, inner, log, commit, began_at, woken: Vec::new(), shows }
    }

    pub(super) fn end(self, until: Until) -> Ended {
        let written = self.commit();
        let mut durable = self.shows;
        if written > 0 {
            self.inner.buffer.commit = written;
            if until == Until::Durable {
                self.inner.buffer.must = written;
                durable = written;
            }
        }
        Ended { written, durable, woken: self.woken }
    }

    pub(super) fn state(&self) -> &State {
        &self.inner.state
    }

    /// Carries out one effect and puts it into the log.
    pub(super) fn apply(&mut self, effect: &Effect<'_>) {
        self.inner.state.apply(effect).expect("an effect fits the state it was decided on");
        if self.log.is_some() {
            codec::encode(effect, &mut self.inner.buffer.bytes);
        }
        match effect {
            Effect::Append { stream, first, .. } => {
                self.note_commit(stream, *first);
                self.wake(stream);
            }
            Effect::RemoveGroup { stream: name, .. }
            | Effect::Remove { name }
            | Effect::PutAside { delays: name, .. } => self.wake(name),
            _ => {}
        }
    }

    /// The number of this commit; 0 if nothing has changed so far.
    pub(super) fn commit(&self) -> u64 {
        match self.log {
            Some(_) if self.inner.buffer.bytes.len() > self.began_at => self.commit,
            _ => 0,
        }
    }

    /// Remembers which commit brought entries into a stream.
    pub(super) fn note_commit(&mut self, stream: &str, first: EntryId) {
        if let Some(log) = self.log {
            self.inner.state.note_commit(stream, first, self.commit, log.durable());
        }
    }

    /// Wakes those who wait for something to happen to this name.
    pub(super) fn wake(&mut self, name: &str) {
        self.woken.extend(self.inner.watchers.of(name).iter().cloned());
    }

    /// A consumer did something.
    pub(super) fn saw(&mut self, stream: &str, group: &str, consumer: &str) {
        self.inner.state.saw(stream, group, consumer, self.now);
    }

    /// Makes a name free if the time of what it stood for is over.
    pub(super) fn vacate(&mut self, name: &str) {
        if self.inner.state.has_ended(name, self.now) {
            self.apply(&Effect::Remove { name });
        }
    }

    /// Ends leases whose time is over, and tells those who watch.
    pub(super) fn end_leases(&mut self) {
        while let Some(lease) = self.inner.state.ended_lease(self.now) {
            self.apply(&Effect::Remove { name: lease.as_str() });
            self.inner.ears.tell(&lease, HintKind::Expired);
        }
    }

    pub(super) fn ears(&mut self) -> &mut Ears {
        &mut self.inner.ears
    }

    pub(super) fn watchers(&mut self) -> &mut Watchers {
        &mut self.inner.watchers
    }

    pub(super) fn waiting_reads(&mut self) -> &mut WaitingReads {
        &mut self.inner.waiting_reads
    }

    /// Fails with `Full` if the memory has no room for this many bytes more than now.
    pub(super) fn room_for(&self, bytes: u64) -> Result<()> {
        let taken = self.state().bytes();
        if bytes == 0 || taken.saturating_add(bytes) <= self.max_bytes {
            return Ok(());
        }
        Err(StreamError::Full {
            problem: format!(
                "{bytes} bytes more than the {taken} there are would exceed max_bytes, which is {}",
                self.max_bytes
            ),
        })
    }
}

/// A call that changes nothing, under the lock.
pub(super) struct Look<'a> {
    pub(super) now: Timestamp,
    pub(super) state: &'a State,
    /// The commit that must be durable before the answer may be seen.
    pub(super) shows: u64,
}
