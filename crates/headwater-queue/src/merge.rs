//! One page of many partitions, merged by id, without reading more of them than the page needs.
//!
//! Upstream: listings of messages and of pending entries. Downstream: a fetch of some entries of one partition.
//! Promises: the page is a piece of the merged order without gaps; memory is bounded by the page and a few fetches,
//! whatever the number of partitions and of entries. How it works: a little is fetched of every partition; what cannot
//! be on the page any more is thrown away at once; only partitions that may still have something to add are asked again.

use std::collections::BTreeMap;

use futures_util::{StreamExt, stream};
use headwater_stream::{Direction, EntryId};

use crate::error::Result;
use crate::limits::PAGE_BYTES_MAX;
use crate::page::{Place, previous};
use crate::topic::Partition;

/// Partitions that are asked at once.
const ASKED_AT_ONCE: usize = 8;

/// A range of ids, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) from: EntryId,
    pub(crate) to: EntryId,
}

impl Span {
    pub(crate) const ALL: Self = Self { from: EntryId::MIN, to: EntryId::MAX };

    fn is_empty(self) -> bool {
        self.from > self.to
    }

    /// What is left of it behind `id`; `None` if nothing is.
    pub(crate) fn behind(self, id: EntryId, direction: Direction) -> Option<Self> {
        let rest = match direction {
            Direction::Forward if id == EntryId::MAX => return None,
            Direction::Forward => Self { from: self.from.max(id.next()), ..self },
            Direction::Backward => Self { to: self.to.min(previous(id)?), ..self },
        };
        (!rest.is_empty()).then_some(rest)
    }

    /// What is left of it in one partition, behind a place among all of them.
    fn behind_place(
        self,
        after: Option<Place>,
        partition: Partition,
        direction: Direction,
    ) -> Option<Self> {
        let Some((id, of)) = after else { return (!self.is_empty()).then_some(self) };
        let was_before = match direction {
            Direction::Forward => partition <= of,
            Direction::Backward => partition >= of,
        };
        if was_before {
            return self.behind(id, direction);
        }
        let rest = match direction {
            Direction::Forward => Self { from: self.from.max(id), ..self },
            Direction::Backward => Self { to: self.to.min(id), ..self },
        };
        (!rest.is_empty()).then_some(rest)
    }
}

/// Which page to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge {
    pub(crate) span: Span,
    pub(crate) direction: Direction,
    /// Only what comes behind this place.
    pub(crate) after: Option<Place>,
    pub(crate) limit: usize,
    /// Entries of one partition that are fetched at once, at most.
    pub(crate) fetch_max: usize,
}

/// A page, and whether there is more behind it.
pub(crate) struct Merged<T> {
    pub(crate) items: Vec<(Place, T)>,
    pub(crate) has_more: bool,
}

impl Merge {
    /// Makes the page. `fetch` returns up to so many entries of a span of a partition, in the direction of the page.
    pub(crate) async fn run<T, F>(
        self,
        partitions: std::ops::Range<Partition>,
        fetch: impl Fn(Partition, Span, usize) -> F,
        bytes: impl Fn(&T) -> usize,
    ) -> Result<Merged<T>>
    where
        F: Future<Output = Result<Vec<(EntryId, T)>>>,
    {
        let mut kept = Kept::new(self);
        let count = partitions.len().max(1);
        let mut open: Vec<(Partition, Span)> = partitions
            .filter_map(|partition| {
                let rest = self.span.behind_place(self.after, partition, self.direction)?;
                Some((partition, rest))
            })
            .collect();
        // Twice the fair share of each; where partitions are uneven, rounds that grow find the rest.
        let mut fetch_count = (self.limit * 2).div_ceil(count).clamp(1, self.fetch_max);
        while !open.is_empty() {
            let asked = stream::iter(std::mem::take(&mut open)).map(|(partition, span)| {
                let entries = fetch(partition, span, fetch_count);
                async move { Ok::<_, crate::QueueError>((partition, span, entries.await?)) }
            });
            let mut answers = Box::pin(asked.buffer_unordered(ASKED_AT_ONCE));
            while let Some(answer) = answers.next().await {
                let (partition, span, entries) = answer?;
                let is_full = entries.len() >= fetch_count;
                let last = entries.last().map(|(id, _)| *id);
                for (id, item) in entries {
                    let item_bytes = bytes(&item);
                    kept.offer((id, partition), item, item_bytes);
                }
                let rest = last.filter(|_| is_full).and_then(|id| span.behind(id, self.direction));
                open.extend(rest.map(|rest| (partition, rest)));
            }
            drop(answers);
            open.retain(|(partition, span)| kept.may_take(*partition, *span));
            fetch_count = (fetch_count * 2).min(self.fetch_max);
        }
        Ok(kept.into_merged())
    }
}

/// The best entries so far.
struct Kept<T> {
    merge: Merge,
    items: BTreeMap<Place, (T, usize)>,
    bytes: usize,
    /// The first place that did not fit: nothing from there on is on the page.
    bound: Option<Place>,
}

impl<T> Kept<T> {
    fn new(merge: Merge) -> Self {
        Self { merge, items: BTreeMap::new(), bytes: 0, bound: None }
    }

    fn comes_before_bound(&self, place: Place) -> bool {
        self.bound.is_none_or(|bound| match self.merge.direction {
            Direction::Forward => place < bound,
            Direction::Backward => place > bound,
        })
    }

    fn offer(&mut self, place: Place, item: T, bytes: usize) {
        if !self.comes_before_bound(place) {
            return;
        }
        self.items.insert(place, (item, bytes));
        self.bytes += bytes;
        // One always fits, however large it is.
        while self.items.len() > self.merge.limit
            || (self.bytes > PAGE_BYTES_MAX && self.items.len() > 1)
        {
            let last = match self.merge.direction {
                Direction::Forward => self.items.pop_last(),
                Direction::Backward => self.items.pop_first(),
            };
            let Some((place, (_, bytes))) = last else { break };
            self.bytes -= bytes;
            self.bound = Some(place);
        }
    }

    /// Whether the first entry of this span could be on the page.
    fn may_take(&self, partition: Partition, span: Span) -> bool {
        let first = match self.merge.direction {
            Direction::Forward => span.from,
            Direction::Backward => span.to,
        };
        self.comes_before_bound((first, partition))
    }

    fn into_merged(self) -> Merged<T> {
        let has_more = self.bound.is_some();
        let items = self.items.into_iter().map(|(place, (item, _))| (place, item));
        let items = match self.merge.direction {
            Direction::Forward => items.collect(),
            Direction::Backward => items.rev().collect(),
        };
        Merged { items, has_more }
    }
}

#[cfg(test)]
mod tests;
