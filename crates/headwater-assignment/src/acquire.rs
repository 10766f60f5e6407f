//! Acquiring streams: from new input entries, and from owners that died or released them.
//!
//! Guarantees: the lease is acquired first, so one process wins. Then the input entry is confirmed under the
//! lease, because a process that paused between read and lease may have lost the entry to another one that
//! finished the work.

use futures_util::future::join_all;
use headwater_stream::{
    DeliveredEntry, EntryId, Fence, LeaseName, ReclaimFrom, ReclaimRequest, Result, StreamError,
    StreamName,
};
use tracing::{debug, warn};

use crate::error::ClaimError;
use crate::input::{self, Input, MalformedInput};
use crate::member::{AssignmentMember, LeaseGuard};
use crate::metrics::{CLAIMS, MALFORMED, QUARANTINED};
use crate::notification::{Notification, NotificationSlot};
use crate::owned::Owned;
use crate::owned_set::{NoCapacity, OwnedReservation};

/// A new input entry with the capacity reserved for it.
struct NewStream {
    delivery: DeliveredEntry,
    input: Input,
    reservation: OwnedReservation,
    slot: NotificationSlot,
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
        let (id, lease) = (delivery.id, guard.fence().lease.clone());
        let Some(owned) = self.take_ownership(input, &delivery, reservation, guard) else {
            self.release_entries(&[id]).await?;
            self.release_leases(&[lease]).await;
            return Err(ClaimError::Closed);
        };
        Ok(owned)
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
            min_idle: std::time::Duration::ZERO,
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

    /// Acquires the streams of new entries. Returns the entries to retry because the backend was unavailable.
    pub(crate) async fn acquire_new(&self, deliveries: Vec<DeliveredEntry>) -> Vec<DeliveredEntry> {
        let mut again = Vec::new();
        let mut surplus = Vec::new();
        let mut wanted = Vec::new();
        for delivery in deliveries {
            match input::parse(&delivery.fields, &self.names) {
                Err(MalformedInput(reason)) => {
                    let (id, fields) = (delivery.id, &delivery.fields);
                    warn!(entry_id = %id, reason, "malformed input entry moved to the dead letters");
                    match self.dead_letter(id, fields, &reason, None).await {
                        Ok(()) => self.metrics.count(MALFORMED, 1),
                        Err(error) => {
                            warn!(entry_id = %id, %error, "could not write a dead letter; retrying");
                            again.push(delivery);
                        }
                    }
                }
                Ok(input) => {
                    match (self.owned_set.reserve(&input.stream), self.notification_queue.reserve())
                    {
                        (Ok(reservation), Some(slot)) => {
                            wanted.push(NewStream { delivery, input, reservation, slot });
                        }
                        // Already owned (the stream was added twice), or a concurrent claim used the capacity.
                        _ => surplus.push(delivery.id),
                    }
                }
            }
        }
        let unused = self.acquire_leases_and_own(wanted, &mut surplus, &mut again).await;
        if let Err(error) = self.release_entries(&surplus).await {
            warn!(count = surplus.len(), %error, "could not release input entries; the sweep will find them");
        }
        // Last, so that consumers notified of the leases find the entries released.
        if !unused.is_empty() {
            self.release_leases(&unused).await;
        }
        again
    }

    /// Acquires leases and takes ownership. Returns acquired leases that are not used.
    async fn acquire_leases_and_own(
        &self,
        wanted: Vec<NewStream>,
        surplus: &mut Vec<EntryId>,
        again: &mut Vec<DeliveredEntry>,
    ) -> Vec<LeaseName> {
        let locks =
            join_all(wanted.iter().map(|wanted| self.acquire_lease(&wanted.input.stream))).await;
        let (mut won, mut unused) = (Vec::new(), Vec::new());
        for (wanted, lock) in wanted.into_iter().zip(locks) {
            match lock {
                Ok(guard) => won.push((wanted, guard)),
                Err(ClaimError::Backend(error)) if error.is_transient() => {
                    warn!(stream = %wanted.input.stream, %error, "could not acquire the lease; retrying");
                    again.push(wanted.delivery);
                }
                // The stream was added twice: the entry waits until its lease is free.
                Err(ClaimError::AlreadyClaimed { .. }) => surplus.push(wanted.delivery.id),
                // The error concerns only this stream, so do not block the others. The sweep retries it.
                Err(error) => {
                    warn!(stream = %wanted.input.stream, %error, "could not acquire the lease; releasing the input entry");
                    surplus.push(wanted.delivery.id);
                }
            }
        }
        if won.is_empty() {
            return unused;
        }
        let ids: Vec<EntryId> = won.iter().map(|(wanted, _)| wanted.delivery.id).collect();
        let missing = match self.keep_entries_alive(&ids).await {
            Ok(missing) => missing,
            Err(error) => {
                warn!(count = ids.len(), %error, "could not confirm new input entries; retrying");
                for (wanted, guard) in won {
                    unused.push(guard.into_held().fence().lease.clone());
                    again.push(wanted.delivery);
                }
                return unused;
            }
        };
        for (wanted, guard) in won {
            let NewStream { delivery, input, reservation, slot } = wanted;
            if missing.contains(&delivery.id) {
                debug!(entry_id = %delivery.id, "another consumer reclaimed the entry before its lease was acquired");
                unused.push(guard.into_held().fence().lease.clone());
                continue;
            }
            let lease = guard.fence().lease.clone();
            match self.take_ownership(input, &delivery, reservation, guard) {
                Some(owned) => slot.added(owned),
                None => {
                    surplus.push(delivery.id);
                    unused.push(lease);
                }
            }
        }
        unused
    }

    /// Records the ownership. `None` while closing; the caller then releases the lease.
    fn take_ownership(
        &self,
        input: Input,
        delivery: &DeliveredEntry,
        reservation: OwnedReservation,
        guard: LeaseGuard<'_>,
    ) -> Option<Owned> {
        let Input { stream, info } = input;
        let entry = (delivery.id, delivery.deliveries);
        let owned = Owned::new(stream, info, entry, guard.into_held(), self.metrics.clone());
        if !reservation.commit(owned.clone()) {
            return None;
        }
        self.entry_index().insert(delivery.id, Some(owned.stream().clone()));
        self.notification_queue.retract_expired(owned.stream());
        self.count_owned();
        debug!(stream = %owned.stream(), epoch = %owned.epoch(), owners = owned.owners(), "stream owned");
        Some(owned)
    }
}
