//! PendingScan what is pending in the input, and reading the entries that were not seen before.
//!
//! A whole listing costs as much as there are pending entries, so only the sweep makes one; a hint about a stream that is
//! not known yet lists what was delivered since.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::try_join_all;
use headwater_stream::limits::LEASES_MAX;
use headwater_stream::{
    Direction, EntryId, LeaseInfo, LeaseName, Pending, PendingQuery, Range, Reclaim, ReclaimFrom,
    Result, StreamError, StreamName,
};
use tracing::{debug, warn};

use crate::entry_index::before;
use crate::input::{self, MalformedInput};
use crate::member::AssignmentMember;
use crate::names::Names;

/// Pending entries in one call.
const PENDING_PAGE: usize = 2000;

/// Pages in one pass: a pass that does not get to the end goes on with the next one.
const PAGES_MAX: usize = 100;

/// Entries in one read: each can be a megabyte.
const RANGE_PAGE: usize = 500;

/// Entries kept alive in one call; the calls are made together. More would hold up a server that does one thing at a time.
const KEEP_ALIVE_BATCH: usize = 1000;

/// One pass over pending entries.
pub(crate) struct PendingScan {
    /// What is pending and names a stream, in id order.
    pub(crate) entries: Vec<(Pending, StreamName)>,
    /// Where the next pass goes on; `None` if this one got to the end.
    pub(crate) next: Option<EntryId>,
}

impl AssignmentMember {
    /// Lists what is pending after `after`, and forgets what is no longer.
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

    /// Gets to know what was delivered since the last listing.
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
    pub(crate) async fn first_pending(&self, ids: &[EntryId]) -> Result<Option<Pending>> {
        for id in ids {
            let scanned = self.pending(before(*id), 1).await?;
            match scanned.into_iter().next() {
                Some(pending) if pending.id == *id => return Ok(Some(pending)),
                _ => self.entry_index().remove(*id),
            }
        }
        Ok(None)
    }

    /// Tells the group that these entries are in hand. Returns those that are no longer ours.
    pub(crate) async fn keep_entries_alive(&self, ids: &[EntryId]) -> Result<HashSet<EntryId>> {
        let Names { input, group, .. } = &self.names;
        let consumer = &self.identity.consumer;
        let calls = ids
            .chunks(KEEP_ALIVE_BATCH)
            .map(|ids| self.backend.keep_alive(input, group, consumer, ids));
        Ok(try_join_all(calls).await?.into_iter().flatten().collect())
    }

    /// Who holds the leases of streams, in order.
    pub(crate) async fn holders(&self, streams: &[StreamName]) -> Result<Vec<Option<LeaseInfo>>> {
        let mut holders = Vec::with_capacity(streams.len());
        for chunk in streams.chunks(LEASES_MAX) {
            let leases: Vec<LeaseName> =
                chunk.iter().map(|stream| self.names.lease(stream)).collect::<Result<_>>()?;
            holders.extend(self.backend.leases(&leases).await?);
        }
        Ok(holders)
    }

    async fn pending(&self, after: Option<EntryId>, count: usize) -> Result<Vec<Pending>> {
        let query = PendingQuery {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: None,
            min_idle: Duration::ZERO,
            after,
            count,
        };
        match self.backend.pending(query).await {
            // A flush took it. It is there again for the next entries, and nothing is pending.
            Err(StreamError::NoGroup { .. }) => {
                self.ensure_group().await?;
                Ok(Vec::new())
            }
            other => other,
        }
    }

    /// Finds the stream of each pending entry, reading those that were not seen before.
    async fn resolve_names(
        &self,
        page: Vec<Pending>,
        entries: &mut Vec<(Pending, StreamName)>,
    ) -> Result<()> {
        let mut names: HashMap<EntryId, Option<StreamName>> = HashMap::new();
        let mut unseen = Vec::new();
        {
            let index = self.entry_index();
            for Pending { id, .. } in &page {
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
                // It names no stream, or does not exist any more.
                None => unresolved.push(pending.id),
            }
        }
        self.remove_malformed(&unresolved).await
    }

    /// Reads entries, and remembers and returns which streams they name. `ids` grow.
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
                // Between those asked for lie others, which are known or not pending.
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

    /// Buries pending entries that name no stream, and drops those that exist no more, once nobody has them in hand.
    async fn remove_malformed(&self, ids: &[EntryId]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let reclaim = Reclaim {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: &self.identity.consumer,
            fence: None,
            from: ReclaimFrom::Ids(ids),
            // Whoever read them is burying them right now.
            min_idle: self.config.lease_ttl(),
            after: None,
            count: ids.len(),
        };
        let reclaimed = self.backend.reclaim(reclaim).await?;
        if !reclaimed.deleted.is_empty() {
            debug!(count = reclaimed.deleted.len(), "input entries were deleted while pending");
        }
        for delivery in reclaimed.entries {
            let reason = match input::parse(&delivery.fields, &self.names) {
                Err(MalformedInput(reason)) => reason,
                // Read as something else a moment ago: not ours to bury.
                Ok(_) => continue,
            };
            warn!(entry_id = %delivery.id, reason, "malformed input entry, moved to the dead letters");
            self.dead_letter(delivery.id, &delivery.fields, &reason, None).await?;
            self.metrics.malformed();
        }
        Ok(())
    }
}
