//! Parses RESP replies in place.
//!
//! There is no intermediate tree of values: a scanner finds the end of the replies, then a cursor walks over the bytes once.
//! Guarantees: any input is a reply or an error, never a panic; no buffer grows without a limit.

use std::ops::Range;

use bytes::Bytes;

use super::error::{ReplyError, ServerError};
use crate::entry::{EntryId, EntrySize, Fields, count, next_text};

/// Maximum bytes of all replies to one request.
const REPLIES_BYTES_MAX: usize = 2 * 1024 * 1024 * 1024;

/// Maximum bytes of a line: an error text or a number.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of values in all replies to one request.
const VALUES_MAX: usize = 64 * 1024 * 1024;

/// Entries share a block of memory of at most this size: the reply if it is that small, otherwise a copy of a part of it. One entry
/// does not keep a whole batch alive.
pub(super) const SHARED_BYTES_MAX: usize = 64 * 1024;

/// A larger entry of a large reply is copied alone. The end of a block that does not hold a whole entry is copied twice, so
/// entries must be small beside a block.
const SHARED_ENTRY_BYTES_MAX: usize = SHARED_BYTES_MAX / 16;

/// The bytes are not valid RESP.
#[derive(Debug, thiserror::Error)]
#[error("malformed reply: {0}")]
pub(super) struct MalformedReply(&'static str);

/// Finds the end of replies incrementally; no byte is scanned twice.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    at: usize,
    missing: usize,
    has_errors: bool,
}

impl Scanner {
    /// Starts to scan for this many replies at the start of the buffer.
    pub(super) fn begin(&mut self, replies: usize) {
        *self = Self { at: 0, missing: replies, has_errors: false };
    }

    /// The length of the replies in bytes, once all are complete.
    pub(super) fn scan(&mut self, buffer: &[u8]) -> Result<Option<usize>, MalformedReply> {
        while self.missing > 0 {
            let Some(rest) = buffer.get(self.at..) else { return Ok(None) };
            if let Some((kind, number, end)) = length_prefix(rest) {
                self.at += end;
                self.missing -= 1;
                match kind {
                    LengthPrefix::Bulk => self.at += number + 2,
                    LengthPrefix::Array => self.missing += number,
                }
                self.check()?;
                continue;
            }
            let Some(end) = rest.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n') else {
                if rest.len() >= LINE_BYTES_MAX {
                    return Err(MalformedReply("line too long"));
                }
                return Ok(None);
            };
            let (kind, text) = line(&rest[..=end])?;
            self.at += end + 1;
            self.missing -= 1;
            match kind {
                b'+' | b':' => {}
                b'-' => self.has_errors = true,
                b'$' => {
                    if let Some(bytes) = length(text)? {
                        self.at += bytes + 2;
                    }
                }
                b'*' => self.missing += length(text)?.unwrap_or(0),
                _ => return Err(MalformedReply("unknown value type")),
            }
            self.check()?;
        }
        Ok((self.at <= buffer.len()).then_some(self.at))
    }

    fn check(&self) -> Result<(), MalformedReply> {
        if self.missing > VALUES_MAX {
            return Err(MalformedReply("array length exceeds the limit of 64 Mi values"));
        }
        if self.at > REPLIES_BYTES_MAX {
            return Err(MalformedReply("replies exceed the limit of 2 GiB"));
        }
        Ok(())
    }

    /// The buffer length below which another scan cannot succeed.
    pub(super) fn wanted(&self) -> usize {
        self.at
    }

    /// Whether the scanned replies contain an error.
    pub(super) fn has_errors(&self) -> bool {
        self.has_errors
    }
}

/// Type of a value that starts with a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LengthPrefix {
    Bulk,
    Array,
}

/// Fast path for the header of a bulk string or an array: its type, its length, and where its line ends. `None` for anything
/// else, which takes the slow path.
#[inline]
fn length_prefix(rest: &[u8]) -> Option<(LengthPrefix, usize, usize)> {
    let kind = match rest.first()? {
        b'$' => LengthPrefix::Bulk,
        b'*' => LengthPrefix::Array,
        _ => return None,
    };
    let (number, end) = count(rest)?;
    Some((kind, number, end))
}

fn line(line: &[u8]) -> Result<(u8, &[u8]), MalformedReply> {
    match line {
        [kind, text @ .., b'\r', b'\n'] => Ok((*kind, text)),
        _ => Err(MalformedReply("line without a type or an end")),
    }
}

/// Parses the length in a header; `None` for nil.
fn length(text: &[u8]) -> Result<Option<usize>, MalformedReply> {
    match number(text) {
        Some(-1) => Ok(None),
        Some(length) if (0..=REPLIES_BYTES_MAX as i64).contains(&length) => {
            Ok(Some(length as usize))
        }
        _ => Err(MalformedReply("invalid length")),
    }
}

fn number(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    if digits.is_empty() {
        return None;
    }
    let magnitude = digits.iter().try_fold(0_i64, |sum, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(i64::from(digit))
    })?;
    Some(if negative { -magnitude } else { magnitude })
}

/// The complete replies to one request.
#[derive(Clone, Debug)]
pub(super) struct RespReplies {
    bytes: Bytes,
    has_errors: bool,
}

impl RespReplies {
    pub(super) fn new(bytes: Bytes, has_errors: bool) -> Self {
        Self { bytes, has_errors }
    }

    /// Concatenates the replies to several requests.
    pub(super) fn joined(parts: &[Self]) -> Self {
        let bytes: Vec<&[u8]> = parts.iter().map(|part| part.bytes.as_ref()).collect();
        Self::new(bytes.concat().into(), parts.iter().any(Self::may_contain_errors))
    }

    /// Whether they may contain an error reply.
    pub(super) fn may_contain_errors(&self) -> bool {
        self.has_errors
    }

    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor { source: &self.bytes, at: 0, block: Bytes::new(), block_start: 0 }
    }

    /// Splits into single replies, each with its error if it is one.
    pub(super) fn split(
        &self,
        count: usize,
    ) -> Result<Vec<(Bytes, Option<ServerError>)>, ReplyError> {
        let mut cursor = self.cursor();
        (0..count)
            .map(|_| {
                let start = cursor.at;
                let error = match cursor.value()? {
                    RespValue::Error(text) => Some(ServerError::new(text)),
                    RespValue::Array(values) => {
                        cursor.skip(values)?;
                        None
                    }
                    _ => None,
                };
                Ok((self.bytes.slice(start..cursor.at), error))
            })
            .collect()
    }
}

/// One value, or the header of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RespValue<'a> {
    Nil,
    Number(i64),
    Text(&'a [u8]),
    Error(&'a [u8]),
    Array(usize),
}

/// Reads values from replies.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    source: &'a Bytes,
    at: usize,
    /// A copy of a part of a large source, and where it starts there.
    block: Bytes,
    block_start: usize,
}

impl<'a> Cursor<'a> {
    /// The next value of any type.
    pub(super) fn value(&mut self) -> Result<RespValue<'a>, ReplyError> {
        let short = || ReplyError::unexpected("incomplete reply");
        let rest = self.source.get(self.at..).ok_or_else(short)?;
        if let Some((kind, number, end)) = length_prefix(rest) {
            self.at += end;
            if kind == LengthPrefix::Array {
                return Ok(RespValue::Array(number));
            }
            self.at += number + 2;
            return rest.get(end..end + number).map(RespValue::Text).ok_or_else(short);
        }
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or_else(short)?;
        let (kind, text) = line(&rest[..=end]).map_err(ReplyError::unexpected)?;
        self.at += end + 1;
        match kind {
            b'+' => Ok(RespValue::Text(text)),
            b'-' => Ok(RespValue::Error(text)),
            b':' => number(text)
                .map(RespValue::Number)
                .ok_or_else(|| ReplyError::unexpected("expected a number")),
            b'*' => Ok(length(text)
                .map_err(ReplyError::unexpected)?
                .map_or(RespValue::Nil, RespValue::Array)),
            b'$' => match length(text).map_err(ReplyError::unexpected)? {
                None => Ok(RespValue::Nil),
                Some(bytes) => {
                    let start = self.at;
                    self.at += bytes + 2;
                    let text = self.source.get(start..start + bytes).ok_or_else(short)?;
                    Ok(RespValue::Text(text))
                }
            },
            _ => Err(ReplyError::unexpected("unknown value type")),
        }
    }

    /// The number of values in an array; `None` for nil.
    pub(super) fn array_or_nil(&mut self) -> Result<Option<usize>, ReplyError> {
        match self.value()? {
            RespValue::Array(values) => Ok(Some(values)),
            RespValue::Nil => Ok(None),
            other => Err(unexpected("an array", other)),
        }
    }

    pub(super) fn array(&mut self) -> Result<usize, ReplyError> {
        self.array_or_nil()?.ok_or_else(|| unexpected("an array", RespValue::Nil))
    }

    /// An array that must have this many values.
    pub(super) fn array_of(&mut self, values: usize) -> Result<(), ReplyError> {
        match self.array()? {
            found if found == values => Ok(()),
            found => Err(ReplyError::unexpected(format!("expected {values} values, got {found}"))),
        }
    }

    /// Reads up to the replies of the `commands` commands in a transaction, which follow. Fails with the reason if the
    /// transaction had no effect.
    pub(super) fn transaction(&mut self, commands: usize) -> Result<(), ReplyError> {
        let mut rejection = None;
        for _ in 0..=commands {
            if let RespValue::Error(text) = self.value()? {
                rejection.get_or_insert_with(|| ReplyError::Server(ServerError::new(text)));
            }
        }
        self.array_of(commands).map_err(|error| rejection.unwrap_or(error))
    }

    pub(super) fn number(&mut self) -> Result<i64, ReplyError> {
        match self.value()? {
            RespValue::Number(number) => Ok(number),
            other => Err(unexpected("a number", other)),
        }
    }

    /// A number that cannot be negative.
    pub(super) fn count(&mut self) -> Result<u64, ReplyError> {
        let number = self.number()?;
        u64::try_from(number)
            .map_err(|_| ReplyError::unexpected(format!("expected a count, got {number}")))
    }

    pub(super) fn text_or_nil(&mut self) -> Result<Option<&'a [u8]>, ReplyError> {
        match self.value()? {
            RespValue::Text(text) => Ok(Some(text)),
            RespValue::Nil => Ok(None),
            other => Err(unexpected("text", other)),
        }
    }

    pub(super) fn text(&mut self) -> Result<&'a [u8], ReplyError> {
        self.text_or_nil()?.ok_or_else(|| unexpected("text", RespValue::Nil))
    }

    pub(super) fn string(&mut self) -> Result<String, ReplyError> {
        Ok(String::from_utf8_lossy(self.text()?).into_owned())
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, ReplyError> {
        Ok(Bytes::copy_from_slice(self.text()?))
    }

    /// A number written as text.
    pub(super) fn digits(&mut self) -> Result<u64, ReplyError> {
        let text = self.text()?;
        parse_digits(text).ok_or_else(|| unexpected("digits", RespValue::Text(text)))
    }

    pub(super) fn id(&mut self) -> Result<EntryId, ReplyError> {
        let text = self.text()?;
        parse_id(text).ok_or_else(|| unexpected("an entry id", RespValue::Text(text)))
    }

    /// An array of equal items; nil is an empty array.
    pub(super) fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, ReplyError>,
    ) -> Result<Vec<T>, ReplyError> {
        (0..self.array_or_nil()?.unwrap_or(0)).map(|_| read(self)).collect()
    }

    /// Skips this many values, including nested ones.
    pub(super) fn skip(&mut self, values: usize) -> Result<(), ReplyError> {
        let mut missing = values;
        while missing > 0 {
            missing -= 1;
            if let RespValue::Array(values) = self.value()? {
                missing += values;
            }
        }
        Ok(())
    }

    /// An entry; its fields are `None` if it was deleted meanwhile.
    pub(super) fn entry(&mut self) -> Result<(EntryId, Option<Fields>), ReplyError> {
        self.array_of(2)?;
        let id = self.id()?;
        let Some(values) = self.array_or_nil()? else { return Ok((id, None)) };
        if values % 2 != 0 {
            return Err(ReplyError::unexpected("field without a value"));
        }
        let start = self.at;
        let (end, bytes) = self
            .end_of_texts(values)
            .ok_or_else(|| ReplyError::unexpected("a field is not a bulk string"))?;
        let size = EntrySize { fields: values / 2, bytes };
        self.at = end;
        Ok((id, Some(Fields::packed(self.share(start..end), size))))
    }

    /// These bytes in memory that is shared with others, but never with a large reply.
    fn share(&mut self, range: Range<usize>) -> Bytes {
        if self.source.len() <= SHARED_BYTES_MAX {
            return self.source.slice(range);
        }
        if range.len() > SHARED_ENTRY_BYTES_MAX {
            return Bytes::copy_from_slice(&self.source[range]);
        }
        if range.end > self.block_start + self.block.len() {
            let end = self.source.len().min(range.start + SHARED_BYTES_MAX);
            self.block = Bytes::copy_from_slice(&self.source[range.start..end]);
            self.block_start = range.start;
        }
        self.block.slice(range.start - self.block_start..range.end - self.block_start)
    }

    /// End position and total bytes of the next `texts` bulk strings; `None` if there is any other value among them.
    fn end_of_texts(&self, texts: usize) -> Option<(usize, usize)> {
        let (mut end, mut bytes) = (self.at, 0);
        for _ in 0..texts {
            let (text, after) = next_text(self.source.get(end..)?)?;
            bytes += text.len();
            end += after;
        }
        (end <= self.source.len()).then_some((end, bytes))
    }
}

pub(super) fn parse_digits(text: &[u8]) -> Option<u64> {
    /// Number of digits that always fit into 64 bits.
    const FITTING: usize = 19;
    let digit = |byte: &u8| byte.checked_sub(b'0').filter(|digit| *digit < 10).map(u64::from);
    match text.len() {
        0 => None,
        1..=FITTING => text.iter().try_fold(0, |sum, byte| Some(sum * 10 + digit(byte)?)),
        _ => {
            text.iter().try_fold(0_u64, |sum, byte| sum.checked_mul(10)?.checked_add(digit(byte)?))
        }
    }
}

pub(super) fn parse_id(text: &[u8]) -> Option<EntryId> {
    let dash = text.iter().position(|byte| *byte == b'-')?;
    Some(EntryId { ms: parse_digits(&text[..dash])?, seq: parse_digits(&text[dash + 1..])? })
}

fn unexpected(wanted: &str, found: RespValue<'_>) -> ReplyError {
    match found {
        RespValue::Error(text) => ReplyError::Server(ServerError::new(text)),
        RespValue::Nil => ReplyError::unexpected(format!("expected {wanted}, got nil")),
        RespValue::Number(number) => {
            ReplyError::unexpected(format!("expected {wanted}, got {number}"))
        }
        RespValue::Array(values) => {
            ReplyError::unexpected(format!("expected {wanted}, got an array of {values}"))
        }
        RespValue::Text(text) => {
            let text: String = String::from_utf8_lossy(text).chars().take(64).collect();
            ReplyError::unexpected(format!("expected {wanted}, got {text:?}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replies(text: &[u8]) -> RespReplies {
        RespReplies::new(Bytes::copy_from_slice(text), true)
    }

    const READ: &[u8] =
        b"*1\r\n*2\r\n$6\r\norders\r\n*2\r\n*2\r\n$3\r\n1-2\r\n*2\r\n$1\r\na\r\n$2\r\n\r\n\r\n\
        *2\r\n$3\r\n1-3\r\n*-1\r\n";

    #[test]
    fn an_entry_is_parsed_in_place() {
        let replies = replies(READ);
        let mut cursor = replies.cursor();
        assert_eq!(cursor.array().unwrap(), 1);
        assert_eq!(cursor.array().unwrap(), 2);
        assert_eq!(cursor.text().unwrap(), b"orders");
        assert_eq!(cursor.array().unwrap(), 2);
        let fields = Fields::new([("a", "\r\n")]);
        assert_eq!(cursor.entry().unwrap(), (EntryId::new(1, 2), Some(fields)));
        assert_eq!(cursor.entry().unwrap(), (EntryId::new(1, 3), None));
        assert!(cursor.value().is_err(), "there is nothing more");
    }

    #[test]
    fn an_entry_of_a_large_reply_is_copied() {
        let value = "x".repeat(SHARED_BYTES_MAX);
        let text = format!("*2\r\n$3\r\n1-2\r\n*2\r\n$1\r\na\r\n${}\r\n{value}\r\n", value.len());
        let (_, fields) = replies(text.as_bytes()).cursor().entry().unwrap();
        assert_eq!(fields, Some(Fields::new([("a", value)])));
    }

    #[test]
    fn entries_of_a_large_reply_share_blocks() {
        // Small ones, and at times one that is copied alone.
        let value = |n: usize| "x".repeat(if n % 100 == 50 { SHARED_ENTRY_BYTES_MAX } else { n });
        let mut text = b"*1000\r\n".to_vec();
        for n in 0..1000 {
            let value = value(n);
            let id = format!("1-{n}");
            let header = format!("*2\r\n${}\r\n{id}\r\n*2\r\n$1\r\na\r\n", id.len());
            text.extend_from_slice(format!("{header}${}\r\n{value}\r\n", value.len()).as_bytes());
        }
        let replies = replies(&text);
        let entries = replies.cursor().list(Cursor::entry).unwrap();
        // The address of the first value in each block.
        let mut blocks: Vec<usize> = Vec::new();
        for (n, (id, fields)) in entries.iter().enumerate() {
            let fields = fields.as_ref().unwrap();
            assert_eq!((*id, fields), (EntryId::new(1, n as u64), &Fields::new([("a", value(n))])));
            let value = fields.get("a").unwrap().as_ptr();
            assert!(!replies.bytes.as_ptr_range().contains(&value), "it keeps the reply alive");
            let value = value as usize;
            if !blocks
                .last()
                .is_some_and(|first| (*first..first + SHARED_BYTES_MAX).contains(&value))
            {
                blocks.push(value);
            }
        }
        assert!(blocks.len() < 100, "{} blocks", blocks.len());
    }

    #[test]
    fn an_error_among_replies_is_found_and_split_from_the_others() {
        let text = b"$1\r\na\r\n-ERR no\r\n*1\r\n:7\r\n";
        let mut scanner = Scanner::default();
        scanner.begin(3);
        assert_eq!(scanner.scan(text).unwrap(), Some(text.len()));
        assert!(scanner.has_errors());
        let parts = replies(text).split(3).unwrap();
        assert_eq!(parts[0], (Bytes::from_static(b"$1\r\na\r\n"), None));
        assert_eq!(parts[1].1.as_ref().map(ServerError::code), Some("ERR"));
        assert_eq!(parts[2], (Bytes::from_static(b"*1\r\n:7\r\n"), None));
    }

    #[test]
    fn malformed_replies_are_rejected() {
        for bad in [
            &b"x\r\n"[..],
            b"\r\n",
            b"\n",
            b"$x\r\n",
            b"$-2\r\n",
            b"*99999999999\r\n",
            b"$9999999999\r\n",
        ] {
            let mut scanner = Scanner::default();
            scanner.begin(1);
            assert!(scanner.scan(bad).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
        let mut scanner = Scanner::default();
        scanner.begin(1);
        assert!(scanner.scan(&vec![b'+'; LINE_BYTES_MAX]).is_err(), "a line has an end");
    }

    proptest! {
            #[test]
    fn replies_are_found_in_any_fragmentation(cuts in prop::collection::vec(0..READ.len(), 0..5)) {
                let mut scanner = Scanner::default();
                scanner.begin(1);
                let mut cuts = cuts;
                cuts.sort_unstable();
                for cut in cuts {
                    prop_assert_eq!(scanner.scan(&READ[..cut]).unwrap(), None);
                }
                prop_assert_eq!(scanner.scan(READ).unwrap(), Some(READ.len()));
            }

            #[test]
    fn the_fast_path_and_the_slow_path_agree(
                text in prop_oneof![
                    "[$*][-0-9]{0,12}\r?\n?".prop_map(String::into_bytes),
                    prop::collection::vec(any::<u8>(), 0..12),
                ],
            ) {
                if let Some((kind, number, end)) = length_prefix(&text) {
                    let (sign, digits) = line(&text[..end]).unwrap();
                    prop_assert_eq!(sign, if kind == LengthPrefix::Bulk { b'$' } else { b'*' });
                    prop_assert_eq!(length(digits).unwrap(), Some(number));
                }
            }

            #[test]
    fn no_input_causes_a_panic(
                mutations in prop::collection::vec((0..READ.len(), any::<u8>()), 0..6),
                random in prop::collection::vec(any::<u8>(), 0..64),
            ) {
                let mut text = READ.to_vec();
                for (at, byte) in mutations {
                    text[at] = byte;
                }
                for text in [text, random] {
                    let mut scanner = Scanner::default();
                    scanner.begin(1);
                    if let Ok(Some(length)) = scanner.scan(&text) {
                        let replies = replies(&text[..length]);
                        let _ = replies.split(1);
                        let mut cursor = replies.cursor();
                        for _ in 0..4 {
                            let _ = cursor.clone().entry();
                            let _ = cursor.clone().skip(2);
                            let _ = cursor.value();
                        }
                    }
                }
            }
        }
}
