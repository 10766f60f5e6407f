//! What the coordinator and the workers of a subscription say to each other.
//!
//! Upstream: `coordinator`, which decides what this process works on, calls a [`Workplace`]. Downstream: the workers
//! of a subscription implement it.
//! Promises of the coordinator, for one subscription: calls come one after the other, only `give_up` and `orphaned`
//! run beside others; between `gained` and the end of `give_up`, or `lost`, a partition is ours; `lost` may come while
//! `give_up` runs; `gained` never comes before the last `give_up` of the same partition has returned. After `expelled`
//! nothing is ours until `joined` comes again, under another name.
//! Asked of a workplace: the calls that are not `async` return at once and do not call the coordinator.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_stream::{ConsumerName, GroupName, HeldLease};
use tokio::sync::Notify;

use crate::config::Mode;
use crate::topic::{Partition, Topic};

/// A wish to take part in a group.
#[derive(Clone)]
pub(crate) struct Joining {
    /// The group.
    pub(crate) group: GroupName,
    /// The topic, as it was a moment ago.
    pub(crate) topic: Arc<Topic>,
    /// How the group shares it.
    pub(crate) mode: Mode,
    /// An id that stays the same over restarts.
    pub(crate) member: Option<String>,
    /// Who does the work.
    pub(crate) workplace: Arc<dyn Workplace>,
}

/// What a subscription does with the partitions it is given.
#[async_trait]
pub(crate) trait Workplace: Send + Sync {
    /// This process is a member of the group now. Shared: begin to read all partitions. Owned: wait for `gained`.
    fn joined(&self, joined: Joined);

    /// The partition is ours: take over what is pending, under the fence, then read.
    fn gained(&self, owned: OwnedPartition);

    /// Stop reading the partition, finish what is in hand within the drain time and release the rest. When it returns,
    /// nothing of the partition is in hand and no read of ours can deliver from it any more; then the lease is released.
    /// If the partition is `lost` meanwhile, the call may be dropped half way.
    async fn give_up(&self, partition: Partition);

    /// The lease is gone and somebody else may be at work: cancel the handlers, settle nothing.
    fn lost(&self, partition: Partition);

    /// This process is no longer a member: others take it for dead. Every partition was `lost` before. Shared: stop
    /// reading, cancel the handlers, settle nothing. `joined` comes again, with a new consumer name.
    fn expelled(&self);

    /// A member died. Shared: take over its entries on all partitions. Returns whether all of them are taken over;
    /// until then it is asked again. Other processes may do the same at the same time.
    async fn orphaned(&self, dead: ConsumerName) -> bool;

    /// The topic was grown, deleted or created anew: this is what it is now. Partitions it has no more, or that have
    /// other keys now, are given up, and gained under their new keys: each [`OwnedPartition`] names its own topic.
    fn changed(&self, topic: Arc<Topic>);
}

/// This process in a group, until it is expelled.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    /// Under which name it reads. Never used again once a lease was lost.
    pub(crate) consumer: ConsumerName,
    /// Shows that it lives: while it is trusted, nobody takes it for dead.
    pub(crate) lease: HeldLease,
    /// To be raised when an effect is refused.
    pub(crate) alarm: Alarm,
}

/// A partition this process may work on.
#[derive(Clone, Debug)]
pub(crate) struct OwnedPartition {
    /// The topic as it was when the partition was taken: its keys are made from this.
    pub(crate) topic: Arc<Topic>,
    /// Which one.
    pub(crate) partition: Partition,
    /// The right to it. Work only while it is trusted; present its fence with every effect.
    pub(crate) lease: HeldLease,
    /// Under which name to read; the same as in [`Joined`].
    pub(crate) consumer: ConsumerName,
    /// To be raised when an effect is refused.
    pub(crate) alarm: Alarm,
}

/// Tells the coordinator that the backend answered `Fenced`: this process must join anew. Clones are the same alarm.
#[derive(Clone, Default)]
pub(crate) struct Alarm(Arc<Notify>);

impl Alarm {
    /// An effect was refused with `Fenced`. All partitions of the group will be `lost` soon after; until then, stop
    /// working on this one. Raising it twice, or late, does no harm.
    pub(crate) fn raise(&self) {
        self.0.notify_one();
    }

    /// Returns when it is raised. Cancel-safe.
    pub(crate) async fn raised(&self) {
        self.0.notified().await;
    }
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Alarm")
    }
}
