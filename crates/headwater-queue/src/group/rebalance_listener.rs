//! The interface between the coordinator and the consumer of a subscription.
//!
//! Upstream: `coordinator`, which decides which partitions this process owns, calls a [`RebalanceListener`].
//! Downstream: the consumer of a subscription implements it.
//! Guarantees of the coordinator, per subscription: calls are sequential; only `on_revoke` and `on_member_died` may
//! overlap with other calls. A partition is ours from `on_assigned` until `on_revoke` returns or `on_lost` is called.
//! `on_lost` may come while `on_revoke` runs; it comes for one partition alone only on a cluster; `on_assigned` never comes before the previous `on_revoke` of the same
//! partition has returned. After `on_evicted` nothing is ours until the next `on_joined`, which brings a new consumer
//! name.
//! Required of a listener: calls that are not `async` return immediately and do not call the coordinator.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_stream::{ConsumerName, Fence, GroupName, HeldLease};
use tokio::sync::mpsc;

use crate::config::Mode;
use crate::topic::{Partition, Topic};

/// A request to join a group with one topic.
#[derive(Clone)]
pub(crate) struct JoinRequest {
    pub(crate) group: GroupName,
    /// The topic as last read.
    pub(crate) topic: Arc<Topic>,
    pub(crate) mode: Mode,
    /// Static member id, kept over restarts.
    pub(crate) member: Option<String>,
    pub(crate) listener: Arc<dyn RebalanceListener>,
}

/// Callbacks of a subscription: what it must do when its membership or its partitions change.
#[async_trait]
pub(crate) trait RebalanceListener: Send + Sync {
    /// This process is a member of the group. Shared mode: start reading all partitions. Owned mode: wait for
    /// `on_assigned`.
    fn on_joined(&self, joined: GroupMembership);

    /// The partition is ours: reclaim its pending entries under the fence, then read.
    fn on_assigned(&self, owned: AssignedPartition);

    /// Stop reading the partition, finish messages in flight within the drain time and release the rest. When this
    /// returns, nothing of the partition is in flight and none of our reads can deliver from it; then the lease is
    /// released. If the partition is lost meanwhile, the future may be dropped.
    async fn on_revoke(&self, partition: Partition);

    /// The lease is lost and another member may own the partition: cancel its handlers, settle nothing.
    fn on_lost(&self, partition: Partition);

    /// This process was evicted: other members treat it as dead. `on_lost` was called for every owned partition before.
    /// Shared mode: stop reading, cancel the handlers, settle nothing. `on_joined` follows with a new consumer name.
    fn on_evicted(&self);

    /// A member died. Shared mode: reclaim its entries on all partitions. Returns whether all were reclaimed; otherwise
    /// it is called again. Other members may reclaim at the same time.
    async fn on_member_died(&self, dead: ConsumerName) -> bool;

    /// The topic was grown, deleted or created again; `topic` is its current state. Partitions that no longer exist or
    /// have different keys are revoked, and assigned again under their new keys: each [`AssignedPartition`] names its
    /// own topic.
    fn on_topic_changed(&self, topic: Arc<Topic>);
}

/// The membership of this process in a group, until it is evicted.
#[derive(Clone, Debug)]
pub(crate) struct GroupMembership {
    /// The consumer name it reads under. Never reused after a lease was lost.
    pub(crate) consumer: ConsumerName,
    /// The liveness lease: while it is trusted, no other member treats this one as dead.
    pub(crate) lease: HeldLease,
    /// To be signaled when the backend rejects a write as `Fenced`.
    pub(crate) fenced: FencedSignal,
}

/// A partition this process owns.
#[derive(Clone, Debug)]
pub(crate) struct AssignedPartition {
    /// The topic as it was when the partition was acquired; its keys are derived from this.
    pub(crate) topic: Arc<Topic>,
    pub(crate) partition: Partition,
    /// The partition lease. Work only while it is trusted; send its fence with every write.
    pub(crate) lease: HeldLease,
    /// The consumer name to read under; the same as in [`GroupMembership`].
    pub(crate) consumer: ConsumerName,
    /// To be signaled when the backend rejects a write as `Fenced`.
    pub(crate) fenced: FencedSignal,
}

/// Reports to the coordinator that the backend answered `Fenced`, so the lease is not ours.
#[derive(Clone)]
pub(crate) struct FencedSignal {
    fence: Fence,
    rejected: mpsc::UnboundedSender<Fence>,
}

/// Receives the fences with which a write was rejected, once per rejected write.
pub(super) type RejectedFences = mpsc::UnboundedReceiver<Fence>;

impl FencedSignal {
    pub(super) fn new(fence: Fence) -> (Self, RejectedFences) {
        let (rejected, received) = mpsc::unbounded_channel();
        (Self { fence, rejected }, received)
    }

    /// The signal of another lease.
    pub(super) fn of(&self, fence: Fence) -> Self {
        Self { fence, rejected: self.rejected.clone() }
    }

    /// Reports a write rejected with `Fenced`. The coordinator then calls `on_lost`; stop working on the partition now.
    /// Idempotent.
    pub(crate) fn signal(&self) {
        // Fails if the membership has ended.
        let _ = self.rejected.send(self.fence.clone());
    }
}

impl fmt::Debug for FencedSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedSignal").field("fence", &self.fence).finish_non_exhaustive()
    }
}
