//! One stream: its entries, the last id it assigned, and its groups.

use std::collections::{BTreeMap, VecDeque};

use super::entries::StreamEntries;
use super::group::GroupState;
use crate::clock::Timestamp;
use crate::embedded::codec::RecordError;
use crate::entry::{EntryId, Fields};
use crate::name::GroupName;

const NOT_ASCENDING: RecordError = "entry ids are not ascending";

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct StreamState {
    pub(in crate::embedded) entries: StreamEntries,
    /// The greatest id ever assigned. Later ids are greater, even after entries are deleted or the clock steps
    /// back.
    pub(in crate::embedded) last_id: EntryId,
    pub(in crate::embedded) groups: BTreeMap<Box<str>, GroupState>,
    /// First id and commit of each recent append, so that a reader can wait until what it read is durable.
    recent: VecDeque<(EntryId, u64)>,
}

impl StreamState {
    /// The next id; `None` if the ids are exhausted.
    pub(in crate::embedded) fn next_id(last: EntryId, now: Timestamp) -> Option<EntryId> {
        if now.as_millis() > last.ms {
            return Some(EntryId::new(now.as_millis(), 0));
        }
        (last < EntryId::MAX).then(|| last.next())
    }

    pub(super) fn append(&mut self, first: EntryId, entries: &[Fields]) -> Result<(), RecordError> {
        if first <= self.last_id {
            return Err(NOT_ASCENDING);
        }
        let mut id = first;
        for (index, fields) in entries.iter().enumerate() {
            if index > 0 {
                id = id.next();
            }
            if !self.entries.push(id, fields.clone()) {
                return Err(NOT_ASCENDING);
            }
        }
        self.last_id = id;
        for group in self.groups.values_mut() {
            if group.last_delivered < first {
                group.unread += entries.len() as u64;
            } else {
                // The group starts after an id that no entry had reached yet.
                group.unread = self.entries.count_after(group.last_delivered);
            }
        }
        Ok(())
    }

    pub(super) fn restore(&mut self, id: EntryId, fields: Fields) -> Result<(), RecordError> {
        if id > self.last_id || !self.entries.push(id, fields) {
            return Err(NOT_ASCENDING);
        }
        Ok(())
    }

    pub(super) fn create_group(&mut self, name: &str, after: EntryId) -> Result<(), RecordError> {
        let group = GroupName::new(name).map_err(|_| "invalid group name")?;
        let unread = self.entries.count_after(after);
        match self.groups.insert(name.into(), GroupState::new(group, after, unread)) {
            None => Ok(()),
            Some(_) => Err("the group already exists"),
        }
    }

    pub(super) fn group_mut(&mut self, name: &str) -> Result<&mut GroupState, RecordError> {
        self.groups.get_mut(name).ok_or("unknown group")
    }

    pub(super) fn deliver(
        &mut self,
        group: &str,
        consumer: &str,
        through: EntryId,
        at: Timestamp,
    ) -> Result<(), RecordError> {
        let group = self.groups.get_mut(group).ok_or("unknown group")?;
        let ids = self.entries.after(group.last_delivered).map(|(id, _)| *id);
        group.deliver(ids.take_while(|id| *id <= through), consumer, at)
    }

    pub(super) fn trim(&mut self, before: EntryId) {
        self.entries.remove_before(before);
        // A forced trim also removes unread entries.
        let is_cut =
            |group: &&mut GroupState| group.unread > 0 && group.last_delivered.next() < before;
        for group in self.groups.values_mut().filter(is_cut) {
            group.unread = self.entries.count_after(group.last_delivered);
        }
    }

    pub(super) fn delete(&mut self, ids: &[EntryId]) {
        for id in ids {
            if self.entries.remove(*id) {
                for group in self.groups.values_mut().filter(|group| group.last_delivered < *id) {
                    group.unread = group.unread.saturating_sub(1);
                }
            }
        }
    }

    /// Every group has read and acknowledged everything before this id; `None` without groups.
    pub(in crate::embedded) fn needed_from(&self) -> Option<EntryId> {
        self.groups.values().map(GroupState::oldest_needed).min()
    }

    /// Records the commit of the entries from `first` on and drops commits that are durable.
    pub(in crate::embedded) fn record_commit(&mut self, first: EntryId, commit: u64, durable: u64) {
        while self.recent.front().is_some_and(|(_, commit)| *commit <= durable) {
            self.recent.pop_front();
        }
        self.recent.push_back((first, commit));
    }

    /// The commit that must be durable before the entry `id` and all earlier ones are durable.
    pub(in crate::embedded) fn commit_of(&self, id: EntryId) -> u64 {
        let after = self.recent.partition_point(|(first, _)| *first <= id);
        after.checked_sub(1).map_or(0, |index| self.recent[index].1)
    }
}
