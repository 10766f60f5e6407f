//! Reads a synced file back from the disk.
//!
//! A sync that succeeded does not prove that the data is there: ext4 on full storage (thin provisioning) confirms syncs of data
//! that it cannot find again, because it could not write its own metadata. The page cache still has that data, so an ordinary
//! read finds it, until the machine restarts or the memory is needed.
//! The reference is the checksums of the frames, and not the page cache: what the cache no longer has, it would read from the
//! same disk.

use std::io::{self, Read};
use std::mem;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::segment::{FILE_HEADER_BYTES, FileKind, FrameError, FrameReader};

/// The frames of a file that were written and synced.
#[derive(Clone, Copy, Debug)]
pub(super) struct SyncedFrames {
    pub(super) kind: FileKind,
    pub(super) number: u64,
    /// Offset of the first of these frames. The file header is checked together with the first frame of a file.
    pub(super) from: u64,
    /// End of the last of these frames. The last frame of a snapshot is empty.
    pub(super) end: u64,
}

impl SyncedFrames {
    /// All frames of a file that ends at `end`.
    pub(super) fn all(kind: FileKind, number: u64, end: u64) -> Self {
        Self { kind, number, from: FILE_HEADER_BYTES as u64, end }
    }

    fn includes_file_header(&self) -> bool {
        self.from == FILE_HEADER_BYTES as u64
    }
}

/// Where the end of a growing log file begins that is to be read back: at a frame, at least [`TAIL_BYTES`] and at most twice as
/// much and two frames before the last frame.
#[derive(Debug)]
pub(super) struct UncheckedTail {
    from: u64,
    /// The next `from`.
    next: u64,
}

/// Bytes at the end of a log file that are read back.
const TAIL_BYTES: u64 = 1024 * 1024;

impl UncheckedTail {
    /// Of a file that ends at `offset`, and is checked up to there or has only its header.
    pub(super) fn new(offset: u64) -> Self {
        Self { from: offset, next: offset }
    }

    /// Adds the frame that begins at `offset`.
    pub(super) fn add_frame(&mut self, offset: u64) {
        if offset - self.next >= TAIL_BYTES {
            self.from = mem::replace(&mut self.next, offset);
        }
    }

    pub(super) fn from(&self) -> u64 {
        self.from
    }
}

/// Reads these frames from the disk, bypassing the page cache. Fails with `StorageFull` if the disk does not have them, and with
/// another error once `stop` is set. File systems without direct reads are trusted.
pub(super) fn check(path: &Path, frames: SyncedFrames, stop: &AtomicBool) -> io::Result<()> {
    if stop.load(Ordering::Relaxed) {
        return Err(closing());
    }
    check_disk(path, frames, stop)
}

#[cfg(target_os = "linux")]
fn check_disk(path: &Path, frames: SyncedFrames, stop: &AtomicBool) -> io::Result<()> {
    let start = if frames.includes_file_header() { 0 } else { frames.from };
    match direct::DirectReader::open(path, start)? {
        Some(disk) => verify(disk, frames, stop).map_err(|error| to_io(path, error)),
        None => Ok(()),
    }
}

/// Trusts the sync.
#[cfg(not(target_os = "linux"))]
fn check_disk(_: &Path, _: SyncedFrames, _: &AtomicBool) -> io::Result<()> {
    Ok(())
}

fn closing() -> io::Error {
    io::Error::other("the backend is closing")
}

/// Fails unless `input` consists of exactly these frames, or once `stop` is set.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux has direct reads"))]
fn verify(input: impl Read, frames: SyncedFrames, stop: &AtomicBool) -> Result<(), FrameError> {
    let SyncedFrames { kind, number, from, end } = frames;
    let input = StoppableReader { input, stop };
    let mut reader = match frames.includes_file_header() {
        true => FrameReader::new(input, kind, number, end)?,
        false => FrameReader::resume(input, number, from, end),
    };
    let mut last = None;
    while let Some(payload_bytes) = reader.skip()? {
        last = Some(payload_bytes);
    }
    if kind == FileKind::Snapshot && last != Some(0) {
        let problem = "the final frame is missing".to_owned();
        return Err(FrameError::Damaged { offset: end, problem });
    }
    Ok(())
}

#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux has direct reads"))]
fn to_io(path: &Path, error: FrameError) -> io::Error {
    let problem = match error {
        FrameError::Io(error) if error.kind() != io::ErrorKind::UnexpectedEof => return error,
        FrameError::Io(_) => "the file is too short".to_owned(),
        FrameError::Damaged { offset, problem } => format!("at byte {offset}: {problem}"),
        FrameError::Incomplete => "the file header is missing".to_owned(),
        FrameError::Version(version) => format!("the file header has format version {version}"),
    };
    let path = path.display();
    let problem = format!(
        "the disk confirmed a sync of `{path}` and does not have its data ({problem}); its storage may be full"
    );
    io::Error::new(io::ErrorKind::StorageFull, problem)
}

/// Fails once `stop` is set.
struct StoppableReader<'a, R> {
    input: R,
    stop: &'a AtomicBool,
}

impl<R: Read> Read for StoppableReader<'_, R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(closing()),
            false => self.input.read(to),
        }
    }
}

#[cfg(target_os = "linux")]
mod direct {
    use std::fs::{File, OpenOptions};
    use std::io::{self, Read};
    use std::ops::Range;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::Path;
    use std::sync::Once;

    use tracing::info;

    /// Alignment of direct reads: of offsets, lengths and memory.
    const ALIGNMENT: usize = 4096;
    const CHUNK_BYTES: usize = 1024 * 1024;

    /// Reads a file from the disk, from any offset on.
    #[derive(Debug)]
    pub(super) struct DirectReader {
        file: File,
        /// Offset of the next byte.
        offset: u64,
        memory: Vec<u8>,
        /// The part of `memory` with the next bytes.
        unread: Range<usize>,
    }

    impl DirectReader {
        /// `None` if the file system does not support direct reads.
        pub(super) fn open(path: &Path, offset: u64) -> io::Result<Option<Self>> {
            let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
            let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
            let file = match opened {
                Err(error) if is_unsupported(&error) => {
                    log_trusted(path, &error);
                    return Ok(None);
                }
                opened => opened?,
            };
            let memory = vec![0; CHUNK_BYTES + ALIGNMENT];
            let mut reader = Self { file, offset, memory, unread: 0..0 };
            // Some file systems reject the first read and not the open.
            match reader.fill() {
                Ok(()) => Ok(Some(reader)),
                Err(error) if is_unsupported(&error) => {
                    log_trusted(path, &error);
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        }

        /// Reads the next chunk. It is empty at the end of the file.
        fn fill(&mut self) -> io::Result<()> {
            let start = self.memory.as_ptr().align_offset(ALIGNMENT);
            let skipped = self.offset % ALIGNMENT as u64;
            let chunk = &mut self.memory[start..start + CHUNK_BYTES];
            let read = loop {
                match self.file.read_at(chunk, self.offset - skipped) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    read => break read?,
                }
            };
            self.unread = start + read.min(skipped as usize)..start + read;
            Ok(())
        }
    }

    /// Whether the file system rejects direct reads. Any other error, such as too many open files, says nothing about the data.
    fn is_unsupported(error: &io::Error) -> bool {
        matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
    }

    fn log_trusted(path: &Path, error: &io::Error) {
        static IS_LOGGED: Once = Once::new();
        IS_LOGGED.call_once(|| {
            let file = path.display();
            info!(%file, %error, "no direct reads: synced files are not read back from the disk");
        });
    }

    impl Read for DirectReader {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            if self.unread.is_empty() {
                self.fill()?;
            }
            let next = &self.memory[self.unread.clone()];
            let length = to.len().min(next.len());
            to[..length].copy_from_slice(&next[..length]);
            self.unread.start += length;
            self.offset += length as u64;
            Ok(length)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::segment::{FRAME_HEADER_BYTES, file_header, seal_frame};
    use super::*;

    const NUMBER: u64 = 7;
    /// Payloads: a frame within a block, one of many blocks, and the final frame of a snapshot.
    const PAYLOADS: [usize; 4] = [100, 3 * 1024 * 1024, 5000, 0];

    /// A file and the boundaries of its frames.
    fn file(kind: FileKind) -> (Vec<u8>, Vec<u64>) {
        let mut bytes = file_header(kind, NUMBER).to_vec();
        let mut boundaries = vec![bytes.len() as u64];
        for length in PAYLOADS {
            let mut frame = vec![7; FRAME_HEADER_BYTES + length];
            seal_frame(&mut frame, NUMBER, bytes.len() as u64, 0);
            bytes.extend(frame);
            boundaries.push(bytes.len() as u64);
        }
        (bytes, boundaries)
    }

    fn all(kind: FileKind, end: u64) -> SyncedFrames {
        SyncedFrames::all(kind, NUMBER, end)
    }

    /// Checks all frames up to `end` in what the disk has of the file.
    fn verify_all(on_disk: &[u8], kind: FileKind, end: u64) -> io::Result<()> {
        let never = AtomicBool::new(false);
        verify(on_disk, all(kind, end), &never).map_err(|error| to_io(Path::new("f"), error))
    }

    #[track_caller]
    fn assert_lost(result: io::Result<()>, problem: &str) {
        let error = result.expect_err("the data is not there");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
        assert!(error.to_string().contains(problem), "{error}");
    }

    #[test]
    fn the_tail_begins_at_a_frame_and_is_neither_too_short_nor_too_long() {
        let frame_bytes = [100, 50_000, 3000, TAIL_BYTES + 1, 24, 7000];
        let longest = TAIL_BYTES + 1;
        let mut tail = UncheckedTail::new(24);
        let mut frames = vec![24];
        for bytes in frame_bytes.into_iter().cycle().take(500) {
            let last = frames[frames.len() - 1];
            tail.add_frame(last);
            assert!(frames.contains(&tail.from()));
            let tail_bytes = last - tail.from();
            assert!(tail_bytes >= TAIL_BYTES.min(last - 24), "{tail_bytes}");
            assert!(tail_bytes <= 2 * (TAIL_BYTES + longest), "{tail_bytes}");
            frames.push(last + bytes);
        }
    }

    #[test]
    fn a_complete_file_is_accepted() {
        for kind in [FileKind::Log, FileKind::Snapshot] {
            let (bytes, boundaries) = file(kind);
            verify_all(&bytes, kind, boundaries[4]).expect("complete");
        }
    }

    #[test]
    fn zeros_in_place_of_any_block_are_found() {
        let (bytes, boundaries) = file(FileKind::Snapshot);
        for block in (0..bytes.len()).step_by(4096).filter(|block| block % (64 * 4096) == 0) {
            let mut on_disk = bytes.clone();
            let end = bytes.len().min(block + 4096);
            on_disk[block..end].fill(0);
            assert_lost(verify_all(&on_disk, FileKind::Snapshot, boundaries[4]), "at byte");
        }
        assert_lost(
            verify_all(&vec![0; bytes.len()], FileKind::Snapshot, boundaries[4]),
            "at byte 0",
        );
        let header_only = [0; FILE_HEADER_BYTES];
        assert_lost(verify_all(&header_only, FileKind::Log, boundaries[0]), "file header");
    }

    #[test]
    fn a_changed_bit_in_a_header_or_a_payload_is_found() {
        let (bytes, boundaries) = file(FileKind::Log);
        let second = boundaries[1] as usize;
        for at in [0, 15, 30, 60, second + 5, second + 1_000_000, bytes.len() - 1] {
            let mut on_disk = bytes.clone();
            on_disk[at] ^= 1;
            assert_lost(verify_all(&on_disk, FileKind::Log, boundaries[4]), "at byte");
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_found() {
        let (bytes, boundaries) = file(FileKind::Log);
        for missing in [1, FRAME_HEADER_BYTES, 4000, 1024 * 1024, bytes.len()] {
            let on_disk = &bytes[..bytes.len() - missing];
            assert_lost(verify_all(on_disk, FileKind::Log, boundaries[4]), "too short");
        }
    }

    #[test]
    fn a_snapshot_without_its_final_frame_is_found_and_a_log_needs_none() {
        let end = |boundaries: &[u64]| boundaries[3];
        let (snapshot, boundaries) = file(FileKind::Snapshot);
        assert_lost(verify_all(&snapshot, FileKind::Snapshot, end(&boundaries)), "final frame");
        let (log, boundaries) = file(FileKind::Log);
        verify_all(&log, FileKind::Log, end(&boundaries)).expect("complete");
    }

    #[test]
    fn frames_of_another_file_or_offset_are_not_accepted() {
        let (bytes, boundaries) = file(FileKind::Log);
        let never = AtomicBool::new(false);
        let frames = SyncedFrames { from: boundaries[1], ..all(FileKind::Log, boundaries[4]) };
        verify(&bytes[boundaries[1] as usize..], frames, &never).expect("the frames are there");
        let other = SyncedFrames { number: NUMBER + 1, ..frames };
        verify(&bytes[boundaries[1] as usize..], other, &never).expect_err("another file");
        verify(&bytes[boundaries[2] as usize..], frames, &never).expect_err("another offset");
    }

    #[test]
    fn a_check_ends_when_it_is_stopped() {
        /// Sets `stop` once it has returned some data.
        struct StopsAt<'a>(&'a [u8], &'a AtomicBool);
        impl Read for StopsAt<'_> {
            fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
                assert!(!self.1.load(Ordering::Relaxed), "read after the stop");
                let read = self.0.read(to)?;
                self.1.store(self.0.len() < 2 * 1024 * 1024, Ordering::Relaxed);
                Ok(read)
            }
        }
        let (bytes, boundaries) = file(FileKind::Snapshot);
        let stop = AtomicBool::new(false);
        let stopped = verify(StopsAt(&bytes, &stop), all(FileKind::Snapshot, boundaries[4]), &stop);
        assert!(matches!(stopped, Err(FrameError::Io(_))), "{stopped:?}");
    }

    #[test]
    fn a_file_is_read_back_from_any_frame_on() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let never = AtomicBool::new(false);
        for kind in [FileKind::Log, FileKind::Snapshot] {
            let (mut bytes, boundaries) = file(kind);
            fs::write(&path, &bytes).expect("written");
            let frames = all(kind, boundaries[4]);
            for from in &boundaries[..4] {
                check(&path, SyncedFrames { from: *from, ..frames }, &never).expect("on the disk");
            }
            bytes[1024 * 1024..1024 * 1024 + 4096].fill(0);
            fs::write(&path, &bytes).expect("written");
            for from in &boundaries[2..4] {
                check(&path, SyncedFrames { from: *from, ..frames }, &never).expect("on the disk");
            }
            #[cfg(target_os = "linux")]
            if direct::DirectReader::open(&path, 0).expect("opened").is_some() {
                for from in &boundaries[..2] {
                    let frames = SyncedFrames { from: *from, ..frames };
                    assert_lost(check(&path, frames, &never), "checksum mismatch");
                }
            }
        }
    }
}
