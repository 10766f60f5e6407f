//! Encoding of record fields: numbers, texts, ids and entry fields.

use std::borrow::Cow;

use bytes::Bytes;

use super::{Decoded, RecordError};
use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};

/// Appends record fields.
pub(super) struct Encoder<'a> {
    pub(super) to: &'a mut Vec<u8>,
}

impl Encoder<'_> {
    pub(super) fn tag(&mut self, tag: u8) -> &mut Self {
        self.to.push(tag);
        self
    }

    pub(super) fn number(&mut self, mut number: u64) -> &mut Self {
        while number >= 0x80 {
            self.to.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.to.push(number as u8);
        self
    }

    pub(super) fn time(&mut self, time: Timestamp) -> &mut Self {
        self.number(time.as_millis())
    }

    pub(super) fn id(&mut self, id: EntryId) -> &mut Self {
        self.number(id.ms).number(id.seq)
    }

    /// Ids in any order, delta-encoded: neighbours take two or three bytes each.
    pub(super) fn ids(&mut self, ids: &[EntryId]) -> &mut Self {
        self.number(ids.len() as u64);
        let mut ms = 0;
        for id in ids {
            let step = id.ms.wrapping_sub(ms) as i64;
            self.number(((step << 1) ^ (step >> 63)) as u64).number(id.seq);
            ms = id.ms;
        }
        self
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(bytes.len() as u64);
        self.to.extend_from_slice(bytes);
        self
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(super) fn texts(&mut self, texts: &[&str]) -> &mut Self {
        self.number(texts.len() as u64);
        for text in texts {
            self.text(text);
        }
        self
    }

    pub(super) fn fields(&mut self, fields: &Fields) {
        self.number(fields.len() as u64);
        for (name, value) in fields.slices() {
            self.bytes(name).bytes(value);
        }
    }
}

/// Reads record fields from the front of `rest`.
pub(super) struct Decoder<'a> {
    pub(super) rest: &'a [u8],
}

const TRUNCATED: RecordError = "a record is truncated";

impl<'a> Decoder<'a> {
    pub(super) fn tag(&mut self) -> Decoded<u8> {
        let (tag, rest) = self.rest.split_first().ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(*tag)
    }

    pub(super) fn number(&mut self) -> Decoded<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.tag()?;
            let part = u64::from(byte & 0x7f);
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

    pub(super) fn time(&mut self) -> Decoded<Timestamp> {
        Ok(Timestamp::from_millis(self.number()?))
    }

    pub(super) fn id(&mut self) -> Decoded<EntryId> {
        Ok(EntryId::new(self.number()?, self.number()?))
    }

    pub(super) fn ids(&mut self) -> Decoded<Cow<'a, [EntryId]>> {
        let mut ms: u64 = 0;
        let ids = self.list(|input| {
            let folded = input.number()?;
            let step = (folded >> 1) as i64 ^ -((folded & 1) as i64);
            ms = ms.wrapping_add(step as u64);
            Ok(EntryId::new(ms, input.number()?))
        })?;
        Ok(Cow::Owned(ids))
    }

    pub(super) fn bytes(&mut self) -> Decoded<&'a [u8]> {
        let length = usize::try_from(self.number()?).map_err(|_| TRUNCATED)?;
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self) -> Decoded<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| "a text is not UTF-8")
    }

    pub(super) fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Decoded<T>,
    ) -> Decoded<Vec<T>> {
        let length = usize::try_from(self.number()?).map_err(|_| TRUNCATED)?;
        // Every item takes a byte or more, so a longer list cannot be whole; nothing is reserved for it.
        if length > self.rest.len() {
            return Err(TRUNCATED);
        }
        (0..length).map(|_| item(self)).collect()
    }

    pub(super) fn fields(&mut self) -> Decoded<Fields> {
        let whole = self.rest;
        let part = |input: &mut Self| -> Decoded<std::ops::Range<usize>> {
            let length = input.bytes()?.len();
            let end = whole.len() - input.rest.len();
            Ok(end - length..end)
        };
        let pairs = self.list(|input| Ok((part(input)?, part(input)?)))?;
        // One copy of all bytes that the names and values share, instead of one each.
        let bytes = Bytes::copy_from_slice(&whole[..whole.len() - self.rest.len()]);
        let pairs = pairs.into_iter().map(|(name, value)| (bytes.slice(name), bytes.slice(value)));
        Ok(Fields::new(pairs))
    }
}
