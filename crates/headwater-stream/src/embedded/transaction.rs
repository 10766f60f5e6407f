//! A call under the lock: what it may look at, and how it changes things.
//!
//! Upstream: the calls in `streams`, `delays` and so on. Downstream: `state` carries effects out, `codec` writes them.

use std::sync::Arc;

use tokio::sync::Notify;

use super::codec;
use super::engine::Inner;
use super::log::CommitLog;
use super::redo_record::RedoRecord;
use super::state::EmbeddedState;
use super::waiters::{BlockedReads, LeaseSubscribers, NameWaiters};
use crate::clock::Timestamp;
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::leases::HintKind;

/// When a change is done, from the caller's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    /// When it cannot be lost.
    Durable,
    /// When it survives the process: enough for what only says who works on what.
    Written,
}

/// A call that changes something, under the lock.
pub(super) struct Tx<'a> {
    pub(super) now: Timestamp,
    pub(super) max_bytes: u64,
    inner: &'a mut Inner,
    log: Option<&'a CommitLog>,
    commit: u64,
    /// How long the buffer was before.
    began_at: usize,
    waiters: Vec<Arc<Notify>>,
    /// The commit that must be durable before the answer may be seen.
    pub(super) visible_commit: u64,
}

/// What is left to do for a call when the lock is free again.
pub(super) struct Commit {
    /// The commit to wait for until it is written; 0 if nothing has changed.
    pub(super) written: u64,
    /// The commit to wait for until it is durable.
    pub(super) durable: u64,
    /// Those to wake.
    pub(super) waiters: Vec<Arc<Notify>>,
}

impl<'a> Tx<'a> {
    pub(super) fn begin(
        inner: &'a mut Inner,
        log: Option<&'a CommitLog>,
        now: Timestamp,
        max_bytes: u64,
    ) -> Self {
        let began_at = inner.buffer.bytes.len();
        let (commit, visible_commit) = (inner.buffer.commit + 1, inner.buffer.unsynced_visible);
        Self { now, max_bytes, inner, log, commit, began_at, waiters: Vec::new(), visible_commit }
    }

    pub(super) fn commit(self, durability: Durability) -> Commit {
        let written = self.commit_number();
        let mut durable = self.visible_commit;
        if written > 0 {
            self.inner.buffer.commit = written;
            if durability == Durability::Durable {
                self.inner.buffer.unsynced_visible = written;
                durable = written;
            }
        }
        Commit { written, durable, waiters: self.waiters }
    }

    pub(super) fn state(&self) -> &EmbeddedState {
        &self.inner.state
    }

    /// Carries out one effect and puts it into the log.
    pub(super) fn apply(&mut self, record: &RedoRecord<'_>) {
        self.inner.state.apply(record).expect("a record fits the state it was decided on");
        if self.log.is_some() {
            codec::encode(record, &mut self.inner.buffer.bytes);
        }
        match record {
            RedoRecord::Append { stream, first, .. } => {
                self.record_commit(stream, *first);
                self.wake(stream);
            }
            RedoRecord::RemoveGroup { stream: name, .. }
            | RedoRecord::Remove { name }
            | RedoRecord::Schedule { delays: name, .. } => self.wake(name),
            _ => {}
        }
    }

    /// The number of this commit; 0 if nothing has changed so far.
    pub(super) fn commit_number(&self) -> u64 {
        match self.log {
            Some(_) if self.inner.buffer.bytes.len() > self.began_at => self.commit,
            _ => 0,
        }
    }

    /// Remembers which commit brought entries into a stream.
    pub(super) fn record_commit(&mut self, stream: &str, first: EntryId) {
        if let Some(log) = self.log {
            self.inner.state.record_commit(stream, first, self.commit, log.durable());
        }
    }

    /// Wakes those who wait for something to happen to this name.
    pub(super) fn wake(&mut self, name: &str) {
        self.waiters.extend(self.inner.name_waiters.of(name).iter().cloned());
    }

    /// A consumer did something.
    pub(super) fn touch(&mut self, stream: &str, group: &str, consumer: &str) {
        self.inner.state.touch(stream, group, consumer, self.now);
    }

    /// Makes a name free if the time of what it stood for is over.
    pub(super) fn remove_expired(&mut self, name: &str) {
        if self.inner.state.is_expired(name, self.now) {
            self.apply(&RedoRecord::Remove { name });
        }
    }

    /// Ends leases whose time is over, and tells those who watch.
    pub(super) fn expire_leases(&mut self) {
        while let Some(lease) = self.inner.state.next_expired_lease(self.now) {
            self.apply(&RedoRecord::Remove { name: lease.as_str() });
            self.inner.lease_subscribers.publish(&lease, HintKind::Expired);
        }
    }

    pub(super) fn lease_subscribers(&mut self) -> &mut LeaseSubscribers {
        &mut self.inner.lease_subscribers
    }

    pub(super) fn name_waiters(&mut self) -> &mut NameWaiters {
        &mut self.inner.name_waiters
    }

    pub(super) fn blocked_reads(&mut self) -> &mut BlockedReads {
        &mut self.inner.blocked_reads
    }

    /// Fails with `Full` if the memory has no room for this many bytes more than now.
    pub(super) fn ensure_capacity(&self, bytes: u64) -> Result<()> {
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
pub(super) struct ReadTx<'a> {
    pub(super) now: Timestamp,
    pub(super) state: &'a EmbeddedState,
    /// The commit that must be durable before the answer may be seen.
    pub(super) visible_commit: u64,
}
