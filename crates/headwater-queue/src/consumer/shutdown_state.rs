//! The end of a partition, as a part of `partition_state`: stop reading, wait for the last read, wait for handlers up to
//! the drain timeout and then abort them, settle everything, terminate.
//!
//! Upstream: `partition_state`. Guarantees: no attempt is counted for a released message; it ends within the drain
//! timeout plus [`LAST_READ_TIMEOUT`] and [`SETTLE_TIMEOUT`]; within them nothing is left unsettled, except messages whose
//! retry or dead letter could not be written at the last attempt.

use std::time::Duration;

use tokio::time::Instant;

use super::partition_state::{Action, PartitionPhase, PartitionReport, PartitionState};
use super::reclaim_state::{ReclaimPurpose, ReclaimScope};

/// Minimum time to wait for the last read if the backend does not answer.
const LAST_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for settling after the last handler finished, if the backend does not answer.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct ShutdownState {
    step: ShutdownStep,
    last_read_until: Instant,
    drain_until: Instant,
    settle_until: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownStep {
    LastRead,
    /// Entries of a failed read are reclaimed, so that they are not left behind.
    Unseen,
    Handlers,
    Settle,
}

impl ShutdownState {
    pub(super) fn deadline(&self) -> Instant {
        match self.step {
            ShutdownStep::LastRead | ShutdownStep::Unseen => self.last_read_until,
            ShutdownStep::Handlers => self.drain_until,
            ShutdownStep::Settle => self.settle_until,
        }
    }
}

impl PartitionState {
    /// Stops reading. While stopping, releases what no handler has started.
    pub(super) fn begin_shutdown(&mut self, phase: PartitionPhase, drain: Duration) {
        if self.phase != PartitionPhase::Stopping {
            self.phase = phase;
        }
        self.is_reading = false;
        let drain_until = self.now + drain;
        match &mut self.shutdown {
            Some(shutdown) => shutdown.drain_until = shutdown.drain_until.min(drain_until),
            None => {
                self.shutdown = Some(ShutdownState {
                    step: ShutdownStep::LastRead,
                    last_read_until: self.now + drain.max(LAST_READ_TIMEOUT),
                    drain_until,
                    settle_until: drain_until,
                });
                self.actions.push(Action::EndReading);
            }
        }
        if self.phase == PartitionPhase::Stopping {
            let queued = self.queues.clear();
            self.release(queued);
            self.actions.push(Action::Withdraw);
        }
    }

    pub(super) fn on_last_read_ended(&mut self) {
        let Some(shutdown) = &mut self.shutdown else { return };
        if shutdown.step != ShutdownStep::LastRead {
            return;
        }
        shutdown.step = ShutdownStep::Handlers;
        if self.reclaims.may_have_unseen() {
            shutdown.step = ShutdownStep::Unseen;
            let own = self.settings.consumer_name.clone();
            self.reclaims.request(ReclaimPurpose::LastUnseen, ReclaimScope::Unseen(own));
            self.advance_reclaims();
        }
    }

    pub(super) fn advance_shutdown(&mut self) {
        while self.phase != PartitionPhase::Terminated {
            let is_settled = self.settles.is_settled();
            let Some(shutdown) = &mut self.shutdown else { return };
            let is_over = shutdown.deadline() <= self.now;
            match shutdown.step {
                ShutdownStep::LastRead | ShutdownStep::Unseen if is_over => {
                    // What the read still delivers is released, or stays pending for the next owner.
                    shutdown.step = ShutdownStep::Handlers;
                    self.report(PartitionReport::LastReadTimedOut);
                }
                ShutdownStep::Unseen if self.reclaims.is_idle() => {
                    shutdown.step = ShutdownStep::Handlers;
                }
                ShutdownStep::LastRead | ShutdownStep::Unseen => return,
                ShutdownStep::Handlers => {
                    let is_drained = self.running.is_empty() && self.queues.len() == 0;
                    if !is_drained && !is_over {
                        return;
                    }
                    shutdown.step = ShutdownStep::Settle;
                    shutdown.settle_until = self.now + SETTLE_TIMEOUT;
                    if !is_drained {
                        self.abort_handlers();
                    }
                }
                ShutdownStep::Settle if is_settled || is_over => self.terminate(true),
                ShutdownStep::Settle => return,
            }
        }
    }

    /// Aborts the handlers and releases all messages. A handler that blocks its thread keeps running, but its outcome is
    /// ignored.
    fn abort_handlers(&mut self) {
        self.report(PartitionReport::DrainTimedOut);
        self.actions.push(Action::AbortHandlers);
        self.phase = PartitionPhase::Stopping;
        let running = std::mem::take(&mut self.running).into_keys();
        let queued = self.queues.clear();
        self.release(running.chain(queued));
    }
}
