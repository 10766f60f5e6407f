//! Scans the pending input entries and reads those that are not in the index.
//!
//! A full scan costs as much as there are pending entries, so only the sweep makes one. A hint about an
//! unknown stream only scans what was delivered since.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::try_join_all;
use headwater_stream::limits::LEASES_MAX;
use headwater_stream::{
    Direction, EntryId, LeaseInfo, LeaseName, PendingDelivery, PendingDeliveryQuery, Range,
    ReclaimFrom, ReclaimRequest, Result, StreamError, StreamName,
};
use tracing::{debug, warn};

use crate::entry_index::before;
use crate::input::{self, MalformedInput};
use crate::member::AssignmentMember;
use crate::metrics::MALFORMED;
use crate::names::Names;

/// Pending entries per call.
const PENDING_PAGE: usize = 2000;

/// Pages per pass; the next pass continues where this one stopped.
const PAGES_MAX: usize = 100;

/// Entries per read: each can be a megabyte.
const RANGE_PAGE: usize = 500;

/// Entries per keep-alive call; the calls run concurrently. Larger calls would block a single-threaded
/// server.
const KEEP_ALIVE_BATCH: usize = 1000;

/// Result of one pass.
pub(crate) struct PendingScan {
    /// Pending entries with their streams, in id order.
    pub(crate) entries: Vec<(PendingDelivery, StreamName)>,
    /// Where the next pass continues; `None` if this one reached the end.
    pub(crate) next: Option<EntryId>,
}

impl AssignmentMember {
    /// Scans pending entries after `after` and removes settled ones from the index.
    pub(crate) async fn scan(&self, after: Option<EntryId>) -> Result<PendingScan> {
        let mut entries = Vec::new();
        let mut scanned = HashSet::new();
        let mut next = after;
        for _ in 0..PAGES_MAX {
            let page = self.pending(next, PENDING_PAGE).await?;
            let full = page.len() == PENDING_PAGE;
            scanned.extend(page.iter().map(|pending| pending.id));
            next = page.last().map(|pending| pending.id).or(next);
            self.resolve_names(page, &mut entries).await?;
            self.entry_index().set_scanned_to(next.unwrap_or(EntryId::MIN));
            if !full {
                next = None;
                break;
            }
        }
        self.entry_index().retain(after, next.unwrap_or(EntryId::MAX), &scanned);
        Ok(PendingScan { entries, next })
    }

    /// Adds entries delivered since the last scan to the index.
    pub(crate) async fn scan_new(&self) -> Result<()> {
        for _ in 0..PAGES_MAX {
            let scanned_to = self.entry_index().scanned_to();
            let page = self.pending(scanned_to, PENDING_PAGE).await?;
            let full = page.len() == PENDING_PAGE;
            let last = page.last().map(|pending| pending.id);
            self.resolve_names(page, &mut Vec::new()).await?;
            if let Some(last) = last {
                self.entry_index().set_scanned_to(last);
            }
            if !full {
                break;
            }
        }
        Ok(())
    }

    /// The first of these entries that is pending.
    pub(crate) async fn first_pending(&self, ids: &[EntryId]) -> Result<Option<PendingDelivery>> {
        for id in ids {
            let scanned = self.pending(before(*id), 1).await?;
            match scanned.into_iter().next() {
                Some(pending) if pending.id == *id => return Ok(Some(pending)),
                _ => self.entry_index().remove(*id),
            }
        }
        Ok(None)
    }

    /// Keeps these entries alive. Returns those that are no longer pending for this consumer.
    pub(crate) async fn keep_entries_alive(&self, ids: &[EntryId]) -> Result<HashSet<EntryId>> {
        let Names { input, group, .. } = &self.names;
        let consumer = &self.identity.consumer;
        let calls = ids
            .chunks(KEEP_ALIVE_BATCH)
            .map(|ids| self.backend.keep_alive(input, group, consumer, ids));
        Ok(try_join_all(calls).await?.into_iter().flatten().collect())
    }

    /// The lease holders of streams, in order.
    pub(crate) async fn holders(&self, streams: &[StreamName]) -> Result<Vec<Option<LeaseInfo>>> {
        let mut holders = Vec::with_capacity(streams.len());
        for chunk in streams.chunks(LEASES_MAX) {
            let leases: Vec<LeaseName> =
                chunk.iter().map(|stream| self.names.lease(stream)).collect::<Result<_>>()?;
            holders.extend(self.backend.leases(&leases).await?);
        }
        Ok(holders)
    }

    async fn pending(&self, after: Option<EntryId>, count: usize) -> Result<Vec<PendingDelivery>> {
        let query = PendingDeliveryQuery {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: None,
            min_idle: Duration::ZERO,
            after,
            count,
        };
        match self.backend.pending(query).await {
            // The group was deleted (flush). Nothing is pending.
            Err(StreamError::NoGroup { .. }) => {
                self.restore_group().await?;
                Ok(Vec::new())
            }
            other => other,
        }
    }

    /// Finds the stream of each pending entry; reads entries that are not in the index.
    async fn resolve_names(
        &self,
        page: Vec<PendingDelivery>,
        entries: &mut Vec<(PendingDelivery, StreamName)>,
    ) -> Result<()> {
        let mut names: HashMap<EntryId, Option<StreamName>> = HashMap::new();
        let mut unseen = Vec::new();
        {
            let index = self.entry_index();
            for PendingDelivery { id, .. } in &page {
                match index.get(*id) {
                    Some(stream) => drop(names.insert(*id, stream.cloned())),
                    None => unseen.push(*id),
                }
            }
        }
        self.read(&unseen, &mut names).await?;
        let mut unresolved = Vec::new();
        for pending in page {
            match names.remove(&pending.id).flatten() {
                Some(stream) => entries.push((pending, stream)),
                // Malformed or deleted.
                None => unresolved.push(pending.id),
            }
        }
        self.remove_malformed(&unresolved).await
    }

    /// Reads entries, adds them to the index and returns their streams. `ids` are ascending.
    async fn read(
        &self,
        ids: &[EntryId],
        names: &mut HashMap<EntryId, Option<StreamName>>,
    ) -> Result<()> {
        let (mut ids, Some(to)) = (ids, ids.last().copied()) else { return Ok(()) };
        while let Some(from) = ids.first().copied() {
            let range = Range { from, to, direction: Direction::Forward, count: RANGE_PAGE };
            let entries = self.backend.range(&self.names.input, range).await?;
            let Some(last) = entries.last().map(|entry| entry.id) else { break };
            let full = entries.len() == RANGE_PAGE;
            let mut index = self.entry_index();
            for entry in entries {
                // Other entries in the range are in the index or not pending.
                if ids.binary_search(&entry.id).is_ok() {
                    let input = input::parse(&entry.fields, &self.names).ok();
                    let stream = input.map(|input| input.stream);
                    index.insert(entry.id, stream.clone());
                    names.insert(entry.id, stream);
                }
            }
            if !full {
                break;
            }
            ids = &ids[ids.partition_point(|id| *id <= last)..];
        }
        Ok(())
    }

    /// Dead-letters malformed pending entries and acknowledges deleted ones, once their consumer is gone.
    async fn remove_malformed(&self, ids: &[EntryId]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let reclaim = ReclaimRequest {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: &self.identity.consumer,
            fence: None,
            from: ReclaimFrom::Ids(ids),
            // The consumer that read them is dead-lettering them itself.
            min_idle: self.config.lease_ttl(),
            after: None,
            count: ids.len(),
        };
        let reclaimed = self.backend.reclaim(reclaim).await?;
        if !reclaimed.deleted.is_empty() {
            debug!(
                count = reclaimed.deleted.len(),
                "acknowledged input entries that were deleted while pending"
            );
        }
        for delivery in reclaimed.entries {
            let reason = match input::parse(&delivery.fields, &self.names) {
                Err(MalformedInput(reason)) => reason,
                // The entry has changed since the scan: the stream was recreated.
                Ok(_) => continue,
            };
            warn!(entry_id = %delivery.id, reason, "malformed input entry moved to the dead letters");
            self.dead_letter(delivery.id, &delivery.fields, &reason, None).await?;
            self.metrics.count(MALFORMED, 1);
        }
        Ok(())
    }
}
