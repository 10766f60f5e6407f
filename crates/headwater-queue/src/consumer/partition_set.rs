//! The partition set of a subscription: one partition consumer per assigned partition.
//!
//! Upstream: `coordinator` assigns and revokes partitions. Downstream: a `partition_consumer` for each, on a shared
//! `fetcher`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::ConsumerName;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::delay_scheduler::DelayScheduler;
use super::fetcher::{Fetcher, FetcherKey};
use super::partition_consumer::{PartitionConsumer, PartitionPhase};
use super::reclaim::ReclaimScope;
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
    consumers: HashMap<Partition, Arc<PartitionConsumer>>,
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
            consumers: HashMap::new(),
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

    pub(super) fn consumers(&self) -> Vec<Arc<PartitionConsumer>> {
        self.lock().consumers.values().cloned().collect()
    }

    pub(super) fn stats(&self) -> SubscriptionStats {
        self.context.stats(self.lock().consumers.len())
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
        let is_removed = |consumer: &PartitionConsumer| {
            consumer.policy.partition >= topic.partitions
                || consumer.policy.topic.layout != topic.layout
                || consumer.policy.topic.created_at != topic.created_at
        };
        let removed: Vec<Partition> = state
            .consumers
            .iter()
            .filter(|(_, consumer)| is_removed(consumer))
            .map(|(partition, _)| *partition)
            .collect();
        for partition in removed {
            if let Some(consumer) = state.consumers.remove(&partition) {
                // Its stream was deleted, or belongs to another topic now.
                drop(consumer.terminate());
            }
        }
        self.context.divide_capacity(usize::from(topic.partitions));
        for partition in 0..topic.partitions {
            if state.consumers.contains_key(&partition) {
                continue;
            }
            let policy = self.context.policy(Arc::clone(&topic), partition, None);
            let consumer = Arc::new(PartitionConsumer::new(
                Arc::clone(&self.context),
                policy,
                joined.consumer.clone(),
                joined.lease.clone(),
                joined.fenced.clone(),
                self.fetcher(&joined.consumer),
            ));
            consumer.spawn(Arc::clone(&consumer).start_shared());
            state.consumers.insert(partition, consumer);
        }
    }

    /// Shuts all partition consumers down: with [`PartitionPhase::Stopping`] after running handlers, with
    /// [`PartitionPhase::Draining`] after all in-flight messages.
    pub(super) async fn shut_down(&self, phase: PartitionPhase) {
        let consumers: Vec<_> = {
            let mut state = self.lock();
            state.is_stopping = true;
            state.delay_schedulers.clear();
            state.consumers.values().cloned().collect()
        };
        let drain = self.context.config.drain;
        let shutdowns = consumers.iter().map(|consumer| consumer.shut_down(phase, drain));
        futures_util::future::join_all(shutdowns).await;
        for consumer in &consumers {
            self.remove(consumer);
        }
        if tokio::time::timeout(drain, self.context.wait_for_recoveries()).await.is_err() {
            warn!(topic = %self.context.topic, "entries lost by the server could not be re-appended within the drain timeout");
        }
    }

    /// Terminates all partition consumers at once. In-flight messages stay pending.
    pub(super) fn terminate(&self) {
        let consumers: Vec<_> = {
            let mut state = self.lock();
            state.is_stopping = true;
            state.delay_schedulers.clear();
            state.consumers.drain().map(|(_, consumer)| consumer).collect()
        };
        consumers.iter().for_each(|consumer| drop(consumer.terminate()));
    }

    /// Removes a consumer, unless another one has replaced it.
    fn remove(&self, consumer: &Arc<PartitionConsumer>) {
        let mut state = self.lock();
        let partition = consumer.policy.partition;
        if state.consumers.get(&partition).is_some_and(|known| Arc::ptr_eq(known, consumer)) {
            state.consumers.remove(&partition);
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
        let AssignedPartition { topic, partition, lease, consumer: consumer_name, fenced } = owned;
        let mut state = self.lock();
        if state.is_stopping {
            return;
        }
        let epoch = Some(lease.fence().epoch);
        let policy = self.context.policy(topic, partition, epoch);
        let fetcher = self.fetcher(&consumer_name);
        let context = Arc::clone(&self.context);
        let consumer =
            PartitionConsumer::new(context, policy, consumer_name, lease, fenced, fetcher);
        let consumer = Arc::new(consumer);
        if let Some(former) = state.consumers.insert(partition, Arc::clone(&consumer)) {
            drop(former.terminate());
        }
        self.context.divide_capacity(state.consumers.len());
        drop(state);
        consumer.spawn(Arc::clone(&consumer).start_owned());
    }

    async fn on_revoke(&self, partition: Partition) {
        let consumer = self.lock().consumers.get(&partition).cloned();
        let Some(consumer) = consumer else { return };
        consumer.shut_down(PartitionPhase::Stopping, self.context.config.drain).await;
        self.remove(&consumer);
        self.context.divide_capacity(self.lock().consumers.len());
    }

    fn on_lost(&self, partition: Partition) {
        let mut state = self.lock();
        let consumer = state.consumers.remove(&partition);
        self.context.divide_capacity(state.consumers.len());
        drop(state);
        if let Some(consumer) = consumer {
            debug!(stream = %consumer.policy.stream, in_flight = consumer.in_flight(), "partition lost");
            consumer.abandon();
        }
    }

    fn on_evicted(&self) {
        let consumers: Vec<_> = {
            let mut state = self.lock();
            state.joined = None;
            state.consumers.drain().map(|(_, consumer)| consumer).collect()
        };
        consumers.iter().for_each(|consumer| consumer.abandon());
    }

    async fn on_member_died(&self, dead: ConsumerName) -> bool {
        let consumers = self.consumers();
        // While stopping, nothing is reclaimed: other members do it, or this one after its restart.
        let mut all_reclaimed = !consumers.is_empty();
        for consumer in consumers {
            let scope = ReclaimScope::Consumer(dead.clone());
            if let Err(error) = consumer.reclaim(&scope).await {
                warn!(stream = %consumer.policy.stream, consumer = %dead, %error, "reclaiming the entries of a dead member failed; they stay pending for now");
                all_reclaimed = false;
            }
            all_reclaimed &= consumer.lock().phase == PartitionPhase::Active;
        }
        all_reclaimed
    }

    fn on_topic_changed(&self, topic: Arc<Topic>) {
        // The topic was read in the past: it may be older than a message that arrives now.
        let read_at = Instant::now() - TOPIC_AGE_MAX;
        let mut state = self.lock();
        self.context.barriers.update_topic(Arc::clone(&topic), read_at);
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

    #[tokio::test]
    async fn a_member_without_partitions_does_not_clean_up_dead_members() -> anyhow::Result<()> {
        let backend = connect("embedded:memory", &Options::default()).await?;
        let topic = Arc::new(Topic::plain(TopicName::new("orders")?, Layout::Plain));
        let handler = Arc::new(|_: crate::Message| async { Outcome::Done });
        let config = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
        let group = GroupName::new("billing")?;
        let context =
            SubscriptionContext::new(backend, Arc::clone(&topic), group, handler, config, None);
        let partition_set = PartitionSet::new(context, topic, Arc::default());
        // Not joined yet, or stopping: the entries of the dead member are still to be reclaimed.
        assert!(!partition_set.on_member_died(ConsumerName::new("dead")?).await);
        partition_set.terminate();
        assert!(!partition_set.on_member_died(ConsumerName::new("dead")?).await);
        Ok(())
    }
}
