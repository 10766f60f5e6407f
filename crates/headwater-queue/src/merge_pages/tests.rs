//! Compares the merge with a sort of all entries.

use std::cell::Cell;

use proptest::prelude::*;

use super::*;

/// Runs the merge over partitions in memory; returns the page and the number of fetched entries.
fn page(
    merge: PageMerge,
    partitions: &[Vec<EntryId>],
    entry_bytes: usize,
) -> (Vec<ListPosition>, bool, usize) {
    let fetched = Cell::new(0);
    let fetch = |partition: Partition, range: IdRange, count: usize| {
        let ids = &partitions[usize::from(partition)];
        let within = ids.iter().copied().filter(|id| (range.from..=range.to).contains(id));
        let found: Vec<_> = match merge.direction {
            Direction::Forward => within.take(count).map(|id| (id, ())).collect(),
            Direction::Backward => within.rev().take(count).map(|id| (id, ())).collect(),
        };
        fetched.set(fetched.get() + found.len());
        std::future::ready(Ok(found))
    };
    let all = 0..partitions.len() as Partition;
    let merged = futures_util::FutureExt::now_or_never(merge.run(all, fetch, |()| entry_bytes));
    let merged = merged.expect("the fetch is always ready").unwrap();
    (
        merged.items.into_iter().map(|(position, ())| position).collect(),
        merged.has_more,
        fetched.get(),
    )
}

fn sorted(partitions: &[Vec<EntryId>], range: IdRange, direction: Direction) -> Vec<ListPosition> {
    let mut places: Vec<ListPosition> = (0..)
        .zip(partitions)
        .flat_map(|(partition, ids)| ids.iter().map(move |id| (*id, partition)))
        .filter(|(id, _)| (range.from..=range.to).contains(id))
        .collect();
    places.sort();
    if direction == Direction::Backward {
        places.reverse();
    }
    places
}

proptest! {
    #[test]
    fn concatenated_pages_equal_the_sorted_entries(
        ids in proptest::collection::vec(
            proptest::collection::btree_set((0..30_u64, 0..3_u64), 0..40), 1..12),
        limit in 1..20_usize,
        fetch_max in 1..9_usize,
        from in 0..12_u64,
        to in 8..30_u64,
        large in any::<bool>(),
        backward in any::<bool>(),
    ) {
        let partitions: Vec<Vec<EntryId>> = ids
            .iter()
            .map(|ids| ids.iter().map(|(ms, seq)| EntryId::new(*ms, *seq)).collect())
            .collect();
        let range = IdRange { from: EntryId::new(from, 1), to: EntryId::new(to, 1) };
        let direction = if backward { Direction::Backward } else { Direction::Forward };
        // At most two large entries fit on a page.
        let entry_bytes = if large { PAGE_BYTES_MAX / 3 + 1 } else { 1 };
        let most = if large { limit.min(2) } else { limit };
        let mut merge = PageMerge { range, direction, after: None, limit, fetch_max };
        let mut found = Vec::new();
        loop {
            let (places, has_more, _) = page(merge, &partitions, entry_bytes);
            prop_assert!(places.len() <= most);
            prop_assert_eq!(has_more && places.is_empty(), false);
            found.extend(places);
            if !has_more {
                break;
            }
            merge.after = found.last().copied();
        }
        prop_assert_eq!(found, sorted(&partitions, range, direction));
    }
}

#[test]
fn a_page_of_many_partitions_reads_little_of_each() {
    let ids = |first: u64| (0..1000).map(|n| EntryId::new(first + n * 256, 0)).collect();
    let partitions: Vec<Vec<EntryId>> = (0..256).map(ids).collect();
    let (direction, after) = (Direction::Forward, None);
    let merge = PageMerge { range: IdRange::ALL, direction, after, limit: 100, fetch_max: 16 };
    let (places, has_more, fetched) = page(merge, &partitions, 1);
    assert_eq!((places.len(), has_more), (100, true));
    assert!(fetched <= 600, "{fetched} of 256000 entries were fetched");
}

#[test]
fn a_page_from_a_single_non_empty_partition_is_found() {
    let mut partitions = vec![Vec::new(); 255];
    partitions.push((0..5000).map(|n| EntryId::new(n, 0)).collect());
    let (direction, after) = (Direction::Backward, None);
    let merge = PageMerge { range: IdRange::ALL, direction, after, limit: 100, fetch_max: 16 };
    let (places, has_more, fetched) = page(merge, &partitions, 1);
    assert_eq!((places.len(), has_more), (100, true));
    assert_eq!(places[0], (EntryId::new(4999, 0), 255));
    assert!(fetched <= 200, "{fetched} of 5000 entries were fetched");
}
