//! A stream this process owns, as the program that works on it sees it.
//!
//! Promises: work can begin only while the stream is owned and nobody is ending it, so a rebalance never takes a stream
//! away from under work that has begun.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::{EntryId, Epoch, HeldLease, StreamName};
use tokio::time::Instant;

use crate::metrics::Metrics;

/// A stream this process owns. Clones are the same ownership; dropping all of them does not end it.
#[derive(Clone)]
pub struct Owned(Arc<Inner>);

struct Inner {
    stream: StreamName,
    info: Option<Box<str>>,
    entry: EntryId,
    owners: u64,
    lease: HeldLease,
    metrics: Metrics,
    progress: Mutex<Progress>,
}

struct Progress {
    phase: Phase,
    working: usize,
    /// A call said that the stream is done, and it is not known whether that took effect.
    done_is_uncertain: bool,
}

/// How far the end of an ownership is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nobody ends it.
    Active,
    /// A call is ending it.
    Ending,
    /// A call tried to end it, and nobody knows whether it did: its reply was lost or the caller went away.
    Uncertain(Wish),
    /// It ended as its owner wished.
    Ended(Wish),
    /// It was taken from us.
    Disowned,
}

/// How an owner ends its ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// The stream is done.
    Done,
    /// Somebody else shall have it.
    GiveBack,
}

impl Owned {
    pub(crate) fn new(
        stream: StreamName,
        info: Option<Box<str>>,
        (entry, owners): (EntryId, u64),
        lease: HeldLease,
        metrics: Metrics,
    ) -> Self {
        let progress =
            Mutex::new(Progress { phase: Phase::Active, working: 0, done_is_uncertain: false });
        Self(Arc::new(Inner { stream, info, entry, owners, lease, metrics, progress }))
    }

    /// The stream.
    pub fn stream(&self) -> &StreamName {
        &self.0.stream
    }

    /// What its producer said about it: JSON text, as it was written.
    pub fn info(&self) -> Option<&str> {
        self.0.info.as_deref()
    }

    /// The epoch of this ownership: larger than that of any earlier owner.
    pub fn epoch(&self) -> Epoch {
        self.0.lease.fence().epoch
    }

    /// Which owner this is: 1 for the first, one more for each that died. Owners that gave it back do not count.
    pub fn owners(&self) -> u64 {
        self.0.owners
    }

    /// The lease behind it: whether the stream is still ours, when it no longer is, and the fence to present.
    pub fn guard(&self) -> &HeldLease {
        &self.0.lease
    }

    /// Begins a piece of work, during which a rebalance leaves the stream here. `None` if it is no longer ours.
    pub fn work(&self) -> Option<Work> {
        let mut progress = self.progress();
        if progress.phase != Phase::Active || !self.0.lease.is_trusted() {
            return None;
        }
        progress.working += 1;
        self.0.metrics.processing_started();
        Some(Work { owned: self.clone(), since: Instant::now() })
    }

    pub(crate) fn entry(&self) -> EntryId {
        self.0.entry
    }

    pub(crate) fn phase(&self) -> Phase {
        self.progress().phase
    }

    /// Begins to end it. An error is the phase that stands in the way.
    pub(crate) fn begin_end(&self, wish: Wish) -> Result<Ending, Phase> {
        self.begin_end_if(wish, |_| true)
    }

    /// Begins to give it back unless somebody works on it.
    pub(crate) fn begin_give_back_if_idle(&self) -> Result<Ending, Phase> {
        self.begin_end_if(Wish::GiveBack, |working| working == 0)
    }

    fn begin_end_if(&self, wish: Wish, allow: fn(usize) -> bool) -> Result<Ending, Phase> {
        let mut progress = self.progress();
        match progress.phase {
            Phase::Active | Phase::Uncertain(_) if allow(progress.working) => {
                progress.phase = Phase::Ending;
                Ok(Ending { owned: self.clone(), wish, then: Phase::Uncertain(wish) })
            }
            phase => Err(phase),
        }
    }

    /// What was uncertain turned out to have had no effect.
    pub(crate) fn not_ended(&self) {
        let mut progress = self.progress();
        if matches!(progress.phase, Phase::Uncertain(_)) {
            progress.phase = Phase::Active;
            progress.done_is_uncertain = false;
        }
    }

    /// Whether an earlier call may have ended it as done, also if it was taken from us since.
    pub(crate) fn done_may_have_happened(&self) -> bool {
        self.progress().done_is_uncertain
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        self.progress().phase = phase;
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
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

/// A piece of work on an owned stream; over when it is dropped.
#[must_use = "work is over when this is dropped"]
pub struct Work {
    owned: Owned,
    since: Instant,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("stream", self.owned.stream()).finish_non_exhaustive()
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.owned.progress().working -= 1;
        self.owned.0.metrics.processing_ended(self.since.elapsed());
    }
}

/// The attempt to end an ownership. Dropped without a word, its outcome is uncertain.
pub(crate) struct Ending {
    owned: Owned,
    wish: Wish,
    then: Phase,
}

impl Ending {
    /// The attempt had no effect.
    pub(crate) fn failed(mut self) {
        self.then = Phase::Active;
    }

    /// It ended as wished.
    pub(crate) fn ended(mut self) {
        self.then = Phase::Ended(self.wish);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let mut progress = self.owned.progress();
        progress.done_is_uncertain |= self.then == Phase::Uncertain(Wish::Done);
        // It may have been taken from us meanwhile; that stays.
        if progress.phase == Phase::Ending {
            progress.phase = self.then;
        }
    }
}
