//! Recovery: reads the newest snapshot, then the log after it.
//!
//! Guarantees: everything acknowledged is restored. An incomplete write at the end of the last log file is
//! truncated. Any other unreadable data is an error that names the file and the offset, and nothing is
//! changed.
//! Upstream: `open`. Downstream: `segment` reads the files, `state` applies the records.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use tracing::{info, warn};

use super::codec::RecordError;
use super::directory::{Directory, DirectoryListing, unavailable};
use super::log::is_full;
use super::redo_record::RedoRecord;
use super::segment::{FILE_HEADER_BYTES, FileKind, FrameError, FrameReader, file_header};
use super::state::EmbeddedState;
use crate::error::{Result, StreamError};

const COPY_BYTES: usize = 1024 * 1024;

/// The recovered state and the open log file.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) state: EmbeddedState,
    /// The last log file, positioned at its end.
    pub(super) file: File,
    pub(super) number: u64,
    /// The length of the last log file.
    pub(super) offset: u64,
    /// Bytes of log since the last snapshot.
    pub(super) log_bytes: u64,
    /// The size of the last snapshot.
    pub(super) snapshot_bytes: u64,
    /// Bytes of an incomplete write that were truncated.
    pub(super) cut_bytes: u64,
}

pub(super) fn recover(directory: &Directory) -> Result<Recovered> {
    let listing = directory.list()?;
    let mut state = EmbeddedState::default();
    let mut snapshot_bytes = 0;
    let start = match listing.snapshots.last() {
        Some(number) => {
            snapshot_bytes = read_snapshot(directory, *number, &mut state)?;
            *number
        }
        None => 1,
    };
    let logs = logs_from(directory, &listing, start)?;
    let mut log_bytes = 0;
    let mut tail = None;
    for number in &logs {
        let is_last = Some(number) == logs.last();
        let read = read_log(&directory.log(*number), *number, is_last, &mut state)?;
        log_bytes += read.end;
        tail = Some((*number, read));
    }
    // Everything was readable; only now change files. Open the tail first: obsolete files are removed when
    // nothing needs them.
    let recovered = open_tail(directory, state, start, tail, log_bytes, snapshot_bytes)?;
    remove_obsolete_files(&listing, directory, start);
    Ok(recovered)
}

/// Opens the last log file at its end, or creates it.
fn open_tail(
    directory: &Directory,
    state: EmbeddedState,
    start: u64,
    tail: Option<(u64, LogRead)>,
    log_bytes: u64,
    snapshot_bytes: u64,
) -> Result<Recovered> {
    let last = tail.as_ref().map_or(start, |(number, _)| *number);
    let (number, read) = match tail {
        Some((number, read)) if !read.is_incomplete => (number, read),
        _ => {
            let file = create_log(directory, last)?;
            let offset = FILE_HEADER_BYTES as u64;
            let cut_bytes = 0;
            return Ok(Recovered {
                state,
                file,
                number: last,
                offset,
                log_bytes,
                snapshot_bytes,
                cut_bytes,
            });
        }
    };
    let path = directory.log(number);
    let (file, is_sound) = open_at(directory, number, &read)?;
    if read.cut > 0 {
        let file = path.display();
        warn!(%file, offset = read.end, bytes = read.cut, "truncated an incomplete write at the end of the log");
    }
    info!(log_bytes, snapshot_bytes, "embedded log replayed");
    let (offset, cut_bytes) = (read.end, read.cut);
    // Force a snapshot with the next write.
    let log_bytes = if is_sound { log_bytes } else { u64::MAX / 2 };
    Ok(Recovered { state, file, number, offset, log_bytes, snapshot_bytes, cut_bytes })
}

/// Creates and syncs the log file of this number, positioned after its header.
pub(super) fn create_log(directory: &Directory, number: u64) -> Result<File> {
    let path = directory.log(number);
    let failed = |error| unavailable(&path, "could not be created", error);
    let mut file =
        OpenOptions::new().create(true).truncate(true).write(true).open(&path).map_err(failed)?;
    file.write_all(&file_header(FileKind::Log, number)).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    directory.sync().map_err(failed)?;
    Ok(file)
}

/// The log files to replay: from `start` on, without a gap.
fn logs_from(directory: &Directory, listing: &DirectoryListing, start: u64) -> Result<Vec<u64>> {
    let logs: Vec<u64> = listing.logs.iter().copied().filter(|number| *number >= start).collect();
    let missing = (start..).zip(&logs).find(|(expected, found)| expected != *found);
    let is_new = listing.snapshots.is_empty() && listing.logs.is_empty();
    // A repair writes the snapshot first, then creates the log after it, and removes the previous log last.
    let is_between = listing.logs.last().is_some_and(|last| last + 1 == start);
    let none_at_all = logs.is_empty() && !is_new && !is_between;
    let missing = missing.map(|(expected, _)| expected).or(none_at_all.then_some(start));
    match missing {
        None => Ok(logs),
        Some(number) => Err(StreamError::Corrupt {
            file: directory.log(number).display().to_string(),
            offset: 0,
            problem: "the file is missing, but files before or after it exist".to_owned(),
        }),
    }
}

/// Result of reading one log file.
struct LogRead {
    end: u64,
    /// The offset up to which it is known to be synced.
    synced: u64,
    cut: u64,
    /// The process died while creating the file.
    is_incomplete: bool,
}

fn read_log(path: &Path, number: u64, is_last: bool, state: &mut EmbeddedState) -> Result<LogRead> {
    let mut reader = match FrameReader::open(path, FileKind::Log, number) {
        Err(FrameError::Incomplete) if is_last => {
            return Ok(LogRead { end: 0, synced: 0, cut: 0, is_incomplete: true });
        }
        opened => opened.map_err(|problem| unreadable(path, problem))?,
    };
    let mut payload = Vec::new();
    loop {
        let offset = reader.offset();
        match reader.next(&mut payload) {
            Ok(true) => {
                apply_all(&payload, state).map_err(|problem| corrupt(path, offset, problem))?;
            }
            Ok(false) => {
                let synced = reader.synced();
                return Ok(LogRead { end: offset, synced, cut: 0, is_incomplete: false });
            }
            Err(FrameError::Damaged { offset, problem }) if is_last => {
                let (cut, synced) = (reader.length() - offset, reader.synced());
                let evidence = reader
                    .synced_evidence()
                    .map_err(|error| unavailable(path, "could not be read", error))?;
                if let Some(evidence) = evidence {
                    let problem =
                        format!("{problem}, but the frame at byte {evidence} declares it synced");
                    return Err(corrupt(path, offset, &problem));
                }
                return Ok(LogRead { end: offset, synced, cut, is_incomplete: false });
            }
            Err(problem) => return Err(unreadable(path, problem)),
        }
    }
}

fn read_snapshot(directory: &Directory, number: u64, state: &mut EmbeddedState) -> Result<u64> {
    let path = directory.snapshot(number);
    let unreadable = |problem| unreadable(&path, problem);
    let mut reader = FrameReader::open(&path, FileKind::Snapshot, number).map_err(unreadable)?;
    let mut payload = Vec::new();
    let mut is_whole = false;
    loop {
        let offset = reader.offset();
        if !reader.next(&mut payload).map_err(unreadable)? {
            break;
        }
        // The last frame is empty and marks the snapshot as complete.
        if is_whole {
            return Err(corrupt(&path, offset, "data after the final frame"));
        }
        is_whole = payload.is_empty();
        apply_all(&payload, state).map_err(|problem| corrupt(&path, offset, problem))?;
    }
    if is_whole {
        return Ok(reader.length());
    }
    Err(corrupt(&path, reader.length(), "the final frame is missing"))
}

fn apply_all(mut payload: &[u8], state: &mut EmbeddedState) -> Result<(), RecordError> {
    while let Some(record) = RedoRecord::decode(&mut payload)? {
        state.apply(&record)?;
    }
    Ok(())
}

/// Opens the last log file at its end. Returns whether that end is durable.
///
/// A killed process leaves data that is written but not synced; later data must not depend on it. A sync is
/// not enough: if one has failed before, the operating system holds the data only in memory and considers it
/// clean. So the data is copied to a new file: in place, some file systems would not rewrite the same
/// blocks.
fn open_at(directory: &Directory, number: u64, read: &LogRead) -> Result<(File, bool)> {
    let path = directory.log(number);
    let failed = |error| unavailable(&path, "could not be opened for writing", error);
    let is_synced = read.synced >= read.end;
    if !is_synced {
        match copy(directory, number, read.end) {
            Ok(file) => return Ok((file, true)),
            Err(error) if is_full(&error) => {
                let file = path.display();
                warn!(%file, %error, "disk full: could not copy the end of the log; a snapshot follows");
            }
            Err(error) => return Err(unavailable(&path, "could not be copied", error)),
        }
    }
    let mut file = OpenOptions::new().write(true).open(&path).map_err(failed)?;
    file.set_len(read.end).map_err(failed)?;
    file.seek(SeekFrom::Start(read.end)).map_err(failed)?;
    match file.sync_all() {
        Err(error) if is_synced => Err(failed(error)),
        // The sync may fail on a full disk; nothing relies on it before the snapshot.
        _ => Ok((file, is_synced)),
    }
}

/// Replaces a log file by a durable copy of its first `end` bytes. Returns the copy positioned at its end.
fn copy(directory: &Directory, number: u64, end: u64) -> io::Result<File> {
    let (path, unfinished) = (directory.log(number), directory.unfinished_log(number));
    let copied = (|| {
        let mut from = File::open(&path)?.take(end);
        let mut to = File::create(&unfinished)?;
        // Not `io::copy`: it may reflink, and both files would share blocks.
        let mut chunk = vec![0; COPY_BYTES];
        loop {
            match from.read(&mut chunk)? {
                0 => break,
                length => to.write_all(&chunk[..length])?,
            }
        }
        to.sync_all()?;
        fs::rename(&unfinished, &path)?;
        directory.sync()?;
        Ok(to)
    })();
    if copied.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    copied
}

/// Removes files left by a crash during compaction. A failure only wastes space.
fn remove_obsolete_files(listing: &DirectoryListing, directory: &Directory, start: u64) {
    let old_logs = listing.logs.iter().filter(|number| **number < start);
    let old_snapshots = listing.snapshots.iter().filter(|number| **number < start);
    let leftovers = old_logs
        .map(|number| directory.log(*number))
        .chain(old_snapshots.map(|number| directory.snapshot(*number)))
        .chain(listing.unfinished.iter().cloned());
    for path in leftovers {
        if let Err(error) = fs::remove_file(&path) {
            let file = path.display();
            warn!(%file, %error, "could not remove an obsolete file");
        }
    }
}

fn unreadable(path: &Path, problem: FrameError) -> StreamError {
    match problem {
        FrameError::Damaged { offset, problem } => corrupt(path, offset, &problem),
        FrameError::Version(version) => StreamError::Unavailable {
            problem: format!(
                "`{}` has format version {version}, which this version does not support",
                path.display()
            ),
            source: None,
        },
        FrameError::Incomplete => corrupt(path, 0, "shorter than the file header"),
        FrameError::Io(error) => unavailable(path, "could not be read", error),
    }
}

fn corrupt(path: &Path, offset: u64, problem: &str) -> StreamError {
    let file = path.display().to_string();
    StreamError::Corrupt { file, offset, problem: problem.to_owned() }
}
