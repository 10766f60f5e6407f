//! The log threads: one writes, one syncs, and a third compacts when needed.
//!
//! Upstream: calls fill the buffer in `engine`. Downstream: the files.
//! Guarantees: commits are written in order; a file is synced before the next one begins. Writes continue
//! during a sync, so the next sync covers them. After a failed write or sync (a full disk) the writer
//! repairs the log as soon as the disk accepts writes, and no data shown in a result is lost.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{mem, panic};

use tracing::{debug, error, info, warn};

use super::directory::Directory;
use super::engine::{Buffer, EngineShared};
use super::log::{CommitLog, Damage, LogFailure, LogTail};
use super::read_back::{self, SyncedFrames, UncheckedTail};
use super::recovery::create_log;
use super::segment::{FILE_HEADER_BYTES, FRAME_HEADER_BYTES, FileKind, seal_frame};
use super::snapshot;
use super::state::EmbeddedState;
use crate::error::StreamError;

/// A buffer that grew beyond this is freed instead of reused.
const KEPT_BUFFER_BYTES: usize = 4 * 1024 * 1024;

/// First and longest pause between repair attempts.
const REPAIR_PAUSE_MIN: Duration = Duration::from_millis(100);
const REPAIR_PAUSE_MAX: Duration = Duration::from_secs(2);

/// When to compact the log into a snapshot.
#[derive(Debug)]
pub(super) struct Compaction {
    /// Log bytes before the first snapshot, and between small ones.
    pub(super) after_bytes: u64,
    /// Log bytes since the last snapshot.
    pub(super) log_bytes: u64,
    /// Size of the last snapshot: the log may grow to that size before the next one.
    pub(super) snapshot_bytes: u64,
    /// The log file is not durable as it was opened: a snapshot replaces it before anything is written.
    pub(super) is_due: bool,
}

/// Starts the log threads.
pub(super) fn start(
    shared: &Arc<EngineShared>,
    log: &Arc<CommitLog>,
    directory: Directory,
    compaction: Compaction,
) -> io::Result<Vec<JoinHandle<()>>> {
    let mut writer = LogWriter::new(shared, log, directory, compaction);
    let (syncing, sync_log) = (Arc::clone(shared), Arc::clone(log));
    let syncer = thread::Builder::new().name("headwater-sync".to_owned()).spawn(move || {
        guarded(&syncing, &sync_log, || sync_until_stopped(&syncing, &sync_log));
    })?;
    let (writing, write_log) = (Arc::clone(shared), Arc::clone(log));
    let writer = thread::Builder::new().name("headwater-log".to_owned()).spawn(move || {
        guarded(&writing, &write_log, || writer.run());
        write_log.stop();
    })?;
    Ok(vec![writer, syncer])
}

/// Turns a failure or panic of a log thread into a log failure, so that no call waits forever.
fn guarded(shared: &EngineShared, log: &CommitLog, run: impl FnOnce() -> Result<(), LogFailure>) {
    let failure = match panic::catch_unwind(panic::AssertUnwindSafe(run)) {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => panicked(log, "a log thread panicked"),
    };
    report(shared, log, failure);
}

fn panicked(log: &CommitLog, problem: &'static str) -> LogFailure {
    let path = Arc::clone(&log.lock().tail.path);
    LogFailure::new(Damage::Panic, &path, "written", io::Error::other(problem))
}

/// Fails all calls, including blocked reads, and lets the writer repair the log.
fn report(shared: &EngineShared, log: &CommitLog, failure: LogFailure) {
    log.fail(failure);
    shared.lock_ignoring_poison().name_waiters.wake_all();
    shared.to_write.notify_all();
}

fn sync_until_stopped(shared: &EngineShared, log: &CommitLog) -> Result<(), LogFailure> {
    while let Some((tail, commit)) = log.next_sync() {
        if log.sync(&tail, commit).is_err() {
            // `sync` has recorded the failure; blocked reads must be woken here.
            shared.lock_ignoring_poison().name_waiters.wake_all();
            shared.to_write.notify_all();
        }
    }
    Ok(())
}

struct LogWriter {
    shared: Arc<EngineShared>,
    log: Arc<CommitLog>,
    directory: Arc<Directory>,
    tail: LogTail,
    /// Data taken from the buffer and not yet written, after space for a frame header.
    frame: Vec<u8>,
    /// The newest commit in `frame`.
    commit: u64,
    compaction: Compaction,
    /// The snapshot in progress.
    snapshot: Option<JoinHandle<Option<u64>>>,
    stop_snapshot: Arc<AtomicBool>,
    /// The end of the current file that is read back before the next file begins.
    unchecked: UncheckedTail,
}

impl LogWriter {
    fn new(
        shared: &Arc<EngineShared>,
        log: &Arc<CommitLog>,
        directory: Directory,
        compaction: Compaction,
    ) -> Self {
        let tail = log.lock().tail.clone();
        Self {
            shared: Arc::clone(shared),
            log: Arc::clone(log),
            directory: Arc::new(directory),
            frame: Buffer::empty(),
            commit: 0,
            compaction,
            snapshot: None,
            stop_snapshot: Arc::default(),
            unchecked: UncheckedTail::new(tail.offset),
            tail,
        }
    }

    fn run(&mut self) -> Result<(), LogFailure> {
        loop {
            match self.step() {
                Ok(true) => {}
                Ok(false) => break,
                Err(failure) => self.repair(failure)?,
            }
        }
        self.end_snapshot();
        self.finish()
    }

    /// Writes the buffer once it is non-empty. Returns `false` when the log stops.
    fn step(&mut self) -> Result<bool, LogFailure> {
        if !self.take_buffer()? {
            return Ok(false);
        }
        if self.compaction.is_due {
            // It includes what was taken from the buffer.
            self.replace_by_snapshot()?;
            return Ok(true);
        }
        self.write()?;
        if self.wants_snapshot() {
            self.begin_snapshot()?;
        }
        Ok(true)
    }

    /// Waits for data and takes the buffer. Returns `false` when it is empty and the log stops; fails after a
    /// failed sync.
    fn take_buffer(&mut self) -> Result<bool, LogFailure> {
        let call_panicked = || panicked(&self.log, "a call panicked");
        let mut inner = self.shared.lock_for_writing().ok_or_else(call_panicked)?;
        loop {
            if let Some(failure) = self.log.damage() {
                return Err(failure);
            }
            if !inner.buffer.is_empty() {
                break;
            }
            if inner.buffer.is_stopping {
                return Ok(false);
            }
            inner = self.shared.to_write.wait(inner).map_err(|_| call_panicked())?;
        }
        mem::swap(&mut inner.buffer.bytes, &mut self.frame);
        self.commit = inner.buffer.commit;
        Ok(true)
    }

    /// Writes the frame. On failure the frame is kept and written again by the repair.
    fn write(&mut self) -> Result<(), LogFailure> {
        self.log.ensure_tail_is_sound()?;
        self.tail.synced = self.log.lock().tail.synced;
        seal_frame(&mut self.frame, self.tail.number, self.tail.offset, self.tail.synced);
        let written = (&*self.tail.file).write_all(&self.frame);
        written.map_err(|error| self.failed_write("written", error))?;
        self.unchecked.add_frame(self.tail.offset);
        self.tail.offset += self.frame.len() as u64;
        self.compaction.log_bytes += self.frame.len() as u64;
        self.log.publish_written(self.commit, self.tail.offset);
        if self.frame.capacity() > KEPT_BUFFER_BYTES {
            self.frame = Buffer::empty();
        }
        self.frame.truncate(FRAME_HEADER_BYTES);
        Ok(())
    }

    fn failed_write(&self, action: &str, error: io::Error) -> LogFailure {
        LogFailure::new(Damage::Write, &self.tail.path, action, error)
    }

    /// Retries the repair until it succeeds. Fails if the log is stopped first, or if the damage cannot be
    /// repaired.
    fn repair(&mut self, failure: LogFailure) -> Result<(), LogFailure> {
        let begun = Instant::now();
        let (mut damage, mut pause) = (failure.damage, REPAIR_PAUSE_MIN);
        report(&self.shared, &self.log, failure);
        loop {
            let is_stopping = self.wait_to_repair(pause)?;
            let tried_at = Instant::now();
            if let Some(failure) = self.log.damage() {
                damage = damage.max(failure.damage);
            }
            let repaired = match damage {
                Damage::Write => self.rewrite_tail(),
                Damage::Sync => self.replace_by_snapshot(),
                Damage::Panic => Err(panicked(&self.log, "a log thread panicked")),
            };
            match repaired {
                Ok(()) if self.log.resume(damage) => {
                    let elapsed_ms = begun.elapsed().as_millis() as u64;
                    info!(elapsed_ms, ?damage, "embedded log repaired; accepting calls again");
                    return Ok(());
                }
                Ok(()) => {}
                Err(failure) if is_stopping || failure.damage == Damage::Panic => {
                    return Err(failure);
                }
                Err(failure) => {
                    debug!(error = %failure.to_error(), "embedded log repair failed; retrying");
                    self.log.fail(failure);
                }
            }
            // Pause at least as long as the attempt took, so that failing repairs do not saturate the disk.
            pause = (pause * 2).min(REPAIR_PAUSE_MAX).max(tried_at.elapsed());
        }
    }

    /// Waits before the next attempt. Returns whether the log is stopping, which makes it the last attempt.
    fn wait_to_repair(&self, pause: Duration) -> Result<bool, LogFailure> {
        let call_panicked = || panicked(&self.log, "a call panicked");
        let until = Instant::now() + pause;
        let mut inner = self.shared.lock_for_writing().ok_or_else(call_panicked)?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if inner.buffer.is_stopping || left.is_zero() {
                return Ok(inner.buffer.is_stopping);
            }
            let waited = self.shared.to_write.wait_timeout(inner, left);
            (inner, _) = waited.map_err(|_| call_panicked())?;
        }
    }

    /// Repairs a failed write: truncates the file after the last complete frame and rewrites the failed frame.
    fn rewrite_tail(&mut self) -> Result<(), LogFailure> {
        // Remove the next file if starting a snapshot has left one. While it exists, an incomplete end of this file
        // would be reported as corruption.
        let next = self.directory.log(self.tail.number + 1);
        match fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(LogFailure::new(Damage::Write, &next, "removed", error));
            }
            Err(_) => {}
            // Sync the removal: if the file reappeared after a power failure, the incomplete end would be reported as
            // corruption.
            Ok(()) => self
                .directory
                .sync()
                .map_err(|error| LogFailure::new(Damage::Write, &next, "removed", error))?,
        }
        let mut file = &*self.tail.file;
        let cut = file.set_len(self.tail.offset);
        let cut = cut.and_then(|()| file.seek(SeekFrom::Start(self.tail.offset)));
        cut.map_err(|error| self.failed_write("truncated to its last complete frame", error))?;
        if self.frame.len() > FRAME_HEADER_BYTES {
            self.write()?;
        }
        self.log.sync(&self.tail, self.commit)
    }

    /// Repairs a failed sync: writes the complete state in memory as a snapshot that replaces all files.
    fn replace_by_snapshot(&mut self) -> Result<(), LogFailure> {
        self.end_snapshot();
        let (commit, state) = {
            let inner = self.shared.lock_for_writing();
            let mut inner = inner.ok_or_else(|| panicked(&self.log, "a call panicked"))?;
            // The state includes what is not written yet.
            inner.buffer.bytes.truncate(FRAME_HEADER_BYTES);
            self.frame.truncate(FRAME_HEADER_BYTES);
            (inner.buffer.commit, inner.state.clone())
        };
        let number = self.tail.number + 1;
        let path = self.directory.snapshot(number);
        let failed = |error| LogFailure::new(Damage::Sync, &path, "written", error);
        let bytes = snapshot::write(&self.directory, number, &state, &AtomicBool::new(false));
        let bytes = bytes.map_err(failed)?.unwrap_or_default();
        // Create the log after the snapshot: the previous file may be incomplete, which counts as corruption once
        // another file follows.
        let file = create_log(&self.directory, number).map_err(|error| {
            LogFailure::new(Damage::Sync, &self.directory.log(number), "created", to_io(error))
        })?;
        self.switch_to(file, number);
        self.commit = commit;
        self.log.publish_written(commit, self.tail.offset);
        self.log.publish_synced(commit, &self.tail, Duration::ZERO);
        self.compaction.log_bytes = 0;
        self.compaction.snapshot_bytes = bytes;
        if let Err(error) = snapshot::remove_before(&self.directory, number) {
            warn!(%error, "could not remove files replaced by a snapshot");
        }
        Ok(())
    }

    fn wants_snapshot(&mut self) -> bool {
        if let Some(snapshot) = self.snapshot.take_if(|snapshot| snapshot.is_finished())
            && let Ok(Some(bytes)) = snapshot.join()
        {
            self.compaction.snapshot_bytes = bytes;
        }
        let Compaction { after_bytes, log_bytes, snapshot_bytes, .. } = self.compaction;
        self.snapshot.is_none() && log_bytes > after_bytes.max(snapshot_bytes)
    }

    /// Switches to a new log file and writes a snapshot of the state at the end of the old one in the
    /// background.
    fn begin_snapshot(&mut self) -> Result<(), LogFailure> {
        let state = {
            let inner = self.shared.lock_for_writing();
            let mut inner = inner.ok_or_else(|| panicked(&self.log, "a call panicked"))?;
            mem::swap(&mut inner.buffer.bytes, &mut self.frame);
            self.commit = inner.buffer.commit;
            inner.state.clone()
        };
        if self.frame.len() > FRAME_HEADER_BYTES {
            self.write()?;
        }
        self.log.sync(&self.tail, self.commit)?;
        // Before another file follows: then an unreadable end would be corruption, and not an incomplete write.
        let (from, end) = (self.unchecked.from(), self.tail.offset);
        let frames = SyncedFrames { kind: FileKind::Log, number: self.tail.number, from, end };
        read_back::check(&self.tail.path, frames, &AtomicBool::new(false))
            .map_err(|error| LogFailure::new(Damage::Sync, &self.tail.path, "read back", error))?;
        let number = self.tail.number + 1;
        let file = create_log(&self.directory, number).map_err(|error| {
            LogFailure::new(Damage::Write, &self.directory.log(number), "created", to_io(error))
        })?;
        self.switch_to(file, number);
        self.compaction.log_bytes = 0;
        let directory = Arc::clone(&self.directory);
        let stop = Arc::clone(&self.stop_snapshot);
        let log = Arc::clone(&self.log);
        let compact = move || {
            let bytes = compact(&directory, number, &state, &stop)?;
            log.compactions.fetch_add(1, Ordering::Relaxed);
            Some(bytes)
        };
        match thread::Builder::new().name("headwater-compact".to_owned()).spawn(compact) {
            Ok(snapshot) => self.snapshot = Some(snapshot),
            Err(error) => {
                error!(%error, "could not start the snapshot thread; the log keeps growing");
            }
        }
        Ok(())
    }

    /// Cancels the snapshot in progress, if any.
    fn end_snapshot(&mut self) {
        if let Some(snapshot) = self.snapshot.take() {
            self.stop_snapshot.store(true, Ordering::Relaxed);
            let _ = snapshot.join();
            self.stop_snapshot.store(false, Ordering::Relaxed);
        }
    }

    fn switch_to(&mut self, file: File, number: u64) {
        let offset = FILE_HEADER_BYTES as u64;
        let path = Arc::new(self.directory.log(number));
        self.tail = LogTail { file: Arc::new(file), path, number, offset, synced: offset };
        self.log.lock().tail = self.tail.clone();
        self.unchecked = UncheckedTail::new(offset);
        self.compaction.is_due = false;
    }

    /// Syncs everything and marks it with a final empty frame, so that recovery does not mistake damage for an
    /// incomplete write.
    fn finish(&mut self) -> Result<(), LogFailure> {
        if self.compaction.is_due {
            self.replace_by_snapshot()?;
        }
        self.commit = self.shared.lock_ignoring_poison().buffer.commit;
        self.log.sync(&self.tail, self.commit)?;
        self.write()?;
        self.log.sync(&self.tail, self.commit)
    }
}

fn compact(
    directory: &Directory,
    number: u64,
    state: &EmbeddedState,
    stop: &AtomicBool,
) -> Option<u64> {
    let written = snapshot::write(directory, number, state, stop);
    let replaced = written.and_then(|bytes| match bytes {
        Some(_) => snapshot::remove_before(directory, number).map(|()| bytes),
        None => Ok(None),
    });
    match replaced {
        Ok(bytes) => {
            info!(number, bytes, "wrote a snapshot of the embedded state");
            bytes
        }
        Err(error) => {
            // Nothing is lost: the log still contains everything and the next snapshot covers it.
            error!(%error, number, "could not write a snapshot; the log keeps growing");
            None
        }
    }
}

fn to_io(error: StreamError) -> io::Error {
    match error {
        StreamError::Unavailable { source: Some(source), .. } => {
            match source.downcast::<io::Error>() {
                Ok(error) => *error,
                Err(other) => io::Error::other(other),
            }
        }
        other => io::Error::other(other),
    }
}
