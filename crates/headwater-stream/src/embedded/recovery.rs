//! Opening a directory: the newest snapshot, then the log behind it.
//!
//! Promises: what was acknowledged is there again. An unfinished write at the end of the last log file is cut off;
//! anything else that cannot be read is an error that names the file and the place, and nothing is changed.
//! Upstream: `open`. Downstream: `segment` reads the files, `state` takes the effects.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use tracing::{info, warn};

use super::codec::{self, Problem};
use super::directory::{Directory, Listing, unavailable};
use super::segment::{FILE_HEADER_BYTES, FrameReader, Kind, Unreadable, file_header};
use super::state::State;
use crate::error::{Result, StreamError};

/// What was found, ready to go on.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) state: State,
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
    let mut state = State::default();
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
    // Everything could be read; only now is anything changed.
    clear_leftovers(&listing, directory, start);
    let (number, read) = match tail {
        Some((number, read)) if !read.is_unborn => (number, read),
        _ => {
            let number = logs.last().copied().unwrap_or(start);
            let file = create_log(directory, number)?;
            let offset = FILE_HEADER_BYTES as u64;
            let cut_bytes = 0;
            return Ok(Recovered {
                state,
                file,
                number,
                offset,
                log_bytes,
                snapshot_bytes,
                cut_bytes,
            });
        }
    };
    let path = directory.log(number);
    let file = open_at(&path, &read)?;
    if read.cut > 0 {
        let file = path.display();
        warn!(%file, offset = read.end, bytes = read.cut, "unfinished write at the end of the log was cut off");
    }
    info!(log_bytes, snapshot_bytes, "embedded log was read");
    let (offset, cut_bytes) = (read.end, read.cut);
    Ok(Recovered { state, file, number, offset, log_bytes, snapshot_bytes, cut_bytes })
}

/// Creates the log file of this number, durably, positioned behind its header.
pub(super) fn create_log(directory: &Directory, number: u64) -> Result<File> {
    let path = directory.log(number);
    let failed = |error| unavailable(&path, "could not be created", error);
    let mut file =
        OpenOptions::new().create(true).truncate(true).write(true).open(&path).map_err(failed)?;
    file.write_all(&file_header(Kind::Log, number)).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    directory.sync().map_err(failed)?;
    Ok(file)
}

/// The log files to read: from `start` on, without a gap.
fn logs_from(directory: &Directory, listing: &Listing, start: u64) -> Result<Vec<u64>> {
    let logs: Vec<u64> = listing.logs.iter().copied().filter(|number| *number >= start).collect();
    let missing = (start..).zip(&logs).find(|(expected, found)| expected != *found);
    let none_at_all = logs.is_empty() && !(listing.snapshots.is_empty() && listing.logs.is_empty());
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
    cut: u64,
    /// The process ended while the file was being created.
    is_unborn: bool,
}

fn read_log(path: &Path, number: u64, is_last: bool, state: &mut State) -> Result<LogRead> {
    let mut reader = match FrameReader::open(path, Kind::Log, number) {
        Err(Unreadable::Unborn) if is_last => {
            return Ok(LogRead { end: 0, cut: 0, is_unborn: true });
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
            Ok(false) => return Ok(LogRead { end: offset, cut: 0, is_unborn: false }),
            Err(Unreadable::Damaged { offset, problem }) if is_last => {
                let cut = reader.length() - offset;
                let evidence = reader
                    .synced_evidence()
                    .map_err(|error| unavailable(path, "could not be read", error))?;
                if let Some(evidence) = evidence {
                    let problem =
                        format!("{problem}, and the frame at {evidence} says it was whole");
                    return Err(corrupt(path, offset, &problem));
                }
                return Ok(LogRead { end: offset, cut, is_unborn: false });
            }
            Err(problem) => return Err(unreadable(path, problem)),
        }
    }
}

fn read_snapshot(directory: &Directory, number: u64, state: &mut State) -> Result<u64> {
    let path = directory.snapshot(number);
    let unreadable = |problem| unreadable(&path, problem);
    let mut reader = FrameReader::open(&path, Kind::Snapshot, number).map_err(unreadable)?;
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

fn apply_all(mut payload: &[u8], state: &mut State) -> Result<(), Problem> {
    while let Some(effect) = codec::decode(&mut payload)? {
        state.apply(&effect)?;
    }
    Ok(())
}

fn open_at(path: &Path, read: &LogRead) -> Result<File> {
    let failed = |error| unavailable(path, "could not be opened for writing", error);
    let mut file = OpenOptions::new().write(true).open(path).map_err(failed)?;
    if read.cut > 0 {
        file.set_len(read.end).map_err(failed)?;
    }
    file.seek(SeekFrom::Start(read.end)).map_err(failed)?;
    // A killed process leaves bytes that are written and not synced; what is built on them must not outlive them.
    file.sync_all().map_err(failed)?;
    Ok(file)
}

/// Removes what a crash during compaction left behind. Nothing needs these files; a failure is only a waste of space.
fn clear_leftovers(listing: &Listing, directory: &Directory, start: u64) {
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

fn unreadable(path: &Path, problem: Unreadable) -> StreamError {
    match problem {
        Unreadable::Damaged { offset, problem } => corrupt(path, offset, &problem),
        Unreadable::Version(version) => StreamError::Unavailable {
            problem: format!(
                "`{}` is of format version {version}, which this program does not know",
                path.display()
            ),
            source: None,
        },
        Unreadable::Unborn => corrupt(path, 0, "it is shorter than its header"),
        Unreadable::Io(error) => unavailable(path, "could not be read", error),
    }
}

fn corrupt(path: &Path, offset: u64, problem: &str) -> StreamError {
    let file = path.display().to_string();
    StreamError::Corrupt { file, offset, problem: problem.to_owned() }
}
