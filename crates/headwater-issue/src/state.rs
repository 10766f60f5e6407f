//! The state machine of an issue, as one pure function: [`step`].
//!
//! Upstream: the SQLite store takes every step through it; the Postgres store says the same in SQL, and `conformance`
//! compares the two. Promises: no I/O, no clock, no randomness; an issue with pending events is never idle unless it is
//! quarantined ([`IssueState::check`]). Not here: event logs, outbox rows and fields, which change with a step but decide
//! nothing.

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::claim::{AfterFailure, GiveBackReason};
use crate::issue::{ClaimEpoch, ProcessingStatus, Quiet};

/// What decides the next step of an issue.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IssueState {
    /// Where it stands.
    pub status: ProcessingStatus,
    /// Event logs not yet processed, those of a run in progress included. Every record changes it and every completion
    /// reads it, on the one row that both must lock: that is why no event is ever left behind.
    pub pending_events: u64,
    /// The epoch of the newest claim.
    pub claim_epoch: ClaimEpoch,
    /// The newest epoch that was completed; tells a repeated completion from a fenced one.
    pub completed_epoch: ClaimEpoch,
    /// Who holds the claim, while `processing`.
    pub claim_owner: Option<String>,
    /// When the claim runs out, while `processing`. Without an end, which only another program can write, it has run out.
    pub claim_expires_at: Option<Timestamp>,
    /// No claim before this time.
    pub not_before: Option<Timestamp>,
    /// Since when the first event waits that is in no run; the quiet window is counted from here.
    pub first_pending_at: Option<Timestamp>,
    /// Failed tries since the last success.
    pub attempts: u32,
    /// Claims that ran out since the last success.
    pub crashes: u32,
    /// Runs given up for newer events since the last success.
    pub superseded: u32,
    /// Since when it is quarantined.
    pub quarantined_at: Option<Timestamp>,
    /// When a nudge was last due to be sent. None: it is overdue, because an operator wants it now and sends none.
    pub nudged_at: Option<Timestamp>,
    /// What the last failure said.
    pub last_error: Option<String>,
}

/// What can happen to an issue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transition {
    /// New events were stored, none of them a duplicate.
    Record {
        /// How many; at least one.
        events: u64,
        /// The quiet window.
        quiet: Quiet,
    },
    /// A worker wants it.
    Claim {
        /// Who.
        owner: String,
        /// For how long.
        ttl: Duration,
        /// Claims that may run out before it is quarantined.
        crashes_max: u32,
    },
    /// The worker is still at it.
    Heartbeat {
        /// The claim.
        epoch: ClaimEpoch,
        /// For how long from now.
        ttl: Duration,
    },
    /// The worker is done.
    Complete {
        /// The claim.
        epoch: ClaimEpoch,
        /// How many event logs were marked as processed.
        processed: u64,
    },
    /// The worker failed.
    Fail {
        /// The claim.
        epoch: ClaimEpoch,
        /// What went wrong.
        error: String,
        /// What to do next.
        then: AfterFailure,
        /// Failed tries that are enough.
        attempts_max: u32,
    },
    /// The worker stopped without a result.
    GiveBack {
        /// The claim.
        epoch: ClaimEpoch,
        /// Why.
        reason: GiveBackReason,
    },
    /// A sweep looks for a claim that has run out.
    Expire {
        /// Claims that may run out before it is quarantined.
        crashes_max: u32,
    },
    /// A sweep looks for a nudge that is overdue.
    Nudge {
        /// How old a nudge may be.
        overdue: Duration,
    },
    /// An operator ends a quarantine.
    Release,
    /// An operator wants it tried now.
    Retry,
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The issue changed from idle to queued, or was queued again: nudge.
    Queued,
    /// The claim was won, with this epoch.
    Won(ClaimEpoch),
    /// The claim goes on.
    Kept,
    /// The run ended well and nothing is left.
    Finished,
    /// The run had ended well before; nothing changed.
    Repeated,
    /// The issue is out of the way, by this very step.
    Quarantined,
    /// It can be claimed later.
    NotYet(Timestamp),
    /// The claim is not held with this epoch; nothing changed.
    Fenced,
    /// Nothing to do; nothing changed, but that a record was counted.
    Nothing,
}

/// The next state of an issue, and what to tell the caller.
pub fn step(before: &IssueState, transition: &Transition, now: Timestamp) -> (IssueState, Effect) {
    let mut state = before.clone();
    let effect = match transition {
        Transition::Record { events, quiet } => state.record(*events, quiet, now),
        Transition::Claim { owner, ttl, crashes_max } => match state.expire(*crashes_max, now) {
            Effect::Quarantined => Effect::Quarantined,
            _ => state.claim(owner, *ttl, now),
        },
        Transition::Heartbeat { epoch, ttl } if state.is_held(*epoch) => {
            state.claim_expires_at = Some(now.after(*ttl));
            Effect::Kept
        }
        Transition::Complete { epoch, processed } if state.is_held(*epoch) => {
            state.complete(*processed, now)
        }
        Transition::Complete { epoch, .. } if state.was_completed(*epoch) => Effect::Repeated,
        Transition::Fail { epoch, error, then, attempts_max } if state.is_held(*epoch) => {
            state.fail(error, *then, *attempts_max, now)
        }
        Transition::GiveBack { epoch, reason } if state.is_held(*epoch) => {
            state.superseded += u32::from(*reason == GiveBackReason::Superseded);
            state.requeue(now)
        }
        Transition::Heartbeat { .. }
        | Transition::Complete { .. }
        | Transition::Fail { .. }
        | Transition::GiveBack { .. } => Effect::Fenced,
        Transition::Expire { crashes_max } => state.expire(*crashes_max, now),
        Transition::Nudge { overdue } => state.nudge(*overdue, now),
        Transition::Release if state.quarantined_at.is_some() => state.release(now),
        Transition::Release => Effect::Nothing,
        Transition::Retry => state.retry(now),
    };
    (state, effect)
}

impl IssueState {
    /// What must hold after every step; a sentence if it does not.
    pub fn check(&self) -> Result<(), &'static str> {
        let idle = self.status == ProcessingStatus::Idle;
        let processing = self.status == ProcessingStatus::Processing;
        let quarantined = self.quarantined_at.is_some();
        let rules = [
            (!idle || quarantined || self.pending_events == 0, "it is idle with pending events"),
            (idle || self.pending_events > 0, "it is not idle, and nothing is pending"),
            (idle || !quarantined, "it is quarantined and not idle"),
            (
                processing == self.claim_owner.is_some(),
                "a claim has an owner, and nothing else has",
            ),
            (processing == self.claim_expires_at.is_some(), "a claim ends, and nothing else does"),
            (self.completed_epoch <= self.claim_epoch, "a claim was completed that never was"),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, problem)| Err(*problem))
    }

    fn is_held(&self, epoch: ClaimEpoch) -> bool {
        self.status == ProcessingStatus::Processing && self.claim_epoch == epoch
    }

    fn was_completed(&self, epoch: ClaimEpoch) -> bool {
        // Epoch 0 is "never claimed", which nobody can have completed.
        epoch.0 > 0 && self.completed_epoch == epoch
    }

    fn record(&mut self, events: u64, quiet: &Quiet, now: Timestamp) -> Effect {
        self.pending_events += events;
        let first = *self.first_pending_at.get_or_insert(now);
        if self.quarantined_at.is_some() {
            return Effect::Nothing;
        }
        let ends_window = self.has_enough_for_a_run(quiet) && self.not_before > Some(now);
        if self.has_enough_for_a_run(quiet) {
            self.not_before = None;
        } else if !quiet.quiet.is_zero() {
            let wait = now.after(quiet.quiet).min(first.after(quiet.max_wait));
            // A backoff that ends later stays.
            self.not_before = self.not_before.max(Some(wait));
        }
        if self.status != ProcessingStatus::Idle && !ends_window {
            return Effect::Nothing;
        }
        self.status = ProcessingStatus::Queued;
        self.nudged_at = Some(now);
        Effect::Queued
    }

    /// Whether so many events wait that a quiet window is of no more use. After a failed run, and after one that was put off,
    /// it may be no window that an issue waits for, and events end no other wait. The error tells that, not the attempts:
    /// what is put off has none.
    fn has_enough_for_a_run(&self, quiet: &Quiet) -> bool {
        quiet.events_max > 0
            && self.pending_events >= quiet.events_max as u64
            && self.status != ProcessingStatus::Processing
            && self.last_error.is_none()
    }

    fn claim(&mut self, owner: &str, ttl: Duration, now: Timestamp) -> Effect {
        match self.not_before {
            _ if self.status != ProcessingStatus::Queued => Effect::Nothing,
            Some(not_before) if not_before > now => Effect::NotYet(not_before),
            _ => {
                self.status = ProcessingStatus::Processing;
                self.claim_epoch.0 += 1;
                self.claim_owner = Some(owner.to_owned());
                self.claim_expires_at = Some(now.after(ttl));
                // From here on both speak of the events that come during the run.
                self.not_before = None;
                self.first_pending_at = None;
                Effect::Won(self.claim_epoch)
            }
        }
    }

    fn complete(&mut self, processed: u64, now: Timestamp) -> Effect {
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
    ) -> Effect {
        let is_blamed = !matches!(then, AfterFailure::PutOff { .. });
        self.attempts += u32::from(is_blamed);
        self.last_error = Some(error.to_owned());
        match then {
            AfterFailure::Retry { after } | AfterFailure::PutOff { after }
                if !is_blamed || self.attempts < attempts_max =>
            {
                self.not_before = self.not_before.max(Some(now.after(after)));
                self.requeue(now)
            }
            _ => self.quarantine(now),
        }
    }

    fn expire(&mut self, crashes_max: u32, now: Timestamp) -> Effect {
        // A claim without an end is none of ours; left alone it would never end.
        let is_live = self.claim_expires_at.is_some_and(|expires_at| expires_at > now);
        if self.status != ProcessingStatus::Processing || is_live {
            return Effect::Nothing;
        }
        self.crashes += 1;
        let owner = self.claim_owner.as_deref().unwrap_or_default();
        self.last_error = Some(format!("the claim of worker {owner} ran out"));
        if self.crashes >= crashes_max { self.quarantine(now) } else { self.requeue(now) }
    }

    /// Ends a claim: queued if anything is pending, else idle.
    fn requeue(&mut self, now: Timestamp) -> Effect {
        (self.claim_owner, self.claim_expires_at) = (None, None);
        if self.pending_events == 0 {
            self.status = ProcessingStatus::Idle;
            (self.not_before, self.first_pending_at) = (None, None);
            return Effect::Finished;
        }
        self.status = ProcessingStatus::Queued;
        self.first_pending_at.get_or_insert(now);
        self.nudged_at = Some(now);
        Effect::Queued
    }

    fn quarantine(&mut self, now: Timestamp) -> Effect {
        (self.claim_owner, self.claim_expires_at) = (None, None);
        self.status = ProcessingStatus::Idle;
        self.quarantined_at = Some(now);
        self.not_before = None;
        Effect::Quarantined
    }

    fn nudge(&mut self, overdue: Duration, now: Timestamp) -> Effect {
        // A nudge is on its way since it was sent, and useful only from the time the issue can be claimed.
        let since = self.nudged_at.max(self.not_before);
        let is_overdue = since.is_none_or(|since| since.after(overdue) <= now);
        if self.status != ProcessingStatus::Queued || !is_overdue {
            return Effect::Nothing;
        }
        self.nudged_at = Some(now);
        Effect::Queued
    }

    fn release(&mut self, now: Timestamp) -> Effect {
        (self.attempts, self.crashes, self.superseded) = (0, 0, 0);
        self.quarantined_at = None;
        let effect = self.requeue(now);
        self.nudged_at = None;
        effect
    }

    fn retry(&mut self, now: Timestamp) -> Effect {
        match self.status {
            _ if self.quarantined_at.is_some() => self.release(now),
            ProcessingStatus::Queued => {
                self.not_before = None;
                self.nudged_at = None;
                Effect::Queued
            }
            ProcessingStatus::Processing | ProcessingStatus::Idle => Effect::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
