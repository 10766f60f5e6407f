//! Binary format of a spool file.
//!
//! A file is a header and records. Header: magic, length of the owner's name, the name, checksum. Record: length of the
//! body, checksum of the body, the body. Numbers are little-endian. A body is an event, or a marker with the number of
//! events from the start that are in their streams.

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::limits::ENTRY_BYTES_MAX;
use headwater_stream::{Fields, StreamName};

use crate::name::EventId;

const MAGIC: &[u8; 8] = b"HWSPOOL1";
const EVENT: u8 = 1;
const REPLAYED: u8 = 2;
/// Bytes before a body.
pub(super) const PREAMBLE: usize = 8;
/// Largest body: an entry with a length before each part, the stream and the id.
const BODY_MAX: usize = ENTRY_BYTES_MAX + 16 * 1024;

/// An event in the spool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpooledEvent {
    pub(crate) stream: StreamName,
    pub(crate) event_id: EventId,
    pub(crate) fields: Fields,
    /// Whether it was sent before and may be in its stream.
    pub(crate) attempted: bool,
    pub(crate) spooled_at: Timestamp,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Record {
    Event(SpooledEvent),
    /// This many events from the start of the file are in their streams.
    Replayed(u64),
}

/// Result of reading at an offset.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ScanResult {
    Record {
        record: Record,
        /// Offset of the next record.
        next: usize,
    },
    /// End of the file.
    End,
    /// The last write was torn here.
    Torn,
    /// Not a valid record, and more data follows.
    Damaged(String),
}

pub(super) fn head(owner: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((owner.len() as u32).to_le_bytes());
    bytes.extend(owner.as_bytes());
    let checksum = crc32fast::hash(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// The owner's name and the offset of the first record; `None` if the header is invalid.
pub(super) fn read_head(bytes: &[u8]) -> Option<(String, usize)> {
    let owner_bytes = number(bytes.get(8..12)?) as usize;
    let end = 12usize.checked_add(owner_bytes)?;
    let checksum = bytes.get(end..end.checked_add(4)?)?;
    let is_head = bytes.starts_with(MAGIC) && number(checksum) == crc32fast::hash(&bytes[..end]);
    let owner = std::str::from_utf8(&bytes[12..end]).ok()?;
    is_head.then(|| (owner.to_owned(), end + 4))
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; PREAMBLE];
        match self {
            Self::Event(event) => {
                bytes.push(EVENT);
                bytes.push(u8::from(event.attempted));
                bytes.extend(event.spooled_at.as_millis().to_le_bytes());
                put(&mut bytes, event.stream.as_str().as_bytes());
                put(&mut bytes, event.event_id.as_str().as_bytes());
                bytes.extend((event.fields.len() as u32).to_le_bytes());
                for (name, value) in &event.fields {
                    put(&mut bytes, name);
                    put(&mut bytes, value);
                }
            }
            Self::Replayed(count) => {
                bytes.push(REPLAYED);
                bytes.extend(count.to_le_bytes());
            }
        }
        let body_bytes = (bytes.len() - PREAMBLE) as u32;
        let checksum = crc32fast::hash(&bytes[PREAMBLE..]);
        bytes[..4].copy_from_slice(&body_bytes.to_le_bytes());
        bytes[4..PREAMBLE].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads the record at `at`.
    pub(super) fn read_at(bytes: &[u8], at: usize) -> ScanResult {
        let rest = &bytes[at..];
        if rest.is_empty() {
            return ScanResult::End;
        }
        // After a power loss a file may end in zeros.
        if rest.len() < PREAMBLE || rest.iter().all(|byte| *byte == 0) {
            return ScanResult::Torn;
        }
        let body_bytes = number(&rest[..4]) as usize;
        if body_bytes == 0 || body_bytes > BODY_MAX {
            return ScanResult::Damaged(format!("invalid record length of {body_bytes} bytes"));
        }
        let Some(body) = rest.get(PREAMBLE..PREAMBLE + body_bytes) else { return ScanResult::Torn };
        let next = at + PREAMBLE + body_bytes;
        if crc32fast::hash(body) != number(&rest[4..PREAMBLE]) {
            let is_last = next == bytes.len() || bytes[next..].iter().all(|byte| *byte == 0);
            return if is_last {
                ScanResult::Torn
            } else {
                ScanResult::Damaged("checksum mismatch".into())
            };
        }
        match Self::decode(body) {
            Some(record) => ScanResult::Record { record, next },
            None => ScanResult::Damaged("unknown record type".into()),
        }
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let (kind, mut rest) = body.split_first()?;
        match *kind {
            EVENT => {
                let attempted = take(&mut rest, 1)?[0] != 0;
                let spooled_at = u64::from_le_bytes(take(&mut rest, 8)?.try_into().ok()?);
                let stream = StreamName::new(text(&mut rest)?).ok()?;
                let event_id = EventId::new(text(&mut rest)?).ok()?;
                let count = number(take(&mut rest, 4)?);
                let mut pairs = Vec::new();
                for _ in 0..count {
                    let name = Bytes::copy_from_slice(part(&mut rest)?);
                    pairs.push((name, Bytes::copy_from_slice(part(&mut rest)?)));
                }
                let fields = Fields::new(pairs);
                let spooled_at = Timestamp::from_millis(spooled_at);
                let event = SpooledEvent { stream, event_id, fields, attempted, spooled_at };
                rest.is_empty().then_some(Self::Event(event))
            }
            REPLAYED => Some(Self::Replayed(u64::from_le_bytes(rest.try_into().ok()?))),
            _ => None,
        }
    }
}

fn put(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.extend((part.len() as u32).to_le_bytes());
    bytes.extend(part);
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(count)?;
    *rest = left;
    Some(taken)
}

fn part<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let bytes = number(take(rest, 4)?) as usize;
    take(rest, bytes)
}

fn text<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    std::str::from_utf8(part(rest)?).ok()
}

/// Four bytes as a number.
fn number(bytes: &[u8]) -> u32 {
    bytes.try_into().map_or(0, u32::from_le_bytes)
}
