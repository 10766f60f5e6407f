//! The workplace of a subscription: its workers, one per partition it was given.
//!
//! Upstream: `coordinator` says which partitions are ours. Downstream: a `worker` for each, on a shared `feed`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::ConsumerName;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::adoption::Whose;
use super::consumers::Consumers;
use super::feed::{Feed, FeedKey};
use super::job::{Job, SubscriptionStats};
use super::mover::Mover;
use super::worker::{Phase, Worker};
use crate::config::Mode;
use crate::group::seam::{Joined, OwnedPartition, Workplace};
use crate::keys;
use crate::topic::{Partition, Topic};

/// How old news of a topic may be.
const KNOWN_FOR: Duration = Duration::from_secs(10);

pub(super) struct Bench {
    pub(super) job: Arc<Job>,
    consumers: Arc<Consumers>,
    state: Mutex<State>,
    /// What works for the whole subscription.
    tasks: Mutex<JoinSet<()>>,
}

struct State {
    topic: Arc<Topic>,
    /// As whom we read, while we are a member.
    joined: Option<Joined>,
    workers: HashMap<Partition, Arc<Worker>>,
    /// Bring delayed messages of the topic back when they are due.
    movers: Vec<Arc<Mover>>,
    /// Nothing new is begun.
    is_stopping: bool,
}

impl Bench {
    pub(super) fn new(job: Job, topic: Arc<Topic>, consumers: Arc<Consumers>) -> Self {
        let state = State {
            joined: None,
            workers: HashMap::new(),
            movers: movers(&job, &topic, &consumers),
            is_stopping: false,
            topic,
        };
        Self { job: Arc::new(job), consumers, state: Mutex::new(state), tasks: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the workers")
    }

    /// Starts a task that ends with the subscription.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().expect("no code panics while it holds the tasks").spawn(task);
    }

    pub(super) fn workers(&self) -> Vec<Arc<Worker>> {
        self.lock().workers.values().cloned().collect()
    }

    pub(super) fn stats(&self) -> SubscriptionStats {
        self.job.stats(self.lock().workers.len())
    }

    fn feed(&self, consumer: &ConsumerName) -> Arc<Feed> {
        let config = &self.job.config;
        let key = FeedKey {
            group: self.job.group.clone(),
            consumer: consumer.clone(),
            batch: config.batch.min(config.reach()),
            poll: config.poll,
        };
        self.consumers.feed(&self.job.backend, key)
    }

    /// Shared: works on all partitions of the topic, and no longer on those it has no more.
    fn share_all(&self, state: &mut State) {
        let Some(joined) = state.joined.clone() else { return };
        let topic = Arc::clone(&state.topic);
        let is_former = |worker: &Worker| {
            worker.rules.partition >= topic.partitions
                || worker.rules.topic.layout != topic.layout
                || worker.rules.topic.created_at != topic.created_at
        };
        let former: Vec<Partition> = state
            .workers
            .iter()
            .filter(|(_, worker)| is_former(worker))
            .map(|(partition, _)| *partition)
            .collect();
        for partition in former {
            if let Some(worker) = state.workers.remove(&partition) {
                // Its stream is gone, or another program's now.
                drop(worker.end());
            }
        }
        self.job.split(usize::from(topic.partitions));
        for partition in 0..topic.partitions {
            if state.workers.contains_key(&partition) {
                continue;
            }
            let rules = self.job.rules(Arc::clone(&topic), partition, None);
            let worker = Arc::new(Worker::new(
                Arc::clone(&self.job),
                rules,
                joined.consumer.clone(),
                joined.lease.clone(),
                joined.alarm.clone(),
                self.feed(&joined.consumer),
            ));
            worker.spawn(Arc::clone(&worker).read_and_sweep());
            state.workers.insert(partition, worker);
        }
    }

    /// Stops beginning new work and finishes what is in hand: what is being handled, or also what was read ahead.
    pub(super) async fn finish(&self, phase: Phase) {
        let workers: Vec<_> = {
            let mut state = self.lock();
            state.is_stopping = true;
            state.movers.clear();
            state.workers.values().cloned().collect()
        };
        let finishing = workers.iter().map(|worker| worker.finish_up(phase, self.job.config.drain));
        futures_util::future::join_all(finishing).await;
        for worker in &workers {
            self.remove(worker);
        }
        if tokio::time::timeout(self.job.config.drain, self.job.rescued()).await.is_err() {
            warn!(topic = %self.job.topic, "what the server lost could not be written again in time");
        }
    }

    /// Ends everything at once. What is in hand stays pending.
    pub(super) fn end(&self) {
        let workers: Vec<_> = {
            let mut state = self.lock();
            state.is_stopping = true;
            state.movers.clear();
            state.workers.drain().map(|(_, worker)| worker).collect()
        };
        workers.iter().for_each(|worker| drop(worker.end()));
    }

    /// Removes a worker, unless another one has its place.
    fn remove(&self, worker: &Arc<Worker>) {
        let mut state = self.lock();
        let partition = worker.rules.partition;
        if state.workers.get(&partition).is_some_and(|known| Arc::ptr_eq(known, worker)) {
            state.workers.remove(&partition);
        }
    }
}

fn movers(job: &Job, topic: &Topic, consumers: &Consumers) -> Vec<Arc<Mover>> {
    let sets = keys::all_delays(topic);
    sets.iter().map(|delays| consumers.movers.of(&job.backend, delays)).collect()
}

#[async_trait]
impl Workplace for Bench {
    fn joined(&self, joined: Joined) {
        let mut state = self.lock();
        state.joined = Some(joined);
        if self.job.config.mode == Mode::Shared && !state.is_stopping {
            self.share_all(&mut state);
        }
    }

    fn gained(&self, owned: OwnedPartition) {
        let OwnedPartition { topic, partition, lease, consumer, alarm } = owned;
        let mut state = self.lock();
        if state.is_stopping {
            return;
        }
        let epoch = Some(lease.fence().epoch);
        let rules = self.job.rules(topic, partition, epoch);
        let feed = self.feed(&consumer);
        let job = Arc::clone(&self.job);
        let worker = Arc::new(Worker::new(job, rules, consumer, lease, alarm, feed));
        if let Some(former) = state.workers.insert(partition, Arc::clone(&worker)) {
            drop(former.end());
        }
        self.job.split(state.workers.len());
        drop(state);
        worker.spawn(Arc::clone(&worker).take_over_and_read());
    }

    async fn give_up(&self, partition: Partition) {
        let worker = self.lock().workers.get(&partition).cloned();
        let Some(worker) = worker else { return };
        worker.finish_up(Phase::Closing, self.job.config.drain).await;
        self.remove(&worker);
        self.job.split(self.lock().workers.len());
    }

    fn lost(&self, partition: Partition) {
        let mut state = self.lock();
        let worker = state.workers.remove(&partition);
        self.job.split(state.workers.len());
        drop(state);
        if let Some(worker) = worker {
            debug!(stream = %worker.rules.stream, in_hand = worker.in_hand(), "partition lost");
            worker.abandon();
        }
    }

    fn expelled(&self) {
        let workers: Vec<_> = {
            let mut state = self.lock();
            state.joined = None;
            state.workers.drain().map(|(_, worker)| worker).collect()
        };
        workers.iter().for_each(|worker| worker.abandon());
    }

    async fn orphaned(&self, dead: ConsumerName) -> bool {
        let workers = self.workers();
        // While we stop, nobody takes anything: then others do, or we when we are back.
        let mut all_taken = !workers.is_empty();
        for worker in workers {
            let whose = Whose::Consumer(dead.clone());
            if let Err(error) = worker.adopt(&whose).await {
                warn!(stream = %worker.rules.stream, consumer = %dead, %error, "a dead member's entries stay for now");
                all_taken = false;
            }
            all_taken &= worker.lock().phase == Phase::Open;
        }
        all_taken
    }

    fn changed(&self, topic: Arc<Topic>) {
        // It was so a moment ago: what comes from now on may know more.
        let asked_at = Instant::now() - KNOWN_FOR;
        let mut state = self.lock();
        self.job.gates.learn(Arc::clone(&topic), asked_at);
        if !state.is_stopping {
            state.movers = movers(&self.job, &topic, &self.consumers);
        }
        state.topic = topic;
        if self.job.config.mode == Mode::Shared && !state.is_stopping {
            self.share_all(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_stream::{Options, connect};

    use super::*;
    use crate::config::ConsumerConfig;
    use crate::keys::Layout;
    use crate::retry::Outcome;
    use crate::topic::{GroupName, TopicName};

    #[tokio::test]
    async fn who_has_no_partitions_buries_nobody() -> anyhow::Result<()> {
        let backend = connect("embedded:memory", &Options::default()).await?;
        let topic = Arc::new(Topic::plain(TopicName::new("orders")?, Layout::Plain));
        let handler = Arc::new(|_: crate::Message| async { Outcome::Done });
        let config = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
        let group = GroupName::new("billing")?;
        let job = Job::new(backend, Arc::clone(&topic), group, handler, config, None);
        let bench = Bench::new(job, topic, Arc::default());
        // Not joined yet, or stopping: what the dead member had is still to be taken over.
        assert!(!bench.orphaned(ConsumerName::new("dead")?).await);
        bench.end();
        assert!(!bench.orphaned(ConsumerName::new("dead")?).await);
        Ok(())
    }
}
