//! Entries of a stream: an id that increases, and immutable fields.

mod fields;
mod packed;

use std::fmt;
use std::str::FromStr;

pub use self::fields::{FieldRef, Fields};
#[cfg(feature = "redis")]
pub(crate) use self::packed::{Digits, count, next_text, put_count, put_text};

/// Id of an entry: the millisecond of its append and a sequence number within it. Ids of a stream only increase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EntryId {
    /// Milliseconds since 1970-01-01 UTC.
    pub ms: u64,
    /// Position within that millisecond.
    pub seq: u64,
}

impl EntryId {
    /// Smaller than the id of any entry.
    pub const MIN: Self = Self { ms: 0, seq: 0 };
    /// The largest id.
    pub const MAX: Self = Self { ms: u64::MAX, seq: u64::MAX };

    /// The id `ms-seq`.
    pub const fn new(ms: u64, seq: u64) -> Self {
        Self { ms, seq }
    }

    /// The next larger id; `MAX` for `MAX`.
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

/// The text is not an entry id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an entry id; expected the form 1767225600000-0")]
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

/// Size of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntrySize {
    /// Number of fields.
    pub fields: usize,
    /// Total bytes of names and values.
    pub bytes: usize,
}

/// An entry of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its id.
    pub id: EntryId,
    /// Its fields.
    pub fields: Fields,
}

/// An entry delivered to a consumer of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveredEntry {
    /// The entry's id.
    pub id: EntryId,
    /// Its fields.
    pub fields: Fields,
    /// Number of deliveries including this one: 1 on the first read.
    pub deliveries: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_id_round_trips_and_invalid_text_is_rejected() {
        for id in [EntryId::MIN, EntryId::new(1_767_225_600_000, 7), EntryId::MAX] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        for bad in ["", "-", "1", "1-", "-1", "1-2-3", "+1-2", "1-x", "18446744073709551616-0"] {
            assert!(bad.parse::<EntryId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_next_id_carries_over_and_saturates_at_the_maximum() {
        assert_eq!(EntryId::new(1, 2).next(), EntryId::new(1, 3));
        assert_eq!(EntryId::new(1, u64::MAX).next(), EntryId::new(2, 0));
        assert_eq!(EntryId::MAX.next(), EntryId::MAX);
    }
}
