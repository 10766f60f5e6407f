//! Snapshots: the whole state as redo records, in one file.
//!
//! A snapshot is written while the log continues and replaces the log before it.
//! Guarantees: under its final name it is complete and durable, and was read back from the disk, because it replaces the only
//! copy of its data. A crash at any point leaves either the old or the new files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};

use super::directory::Directory;
use super::read_back::{self, SyncedFrames};
use super::redo_record::RedoRecord;
use super::segment::{FILE_HEADER_BYTES, FRAME_HEADER_BYTES, FileKind, file_header, seal_frame};
use super::state::group::GroupState;
use super::state::stream::StreamState;
use super::state::{EmbeddedState, NamedValue};
use crate::entry::EntryId;

/// Target size of a frame.
const FRAME_BYTES: usize = 1024 * 1024;
/// Items of a list per record.
const ITEMS_PER_RECORD: usize = 256;

/// Writes the snapshot that replaces all log files before `number`. Returns its size; `None` if `stop` was
/// set first.
pub(super) fn write(
    directory: &Directory,
    number: u64,
    state: &EmbeddedState,
    stop: &AtomicBool,
) -> io::Result<Option<u64>> {
    let unfinished = directory.unfinished_snapshot(number);
    let written = File::create(&unfinished).and_then(|file| {
        let mut writer = SnapshotWriter::new(file, number, stop)?;
        write_state(state, &mut writer)?;
        let bytes = writer.finish()?;
        read_back::check(&unfinished, SyncedFrames::all(FileKind::Snapshot, number, bytes), stop)?;
        Ok(bytes)
    });
    let bytes = match written {
        Ok(bytes) => bytes,
        Err(error) => {
            // A partial snapshot is useless; recovery would remove it too.
            let _ = fs::remove_file(&unfinished);
            return match stop.load(Ordering::Relaxed) {
                true => Ok(None),
                false => Err(error),
            };
        }
    };
    fs::rename(&unfinished, directory.snapshot(number))?;
    directory.sync()?;
    Ok(Some(bytes))
}

/// Removes the files that a durable snapshot replaces, once the log after it exists.
pub(super) fn remove_before(directory: &Directory, number: u64) -> io::Result<()> {
    let listing = directory.list().map_err(io::Error::other)?;
    for old in listing.snapshots.into_iter().filter(|old| *old < number) {
        fs::remove_file(directory.snapshot(old))?;
    }
    // Oldest first, so that a crash in between leaves no gap.
    for old in listing.logs.into_iter().filter(|old| *old < number) {
        fs::remove_file(directory.log(old))?;
    }
    Ok(())
}

fn write_state(state: &EmbeddedState, to: &mut SnapshotWriter<'_>) -> io::Result<()> {
    to.record(&RedoRecord::RestoreCounters { next_delay: state.next_delay })?;
    to.record(&RedoRecord::RestoreTime { at: state.latest() })?;
    for (lease, epoch, until) in state.epochs.iter() {
        to.record(&RedoRecord::RestoreEpoch { lease, epoch, until })?;
    }
    for (name, value) in &state.names {
        match value {
            NamedValue::StreamState(stream) => write_stream(name, stream, to)?,
            NamedValue::Delays(delays) => {
                for (due, id, waiting) in delays.iter() {
                    let (to_stream, fields) = (waiting.to.as_str(), waiting.fields.clone());
                    to.record(&RedoRecord::Schedule {
                        delays: name,
                        id,
                        due,
                        to: to_stream,
                        fields,
                    })?;
                }
            }
            NamedValue::Map(map) => {
                let fields = map.iter().map(|(name, value)| (name.as_str(), value.clone()));
                for fields in fields.collect::<Vec<_>>().chunks(ITEMS_PER_RECORD) {
                    to.record(&RedoRecord::PutFields { map: name, fields: fields.to_vec() })?;
                }
            }
            NamedValue::Set(set) => {
                let members: Vec<&str> = set.members.iter().map(|member| &**member).collect();
                for members in members.chunks(ITEMS_PER_RECORD) {
                    let (members, at) = (members.to_vec(), Default::default());
                    to.record(&RedoRecord::AddMembers {
                        set: name,
                        members,
                        until: set.until,
                        at,
                    })?;
                }
            }
            NamedValue::Lease(lease) => to.record(&RedoRecord::RestoreLease {
                lease: name,
                holder: lease.holder.as_str(),
                epoch: lease.epoch,
                until: lease.until,
            })?,
        }
    }
    for (scope, id, record) in state.dedup.iter() {
        let (done, until, at) = (record.done.clone(), record.until, Default::default());
        to.record(&RedoRecord::SetDedup { scope, id, done, until, at })?;
    }
    Ok(())
}

fn write_stream(name: &str, stream: &StreamState, to: &mut SnapshotWriter<'_>) -> io::Result<()> {
    to.record(&RedoRecord::RestoreStream { stream: name, last_id: stream.last_id })?;
    let mut entries = Vec::new();
    let mut bytes = 0;
    for (id, fields) in stream.entries.from(EntryId::MIN) {
        bytes += fields.bytes();
        entries.push((*id, fields.clone()));
        if entries.len() == ITEMS_PER_RECORD || bytes >= FRAME_BYTES {
            to.record(&RedoRecord::RestoreEntries {
                stream: name,
                entries: mem::take(&mut entries),
            })?;
            bytes = 0;
        }
    }
    to.record(&RedoRecord::RestoreEntries { stream: name, entries })?;
    for (group_name, group) in &stream.groups {
        let after = group.last_delivered;
        to.record(&RedoRecord::CreateGroup { stream: name, group: group_name, after })?;
        for (consumer_name, consumer) in &group.consumers {
            let at = consumer.seen_at;
            to.record(&RedoRecord::RestoreConsumer {
                stream: name,
                group: group_name,
                consumer: consumer_name,
                at,
            })?;
        }
        write_pending(name, group_name, group, to)?;
    }
    Ok(())
}

/// In id order; consecutive entries of one consumer share a record.
fn write_pending(
    stream: &str,
    group_name: &str,
    group: &GroupState,
    to: &mut SnapshotWriter<'_>,
) -> io::Result<()> {
    let mut all = group.pending.from(EntryId::MIN).peekable();
    while let Some((_, first)) = all.peek() {
        let consumer = &first.consumer;
        let mut pending = Vec::new();
        while let Some((id, delivered)) = all.next_if(|(_, next)| next.consumer == *consumer) {
            pending.push((*id, delivered.at, delivered.deliveries));
            if pending.len() == ITEMS_PER_RECORD {
                break;
            }
        }
        let (group, consumer) = (group_name, consumer.as_str());
        to.record(&RedoRecord::RestorePending { stream, group, consumer, pending })?;
    }
    Ok(())
}

struct SnapshotWriter<'a> {
    file: File,
    number: u64,
    offset: u64,
    /// The current frame; space for its header is reserved.
    frame: Vec<u8>,
    stop: &'a AtomicBool,
}

impl<'a> SnapshotWriter<'a> {
    fn new(mut file: File, number: u64, stop: &'a AtomicBool) -> io::Result<Self> {
        file.write_all(&file_header(FileKind::Snapshot, number))?;
        let frame = vec![0; FRAME_HEADER_BYTES];
        Ok(Self { file, number, offset: FILE_HEADER_BYTES as u64, frame, stop })
    }

    fn record(&mut self, record: &RedoRecord<'_>) -> io::Result<()> {
        record.encode(&mut self.frame);
        if self.frame.len() < FRAME_BYTES {
            return Ok(());
        }
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("the backend is closing"));
        }
        self.write_frame()
    }

    fn write_frame(&mut self) -> io::Result<()> {
        seal_frame(&mut self.frame, self.number, self.offset, 0);
        self.file.write_all(&self.frame)?;
        self.offset += self.frame.len() as u64;
        self.frame.truncate(FRAME_HEADER_BYTES);
        Ok(())
    }

    fn finish(mut self) -> io::Result<u64> {
        if self.frame.len() > FRAME_HEADER_BYTES {
            self.write_frame()?;
        }
        // An empty frame marks the snapshot as complete.
        self.write_frame()?;
        self.file.sync_all()?;
        Ok(self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_that_is_stopped_while_it_is_read_back_leaves_no_file() {
        let path = tempfile::tempdir().expect("a directory");
        let (directory, _lock) = Directory::open(path.path()).expect("opened");
        let write = |stop| {
            let state = EmbeddedState::default();
            write(&directory, 1, &state, &AtomicBool::new(stop)).expect("no error")
        };
        // It is too small for the writer to notice the stop.
        assert_eq!(write(true), None);
        let listing = directory.list().expect("listed");
        assert!(listing.snapshots.is_empty() && listing.unfinished.is_empty(), "{listing:?}");
        assert!(write(false).is_some());
    }
}
