//! Settling finished deliveries, as a part of `partition_state`: two sequences of calls that do not wait for each other.
//! One goes to the server of the partition: acknowledgements, releases and scheduled retries. The other writes
//! *follow-ups* that may wait for another server: dead letters, which one stream of the topic holds, and retries that the
//! backend was too full for.
//!
//! Upstream: `partition_state`. Downstream: `partition_driver` makes the calls.
//! Guarantees: one call of each sequence at a time; a follow-up that cannot be written is tried again with backoff, its
//! message stays pending and kept alive, and acknowledgements go on meanwhile. What waits is bounded: from a limit on, the
//! partition reads no more.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, FOLLOW_UP_BYTES_MAX};
use headwater_stream::{Backoff, EntryId, SettleAction, Settlement};
use tokio::time::Instant;

use super::partition_state::{Action, PartitionReport, PartitionState};

/// Bytes of follow-up entries in one settle call; the last entry may exceed it.
const BYTES_PER_CALL: usize = BATCH_BYTES_MAX - FOLLOW_UP_BYTES_MAX;
/// Deliveries that wait for an acknowledgement; from here on the partition is not read.
const UNSETTLED_MAX: usize = 2 * BATCH_MAX;
/// Follow-ups that wait to be written, and their bytes; from here on the partition is not read. What is in flight then
/// may exceed the limit.
pub(super) const FOLLOW_UPS_MAX: usize = 1000;
const FOLLOW_UPS_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Backoff between attempts to write follow-ups.
const BACKOFF: Backoff = Backoff::doubling(Duration::from_millis(20), Duration::from_secs(2));

/// What is finished and not settled.
#[derive(Debug, Default)]
pub(super) struct SettleState {
    unsettled: Vec<Settlement>,
    /// The batch that is being settled.
    settling: Arc<Vec<Settlement>>,
    follow_ups: VecDeque<Settlement>,
    /// The follow-ups that are being written.
    writing: Arc<Vec<Settlement>>,
    /// Bytes of all follow-ups.
    bytes: usize,
    /// Attempts to write follow-ups that failed in a row, and when the next one is due.
    failures: u32,
    retry_at: Option<Instant>,
    is_limit_reported: bool,
}

impl SettleState {
    pub(super) fn add(&mut self, settlement: Settlement) {
        match settlement.action {
            SettleAction::Append { .. } => self.add_follow_up(settlement),
            _ => self.unsettled.push(settlement),
        }
    }

    fn add_follow_up(&mut self, settlement: Settlement) {
        self.bytes += follow_up_bytes(&settlement);
        self.follow_ups.push_back(settlement);
    }

    /// All that is not settled, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Settlement> {
        let at_partition = self.unsettled.iter().chain(self.settling.iter());
        at_partition.chain(&self.follow_ups).chain(self.writing.iter())
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = EntryId> {
        self.iter().map(|entry| entry.id)
    }

    /// Whether everything is settled, except follow-ups that could not be written: the next owner of their messages
    /// handles these again.
    pub(super) fn is_settled(&self) -> bool {
        let has_follow_ups = !self.follow_ups.is_empty() || !self.writing.is_empty();
        let is_waiting = has_follow_ups && self.failures == 0;
        self.unsettled.is_empty() && self.settling.is_empty() && !is_waiting
    }

    pub(super) fn has_follow_ups(&self) -> bool {
        !self.follow_ups.is_empty() || !self.writing.is_empty()
    }

    /// Whether more must not be read.
    pub(super) fn is_over_limit(&self) -> bool {
        self.unsettled.len() + self.settling.len() >= UNSETTLED_MAX
            || self.follow_ups.len() + self.writing.len() >= FOLLOW_UPS_MAX
            || self.bytes >= FOLLOW_UPS_BYTES_MAX
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.retry_at.filter(|_| self.writing.is_empty())
    }
}

impl PartitionState {
    /// The batch of [`Action::Settle`] is settled, except these: the backend is too full for their follow-ups.
    pub(super) fn on_settled(&mut self, deferred: Vec<Settlement>) {
        self.settles.settling = Arc::default();
        for settlement in deferred {
            self.settles.add_follow_up(settlement);
        }
    }

    /// The batch of [`Action::WriteFollowUps`] is settled, except these.
    pub(super) fn on_follow_ups_written(&mut self, unwritten: Vec<Settlement>) {
        let state = &mut self.settles;
        let is_failed = !unwritten.is_empty();
        state.writing = Arc::default();
        // Behind the others: retries do not wait for dead letters.
        state.follow_ups.extend(unwritten);
        state.bytes = state.follow_ups.iter().map(follow_up_bytes).sum();
        if is_failed {
            state.failures = state.failures.saturating_add(1);
            state.retry_at = Some(self.now + BACKOFF.delay(state.failures, 0.0));
        } else {
            state.failures = 0;
            state.retry_at = None;
        }
    }

    /// Starts the calls that are due.
    pub(super) fn settle(&mut self) {
        let state = &mut self.settles;
        if state.settling.is_empty() {
            let count = batch_len(state.unsettled.iter());
            if count > 0 {
                let rest = state.unsettled.split_off(count);
                state.settling = Arc::new(std::mem::replace(&mut state.unsettled, rest));
                self.actions.push(Action::Settle(Arc::clone(&state.settling)));
            }
        }
        let is_due = state.retry_at.is_none_or(|at| at <= self.now);
        if state.writing.is_empty() && is_due && !state.follow_ups.is_empty() {
            // Of one kind: one may fail while the other does not.
            let is_dead_letter = is_append(&state.follow_ups[0]);
            let same = state.follow_ups.iter().take_while(|one| is_append(one) == is_dead_letter);
            let count = batch_len(same);
            state.writing = Arc::new(state.follow_ups.drain(..count).collect());
            self.actions.push(Action::WriteFollowUps(Arc::clone(&state.writing)));
        }
        let is_over_limit = self.settles.is_over_limit();
        let is_failing = self.settles.failures > 0;
        if is_over_limit != self.settles.is_limit_reported && (is_failing || !is_over_limit) {
            self.settles.is_limit_reported = is_over_limit;
            let follow_ups = self.settles.follow_ups.len() + self.settles.writing.len();
            let bytes = self.settles.bytes;
            self.report(match is_over_limit {
                true => PartitionReport::FollowUpLimitReached { follow_ups, bytes },
                false => PartitionReport::FollowUpLimitLeft,
            });
        }
    }
}

fn is_append(settlement: &Settlement) -> bool {
    matches!(settlement.action, SettleAction::Append { .. })
}

fn follow_up_bytes(settlement: &Settlement) -> usize {
    match &settlement.action {
        SettleAction::Append { fields, .. } | SettleAction::Reschedule { fields, .. } => {
            fields.bytes()
        }
        SettleAction::Ack | SettleAction::Delete | SettleAction::Release => 0,
    }
}

/// How many settlements fit into one call.
fn batch_len<'a>(unsettled: impl Iterator<Item = &'a Settlement>) -> usize {
    let mut bytes = 0;
    let fits = |entry: &&Settlement| {
        let has_room = bytes < BYTES_PER_CALL;
        bytes += follow_up_bytes(entry);
        has_room
    };
    unsettled.take(BATCH_MAX).take_while(fits).count()
}
