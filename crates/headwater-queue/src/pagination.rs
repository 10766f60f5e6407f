//! Pages: a listing in parts, and the cursor that says where the next part begins.
//!
//! Upstream: every listing of this crate. Promises: a cursor is text that survives a URL unescaped; it is refused where
//! it does not belong (another topic, another group, another scope), so a page is never of something else.

use headwater_stream::EntryId;

use crate::error::{QueueError, Result};
use crate::limits::PAGE_MAX;
use crate::topic::Partition;

/// Items a page has if nobody says otherwise.
pub(crate) const PAGE_DEFAULT: usize = 100;

/// A part of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The items, in the order of the listing. There may be fewer than asked for, even none, while there is a next page.
    pub items: Vec<T>,
    /// Where the next page begins: pass it as `cursor`. `None` after the last one.
    pub next: Option<String>,
}

/// An entry's position among all partitions: by its id, and among equal ids by its partition.
pub(crate) type EntryPosition = (EntryId, Partition);

/// What a cursor belongs to: all that was asked for, except how much of it.
pub(crate) struct CursorScope(u64);

impl CursorScope {
    pub(crate) fn new(kind: &str, parts: &[&str]) -> Self {
        // FNV-1a: the same in every process and release, which the hasher of the standard library is not.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut eat = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        for part in std::iter::once(&kind).chain(parts) {
            part.bytes().for_each(&mut eat);
            // Between two parts stands a byte that no text holds.
            eat(0xff);
        }
        Self(hash)
    }

    pub(crate) fn cursor(&self, (id, partition): EntryPosition) -> String {
        format!("{:016x}.{partition}.{id}", self.0)
    }

    pub(crate) fn position(&self, cursor: Option<&str>) -> Result<Option<EntryPosition>> {
        let Some(cursor) = cursor else { return Ok(None) };
        let read = |text: &str| {
            let mut parts = text.split('.');
            let scope = u64::from_str_radix(parts.next()?, 16).ok()?;
            let partition = parts.next()?.parse().ok()?;
            let id = parts.next()?.parse().ok()?;
            parts.next().is_none().then_some((scope, (id, partition)))
        };
        match read(cursor) {
            Some((scope, position)) if scope == self.0 => Ok(Some(position)),
            Some(_) => Err(QueueError::invalid(
                "a cursor",
                "it belongs to another listing; use it with the topic, group and filter it came from",
            )),
            None => {
                let shown: String = cursor.chars().take(64).collect();
                let problem = format!("`{shown}` is none; pass `next` of a page as it is");
                Err(QueueError::invalid("a cursor", problem))
            }
        }
    }
}

/// Checks how much was asked for.
pub(crate) fn check_limit(limit: usize) -> Result<()> {
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(QueueError::invalid("limit", format!("{limit}; 1 to {PAGE_MAX}")));
    }
    Ok(())
}

/// The largest id before this one; `None` before the first.
pub(crate) fn previous(id: EntryId) -> Option<EntryId> {
    match (id.ms, id.seq) {
        (0, 0) => None,
        (ms, 0) => Some(EntryId::new(ms - 1, u64::MAX)),
        (ms, seq) => Some(EntryId::new(ms, seq - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_a_url_and_is_refused_elsewhere() {
        let scope = CursorScope::new("pending", &["orders", "billing"]);
        for position in [(EntryId::MIN, 0), (EntryId::MAX, 1023), (EntryId::new(7, 8), 3)] {
            let cursor = scope.cursor(position);
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
            assert!(cursor.chars().all(is_plain), "{cursor}");
            assert_eq!(scope.position(Some(&cursor)).unwrap(), Some(position));
            for other in [["orders", "shipping"], ["ordersbilling", ""], ["order", "sbilling"]] {
                assert!(CursorScope::new("pending", &other).position(Some(&cursor)).is_err());
            }
        }
        assert_eq!(scope.position(None).unwrap(), None);
    }

    #[test]
    fn what_is_no_cursor_is_refused() {
        let scope = CursorScope::new("pending", &["orders"]);
        let good = scope.cursor((EntryId::new(7, 8), 3));
        for bad in ["", ".", "x", "0.0", "0.0.1", "zz.0.1-1", "0.70000.1-1", &format!("{good}.1")] {
            let error = scope.position(Some(bad)).unwrap_err();
            assert!(matches!(error, QueueError::Invalid { .. }), "{bad:?}");
        }
    }

    #[test]
    fn previous_is_the_other_way_of_next() {
        for id in [EntryId::new(0, 1), EntryId::new(5, 0), EntryId::MAX] {
            assert_eq!(previous(id).unwrap().next(), id);
        }
        assert_eq!(previous(EntryId::MIN), None);
    }
}
