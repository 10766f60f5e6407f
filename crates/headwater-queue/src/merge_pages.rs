//! Merges entries of many partitions into one page ordered by id, reading little more than the page needs.
//!
//! Upstream: listings of messages and of pending entries. Downstream: a function that fetches entries of one partition.
//! Guarantees: the page is a gapless part of the merged order; memory is bounded by the page and a few fetches,
//! whatever the number of partitions and entries. Method: fetch a few entries of every partition, discard those that
//! cannot be on the page, and fetch more only from partitions that may still contribute.

use std::collections::BTreeMap;

use futures_util::{StreamExt, stream};
use headwater_stream::{Direction, EntryId};

use crate::error::Result;
use crate::limits::PAGE_BYTES_MAX;
use crate::pagination::{ListPosition, previous};
use crate::topic::Partition;

/// Partitions fetched concurrently.
const CONCURRENT_FETCHES: usize = 8;

/// A range of ids, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IdRange {
    pub(crate) from: EntryId,
    pub(crate) to: EntryId,
}

impl IdRange {
    pub(crate) const ALL: Self = Self { from: EntryId::MIN, to: EntryId::MAX };

    fn is_empty(self) -> bool {
        self.from > self.to
    }

    /// The rest of the range after `id` in this direction; `None` if it is empty.
    pub(crate) fn after(self, id: EntryId, direction: Direction) -> Option<Self> {
        let rest = match direction {
            Direction::Forward if id == EntryId::MAX => return None,
            Direction::Forward => Self { from: self.from.max(id.next()), ..self },
            Direction::Backward => Self { to: self.to.min(previous(id)?), ..self },
        };
        (!rest.is_empty()).then_some(rest)
    }

    /// The rest of the range in one partition after a position in the merged order.
    fn after_position(
        self,
        after: Option<ListPosition>,
        partition: Partition,
        direction: Direction,
    ) -> Option<Self> {
        let Some((id, of)) = after else { return (!self.is_empty()).then_some(self) };
        let was_before = match direction {
            Direction::Forward => partition <= of,
            Direction::Backward => partition >= of,
        };
        if was_before {
            return self.after(id, direction);
        }
        let rest = match direction {
            Direction::Forward => Self { from: self.from.max(id), ..self },
            Direction::Backward => Self { to: self.to.min(id), ..self },
        };
        (!rest.is_empty()).then_some(rest)
    }
}

/// The page to build.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageMerge {
    pub(crate) range: IdRange,
    pub(crate) direction: Direction,
    /// Only entries after this position.
    pub(crate) after: Option<ListPosition>,
    pub(crate) limit: usize,
    /// Maximum entries per fetch.
    pub(crate) fetch_max: usize,
}

/// A page, and whether more entries follow.
pub(crate) struct MergedPage<T> {
    pub(crate) items: Vec<(ListPosition, T)>,
    pub(crate) has_more: bool,
}

impl PageMerge {
    /// Builds the page. `fetch` returns up to a number of entries of an id range of a partition, in page direction.
    pub(crate) async fn run<T, F>(
        self,
        partitions: std::ops::Range<Partition>,
        fetch: impl Fn(Partition, IdRange, usize) -> F,
        bytes: impl Fn(&T) -> usize,
    ) -> Result<MergedPage<T>>
    where
        F: Future<Output = Result<Vec<(EntryId, T)>>>,
    {
        let mut kept = PageBuffer::new(self);
        let count = partitions.len().max(1);
        let mut open: Vec<(Partition, IdRange)> = partitions
            .filter_map(|partition| {
                let rest = self.range.after_position(self.after, partition, self.direction)?;
                Some((partition, rest))
            })
            .collect();
        // Twice the fair share first; growing rounds fetch the rest of uneven partitions.
        let mut fetch_count = (self.limit * 2).div_ceil(count).clamp(1, self.fetch_max);
        while !open.is_empty() {
            let asked = stream::iter(std::mem::take(&mut open)).map(|(partition, range)| {
                let entries = fetch(partition, range, fetch_count);
                async move { Ok::<_, crate::QueueError>((partition, range, entries.await?)) }
            });
            let mut answers = Box::pin(asked.buffer_unordered(CONCURRENT_FETCHES));
            while let Some(answer) = answers.next().await {
                let (partition, range, entries) = answer?;
                let is_full = entries.len() >= fetch_count;
                let last = entries.last().map(|(id, _)| *id);
                for (id, item) in entries {
                    let item_bytes = bytes(&item);
                    kept.offer((id, partition), item, item_bytes);
                }
                let rest = last.filter(|_| is_full).and_then(|id| range.after(id, self.direction));
                open.extend(rest.map(|rest| (partition, rest)));
            }
            drop(answers);
            open.retain(|(partition, range)| kept.may_take(*partition, *range));
            fetch_count = (fetch_count * 2).min(self.fetch_max);
        }
        Ok(kept.into_merged())
    }
}

/// The entries that may be on the page so far.
struct PageBuffer<T> {
    merge: PageMerge,
    items: BTreeMap<ListPosition, (T, usize)>,
    bytes: usize,
    /// The first position that did not fit; nothing from there on is on the page.
    bound: Option<ListPosition>,
}

impl<T> PageBuffer<T> {
    fn new(merge: PageMerge) -> Self {
        Self { merge, items: BTreeMap::new(), bytes: 0, bound: None }
    }

    fn comes_before_bound(&self, position: ListPosition) -> bool {
        self.bound.is_none_or(|bound| match self.merge.direction {
            Direction::Forward => position < bound,
            Direction::Backward => position > bound,
        })
    }

    fn offer(&mut self, position: ListPosition, item: T, bytes: usize) {
        if !self.comes_before_bound(position) {
            return;
        }
        self.items.insert(position, (item, bytes));
        self.bytes += bytes;
        // One entry always fits, whatever its size.
        while self.items.len() > self.merge.limit
            || (self.bytes > PAGE_BYTES_MAX && self.items.len() > 1)
        {
            let last = match self.merge.direction {
                Direction::Forward => self.items.pop_last(),
                Direction::Backward => self.items.pop_first(),
            };
            let Some((position, (_, bytes))) = last else { break };
            self.bytes -= bytes;
            self.bound = Some(position);
        }
    }

    /// Whether the first entry of this range could be on the page.
    fn may_take(&self, partition: Partition, range: IdRange) -> bool {
        let first = match self.merge.direction {
            Direction::Forward => range.from,
            Direction::Backward => range.to,
        };
        self.comes_before_bound((first, partition))
    }

    fn into_merged(self) -> MergedPage<T> {
        let has_more = self.bound.is_some();
        let items = self.items.into_iter().map(|(position, (item, _))| (position, item));
        let items = match self.merge.direction {
            Direction::Forward => items.collect(),
            Direction::Backward => items.rev().collect(),
        };
        MergedPage { items, has_more }
    }
}

#[cfg(test)]
mod tests;
