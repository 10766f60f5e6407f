//! The engine: the state behind one lock, the log buffer and the waiting tasks.
//!
//! Upstream: every call, through [`EngineShared::transact`] and [`EngineShared::read`]. Downstream: `state`,
//! `log`, `writer`.
//! Guarantees: a call decides and applies its changes under the lock, in log order. It returns when its
//! changes, and everything its result depends on, are durable, so no result shows data that a crash could
//! revert. Deliveries return once they are written: if one is lost, the entry is redelivered.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::log::{CommitLog, closed};
use super::segment::FRAME_HEADER_BYTES;
use super::state::EmbeddedState;
use super::transaction::{Commit, Durability, ReadTx, Tx};
use super::waiters::{BlockedReads, LeaseEvents, NameWaiters};
use crate::clock::Clock;
use crate::error::{Result, StreamError};

/// Calls wait while the log buffer is larger than this.
const BUFFER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// State shared by the calls and the log threads.
#[derive(Debug)]
pub(super) struct EngineShared {
    pub(super) clock: Arc<dyn Clock>,
    /// Memory limit of the state.
    pub(super) max_bytes: u64,
    call_deadline: Duration,
    inner: Mutex<Inner>,
    /// Signalled when the buffer becomes non-empty or the log stops.
    pub(super) to_write: Condvar,
    /// `None` for a backend in memory.
    pub(super) log: Option<Arc<CommitLog>>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) state: EmbeddedState,
    pub(super) name_waiters: NameWaiters,
    pub(super) blocked_reads: BlockedReads,
    pub(super) lease_events: LeaseEvents,
    pub(super) buffer: Buffer,
    pub(super) is_closed: bool,
}

/// Committed but unwritten records.
#[derive(Debug)]
pub(super) struct Buffer {
    /// Records of all calls since the last write, after space for a frame header.
    pub(super) bytes: Vec<u8>,
    /// The newest commit number.
    pub(super) commit: u64,
    /// The newest commit that must be durable before a result may show it.
    pub(super) unsynced_visible: u64,
    pub(super) is_stopping: bool,
}

impl Buffer {
    pub(super) fn empty() -> Vec<u8> {
        vec![0; FRAME_HEADER_BYTES]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.len() == FRAME_HEADER_BYTES
    }
}

impl EngineShared {
    pub(super) fn new(
        clock: Arc<dyn Clock>,
        max_bytes: u64,
        call_deadline: Duration,
        state: EmbeddedState,
        log: Option<Arc<CommitLog>>,
    ) -> Self {
        let buffer =
            Buffer { bytes: Buffer::empty(), commit: 0, unsynced_visible: 0, is_stopping: false };
        let (name_waiters, blocked_reads, lease_events) = Default::default();
        let is_closed = false;
        let inner = Inner { state, name_waiters, blocked_reads, lease_events, buffer, is_closed };
        let inner = Mutex::new(inner);
        Self { clock, max_bytes, call_deadline, inner, to_write: Condvar::new(), log }
    }

    /// Runs a read-write transaction, then waits for `durability`.
    ///
    /// If `decide` fails it must not have applied any record. If the future is dropped while it waits, the
    /// change persists.
    pub(super) async fn transact<T>(
        &self,
        durability: Durability,
        decide: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        self.wait_for_buffer_space().await?;
        let (output, written, durable) = self.transact_now(durability, decide)?;
        self.wait(written, durable).await?;
        Ok(output)
    }

    fn transact_now<T>(
        &self,
        durability: Durability,
        decide: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<(T, u64, u64)> {
        let mut inner = self.lock()?;
        let was_empty = inner.buffer.is_empty();
        let now = self.clock.now();
        let mut tx = Tx::begin(&mut inner, self.log.as_deref(), now, self.max_bytes);
        let output = decide(&mut tx);
        let Commit { written, durable, waiters } = tx.commit(durability);
        drop(inner);
        if was_empty && written > 0 {
            self.to_write.notify_one();
        }
        waiters.iter().for_each(|waiter| waiter.notify_one());
        Ok((output?, written, durable))
    }

    /// Runs a read-write transaction without waiting. The caller waits before it returns the data. The records
    /// are small, so this does not wait for buffer space.
    pub(super) fn transact_without_wait<T>(
        &self,
        decide: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        let (output, ..) = self.transact_now(Durability::Written, decide)?;
        Ok(output)
    }

    /// Runs a read-only transaction, then waits until what it read is durable.
    pub(super) async fn read<T>(
        &self,
        read: impl FnOnce(&mut ReadTx<'_>) -> Result<T>,
    ) -> Result<T> {
        let (output, visible_commit) = {
            let guard = self.lock()?;
            let (now, state, visible_commit) =
                (self.clock.now(), &guard.state, guard.buffer.unsynced_visible);
            let mut tx = ReadTx { now, state, visible_commit };
            (read(&mut tx)?, tx.visible_commit)
        };
        self.wait(0, visible_commit).await?;
        Ok(output)
    }

    /// Waits until one commit is written and another is durable. Cancel-safe.
    pub(super) async fn wait(&self, written: u64, durable: u64) -> Result<()> {
        match &self.log {
            Some(log) => log.wait(written, durable, self.call_deadline).await,
            None => Ok(()),
        }
    }

    /// Waits while the buffer is full, so that a slow disk does not exhaust memory.
    async fn wait_for_buffer_space(&self) -> Result<()> {
        while self.log.is_some() {
            let full_at = {
                let inner = self.lock()?;
                (inner.buffer.bytes.len() > BUFFER_BYTES_MAX).then_some(inner.buffer.commit)
            };
            match full_at {
                Some(commit) => self.wait(commit, 0).await?,
                None => break,
            }
        }
        Ok(())
    }

    /// Fails if the backend is closed or the log has failed.
    pub(super) fn ensure_open(&self) -> Result<()> {
        self.lock().map(drop)
    }

    /// Takes the lock; fails if the backend is closed or the log has failed.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Inner>> {
        if let Some(failure) = self.log.as_ref().and_then(|log| log.failure()) {
            return Err(failure);
        }
        let inner = self.inner.lock().map_err(|_| StreamError::Stopped {
            problem: "an earlier call panicked and left the state unknown".to_owned(),
        })?;
        if inner.is_closed { Err(closed()) } else { Ok(inner) }
    }

    /// Takes the lock for the writer; `None` if a call panicked, because a partial transaction must not be
    /// logged.
    pub(super) fn lock_for_writing(&self) -> Option<MutexGuard<'_, Inner>> {
        self.inner.lock().ok()
    }

    /// Takes the lock for cleanup, whatever the state is.
    pub(super) fn lock_ignoring_poison(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine and its threads. Closing or dropping it stops the threads and unlocks the directory.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) shared: Arc<EngineShared>,
    running: Mutex<Option<EngineThreads>>,
}

/// What stops with the engine.
#[derive(Debug)]
pub(super) struct EngineThreads {
    pub(super) threads: Vec<JoinHandle<()>>,
    /// The directory lock, released after the last thread has stopped.
    pub(super) lock: File,
}

impl Engine {
    pub(super) fn new(shared: Arc<EngineShared>, running: Option<EngineThreads>) -> Self {
        Self { shared, running: Mutex::new(running) }
    }

    /// Rejects new calls, writes the buffer and joins the threads. Blocks.
    pub(super) fn stop(&self) {
        {
            let mut inner = self.shared.lock_ignoring_poison();
            inner.is_closed = true;
            inner.buffer.is_stopping = true;
            inner.name_waiters.wake_all();
        }
        self.shared.to_write.notify_all();
        // Held until the threads have stopped, so that a second `close` waits too.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(EngineThreads { threads, lock }) = running.take() {
            for thread in threads {
                // A thread that panicked has recorded a log failure.
                let _ = thread.join();
            }
            // Closing alone is not enough: a child process that is being spawned has the file until it executes its program.
            let _ = lock.unlock();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}
