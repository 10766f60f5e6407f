//! Transactions: a call runs under the engine lock and changes state only by applying redo records.
//!
//! Upstream: the calls in `streams`, `delays` and so on. Downstream: `state` applies records, `codec`
//! encodes them.

use std::sync::Arc;

use tokio::sync::Notify;

use super::engine::Inner;
use super::log::CommitLog;
use super::redo_record::RedoRecord;
use super::state::EmbeddedState;
use super::waiters::{BlockedReads, LeaseEvents, NameWaiters};
use crate::clock::Timestamp;
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::leases::LeaseEventKind;

/// What a write waits for before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    /// Wait until the commit is durable in the configured sync mode.
    Durable,
    /// Wait until the commit survives the process. Enough for ownership of deliveries and leases.
    Written,
}

/// A read-write transaction under the lock.
pub(super) struct Tx<'a> {
    pub(super) now: Timestamp,
    pub(super) max_bytes: u64,
    inner: &'a mut Inner,
    log: Option<&'a CommitLog>,
    commit: u64,
    /// Length of the log buffer when the transaction began.
    began_at: usize,
    waiters: Vec<Arc<Notify>>,
    /// The commit that must be durable before the result may be returned.
    pub(super) visible_commit: u64,
}

/// What the caller does after the lock is released.
pub(super) struct Commit {
    /// Wait until this commit is written; 0 if nothing changed.
    pub(super) written: u64,
    /// Wait until this commit is durable.
    pub(super) durable: u64,
    /// Tasks to notify.
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

    /// Applies one record to the state and appends it to the log buffer.
    pub(super) fn apply(&mut self, record: &RedoRecord<'_>) {
        self.inner.state.apply(record).expect("a record applies to the state it was computed from");
        if self.log.is_some() {
            record.encode(&mut self.inner.buffer.bytes);
        }
        match record {
            RedoRecord::Append { stream, first, .. } => {
                self.record_commit(stream, *first);
                self.wake(stream);
            }
            RedoRecord::Rename { from, to } => {
                self.wake(from);
                self.wake(to);
            }
            RedoRecord::RemoveGroup { stream: name, .. }
            | RedoRecord::Remove { name }
            | RedoRecord::Schedule { delays: name, .. } => self.wake(name),
            _ => {}
        }
    }

    /// The commit number; 0 while nothing has changed.
    pub(super) fn commit_number(&self) -> u64 {
        match self.log {
            Some(_) if self.inner.buffer.bytes.len() > self.began_at => self.commit,
            _ => 0,
        }
    }

    /// Records which commit appended entries to a stream.
    pub(super) fn record_commit(&mut self, stream: &str, first: EntryId) {
        if let Some(log) = self.log {
            self.inner.state.record_commit(stream, first, self.commit, log.durable());
        }
    }

    /// Notifies the tasks that wait on this name.
    pub(super) fn wake(&mut self, name: &str) {
        self.waiters.extend(self.inner.name_waiters.of(name).iter().cloned());
    }

    /// Records activity of a consumer.
    pub(super) fn touch(&mut self, stream: &str, group: &str, consumer: &str) {
        self.inner.state.touch(stream, group, consumer, self.now);
    }

    /// Removes the value of a name if it has expired.
    pub(super) fn remove_expired(&mut self, name: &str) {
        if self.inner.state.is_expired(name, self.now) {
            self.apply(&RedoRecord::Remove { name });
        }
    }

    /// Removes expired leases and publishes their events.
    pub(super) fn expire_leases(&mut self) {
        while let Some(lease) = self.inner.state.next_expired_lease(self.now) {
            self.apply(&RedoRecord::Remove { name: lease.as_str() });
            self.inner.lease_events.publish(&lease, LeaseEventKind::Expired);
        }
    }

    pub(super) fn lease_events(&self) -> &LeaseEvents {
        &self.inner.lease_events
    }

    pub(super) fn name_waiters(&mut self) -> &mut NameWaiters {
        &mut self.inner.name_waiters
    }

    pub(super) fn blocked_reads(&mut self) -> &mut BlockedReads {
        &mut self.inner.blocked_reads
    }

    /// Fails with `Full` if `bytes` more would exceed `max_bytes`.
    pub(super) fn ensure_capacity(&self, bytes: u64) -> Result<()> {
        let used = self.state().bytes();
        if bytes == 0 || used.saturating_add(bytes) <= self.max_bytes {
            return Ok(());
        }
        Err(StreamError::Full {
            problem: format!(
                "{bytes} more bytes in addition to the {used} in use would exceed `max_bytes` = {}",
                self.max_bytes
            ),
        })
    }
}

/// A read-only transaction under the lock.
pub(super) struct ReadTx<'a> {
    pub(super) now: Timestamp,
    pub(super) state: &'a EmbeddedState,
    /// The commit that must be durable before the result may be returned.
    pub(super) visible_commit: u64,
}
