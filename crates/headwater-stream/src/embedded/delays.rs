//! The calls of [`Delays`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::change::{Change, Until};
use super::effect::Effect;
use super::reader::Watch;
use super::state::delay_set::footprint_aside;
use super::{Embedded, append};
use crate::check;
use crate::delays::{DelayId, DelayStats, Delayed, Delays, Due, PutAside, Returned};
use crate::entry::Fields;
use crate::error::Result;
use crate::name::{DelayName, StreamName};

#[async_trait]
impl Delays for Embedded {
    async fn put_aside(&self, delays: &DelayName, items: &[PutAside]) -> Result<Vec<DelayId>> {
        check::put_aside(items)?;
        let put = self.shared().change(Until::Durable, |change| {
            change.state().delays(delays.as_str(), change.now)?;
            change.room_for(items.iter().map(|item| footprint_aside(&item.fields)).sum())?;
            let put = |item: &PutAside| put_aside(change, delays, &item.to, item.due, &item.fields);
            Ok(items.iter().map(put).collect())
        });
        put.await
    }

    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool> {
        let cancel = self.shared().change(Until::Durable, |change| {
            let set = change.state().delays(delays.as_str(), change.now)?;
            let exists = set.is_some_and(|set| set.contains(id.0));
            if exists {
                change.apply(&Effect::Cancel { delays: delays.as_str(), id: id.0 });
            }
            Ok(exists)
        });
        cancel.await
    }

    async fn take_due(&self, delays: &DelayName, count: usize) -> Result<Vec<Returned>> {
        check::count(count)?;
        self.shared().change(Until::Durable, |change| take_due(change, delays, count)).await
    }

    async fn wait_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        check::wait(wait)?;
        let shared = &self.engine.shared;
        let mut time_out = std::pin::pin!(shared.clock.sleep(wait));
        let woken = Arc::<Notify>::default();
        let mut watch = None;
        let mut is_over = wait.is_zero();
        loop {
            let until_due = shared.deliver(|change| {
                let set = change.state().delays(delays.as_str(), change.now)?;
                let next = set.and_then(|set| set.next_due());
                let until_due = next.map(|due| due.since(change.now));
                if watch.is_none() {
                    watch = Some(Watch::begin(shared, change, [delays].into_iter(), &woken));
                }
                Ok(until_due)
            })?;
            match until_due {
                Some(Duration::ZERO) => return Ok(true),
                _ if is_over => return Ok(false),
                _ => {}
            }
            let due = async {
                match until_due {
                    Some(until_due) => shared.clock.sleep(until_due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = woken.notified() => {}
                () = due => {}
                () = &mut time_out => is_over = true,
            }
        }
    }

    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats> {
        let stats = self.shared().look(|look| {
            let Some(set) = look.state.delays(delays.as_str(), look.now)? else {
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
    ) -> Result<Vec<Delayed>> {
        check::count(count)?;
        let delayed = self.shared().look(|look| {
            let set = look.state.delays(delays.as_str(), look.now)?;
            let all = set.into_iter().flat_map(|set| set.iter());
            let delayed = all.skip(offset).take(count).map(|(due_at, id, waiting)| Delayed {
                id: DelayId(id),
                to: waiting.to.clone(),
                due_at,
                fields: waiting.fields.clone(),
            });
            Ok(delayed.collect())
        });
        delayed.await
    }

    async fn delete_delays(&self, delays: &DelayName) -> Result<bool> {
        let delete = self.shared().change(Until::Durable, |change| {
            let exists = change.state().delays(delays.as_str(), change.now)?.is_some();
            if exists {
                change.apply(&Effect::Remove { name: delays.as_str() });
            }
            Ok(exists)
        });
        delete.await
    }
}

/// Puts one entry aside; that the set is one, and that there is room, is checked.
pub(super) fn put_aside(
    change: &mut Change<'_>,
    delays: &DelayName,
    to: &StreamName,
    due: Due,
    fields: &Fields,
) -> DelayId {
    let due = match due {
        Due::After(delay) => change.now.after(delay),
        Due::At(at) => at,
    };
    let id = change.state().next_delay;
    let (delays, to, fields) = (delays.as_str(), to.as_str(), fields.clone());
    change.vacate(delays);
    change.apply(&Effect::PutAside { delays, id, due, to, fields });
    DelayId(id)
}

/// Due entries that a call passes over because their streams cannot take them; more hold up those behind them.
const PASSED_OVER_MAX: usize = 10_000;

fn take_due(change: &mut Change<'_>, delays: &DelayName, count: usize) -> Result<Vec<Returned>> {
    let now = change.now;
    let Some(set) = change.state().delays(delays.as_str(), now)? else { return Ok(Vec::new()) };
    let mut due = Vec::new();
    let mut refused = Vec::new();
    for (_, id, waiting) in set.iter().take_while(|(due, ..)| *due <= now) {
        match change.state().stream(waiting.to.as_str(), now) {
            Ok(_) => due.push((id, waiting.to.clone())),
            Err(error) => refused.push(error),
        }
        if due.len() == count || refused.len() == PASSED_OVER_MAX {
            break;
        }
    }
    let mut returned = Vec::with_capacity(due.len());
    for (id, stream) in due {
        let entry = match append::next_id(change, &stream) {
            Ok(entry) => entry,
            Err(error) => {
                refused.push(error);
                continue;
            }
        };
        change.vacate(stream.as_str());
        change.apply(&Effect::Return { delays: delays.as_str(), id, entry });
        change.note_commit(stream.as_str(), entry);
        change.wake(stream.as_str());
        returned.push(Returned { delay: DelayId(id), stream, id: entry });
    }
    // When nothing at all could move, the caller hears why instead of being told that nothing is due.
    match refused.into_iter().next() {
        Some(error) if returned.is_empty() => Err(error),
        _ => Ok(returned),
    }
}
