//! Packed fields: names and values in one block of memory, each with a length prefix, `$5\r\ntopic\r\n`.
//!
//! Upstream: `fields`. This is the Redis wire form: replies are read in place, and appends copy the block as it is.

use std::ops::Range;
use std::sync::OnceLock;

use bytes::Bytes;

use super::EntrySize;

/// Names and values in one block of memory.
pub(super) struct PackedFields {
    pub(super) bytes: Bytes,
    pub(super) size: EntrySize,
    pairs: OnceLock<Box<[(Bytes, Bytes)]>>,
}

/// Iterator over packed parts.
pub(super) struct PackedParts<'a> {
    rest: &'a [u8],
}

impl PackedFields {
    pub(super) fn new(bytes: Bytes, size: EntrySize) -> Self {
        Self { bytes, size, pairs: OnceLock::new() }
    }

    pub(super) fn parts(&self) -> PackedParts<'_> {
        PackedParts { rest: &self.bytes }
    }

    /// The parts as pairs; split on first use.
    pub(super) fn pairs(&self) -> &[(Bytes, Bytes)] {
        self.pairs.get_or_init(|| {
            let mut parts = self.parts().map(|part| self.bytes.slice_ref(part));
            let mut pairs = Vec::with_capacity(self.size.fields);
            while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
                pairs.push((name, value));
            }
            pairs.into()
        })
    }

    /// Whether these bytes are part of this block.
    pub(super) fn holds(&self, part: &[u8]) -> bool {
        let (memory, part) = (self.bytes.as_ptr_range(), part.as_ptr_range());
        memory.start <= part.start && part.end <= memory.end
    }
}

impl<'a> Iterator for PackedParts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (range, after) = next_text(self.rest)?;
        let part = self.rest.get(range)?;
        self.rest = self.rest.get(after..).unwrap_or_default();
        Some(part)
    }
}

/// Digits of a count: few enough that adding counts cannot overflow.
const COUNT_DIGITS_MAX: usize = 9;

/// Parses a count after its one-byte prefix. Returns it and the end of its line.
pub(crate) fn count(rest: &[u8]) -> Option<(usize, usize)> {
    let (mut number, mut at) = (0_usize, 1);
    while at <= COUNT_DIGITS_MAX {
        let digit = rest.get(at)?.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        number = number * 10 + usize::from(digit);
        at += 1;
    }
    // Leading zeros are rejected, because packed bytes are sent to the server as they are.
    let is_plain = at == 2 || rest.get(1) != Some(&b'0');
    let is_line =
        at > 1 && is_plain && rest.get(at) == Some(&b'\r') && rest.get(at + 1) == Some(&b'\n');
    is_line.then_some((number, at + 2))
}

/// Range of the first text, and the offset of what follows it.
pub(crate) fn next_text(rest: &[u8]) -> Option<(Range<usize>, usize)> {
    if rest.first() != Some(&b'$') {
        return None;
    }
    let (length, start) = count(rest)?;
    let end = start + length;
    (rest.get(end..end + 2)? == b"\r\n").then_some((start..end, end + 2))
}

/// Appends a text.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    put_count(out, b'$', text.len());
    out.extend_from_slice(text);
    out.extend_from_slice(b"\r\n");
}

/// Appends a count line with its prefix.
pub(crate) fn put_count(out: &mut Vec<u8>, sign: u8, number: usize) {
    if let number @ 0..10 = number {
        out.extend_from_slice(&[sign, b'0' + number as u8, b'\r', b'\n']);
        return;
    }
    let mut digits = Digits::default();
    let digits = digits.write(number as u64);
    let mut line = [sign; 23];
    line[1..=digits.len()].copy_from_slice(digits);
    line[digits.len() + 1..][..2].copy_from_slice(b"\r\n");
    out.extend_from_slice(&line[..digits.len() + 3]);
}

/// Packed size of a text.
pub(super) fn text_bytes(length: usize) -> usize {
    let digits = length.checked_ilog10().unwrap_or(0) as usize + 1;
    digits + length + "$\r\n\r\n".len()
}

/// Buffer for the decimal digits of a number, without an allocation.
#[derive(Default)]
pub(crate) struct Digits([u8; 20]);

impl Digits {
    pub(crate) fn write(&mut self, mut number: u64) -> &[u8] {
        let mut at = self.0.len();
        loop {
            at -= 1;
            self.0[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return &self.0[at..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_takes_as_many_bytes_as_announced_and_is_found_again() {
        for length in [0, 1, 9, 10, 99, 100, 12_345] {
            let mut out = Vec::new();
            put_text(&mut out, &vec![b'x'; length]);
            assert_eq!(out.len(), text_bytes(length));
            let (range, after) = next_text(&out).unwrap();
            assert_eq!((range.len(), after), (length, out.len()));
        }
    }

    #[test]
    fn invalid_text_is_rejected() {
        for bytes in [
            "",
            "$",
            "$1",
            "$\r\n",
            "$x\r\n",
            "$01\r\nx\r\n",
            "$1\rx",
            "*1\r\n",
            "$1234567890\r\n",
            "$1\r\nx\r",
            "$1\r\nxyz",
        ] {
            assert_eq!(next_text(bytes.as_bytes()), None, "{bytes:?}");
        }
    }
}
