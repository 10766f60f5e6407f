//! Rules of fencing, checked for every call that the server of the simulation performs and every handler that starts.
//!
//! - No call changes anything in an epoch after a newer one was granted.
//! - Owners settle and reclaim with a fence. Without one, entries are only released.
//! - A handler starts only in the newest epoch of its partition.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use headwater_queue::Message;
use headwater_stream::{
    AcquireResult, Epoch, Fence, LeaseName, ReclaimRequest, ReclaimResult, Result, SettleAction,
    SettleBatch, SettleResult, StreamError,
};

use super::processes::{OWNED, TOPIC};

#[derive(Default)]
pub(crate) struct FenceRules {
    state: Mutex<FenceState>,
}

#[derive(Default)]
struct FenceState {
    /// The newest epoch of each lease.
    newest: HashMap<LeaseName, Epoch>,
    violations: Vec<String>,
    /// Calls that were refused because of their fence.
    refused: u64,
}

impl FenceState {
    fn is_newest(&self, fence: &Fence) -> bool {
        self.newest.get(&fence.lease).is_none_or(|newest| fence.epoch >= *newest)
    }

    /// Checks a call that changed something.
    fn check_change(&mut self, what: &str, group: &str, fence: Option<&Fence>) {
        match fence {
            Some(fence) if !self.is_newest(fence) => {
                let newest = self.newest.get(&fence.lease);
                self.violations.push(format!("{what} under {fence:?}, the newest is {newest:?}"));
            }
            None if group == OWNED => {
                self.violations.push(format!("{what} of `{group}` without a fence"));
            }
            _ => {}
        }
    }
}

impl FenceRules {
    fn lock(&self) -> MutexGuard<'_, FenceState> {
        self.state.lock().expect("no code panics while it holds the rules")
    }

    pub(crate) fn on_acquire(&self, lease: &LeaseName, result: &Result<AcquireResult>) {
        if let Ok(AcquireResult::Won(epoch)) = result {
            let mut state = self.lock();
            let newest = state.newest.entry(lease.clone()).or_insert(*epoch);
            *newest = (*newest).max(*epoch);
        }
    }

    pub(crate) fn on_settle(&self, settle: SettleBatch<'_>, result: &Result<SettleResult>) {
        let mut state = self.lock();
        let is_release = |action: &SettleAction| matches!(action, SettleAction::Release);
        match result {
            Ok(settled) if settled.applied > 0 => {
                let are_releases = settle.entries.iter().all(|entry| is_release(&entry.action));
                if settle.fence.is_some() || !are_releases {
                    state.check_change("settled", settle.group.as_str(), settle.fence);
                }
            }
            Err(StreamError::Fenced { .. }) => state.refused += 1,
            _ => {}
        }
    }

    pub(crate) fn on_reclaim(&self, reclaim: ReclaimRequest<'_>, result: &Result<ReclaimResult>) {
        let mut state = self.lock();
        match result {
            Ok(reclaimed) if !reclaimed.entries.is_empty() => {
                state.check_change("reclaimed", reclaim.group.as_str(), reclaim.fence);
            }
            Err(StreamError::Fenced { .. }) => state.refused += 1,
            _ => {}
        }
    }

    pub(crate) fn on_handler_start(&self, group: &str, message: &Message) {
        let Some(epoch) = message.epoch else { return };
        let mut state = self.lock();
        let name = format!("{TOPIC}:{group}:{}", message.partition);
        let newest = state.newest.iter().find(|(lease, _)| lease.as_str().ends_with(&name));
        let newest = newest.map(|(_, newest)| *newest);
        if newest != Some(epoch) {
            let what =
                format!("a handler of {name} started in epoch {epoch}, the newest is {newest:?}");
            state.violations.push(what);
        }
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// How many calls were refused because of their fence.
    pub(crate) fn refused(&self) -> u64 {
        self.lock().refused
    }
}
