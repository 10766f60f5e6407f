//! An owned stream, as the program that works on it sees it.
//!
//! Guarantees: work can start only while the stream is owned and no call is ending it, so a rebalance never
//! releases a stream during work.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::{EntryId, Epoch, HeldLease, StreamName};
use tokio::time::Instant;

use crate::metrics::{AssignmentMetrics, PROCESSING_ENDED, PROCESSING_SECONDS, PROCESSING_STARTED};

/// A stream this process owns. Clones share the ownership; dropping them does not end it.
#[derive(Clone)]
pub struct Owned(Arc<Inner>);

struct Inner {
    stream: StreamName,
    info: Option<Box<str>>,
    entry: EntryId,
    owners: u64,
    lease: HeldLease,
    metrics: AssignmentMetrics,
    progress: Mutex<OwnershipProgress>,
}

struct OwnershipProgress {
    phase: OwnershipPhase,
    working: usize,
    /// A call tried to complete the stream, and its effect is unknown.
    done_is_uncertain: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnershipPhase {
    /// Owned; no call is ending it.
    Active,
    /// A call is ending it.
    Ending,
    /// A call tried to end it and its effect is unknown: the reply was lost or the caller was cancelled.
    Uncertain(EndReason),
    /// Ended by its owner.
    Ended(EndReason),
    /// Lost.
    Disowned,
}

/// How an owner ends its ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The stream is done.
    Done,
    /// Another consumer acquires it.
    Release,
}

impl Owned {
    pub(crate) fn new(
        stream: StreamName,
        info: Option<Box<str>>,
        (entry, owners): (EntryId, u64),
        lease: HeldLease,
        metrics: AssignmentMetrics,
    ) -> Self {
        let progress = Mutex::new(OwnershipProgress {
            phase: OwnershipPhase::Active,
            working: 0,
            done_is_uncertain: false,
        });
        Self(Arc::new(Inner { stream, info, entry, owners, lease, metrics, progress }))
    }

    /// The stream.
    pub fn stream(&self) -> &StreamName {
        &self.0.stream
    }

    /// The `Info` of its input entry: JSON text, unchanged.
    pub fn info(&self) -> Option<&str> {
        self.0.info.as_deref()
    }

    /// The epoch of this ownership; greater than that of any earlier owner.
    pub fn epoch(&self) -> Epoch {
        self.0.lease.fence().epoch
    }

    /// Number of this owner: 1 plus the number of owners that died. Owners that released the stream do not
    /// count.
    pub fn owners(&self) -> u64 {
        self.0.owners
    }

    /// The lease of the stream: whether it is still held, a future for its loss, and the fence to present.
    pub fn guard(&self) -> &HeldLease {
        &self.0.lease
    }

    /// Starts work, during which a rebalance does not release the stream. `None` if the stream is no longer
    /// owned.
    pub fn work(&self) -> Option<WorkGuard> {
        let mut progress = self.progress();
        if progress.phase != OwnershipPhase::Active || !self.0.lease.is_valid() {
            return None;
        }
        progress.working += 1;
        self.0.metrics.count(PROCESSING_STARTED, 1);
        Some(WorkGuard { owned: self.clone(), since: Instant::now() })
    }

    pub(crate) fn entry(&self) -> EntryId {
        self.0.entry
    }

    pub(crate) fn phase(&self) -> OwnershipPhase {
        self.progress().phase
    }

    /// Starts to end it. Fails with the current phase if that does not allow it.
    pub(crate) fn begin_end(&self, reason: EndReason) -> Result<EndAttempt, OwnershipPhase> {
        self.begin_end_if(reason, |_| true)
    }

    /// Starts to release it unless work is in progress.
    pub(crate) fn begin_release_if_idle(&self) -> Result<EndAttempt, OwnershipPhase> {
        self.begin_end_if(EndReason::Release, |working| working == 0)
    }

    fn begin_end_if(
        &self,
        reason: EndReason,
        allow: fn(usize) -> bool,
    ) -> Result<EndAttempt, OwnershipPhase> {
        let mut progress = self.progress();
        match progress.phase {
            OwnershipPhase::Active | OwnershipPhase::Uncertain(_) if allow(progress.working) => {
                progress.phase = OwnershipPhase::Ending;
                Ok(EndAttempt {
                    owned: self.clone(),
                    reason,
                    then: OwnershipPhase::Uncertain(reason),
                })
            }
            phase => Err(phase),
        }
    }

    /// Reverts an uncertain end that had no effect.
    pub(crate) fn reset_uncertain(&self) {
        let mut progress = self.progress();
        if matches!(progress.phase, OwnershipPhase::Uncertain(_)) {
            progress.phase = OwnershipPhase::Active;
            progress.done_is_uncertain = false;
        }
    }

    /// Whether an earlier call may have completed it, even if it was lost since.
    pub(crate) fn done_may_have_applied(&self) -> bool {
        self.progress().done_is_uncertain
    }

    pub(crate) fn set_phase(&self, phase: OwnershipPhase) {
        self.progress().phase = phase;
    }

    fn progress(&self) -> MutexGuard<'_, OwnershipProgress> {
        self.0.progress.lock().expect("no code panics while it holds this lock")
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owned")
            .field("stream", self.stream())
            .field("epoch", &self.epoch())
            .field("owners", &self.owners())
            .finish_non_exhaustive()
    }
}

/// Work in progress on an owned stream; ends on drop.
#[must_use = "work ends when this is dropped"]
pub struct WorkGuard {
    owned: Owned,
    since: Instant,
}

impl fmt::Debug for WorkGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkGuard").field("stream", self.owned.stream()).finish_non_exhaustive()
    }
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        self.owned.progress().working -= 1;
        let metrics = &self.owned.0.metrics;
        metrics.count(PROCESSING_ENDED, 1);
        metrics.time(PROCESSING_SECONDS, self.since.elapsed());
    }
}

/// An attempt to end an ownership. Dropped without a result, its outcome is uncertain.
pub(crate) struct EndAttempt {
    owned: Owned,
    reason: EndReason,
    then: OwnershipPhase,
}

impl EndAttempt {
    /// The attempt had no effect.
    pub(crate) fn failed(mut self) {
        self.then = OwnershipPhase::Active;
    }

    /// The ownership ended.
    pub(crate) fn ended(mut self) {
        self.then = OwnershipPhase::Ended(self.reason);
    }
}

impl Drop for EndAttempt {
    fn drop(&mut self) {
        let mut progress = self.owned.progress();
        progress.done_is_uncertain |= self.then == OwnershipPhase::Uncertain(EndReason::Done);
        // Keep `Disowned` if the stream was lost meanwhile.
        if progress.phase == OwnershipPhase::Ending {
            progress.phase = self.then;
        }
    }
}
