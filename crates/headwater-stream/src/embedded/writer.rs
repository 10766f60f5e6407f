//! The threads of the log: one writes, one syncs, and now and then one compacts.
//!
//! Upstream: calls fill the buffer in `engine`. Downstream: the files.
//! Promises: what is written keeps the order of the commits; the file before is synced before a new one begins. Writing
//! goes on while a sync is under way, so the next sync finds all that came meanwhile.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;
use std::{mem, panic};

use tracing::{error, info};

use super::directory::Directory;
use super::engine::{Buffer, Shared};
use super::log::{Failure, Log, Tail};
use super::recovery::create_log;
use super::segment::{FILE_HEADER_BYTES, FRAME_HEADER_BYTES, seal_frame};
use super::snapshot;
use super::state::State;
use crate::error::StreamError;

/// A buffer that grew beyond this is given back instead of being kept for the next time.
const KEPT_BUFFER_BYTES: usize = 4 * 1024 * 1024;

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
    shared: &Arc<Shared>,
    log: &Arc<Log>,
    directory: Directory,
    compaction: Compaction,
) -> io::Result<Vec<JoinHandle<()>>> {
    let tail = log.lock().tail.clone();
    let mut writer = Writer {
        shared: Arc::clone(shared),
        log: Arc::clone(log),
        directory: Arc::new(directory),
        tail,
        compaction,
        snapshot: None,
        stop_snapshot: Arc::default(),
    };
    let path = Arc::clone(&writer.tail.path);
    let (syncing, sync_path) = (Arc::clone(shared), Arc::clone(&path));
    let sync_log = Arc::clone(log);
    let syncer = thread::Builder::new().name("headwater-sync".to_owned()).spawn(move || {
        guarded(&syncing, &sync_log, &sync_path, || sync_until_stopped(&sync_log));
    })?;
    let (writing, write_log) = (Arc::clone(shared), Arc::clone(log));
    let writer = thread::Builder::new().name("headwater-log".to_owned()).spawn(move || {
        guarded(&writing, &write_log, &path, || writer.run());
    })?;
    Ok(vec![writer, syncer])
}

/// A thread that fails or panics would leave callers waiting; they get an error instead.
fn guarded(shared: &Shared, log: &Log, path: &Path, run: impl FnOnce() -> Result<(), Failure>) {
    let outcome = panic::catch_unwind(panic::AssertUnwindSafe(run));
    let failure = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(path, "written", io::Error::other("a thread panicked")),
    };
    log.fail(failure);
    shared.lock_anyway().watchers.wake_all();
}

fn sync_until_stopped(log: &Log) -> Result<(), Failure> {
    while let Some((tail, commit)) = log.next_sync() {
        let begun = Instant::now();
        let synced = tail.file.sync_data();
        synced.map_err(|error| Failure::new(&tail.path, "synced", error))?;
        log.publish_synced(commit, &tail, begun.elapsed());
    }
    Ok(())
}

struct Writer {
    shared: Arc<Shared>,
    log: Arc<Log>,
    directory: Arc<Directory>,
    tail: Tail,
    compaction: Compaction,
    /// The snapshot that is being written.
    snapshot: Option<JoinHandle<Option<u64>>>,
    stop_snapshot: Arc<AtomicBool>,
}

impl Writer {
    fn run(&mut self) -> Result<(), Failure> {
        let mut spare = Buffer::empty();
        let ended = loop {
            match self.step(&mut spare) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(failure) => break Err(failure),
            }
        };
        self.stop_snapshot.store(true, Ordering::Relaxed);
        if let Some(snapshot) = self.snapshot.take() {
            let _ = snapshot.join();
        }
        ended?;
        self.finish()
    }

    /// Writes what is in the buffer, once there is something. Returns `false` when the log stops.
    fn step(&mut self, spare: &mut Vec<u8>) -> Result<bool, Failure> {
        let Some(commit) = self.take_buffer(spare)? else { return Ok(false) };
        self.write(spare, commit)?;
        recycle(spare);
        if self.wants_snapshot() {
            self.begin_snapshot(spare)?;
        }
        Ok(true)
    }

    /// Waits for the buffer to fill and takes it. `None` when it is empty and the log stops, or when a sync failed.
    fn take_buffer(&self, spare: &mut Vec<u8>) -> Result<Option<u64>, Failure> {
        let mut inner = self.shared.lock_for_writing().ok_or_else(|| self.panicked())?;
        while inner.buffer.is_empty() {
            if inner.buffer.is_stopping {
                return Ok(None);
            }
            inner = self.shared.to_write.wait(inner).map_err(|_| self.panicked())?;
        }
        mem::swap(&mut inner.buffer.bytes, spare);
        Ok(Some(inner.buffer.commit))
    }

    fn panicked(&self) -> Failure {
        Failure::new(&self.tail.path, "written", io::Error::other("a call panicked"))
    }

    fn write(&mut self, frame: &mut [u8], commit: u64) -> Result<(), Failure> {
        // After a failed sync the disk may have dropped what came before; nothing may follow it.
        if self.log.has_failed() {
            return Err(Failure::new(
                &self.tail.path,
                "written",
                io::Error::other("a sync failed"),
            ));
        }
        self.tail.synced = self.log.lock().tail.synced;
        seal_frame(frame, self.tail.number, self.tail.offset, self.tail.synced);
        let written = (&*self.tail.file).write_all(frame);
        written.map_err(|error| Failure::new(&self.tail.path, "written", error))?;
        self.tail.offset += frame.len() as u64;
        self.compaction.log_bytes += frame.len() as u64;
        self.log.publish_written(commit, self.tail.offset);
        Ok(())
    }

    fn sync(&self, commit: u64) -> Result<(), Failure> {
        let begun = Instant::now();
        let synced = self.tail.file.sync_data();
        synced.map_err(|error| Failure::new(&self.tail.path, "synced", error))?;
        self.log.publish_synced(commit, &self.tail, begun.elapsed());
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
    fn begin_snapshot(&mut self, spare: &mut Vec<u8>) -> Result<(), Failure> {
        let (commit, state) = {
            let mut inner = self.shared.lock_for_writing().ok_or_else(|| self.panicked())?;
            mem::swap(&mut inner.buffer.bytes, spare);
            (inner.buffer.commit, inner.state.clone())
        };
        if spare.len() > FRAME_HEADER_BYTES {
            self.write(spare, commit)?;
        }
        recycle(spare);
        self.sync(commit)?;
        let number = self.tail.number + 1;
        let file = create_log(&self.directory, number)
            .map_err(|error| Failure::new(&self.directory.log(number), "created", to_io(error)))?;
        self.go_on_in(file, number);
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

    fn go_on_in(&mut self, file: File, number: u64) {
        let offset = FILE_HEADER_BYTES as u64;
        let path = Arc::new(self.directory.log(number));
        self.tail = Tail { file: Arc::new(file), path, number, offset, synced: offset };
        self.log.lock().tail = self.tail.clone();
    }

    /// Syncs everything and says so in a last, empty frame: from now on nothing at the end can pass as unfinished.
    fn finish(&mut self) -> Result<(), Failure> {
        let commit = self.shared.lock_anyway().buffer.commit;
        if self.log.has_failed() {
            return Ok(());
        }
        self.sync(commit)?;
        let mut last = Buffer::empty();
        self.write(&mut last, commit)?;
        self.sync(commit)?;
        self.log.stop();
        Ok(())
    }
}

fn compact(directory: &Directory, number: u64, state: &State, stop: &AtomicBool) -> Option<u64> {
    match snapshot::write(directory, number, state, stop) {
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

fn recycle(spare: &mut Vec<u8>) {
    if spare.capacity() > KEPT_BUFFER_BYTES {
        *spare = Buffer::empty();
    }
    spare.truncate(FRAME_HEADER_BYTES);
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
