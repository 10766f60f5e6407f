//! The spool file: appended at the end, read from the front, truncated when empty.
//!
//! Upstream: `spool`, from a thread that may block. Downstream: the disk.
//! Guarantees: appended events survive a crash of the process or machine; a torn write at the end is truncated when the
//! file is opened; corruption before the end is an error and changes nothing; one process at a time has the file
//! open. A disk error fails the current write, and the file is repaired before the next one.

use std::collections::{HashSet, VecDeque};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tracing::warn;

use super::fault_injection::{Operation, SpoolFaults};
use super::record::{self, Record, ScanResult, SpooledEvent};
use crate::error::SpoolError;

/// Approximate bytes of rejected events that are read at once.
const REJECTED_BYTES: u64 = 16 * 1024 * 1024;

pub(super) struct SpoolFile {
    path: PathBuf,
    pub(super) file: File,
    owner: String,
    max_bytes: u64,
    /// Offset of the first record.
    first: u64,
    /// Offset of the oldest event.
    front: u64,
    /// Offset of the next record.
    end: u64,
    /// Events from the start of the file that are acknowledged, as in the last marker.
    done: u64,
    /// End offsets of the remaining events, oldest first.
    pending: VecDeque<u64>,
    /// A disk error that must be repaired before the next write.
    unrepaired: Option<SpoolError>,
    pub(super) faults: SpoolFaults,
}

impl SpoolFile {
    /// Opens or creates the file of `owner`.
    pub(super) fn open(path: &Path, owner: &str, max_bytes: u64) -> Result<Self, SpoolError> {
        let disk_error_here = |error: io::Error| disk_error(path, &error);
        if let Some(directory) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(directory).map_err(disk_error_here)?;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(disk_error_here)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(SpoolError::InUse { file: path.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(disk_error_here(error)),
        }
        let mut spool = Self {
            path: path.to_owned(),
            file,
            owner: owner.to_owned(),
            max_bytes,
            first: 0,
            front: 0,
            end: 0,
            done: 0,
            pending: VecDeque::new(),
            unrepaired: None,
            faults: SpoolFaults::default(),
        };
        spool.recover()?;
        Ok(spool)
    }

    fn recover(&mut self) -> Result<(), SpoolError> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes).map_err(|error| disk_error(&self.path, &error))?;
        let head = record::head(&self.owner);
        // The header was torn when the file was created.
        if bytes.len() < head.len() && (bytes.is_empty() || head.starts_with(&bytes)) {
            self.reset()?;
            return sync_directory(&self.path).map_err(|error| self.record_failure(&error));
        }
        let Some((owner, first)) = record::read_head(&bytes) else {
            return Err(self.corrupt(0, "not a spool header"));
        };
        if owner != self.owner {
            let (file, bus) = (self.path.clone(), self.owner.clone());
            return Err(SpoolError::WrongOwner { file, owner, bus });
        }
        let mut ends = Vec::new();
        let mut at = first;
        loop {
            match Record::read_at(&bytes, at) {
                ScanResult::Record { record, next } => {
                    at = next;
                    match record {
                        Record::Event(_) => ends.push(next as u64),
                        Record::Replayed(count) => self.done = count,
                    }
                }
                ScanResult::End => break,
                ScanResult::Torn => {
                    let cut = bytes.len() - at;
                    warn!(file = %self.path.display(), bytes = cut, "truncated a torn write at the end of the spool");
                    self.file.set_len(at as u64).map_err(|error| disk_error(&self.path, &error))?;
                    break;
                }
                ScanResult::Damaged(problem) => return Err(self.corrupt(at, &problem)),
            }
        }
        let Some(pending) = ends.len().checked_sub(self.done as usize) else {
            return Err(self.corrupt(at, "a marker counts more events than the file has"));
        };
        self.first = first as u64;
        self.end = at as u64;
        self.front = match self.done {
            0 => self.first,
            done => ends[done as usize - 1],
        };
        self.pending = ends.split_off(ends.len() - pending).into();
        Ok(())
    }

    /// Number of events.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.end
    }

    /// Appends events, all or none. They are on disk when it returns.
    pub(super) fn append(&mut self, events: &[SpooledEvent]) -> Result<(), SpoolError> {
        self.repair()?;
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(events.len());
        for event in events {
            bytes.extend(Record::Event(event.clone()).encode());
            ends.push(bytes.len() as u64);
        }
        let fits = |spool: &Self| spool.end + bytes.len() as u64 <= spool.max_bytes;
        if !fits(self) && self.front > self.first {
            self.rewrite()?;
        }
        if !fits(self) {
            let (file, bytes, limit) = (self.path.clone(), self.end, self.max_bytes);
            return Err(SpoolError::Full { file, bytes, limit });
        }
        let begin = self.end;
        self.write(&bytes)?;
        self.pending.extend(ends.into_iter().map(|end| begin + end));
        Ok(())
    }

    /// The oldest events, up to `count` and about `max_bytes`.
    pub(super) fn peek(
        &mut self,
        count: usize,
        max_bytes: u64,
    ) -> Result<Vec<SpooledEvent>, SpoolError> {
        let mut end = self.front;
        for next in self.pending.iter().take(count) {
            if *next - self.front > max_bytes && end > self.front {
                break;
            }
            end = *next;
        }
        let mut bytes = vec![0; (end - self.front) as usize];
        let mut read = || {
            self.file.seek(SeekFrom::Start(self.front))?;
            self.file.read_exact(&mut bytes)
        };
        read().map_err(|error| disk_error(&self.path, &error))?;
        let (mut events, mut at) = (Vec::new(), 0);
        loop {
            match Record::read_at(&bytes, at) {
                ScanResult::End => return Ok(events),
                ScanResult::Record { record, next } => {
                    at = next;
                    if let Record::Event(event) = record {
                        events.push(event);
                    }
                }
                ScanResult::Torn => return Err(self.corrupt_at(at, "truncated record")),
                ScanResult::Damaged(problem) => return Err(self.corrupt_at(at, &problem)),
            }
        }
    }

    /// Removes the oldest `count` events, which are in their streams. If the marker cannot be written, the next one
    /// includes it; after a crash in between, the events are sent again and deduplicated by id.
    pub(super) fn acknowledge(&mut self, count: usize) {
        let count = count.min(self.pending.len());
        self.done += count as u64;
        if let Some(front) = self.pending.drain(..count).next_back() {
            self.front = front;
        }
        let noted = match self.pending.is_empty() {
            true => self.reset(),
            false => self.repair().and_then(|()| self.write_marker()),
        };
        if let Err(error) = noted {
            warn!(%error, "spool could not record that events were moved to their streams");
        }
    }

    /// Writes the number of acknowledged events. If there is no space, rewrites the file without them.
    fn write_marker(&mut self) -> Result<(), SpoolError> {
        let mark = Record::Replayed(self.done).encode();
        if self.end + mark.len() as u64 > self.max_bytes {
            return self.rewrite();
        }
        self.write(&mark)
    }

    /// Truncates the file to its header.
    fn reset(&mut self) -> Result<(), SpoolError> {
        let head = record::head(&self.owner);
        let mut begin = || {
            self.faults.check(Operation::SetLength)?;
            self.file.set_len(0)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.faults.check(Operation::Write)?;
            self.file.write_all(&head)?;
            self.file.sync_all()
        };
        begin().map_err(|error| self.record_failure(&error))?;
        self.first = head.len() as u64;
        (self.front, self.end, self.done) = (self.first, self.first, 0);
        self.pending.clear();
        self.unrepaired = None;
        Ok(())
    }

    /// Rewrites the file without acknowledged events, to free space. A crash leaves the old file or the new one.
    fn rewrite(&mut self) -> Result<(), SpoolError> {
        let events = self.peek(usize::MAX, u64::MAX)?;
        let mut bytes = record::head(&self.owner);
        let first = bytes.len() as u64;
        let mut ends = Vec::with_capacity(events.len());
        for event in events {
            bytes.extend(Record::Event(event).encode());
            ends.push(bytes.len() as u64);
        }
        let unfinished = unfinished_path(&self.path);
        let replace = || {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&unfinished)?;
            // Locked before it is renamed, and not truncated if another process has it.
            file.try_lock().map_err(io::Error::other)?;
            file.set_len(0)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&unfinished, &self.path)?;
            Ok(file)
        };
        let file = replace().map_err(|error: io::Error| disk_error(&self.path, &error))?;
        // The new file has the name now: the old one must not be written to again.
        self.file = file;
        (self.first, self.front, self.end, self.done) = (first, first, bytes.len() as u64, 0);
        self.pending = ends.into();
        self.sync_name().map_err(|error| self.record_failure(&error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), SpoolError> {
        let mut write = || {
            self.file.seek(SeekFrom::Start(self.end))?;
            self.faults.check(Operation::Write)?;
            self.file.write_all(bytes)?;
            self.file.sync_data()
        };
        match write() {
            Ok(()) => {
                self.end += bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                // A partial record must not precede the next one.
                let problem = disk_error(&self.path, &error);
                self.truncate_to_end().map_err(|error| self.record_failure(&error))?;
                Err(problem)
            }
        }
    }

    /// Truncates after the last complete record.
    fn truncate_to_end(&mut self) -> io::Result<()> {
        self.faults.check(Operation::SetLength)?;
        self.file.set_len(self.end)?;
        self.file.sync_all()
    }

    fn sync_name(&mut self) -> io::Result<()> {
        self.faults.check(Operation::SyncDirectory)?;
        sync_directory(&self.path)
    }

    /// Repairs the file after a disk error.
    fn repair(&mut self) -> Result<(), SpoolError> {
        if self.unrepaired.is_none() {
            return Ok(());
        }
        if self.pending.is_empty() {
            self.reset()?;
        }
        self.truncate_to_end()
            .and_then(|()| self.sync_name())
            .map_err(|error| self.record_failure(&error))?;
        self.unrepaired = None;
        Ok(())
    }

    fn record_failure(&mut self, error: &io::Error) -> SpoolError {
        let problem = disk_error(&self.path, error);
        self.unrepaired = Some(problem.clone());
        problem
    }

    fn corrupt(&self, at: usize, problem: &str) -> SpoolError {
        let (offset, problem) = (at as u64, problem.to_owned());
        SpoolError::Corrupt { file: self.path.clone(), offset, problem }
    }

    fn corrupt_at(&self, at: usize, problem: &str) -> SpoolError {
        self.corrupt(self.front as usize + at, problem)
    }
}

impl Drop for SpoolFile {
    fn drop(&mut self) {
        // Closing alone is not enough: a child process being spawned holds the lock until it executes its program.
        let _ = self.file.unlock();
    }
}

/// Path of the replacement file. The suffix is appended, because spools may differ only in their extension.
fn unfinished_path(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(".new");
    path.into()
}

/// Adds events to the file of rejected events, unless they are there: a crash may have prevented their removal from the
/// spool. Returns the number of rejected events.
pub(super) fn reject(
    path: &Path,
    owner: &str,
    max_bytes: u64,
    events: &[SpooledEvent],
) -> Result<u64, SpoolError> {
    let mut file = SpoolFile::open(path, owner, max_bytes)?;
    let known = file.peek(usize::MAX, u64::MAX)?;
    let known: HashSet<_> = known.iter().map(|event| (&event.stream, &event.event_id)).collect();
    let is_new = |event: &&SpooledEvent| !known.contains(&(&event.stream, &event.event_id));
    let new: Vec<SpooledEvent> = events.iter().filter(is_new).cloned().collect();
    file.append(&new)?;
    Ok(file.pending() as u64)
}

/// The number of rejected events, and the oldest up to `count`.
pub(super) fn rejected(
    path: &Path,
    owner: &str,
    count: usize,
) -> Result<(u64, Vec<SpooledEvent>), SpoolError> {
    if !path.try_exists().map_err(|error| disk_error(path, &error))? {
        return Ok((0, Vec::new()));
    }
    let mut file = SpoolFile::open(path, owner, u64::MAX)?;
    let events = if count == 0 { Vec::new() } else { file.peek(count, REJECTED_BYTES)? };
    Ok((file.pending() as u64, events))
}

/// Syncs the directory, so that the file name survives a crash.
fn sync_directory(path: &Path) -> io::Result<()> {
    match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(directory) => File::open(directory)?.sync_all(),
        None => File::open(".")?.sync_all(),
    }
}

fn disk_error(path: &Path, error: &io::Error) -> SpoolError {
    SpoolError::Disk { file: path.to_owned(), problem: error.to_string() }
}
