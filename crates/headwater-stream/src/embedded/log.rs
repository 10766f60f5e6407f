//! How far the log has come: what is written, what is synced, and who waits for it.
//!
//! A call adds its effects to the buffer and gets the number of its commit. `writer` takes the whole buffer at once and
//! writes it, `syncer` makes what is written durable: all calls of the meantime share one write and one sync.
//! Promises: a wait ends when the commit is where the caller needs it, or with the error that stopped the log. After a
//! failed write or sync nothing is accepted any more: what the disk holds is unknown until the directory is opened anew.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::error;

use crate::error::{Result, StreamError};

/// When a commit counts as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SyncMode {
    /// When it is synced to the disk: it survives a power failure.
    Always,
    /// When it is written to the file: it survives the end of the process. Synced every second.
    Interval,
}

/// How often the log is synced when nobody waits for it.
pub(super) const SYNC_EVERY: Duration = Duration::from_secs(1);

/// The longest time that a sync is put off so that more callers can share it.
const PATIENCE_MAX: Duration = Duration::from_micros(500);

/// The shared knowledge about the log.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) mode: SyncMode,
    written: AtomicU64,
    synced: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) compactions: AtomicU64,
    has_failed: AtomicBool,
    progress: Mutex<Progress>,
    /// Signalled when there may be something to sync.
    pub(super) to_sync: Condvar,
}

#[derive(Debug)]
pub(super) struct Progress {
    written: u64,
    synced: u64,
    /// The newest commit that somebody wants synced.
    wanted: u64,
    /// How many callers took part lately: those whom the last sync served, and those who waited for the next one.
    expected: usize,
    /// The syncer gives those who were just served a moment to come back.
    is_patient: bool,
    last_sync_took: Duration,
    write_waiters: Vec<Waiter>,
    sync_waiters: Vec<Waiter>,
    failure: Option<Failure>,
    pub(super) tail: Tail,
    is_stopping: bool,
}

/// The file that is written to.
#[derive(Clone, Debug)]
pub(super) struct Tail {
    pub(super) file: Arc<File>,
    pub(super) path: Arc<PathBuf>,
    pub(super) number: u64,
    /// The end of what is written.
    pub(super) offset: u64,
    /// The end of what is synced.
    pub(super) synced: u64,
}

#[derive(Debug)]
struct Waiter {
    commit: u64,
    done: oneshot::Sender<()>,
}

/// Why the log has stopped for good.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    problem: String,
    is_full: bool,
    source: Arc<io::Error>,
}

impl Failure {
    pub(super) fn new(path: &Path, action: &str, source: io::Error) -> Self {
        let is_full = matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let problem = format!(
            "`{}` could not be {action}: {source}; nothing more is accepted until it is opened again",
            path.display()
        );
        Self { problem, is_full, source: Arc::new(source) }
    }

    pub(super) fn to_error(&self) -> StreamError {
        match self.is_full {
            true => StreamError::Full { problem: self.problem.clone() },
            false => StreamError::unavailable(self.problem.clone(), Arc::clone(&self.source)),
        }
    }
}

impl Log {
    pub(super) fn new(mode: SyncMode, tail: Tail) -> Self {
        Self {
            mode,
            written: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            compactions: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            progress: Mutex::new(Progress {
                written: 0,
                synced: 0,
                wanted: 0,
                expected: 0,
                is_patient: false,
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

    /// The newest commit that cannot be lost, as far as the mode promises.
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
        list: impl FnOnce(&mut Progress) -> (u64, &mut Vec<Waiter>),
    ) -> Result<Option<oneshot::Receiver<()>>> {
        let mut progress = self.lock();
        if let Some(failure) = &progress.failure {
            return Err(failure.to_error());
        }
        let (reached, waiters) = list(&mut progress);
        if reached >= commit {
            return Ok(None);
        }
        let (done, receiver) = oneshot::channel();
        waiters.push(Waiter { commit, done });
        let is_ready = progress.is_ready_to_sync();
        drop(progress);
        if is_ready {
            self.to_sync.notify_one();
        }
        Ok(Some(receiver))
    }

    async fn wait_for(&self, waiter: Option<oneshot::Receiver<()>>, limit: Duration) -> Result<()> {
        let Some(waiter) = waiter else { return Ok(()) };
        match tokio::time::timeout(limit, waiter).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(self.failure().unwrap_or_else(closed)),
            Err(_) => Err(StreamError::Unavailable {
                problem: format!("the disk did not take the log within {limit:?}"),
                source: None,
            }),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// The error that every call gets once the log has failed.
    pub(super) fn failure(&self) -> Option<StreamError> {
        if !self.has_failed() {
            return None;
        }
        self.lock().failure.as_ref().map(Failure::to_error)
    }

    /// Commits up to this one are written, up to this place.
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

    /// What lay in `tail` when the sync began is durable, and with it all commits up to this one.
    pub(super) fn publish_synced(&self, commit: u64, tail: &Tail, took: Duration) {
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

    /// Stops the log for good.
    pub(super) fn fail(&self, failure: Failure) {
        error!(error = %failure.problem, "embedded log failed");
        let mut progress = self.lock();
        progress.failure.get_or_insert(failure);
        self.has_failed.store(true, Ordering::Release);
        // Dropped senders wake those who wait; they find the failure.
        progress.write_waiters.clear();
        progress.sync_waiters.clear();
        drop(progress);
        self.to_sync.notify_all();
    }

    /// Ends the syncer; everything is synced.
    pub(super) fn stop(&self) {
        self.lock().is_stopping = true;
        self.to_sync.notify_all();
    }

    /// Waits until there is something to sync: the tail and the commit it holds. `None` when the log stops.
    pub(super) fn next_sync(&self) -> Option<(Tail, u64)> {
        let mut deadline = Instant::now() + SYNC_EVERY;
        let mut patient_until = None;
        let mut progress = self.lock();
        loop {
            if progress.is_stopping || progress.failure.is_some() {
                return None;
            }
            let now = Instant::now();
            let mut left = deadline.saturating_duration_since(now);
            if progress.written > progress.synced {
                if progress.wanted > progress.synced {
                    let until = *patient_until.get_or_insert(now + progress.patience());
                    left = until.saturating_duration_since(now);
                    progress.is_patient = !left.is_zero();
                }
                // Under load, too: whoever wakes us early must not put the deadline off.
                if left.is_zero() || progress.is_ready_to_sync() {
                    progress.is_patient = false;
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

    pub(super) fn lock(&self) -> MutexGuard<'_, Progress> {
        // Nothing in here is left half done by a panic.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    /// Whether a sync would serve somebody, and all who can be expected.
    fn is_ready_to_sync(&self) -> bool {
        let is_wanted = self.wanted > self.synced && self.written > self.synced;
        let all_are_here = self.sync_waiters.len() >= self.expected && self.written >= self.wanted;
        is_wanted && (all_are_here || !self.is_patient)
    }

    /// How long the next sync waits for those whom the last one served. Without it, callers fall into two halves that
    /// take turns: each sync serves one half while the other waits for the next.
    fn patience(&self) -> Duration {
        if self.sync_waiters.len() >= self.expected && self.written >= self.wanted {
            return Duration::ZERO;
        }
        (self.last_sync_took / 2).min(PATIENCE_MAX)
    }
}

fn take_reached(waiters: &mut Vec<Waiter>, commit: u64) -> Vec<Waiter> {
    waiters.extract_if(.., |waiter| waiter.commit <= commit).collect()
}

fn wake(done: Vec<Waiter>) {
    for waiter in done {
        // Whoever no longer waits was cancelled; their commit stands all the same.
        let _ = waiter.done.send(());
    }
}

pub(super) fn closed() -> StreamError {
    StreamError::Unavailable { problem: "it is closed".to_owned(), source: None }
}
