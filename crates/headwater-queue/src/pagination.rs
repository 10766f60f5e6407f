//! Pagination: pages of a listing, and the cursor of the next page.
//!
//! Upstream: every listing of this crate. Guarantees: a cursor is URL-safe text. It is rejected for any other listing
//! (another topic, group or filter), so a page never comes from the wrong one.

use headwater_stream::EntryId;

use crate::error::{QueueError, Result};
use crate::limits::PAGE_MAX;
use crate::topic::Partition;

/// Default number of items per page.
pub(crate) const PAGE_DEFAULT: usize = 100;

/// A page of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The items, in listing order. May be fewer than requested, even empty, although there is a next page.
    pub items: Vec<T>,
    /// Cursor of the next page; `None` on the last page.
    pub next: Option<String>,
}

/// Position of an entry in a listing over all partitions: ordered by id, then by partition.
pub(crate) type ListPosition = (EntryId, Partition);

/// Identifies the listing a cursor belongs to: a hash of the query without its limit.
pub(crate) struct CursorScope(u64);

impl CursorScope {
    pub(crate) fn new(kind: &str, parts: &[&str]) -> Self {
        // FNV-1a: stable across processes and releases, unlike the hasher of the standard library.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut eat = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        for part in std::iter::once(&kind).chain(parts) {
            part.bytes().for_each(&mut eat);
            // 0xff separates the parts: it never occurs in UTF-8.
            eat(0xff);
        }
        Self(hash)
    }

    pub(crate) fn cursor(&self, (id, partition): ListPosition) -> String {
        format!("{:016x}.{partition}.{id}", self.0)
    }

    pub(crate) fn position(&self, cursor: Option<&str>) -> Result<Option<ListPosition>> {
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
                "it belongs to another listing; use it with the topic, group and filter it was returned for",
            )),
            None => {
                let shown: String = cursor.chars().take(64).collect();
                let problem =
                    format!("`{shown}` is not a cursor; pass the `next` value of a page unchanged");
                Err(QueueError::invalid("a cursor", problem))
            }
        }
    }
}

/// Checks a page limit.
pub(crate) fn check_limit(limit: usize) -> Result<()> {
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(QueueError::invalid("limit", format!("{limit}; 1 to {PAGE_MAX}")));
    }
    Ok(())
}

/// The largest id smaller than this one; `None` for the smallest id.
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
    fn a_cursor_is_url_safe_and_rejected_for_other_listings() {
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
    fn malformed_cursors_are_rejected() {
        let scope = CursorScope::new("pending", &["orders"]);
        let good = scope.cursor((EntryId::new(7, 8), 3));
        for bad in ["", ".", "x", "0.0", "0.0.1", "zz.0.1-1", "0.70000.1-1", &format!("{good}.1")] {
            let error = scope.position(Some(bad)).unwrap_err();
            assert!(matches!(error, QueueError::Invalid { .. }), "{bad:?}");
        }
    }

    #[test]
    fn previous_is_the_inverse_of_next() {
        for id in [EntryId::new(0, 1), EntryId::new(5, 0), EntryId::MAX] {
            assert_eq!(previous(id).unwrap().next(), id);
        }
        assert_eq!(previous(EntryId::MIN), None);
    }
}
