//! The entries of one stream in id order, with their memory use.

use super::chunked_map::ChunkedMap;
use crate::entry::{EntryId, Fields};

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct StreamEntries {
    chunks: ChunkedMap<Fields>,
    bytes: u64,
}

/// Approximate memory use of an entry in bytes, including overhead.
pub(in crate::embedded) fn footprint(fields: &Fields) -> u64 {
    const PER_ENTRY: usize = 48;
    const PER_FIELD: usize = 64;
    (PER_ENTRY + PER_FIELD * fields.len() + fields.bytes()) as u64
}

/// Read access is that of the underlying map.
impl std::ops::Deref for StreamEntries {
    type Target = ChunkedMap<Fields>;

    fn deref(&self) -> &Self::Target {
        &self.chunks
    }
}

impl StreamEntries {
    /// Approximate memory use in bytes.
    pub(in crate::embedded) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends an entry. Returns `false` if its id is not greater than all others.
    #[must_use]
    pub(super) fn push(&mut self, id: EntryId, fields: Fields) -> bool {
        let bytes = footprint(&fields);
        let is_added = self.chunks.push(id, fields);
        self.bytes += if is_added { bytes } else { 0 };
        is_added
    }

    /// Removes one entry. Returns whether it existed.
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
