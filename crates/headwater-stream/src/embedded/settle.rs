//! Settling: deliveries end, and what follows from them happens in the same step.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::append;
use super::effect::Effect;
use super::engine::Change;
use super::leases::check_fence;
use super::state::Value;
use super::state::delay_set::footprint_aside;
use super::state::entries::footprint;
use super::state::group::Group;
use super::state::stream::Stream;
use crate::entry::{EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::name::StreamName;
use crate::streams::{Retention, Settle, Settled, Settlement, Then};

pub(super) fn settle(change: &mut Change<'_>, settle: &Settle<'_>) -> Result<Settled> {
    check_fence(change.state(), settle.fence, change.now)?;
    if settle.entries.iter().all(|settlement| matches!(settlement.then, Then::Done)) {
        return acknowledge_all(change, settle);
    }
    let plan = Plan::new(change, settle)?;
    plan.check_kinds(change)?;
    change.room_for(plan.bytes_more())?;
    let (stream, group) = (settle.stream.as_str(), settle.group.as_str());
    let applied = plan.acknowledged.len() + plan.released.len();
    let settled = Settled { applied, stale: settle.entries.len() - applied };
    change.saw(stream, group, settle.consumer.as_str());
    if !plan.acknowledged.is_empty() {
        let ids = Cow::Owned(plan.acknowledged);
        change.apply(&Effect::Acknowledge { stream, group, ids });
    }
    if !plan.deleted.is_empty() {
        change.apply(&Effect::DeleteEntries { stream, ids: Cow::Owned(plan.deleted) });
    }
    if !plan.released.is_empty() {
        let (ids, at) = (Cow::Owned(plan.released), change.now);
        change.apply(&Effect::Release { stream, group, ids, at });
    }
    for then in plan.follow_ups {
        follow_up(change, then)?;
    }
    Ok(settled)
}

/// The common case, without a look at each entry: those that are not pending are left alone by the effect itself.
fn acknowledge_all(change: &mut Change<'_>, settle: &Settle<'_>) -> Result<Settled> {
    let pending = |change: &Change<'_>| -> Result<usize> {
        Ok(group_of(change, settle)?.map_or(0, |(_, group)| group.pending.len()))
    };
    let known = group_of(change, settle)?;
    let is_pending = |settlement: &Settlement| {
        known.is_some_and(|(_, group)| group.pending.contains_key(&settlement.id))
    };
    let is_any_pending = settle.entries.iter().any(is_pending);
    let (stream, group) = (settle.stream.as_str(), settle.group.as_str());
    let before = pending(change)?;
    change.saw(stream, group, settle.consumer.as_str());
    if is_any_pending {
        let ids = settle.entries.iter().map(|settlement| settlement.id).collect();
        change.apply(&Effect::Acknowledge { stream, group, ids: Cow::Owned(ids) });
    }
    let applied = before - pending(change)?;
    Ok(Settled { applied, stale: settle.entries.len() - applied })
}

fn group_of<'a>(
    change: &'a Change<'_>,
    settle: &Settle<'_>,
) -> Result<Option<(&'a Stream, &'a Group)>> {
    let stream = change.state().stream(settle.stream.as_str(), change.now)?;
    Ok(stream.and_then(|stream| Some((stream, stream.groups.get(settle.group.as_str())?))))
}

fn follow_up(change: &mut Change<'_>, then: &Then) -> Result<()> {
    match then {
        Then::Append { to, fields } => {
            append_one(change, to, fields)?;
        }
        Then::PutAside { delays, to, due, fields } => {
            super::delays::put_aside(change, delays, to, *due, fields);
        }
        Then::Done | Then::Delete | Then::Release => {}
    }
    Ok(())
}

fn append_one(change: &mut Change<'_>, to: &StreamName, fields: &Fields) -> Result<()> {
    let entries = std::slice::from_ref(fields);
    append::append(change, to, entries, &Retention::KEEP_ALL).map(|_| ())
}

/// What a settle will do. Made before anything is done, so that a settle that fails has no effect.
#[derive(Default)]
struct Plan<'a> {
    acknowledged: Vec<EntryId>,
    deleted: Vec<EntryId>,
    released: Vec<EntryId>,
    follow_ups: Vec<&'a Then>,
    bytes_added: u64,
    bytes_freed: u64,
}

impl<'a> Plan<'a> {
    fn new(change: &Change<'_>, settle: &Settle<'a>) -> Result<Self> {
        let mut plan = Self::default();
        let Some((stream, group)) = group_of(change, settle)? else { return Ok(plan) };
        let is_ascending = settle.entries.is_sorted_by(|one, next| one.id < next.id);
        let mut seen = HashSet::new();
        for settlement in settle.entries {
            // The second settlement of one entry comes too late.
            if !is_ascending && !seen.insert(settlement.id) {
                continue;
            }
            if plan.add(group, settle, settlement) && matches!(settlement.then, Then::Delete) {
                let deleted = stream.entries.get(settlement.id);
                plan.deleted.extend(deleted.map(|_| settlement.id));
                plan.bytes_freed += deleted.map_or(0, footprint);
            }
        }
        Ok(plan)
    }

    /// Returns whether the settlement takes effect.
    fn add(&mut self, group: &Group, settle: &Settle<'_>, settlement: &'a Settlement) -> bool {
        let Some(delivered) = group.pending.get(&settlement.id) else { return false };
        let is_ours = delivered.consumer == *settle.consumer;
        match &settlement.then {
            Then::Done | Then::Delete => {}
            _ if !is_ours => return false,
            Then::Release => {
                self.released.push(settlement.id);
                return true;
            }
            Then::Append { fields, .. } => self.bytes_added += footprint(fields),
            Then::PutAside { fields, .. } => self.bytes_added += footprint_aside(fields),
        }
        self.acknowledged.push(settlement.id);
        if matches!(settlement.then, Then::Append { .. } | Then::PutAside { .. }) {
            self.follow_ups.push(&settlement.then);
        }
        true
    }

    /// How many bytes of memory it takes on balance.
    fn bytes_more(&self) -> u64 {
        self.bytes_added.saturating_sub(self.bytes_freed)
    }

    /// Fails if a follow-up goes to a name that stands, or will stand by then, for something else.
    fn check_kinds(&self, change: &Change<'_>) -> Result<()> {
        let mut will_be_stream = HashMap::new();
        for then in &self.follow_ups {
            let (name, is_stream) = match then {
                Then::Append { to, .. } => (to.as_str(), true),
                Then::PutAside { delays, .. } => (delays.as_str(), false),
                Then::Done | Then::Delete | Then::Release => continue,
            };
            let fits = match change.state().get(name, change.now) {
                None => *will_be_stream.entry(name).or_insert(is_stream) == is_stream,
                Some(Value::Stream(_)) => is_stream,
                Some(Value::Delays(_)) => !is_stream,
                Some(_) => false,
            };
            if !fits {
                return Err(StreamError::WrongType { name: name.to_owned() });
            }
        }
        Ok(())
    }
}
