//! Implementation of [`Delays`].

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::reader::wait_for_change;
use super::redo_record::RedoRecord;
use super::state::delay_set::delayed_footprint;
use super::transaction::{Durability, Tx};
use super::{Embedded, append};
use crate::delays::{
    DelayId, DelayStats, DelayedEntry, Delays, DueTime, PromotedEntry, ScheduleRequest,
};
use crate::entry::Fields;
use crate::error::Result;
use crate::name::{DelayName, StreamName};
use crate::validate;

#[async_trait]
impl Delays for Embedded {
    async fn schedule(
        &self,
        delays: &DelayName,
        items: &[ScheduleRequest],
    ) -> Result<Vec<DelayId>> {
        validate::schedule(items)?;
        let put = self.shared().transact(Durability::Durable, |tx| {
            tx.state().delays(delays.as_str(), tx.now)?;
            tx.ensure_capacity(items.iter().map(|item| delayed_footprint(&item.fields)).sum())?;
            let put =
                |item: &ScheduleRequest| schedule(tx, delays, &item.to, item.due, &item.fields);
            Ok(items.iter().map(put).collect())
        });
        put.await
    }

    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool> {
        let cancel = self.shared().transact(Durability::Durable, |tx| {
            let set = tx.state().delays(delays.as_str(), tx.now)?;
            let exists = set.is_some_and(|set| set.contains(id.0));
            if exists {
                tx.apply(&RedoRecord::Cancel { delays: delays.as_str(), id: id.0 });
            }
            Ok(exists)
        });
        cancel.await
    }

    async fn promote_due(&self, delays: &DelayName, count: usize) -> Result<Vec<PromotedEntry>> {
        validate::count(count)?;
        self.shared().transact(Durability::Durable, |tx| promote_due(tx, delays, count)).await
    }

    async fn wait_until_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        validate::wait(wait)?;
        let check = |tx: &mut Tx<'_>| {
            let set = tx.state().delays(delays.as_str(), tx.now)?;
            let next = set.and_then(|set| set.next_due());
            Ok(match next.map(|due| due.since(tx.now)) {
                Some(Duration::ZERO) => ControlFlow::Break(()),
                until_due => ControlFlow::Continue(until_due),
            })
        };
        let woken = Arc::default();
        let due = wait_for_change(&self.engine.shared, &[delays], &woken, wait, check).await?;
        Ok(due.is_some())
    }

    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats> {
        let stats = self.shared().read(|tx| {
            let Some(set) = tx.state.delays(delays.as_str(), tx.now)? else {
                return Ok(DelayStats::default());
            };
            Ok(DelayStats { waiting: set.len() as u64, next_due: set.next_due() })
        });
        stats.await
    }

    async fn delayed(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<DelayedEntry>> {
        validate::count(count)?;
        let delayed = self.shared().read(|tx| {
            let set = tx.state.delays(delays.as_str(), tx.now)?;
            let all = set.into_iter().flat_map(|set| set.iter());
            let delayed = all.skip(offset).take(count).map(|(due_at, id, waiting)| DelayedEntry {
                id: DelayId(id),
                to: waiting.to.clone(),
                due_at,
                fields: waiting.fields.clone(),
            });
            Ok(delayed.collect())
        });
        delayed.await
    }

    async fn delete_delay_set(&self, delays: &DelayName) -> Result<bool> {
        let name = delays.as_str();
        self.remove(name, |tx| Ok(tx.state().delays(name, tx.now)?.is_some())).await
    }
}

/// Schedules one entry. The caller has checked the type of the set and the capacity.
pub(super) fn schedule(
    tx: &mut Tx<'_>,
    delays: &DelayName,
    to: &StreamName,
    due: DueTime,
    fields: &Fields,
) -> DelayId {
    let due = match due {
        DueTime::After(delay) => tx.now.after(delay),
        DueTime::At(at) => at,
    };
    let id = tx.state().next_delay;
    let (delays, to, fields) = (delays.as_str(), to.as_str(), fields.clone());
    tx.remove_expired(delays);
    tx.apply(&RedoRecord::Schedule { delays, id, due, to, fields });
    DelayId(id)
}

/// Due entries that one call skips because their streams reject them. More than that block the entries
/// behind them.
const SKIPPED_MAX: usize = 10_000;

fn promote_due(tx: &mut Tx<'_>, delays: &DelayName, count: usize) -> Result<Vec<PromotedEntry>> {
    let now = tx.now;
    let Some(set) = tx.state().delays(delays.as_str(), now)? else { return Ok(Vec::new()) };
    let mut due = Vec::new();
    let mut rejected = Vec::new();
    for (_, id, waiting) in set.iter().take_while(|(due, ..)| *due <= now) {
        match tx.state().stream(waiting.to.as_str(), now) {
            Ok(_) => due.push((id, waiting.to.clone())),
            Err(error) => rejected.push(error),
        }
        if due.len() == count || rejected.len() == SKIPPED_MAX {
            break;
        }
    }
    let mut returned = Vec::with_capacity(due.len());
    for (id, stream) in due {
        let entry = match append::next_id(tx, &stream) {
            Ok(entry) => entry,
            Err(error) => {
                rejected.push(error);
                continue;
            }
        };
        tx.remove_expired(stream.as_str());
        tx.apply(&RedoRecord::Promote { delays: delays.as_str(), id, entry });
        tx.record_commit(stream.as_str(), entry);
        tx.wake(stream.as_str());
        returned.push(PromotedEntry { delay: DelayId(id), stream, id: entry });
    }
    // If nothing could be moved, return the reason instead of an empty list.
    match rejected.into_iter().next() {
        Some(error) if returned.is_empty() => Err(error),
        _ => Ok(returned),
    }
}
