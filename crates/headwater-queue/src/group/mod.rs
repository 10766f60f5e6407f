//! Groups: which members live, and who owns which partition.
//!
//! A process is in a group once, whatever number of topics it subscribes to: one session, with one lease that shows that
//! it lives. Its members look at each other and at the leases of partitions, each computes the same assignment from
//! what it sees, takes what is its own and free, and gives up what is another's. Leases decide; what was seen too early
//! or too late only makes a hand-over begin a moment later.
//!
//! Upstream: `consumer` joins with a [`Workplace`](seam::Workplace). Downstream: leases and registry of the backend.
//! Promises: one owner per partition and epoch; `lost` before a lease can expire; a name that lost a lease is never used
//! again. The file list is the flow: `coordinator` starts a `session` per group, which enters, stays (`stay`) and looks
//! (`members`), plans (`placement`, `assign`) and does it (`steps`).

// In dependency order: each module uses only those above it.
pub(crate) mod seam;

mod assign;
mod identity;
mod members;
mod placement;
mod steps;

mod stay;

mod session;

pub(crate) mod coordinator;

pub(crate) use coordinator::Coordinator;
pub(crate) use members::{Life, Stand, View};
pub(crate) use steps::ring;

#[cfg(test)]
mod tests;
