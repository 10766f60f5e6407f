//! The membership of a process in a group that it pulls.
//!
//! Upstream: `coordinator` reports the name, changes of the topic and dead members. Downstream: `pull_driver` reads them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::{Backend, ConsumerName, GroupName, PendingDeliveryQuery};
use tokio::sync::watch;

use crate::error::Result;
use crate::group::rebalance_listener::{AssignedPartition, GroupMembership, RebalanceListener};
use crate::keys;
use crate::topic::{Partition, Topic};

/// What the coordinator tells this member.
pub(super) struct PullMember {
    backend: Arc<dyn Backend>,
    group: GroupName,
    pub(super) topic: watch::Sender<Arc<Topic>>,
    /// The name of this member.
    pub(super) name: watch::Sender<Option<ConsumerName>>,
    /// Consumers whose process died.
    dead: Mutex<BTreeSet<ConsumerName>>,
}

impl PullMember {
    pub(super) fn new(backend: &Arc<dyn Backend>, group: &GroupName, topic: &Arc<Topic>) -> Self {
        Self {
            backend: Arc::clone(backend),
            group: group.clone(),
            topic: watch::Sender::new(Arc::clone(topic)),
            name: watch::Sender::new(None),
            dead: Mutex::default(),
        }
    }

    /// Consumers whose process died, and that have pending entries.
    pub(super) fn dead(&self) -> MutexGuard<'_, BTreeSet<ConsumerName>> {
        self.dead.lock().expect("no code panics while it holds this lock")
    }

    /// Whether entries are pending for a consumer.
    async fn has_pending(&self, consumer: &ConsumerName) -> Result<bool> {
        let topic = self.topic.borrow().clone();
        for partition in 0..topic.partitions {
            let query = PendingDeliveryQuery {
                stream: &keys::stream(&topic, partition),
                group: &self.group,
                consumer: Some(consumer),
                min_idle: Duration::ZERO,
                after: None,
                count: 1,
            };
            if !self.backend.pending(query).await?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Leases do not depend on the membership: it makes the group active, finds members with another mode, and reports
/// dead ones.
#[async_trait]
impl RebalanceListener for PullMember {
    fn on_joined(&self, joined: GroupMembership) {
        self.name.send_replace(Some(joined.consumer));
    }

    fn on_assigned(&self, _: AssignedPartition) {}

    async fn on_revoke(&self, _: Partition) {}

    fn on_lost(&self, _: Partition) {}

    fn on_evicted(&self) {}

    async fn on_member_died(&self, dead: ConsumerName) -> bool {
        // Callers get its entries, as they ask for messages.
        self.dead().insert(dead.clone());
        let has_pending = self.has_pending(&dead).await.unwrap_or(true);
        if !has_pending {
            self.dead().remove(&dead);
        }
        !has_pending
    }

    fn on_topic_changed(&self, topic: Arc<Topic>) {
        self.topic.send_replace(topic);
    }
}
