//! Binary encoding of the fields of redo records, in logs and snapshots.
//!
//! Numbers are LEB128; texts, bytes and lists are length-prefixed.
//! Guarantees: decoding never panics and never allocates more than the input length, for any input.
//! Not here: the records (see `redo_record`), checksums and files (see `segment`).

#[cfg(test)]
pub(super) mod tests;

use std::borrow::Cow;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};

/// Why bytes could not be decoded or applied.
pub(super) type RecordError = &'static str;
pub(super) type Decoded<T> = Result<T, RecordError>;

const TRUNCATED: RecordError = "a record is truncated";

/// A field of a record.
pub(super) trait Encode<'a>: Sized {
    /// Appends the encoded value.
    fn put(&self, to: &mut Vec<u8>);

    /// Takes the value from the front of `from`.
    fn take(from: &mut &'a [u8]) -> Decoded<Self>;
}

impl Encode<'_> for u64 {
    fn put(&self, to: &mut Vec<u8>) {
        let mut number = *self;
        while number >= 0x80 {
            to.push(number as u8 | 0x80);
            number >>= 7;
        }
        to.push(number as u8);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = take_byte(from)?;
            let part = Self::from(byte & 0x7f);
            if shift == 63 && part > 1 {
                break;
            }
            number |= part << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err("a number has more than 64 bits")
    }
}

impl Encode<'_> for Timestamp {
    fn put(&self, to: &mut Vec<u8>) {
        self.as_millis().put(to);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        u64::take(from).map(Self::from_millis)
    }
}

/// Nothing expires at the Unix epoch, so zero encodes `None`.
impl Encode<'_> for Option<Timestamp> {
    fn put(&self, to: &mut Vec<u8>) {
        self.unwrap_or_default().put(to);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        Ok(Some(Timestamp::take(from)?).filter(|time| *time != Timestamp::default()))
    }
}

impl Encode<'_> for EntryId {
    fn put(&self, to: &mut Vec<u8>) {
        self.ms.put(to);
        self.seq.put(to);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        Ok(Self::new(u64::take(from)?, u64::take(from)?))
    }
}

/// Ids in any order, delta-encoded: neighbours take two or three bytes each.
impl Encode<'_> for Cow<'_, [EntryId]> {
    fn put(&self, to: &mut Vec<u8>) {
        let mut ms = 0;
        put_list(self, to, |id, to| {
            let step = id.ms.wrapping_sub(ms) as i64;
            (((step << 1) ^ (step >> 63)) as u64).put(to);
            id.seq.put(to);
            ms = id.ms;
        });
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        let mut ms: u64 = 0;
        let ids = take_list(from, |from| {
            let folded = u64::take(from)?;
            let step = (folded >> 1) as i64 ^ -((folded & 1) as i64);
            ms = ms.wrapping_add(step as u64);
            Ok(EntryId::new(ms, u64::take(from)?))
        })?;
        Ok(Cow::Owned(ids))
    }
}

impl<'a> Encode<'a> for &'a [u8] {
    fn put(&self, to: &mut Vec<u8>) {
        (self.len() as u64).put(to);
        to.extend_from_slice(self);
    }

    fn take(from: &mut &'a [u8]) -> Decoded<Self> {
        let length = usize::try_from(u64::take(from)?).map_err(|_| TRUNCATED)?;
        let (bytes, rest) = from.split_at_checked(length).ok_or(TRUNCATED)?;
        *from = rest;
        Ok(bytes)
    }
}

impl<'a> Encode<'a> for &'a str {
    fn put(&self, to: &mut Vec<u8>) {
        self.as_bytes().put(to);
    }

    fn take(from: &mut &'a [u8]) -> Decoded<Self> {
        std::str::from_utf8(Encode::take(from)?).map_err(|_| "a text is not UTF-8")
    }
}

impl Encode<'_> for Bytes {
    fn put(&self, to: &mut Vec<u8>) {
        self.as_ref().put(to);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        <&[u8]>::take(from).map(Self::copy_from_slice)
    }
}

impl Encode<'_> for Option<Bytes> {
    fn put(&self, to: &mut Vec<u8>) {
        to.push(u8::from(self.is_some()));
        self.as_deref().unwrap_or_default().put(to);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        let is_some = take_byte(from)? != 0;
        let value = Bytes::take(from)?;
        Ok(is_some.then_some(value))
    }
}

impl Encode<'_> for Fields {
    fn put(&self, to: &mut Vec<u8>) {
        (self.len() as u64).put(to);
        for (name, value) in self.slices() {
            name.put(to);
            value.put(to);
        }
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        let whole = *from;
        let part = |from: &mut &[u8]| -> Decoded<std::ops::Range<usize>> {
            let length = <&[u8]>::take(from)?.len();
            let end = whole.len() - from.len();
            Ok(end - length..end)
        };
        let pairs = take_list(from, |from| Ok((part(from)?, part(from)?)))?;
        // One copy of all bytes that the names and values share, instead of one each.
        let bytes = Bytes::copy_from_slice(&whole[..whole.len() - from.len()]);
        let pairs = pairs.into_iter().map(|(name, value)| (bytes.slice(name), bytes.slice(value)));
        Ok(Self::new(pairs))
    }
}

impl Encode<'_> for Cow<'_, [Fields]> {
    fn put(&self, to: &mut Vec<u8>) {
        put_list(self, to, Encode::put);
    }

    fn take(from: &mut &[u8]) -> Decoded<Self> {
        take_list(from, Encode::take).map(Cow::Owned)
    }
}

impl<'a, T: Encode<'a>> Encode<'a> for Vec<T> {
    fn put(&self, to: &mut Vec<u8>) {
        put_list(self, to, Encode::put);
    }

    fn take(from: &mut &'a [u8]) -> Decoded<Self> {
        take_list(from, Encode::take)
    }
}

impl<'a, A: Encode<'a>, B: Encode<'a>> Encode<'a> for (A, B) {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
        self.1.put(to);
    }

    fn take(from: &mut &'a [u8]) -> Decoded<Self> {
        Ok((A::take(from)?, B::take(from)?))
    }
}

impl<'a, A: Encode<'a>, B: Encode<'a>, C: Encode<'a>> Encode<'a> for (A, B, C) {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
        self.1.put(to);
        self.2.put(to);
    }

    fn take(from: &mut &'a [u8]) -> Decoded<Self> {
        Ok((A::take(from)?, B::take(from)?, C::take(from)?))
    }
}

pub(super) fn take_byte(from: &mut &[u8]) -> Decoded<u8> {
    let (byte, rest) = from.split_first().ok_or(TRUNCATED)?;
    *from = rest;
    Ok(*byte)
}

fn put_list<T>(items: &[T], to: &mut Vec<u8>, mut put: impl FnMut(&T, &mut Vec<u8>)) {
    (items.len() as u64).put(to);
    items.iter().for_each(|item| put(item, to));
}

fn take_list<'a, T>(
    from: &mut &'a [u8],
    mut take: impl FnMut(&mut &'a [u8]) -> Decoded<T>,
) -> Decoded<Vec<T>> {
    let length = usize::try_from(u64::take(from)?).map_err(|_| TRUNCATED)?;
    // Every item takes a byte or more, so a longer list cannot be whole; nothing is reserved for it.
    if length > from.len() {
        return Err(TRUNCATED);
    }
    (0..length).map(|_| take(from)).collect()
}
