//! Progress of the log: which commits are written and synced, and which calls wait for them.
//!
//! A call appends its records to the buffer and gets a commit number. The writer thread writes the whole
//! buffer at once and the sync thread syncs what is written, so concurrent calls share one write and one
//! sync (group commit).
//! Guarantees: a wait ends when the commit has reached the required state, or with the error that stopped
//! the log. After a failed write or sync every call fails until `writer` has repaired the log; the changes
//! of calls in flight stay in memory and are part of the repair.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::error;

use crate::error::{Result, StreamError};

/// When a commit counts as durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SyncMode {
    /// After fsync: it survives a power failure.
    Always,
    /// After the write: it survives the process. Synced every second.
    Interval,
}

/// Sync interval while no call waits for a sync.
pub(super) const SYNC_EVERY: Duration = Duration::from_secs(1);

/// Upper bound for delaying a sync so that more calls can share it (group commit delay).
const GROUP_COMMIT_DELAY_MAX: Duration = Duration::from_micros(500);

/// Write and sync progress, shared by calls and log threads.
#[derive(Debug)]
pub(super) struct CommitLog {
    pub(super) mode: SyncMode,
    written: AtomicU64,
    synced: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) compactions: AtomicU64,
    /// Number of times a write or sync failed while the log was healthy.
    pub(super) outages: AtomicU64,
    has_failed: AtomicBool,
    progress: Mutex<CommitProgress>,
    /// Held during a sync.
    syncing: Mutex<()>,
    /// Signalled when there may be something to sync.
    pub(super) to_sync: Condvar,
}

#[derive(Debug)]
pub(super) struct CommitProgress {
    written: u64,
    synced: u64,
    /// The newest commit that a call waits for.
    wanted: u64,
    /// Expected number of waiting calls: those served by the last sync and those that waited for the next one.
    expected: usize,
    /// The sync is delayed so that the calls served last can join it.
    is_delaying: bool,
    last_sync_took: Duration,
    write_waiters: Vec<CommitWaiter>,
    sync_waiters: Vec<CommitWaiter>,
    failure: Option<LogFailure>,
    pub(super) tail: LogTail,
    is_stopping: bool,
}

/// The current log file.
#[derive(Clone, Debug)]
pub(super) struct LogTail {
    pub(super) file: Arc<File>,
    pub(super) path: Arc<PathBuf>,
    pub(super) number: u64,
    /// End of the written data.
    pub(super) offset: u64,
    /// End of the synced data.
    pub(super) synced: u64,
}

#[derive(Debug)]
struct CommitWaiter {
    commit: u64,
    done: oneshot::Sender<Result<(), LogFailure>>,
}

/// Consequence of a failure; a higher variant includes the lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Damage {
    /// A write failed. Earlier frames are complete; a partial frame may follow them.
    Write,
    /// A sync failed. The operating system may have dropped any data written since the last successful sync;
    /// reading it back proves nothing because it comes from the page cache.
    Sync,
    /// A thread panicked. The state is unknown; only reopening the directory helps.
    Panic,
}

/// Why the log rejects calls.
#[derive(Clone, Debug)]
pub(super) struct LogFailure {
    pub(super) damage: Damage,
    problem: String,
    is_full: bool,
    source: Arc<io::Error>,
}

impl LogFailure {
    pub(super) fn new(damage: Damage, path: &Path, action: &str, source: io::Error) -> Self {
        let is_full = is_full(&source);
        let problem = format!("`{}` could not be {action}: {source}", path.display());
        Self { damage, problem, is_full, source: Arc::new(source) }
    }

    /// The error for a rejected call.
    pub(super) fn to_error(&self) -> StreamError {
        self.error(match self.damage {
            Damage::Panic => "all calls fail until the directory is opened again",
            _ => "all calls fail until the disk accepts writes again; the write is retried every few seconds",
        })
    }

    /// The error for a call that was in flight when the log failed.
    pub(super) fn to_error_in_flight(&self) -> StreamError {
        self.error(match self.damage {
            Damage::Panic => "whether this call took effect is unknown",
            _ => {
                "changes that this call made are kept, and are lost only if the process ends before the disk accepts \
                 writes again"
            }
        })
    }

    fn error(&self, consequence: &str) -> StreamError {
        let problem = format!("{}; {consequence}", self.problem);
        match (self.damage, self.is_full) {
            (Damage::Panic, _) => StreamError::Stopped { problem },
            (_, true) => StreamError::Full { problem },
            (_, false) => StreamError::unavailable(problem, Arc::clone(&self.source)),
        }
    }
}

/// Whether an operation failed because the disk is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

impl CommitLog {
    pub(super) fn new(mode: SyncMode, tail: LogTail) -> Self {
        Self {
            mode,
            written: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            compactions: AtomicU64::new(0),
            outages: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            syncing: Mutex::new(()),
            progress: Mutex::new(CommitProgress {
                written: 0,
                synced: 0,
                wanted: 0,
                expected: 0,
                is_delaying: false,
                last_sync_took: Duration::ZERO,
                write_waiters: Vec::new(),
                sync_waiters: Vec::new(),
                failure: None,
                tail,
                is_stopping: false,
            }),
            to_sync: Condvar::new(),
        }
    }

    /// The newest durable commit in the configured mode.
    pub(super) fn durable(&self) -> u64 {
        match self.mode {
            SyncMode::Always => self.synced.load(Ordering::Acquire),
            SyncMode::Interval => self.written.load(Ordering::Acquire),
        }
    }

    /// Waits until one commit is written and another is durable. Cancel-safe.
    pub(super) async fn wait(&self, written: u64, durable: u64, limit: Duration) -> Result<()> {
        let waiter = match self.mode {
            SyncMode::Always if durable > self.synced.load(Ordering::Acquire) => {
                self.register(durable, |progress| {
                    progress.wanted = progress.wanted.max(durable);
                    (progress.synced, &mut progress.sync_waiters)
                })?
            }
            _ => None,
        };
        self.wait_for(waiter, limit).await?;
        let written = match self.mode {
            SyncMode::Always => written,
            SyncMode::Interval => written.max(durable),
        };
        if written > self.written.load(Ordering::Acquire) {
            let waiter =
                self.register(written, |progress| (progress.written, &mut progress.write_waiters))?;
            self.wait_for(waiter, limit).await?;
        }
        Ok(())
    }

    fn register(
        &self,
        commit: u64,
        list: impl FnOnce(&mut CommitProgress) -> (u64, &mut Vec<CommitWaiter>),
    ) -> Result<Option<oneshot::Receiver<Result<(), LogFailure>>>> {
        let mut progress = self.lock();
        if let Some(failure) = &progress.failure {
            return Err(failure.to_error_in_flight());
        }
        let (reached, waiters) = list(&mut progress);
        if reached >= commit {
            return Ok(None);
        }
        let (done, receiver) = oneshot::channel();
        waiters.push(CommitWaiter { commit, done });
        let is_ready = progress.is_ready_to_sync();
        drop(progress);
        if is_ready {
            self.to_sync.notify_one();
        }
        Ok(Some(receiver))
    }

    async fn wait_for(
        &self,
        waiter: Option<oneshot::Receiver<Result<(), LogFailure>>>,
        limit: Duration,
    ) -> Result<()> {
        let Some(waiter) = waiter else { return Ok(()) };
        match tokio::time::timeout(limit, waiter).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(failure))) => Err(failure.to_error_in_flight()),
            Ok(Err(_)) => Err(closed()),
            Err(_) => Err(StreamError::Unavailable {
                problem: format!("the disk did not accept the log within {limit:?}"),
                source: None,
            }),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// The error that every call gets while the log has failed.
    pub(super) fn failure(&self) -> Option<StreamError> {
        if !self.has_failed() {
            return None;
        }
        self.lock().failure.as_ref().map(LogFailure::to_error)
    }

    /// The failure to repair, if any.
    pub(super) fn damage(&self) -> Option<LogFailure> {
        self.has_failed().then(|| self.lock().failure.clone()).flatten()
    }

    /// Syncs the file of `tail`, which contains all commits up to this one.
    ///
    /// Only one sync at a time: the operating system reports a failed write-back to only one of two concurrent
    /// callers.
    pub(super) fn sync(&self, tail: &LogTail, commit: u64) -> Result<(), LogFailure> {
        let _one_at_a_time = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        self.ensure_tail_is_sound()?;
        let begun = Instant::now();
        let synced = tail.file.sync_data();
        synced.map_err(|error| self.fail_sync(tail, error))?;
        self.publish_synced(commit, tail, begun.elapsed());
        Ok(())
    }

    /// Fails after a failed sync: the operating system may have dropped earlier data, so nothing may be written
    /// after it.
    pub(super) fn ensure_tail_is_sound(&self) -> Result<(), LogFailure> {
        if !self.has_failed() {
            return Ok(());
        }
        match &self.lock().failure {
            Some(failure) if failure.damage >= Damage::Sync => Err(failure.clone()),
            _ => Ok(()),
        }
    }

    fn fail_sync(&self, tail: &LogTail, error: io::Error) -> LogFailure {
        let failure = LogFailure::new(Damage::Sync, &tail.path, "synced", error);
        // If the log has moved to another file, a snapshot has made the data of this one durable.
        if self.lock().tail.number == tail.number {
            self.fail(failure.clone());
        }
        failure
    }

    /// Records that commits up to this one are written, up to `offset`.
    pub(super) fn publish_written(&self, commit: u64, offset: u64) {
        let mut progress = self.lock();
        progress.written = commit;
        progress.tail.offset = offset;
        self.written.store(commit, Ordering::Release);
        self.writes.fetch_add(1, Ordering::Relaxed);
        let done = take_reached(&mut progress.write_waiters, commit);
        let is_ready = progress.is_ready_to_sync();
        drop(progress);
        if is_ready {
            self.to_sync.notify_one();
        }
        wake(done);
    }

    /// Records that the contents of `tail` are durable, and with them all commits up to this one.
    pub(super) fn publish_synced(&self, commit: u64, tail: &LogTail, took: Duration) {
        let mut progress = self.lock();
        progress.last_sync_took = took;
        self.syncs.fetch_add(1, Ordering::Relaxed);
        if progress.tail.number == tail.number {
            progress.tail.synced = progress.tail.synced.max(tail.offset);
        }
        progress.synced = progress.synced.max(commit);
        self.synced.store(progress.synced, Ordering::Release);
        let reached = progress.synced;
        progress.expected = progress.sync_waiters.len();
        let done = take_reached(&mut progress.sync_waiters, reached);
        drop(progress);
        wake(done);
    }

    /// Fails all calls until [`resume`](Self::resume).
    pub(super) fn fail(&self, mut failure: LogFailure) {
        let mut progress = self.lock();
        match &progress.failure {
            Some(known) => failure.damage = failure.damage.max(known.damage),
            None => {
                self.outages.fetch_add(1, Ordering::Relaxed);
                error!(error = %failure.problem, "embedded log failed; all calls fail until it is repaired");
            }
        }
        self.has_failed.store(true, Ordering::Release);
        let mut waiters = std::mem::take(&mut progress.write_waiters);
        waiters.append(&mut progress.sync_waiters);
        progress.failure = Some(failure.clone());
        drop(progress);
        for waiter in waiters {
            // The receiver is gone if the call was cancelled.
            let _ = waiter.done.send(Err(failure.clone()));
        }
    }

    /// Accepts calls again after a repair; `false` if there is damage that was not repaired.
    pub(super) fn resume(&self, repaired: Damage) -> bool {
        let mut progress = self.lock();
        if progress.failure.as_ref().is_some_and(|failure| failure.damage > repaired) {
            return false;
        }
        progress.failure = None;
        self.has_failed.store(false, Ordering::Release);
        drop(progress);
        self.to_sync.notify_all();
        true
    }

    /// Stops the sync thread; everything is synced, or the log has failed.
    pub(super) fn stop(&self) {
        self.lock().is_stopping = true;
        self.to_sync.notify_all();
    }

    /// Blocks until there is something to sync. Returns the tail and its newest commit; `None` when the log
    /// stops.
    pub(super) fn next_sync(&self) -> Option<(LogTail, u64)> {
        let mut deadline = Instant::now() + SYNC_EVERY;
        let mut delay_until = None;
        let mut progress = self.lock();
        loop {
            if progress.is_stopping {
                return None;
            }
            if progress.failure.is_some() {
                progress = self.to_sync.wait(progress).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let now = Instant::now();
            let mut left = deadline.saturating_duration_since(now);
            if progress.written > progress.synced {
                if progress.wanted > progress.synced {
                    let until = *delay_until.get_or_insert(now + progress.group_commit_delay());
                    left = until.saturating_duration_since(now);
                    progress.is_delaying = !left.is_zero();
                }
                // Checked on every wakeup, so that frequent wakeups under load cannot postpone the deadline.
                if left.is_zero() || progress.is_ready_to_sync() {
                    progress.is_delaying = false;
                    return Some((progress.tail.clone(), progress.written));
                }
            } else if left.is_zero() {
                deadline = now + SYNC_EVERY;
                left = SYNC_EVERY;
            }
            let wait = self.to_sync.wait_timeout(progress, left);
            (progress, _) = wait.unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, CommitProgress> {
        // A panic cannot leave the progress half updated.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommitProgress {
    /// Whether a call waits for a sync and all expected calls have arrived.
    fn is_ready_to_sync(&self) -> bool {
        let is_wanted = self.wanted > self.synced && self.written > self.synced;
        let all_are_waiting =
            self.sync_waiters.len() >= self.expected && self.written >= self.wanted;
        is_wanted && (all_are_waiting || !self.is_delaying)
    }

    /// How long the next sync waits for the calls that the last one served. Without the delay, callers split
    /// into two halves that alternate: each sync serves one half while the other waits for the next.
    fn group_commit_delay(&self) -> Duration {
        if self.sync_waiters.len() >= self.expected && self.written >= self.wanted {
            return Duration::ZERO;
        }
        (self.last_sync_took / 2).min(GROUP_COMMIT_DELAY_MAX)
    }
}

fn take_reached(waiters: &mut Vec<CommitWaiter>, commit: u64) -> Vec<CommitWaiter> {
    waiters.extract_if(.., |waiter| waiter.commit <= commit).collect()
}

fn wake(done: Vec<CommitWaiter>) {
    for waiter in done {
        // The receiver is gone if the call was cancelled; its commit persists.
        let _ = waiter.done.send(Ok(()));
    }
}

pub(super) fn closed() -> StreamError {
    StreamError::Unavailable { problem: "it is closed".to_owned(), source: None }
}
