//! Entries: what a stream holds. An id that grows, and fields whose bytes nobody changes.

mod fields;
mod packed;

use std::fmt;
use std::str::FromStr;

pub use self::fields::{Fields, Own};
#[cfg(feature = "redis")]
pub(crate) use self::packed::{Digits, count, next_text, put_count, put_text};

/// The id of an entry: the millisecond it was appended, and a sequence number within it. Ids of a stream only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EntryId {
    /// Milliseconds since 1970-01-01 UTC.
    pub ms: u64,
    /// Position within that millisecond.
    pub seq: u64,
}

impl EntryId {
    /// Before every entry.
    pub const MIN: Self = Self { ms: 0, seq: 0 };
    /// After every entry.
    pub const MAX: Self = Self { ms: u64::MAX, seq: u64::MAX };

    /// The id `ms-seq`.
    pub const fn new(ms: u64, seq: u64) -> Self {
        Self { ms, seq }
    }

    /// The smallest id after this one; `MAX` stays where it is.
    pub const fn next(self) -> Self {
        match self.seq.checked_add(1) {
            Some(seq) => Self { ms: self.ms, seq },
            None if self.ms == u64::MAX => self,
            None => Self { ms: self.ms + 1, seq: 0 },
        }
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

/// A text that is not an entry id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an entry id; one looks like 1767225600000-0")]
pub struct ParseEntryIdError {
    text: String,
}

impl FromStr for EntryId {
    type Err = ParseEntryIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |digits: &str| {
            let digits_only = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            digits_only.then(|| digits.parse::<u64>().ok()).flatten()
        };
        text.split_once('-')
            .and_then(|(ms, seq)| Some(Self { ms: number(ms)?, seq: number(seq)? }))
            .ok_or_else(|| ParseEntryIdError { text: text.chars().take(64).collect() })
    }
}

/// How large an entry is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntrySize {
    /// How many fields it has.
    pub fields: usize,
    /// The bytes of all names and values together.
    pub bytes: usize,
}

/// One record of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its id.
    pub id: EntryId,
    /// What it carries.
    pub fields: Fields,
}

/// One entry as a group hands it to a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The entry's id.
    pub id: EntryId,
    /// What it carries.
    pub fields: Fields,
    /// How often the group has delivered it, this time included: 1 on the first read.
    pub deliveries: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_id_reads_what_it_writes_and_refuses_the_rest() {
        for id in [EntryId::MIN, EntryId::new(1_767_225_600_000, 7), EntryId::MAX] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        for bad in ["", "-", "1", "1-", "-1", "1-2-3", "+1-2", "1-x", "18446744073709551616-0"] {
            assert!(bad.parse::<EntryId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_next_id_carries_over_and_stops_at_the_end() {
        assert_eq!(EntryId::new(1, 2).next(), EntryId::new(1, 3));
        assert_eq!(EntryId::new(1, u64::MAX).next(), EntryId::new(2, 0));
        assert_eq!(EntryId::MAX.next(), EntryId::MAX);
    }
}
