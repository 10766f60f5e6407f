//! Recovery: reads the newest snapshot, then the log after it.
//!
//! Guarantees: everything acknowledged is restored. An incomplete write at the end of the last log file is
//! removed. Any other unreadable data is an error that names the file and the offset, and nothing is
//! changed.
//! Upstream: `open`. Downstream: `segment` reads the files, `state` applies the records.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tracing::{info, warn};

use super::codec::RecordError;
use super::directory::{Directory, DirectoryListing, unavailable};
use super::log::is_full;
use super::read_back::{self, SyncedFrames};
use super::redo_record::RedoRecord;
use super::segment::{FILE_HEADER_BYTES, FileKind, FrameError, FrameReader, file_header};
use super::state::EmbeddedState;
use crate::error::{Result, StreamError};

const COPY_BYTES: usize = 1024 * 1024;

/// The recovered state and the open log file.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) state: EmbeddedState,
    /// The last log file, positioned at its end if `is_durable`.
    pub(super) file: File,
    pub(super) number: u64,
    /// The length of the last log file.
    pub(super) offset: u64,
    /// Bytes of log since the last snapshot.
    pub(super) log_bytes: u64,
    /// The size of the last snapshot.
    pub(super) snapshot_bytes: u64,
    /// Bytes of an incomplete write that were ignored.
    pub(super) cut_bytes: u64,
    /// Whether everything up to `offset` survives a power failure. If not, nothing may be written to `file`: a snapshot must
    /// replace it first.
    pub(super) is_durable: bool,
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
    // Everything was readable; only now change files. Unfinished files may be why there is no space for a copy of the tail.
    remove_files(listing.unfinished.iter().cloned());
    // Open the tail first: obsolete files are removed when nothing needs them. If the tail could not be made durable, the new
    // name of the snapshot may not be durable either.
    let recovered = open_tail(directory, state, start, tail, log_bytes, snapshot_bytes)?;
    if recovered.is_durable || directory.sync().is_ok() {
        remove_files(obsolete_files(&listing, directory, start));
    }
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
            let (file, is_durable) = create_tail(directory, last)?;
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
                is_durable,
            });
        }
    };
    let path = directory.log(number);
    let (file, is_durable) = open_at(directory, number, read.end)?;
    if read.cut > 0 {
        let file = path.display();
        warn!(%file, offset = read.end, bytes = read.cut, "ignored an incomplete write at the end of the log");
    }
    info!(log_bytes, snapshot_bytes, "embedded log replayed");
    let (offset, cut_bytes) = (read.end, read.cut);
    Ok(Recovered { state, file, number, offset, log_bytes, snapshot_bytes, cut_bytes, is_durable })
}

/// Creates the last log file, which has no frames. Returns whether it is durable: on a full disk it is not, and a snapshot
/// replaces it.
fn create_tail(directory: &Directory, number: u64) -> Result<(File, bool)> {
    let path = directory.log(number);
    match write_header(directory, number) {
        Ok(file) => Ok((file, true)),
        Err(error) if is_full(&error) => {
            let file = path.display();
            warn!(%file, %error, "could not create the log; the next write begins with a snapshot");
            let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            Ok((opened.map_err(|error| unavailable(&path, "could not be created", error))?, false))
        }
        Err(error) => Err(unavailable(&path, "could not be created", error)),
    }
}

/// Creates and syncs the log file of this number, positioned after its header.
pub(super) fn create_log(directory: &Directory, number: u64) -> Result<File> {
    write_header(directory, number)
        .map_err(|error| unavailable(&directory.log(number), "could not be created", error))
}

fn write_header(directory: &Directory, number: u64) -> io::Result<File> {
    let path = directory.log(number);
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
    file.write_all(&file_header(FileKind::Log, number))?;
    file.sync_all()?;
    directory.sync()?;
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
    cut: u64,
    /// The process died while creating the file.
    is_incomplete: bool,
}

fn read_log(path: &Path, number: u64, is_last: bool, state: &mut EmbeddedState) -> Result<LogRead> {
    let mut reader = match FrameReader::open(path, FileKind::Log, number) {
        Err(FrameError::Incomplete) if is_last => {
            return Ok(LogRead { end: 0, cut: 0, is_incomplete: true });
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
                return Ok(LogRead { end: offset, cut: 0, is_incomplete: false });
            }
            Err(FrameError::Damaged { offset, problem }) if is_last => {
                let cut = reader.length() - offset;
                let evidence = reader
                    .synced_evidence()
                    .map_err(|error| unavailable(path, "could not be read", error))?;
                if let Some(evidence) = evidence {
                    let problem =
                        format!("{problem}, but the frame at byte {evidence} declares it synced");
                    return Err(corrupt(path, offset, &problem));
                }
                return Ok(LogRead { end: offset, cut, is_incomplete: false });
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

/// Opens the last log file at `end`. Returns whether everything before that is durable.
///
/// A killed process leaves data that is written but not synced; later data must not depend on it. A sync is
/// not enough: if one has failed before, the operating system holds the data only in memory and considers it
/// clean. So the data is copied to a new file: in place, some file systems would not rewrite the same
/// blocks. If the disk does not take the copy, the file stays as it is.
fn open_at(directory: &Directory, number: u64, end: u64) -> Result<(File, bool)> {
    let path = directory.log(number);
    match copy(directory, number, end) {
        Ok(file) => Ok((file, true)),
        Err(error) if is_full(&error) => {
            let file = path.display();
            warn!(%file, %error, "could not make a durable copy of the log; the next write begins with a snapshot");
            let opened = OpenOptions::new().write(true).open(&path);
            let opened = opened
                .map_err(|error| unavailable(&path, "could not be opened for writing", error))?;
            Ok((opened, false))
        }
        Err(error) => Err(unavailable(&path, "could not be copied", error)),
    }
}

/// Replaces a log file by a durable copy of its first `end` bytes. Returns the copy positioned at its end. Fails with
/// `StorageFull` if the disk does not have the copy, whatever it reports: on full storage ext4 fails with other errors too.
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
        let frames = SyncedFrames::all(FileKind::Log, number, end);
        // It replaces the only copy of its data, so the sync alone is not trusted.
        to.sync_all()
            .and_then(|()| read_back::check(&unfinished, frames, &AtomicBool::new(false)))
            .and_then(|()| fs::rename(&unfinished, &path))
            .and_then(|()| directory.sync())
            .map_err(|error| io::Error::new(io::ErrorKind::StorageFull, error))?;
        Ok(to)
    })();
    if copied.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    copied
}

/// Files that a crash during compaction has left.
fn obsolete_files(
    listing: &DirectoryListing,
    directory: &Directory,
    start: u64,
) -> impl Iterator<Item = PathBuf> {
    let old_logs = listing.logs.iter().filter(move |number| **number < start);
    let old_snapshots = listing.snapshots.iter().filter(move |number| **number < start);
    old_logs
        .map(move |number| directory.log(*number))
        .chain(old_snapshots.map(move |number| directory.snapshot(*number)))
}

/// A failure only wastes space.
fn remove_files(files: impl Iterator<Item = PathBuf>) {
    for path in files {
        if let Err(error) = fs::remove_file(&path) {
            let file = path.display();
            warn!(%file, %error, "could not remove an obsolete file");
        }
    }
}

fn unreadable(path: &Path, problem: FrameError) -> StreamError {
    match problem {
        FrameError::Damaged { offset, problem } => corrupt(path, offset, &problem),
        FrameError::Version(version) => StreamError::invalid(
            "file format",
            format!(
                "`{}` has version {version}, which this version of Headwater does not support; open it with the version that wrote it",
                path.display()
            ),
        ),
        FrameError::Incomplete => corrupt(path, 0, "shorter than the file header"),
        FrameError::Io(error) => unavailable(path, "could not be read", error),
    }
}

fn corrupt(path: &Path, offset: u64, problem: &str) -> StreamError {
    let file = path.display().to_string();
    StreamError::Corrupt { file, offset, problem: problem.to_owned() }
}
