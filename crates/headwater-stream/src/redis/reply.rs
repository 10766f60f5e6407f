//! Replies as they come from a server: found in a buffer, then read where they lie.
//!
//! There is no tree of values in between: a cursor walks over the bytes once and makes what the caller asked for.
//! Promises: whatever a server sends is an answer or an error, never a panic; no buffer grows without a limit.

use bytes::Bytes;

use super::error::{Failure, Refusal};
use crate::entry::{EntryId, EntrySize, Fields, count, next_text};
use crate::limits::FIELDS_MAX;

/// Bytes of all replies to one request.
const REPLIES_BYTES_MAX: usize = 2 * 1024 * 1024 * 1024;

/// Bytes of a line: an error text or a number.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Values in all replies to one request.
const VALUES_MAX: usize = 64 * 1024 * 1024;

/// Entries of a reply this small share its memory; those of larger ones are copied out, so that one entry in hand
/// does not keep a whole batch alive.
pub(super) const SHARED_BYTES_MAX: usize = 64 * 1024;

/// The bytes are no replies.
#[derive(Debug, thiserror::Error)]
#[error("the server's bytes are no reply: {0}")]
pub(super) struct Malformed(&'static str);

/// Finds where replies end, over as many reads as it takes, and looks at no byte twice.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    at: usize,
    missing: usize,
    refusals: bool,
}

impl Scanner {
    /// Begins to look for this many replies at the start of the buffer.
    pub(super) fn begin(&mut self, replies: usize) {
        *self = Self { at: 0, missing: replies, refusals: false };
    }

    /// How many bytes the replies take, once they are all there.
    pub(super) fn scan(&mut self, buffer: &[u8]) -> Result<Option<usize>, Malformed> {
        while self.missing > 0 {
            let Some(rest) = buffer.get(self.at..) else { return Ok(None) };
            if let Some((kind, number, end)) = counted(rest) {
                self.at += end;
                self.missing -= 1;
                match kind {
                    Counted::Text => self.at += number + 2,
                    Counted::Array => self.missing += number,
                }
                self.check()?;
                continue;
            }
            let Some(end) = rest.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n') else {
                if rest.len() >= LINE_BYTES_MAX {
                    return Err(Malformed("a line without an end"));
                }
                return Ok(None);
            };
            let (kind, text) = line(&rest[..=end])?;
            self.at += end + 1;
            self.missing -= 1;
            match kind {
                b'+' | b':' => {}
                b'-' => self.refusals = true,
                b'$' => {
                    if let Some(bytes) = length(text)? {
                        self.at += bytes + 2;
                    }
                }
                b'*' => self.missing += length(text)?.unwrap_or(0),
                _ => return Err(Malformed("an unknown kind of value")),
            }
            self.check()?;
        }
        Ok((self.at <= buffer.len()).then_some(self.at))
    }

    fn check(&self) -> Result<(), Malformed> {
        if self.missing > VALUES_MAX {
            return Err(Malformed("an array without measure"));
        }
        if self.at > REPLIES_BYTES_MAX {
            return Err(Malformed("replies of more than 2 GiB"));
        }
        Ok(())
    }

    /// Up to which length the buffer must grow before it is worth scanning again.
    pub(super) fn wanted(&self) -> usize {
        self.at
    }

    /// Whether an error was among what was scanned.
    pub(super) fn refusals(&self) -> bool {
        self.refusals
    }
}

/// What a value is that says how much follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Text,
    Array,
}

/// The head of a text or an array that is there and in order: how much follows, and where its line ends. Nearly all
/// values are such, so they take this short way; whatever is otherwise takes the long one.
#[inline]
fn counted(rest: &[u8]) -> Option<(Counted, usize, usize)> {
    let kind = match rest.first()? {
        b'$' => Counted::Text,
        b'*' => Counted::Array,
        _ => return None,
    };
    let (number, end) = count(rest)?;
    Some((kind, number, end))
}

fn line(line: &[u8]) -> Result<(u8, &[u8]), Malformed> {
    match line {
        [kind, text @ .., b'\r', b'\n'] => Ok((*kind, text)),
        _ => Err(Malformed("a line without a kind or an end")),
    }
}

/// The length in a header; `None` for nil.
fn length(text: &[u8]) -> Result<Option<usize>, Malformed> {
    match number(text) {
        Some(-1) => Ok(None),
        Some(length) if (0..=REPLIES_BYTES_MAX as i64).contains(&length) => {
            Ok(Some(length as usize))
        }
        _ => Err(Malformed("a length that is none")),
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

/// The replies to one request, complete, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Replies {
    bytes: Bytes,
    refusals: bool,
}

impl Replies {
    pub(super) fn new(bytes: Bytes, refusals: bool) -> Self {
        Self { bytes, refusals }
    }

    /// The replies to several requests as those to one.
    pub(super) fn joined(parts: &[Self]) -> Self {
        let bytes: Vec<&[u8]> = parts.iter().map(|part| part.bytes.as_ref()).collect();
        Self::new(bytes.concat().into(), parts.iter().any(Self::may_refuse))
    }

    /// Whether an error may be among them.
    pub(super) fn may_refuse(&self) -> bool {
        self.refusals
    }

    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor { source: &self.bytes, at: 0 }
    }

    /// Each reply by itself, with the error it is, if it is one.
    pub(super) fn split(&self, count: usize) -> Result<Vec<(Bytes, Option<Refusal>)>, Failure> {
        let mut cursor = self.cursor();
        (0..count)
            .map(|_| {
                let start = cursor.at;
                let refusal = match cursor.value()? {
                    Value::Error(text) => Some(Refusal::new(text)),
                    Value::Array(values) => {
                        cursor.skip(values)?;
                        None
                    }
                    _ => None,
                };
                Ok((self.bytes.slice(start..cursor.at), refusal))
            })
            .collect()
    }
}

/// One value, or the head of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    Nil,
    Number(i64),
    Text(&'a [u8]),
    Error(&'a [u8]),
    Array(usize),
}

/// Walks over replies.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    source: &'a Bytes,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// The next value, whatever it is.
    pub(super) fn value(&mut self) -> Result<Value<'a>, Failure> {
        let short = || Failure::shape("a reply that ends too early");
        let rest = self.source.get(self.at..).ok_or_else(short)?;
        if let Some((kind, number, end)) = counted(rest) {
            self.at += end;
            if kind == Counted::Array {
                return Ok(Value::Array(number));
            }
            self.at += number + 2;
            return rest.get(end..end + number).map(Value::Text).ok_or_else(short);
        }
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or_else(short)?;
        let (kind, text) = line(&rest[..=end]).map_err(Failure::shape)?;
        self.at += end + 1;
        match kind {
            b'+' => Ok(Value::Text(text)),
            b'-' => Ok(Value::Error(text)),
            b':' => number(text).map(Value::Number).ok_or_else(|| Failure::shape("no number")),
            b'*' => Ok(length(text).map_err(Failure::shape)?.map_or(Value::Nil, Value::Array)),
            b'$' => match length(text).map_err(Failure::shape)? {
                None => Ok(Value::Nil),
                Some(bytes) => {
                    let start = self.at;
                    self.at += bytes + 2;
                    let text = self.source.get(start..start + bytes).ok_or_else(short)?;
                    Ok(Value::Text(text))
                }
            },
            _ => Err(Failure::shape("an unknown kind of value")),
        }
    }

    /// The number of values in an array; `None` for nil.
    pub(super) fn array_or_nil(&mut self) -> Result<Option<usize>, Failure> {
        match self.value()? {
            Value::Array(values) => Ok(Some(values)),
            Value::Nil => Ok(None),
            other => Err(unexpected("an array", other)),
        }
    }

    pub(super) fn array(&mut self) -> Result<usize, Failure> {
        self.array_or_nil()?.ok_or_else(|| unexpected("an array", Value::Nil))
    }

    /// An array that must have this many values.
    pub(super) fn array_of(&mut self, values: usize) -> Result<(), Failure> {
        match self.array()? {
            found if found == values => Ok(()),
            found => Err(Failure::shape(format!("{found} values instead of {values}"))),
        }
    }

    pub(super) fn number(&mut self) -> Result<i64, Failure> {
        match self.value()? {
            Value::Number(number) => Ok(number),
            other => Err(unexpected("a number", other)),
        }
    }

    /// A number that cannot be negative.
    pub(super) fn count(&mut self) -> Result<u64, Failure> {
        let number = self.number()?;
        u64::try_from(number).map_err(|_| Failure::shape(format!("{number} instead of a count")))
    }

    pub(super) fn text_or_nil(&mut self) -> Result<Option<&'a [u8]>, Failure> {
        match self.value()? {
            Value::Text(text) => Ok(Some(text)),
            Value::Nil => Ok(None),
            other => Err(unexpected("text", other)),
        }
    }

    pub(super) fn text(&mut self) -> Result<&'a [u8], Failure> {
        self.text_or_nil()?.ok_or_else(|| unexpected("text", Value::Nil))
    }

    pub(super) fn string(&mut self) -> Result<String, Failure> {
        Ok(String::from_utf8_lossy(self.text()?).into_owned())
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, Failure> {
        Ok(Bytes::copy_from_slice(self.text()?))
    }

    /// A number written as text.
    pub(super) fn digits(&mut self) -> Result<u64, Failure> {
        let text = self.text()?;
        parse_digits(text).ok_or_else(|| unexpected("digits", Value::Text(text)))
    }

    pub(super) fn id(&mut self) -> Result<EntryId, Failure> {
        let text = self.text()?;
        parse_id(text).ok_or_else(|| unexpected("an entry id", Value::Text(text)))
    }

    /// Passes over this many values with all that is in them.
    pub(super) fn skip(&mut self, values: usize) -> Result<(), Failure> {
        let mut missing = values;
        while missing > 0 {
            missing -= 1;
            if let Value::Array(values) = self.value()? {
                missing += values;
            }
        }
        Ok(())
    }

    /// An entry; without fields if it was deleted meanwhile.
    pub(super) fn entry(&mut self) -> Result<(EntryId, Option<Fields>), Failure> {
        self.array_of(2)?;
        let id = self.id()?;
        let Some(values) = self.array_or_nil()? else { return Ok((id, None)) };
        if values % 2 != 0 {
            return Err(Failure::shape("a field without a value"));
        }
        let start = self.at;
        if let Some((end, bytes)) = self.end_of_texts(values) {
            let size = EntrySize { fields: values / 2, bytes };
            self.at = end;
            let bytes = if self.source.len() <= SHARED_BYTES_MAX {
                self.source.slice(start..end)
            } else {
                Bytes::copy_from_slice(&self.source[start..end])
            };
            return Ok((id, Some(Fields::packed(bytes, size))));
        }
        let mut ranges = Vec::with_capacity((values / 2).min(FIELDS_MAX));
        for _ in 0..values / 2 {
            ranges.push((self.range()?, self.range()?));
        }
        let (memory, start) = if self.source.len() <= SHARED_BYTES_MAX {
            (self.source.clone(), 0)
        } else {
            (Bytes::copy_from_slice(&self.source[start..self.at]), start)
        };
        let take = |range: (usize, usize)| memory.slice(range.0 - start..range.1 - start);
        let pairs = ranges.into_iter().map(|(name, value)| (take(name), take(value)));
        Ok((id, Some(Fields::new(pairs))))
    }

    /// Where so many counted texts end, and how many bytes they are, if that is what comes next.
    fn end_of_texts(&self, texts: usize) -> Option<(usize, usize)> {
        let (mut end, mut bytes) = (self.at, 0);
        for _ in 0..texts {
            let (text, after) = next_text(self.source.get(end..)?)?;
            bytes += text.len();
            end += after;
        }
        (end <= self.source.len()).then_some((end, bytes))
    }

    /// Where the bytes of the next text lie.
    fn range(&mut self) -> Result<(usize, usize), Failure> {
        let text = self.text()?;
        let end = self.at - 2;
        // A text that came as a line instead of counted bytes ends before its own line end, too.
        Ok((end - text.len(), end))
    }
}

pub(super) fn parse_digits(text: &[u8]) -> Option<u64> {
    /// Digits of a number that fits whatever they are.
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

fn unexpected(wanted: &str, found: Value<'_>) -> Failure {
    match found {
        Value::Error(text) => Failure::Refused(Refusal::new(text)),
        Value::Nil => Failure::shape(format!("nothing instead of {wanted}")),
        Value::Number(number) => Failure::shape(format!("{number} instead of {wanted}")),
        Value::Array(values) => Failure::shape(format!("an array of {values} instead of {wanted}")),
        Value::Text(text) => {
            let text: String = String::from_utf8_lossy(text).chars().take(64).collect();
            Failure::shape(format!("{text:?} instead of {wanted}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replies(text: &[u8]) -> Replies {
        Replies::new(Bytes::copy_from_slice(text), true)
    }

    const READ: &[u8] =
        b"*1\r\n*2\r\n$6\r\norders\r\n*2\r\n*2\r\n$3\r\n1-2\r\n*2\r\n$1\r\na\r\n$2\r\n\r\n\r\n\
        *2\r\n$3\r\n1-3\r\n*-1\r\n";

    #[test]
    fn an_entry_is_read_where_it_lies() {
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
    fn an_entry_of_a_large_reply_has_memory_of_its_own() {
        let value = "x".repeat(SHARED_BYTES_MAX);
        let text = format!("*2\r\n$3\r\n1-2\r\n*2\r\n$1\r\na\r\n${}\r\n{value}\r\n", value.len());
        let (_, fields) = replies(text.as_bytes()).cursor().entry().unwrap();
        assert_eq!(fields, Some(Fields::new([("a", value)])));
    }

    #[test]
    fn an_error_among_replies_is_found_and_told_apart() {
        let text = b"$1\r\na\r\n-ERR no\r\n*1\r\n:7\r\n";
        let mut scanner = Scanner::default();
        scanner.begin(3);
        assert_eq!(scanner.scan(text).unwrap(), Some(text.len()));
        assert!(scanner.refusals());
        let parts = replies(text).split(3).unwrap();
        assert_eq!(parts[0], (Bytes::from_static(b"$1\r\na\r\n"), None));
        assert_eq!(parts[1].1.as_ref().map(Refusal::code), Some("ERR"));
        assert_eq!(parts[2], (Bytes::from_static(b"*1\r\n:7\r\n"), None));
    }

    #[test]
    fn what_is_no_reply_is_refused() {
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
        fn replies_are_found_however_they_are_cut(cuts in prop::collection::vec(0..READ.len(), 0..5)) {
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
        fn the_short_way_and_the_long_one_see_the_same(
            text in prop_oneof![
                "[$*][-0-9]{0,12}\r?\n?".prop_map(String::into_bytes),
                prop::collection::vec(any::<u8>(), 0..12),
            ],
        ) {
            if let Some((kind, number, end)) = counted(&text) {
                let (sign, digits) = line(&text[..end]).unwrap();
                prop_assert_eq!(sign, if kind == Counted::Text { b'$' } else { b'*' });
                prop_assert_eq!(length(digits).unwrap(), Some(number));
            }
        }

        #[test]
        fn no_bytes_make_us_panic(
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
