//! Opening a directory: the newest snapshot, then the log behind it.
//!
//! Promises: what was acknowledged is there again. An unfinished write at the end of the last log file is cut off;
//! anything else that cannot be read is an error that names the file and the place, and nothing is changed.
//! Upstream: `open`. Downstream: `segment` reads the files, `state` takes the effects.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use tracing::{info, warn};

use super::codec::{self, RecordError};
use super::directory::{Directory, DirectoryListing, unavailable};
use super::log::is_full;
use super::segment::{FILE_HEADER_BYTES, FileKind, FrameError, FrameReader, file_header};
use super::state::EmbeddedState;
use crate::error::{Result, StreamError};

/// Bytes that are copied at a time.
const COPY_BYTES: usize = 1024 * 1024;

/// What was found, ready to go on.
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
    /// Bytes of an unfinished write that were cut off.
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
    // Everything could be read; only now is anything changed. The end first: files are removed when nothing needs them.
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
        warn!(%file, offset = read.end, bytes = read.cut, "unfinished write at the end of the log was cut off");
    }
    info!(log_bytes, snapshot_bytes, "embedded log was read");
    let (offset, cut_bytes) = (read.end, read.cut);
    // A log that is long enough for a snapshot gets one with the next write.
    let log_bytes = if is_sound { log_bytes } else { u64::MAX / 2 };
    Ok(Recovered { state, file, number, offset, log_bytes, snapshot_bytes, cut_bytes })
}

/// Creates the log file of this number, durably, positioned behind its header.
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

/// The log files to read: from `start` on, without a gap.
fn logs_from(directory: &Directory, listing: &DirectoryListing, start: u64) -> Result<Vec<u64>> {
    let logs: Vec<u64> = listing.logs.iter().copied().filter(|number| *number >= start).collect();
    let missing = (start..).zip(&logs).find(|(expected, found)| expected != *found);
    let is_new = listing.snapshots.is_empty() && listing.logs.is_empty();
    // A repair writes its snapshot first and begins the log behind it second; the log before is removed last.
    let is_between = listing.logs.last().is_some_and(|last| last + 1 == start);
    let none_at_all = logs.is_empty() && !is_new && !is_between;
    let missing = missing.map(|(expected, _)| expected).or(none_at_all.then_some(start));
    match missing {
        None => Ok(logs),
        Some(number) => Err(StreamError::Corrupt {
            file: directory.log(number).display().to_string(),
            offset: 0,
            problem: "the file is missing, though others around it exist".to_owned(),
        }),
    }
}

/// How far a log file could be read.
struct LogRead {
    end: u64,
    /// Up to where it was surely synced.
    synced: u64,
    cut: u64,
    /// The process ended while the file was being created.
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
                        format!("{problem}, and the frame at {evidence} says it was whole");
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
        // The last frame is empty: it says that all others are there.
        if is_whole {
            return Err(corrupt(&path, offset, "something follows its end"));
        }
        is_whole = payload.is_empty();
        apply_all(&payload, state).map_err(|problem| corrupt(&path, offset, problem))?;
    }
    if is_whole {
        return Ok(reader.length());
    }
    Err(corrupt(&path, reader.length(), "it ends before its last frame"))
}

fn apply_all(mut payload: &[u8], state: &mut EmbeddedState) -> Result<(), RecordError> {
    while let Some(record) = codec::decode(&mut payload)? {
        state.apply(&record)?;
    }
    Ok(())
}

/// Opens the last log file at its end. Returns whether that end is on the disk.
///
/// A killed process leaves bytes that are written and not synced; what is built on them must not outlive them. A sync is
/// not enough: if one has failed before, the system has these bytes in memory only and takes them for written. So they are
/// written again, to a new file: in place, some file systems would not write them to blocks that they read again later.
fn open_at(directory: &Directory, number: u64, read: &LogRead) -> Result<(File, bool)> {
    let path = directory.log(number);
    let failed = |error| unavailable(&path, "could not be opened for writing", error);
    let is_synced = read.synced >= read.end;
    if !is_synced {
        match copy(directory, number, read.end) {
            Ok(file) => return Ok((file, true)),
            Err(error) if is_full(&error) => {
                let file = path.display();
                warn!(%file, %error, "no space to write the end of the log again, a snapshot will follow");
            }
            Err(error) => return Err(unavailable(&path, "could not be copied", error)),
        }
    }
    let mut file = OpenOptions::new().write(true).open(&path).map_err(failed)?;
    file.set_len(read.end).map_err(failed)?;
    file.seek(SeekFrom::Start(read.end)).map_err(failed)?;
    match file.sync_all() {
        Err(error) if is_synced => Err(failed(error)),
        // Where there is no space, it may fail; nothing relies on it before the snapshot.
        _ => Ok((file, is_synced)),
    }
}

/// Replaces a log file by a copy of its first `end` bytes that is durable. Returns it positioned at its end.
fn copy(directory: &Directory, number: u64, end: u64) -> io::Result<File> {
    let (path, unfinished) = (directory.log(number), directory.unfinished_log(number));
    let copied = (|| {
        let mut from = File::open(&path)?.take(end);
        let mut to = File::create(&unfinished)?;
        // Not `io::copy`, which may let both files share their blocks.
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

/// Removes what a crash during compaction left behind. Nothing needs these files; a failure is only a waste of space.
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
            warn!(%file, %error, "leftover file could not be removed");
        }
    }
}

fn unreadable(path: &Path, problem: FrameError) -> StreamError {
    match problem {
        FrameError::Damaged { offset, problem } => corrupt(path, offset, &problem),
        FrameError::Version(version) => StreamError::Unavailable {
            problem: format!(
                "`{}` is of format version {version}, which this program does not know",
                path.display()
            ),
            source: None,
        },
        FrameError::Incomplete => corrupt(path, 0, "it is shorter than its header"),
        FrameError::Io(error) => unavailable(path, "could not be read", error),
    }
}

fn corrupt(path: &Path, offset: u64, problem: &str) -> StreamError {
    let file = path.display().to_string();
    StreamError::Corrupt { file, offset, problem: problem.to_owned() }
}
