//! The state machine of an issue, as one pure function: [`apply`].
//!
//! Upstream: the SQLite store applies every transition with it; the PostgreSQL store implements the same transitions in
//! SQL, and `conformance` compares the two. Guarantees: no I/O, no clock, no randomness. An issue with pending events
//! is never idle unless it is quarantined ([`IssueState::check_invariants`]). A stale run is fenced here: transitions
//! that present another epoch than the current claim have no effect. Not here: event logs, outbox rows and fields; they
//! do not affect transitions.

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::claim::{AfterFailure, ReleaseReason, RunResult};
use crate::issue::{ClaimEpoch, DebounceWindow, ProcessingStatus};

/// The part of an issue on which its transitions depend.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IssueState {
    /// Processing status.
    pub status: ProcessingStatus,
    /// Unprocessed event logs, including those of a run in progress. Every record writes it and every completion reads
    /// it, on the row that both lock, so a completion cannot miss an event that arrived during its run.
    pub pending_events: u64,
    /// Epoch of the newest claim.
    pub claim_epoch: ClaimEpoch,
    /// The newest completed epoch; distinguishes a repeated completion from a fenced one.
    pub completed_epoch: ClaimEpoch,
    /// Worker that holds the claim, while `processing`.
    pub claim_owner: Option<String>,
    /// When the claim expires, while `processing`. `None`, which only another program can write, counts as expired.
    pub claim_expires_at: Option<Timestamp>,
    /// Earliest time of the next claim.
    pub not_before: Option<Timestamp>,
    /// Arrival time of the oldest event not yet in a run; start of the debounce window.
    pub first_pending_at: Option<Timestamp>,
    /// Failed attempts since the last success.
    pub attempts: u32,
    /// Expired claims since the last success.
    pub crashes: u32,
    /// Runs cancelled for newer events since the last success.
    pub superseded: u32,
    /// When it was quarantined.
    pub quarantined_at: Option<Timestamp>,
    /// When the last nudge was due to be sent. `None`: overdue, after a release or retry by an operator.
    pub nudged_at: Option<Timestamp>,
    /// Error of the last failure.
    pub last_error: Option<String>,
}

/// A transition of an issue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transition {
    /// New events were stored, none of them a duplicate.
    Record {
        /// Number of events; at least 1.
        events: u64,
        /// The debounce window.
        debounce: DebounceWindow,
    },
    /// A worker claims the issue.
    Claim {
        /// Name of the worker.
        owner: String,
        /// TTL of the claim.
        ttl: Duration,
        /// Expired claims after which it is quarantined.
        crashes_max: u32,
    },
    /// The worker renews the claim.
    Heartbeat {
        /// Epoch of the claim.
        epoch: ClaimEpoch,
        /// TTL from now.
        ttl: Duration,
    },
    /// The run succeeded.
    Complete {
        /// Epoch of the claim.
        epoch: ClaimEpoch,
        /// Number of event logs marked as processed.
        processed: u64,
    },
    /// The run failed.
    Fail {
        /// Epoch of the claim.
        epoch: ClaimEpoch,
        /// Error text.
        error: String,
        /// What to do next.
        then: AfterFailure,
        /// Failed attempts after which it is quarantined.
        attempts_max: u32,
    },
    /// The worker releases the claim without a result.
    ReleaseClaim {
        /// Epoch of the claim.
        epoch: ClaimEpoch,
        /// Reason.
        reason: ReleaseReason,
    },
    /// A sweep checks whether the claim has expired.
    Expire {
        /// Expired claims after which it is quarantined.
        crashes_max: u32,
    },
    /// A sweep checks whether a nudge is overdue.
    Nudge {
        /// Age after which a nudge is overdue.
        overdue: Duration,
    },
    /// An operator ends a quarantine.
    Release,
    /// An operator retries the issue now.
    Retry,
}

/// Effect of a transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransitionEffect {
    /// The issue was queued: nudge.
    Queued,
    /// The claim was acquired, with this epoch.
    Won(ClaimEpoch),
    /// The claim was renewed.
    Kept,
    /// The run ended, and no events are pending.
    Finished,
    /// The run had been completed before; nothing changed.
    Repeated,
    /// This transition quarantined the issue.
    Quarantined,
    /// The issue can be claimed at this time.
    NotYet(Timestamp),
    /// The claim is not held with this epoch; nothing changed.
    Fenced,
    /// No effect, except that recorded events were counted.
    Nothing,
}

/// A run that a transition ended: a row of `issue_runs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedRun {
    /// Epoch of its claim.
    pub epoch: ClaimEpoch,
    /// Worker that held the claim.
    pub worker: String,
    /// How it ended.
    pub result: RunResult,
    /// Error of a failure.
    pub error: Option<String>,
    /// Event logs marked as processed.
    pub events: u64,
}

impl EndedRun {
    /// The run that this transition ended, if it ended one.
    pub fn of(before: &IssueState, after: &IssueState, transition: &Transition) -> Option<Self> {
        let is_claimed = before.status == ProcessingStatus::Processing;
        let is_same = before.status == after.status && before.claim_epoch == after.claim_epoch;
        if !is_claimed || is_same {
            return None;
        }
        let is_quarantined = after.quarantined_at.is_some();
        let (result, error, events) = match transition {
            Transition::Complete { processed, .. } => (RunResult::Done, None, *processed),
            Transition::Fail { error, then, .. } => {
                let is_deferred = matches!(then, AfterFailure::Defer { .. });
                let result = if is_deferred { RunResult::Deferred } else { RunResult::Failed };
                (result, Some(error.clone()), 0)
            }
            Transition::ReleaseClaim { reason: ReleaseReason::Superseded, .. } => {
                (RunResult::Superseded, None, 0)
            }
            Transition::ReleaseClaim { .. } => (RunResult::Released, None, 0),
            _ => (RunResult::Expired, None, 0),
        };
        let result = if is_quarantined { RunResult::Quarantined } else { result };
        let worker = before.claim_owner.clone().unwrap_or_default();
        Some(Self { epoch: before.claim_epoch, worker, result, error, events })
    }
}

/// Returns the next state of an issue and the effect of the transition.
pub fn apply(
    before: &IssueState,
    transition: &Transition,
    now: Timestamp,
) -> (IssueState, TransitionEffect) {
    let mut state = before.clone();
    let effect = match transition {
        Transition::Record { events, debounce } => state.record(*events, debounce, now),
        Transition::Claim { owner, ttl, crashes_max } => match state.expire(*crashes_max, now) {
            TransitionEffect::Quarantined => TransitionEffect::Quarantined,
            _ => state.claim(owner, *ttl, now),
        },
        Transition::Heartbeat { epoch, ttl } if state.is_held(*epoch) => {
            state.claim_expires_at = Some(now.after(*ttl));
            TransitionEffect::Kept
        }
        Transition::Complete { epoch, processed } if state.is_held(*epoch) => {
            state.complete(*processed, now)
        }
        Transition::Complete { epoch, .. } if state.was_completed(*epoch) => {
            TransitionEffect::Repeated
        }
        Transition::Fail { epoch, error, then, attempts_max } if state.is_held(*epoch) => {
            state.fail(error, *then, *attempts_max, now)
        }
        Transition::ReleaseClaim { epoch, reason } if state.is_held(*epoch) => {
            state.superseded += u32::from(*reason == ReleaseReason::Superseded);
            state.requeue(now)
        }
        Transition::Heartbeat { .. }
        | Transition::Complete { .. }
        | Transition::Fail { .. }
        | Transition::ReleaseClaim { .. } => TransitionEffect::Fenced,
        Transition::Expire { crashes_max } => state.expire(*crashes_max, now),
        Transition::Nudge { overdue } => state.nudge(*overdue, now),
        Transition::Release if state.quarantined_at.is_some() => state.release(now),
        Transition::Release => TransitionEffect::Nothing,
        Transition::Retry => state.retry(now),
    };
    (state, effect)
}

impl IssueState {
    /// Checks the invariants that hold after every transition; the error names the violated one.
    pub fn check_invariants(&self) -> Result<(), &'static str> {
        let idle = self.status == ProcessingStatus::Idle;
        let processing = self.status == ProcessingStatus::Processing;
        let quarantined = self.quarantined_at.is_some();
        let rules = [
            (!idle || quarantined || self.pending_events == 0, "it is idle with pending events"),
            (idle || self.pending_events > 0, "it is not idle, but has no pending events"),
            (idle || !quarantined, "it is quarantined and not idle"),
            (
                processing == self.claim_owner.is_some(),
                "`claim_owner` must be set if and only if the status is `processing`",
            ),
            (
                processing == self.claim_expires_at.is_some(),
                "`claim_expires_at` must be set if and only if the status is `processing`",
            ),
            (
                self.completed_epoch <= self.claim_epoch,
                "completed_epoch is greater than claim_epoch",
            ),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, problem)| Err(*problem))
    }

    fn is_held(&self, epoch: ClaimEpoch) -> bool {
        self.status == ProcessingStatus::Processing && self.claim_epoch == epoch
    }

    fn was_completed(&self, epoch: ClaimEpoch) -> bool {
        // Epoch 0 means "never claimed", so it cannot have been completed.
        epoch.0 > 0 && self.completed_epoch == epoch
    }

    fn record(
        &mut self,
        events: u64,
        debounce: &DebounceWindow,
        now: Timestamp,
    ) -> TransitionEffect {
        self.pending_events += events;
        let first = *self.first_pending_at.get_or_insert(now);
        if self.quarantined_at.is_some() {
            return TransitionEffect::Nothing;
        }
        let ends_window = self.batch_is_full(debounce) && self.not_before > Some(now);
        if self.batch_is_full(debounce) {
            self.not_before = None;
        } else if !debounce.quiet_for.is_zero() {
            let wait = now.after(debounce.quiet_for).min(first.after(debounce.max_wait));
            // Keep a backoff that ends later.
            self.not_before = self.not_before.max(Some(wait));
        }
        if self.status != ProcessingStatus::Idle && !ends_window {
            return TransitionEffect::Nothing;
        }
        self.status = ProcessingStatus::Queued;
        self.nudged_at = Some(now);
        TransitionEffect::Queued
    }

    /// Whether enough events are pending to end the debounce window early. Not after a failed or deferred run: the
    /// issue may wait for a backoff then, which events do not end. `last_error` decides, because deferred runs count no
    /// attempt.
    fn batch_is_full(&self, debounce: &DebounceWindow) -> bool {
        debounce.events_max > 0
            && self.pending_events >= debounce.events_max as u64
            && self.status != ProcessingStatus::Processing
            && self.last_error.is_none()
    }

    fn claim(&mut self, owner: &str, ttl: Duration, now: Timestamp) -> TransitionEffect {
        match self.not_before {
            _ if self.status != ProcessingStatus::Queued => TransitionEffect::Nothing,
            Some(not_before) if not_before > now => TransitionEffect::NotYet(not_before),
            _ => {
                self.status = ProcessingStatus::Processing;
                self.claim_epoch.0 += 1;
                self.claim_owner = Some(owner.to_owned());
                self.claim_expires_at = Some(now.after(ttl));
                // From now on both describe the events that arrive during the run.
                self.not_before = None;
                self.first_pending_at = None;
                TransitionEffect::Won(self.claim_epoch)
            }
        }
    }

    fn complete(&mut self, processed: u64, now: Timestamp) -> TransitionEffect {
        self.pending_events = self.pending_events.saturating_sub(processed);
        self.completed_epoch = self.claim_epoch;
        (self.attempts, self.crashes, self.superseded) = (0, 0, 0);
        self.last_error = None;
        self.requeue(now)
    }

    fn fail(
        &mut self,
        error: &str,
        then: AfterFailure,
        attempts_max: u32,
        now: Timestamp,
    ) -> TransitionEffect {
        let counts_attempt = !matches!(then, AfterFailure::Defer { .. });
        self.attempts += u32::from(counts_attempt);
        self.last_error = Some(error.to_owned());
        match then {
            AfterFailure::Retry { after } | AfterFailure::Defer { after }
                if !counts_attempt || self.attempts < attempts_max =>
            {
                self.not_before = self.not_before.max(Some(now.after(after)));
                self.requeue(now)
            }
            _ => self.quarantine(now),
        }
    }

    fn expire(&mut self, crashes_max: u32, now: Timestamp) -> TransitionEffect {
        // A claim without expiry was written by another program; it counts as expired, or it would never end.
        let is_live = self.claim_expires_at.is_some_and(|expires_at| expires_at > now);
        if self.status != ProcessingStatus::Processing || is_live {
            return TransitionEffect::Nothing;
        }
        self.crashes += 1;
        let owner = self.claim_owner.as_deref().unwrap_or_default();
        self.last_error = Some(format!("claim of worker `{owner}` expired"));
        if self.crashes >= crashes_max { self.quarantine(now) } else { self.requeue(now) }
    }

    /// Ends a claim: queued if events are pending, else idle.
    fn requeue(&mut self, now: Timestamp) -> TransitionEffect {
        (self.claim_owner, self.claim_expires_at) = (None, None);
        if self.pending_events == 0 {
            self.status = ProcessingStatus::Idle;
            (self.not_before, self.first_pending_at) = (None, None);
            return TransitionEffect::Finished;
        }
        self.status = ProcessingStatus::Queued;
        self.first_pending_at.get_or_insert(now);
        self.nudged_at = Some(now);
        TransitionEffect::Queued
    }

    fn quarantine(&mut self, now: Timestamp) -> TransitionEffect {
        (self.claim_owner, self.claim_expires_at) = (None, None);
        self.status = ProcessingStatus::Idle;
        self.quarantined_at = Some(now);
        self.not_before = None;
        TransitionEffect::Quarantined
    }

    fn nudge(&mut self, overdue: Duration, now: Timestamp) -> TransitionEffect {
        // A nudge is useful only from the time the issue can be claimed.
        let since = self.nudged_at.max(self.not_before);
        let is_overdue = since.is_none_or(|since| since.after(overdue) <= now);
        if self.status != ProcessingStatus::Queued || !is_overdue {
            return TransitionEffect::Nothing;
        }
        self.nudged_at = Some(now);
        TransitionEffect::Queued
    }

    fn release(&mut self, now: Timestamp) -> TransitionEffect {
        (self.attempts, self.crashes, self.superseded) = (0, 0, 0);
        self.quarantined_at = None;
        let effect = self.requeue(now);
        self.nudged_at = None;
        effect
    }

    fn retry(&mut self, now: Timestamp) -> TransitionEffect {
        match self.status {
            _ if self.quarantined_at.is_some() => self.release(now),
            ProcessingStatus::Queued => {
                self.not_before = None;
                self.nudged_at = None;
                TransitionEffect::Queued
            }
            ProcessingStatus::Processing | ProcessingStatus::Idle => TransitionEffect::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
