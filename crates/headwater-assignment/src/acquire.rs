//! Acquiring streams: from new input entries, and from owners that died or released them.
//!
//! Guarantees: the lease is acquired first, so one process wins. Then the input entry is confirmed under the
//! lease, because a process that paused between read and lease may have lost the entry to another one that
//! finished the work.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use headwater_stream::{
    DeliveredEntry, EntryId, Fence, ReclaimFrom, ReclaimRequest, Result, StreamError, StreamName,
};
use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};

use crate::error::ClaimError;
use crate::input::{self, Input, MalformedInput};
use crate::member::{AssignmentMember, LeaseGuard};
use crate::metrics::{CLAIMS, MALFORMED, QUARANTINED};
use crate::notification::{Notification, NotificationSlot};
use crate::owned::Owned;
use crate::owned_set::{NoCapacity, OwnedReservation};

/// How long notifications wait for those of earlier entries.
const ORDER_WAIT: Duration = Duration::from_secs(1);

/// The outcome of a new input entry.
enum NewEntry<'a> {
    /// Its lease is held: it can be owned, and its notification sent.
    Acquired {
        input: Input,
        reservation: OwnedReservation,
        slot: NotificationSlot,
        guard: LeaseGuard<'a>,
    },
    /// Dead-lettered, or another consumer has it.
    Handled,
    /// To be released for other consumers.
    Surplus,
    /// To be retried: the backend was unavailable.
    Retry,
}

impl AssignmentMember {
    /// Claims a stream that was assigned before. One caller wins across all processes.
    pub(crate) async fn claim(&self, stream: &StreamName) -> Result<Owned, ClaimError> {
        let result = self.try_claim(stream).await;
        // Notify after the entry has been moved, so that a receiver does not find it any more.
        if let Err(ClaimError::Quarantined { owners, .. }) = &result {
            self.notification_queue.retract_expired(stream);
            let (stream, owners) = (stream.clone(), *owners);
            self.notification_queue.send(Notification::Quarantined { stream, owners });
        }
        let result_label = match &result {
            Ok(_) => "won",
            Err(ClaimError::AlreadyClaimed { .. }) => "already_claimed",
            Err(ClaimError::Unknown { .. }) => "unknown",
            Err(ClaimError::Quarantined { .. }) => "quarantined",
            Err(ClaimError::AtCapacity { .. }) => "at_capacity",
            Err(ClaimError::Closed) => "closed",
            Err(ClaimError::Backend(_)) => "failed",
        };
        self.metrics.count_by(CLAIMS, "result", result_label);
        result
    }

    async fn try_claim(&self, stream: &StreamName) -> Result<Owned, ClaimError> {
        let reservation =
            self.owned_set.reserve(stream).map_err(|no_capacity| match no_capacity {
                NoCapacity::Owned => {
                    let by = Some(self.identity.holder.clone());
                    ClaimError::AlreadyClaimed { stream: stream.clone(), by }
                }
                NoCapacity::Full => ClaimError::AtCapacity { streams_max: self.config.streams_max },
                NoCapacity::Closed => ClaimError::Closed,
            })?;
        let guard = self.acquire_lease(stream).await?;
        let found = match self.fetch(stream, guard.fence()).await {
            Ok(found) => found,
            Err(error) => {
                guard.release().await;
                return Err(match error {
                    StreamError::Fenced { .. } => {
                        ClaimError::AlreadyClaimed { stream: stream.clone(), by: None }
                    }
                    other => other.into(),
                });
            }
        };
        let Some((delivery, input)) = found else {
            guard.release().await;
            return Err(ClaimError::Unknown { stream: stream.clone() });
        };
        if delivery.deliveries > self.config.owners_max {
            let owners = delivery.deliveries - 1;
            let result = self.quarantine(stream, &delivery, owners, &guard).await;
            guard.release().await;
            result?;
            return Err(ClaimError::Quarantined { stream: stream.clone(), owners });
        }
        match self.take_ownership(input, &delivery, reservation, guard) {
            Ok(owned) => Ok(owned),
            Err(guard) => {
                self.release_entries(&[delivery.id]).await?;
                guard.release().await;
                Err(ClaimError::Closed)
            }
        }
    }

    /// Reclaims the pending entry of a stream under its lease. Tries the cheapest lookup first.
    async fn fetch(
        &self,
        stream: &StreamName,
        fence: &Fence,
    ) -> Result<Option<(DeliveredEntry, Input)>> {
        if let Some(found) = self.fetch_known(stream, fence).await? {
            return Ok(Some(found));
        }
        self.scan_new().await?;
        if let Some(found) = self.fetch_known(stream, fence).await? {
            return Ok(Some(found));
        }
        let mut after = None;
        loop {
            after = self.scan(after).await?.next;
            if let Some(found) = self.fetch_known(stream, fence).await? {
                return Ok(Some(found));
            }
            if after.is_none() {
                return Ok(None);
            }
        }
    }

    async fn fetch_known(
        &self,
        stream: &StreamName,
        fence: &Fence,
    ) -> Result<Option<(DeliveredEntry, Input)>> {
        let ids = self.entry_index().ids_of(stream);
        for id in ids {
            let Some(delivery) = self.reclaim(id, fence).await? else {
                self.entry_index().remove(id);
                continue;
            };
            match input::parse(&delivery.fields, &self.names) {
                Ok(input) if input.stream == *stream => return Ok(Some((delivery, input))),
                // Another entry has this id: the input stream was recreated.
                _ => {
                    self.entry_index().remove(id);
                    self.release_entries(&[id]).await?;
                }
            }
        }
        Ok(None)
    }

    /// Reclaims one pending entry from any consumer. `None` if it is not pending.
    pub(crate) async fn reclaim(
        &self,
        id: EntryId,
        fence: &Fence,
    ) -> Result<Option<DeliveredEntry>> {
        let reclaim = ReclaimRequest {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: &self.identity.consumer,
            fence: Some(fence),
            from: ReclaimFrom::Ids(&[id]),
            min_idle: Duration::ZERO,
            after: None,
            count: 1,
        };
        match self.backend.reclaim(reclaim).await {
            Ok(reclaimed) => Ok(reclaimed.entries.into_iter().next()),
            Err(StreamError::NoGroup { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn quarantine(
        &self,
        stream: &StreamName,
        delivery: &DeliveredEntry,
        owners: u64,
        guard: &LeaseGuard<'_>,
    ) -> Result<()> {
        let reason = format!("quarantined after {owners} owners");
        self.dead_letter(delivery.id, &delivery.fields, &reason, Some(guard.fence())).await?;
        warn!(%stream, entry_id = %delivery.id, owners, "stream quarantined");
        self.metrics.count(QUARANTINED, 1);
        Ok(())
    }

    /// Acquires the streams of new entries, and sends their notifications in the order of the entries: one whose server does
    /// not answer delays those behind it for [`ORDER_WAIT`] at most. Returns the entries to retry because the backend was
    /// unavailable.
    pub(crate) async fn acquire_new(&self, deliveries: Vec<DeliveredEntry>) -> Vec<DeliveredEntry> {
        let take = |(at, delivery)| async move { (at, self.take_new(delivery).await) };
        let mut taking: FuturesUnordered<_> = deliveries.iter().enumerate().map(take).collect();
        let ordered_until = Instant::now() + ORDER_WAIT;
        let (mut ended, mut next) = (BTreeMap::new(), 0);
        let (mut again, mut surplus, mut guards) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let result = match ended.is_empty() {
                true => Ok(taking.next().await),
                false => timeout_at(ordered_until, taking.next()).await,
            };
            match result {
                Ok(Some((at, entry))) => drop(ended.insert(at, entry)),
                Ok(None) => break,
                Err(_) => debug!("an input entry takes long; those behind it no longer wait"),
            }
            while let Some(first) = ended.first_entry()
                && (*first.key() == next || Instant::now() >= ordered_until)
            {
                let (at, entry) = first.remove_entry();
                next = next.max(at + 1);
                match entry {
                    NewEntry::Acquired { input, reservation, slot, guard } => {
                        match self.take_ownership(input, &deliveries[at], reservation, guard) {
                            Ok(owned) => slot.added(owned),
                            Err(guard) => {
                                surplus.push(deliveries[at].id);
                                guards.push(guard);
                            }
                        }
                    }
                    NewEntry::Handled => {}
                    NewEntry::Surplus => surplus.push(deliveries[at].id),
                    NewEntry::Retry => again.push(at),
                }
            }
        }
        drop(taking);
        if let Err(error) = self.release_entries(&surplus).await {
            warn!(count = surplus.len(), %error, "could not release input entries; the sweep will find them");
        }
        // Afterwards, so that those it wakes find the entries released.
        drop(guards);
        again.into_iter().map(|at| deliveries[at].clone()).collect()
    }

    async fn take_new(&self, delivery: &DeliveredEntry) -> NewEntry<'_> {
        let id = delivery.id;
        let input = match input::parse(&delivery.fields, &self.names) {
            Ok(input) => input,
            Err(MalformedInput(reason)) => {
                warn!(entry_id = %id, reason, "malformed input entry moved to the dead letters");
                if let Err(error) = self.dead_letter(id, &delivery.fields, &reason, None).await {
                    warn!(entry_id = %id, %error, "could not write a dead letter; retrying");
                    return NewEntry::Retry;
                }
                self.metrics.count(MALFORMED, 1);
                return NewEntry::Handled;
            }
        };
        let stream = &input.stream;
        let (Ok(reservation), Some(slot)) =
            (self.owned_set.reserve(stream), self.notification_queue.reserve())
        else {
            // Already owned (the stream was added twice), or a concurrent claim used the capacity.
            return NewEntry::Surplus;
        };
        let guard = match self.acquire_lease(stream).await {
            Ok(guard) => guard,
            Err(ClaimError::Backend(error)) if error.is_transient() => {
                warn!(%stream, %error, "could not acquire the lease; retrying");
                return NewEntry::Retry;
            }
            // The stream was added twice: the entry waits until its lease is free.
            Err(ClaimError::AlreadyClaimed { .. }) => return NewEntry::Surplus,
            // The error concerns only this stream, so do not block the others. The sweep retries it.
            Err(error) => {
                warn!(%stream, %error, "could not acquire the lease; releasing the input entry");
                return NewEntry::Surplus;
            }
        };
        match self.keep_entries_alive(&[id]).await {
            Ok(missing) if missing.is_empty() => {}
            Ok(_) => {
                debug!(entry_id = %id, "another consumer reclaimed the entry before its lease was acquired");
                guard.release().await;
                return NewEntry::Handled;
            }
            Err(error) => {
                warn!(entry_id = %id, %error, "could not confirm the new input entry; retrying");
                return NewEntry::Retry;
            }
        }
        NewEntry::Acquired { input, reservation, slot, guard }
    }

    /// Records the ownership. Returns the lease while closing; the caller then releases it.
    fn take_ownership<'a>(
        &self,
        input: Input,
        delivery: &DeliveredEntry,
        reservation: OwnedReservation,
        guard: LeaseGuard<'a>,
    ) -> Result<Owned, LeaseGuard<'a>> {
        let Input { stream, info } = input;
        let entry = (delivery.id, delivery.deliveries);
        let owned = Owned::new(stream, info, entry, guard.held.clone(), self.metrics.clone());
        if !reservation.commit(owned.clone()) {
            return Err(guard);
        }
        guard.retain();
        self.entry_index().insert(delivery.id, Some(owned.stream().clone()));
        self.notification_queue.retract_expired(owned.stream());
        self.count_owned();
        debug!(stream = %owned.stream(), epoch = %owned.epoch(), owners = owned.owners(), "stream owned");
        Ok(owned)
    }
}
