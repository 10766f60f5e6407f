//! A consumer group on one stream: its read position and pending entries.

use std::collections::{BTreeMap, BTreeSet};

use super::chunked_map::ChunkedMap;
use crate::clock::Timestamp;
use crate::embedded::codec::RecordError;
use crate::entry::EntryId;
use crate::name::{ConsumerName, GroupName};
use crate::streams::SettleAction;

#[derive(Clone, Debug)]
pub(in crate::embedded) struct GroupState {
    pub(in crate::embedded) name: GroupName,
    pub(in crate::embedded) last_delivered: EntryId,
    /// Number of entries after `last_delivered`; maintained because counting would be slow.
    pub(super) unread: u64,
    /// Entries are delivered in id order, so this grows at its end.
    pub(in crate::embedded) pending: ChunkedMap<PendingEntry>,
    pub(in crate::embedded) consumers: BTreeMap<Box<str>, ConsumerState>,
}

/// A pending entry and its last delivery.
#[derive(Clone, Debug)]
pub(in crate::embedded) struct PendingEntry {
    pub(in crate::embedded) consumer: ConsumerName,
    pub(in crate::embedded) at: Timestamp,
    pub(in crate::embedded) deliveries: u64,
}

impl PendingEntry {
    /// Whether it was released: any consumer may then claim it, whatever minimum idle time the claim has.
    pub(in crate::embedded) fn is_released(&self) -> bool {
        self.consumer.as_str() == SettleAction::RELEASED
    }
}

#[derive(Clone, Debug)]
pub(in crate::embedded) struct ConsumerState {
    pub(in crate::embedded) name: ConsumerName,
    pub(in crate::embedded) seen_at: Timestamp,
    /// Ids in the group's `pending` that belong to this consumer, so that listing them does not scan the group.
    pub(in crate::embedded) pending: BTreeSet<EntryId>,
}

impl GroupState {
    pub(super) fn new(name: GroupName, last_delivered: EntryId, unread: u64) -> Self {
        let (pending, consumers) = Default::default();
        Self { name, last_delivered, unread, pending, consumers }
    }

    /// Number of undelivered entries.
    pub(in crate::embedded) fn unread(&self) -> u64 {
        self.unread
    }

    /// The oldest id that this group still needs.
    pub(in crate::embedded) fn oldest_needed(&self) -> EntryId {
        let unread = self.last_delivered.next();
        self.pending.first_id().map_or(unread, |oldest| unread.min(oldest))
    }

    pub(super) fn touch(
        &mut self,
        consumer: &str,
        at: Timestamp,
    ) -> Result<&mut ConsumerState, RecordError> {
        touch(&mut self.consumers, consumer, at)
    }

    /// Makes entries pending for `consumer`. They must not be pending yet.
    pub(super) fn deliver(
        &mut self,
        ids: impl Iterator<Item = EntryId>,
        consumer: &str,
        at: Timestamp,
    ) -> Result<(), RecordError> {
        let consumer = touch(&mut self.consumers, consumer, at)?;
        for id in ids {
            let delivered = PendingEntry { consumer: consumer.name.clone(), at, deliveries: 1 };
            if !self.pending.push(id, delivered) {
                return Err(NOT_ASCENDING);
            }
            consumer.pending.insert(id);
            self.last_delivered = id;
            self.unread = self.unread.saturating_sub(1);
        }
        Ok(())
    }

    /// Restores a pending entry from a snapshot.
    pub(super) fn restore(
        &mut self,
        id: EntryId,
        consumer: &str,
        at: Timestamp,
        deliveries: u64,
    ) -> Result<(), RecordError> {
        let owner = self.consumers.get_mut(consumer).ok_or("unknown consumer")?;
        let delivered = PendingEntry { consumer: owner.name.clone(), at, deliveries };
        owner.pending.insert(id);
        match self.pending.push(id, delivered) {
            true => Ok(()),
            false => Err(NOT_ASCENDING),
        }
    }

    /// Removes a pending entry. Returns whether it was pending.
    pub(super) fn acknowledge(&mut self, id: EntryId) -> bool {
        let Some(delivered) = self.pending.remove(id) else { return false };
        if let Some(owner) = self.consumers.get_mut(delivered.consumer.as_str()) {
            owner.pending.remove(&id);
        }
        true
    }

    /// Assigns a pending entry to a consumer and increments its delivery count.
    pub(super) fn claim(
        &mut self,
        id: EntryId,
        consumer: &str,
        at: Timestamp,
    ) -> Result<(), RecordError> {
        let delivered = self.reassign(id, consumer, at)?;
        delivered.deliveries = delivered.deliveries.saturating_add(1);
        Ok(())
    }

    /// Releases a pending entry from its consumer and decrements its delivery count.
    pub(super) fn release(&mut self, id: EntryId, at: Timestamp) -> Result<(), RecordError> {
        let delivered = self.reassign(id, SettleAction::RELEASED, at)?;
        delivered.deliveries = delivered.deliveries.saturating_sub(1);
        // The longest possible idle time.
        delivered.at = Timestamp::default();
        Ok(())
    }

    /// Resets the idle time of a pending entry.
    pub(super) fn keep_alive(&mut self, id: EntryId, at: Timestamp) -> Result<(), RecordError> {
        self.pending.get_mut(id).ok_or(NOT_PENDING)?.at = at;
        Ok(())
    }

    fn reassign(
        &mut self,
        id: EntryId,
        consumer: &str,
        at: Timestamp,
    ) -> Result<&mut PendingEntry, RecordError> {
        let delivered = self.pending.get_mut(id).ok_or(NOT_PENDING)?;
        if let Some(owner) = self.consumers.get_mut(delivered.consumer.as_str()) {
            owner.pending.remove(&id);
        }
        let taker = touch(&mut self.consumers, consumer, at)?;
        taker.pending.insert(id);
        delivered.consumer = taker.name.clone();
        delivered.at = at;
        Ok(delivered)
    }
}

const NOT_ASCENDING: RecordError = "pending entry ids are not ascending";
const NOT_PENDING: RecordError = "the entry is not pending";

fn touch<'a>(
    consumers: &'a mut BTreeMap<Box<str>, ConsumerState>,
    consumer: &str,
    at: Timestamp,
) -> Result<&'a mut ConsumerState, RecordError> {
    if !consumers.contains_key(consumer) {
        let name = ConsumerName::new(consumer).map_err(|_| "invalid consumer name")?;
        let new = ConsumerState { name, seen_at: at, pending: BTreeSet::new() };
        consumers.insert(consumer.into(), new);
    }
    let consumer = consumers.get_mut(consumer).ok_or("unknown consumer")?;
    consumer.seen_at = at;
    Ok(consumer)
}
