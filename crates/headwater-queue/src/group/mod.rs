//! Group coordination: which members are alive, and which member owns which partition.
//!
//! A process joins a group once, whatever number of topics it subscribes to: one session, with one liveness lease. Each
//! member reads the member list and the partition leases and computes the same assignment from them. It acquires the
//! free partitions assigned to it and revokes those assigned to others. The leases decide ownership; a stale snapshot
//! only delays a hand-over.
//!
//! Upstream: `consumer` joins with a [`RebalanceListener`](rebalance_listener::RebalanceListener). Downstream: leases
//! and registry of the backend.
//! Guarantees: one owner per partition and epoch; `on_lost` runs before a lease can expire; a consumer name that lost a
//! lease is never reused. Flow: `coordinator` starts a `session` per group. The session joins and runs the `membership`
//! loop, which polls the group (`members`), plans (`subscription_state`, `assign`) and acts (`group_ops`).

// In dependency order: each module uses only those above it.
pub(crate) mod rebalance_listener;

mod assign;
mod members;
mod subscription_state;

mod group_ops;

mod membership;

mod session;

pub(crate) mod coordinator;

pub(crate) use coordinator::Coordinator;
pub(crate) use group_ops::notify_watchers;
pub(crate) use members::{GroupSnapshot, MemberStatus};

#[cfg(test)]
mod tests;
