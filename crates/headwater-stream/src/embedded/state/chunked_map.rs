//! An ordered map from entry ids to values that grows only at its end.
//!
//! Values are stored in chunks behind shared pointers, so a snapshot of a million entries copies a few
//! thousand pointers. A chunk is copied when it changes while a snapshot still references it.
//! Guarantees: insert, lookup and removal cost about the same with ten thousand and with a million values.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::entry::EntryId;

/// Values per chunk: few enough to copy in a microsecond, enough to keep the number of pointers low.
const CHUNK_LEN: usize = 128;

/// Number of newest chunks that a lookup checks first.
const NEWEST_CHUNKS: usize = 4;

#[derive(Clone, Debug)]
pub(in crate::embedded) struct ChunkedMap<T> {
    /// No chunk is empty, and ids grow within and across chunks.
    chunks: VecDeque<Chunk<T>>,
    len: usize,
}

#[derive(Clone, Debug)]
struct Chunk<T> {
    /// Lower bound of the ids in the chunk; greater than all ids in earlier chunks. Stored here so that a search
    /// touches few pages.
    from: EntryId,
    items: Arc<VecDeque<(EntryId, T)>>,
}

impl<T> Default for ChunkedMap<T> {
    fn default() -> Self {
        Self { chunks: VecDeque::new(), len: 0 }
    }
}

impl<T: Clone> ChunkedMap<T> {
    pub(in crate::embedded) fn len(&self) -> usize {
        self.len
    }

    pub(in crate::embedded) fn first_id(&self) -> Option<EntryId> {
        Some(self.chunks.front()?.items.front()?.0)
    }

    pub(in crate::embedded) fn last_id(&self) -> Option<EntryId> {
        Some(self.chunks.back()?.items.back()?.0)
    }

    /// Appends a value. Returns `false` if its id is not greater than all others.
    #[must_use]
    pub(super) fn push(&mut self, id: EntryId, value: T) -> bool {
        if self.last_id().is_some_and(|last| last >= id) {
            return false;
        }
        self.len += 1;
        match self.chunks.back_mut() {
            Some(chunk) if chunk.items.len() < CHUNK_LEN => {
                Arc::make_mut(&mut chunk.items).push_back((id, value));
            }
            // Reserve: a chunk that was filled is likely to be followed by another full one.
            full => {
                let capacity = if full.is_some() { CHUNK_LEN } else { 1 };
                let mut items = VecDeque::with_capacity(capacity);
                items.push_back((id, value));
                self.chunks.push_back(Chunk { from: id, items: Arc::new(items) });
            }
        }
        true
    }

    pub(in crate::embedded) fn get(&self, id: EntryId) -> Option<&T> {
        let (chunk, index) = self.find(id)?;
        Some(&self.chunks[chunk].items[index].1)
    }

    pub(in crate::embedded) fn contains(&self, id: EntryId) -> bool {
        self.find(id).is_some()
    }

    pub(super) fn get_mut(&mut self, id: EntryId) -> Option<&mut T> {
        let (chunk, index) = self.find(id)?;
        Some(&mut Arc::make_mut(&mut self.chunks[chunk].items)[index].1)
    }

    pub(super) fn remove(&mut self, id: EntryId) -> Option<T> {
        let (at, index) = self.find(id)?;
        let items = Arc::make_mut(&mut self.chunks[at].items);
        let (_, value) = items.remove(index)?;
        self.len -= 1;
        if items.is_empty() {
            self.chunks.remove(at);
        } else if items.capacity() > 16 && items.len() * 4 < items.capacity() {
            // Do not keep the memory of removed values for the few that remain.
            items.shrink_to(items.len() * 2);
        }
        Some(value)
    }

    /// Removes all values before `id`, calling `visit` on each.
    pub(super) fn remove_before(&mut self, id: EntryId, mut visit: impl FnMut(&T)) {
        while let Some(chunk) = self.chunks.front_mut() {
            let going = chunk.items.partition_point(|(found, _)| *found < id);
            if going == 0 {
                break;
            }
            self.len -= going;
            chunk.items.range(..going).for_each(|(_, value)| visit(value));
            if going == chunk.items.len() {
                self.chunks.pop_front();
            } else {
                Arc::make_mut(&mut chunk.items).drain(..going);
            }
        }
    }

    /// The id that has `index` ids before it.
    pub(in crate::embedded) fn nth_id(&self, mut index: usize) -> Option<EntryId> {
        for chunk in &self.chunks {
            match chunk.items.get(index) {
                Some((id, _)) => return Some(*id),
                None => index -= chunk.items.len(),
            }
        }
        None
    }

    /// How many ids come after `id`.
    pub(in crate::embedded) fn count_after(&self, id: EntryId) -> u64 {
        let (chunk, index) = self.seek_after(id);
        let in_chunks: usize = self.chunks.range(chunk..).map(|chunk| chunk.items.len()).sum();
        (in_chunks - index) as u64
    }

    /// The values from `id` on, in order.
    pub(in crate::embedded) fn from(&self, id: EntryId) -> impl Iterator<Item = &(EntryId, T)> {
        self.forward(self.seek(id))
    }

    /// The values after `id`, in order.
    pub(in crate::embedded) fn after(&self, id: EntryId) -> impl Iterator<Item = &(EntryId, T)> {
        self.forward(self.seek_after(id))
    }

    /// The values from `id` down, newest first.
    pub(in crate::embedded) fn down_from(
        &self,
        id: EntryId,
    ) -> impl Iterator<Item = &(EntryId, T)> {
        let (chunk, index) = self.seek_after(id);
        let part = self.chunks.get(chunk).into_iter();
        let part = part.flat_map(move |chunk| chunk.items.range(..index).rev());
        part.chain(self.chunks.range(..chunk).rev().flat_map(|chunk| chunk.items.iter().rev()))
    }

    fn forward(&self, (chunk, index): (usize, usize)) -> impl Iterator<Item = &(EntryId, T)> {
        let part = self.chunks.get(chunk).into_iter();
        let part = part.flat_map(move |chunk| chunk.items.range(index..));
        let next = (chunk + 1).min(self.chunks.len());
        part.chain(self.chunks.range(next..).flat_map(|chunk| chunk.items.iter()))
    }

    fn find(&self, id: EntryId) -> Option<(usize, usize)> {
        let (chunk, index) = self.seek(id);
        let (found, _) = self.chunks.get(chunk)?.items.get(index)?;
        (*found == id).then_some((chunk, index))
    }

    /// Position of the first value not before `id`: chunk and index. Past the last chunk, the index is 0.
    fn seek(&self, id: EntryId) -> (usize, usize) {
        let after = self.chunks_up_to(id);
        let Some(at) = after.checked_sub(1) else { return (0, 0) };
        let items = &self.chunks[at].items;
        match items.partition_point(|(found, _)| *found < id) {
            index if index < items.len() => (at, index),
            _ => (after, 0),
        }
    }

    /// How many chunks begin at or before `id`.
    fn chunks_up_to(&self, id: EntryId) -> usize {
        // Most operations are on the newest entries.
        let mut newest = self.chunks.iter().rev().take(NEWEST_CHUNKS);
        match newest.position(|chunk| chunk.from <= id) {
            Some(from_the_end) => self.chunks.len() - from_the_end,
            None => self.chunks.partition_point(|chunk| chunk.from <= id),
        }
    }

    /// Position of the first value after `id`.
    fn seek_after(&self, id: EntryId) -> (usize, usize) {
        if id == EntryId::MAX { (self.chunks.len(), 0) } else { self.seek(id.next()) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        #[test]
        fn chunks_behave_like_an_ordered_map(
            steps in prop::collection::vec((0u8..6, 0u64..600), 1..150),
            copy_every in 1usize..50,
        ) {
            let mut chunks = ChunkedMap::default();
            let mut model = BTreeMap::new();
            let mut copies = Vec::new();
            let mut newest = 0;
            for (number, (step, value)) in steps.into_iter().enumerate() {
                let id = EntryId::new(value / 4, value % 4);
                match step {
                    0 => prop_assert_eq!(chunks.remove(id), model.remove(&id)),
                    1 if value % 5 == 0 => {
                        let kept = model.split_off(&id);
                        let mut seen = Vec::new();
                        chunks.remove_before(id, |value| seen.push(*value));
                        prop_assert!(seen.iter().eq(model.values()));
                        model = kept;
                    }
                    _ => for _ in 0..value % 40 {
                        newest += 1 + value % 3;
                        let id = EntryId::new(newest / 4, newest % 4);
                        prop_assert!(chunks.push(id, newest));
                        prop_assert!(!chunks.push(id, 0), "an id that is not ascending is rejected");
                        model.insert(id, newest);
                    }
                }
                if let Some(value) = chunks.get_mut(id) {
                    *value += 1;
                    model.entry(id).and_modify(|value| *value += 1);
                }
                if number % copy_every == 0 {
                    copies.push((chunks.clone(), model.clone()));
                }
                same(&chunks, &model, id)?;
            }
            for (chunks, model) in copies {
                same(&chunks, &model, EntryId::MIN)?;
            }
        }
    }

    fn same(
        chunks: &ChunkedMap<u64>,
        model: &BTreeMap<EntryId, u64>,
        id: EntryId,
    ) -> Result<(), TestCaseError> {
        let owned = |(id, value): (&EntryId, &u64)| (*id, *value);
        prop_assert_eq!(chunks.len(), model.len());
        prop_assert_eq!(chunks.first_id(), model.keys().next().copied());
        prop_assert_eq!(chunks.last_id(), model.keys().next_back().copied());
        prop_assert_eq!(chunks.get(id), model.get(&id));
        prop_assert!(chunks.from(id).copied().eq(model.range(id..).map(owned)));
        prop_assert!(chunks.after(id).copied().eq(model.range(id.next()..).map(owned)));
        prop_assert!(chunks.down_from(id).copied().eq(model.range(..=id).rev().map(owned)));
        prop_assert_eq!(chunks.count_after(id), model.range(id.next()..).count() as u64);
        prop_assert_eq!(chunks.nth_id(7), model.keys().nth(7).copied());
        prop_assert_eq!(chunks.after(EntryId::MAX).count(), 0);
        Ok(())
    }
}
