//! The partition set of a subscription: one consumer per assigned partition.
//!
//! Upstream: `coordinator` assigns and revokes partitions. Downstream: a `partition_driver` for each, on a shared
//! `fetcher`.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use headwater_stream::ConsumerName;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::warn;

use super::delay_scheduler::DelayScheduler;
use super::fetcher::{Fetcher, FetcherKey};
use super::partition_context::PartitionContext;
use super::partition_driver::DriverHandle;
use super::partition_state::{PartitionEvent, PartitionPhase};
use super::shared_tasks::SharedTasks;
use super::subscription_context::{SubscriptionContext, SubscriptionStats};
use crate::config::Mode;
use crate::group::rebalance_listener::{AssignedPartition, GroupMembership, RebalanceListener};
use crate::keys;
use crate::topic::{Partition, Topic};

/// Maximum age of a topic as the coordinator reports it.
const TOPIC_AGE_MAX: Duration = Duration::from_secs(10);

pub(super) struct PartitionSet {
    pub(super) context: Arc<SubscriptionContext>,
    shared_tasks: Arc<SharedTasks>,
    state: Mutex<PartitionSetState>,
    /// Tasks of the whole subscription.
    tasks: Mutex<JoinSet<()>>,
}

struct PartitionSetState {
    topic: Arc<Topic>,
    /// Our membership in the group, while we are a member.
    joined: Option<GroupMembership>,
    partitions: HashMap<Partition, Arc<DriverHandle>>,
    /// Promote the due messages of the topic.
    delay_schedulers: Vec<Arc<DelayScheduler>>,
    /// No partition is added any more.
    is_stopping: bool,
}

impl PartitionSet {
    pub(super) fn new(
        context: SubscriptionContext,
        topic: Arc<Topic>,
        shared_tasks: Arc<SharedTasks>,
    ) -> Self {
        let state = PartitionSetState {
            joined: None,
            partitions: HashMap::new(),
            delay_schedulers: delay_schedulers(&context, &topic, &shared_tasks),
            is_stopping: false,
            topic,
        };
        Self {
            context: Arc::new(context),
            shared_tasks,
            state: Mutex::new(state),
            tasks: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PartitionSetState> {
        self.state.lock().expect("no code panics while it holds the partition set")
    }

    /// Starts a task that ends with the subscription.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().expect("no code panics while it holds the tasks").spawn(task);
    }

    pub(super) fn partitions(&self) -> Vec<Arc<DriverHandle>> {
        self.lock().partitions.values().cloned().collect()
    }

    pub(super) fn stats(&self) -> SubscriptionStats {
        self.context.stats(self.lock().partitions.len())
    }

    /// Starts to consume a partition.
    fn start(&self, state: &mut PartitionSetState, owned: AssignedPartition) {
        let AssignedPartition { topic, partition, lease, consumer, fenced } = owned;
        let epoch = (self.context.config.mode == Mode::Owned).then(|| lease.fence().epoch);
        let policy = self.context.policy(topic, partition, epoch);
        let fetcher = self.fetcher(&consumer);
        let context = Arc::clone(&self.context);
        let context = PartitionContext::new(context, policy, consumer, lease, fenced);
        let handle = DriverHandle::start(Arc::new(context), fetcher);
        if let Some(former) = state.partitions.insert(partition, Arc::new(handle)) {
            former.terminate();
        }
    }

    /// Divides the capacity of the subscription among so many partitions: before one is started, so that it does not
    /// take the share of the next.
    fn divide_capacity(&self, state: &PartitionSetState, partitions: usize) {
        let before = self.context.pool.limits();
        let topic_partitions = usize::from(state.topic.partitions);
        let limits = self.context.pool.divide(partitions, topic_partitions);
        if limits != before {
            for partition in state.partitions.values() {
                partition.send(PartitionEvent::LimitsChanged(limits));
            }
        }
    }

    fn fetcher(&self, consumer_name: &ConsumerName) -> Arc<Fetcher> {
        let config = &self.context.config;
        let key = FetcherKey {
            group: self.context.group.clone(),
            consumer_name: consumer_name.clone(),
            batch: config.batch.min(config.partition_in_flight_max()),
            poll: config.poll,
        };
        self.shared_tasks.fetcher(&self.context.backend, key)
    }

    /// [`Mode::Shared`]: consumes all partitions of the topic, and stops consuming those that it no longer has.
    fn consume_all_partitions(&self, state: &mut PartitionSetState) {
        let Some(joined) = state.joined.clone() else { return };
        let topic = Arc::clone(&state.topic);
        // The streams of the others were deleted, or belong to another topic now.
        state.partitions.retain(|partition, handle| {
            let known = &handle.context.policy.topic;
            let is_same = known.layout == topic.layout && known.created_at == topic.created_at;
            let is_kept = *partition < topic.partitions && is_same;
            if !is_kept {
                handle.terminate();
            }
            is_kept
        });
        self.divide_capacity(state, usize::from(topic.partitions));
        for partition in 0..topic.partitions {
            if !state.partitions.contains_key(&partition) {
                let GroupMembership { consumer, lease, fenced } = joined.clone();
                let topic = Arc::clone(&topic);
                let assigned = AssignedPartition { topic, partition, lease, consumer, fenced };
                self.start(state, assigned);
            }
        }
    }

    /// Shuts all partitions down: with [`PartitionPhase::Stopping`] after running handlers, with
    /// [`PartitionPhase::Draining`] after all in-flight messages.
    pub(super) async fn shut_down(&self, phase: PartitionPhase) {
        let partitions: Vec<_> = {
            let mut state = self.lock();
            state.is_stopping = true;
            state.delay_schedulers.clear();
            state.partitions.values().cloned().collect()
        };
        let drain = self.context.config.drain;
        let shutdowns = partitions.iter().map(|partition| partition.shut_down(phase, drain));
        join_all(shutdowns).await;
        for partition in &partitions {
            self.remove(partition);
        }
        if tokio::time::timeout(drain, self.context.wait_for_recoveries()).await.is_err() {
            warn!(topic = %self.context.topic, "entries lost by the server could not be re-appended within the drain timeout");
        }
    }

    /// Terminates all partitions at once. In-flight messages stay pending.
    pub(super) fn terminate(&self) {
        let mut state = self.lock();
        state.is_stopping = true;
        state.delay_schedulers.clear();
        state.partitions.drain().for_each(|(_, partition)| partition.terminate());
    }

    /// Removes a partition, unless another consumer has replaced this one.
    fn remove(&self, handle: &Arc<DriverHandle>) {
        let mut state = self.lock();
        let partition = handle.context.policy.partition;
        if state.partitions.get(&partition).is_some_and(|known| Arc::ptr_eq(known, handle)) {
            state.partitions.remove(&partition);
        }
    }
}

fn delay_schedulers(
    context: &SubscriptionContext,
    topic: &Topic,
    shared_tasks: &SharedTasks,
) -> Vec<Arc<DelayScheduler>> {
    let sets = keys::all_delays(topic);
    let schedulers = &shared_tasks.delay_schedulers;
    sets.iter().map(|delays| schedulers.get_or_start(&context.backend, delays)).collect()
}

#[async_trait]
impl RebalanceListener for PartitionSet {
    fn on_joined(&self, joined: GroupMembership) {
        let mut state = self.lock();
        state.joined = Some(joined);
        if self.context.config.mode == Mode::Shared && !state.is_stopping {
            self.consume_all_partitions(&mut state);
        }
    }

    fn on_assigned(&self, owned: AssignedPartition) {
        let mut state = self.lock();
        if !state.is_stopping {
            let is_new = !state.partitions.contains_key(&owned.partition);
            self.divide_capacity(&state, state.partitions.len() + usize::from(is_new));
            self.start(&mut state, owned);
        }
    }

    async fn on_revoke(&self, partition: Partition) {
        let handle = self.lock().partitions.get(&partition).cloned();
        let Some(handle) = handle else { return };
        handle.shut_down(PartitionPhase::Stopping, self.context.config.drain).await;
        self.remove(&handle);
        let state = self.lock();
        self.divide_capacity(&state, state.partitions.len());
    }

    fn on_lost(&self, partition: Partition) {
        let mut state = self.lock();
        if let Some(handle) = state.partitions.remove(&partition) {
            handle.abandon();
        }
        self.divide_capacity(&state, state.partitions.len());
    }

    fn on_evicted(&self) {
        let mut state = self.lock();
        state.joined = None;
        state.partitions.drain().for_each(|(_, handle)| handle.abandon());
    }

    async fn on_member_died(&self, dead: ConsumerName) -> bool {
        let partitions = self.partitions();
        // While stopping, nothing is reclaimed: other members do it, or this one after its restart.
        let reclaims = partitions.iter().map(async |partition| {
            partition.reclaim_from(dead.clone()).await
                && partition.context.remove_dead_consumer(&dead).await
        });
        let reclaimed = join_all(reclaims).await;
        !reclaimed.is_empty() && reclaimed.into_iter().all(|is_reclaimed| is_reclaimed)
    }

    fn on_topic_changed(&self, topic: Arc<Topic>) {
        // The topic was read in the past: it may be older than a message that arrives now.
        let read_at = Instant::now() - TOPIC_AGE_MAX;
        let mut state = self.lock();
        self.context.barriers.update_topic(Arc::clone(&topic), read_at);
        // Metadata that was lost says nothing about retries: the last known number stays.
        if !(self.context.is_created_topic && topic.layout.is_plain()) {
            self.context.max_retries.store(topic.policies.max_retries, Ordering::Relaxed);
        }
        if !state.is_stopping {
            state.delay_schedulers = delay_schedulers(&self.context, &topic, &self.shared_tasks);
        }
        state.topic = topic;
        if self.context.config.mode == Mode::Shared && !state.is_stopping {
            self.consume_all_partitions(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_stream::{Options, connect};

    use super::*;
    use crate::config::ConsumerConfig;
    use crate::handler::Outcome;
    use crate::keys::Layout;
    use crate::topic::{GroupName, TopicName};

    async fn partition_set(topic: &Arc<Topic>) -> anyhow::Result<PartitionSet> {
        let backend = connect("embedded:memory", &Options::default()).await?;
        let handler = Arc::new(|_: crate::Message| async { Outcome::Done });
        let config = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
        let group = GroupName::new("billing")?;
        let context = SubscriptionContext::new(
            backend,
            Arc::clone(topic),
            group,
            handler,
            config,
            None,
            Vec::new(),
        );
        Ok(PartitionSet::new(context, Arc::clone(topic), Arc::default()))
    }

    #[tokio::test]
    async fn lost_metadata_does_not_change_the_limit_of_retries() -> anyhow::Result<()> {
        let with_retries = |layout, max_retries| -> anyhow::Result<Arc<Topic>> {
            let mut topic = Topic::plain(TopicName::new("orders")?, layout);
            topic.policies.max_retries = max_retries;
            Ok(Arc::new(topic))
        };
        let partition_set = partition_set(&with_retries(Layout::Partitioned, 1000)?).await?;
        let max_retries = || partition_set.context.max_retries.load(Ordering::Relaxed);
        partition_set.on_topic_changed(with_retries(Layout::Plain, 4)?);
        assert_eq!(max_retries(), 1000);
        partition_set.on_topic_changed(with_retries(Layout::Partitioned, 7)?);
        assert_eq!(max_retries(), 7);
        partition_set.terminate();
        Ok(())
    }

    #[tokio::test]
    async fn a_member_without_partitions_does_not_clean_up_dead_members() -> anyhow::Result<()> {
        let topic = Arc::new(Topic::plain(TopicName::new("orders")?, Layout::Plain));
        let partition_set = partition_set(&topic).await?;
        // Not joined yet, or stopping: the entries of the dead member are still to be reclaimed.
        assert!(!partition_set.on_member_died(ConsumerName::new("dead")?).await);
        partition_set.terminate();
        assert!(!partition_set.on_member_died(ConsumerName::new("dead")?).await);
        Ok(())
    }
}
