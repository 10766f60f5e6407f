//! File format of logs and snapshots: a header, then frames.
//!
//! A frame contains the records of one or more calls and is valid as a whole or not at all. The checksum of
//! its header covers the file number and the offset, so bytes that look like a frame (a log file sent as a
//! payload) are not mistaken for one.
//!
//! Every frame also contains the offset up to which the file was synced when the frame was written. This
//! distinguishes an incomplete write from damage: after a power failure, unsynced frames may be missing or
//! torn in any order, but no data that a later frame declares synced may be.
//! Not here: the meaning of records (see `codec`), the list of files (see `directory`).

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// Format version.
const VERSION: u32 = 1;
pub(super) const FILE_HEADER_BYTES: usize = 24;
pub(super) const FRAME_HEADER_BYTES: usize = 24;
const FRAME_MAGIC: [u8; 4] = *b"\xF5HWf";

/// Largest frame: a full buffer plus the largest call.
pub(super) const FRAME_BYTES_MAX: usize = 768 * 1024 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    Log,
    Snapshot,
}

impl FileKind {
    fn magic(self) -> [u8; 8] {
        match self {
            Self::Log => *b"HEADWLOG",
            Self::Snapshot => *b"HEADWSNP",
        }
    }
}

/// Why a file cannot be read.
#[derive(Debug)]
pub(super) enum FrameError {
    /// The data at this offset is not what was written.
    Damaged {
        offset: u64,
        problem: String,
    },
    /// Unsupported format version.
    Version(u32),
    /// The file is shorter than its header, or has only zeros: the process or the machine died while creating it.
    Incomplete,
    Io(io::Error),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

pub(super) fn file_header(kind: FileKind, number: u64) -> [u8; FILE_HEADER_BYTES] {
    let mut header = [0; FILE_HEADER_BYTES];
    header[..8].copy_from_slice(&kind.magic());
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..20].copy_from_slice(&number.to_le_bytes());
    let checksum = crc32fast::hash(&header[..20]);
    header[20..].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// Writes the frame header into the reserved bytes before the payload.
pub(super) fn seal_frame(frame: &mut [u8], number: u64, offset: u64, synced: u64) {
    let (header, payload) = frame.split_at_mut(FRAME_HEADER_BYTES);
    let length = u32::try_from(payload.len()).expect("the buffer limits the size of a frame");
    header[..4].copy_from_slice(&FRAME_MAGIC);
    header[4..8].copy_from_slice(&length.to_le_bytes());
    header[8..16].copy_from_slice(&synced.to_le_bytes());
    header[16..20].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
    let checksum = header_checksum(&header[..20], number, offset);
    header[20..].copy_from_slice(&checksum.to_le_bytes());
}

fn header_checksum(header: &[u8], number: u64, offset: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(&offset.to_le_bytes());
    hasher.update(header);
    hasher.finalize()
}

struct FrameHeader {
    length: u64,
    synced: u64,
    checksum: u32,
}

impl FrameHeader {
    fn parse(bytes: &[u8; FRAME_HEADER_BYTES], number: u64, offset: u64) -> Option<Self> {
        let is_ours = bytes[..4] == FRAME_MAGIC
            && u32_at(bytes, 20) == header_checksum(&bytes[..20], number, offset);
        is_ours.then(|| Self {
            length: u64::from(u32_at(bytes, 4)),
            synced: u64_at(bytes, 8),
            checksum: u32_at(bytes, 16),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

/// Reads the frames of one file in order.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    input: R,
    number: u64,
    offset: u64,
    length: u64,
}

impl FrameReader<BufReader<File>> {
    /// Opens a file and validates its header.
    pub(super) fn open(path: &Path, kind: FileKind, number: u64) -> Result<Self, FrameError> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Self::new(BufReader::with_capacity(256 * 1024, file), kind, number, length)
    }
}

impl<R: Read> FrameReader<R> {
    /// Reads a file of this length from its beginning: validates its header.
    pub(super) fn new(
        mut input: R,
        kind: FileKind,
        number: u64,
        length: u64,
    ) -> Result<Self, FrameError> {
        if length < FILE_HEADER_BYTES as u64 {
            return Err(FrameError::Incomplete);
        }
        let mut header = [0; FILE_HEADER_BYTES];
        input.read_exact(&mut header)?;
        // After a power failure the length of a new file may be on the disk without its data.
        if length == FILE_HEADER_BYTES as u64 && header == [0; FILE_HEADER_BYTES] {
            return Err(FrameError::Incomplete);
        }
        let damaged = |offset, problem: String| Err(FrameError::Damaged { offset, problem });
        if header[..8] != kind.magic() {
            return damaged(0, "not a Headwater file: wrong magic number".to_owned());
        }
        if u32_at(&header, 20) != crc32fast::hash(&header[..20]) {
            return damaged(0, "file header checksum mismatch".to_owned());
        }
        if u32_at(&header, 8) != VERSION {
            return Err(FrameError::Version(u32_at(&header, 8)));
        }
        if u64_at(&header, 12) != number {
            return damaged(0, format!("its header has file number {}", u64_at(&header, 12)));
        }
        Ok(Self::resume(input, number, FILE_HEADER_BYTES as u64, length))
    }

    /// Reads a file of this length from the frame at `offset` on, where `input` begins.
    pub(super) fn resume(input: R, number: u64, offset: u64, length: u64) -> Self {
        Self { input, number, offset, length }
    }

    /// Offset of the next frame.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the file.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Reads the next frame into `payload`. Returns `false` at the end.
    pub(super) fn next(&mut self, payload: &mut Vec<u8>) -> Result<bool, FrameError> {
        let Some(header) = self.next_header()? else { return Ok(false) };
        payload.resize(header.length as usize, 0);
        self.input.read_exact(payload)?;
        self.end_frame(&header, crc32fast::hash(payload))?;
        Ok(true)
    }

    /// Validates the next frame without keeping it in memory. Returns the length of its payload; `None` at the end.
    pub(super) fn skip(&mut self) -> Result<Option<u64>, FrameError> {
        let Some(header) = self.next_header()? else { return Ok(None) };
        let mut hasher = crc32fast::Hasher::new();
        let mut chunk = [0; 16 * 1024];
        let mut left = header.length as usize;
        while left > 0 {
            let chunk = &mut chunk[..left.min(16 * 1024)];
            self.input.read_exact(chunk)?;
            hasher.update(chunk);
            left -= chunk.len();
        }
        self.end_frame(&header, hasher.finalize())?;
        Ok(Some(header.length))
    }

    /// Reads the header of the next frame, whose payload fits into the file. Returns `None` at the end.
    fn next_header(&mut self) -> Result<Option<FrameHeader>, FrameError> {
        let left = self.length - self.offset;
        if left == 0 {
            return Ok(None);
        }
        if left < FRAME_HEADER_BYTES as u64 {
            return Err(self.damaged("the file ends within a frame header"));
        }
        let mut header = [0; FRAME_HEADER_BYTES];
        self.input.read_exact(&mut header)?;
        let Some(header) = FrameHeader::parse(&header, self.number, self.offset) else {
            return Err(self.damaged("invalid frame header"));
        };
        // Checked before memory is allocated.
        if header.length > left - FRAME_HEADER_BYTES as u64 {
            return Err(self.damaged("the file ends within a frame"));
        }
        if header.length > FRAME_BYTES_MAX as u64 {
            return Err(self.damaged("frame length exceeds the limit"));
        }
        Ok(Some(header))
    }

    fn end_frame(&mut self, header: &FrameHeader, checksum: u32) -> Result<(), FrameError> {
        if checksum != header.checksum {
            return Err(self.damaged("frame checksum mismatch"));
        }
        self.offset += FRAME_HEADER_BYTES as u64 + header.length;
        Ok(())
    }

    fn damaged(&self, problem: &str) -> FrameError {
        FrameError::Damaged { offset: self.offset, problem: problem.to_owned() }
    }
}

impl<R: Read + Seek> FrameReader<R> {
    /// Searches after a damaged offset for a frame that declares that offset synced. Returns the frame's offset.
    pub(super) fn synced_evidence(mut self) -> io::Result<Option<u64>> {
        const STEP: usize = 1024 * 1024;
        let damaged_at = self.offset;
        let mut offset = damaged_at + 1;
        let mut window = Vec::new();
        while offset + FRAME_HEADER_BYTES as u64 <= self.length {
            window.clear();
            self.input.seek(SeekFrom::Start(offset))?;
            self.input
                .by_ref()
                .take((STEP + FRAME_HEADER_BYTES) as u64)
                .read_to_end(&mut window)?;
            let candidates = window.windows(FRAME_HEADER_BYTES).zip(offset..);
            for (bytes, at) in candidates.filter(|(bytes, _)| bytes[..4] == FRAME_MAGIC) {
                let header = std::array::from_fn(|index| bytes[index]);
                if FrameHeader::parse(&header, self.number, at)
                    .is_some_and(|header| header.synced > damaged_at)
                {
                    return Ok(Some(at));
                }
            }
            offset += STEP as u64;
        }
        Ok(None)
    }
}
