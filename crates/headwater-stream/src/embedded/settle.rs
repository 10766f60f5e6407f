//! Settle: ends deliveries and applies their follow-ups in one transaction.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::append;
use super::leases::check_fence;
use super::redo_record::RedoRecord;
use super::state::delay_set::delayed_footprint;
use super::state::entries::footprint;
use super::state::group::GroupState;
use super::state::stream::StreamState;
use super::transaction::Tx;
use crate::entry::{EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::name::StreamName;
use crate::streams::{Retention, SettleAction, SettleBatch, SettleResult, Settlement};

pub(super) fn settle(tx: &mut Tx<'_>, settle: &SettleBatch<'_>) -> Result<SettleResult> {
    tx.state().stream(settle.stream.as_str(), tx.now)?;
    match check_fence(tx.state(), settle.fence, tx.now) {
        Err(StreamError::Fenced { .. }) if is_repeated_delete(tx, settle)? => {
            return Ok(SettleResult { applied: 0, stale: settle.entries.len() });
        }
        checked => checked?,
    }
    if settle.entries.iter().all(|settlement| matches!(settlement.action, SettleAction::Ack)) {
        return acknowledge_all(tx, settle);
    }
    check_types(tx, settle)?;
    let plan = SettlePlan::new(tx, settle)?;
    plan.check_new_names()?;
    tx.ensure_capacity(plan.bytes_more())?;
    let (stream, group) = (settle.stream.as_str(), settle.group.as_str());
    let settled =
        SettleResult { applied: plan.applied, stale: settle.entries.len() - plan.applied };
    tx.touch(stream, group, settle.consumer.as_str());
    if !plan.released.is_empty() {
        let (ids, at) = (Cow::Owned(plan.released), tx.now);
        tx.apply(&RedoRecord::Release { stream, group, ids, at });
    }
    if !plan.acknowledged.is_empty() {
        let ids = Cow::Owned(plan.acknowledged);
        tx.apply(&RedoRecord::Acknowledge { stream, group, ids });
    }
    if !plan.deleted.is_empty() {
        tx.apply(&RedoRecord::DeleteEntries { stream, ids: Cow::Owned(plan.deleted) });
    }
    for then in plan.follow_ups {
        follow_up(tx, then)?;
    }
    Ok(settled)
}

/// Whether an owner with an expired lease retries a completed delete: the lease has had no other holder
/// since, and all entries to delete are gone.
fn is_repeated_delete(tx: &Tx<'_>, settle: &SettleBatch<'_>) -> Result<bool> {
    let Some(fence) = settle.fence else { return Ok(false) };
    let state = tx.state();
    let is_free = state.lease(fence.lease.as_str(), tx.now)?.is_none();
    let is_last = state.epochs.get(fence.lease.as_str()) == Some(fence.epoch.0);
    let Some((stream, group)) = group_of(tx, settle)? else { return Ok(false) };
    let is_gone = |settlement: &Settlement| {
        matches!(settlement.action, SettleAction::Delete)
            && stream.entries.get(settlement.id).is_none()
            && !group.pending.contains(settlement.id)
    };
    let all_are_gone = !settle.entries.is_empty() && settle.entries.iter().all(is_gone);
    Ok(is_free && is_last && all_are_gone)
}

/// Fast path for plain acknowledgements: the record itself ignores entries that are not pending.
fn acknowledge_all(tx: &mut Tx<'_>, settle: &SettleBatch<'_>) -> Result<SettleResult> {
    let pending = |tx: &Tx<'_>| -> Result<usize> {
        Ok(group_of(tx, settle)?.map_or(0, |(_, group)| group.pending.len()))
    };
    let known = group_of(tx, settle)?;
    let is_pending = |settlement: &Settlement| {
        known.is_some_and(|(_, group)| group.pending.contains(settlement.id))
    };
    let is_any_pending = settle.entries.iter().any(is_pending);
    let (stream, group) = (settle.stream.as_str(), settle.group.as_str());
    let before = pending(tx)?;
    tx.touch(stream, group, settle.consumer.as_str());
    if is_any_pending {
        let ids = settle.entries.iter().map(|settlement| settlement.id).collect();
        tx.apply(&RedoRecord::Acknowledge { stream, group, ids: Cow::Owned(ids) });
    }
    let applied = before - pending(tx)?;
    Ok(SettleResult { applied, stale: settle.entries.len() - applied })
}

fn group_of<'a>(
    tx: &'a Tx<'_>,
    settle: &SettleBatch<'_>,
) -> Result<Option<(&'a StreamState, &'a GroupState)>> {
    tx.state().group(settle.stream, settle.group, tx.now)
}

fn follow_up(tx: &mut Tx<'_>, then: &SettleAction) -> Result<()> {
    match then {
        SettleAction::Append { to, fields } => {
            append_one(tx, to, fields)?;
        }
        SettleAction::Reschedule { delays, to, due, fields } => {
            super::delays::schedule(tx, delays, to, *due, fields);
        }
        SettleAction::Ack | SettleAction::Delete | SettleAction::Release => {}
    }
    Ok(())
}

fn append_one(tx: &mut Tx<'_>, to: &StreamName, fields: &Fields) -> Result<()> {
    let entries = std::slice::from_ref(fields);
    append::append(tx, to, entries, &Retention::KEEP_ALL).map(|_| ())
}

/// Fails if a follow-up, whether it will be applied or not, targets a name of another type.
fn check_types(tx: &Tx<'_>, settle: &SettleBatch<'_>) -> Result<()> {
    for settlement in settle.entries {
        match &settlement.action {
            SettleAction::Append { to, .. } => {
                tx.state().stream(to.as_str(), tx.now)?;
            }
            SettleAction::Reschedule { delays, .. } => {
                tx.state().delays(delays.as_str(), tx.now)?;
            }
            SettleAction::Ack | SettleAction::Delete | SettleAction::Release => {}
        }
    }
    Ok(())
}

/// The planned changes. Computed first, so that a settle that fails has no effect.
#[derive(Default)]
struct SettlePlan<'a> {
    applied: usize,
    acknowledged: Vec<EntryId>,
    deleted: Vec<EntryId>,
    released: Vec<EntryId>,
    follow_ups: Vec<&'a SettleAction>,
    bytes_added: u64,
    bytes_freed: u64,
}

impl<'a> SettlePlan<'a> {
    fn new(tx: &Tx<'_>, settle: &SettleBatch<'a>) -> Result<Self> {
        let mut plan = Self::default();
        let Some((stream, group)) = group_of(tx, settle)? else { return Ok(plan) };
        let mut settled_ids = SettledIds::new(settle);
        let rank = |settlement: &Settlement| match settlement.action {
            SettleAction::Append { .. }
            | SettleAction::Reschedule { .. }
            | SettleAction::Release => 0,
            SettleAction::Ack => 1,
            SettleAction::Delete => 2,
        };
        // If an entry has two settlements, the first by rank applies: one with a follow-up or release, then done,
        // then delete.
        for ends in 0..=2 {
            for settlement in settle.entries.iter().filter(|settlement| rank(settlement) == ends) {
                let Some(delivered) = group.pending.get(settlement.id) else { continue };
                let holds = ends > 0 || delivered.consumer == *settle.consumer;
                if holds && settled_ids.insert(settlement.id) {
                    plan.add(stream, settlement);
                }
            }
            if ends == 0 {
                settled_ids.allow_again(&plan.released);
            }
        }
        Ok(plan)
    }

    fn add(&mut self, stream: &StreamState, settlement: &'a Settlement) {
        let Settlement { id, action: then } = settlement;
        let fields = stream.entries.get(*id);
        self.applied += 1;
        if matches!(then, SettleAction::Release) && fields.is_some() {
            self.released.push(*id);
            return;
        }
        // A deleted entry cannot be released; as on Redis, it stops being pending.
        self.acknowledged.push(*id);
        match then {
            SettleAction::Ack | SettleAction::Release => {}
            SettleAction::Delete => {
                self.deleted.extend(fields.map(|_| *id));
                self.bytes_freed += fields.map_or(0, footprint);
            }
            SettleAction::Append { fields, .. } => {
                self.follow_ups.push(then);
                self.bytes_added += footprint(fields);
            }
            SettleAction::Reschedule { fields, .. } => {
                self.follow_ups.push(then);
                self.bytes_added += delayed_footprint(fields);
            }
        }
    }

    /// Fails if one follow-up would create a stream and another a delay set under the same name.
    fn check_new_names(&self) -> Result<()> {
        let mut is_stream = HashMap::new();
        for then in &self.follow_ups {
            let (name, wants_stream) = match then {
                SettleAction::Append { to, .. } => (to.as_str(), true),
                SettleAction::Reschedule { delays, .. } => (delays.as_str(), false),
                SettleAction::Ack | SettleAction::Delete | SettleAction::Release => continue,
            };
            if *is_stream.entry(name).or_insert(wants_stream) != wants_stream {
                return Err(StreamError::WrongType { name: name.to_owned() });
            }
        }
        Ok(())
    }

    /// Net memory growth in bytes.
    fn bytes_more(&self) -> u64 {
        self.bytes_added.saturating_sub(self.bytes_freed)
    }
}

/// Ids already settled in this call; a second settlement of an id is ignored.
struct SettledIds {
    /// `None` while ids are ascending and therefore unique.
    ids: Option<HashSet<EntryId>>,
}

impl SettledIds {
    fn new(settle: &SettleBatch<'_>) -> Self {
        let is_ascending = settle.entries.is_sorted_by(|one, next| one.id < next.id);
        Self { ids: (!is_ascending).then(HashSet::new) }
    }

    /// Returns whether the id was not settled before.
    fn insert(&mut self, id: EntryId) -> bool {
        self.ids.as_mut().is_none_or(|ids| ids.insert(id))
    }

    /// A released entry can still be settled as done or deleted.
    fn allow_again(&mut self, released: &[EntryId]) {
        if let Some(ids) = &mut self.ids {
            released.iter().for_each(|id| {
                ids.remove(id);
            });
        }
    }
}
