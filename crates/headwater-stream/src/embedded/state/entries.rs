//! The entries of one stream, in id order, and how much memory they take.

use super::chunked_map::ChunkedMap;
use crate::entry::{EntryId, Fields};

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct StreamEntries {
    chunks: ChunkedMap<Fields>,
    bytes: u64,
}

/// About how many bytes of memory an entry takes: its bytes, and what holds them together.
pub(in crate::embedded) fn footprint(fields: &Fields) -> u64 {
    const PER_ENTRY: usize = 48;
    const PER_FIELD: usize = 64;
    (PER_ENTRY + PER_FIELD * fields.len() + fields.bytes()) as u64
}

/// All ways to look at entries are those of the chunks they lie in.
impl std::ops::Deref for StreamEntries {
    type Target = ChunkedMap<Fields>;

    fn deref(&self) -> &Self::Target {
        &self.chunks
    }
}

impl StreamEntries {
    /// About how many bytes of memory they take.
    pub(in crate::embedded) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds an entry at the end. Returns whether its id is larger than all before, as it must be.
    #[must_use]
    pub(super) fn push(&mut self, id: EntryId, fields: Fields) -> bool {
        let bytes = footprint(&fields);
        let is_added = self.chunks.push(id, fields);
        self.bytes += if is_added { bytes } else { 0 };
        is_added
    }

    /// Removes one entry. Returns whether it was there.
    pub(super) fn remove(&mut self, id: EntryId) -> bool {
        let removed = self.chunks.remove(id);
        self.bytes -= removed.as_ref().map_or(0, footprint);
        removed.is_some()
    }

    /// Removes all entries before `id`.
    pub(super) fn remove_before(&mut self, id: EntryId) {
        let bytes = &mut self.bytes;
        self.chunks.remove_before(id, |fields| *bytes -= footprint(fields));
    }
}
