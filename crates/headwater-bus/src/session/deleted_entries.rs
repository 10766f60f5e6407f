//! Detects entries of a session that were deleted by something other than compaction.
//!
//! Upstream: `recovery`, `fork` and `export`, after they read the stream. Downstream: nothing; this is arithmetic.
//! Guarantees: a deleted entry after the last remaining one is detected on every backend, because the backend keeps the
//! last generated id. If the backend also counts all entries ever added (Redis 7.0 and later), every other deleted
//! entry is detected, too, unless a snapshot includes it.
//! Not here: a trimmed beginning (see `recovery::beginning`), and entries that a failover lost together with the count.

use headwater_stream::{EntryId, StreamStats};

use super::error::{MissingEntries, MissingReason};
use super::meta::{FirstEntry, SessionMeta};
use super::replay::ReplayUntil;

/// The part of a stream that was read, compared with `stats` taken before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The entry of the snapshot at which reading started; `MIN` if it started with the first remaining entry.
    pub(super) from: EntryId,
    /// The last entry that was read.
    pub(super) to: EntryId,
    /// Entries of the session up to `to`, including those in a snapshot; `None` if unknown.
    pub(super) entries: Option<u64>,
}

/// The deleted entries within the range to be read, if there are any.
pub(super) fn find_deleted(
    meta: &SessionMeta,
    stats: &StreamStats,
    read: Extent,
    until: ReplayUntil,
) -> Option<MissingEntries> {
    let last = stats.last_id.unwrap_or(EntryId::MIN);
    let (base_id, base_entries) =
        meta.base.map_or((EntryId::MIN, 0), |base| (base.entry_id, base.entries));
    // The backend's count applies to this session only if the session's first entry is known.
    let is_counted =
        matches!(meta.first, FirstEntry::NoneYet | FirstEntry::Entry(_)) && read.to == last;
    let added = stats.entries_added.and_then(|added| added.checked_sub(base_entries));
    let count = match (added, read.entries) {
        (Some(added), Some(entries)) if is_counted => Some(added.saturating_sub(entries)),
        _ => None,
    };
    let deleted =
        |after, before| MissingEntries { after, before, count, reason: MissingReason::Deleted };

    let newest = stats.last_generated_id;
    if newest > last.max(base_id) && read.to >= last && read.to < newest && until.last_id() > last {
        return Some(deleted(last, newest.next()));
    }
    let newest_deleted = stats.max_deleted_id.unwrap_or(EntryId::MIN);
    match count {
        Some(0) => None,
        Some(_) => {
            // Deleted, or trimmed before the first entry was recorded.
            let before = if newest_deleted > base_id { newest_deleted } else { last };
            Some(deleted(read.from, before.next()))
        }
        None => {
            let from = stats.first_id.unwrap_or(EntryId::MAX).max(read.from).max(base_id);
            let is_between = newest_deleted > from && newest_deleted <= read.to;
            is_between.then(|| deleted(from, newest_deleted.next()))
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_stream::clock::Timestamp;

    use super::super::meta::SessionPoint;
    use super::*;

    fn id(ms: u64) -> EntryId {
        EntryId::new(ms, 0)
    }

    fn meta(first: FirstEntry) -> SessionMeta {
        SessionMeta { first, ..SessionMeta::new(id(1), Timestamp::from_millis(1)) }
    }

    /// A stream that had the entries 1 to 10 and now has `first` to `last`, as reported by Redis 7.
    fn stats(first: u64, last: u64, length: u64) -> StreamStats {
        StreamStats {
            length,
            first_id: Some(id(first)),
            last_id: Some(id(last)),
            last_generated_id: id(10),
            entries_added: Some(10),
            max_deleted_id: None,
            bytes: None,
            groups: Vec::new(),
        }
    }

    fn read(from: EntryId, to: u64, entries: u64) -> Extent {
        Extent { from, to: id(to), entries: Some(entries) }
    }

    fn missing(after: u64, before: EntryId, count: Option<u64>) -> Option<MissingEntries> {
        let after = if after == 0 { EntryId::MIN } else { id(after) };
        Some(MissingEntries { after, before, count, reason: MissingReason::Deleted })
    }

    #[test]
    fn deleted_newest_entries_are_found_with_and_without_counts() {
        let meta = meta(FirstEntry::Entry(id(1)));
        let known = stats(1, 7, 7);
        let whole = read(EntryId::MIN, 7, 7);
        assert_eq!(
            find_deleted(&meta, &known, whole, ReplayUntil::End),
            missing(7, id(10).next(), Some(3))
        );
        // Redis 6.2 and the embedded backend.
        let bare = StreamStats { entries_added: None, ..known.clone() };
        assert_eq!(
            find_deleted(&meta, &bare, whole, ReplayUntil::End),
            missing(7, id(10).next(), None)
        );
        // The requested range ends before them.
        assert_eq!(
            find_deleted(&meta, &known, read(EntryId::MIN, 5, 5), ReplayUntil::Entry(id(5))),
            None
        );
        // An entry came after the stats were taken: the newest one is not deleted.
        assert_eq!(find_deleted(&meta, &bare, read(EntryId::MIN, 11, 8), ReplayUntil::End), None);
    }

    #[test]
    fn entries_deleted_in_the_middle_are_found_unless_a_snapshot_includes_them() {
        let known = StreamStats { max_deleted_id: Some(id(6)), ..stats(1, 10, 8) };
        let counted = meta(FirstEntry::Entry(id(1)));
        let all = read(EntryId::MIN, 10, 8);
        assert_eq!(
            find_deleted(&counted, &known, all, ReplayUntil::End),
            missing(0, id(6).next(), Some(2))
        );
        let from_snapshot = read(id(8), 10, 10);
        assert_eq!(find_deleted(&counted, &known, from_snapshot, ReplayUntil::End), None);
        // For a session copied from elsewhere the count is meaningless; the newest deleted id is not.
        let copied = meta(FirstEntry::Elsewhere);
        assert_eq!(
            find_deleted(&copied, &known, all, ReplayUntil::End),
            missing(1, id(6).next(), None)
        );
        assert_eq!(find_deleted(&copied, &known, from_snapshot, ReplayUntil::End), None);
    }

    #[test]
    fn entries_from_before_the_session_was_created_are_not_missing() {
        let base = Some(SessionPoint { entry_id: id(10), entries: 10 });
        let meta = SessionMeta { base, ..meta(FirstEntry::NoneYet) };
        let empty = StreamStats { length: 0, first_id: None, last_id: None, ..stats(1, 10, 0) };
        let nothing = Extent { from: EntryId::MIN, to: EntryId::MIN, entries: Some(0) };
        assert_eq!(find_deleted(&meta, &empty, nothing, ReplayUntil::End), None);
    }

    #[test]
    fn a_count_that_started_late_reports_nothing_missing() {
        // A Redis 6.2 file loaded by Redis 7: entries compacted earlier are not counted.
        let loaded = StreamStats { entries_added: Some(4), ..stats(7, 10, 4) };
        let from_snapshot = read(id(7), 10, 10);
        assert_eq!(
            find_deleted(&meta(FirstEntry::Entry(id(1))), &loaded, from_snapshot, ReplayUntil::End),
            None
        );
    }
}
