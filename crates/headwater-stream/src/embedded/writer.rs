//! The threads of the log: one writes, one syncs, and now and then one compacts.
//!
//! Upstream: calls fill the buffer in `engine`. Downstream: the files.
//! Promises: what is written keeps the order of the commits; the file before is synced before a new one begins. Writing
//! goes on while a sync is under way, so the next sync finds all that came meanwhile. After a failed write or sync (a full
//! disk) the writer repairs the log as soon as the disk lets it, and nothing that an answer has shown is lost.

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
use super::recovery::create_log;
use super::segment::{FILE_HEADER_BYTES, FRAME_HEADER_BYTES, seal_frame};
use super::snapshot;
use super::state::EmbeddedState;
use crate::error::StreamError;

/// A buffer that grew beyond this is given back instead of being kept for the next time.
const KEPT_BUFFER_BYTES: usize = 4 * 1024 * 1024;

/// How long a repair of the log is put off, first and at most.
const REPAIR_PAUSE_MIN: Duration = Duration::from_millis(100);
const REPAIR_PAUSE_MAX: Duration = Duration::from_secs(2);

/// When the log is worth a snapshot.
#[derive(Debug)]
pub(super) struct Compaction {
    /// Bytes of log before the first snapshot, and between small ones.
    pub(super) after_bytes: u64,
    /// Bytes of log since the last snapshot.
    pub(super) log_bytes: u64,
    /// The size of the last snapshot: the log may grow as long again.
    pub(super) snapshot_bytes: u64,
}

/// Starts the threads of the log.
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

/// A thread that fails or panics would leave callers waiting; they get an error instead.
fn guarded(shared: &EngineShared, log: &CommitLog, run: impl FnOnce() -> Result<(), LogFailure>) {
    let failure = match panic::catch_unwind(panic::AssertUnwindSafe(run)) {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => panicked(log, "a thread of the log panicked"),
    };
    report(shared, log, failure);
}

fn panicked(log: &CommitLog, problem: &'static str) -> LogFailure {
    let path = Arc::clone(&log.lock().tail.path);
    LogFailure::new(Damage::Panic, &path, "written", io::Error::other(problem))
}

/// Fails all calls, also those that wait for something to happen, and has the writer repair the log.
fn report(shared: &EngineShared, log: &CommitLog, failure: LogFailure) {
    log.fail(failure);
    shared.lock_ignoring_poison().name_waiters.wake_all();
    shared.to_write.notify_all();
}

fn sync_until_stopped(shared: &EngineShared, log: &CommitLog) -> Result<(), LogFailure> {
    while let Some((tail, commit)) = log.next_sync() {
        if log.sync(&tail, commit).is_err() {
            // The log knows; those who wait for other things do not yet.
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
    /// What was taken from the buffer and is not written yet, behind room for the header of a frame.
    frame: Vec<u8>,
    /// The newest commit in `frame`.
    commit: u64,
    compaction: Compaction,
    /// The snapshot that is being written.
    snapshot: Option<JoinHandle<Option<u64>>>,
    stop_snapshot: Arc<AtomicBool>,
}

impl LogWriter {
    fn new(
        shared: &Arc<EngineShared>,
        log: &Arc<CommitLog>,
        directory: Directory,
        compaction: Compaction,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            log: Arc::clone(log),
            directory: Arc::new(directory),
            tail: log.lock().tail.clone(),
            frame: Buffer::empty(),
            commit: 0,
            compaction,
            snapshot: None,
            stop_snapshot: Arc::default(),
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

    /// Writes what is in the buffer, once there is something. Returns `false` when the log stops.
    fn step(&mut self) -> Result<bool, LogFailure> {
        if !self.take_buffer()? {
            return Ok(false);
        }
        self.write()?;
        if self.wants_snapshot() {
            self.begin_snapshot()?;
        }
        Ok(true)
    }

    /// Waits for the buffer to fill and takes it. Returns `false` when it is empty and the log stops; fails when a sync
    /// has failed.
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

    /// Writes the frame. If that fails, the frame stays to be written again.
    fn write(&mut self) -> Result<(), LogFailure> {
        self.log.ensure_tail_is_sound()?;
        self.tail.synced = self.log.lock().tail.synced;
        seal_frame(&mut self.frame, self.tail.number, self.tail.offset, self.tail.synced);
        let written = (&*self.tail.file).write_all(&self.frame);
        written.map_err(|error| self.failed_write("written", error))?;
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

    /// Repairs the log, however long the disk does not let us. Fails if the log is to stop first, and for damage that no
    /// repair helps.
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
                Damage::Panic => Err(panicked(&self.log, "a thread of the log panicked")),
            };
            match repaired {
                Ok(()) if self.log.resume(damage) => {
                    let elapsed_ms = begun.elapsed().as_millis() as u64;
                    info!(
                        elapsed_ms,
                        ?damage,
                        "embedded log was repaired, calls are accepted again"
                    );
                    return Ok(());
                }
                Ok(()) => {}
                Err(failure) if is_stopping || failure.damage == Damage::Panic => {
                    return Err(failure);
                }
                Err(failure) => {
                    debug!(error = %failure.to_error(), "embedded log was not repaired yet");
                    self.log.fail(failure);
                }
            }
            // Not longer than what a repair takes: one that writes much and fails shall not keep the disk busy.
            pause = (pause * 2).min(REPAIR_PAUSE_MAX).max(tried_at.elapsed());
        }
    }

    /// Waits before the next try. Returns whether the log is to stop, so that it is the last.
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

    /// Repairs a failed write: cuts off what lies behind the last whole frame, and writes the frame that failed again.
    fn rewrite_tail(&mut self) -> Result<(), LogFailure> {
        // A file that a snapshot could not begin with. While it is there, a torn end of this one would pass as damage.
        let next = self.directory.log(self.tail.number + 1);
        match fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(LogFailure::new(Damage::Write, &next, "removed", error));
            }
            Err(_) => {}
            // Back after a power cut, it would make the torn end of this file pass as damage all the same.
            Ok(()) => self
                .directory
                .sync()
                .map_err(|error| LogFailure::new(Damage::Write, &next, "removed", error))?,
        }
        let mut file = &*self.tail.file;
        let cut = file.set_len(self.tail.offset);
        let cut = cut.and_then(|()| file.seek(SeekFrom::Start(self.tail.offset)));
        cut.map_err(|error| self.failed_write("cut to its last whole frame", error))?;
        if self.frame.len() > FRAME_HEADER_BYTES {
            self.write()?;
        }
        self.log.sync(&self.tail, self.commit)
    }

    /// Repairs a failed sync: the state in memory, which holds every effect there was, takes the place of all files.
    fn replace_by_snapshot(&mut self) -> Result<(), LogFailure> {
        self.end_snapshot();
        let (commit, state) = {
            let inner = self.shared.lock_for_writing();
            let mut inner = inner.ok_or_else(|| panicked(&self.log, "a call panicked"))?;
            // What is not written yet is part of the state, too.
            inner.buffer.bytes.truncate(FRAME_HEADER_BYTES);
            self.frame.truncate(FRAME_HEADER_BYTES);
            (inner.buffer.commit, inner.state.clone())
        };
        let number = self.tail.number + 1;
        let path = self.directory.snapshot(number);
        let failed = |error| LogFailure::new(Damage::Sync, &path, "written", error);
        let bytes = snapshot::write(&self.directory, number, &state, &AtomicBool::new(false));
        let bytes = bytes.map_err(failed)?.unwrap_or_default();
        // After the snapshot: the file before may be torn, and would pass as damaged if another one followed it.
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
            warn!(%error, "files that a snapshot replaced could not be removed");
        }
        Ok(())
    }

    fn wants_snapshot(&mut self) -> bool {
        if let Some(snapshot) = self.snapshot.take_if(|snapshot| snapshot.is_finished())
            && let Ok(Some(bytes)) = snapshot.join()
        {
            self.compaction.snapshot_bytes = bytes;
        }
        let Compaction { after_bytes, log_bytes, snapshot_bytes } = self.compaction;
        self.snapshot.is_none() && log_bytes > after_bytes.max(snapshot_bytes)
    }

    /// Goes on in a new file, and has the state as it was at the end of the old one written beside it.
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
            Err(error) => error!(%error, "no thread for a snapshot, the log keeps growing"),
        }
        Ok(())
    }

    /// Ends the snapshot that is being written, if there is one.
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
    }

    /// Syncs everything and says so in a last, empty frame: from now on nothing at the end can pass as unfinished.
    fn finish(&mut self) -> Result<(), LogFailure> {
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
            info!(number, bytes, "snapshot of the embedded state was written");
            bytes
        }
        Err(error) => {
            // Nothing is lost: the log still holds everything, and the next snapshot takes all of it.
            error!(%error, number, "snapshot could not be written, the log keeps growing");
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
