//! Subscriptions: the handle of an application while its handler receives messages.
//!
//! Upstream: applications. Downstream: the `coordinator`, which assigns partitions to the subscription's
//! `partition_set`.
//! Guarantees: a stopped subscription has finished or released all in-flight messages and counted no attempt for released
//! ones; a dropped subscription loses nothing: its in-flight messages stay pending and are reclaimed.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::{StreamExt, stream};
use headwater_stream::{GroupName, GroupStart, StreamError};
use tracing::{info, warn};

use super::barrier_watcher;
use super::partition_set::PartitionSet;
use super::partition_state::{PartitionEvent, PartitionPhase};
use super::subscription_context::{SubscriptionContext, SubscriptionStats};
use crate::config::{ConsumerConfig, MessageOrder};
use crate::error::{QueueError, Result};
use crate::group::coordinator::MembershipHandle;
use crate::group::rebalance_listener::JoinRequest;
use crate::handler::Handler;
use crate::limits::PARTITIONS_MAX;
use crate::queue::Queue;
use crate::topic::{Partition, Topic, TopicName, group_name};

/// A handler that receives the messages of a topic for a group. Dropping it stops it at once: nothing is lost, but
/// in-flight messages stay pending and are redelivered.
pub struct Subscription {
    partition_set: Arc<PartitionSet>,
    /// `None` once it has left the group.
    membership: Mutex<Option<MembershipHandle>>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let context = &self.partition_set.context;
        f.debug_struct("Subscription")
            .field("topic", &context.topic)
            .field("group", &context.group)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// Delivers the messages of a topic to a handler, as a member of a group, until the subscription is stopped or
    /// dropped. A topic that was not created is plain: one stream, named like the topic. Fails with
    /// [`NoTopic`](QueueError::NoTopic) if the topic is deleted meanwhile.
    pub async fn subscribe(
        &self,
        topic: &str,
        group: &str,
        handler: impl Handler,
        config: ConsumerConfig,
    ) -> Result<Subscription> {
        config.validate()?;
        let name = TopicName::new(topic)?;
        let group = group_name(group)?;
        let topic = self.read_topic(&name).await?;
        let inner = &self.inner;
        let unreached = self.ensure_groups(&topic, &group, config.start).await?;
        let (mode, order, member) = (config.mode, config.order, config.member.clone());
        let backend = Arc::clone(&inner.backend);
        let trace = inner.config.trace.clone();
        let context = SubscriptionContext::new(
            backend,
            Arc::clone(&topic),
            group.clone(),
            Arc::new(handler),
            config,
            trace,
            unreached,
        );
        let partition_set = Arc::new(PartitionSet::new(
            context,
            Arc::clone(&topic),
            Arc::clone(&inner.shared_tasks),
        ));
        let listener = Arc::clone(&partition_set);
        let request = JoinRequest { group, topic, mode, member, listener };
        // Created before joining: if this future is dropped, the drop of the subscription stops what has started.
        let subscription = Subscription { partition_set, membership: Mutex::default() };
        let membership = inner.coordinator.join(request).await?;
        *subscription.lock() = Some(membership);
        let partition_set = &subscription.partition_set;
        inner.shared_tasks.maintenance.register(partition_set);
        if order == MessageOrder::PerKey {
            partition_set
                .spawn(barrier_watcher::run(Arc::downgrade(partition_set), Arc::downgrade(inner)));
        }
        Ok(subscription)
    }

    /// Creates the group on all partitions. Returns those whose servers cannot be reached; fails if that is all of them, or
    /// if the topic was deleted.
    pub(super) async fn ensure_groups(
        &self,
        topic: &Topic,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<Vec<Partition>> {
        let ensure = async |partition| {
            let backend = &*self.inner.backend;
            (partition, topic.ensure_group(backend, partition, group, start).await)
        };
        // All at once: those on a server that does not answer take their deadline once, not in turns.
        let all_at_once = usize::from(PARTITIONS_MAX);
        let mut calls = stream::iter((0..topic.partitions).map(ensure)).buffered(all_at_once);
        let (mut unreached, mut failure) = (Vec::new(), None);
        while let Some((partition, ensured)) = calls.next().await {
            match ensured {
                Ok(_) => {}
                Err(StreamError::NoGroup { .. }) => {
                    return Err(QueueError::NoTopic { topic: topic.name.to_string() });
                }
                Err(error) if error.is_transient() => {
                    warn!(topic = %topic.name, partition, %group, %error, "the partition cannot be reached; it is consumed when its server is back");
                    unreached.push(partition);
                    failure = Some(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        match failure {
            Some(error) if unreached.len() == usize::from(topic.partitions) => Err(error.into()),
            _ => Ok(unreached),
        }
    }
}

impl Subscription {
    /// Starts no handlers until `resume`. Running handlers finish; prefetched messages stay in flight.
    pub fn pause(&self) {
        self.set_paused(true);
    }

    /// Starts handlers again after `pause`.
    pub fn resume(&self) {
        self.set_paused(false);
    }

    fn set_paused(&self, is_paused: bool) {
        self.partition_set.context.paused.store(is_paused, Ordering::Release);
        for partition in self.partition_set.partitions() {
            partition.send(PartitionEvent::Paused(is_paused));
        }
    }

    /// Stops reading, handles all in-flight messages within the drain timeout, releases the rest and leaves the group.
    pub async fn drain(&self) {
        self.shut_down(PartitionPhase::Draining).await;
    }

    /// Stops reading, lets running handlers finish within the drain timeout, releases everything else and leaves the
    /// group. No attempt is counted for a released message.
    pub async fn stop(&self) {
        self.shut_down(PartitionPhase::Stopping).await;
    }

    async fn shut_down(&self, phase: PartitionPhase) {
        self.partition_set.shut_down(phase).await;
        let membership = self.lock().take();
        if let Some(membership) = membership {
            membership.leave().await;
            info!(topic = %self.partition_set.context.topic, group = %self.partition_set.context.group, "subscription stopped");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<MembershipHandle>> {
        self.membership.lock().expect("no code panics while it holds the membership")
    }

    /// Counts since the subscription started.
    pub fn stats(&self) -> SubscriptionStats {
        self.partition_set.stats()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.partition_set.terminate();
    }
}
