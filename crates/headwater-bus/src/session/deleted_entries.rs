//! Deleted entries: whether entries of a session are gone that no compaction removed.
//!
//! Upstream: `recovery`, `fork` and `export`, after they read the stream. Downstream: nothing, this is arithmetic.
//! Promises: an entry that was deleted after the last one that is left is noticed on every backend: the backend keeps
//! the last id it generated. Where the backend also counts the entries it ever added (Redis 7.0 and later), every
//! other deleted entry is noticed, too, unless a snapshot already includes it.
//! Not here: a trimmed beginning (see `recovery::beginning`), and entries that a failover lost together with the count.

use headwater_stream::{EntryId, StreamStats};

use super::error::{MissingEntries, MissingReason};
use super::meta::{FirstEntry, SessionMeta};
use super::replay::ReplayUntil;

/// The part of a stream that was read, compared with `stats` taken before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The snapshot's entry that reading began at; `MIN` if it began with the first entry that is left.
    pub(super) from: EntryId,
    /// The last entry that was read.
    pub(super) to: EntryId,
    /// Entries of the session up to `to`, those included that a snapshot stands for; `None` if that is not known.
    pub(super) entries: Option<u64>,
}

/// What was deleted of the part of a session that was to be read.
pub(super) fn find_deleted(
    meta: &SessionMeta,
    stats: &StreamStats,
    read: Extent,
    until: ReplayUntil,
) -> Option<MissingEntries> {
    let last = stats.last_id.unwrap_or(EntryId::MIN);
    let (base_id, base_entries) =
        meta.base.map_or((EntryId::MIN, 0), |base| (base.entry_id, base.entries));
    // The entries that a backend added are those of this session if it knows their first one.
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
            // Deleted, or trimmed before anybody noted how the session began.
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

    use super::super::meta::{SessionPoint, SessionStage};
    use super::*;

    fn id(ms: u64) -> EntryId {
        EntryId::new(ms, 0)
    }

    fn meta(first: FirstEntry) -> SessionMeta {
        SessionMeta {
            first,
            ..SessionMeta::new(SessionStage::Open, id(1), Timestamp::from_millis(1))
        }
    }

    /// A stream that had the entries 1 to 10 and has those from `first` to `last`, as Redis 7 tells it.
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
        // What was asked for ends before them.
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
        // Of a session that began elsewhere the count says nothing, the newest deleted entry does.
        let copied = meta(FirstEntry::Elsewhere);
        assert_eq!(
            find_deleted(&copied, &known, all, ReplayUntil::End),
            missing(1, id(6).next(), None)
        );
        assert_eq!(find_deleted(&copied, &known, from_snapshot, ReplayUntil::End), None);
    }

    #[test]
    fn what_a_stream_held_before_the_session_was_made_is_not_missing() {
        let base = Some(SessionPoint { entry_id: id(10), entries: 10 });
        let meta = SessionMeta { base, ..meta(FirstEntry::NoneYet) };
        let empty = StreamStats { length: 0, first_id: None, last_id: None, ..stats(1, 10, 0) };
        let nothing = Extent { from: EntryId::MIN, to: EntryId::MIN, entries: Some(0) };
        assert_eq!(find_deleted(&meta, &empty, nothing, ReplayUntil::End), None);
    }

    #[test]
    fn a_count_that_began_late_is_no_reason_to_miss_anything() {
        // A file of Redis 6.2 that Redis 7 loaded: entries that were compacted before are not counted.
        let loaded = StreamStats { entries_added: Some(4), ..stats(7, 10, 4) };
        let from_snapshot = read(id(7), 10, 10);
        assert_eq!(
            find_deleted(&meta(FirstEntry::Entry(id(1))), &loaded, from_snapshot, ReplayUntil::End),
            None
        );
    }
}
