//! The entries of one stream, in id order.
//!
//! They lie in chunks behind shared pointers, so that a snapshot of a million entries is a copy of some thousand
//! pointers; a chunk is copied when it changes while a snapshot still holds it.
//! Promises: append, look-up and removal cost the same at ten thousand and at a million entries.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::entry::{EntryId, Fields};

/// Entries of one chunk: few enough to copy in a microsecond, many enough that pointers to chunks are few.
const CHUNK_ENTRIES: usize = 128;

type Chunk = VecDeque<(EntryId, Fields)>;

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct Entries {
    /// No chunk is empty, and ids grow within and across chunks.
    chunks: VecDeque<Arc<Chunk>>,
    len: usize,
    bytes: u64,
}

/// About how many bytes of memory an entry takes: its bytes, and what holds them together.
pub(in crate::embedded) fn footprint(fields: &Fields) -> u64 {
    const PER_ENTRY: usize = 48;
    const PER_FIELD: usize = 64;
    (PER_ENTRY + PER_FIELD * fields.len() + fields.bytes()) as u64
}

impl Entries {
    pub(in crate::embedded) fn len(&self) -> usize {
        self.len
    }

    /// About how many bytes of memory they take.
    pub(in crate::embedded) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(in crate::embedded) fn first_id(&self) -> Option<EntryId> {
        Some(self.chunks.front()?.front()?.0)
    }

    pub(in crate::embedded) fn last_id(&self) -> Option<EntryId> {
        Some(self.chunks.back()?.back()?.0)
    }

    /// Adds an entry at the end; its id is larger than all before.
    pub(super) fn push(&mut self, id: EntryId, fields: Fields) {
        self.len += 1;
        self.bytes += footprint(&fields);
        match self.chunks.back_mut() {
            Some(chunk) if chunk.len() < CHUNK_ENTRIES => {
                Arc::make_mut(chunk).push_back((id, fields));
            }
            // A stream that has filled one chunk will fill the next.
            full => {
                let mut chunk =
                    Chunk::with_capacity(if full.is_some() { CHUNK_ENTRIES } else { 1 });
                chunk.push_back((id, fields));
                self.chunks.push_back(Arc::new(chunk));
            }
        }
    }

    pub(in crate::embedded) fn get(&self, id: EntryId) -> Option<&Fields> {
        let (chunk, index) = self.seek(id);
        let (found, fields) = self.chunks.get(chunk)?.get(index)?;
        (*found == id).then_some(fields)
    }

    pub(in crate::embedded) fn contains(&self, id: EntryId) -> bool {
        self.get(id).is_some()
    }

    /// Removes one entry. Returns whether it was there.
    pub(super) fn remove(&mut self, id: EntryId) -> bool {
        let (at, index) = self.seek(id);
        let Some(chunk) = self.chunks.get_mut(at) else { return false };
        if chunk.get(index).is_none_or(|(found, _)| *found != id) {
            return false;
        }
        let chunk = Arc::make_mut(chunk);
        if let Some((_, fields)) = chunk.remove(index) {
            self.len -= 1;
            self.bytes -= footprint(&fields);
        }
        if chunk.is_empty() {
            self.chunks.remove(at);
        } else if chunk.capacity() > 16 && chunk.len() * 4 < chunk.capacity() {
            // A few entries left behind in every chunk must not hold the memory of all that went.
            chunk.shrink_to(chunk.len() * 2);
        }
        true
    }

    /// Removes all entries before `id`. Returns how many there were.
    pub(super) fn remove_before(&mut self, id: EntryId) -> usize {
        let before = self.len;
        while let Some(chunk) = self.chunks.front_mut() {
            let going = chunk.partition_point(|(found, _)| *found < id);
            if going == 0 {
                break;
            }
            self.len -= going;
            self.bytes -= chunk.range(..going).map(|(_, fields)| footprint(fields)).sum::<u64>();
            if going == chunk.len() {
                self.chunks.pop_front();
            } else {
                Arc::make_mut(chunk).drain(..going);
            }
        }
        before - self.len
    }

    /// The id of the entry that has `index` entries before it.
    pub(in crate::embedded) fn nth_id(&self, mut index: usize) -> Option<EntryId> {
        for chunk in &self.chunks {
            match chunk.get(index) {
                Some((id, _)) => return Some(*id),
                None => index -= chunk.len(),
            }
        }
        None
    }

    /// How many entries come after `id`.
    pub(in crate::embedded) fn count_after(&self, id: EntryId) -> u64 {
        let (chunk, index) = self.seek_after(id);
        let in_chunks: usize = self.chunks.range(chunk..).map(|chunk| chunk.len()).sum();
        (in_chunks - index) as u64
    }

    /// The entries from `id` on, in order.
    pub(in crate::embedded) fn from(
        &self,
        id: EntryId,
    ) -> impl Iterator<Item = &(EntryId, Fields)> {
        self.forward(self.seek(id))
    }

    /// The entries after `id`, in order.
    pub(in crate::embedded) fn after(
        &self,
        id: EntryId,
    ) -> impl Iterator<Item = &(EntryId, Fields)> {
        self.forward(self.seek_after(id))
    }

    /// The entries from `id` down, newest first.
    pub(in crate::embedded) fn down_from(
        &self,
        id: EntryId,
    ) -> impl Iterator<Item = &(EntryId, Fields)> {
        let (chunk, index) = self.seek_after(id);
        let part =
            self.chunks.get(chunk).into_iter().flat_map(move |chunk| chunk.range(..index).rev());
        part.chain(self.chunks.range(..chunk).rev().flat_map(|chunk| chunk.iter().rev()))
    }

    fn forward(&self, (chunk, index): (usize, usize)) -> impl Iterator<Item = &(EntryId, Fields)> {
        let part = self.chunks.get(chunk).into_iter().flat_map(move |chunk| chunk.range(index..));
        let next = (chunk + 1).min(self.chunks.len());
        part.chain(self.chunks.range(next..).flat_map(|chunk| chunk.iter()))
    }

    /// Where the first entry lies that is not before `id`: chunk and place in it. Past the last chunk, the place is 0.
    fn seek(&self, id: EntryId) -> (usize, usize) {
        let at = self.chunks.partition_point(|chunk| last(chunk) < id);
        let index =
            self.chunks.get(at).map_or(0, |chunk| chunk.partition_point(|(found, _)| *found < id));
        (at, index)
    }

    /// Where the first entry after `id` lies.
    fn seek_after(&self, id: EntryId) -> (usize, usize) {
        if id == EntryId::MAX { (self.chunks.len(), 0) } else { self.seek(id.next()) }
    }
}

fn last(chunk: &Chunk) -> EntryId {
    chunk.back().map_or(EntryId::MIN, |(id, _)| *id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn fields(number: u64) -> Fields {
        Fields::new([("n", number.to_string())])
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        #[test]
        fn entries_behave_like_an_ordered_map(
            steps in prop::collection::vec((0u8..6, 0u64..600), 1..150),
            copy_every in 1usize..50,
        ) {
            let mut entries = Entries::default();
            let mut model = BTreeMap::new();
            let mut copies = Vec::new();
            let mut newest = 0;
            for (number, (step, value)) in steps.into_iter().enumerate() {
                let id = EntryId::new(value / 4, value % 4);
                match step {
                    0 => prop_assert_eq!(entries.remove(id), model.remove(&id).is_some()),
                    1 if value % 5 == 0 => {
                        let kept = model.split_off(&id);
                        prop_assert_eq!(entries.remove_before(id), model.len());
                        model = kept;
                    }
                    _ => for _ in 0..value % 40 {
                        newest += 1 + value % 3;
                        let id = EntryId::new(newest / 4, newest % 4);
                        entries.push(id, fields(newest));
                        model.insert(id, fields(newest));
                    }
                }
                if number % copy_every == 0 {
                    copies.push((entries.clone(), model.clone()));
                }
                same(&entries, &model, id)?;
            }
            for (entries, model) in copies {
                same(&entries, &model, EntryId::MIN)?;
            }
        }
    }

    fn same(
        entries: &Entries,
        model: &BTreeMap<EntryId, Fields>,
        id: EntryId,
    ) -> Result<(), TestCaseError> {
        let owned = |(id, fields): (&EntryId, &Fields)| (*id, fields.clone());
        prop_assert_eq!(entries.len(), model.len());
        prop_assert_eq!(entries.bytes(), model.values().map(footprint).sum::<u64>());
        prop_assert_eq!(entries.first_id(), model.keys().next().copied());
        prop_assert_eq!(entries.last_id(), model.keys().next_back().copied());
        prop_assert_eq!(entries.get(id), model.get(&id));
        prop_assert!(entries.from(id).cloned().eq(model.range(id..).map(owned)));
        prop_assert!(entries.after(id).cloned().eq(model.range(id.next()..).map(owned)));
        prop_assert!(entries.down_from(id).cloned().eq(model.range(..=id).rev().map(owned)));
        prop_assert_eq!(entries.count_after(id), model.range(id.next()..).count() as u64);
        prop_assert_eq!(entries.nth_id(7), model.keys().nth(7).copied());
        prop_assert_eq!(entries.after(EntryId::MAX).count(), 0);
        Ok(())
    }
}
