//! Pull: takes messages of a group under leases and settles them later, from any process.
//!
//! Upstream: the HTTP API, on behalf of clients in other languages. Downstream: `pull_driver` reads and redelivers;
//! settling goes to the backend directly.
//! Guarantees: the lease of a message is a pending entry of a consumer whose name contains the length of the lease.
//! So the backend alone knows it: any process can settle or extend it, and it outlives the process that gave it. A
//! lease that ran out is reassigned by the next pull, under another consumer name, which fences the former holder:
//! its retry, release or dead letter has no effect. Done work stays done (decision 4). Retries and dead letters
//! follow the policies of a subscription with default settings, in [`Mode::Shared`](crate::Mode::Shared).
//! Not here: order. Holders compete for messages.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use headwater_stream::{
    ConsumerName, DeliveredEntry, Direction, EntryId, Range, SettleAction, SettleBatch, Settlement,
    StreamError, StreamName,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::warn;

use super::key_queues::InFlightMessage;
use super::metrics::PartitionMetrics;
use super::pull_driver::{PullDemand, PullDriver};
use super::retry_or_dead_letter::{DeliveryResult, Disposition, FinishedDelivery, MessagePolicy};
use crate::config::ConsumerConfig;
use crate::error::{QueueError, Result};
use crate::handler::Outcome;
use crate::keys;
use crate::limits::{LEASE_MAX, LEASE_MIN, PULL_MAX, PULL_WAIT_MAX};
use crate::message::Message;
use crate::queue::Queue;
use crate::topic::{GroupName, Partition, Topic, TopicName, group_name};

/// Settlements of one call that are in flight at once.
const SETTLE_CONCURRENCY: usize = 64;
/// Begin of the consumer names of leases.
const PREFIX: &str = "pull";

/// What to pull.
#[derive(Clone, Copy, Debug)]
pub struct PullRequest {
    /// Maximum messages, 1 to 1,000. Large messages may come in several pulls.
    pub max: usize,
    /// How long to wait for the first message, at most 60 s.
    pub wait: Duration,
    /// How long the caller may work on the messages before they are given to another one, 1 s to 5 min, rounded up to
    /// whole seconds. Can be extended.
    pub lease: Duration,
}

/// A message and the lease under which the caller holds it.
#[derive(Clone, Debug)]
pub struct PulledMessage {
    /// To settle or extend it.
    pub lease: MessageLease,
    /// The message.
    pub message: Message,
    /// Failed attempts after which it becomes a dead letter.
    pub attempts_max: u32,
    /// When the lease runs out unless it is extended.
    pub expires_at: Instant,
}

/// The right to settle one delivery of a message; written as text, `PARTITION/ENTRY/CONSUMER`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MessageLease {
    pub(super) partition: Partition,
    pub(super) id: EntryId,
    pub(super) consumer: ConsumerName,
}

/// Result of settling or extending a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseResult {
    /// Settled, or extended.
    Applied,
    /// The message is no longer held under this lease: it ran out and another caller got the message, or the message
    /// was settled before.
    Expired,
}

impl fmt::Display for MessageLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.partition, self.id, self.consumer)
    }
}

impl FromStr for MessageLease {
    type Err = QueueError;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let mut parts = text.splitn(3, '/');
            let (partition, id) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            let consumer = ConsumerName::new(parts.next()?).ok()?;
            // A lease must not settle the entries of a subscription.
            lease_of(&consumer).map(|_| Self { partition, id, consumer })
        };
        parse().ok_or_else(|| QueueError::invalid("lease", "not a lease that a pull returned"))
    }
}

/// The consumer name of leases of this length: `pull:MILLISECONDS:NUMBER:MEMBER`.
pub(super) fn lease_consumer(lease: Duration, number: u64, member: &ConsumerName) -> ConsumerName {
    let name = format!("{PREFIX}:{}:{number}:{member}", lease.as_millis());
    ConsumerName::new(name).expect("the names of members are short")
}

/// The length of the leases of a consumer; `None` for other consumers.
pub(super) fn lease_of(consumer: &ConsumerName) -> Option<Duration> {
    let rest = consumer.as_str().strip_prefix(PREFIX)?.strip_prefix(':')?;
    let (milliseconds, _) = rest.split_once(':')?;
    let lease = Duration::from_millis(milliseconds.parse().ok()?);
    (LEASE_MIN..=LEASE_MAX).contains(&lease).then_some(lease)
}

/// How the messages of a partition are handled: like those of a subscription with default settings.
pub(super) fn policy(topic: &Arc<Topic>, partition: Partition, group: &GroupName) -> MessagePolicy {
    let config = ConsumerConfig::default();
    let max_retries = Arc::new(topic.policies.max_retries.into());
    MessagePolicy::new(Arc::clone(topic), partition, group.clone(), &config, max_retries, None)
}

/// An entry as the policy sees it.
pub(super) fn in_flight(delivery: DeliveredEntry) -> InFlightMessage {
    InFlightMessage { delivery, failures: 0, key: None, received_at: Instant::now() }
}

/// Metrics of a partition that is pulled.
pub(super) fn metrics(topic: &Topic, partition: Partition, group: &GroupName) -> PartitionMetrics {
    PartitionMetrics::new(&topic.name, partition, group, PREFIX)
}

/// Pulls messages. While a group is pulled, this process is a member of it. Clones share the same puller.
#[derive(Clone)]
pub struct Puller {
    shared: Arc<PullerShared>,
}

pub(super) struct PullerShared {
    queue: Queue,
    state: Mutex<PullerState>,
}

#[derive(Default)]
pub(super) struct PullerState {
    is_closed: bool,
    /// Unbounded: every sender waits for its reply, so there are as many demands as callers.
    drivers: HashMap<(TopicName, GroupName), mpsc::UnboundedSender<PullDemand>>,
    tasks: JoinSet<()>,
}

impl fmt::Debug for Puller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Puller").finish_non_exhaustive()
    }
}

impl Queue {
    /// Creates a puller. It is a member of the groups that it pulls, apart from the subscriptions of this queue.
    pub fn puller(&self) -> Puller {
        let backend = Arc::clone(&self.inner.backend);
        let queue = Self::with_config(backend, self.inner.config.clone());
        let queue = queue.expect("the settings of this queue are valid");
        Puller { shared: Arc::new(PullerShared { queue, state: Mutex::default() }) }
    }
}

impl Puller {
    /// Takes messages under leases; waits for the first one. The list is empty if none arrives.
    ///
    /// Fails if the group is consumed in [`Mode::Owned`](crate::Mode::Owned). If this future is dropped, its messages
    /// are given to the next pull; those of a reply that was under way when their lease runs out.
    pub async fn pull(
        &self,
        topic: &str,
        group: &str,
        request: PullRequest,
    ) -> Result<Vec<PulledMessage>> {
        let key = (TopicName::new(topic)?, group_name(group)?);
        let PullRequest { max, wait, lease } = request;
        if !(1..=PULL_MAX).contains(&max) {
            return Err(QueueError::invalid("max", format!("{max}; must be 1 to {PULL_MAX}")));
        }
        if wait > PULL_WAIT_MAX {
            let problem = format!("{wait:?}; must be at most {PULL_WAIT_MAX:?}");
            return Err(QueueError::invalid("wait", problem));
        }
        if !(LEASE_MIN..=LEASE_MAX).contains(&lease) {
            let problem = format!("{lease:?}; must be {LEASE_MIN:?} to {LEASE_MAX:?}");
            return Err(QueueError::invalid("lease", problem));
        }
        // There is a consumer name for each length.
        let lease = Duration::from_secs(lease.as_millis().div_ceil(1000) as u64);
        let (reply, pulled) = oneshot::channel();
        let deadline = Instant::now() + wait;
        let demand = PullDemand { max, deadline, lease, has_looked: false, reply };
        self.shared.demand(key, demand)?;
        pulled.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// Settles messages. Returns one result for each, in order.
    ///
    /// Attempts all, and then returns the first error: all others may be settled. The call may be repeated, and then reports
    /// those as expired.
    pub async fn settle(
        &self,
        topic: &str,
        group: &str,
        outcomes: Vec<(MessageLease, Outcome)>,
    ) -> Result<Vec<LeaseResult>> {
        let group = &group_name(group)?;
        let topic = &self.topic_of(topic, outcomes.iter().map(|(lease, _)| lease)).await?;
        // Partitions whose server cannot be reached. Only a call that needs no other server tells.
        let unreached = &Mutex::new(HashMap::<Partition, QueueError>::new());
        // Entries that were trimmed, deleted or lost.
        let gone = &Mutex::new(HashMap::<Partition, Vec<EntryId>>::new());
        let lock = || unreached.lock().expect("no code panics while it holds this lock");
        let settling = outcomes.into_iter().map(async |(lease, outcome)| {
            if let Some(error) = lock().get(&lease.partition) {
                return Err(error.duplicate());
            }
            let is_local = matches!(outcome, Outcome::Done | Outcome::Release);
            let result = self.settle_one(topic, group, &lease, outcome, gone).await;
            if let Err(error) = &result
                && is_local
                && error.is_transient()
            {
                lock().insert(lease.partition, error.duplicate());
            }
            let Some(result) = result? else { return Ok(LeaseResult::Expired) };
            metrics(topic, lease.partition, group).record_result(result, None);
            Ok(LeaseResult::Applied)
        });
        let settling = stream::iter(settling).buffered(SETTLE_CONCURRENCY);
        let settled: Vec<Result<LeaseResult>> = settling.collect().await;
        let gone =
            std::mem::take(&mut *gone.lock().expect("no code panics while it holds this lock"));
        for (partition, ids) in gone {
            self.warn_if_lost(topic, partition, group, &ids).await;
        }
        settled.into_iter().collect()
    }

    /// The topic of these leases. While its metadata cannot be read, an older copy is used.
    async fn topic_of(
        &self,
        topic: &str,
        leases: impl Iterator<Item = &MessageLease>,
    ) -> Result<Arc<Topic>> {
        let (queue, name) = (&self.shared.queue, TopicName::new(topic)?);
        let newest = leases.map(|lease| lease.partition).max();
        let topic = queue.topic_or_expired(&name).await?;
        match newest.is_some_and(|partition| partition >= topic.partitions) {
            // The partition may have been added since the copy was read.
            true => queue.read_topic(&name).await,
            false => Ok(topic),
        }
    }

    /// Settles one message; `None` if it is not held under this lease.
    async fn settle_one(
        &self,
        topic: &Arc<Topic>,
        group: &GroupName,
        lease: &MessageLease,
        outcome: Outcome,
        gone: &Mutex<HashMap<Partition, Vec<EntryId>>>,
    ) -> Result<Option<DeliveryResult>> {
        if lease.partition >= topic.partitions {
            return Ok(None);
        }
        let stream = keys::stream(topic, lease.partition);
        let FinishedDelivery { action, result } = match outcome {
            Outcome::Done => {
                FinishedDelivery { action: SettleAction::Ack, result: DeliveryResult::Done }
            }
            Outcome::Release => {
                FinishedDelivery { action: SettleAction::Release, result: DeliveryResult::Release }
            }
            outcome => {
                let Some(item) = self.read_entry(&stream, lease.id).await? else {
                    let mut gone = gone.lock().expect("no code panics while it holds this lock");
                    gone.entry(lease.partition).or_default().push(lease.id);
                    return Ok(None);
                };
                match policy(topic, lease.partition, group).decide(&item, outcome) {
                    Disposition::Settle(finished) => finished,
                    Disposition::RetryInPlace { .. } => {
                        unreachable!("without an order nothing is retried in place")
                    }
                }
            }
        };
        let entries = &[Settlement { id: lease.id, action }];
        let consumer = &lease.consumer;
        let settle = SettleBatch { stream: &stream, group, consumer, fence: None, entries };
        match self.shared.queue.inner.backend.settle(settle).await {
            Ok(settled) => Ok((settled.applied > 0).then_some(result)),
            Err(StreamError::NoGroup { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Reports messages whose retry or dead letter could not be written because the server lost their entries: the newest id that the
    /// stream ever generated is older. Only the caller has the payloads.
    async fn warn_if_lost(
        &self,
        topic: &Topic,
        partition: Partition,
        group: &GroupName,
        ids: &[EntryId],
    ) {
        let stream = keys::stream(topic, partition);
        // If that fails, it is not known.
        let Ok(stats) = self.shared.queue.inner.backend.stats_without_lag(&stream).await else {
            return;
        };
        let newest = stats.map_or(EntryId::MIN, |stats| stats.last_generated_id);
        let lost = ids.iter().filter(|id| **id > newest).count();
        if lost > 0 {
            metrics(topic, partition, group).record_anomaly("lost_by_the_server", lost);
            warn!(%stream, %group, entries = lost, "the server lost entries that were pulled, so they have no retry and no dead letter; the messages are lost unless their consumer sends them again");
        }
    }

    /// The entry of a lease; `None` if it was trimmed or deleted.
    async fn read_entry(
        &self,
        stream: &StreamName,
        id: EntryId,
    ) -> Result<Option<InFlightMessage>> {
        let range = Range { from: id, to: id, direction: Direction::Forward, count: 1 };
        let found = self.shared.queue.inner.backend.range(stream, range).await?.pop();
        let delivery =
            found.map(|entry| DeliveredEntry { id, fields: entry.fields, deliveries: 1 });
        Ok(delivery.map(in_flight))
    }

    /// Restarts leases: each lasts as long as when it was given, from now on. Returns one result for each, in order.
    /// Attempts all, and then returns the first error.
    pub async fn extend(
        &self,
        topic: &str,
        group: &str,
        leases: &[MessageLease],
    ) -> Result<Vec<LeaseResult>> {
        let group = &group_name(group)?;
        let topic = &self.topic_of(topic, leases.iter()).await?;
        let backend = &self.shared.queue.inner.backend;
        let mut batches: HashMap<(Partition, ConsumerName), Vec<EntryId>> = HashMap::new();
        for lease in leases.iter().filter(|lease| lease.partition < topic.partitions) {
            batches.entry((lease.partition, lease.consumer.clone())).or_default().push(lease.id);
        }
        let extending = batches.into_iter().map(|((partition, consumer), mut ids)| async move {
            let stream = keys::stream(topic, partition);
            match backend.keep_alive(&stream, group, &consumer, &ids).await {
                Ok(gone) => ids.retain(|id| !gone.contains(id)),
                Err(StreamError::NoGroup { .. }) => ids.clear(),
                Err(error) => return Err(error.into()),
            }
            Ok(((partition, consumer), ids))
        });
        let extending = stream::iter(extending).buffer_unordered(SETTLE_CONCURRENCY);
        let extended: Vec<Result<_>> = extending.collect().await;
        let extended: HashMap<_, _> = extended.into_iter().collect::<Result<_>>()?;
        let result = |lease: &MessageLease| {
            let ids = extended.get(&(lease.partition, lease.consumer.clone()));
            match ids.is_some_and(|ids| ids.contains(&lease.id)) {
                true => LeaseResult::Applied,
                false => LeaseResult::Expired,
            }
        };
        Ok(leases.iter().map(result).collect())
    }

    /// Ends all pulls with an empty list, and leaves the groups. Leases stay valid.
    pub async fn close(&self) {
        let mut tasks = {
            let mut state = self.shared.lock();
            state.is_closed = true;
            state.drivers.clear();
            std::mem::take(&mut state.tasks)
        };
        while tasks.join_next().await.is_some() {}
    }
}

impl PullerShared {
    /// Hands a demand to the driver of its group, which is started if there is none.
    fn demand(self: &Arc<Self>, key: (TopicName, GroupName), demand: PullDemand) -> Result<()> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(stopped());
        }
        let demand = match state.drivers.get(&key) {
            None => demand,
            Some(driver) => match driver.send(demand) {
                Ok(()) => return Ok(()),
                // The driver panicked.
                Err(mpsc::error::SendError(demand)) => demand,
            },
        };
        let (demands, receiver) = mpsc::unbounded_channel();
        let driver = PullDriver::new(Arc::downgrade(self), self.queue.clone(), &key, receiver);
        while state.tasks.try_join_next().is_some() {}
        state.tasks.spawn(driver.run());
        // Cannot fail: the task, which has the receiver, has just been started.
        let _ = demands.send(demand);
        state.drivers.insert(key, demands);
        Ok(())
    }

    /// Removes the driver of a group if it has no demand; none is sent to it afterwards.
    pub(super) fn remove_idle(
        &self,
        key: &(TopicName, GroupName),
        demands: &mpsc::UnboundedReceiver<PullDemand>,
    ) -> bool {
        let mut state = self.lock();
        let is_idle = demands.is_empty();
        if is_idle {
            state.drivers.remove(key);
        }
        is_idle
    }

    fn lock(&self) -> MutexGuard<'_, PullerState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

fn stopped() -> QueueError {
    QueueError::Stopped { what: "the puller".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_round_trips_through_its_text_and_names_its_length() {
        let member = ConsumerName::new("worker:host/a:1:ab").unwrap();
        let consumer = lease_consumer(Duration::from_millis(1500), 7, &member);
        assert_eq!(consumer.as_str(), "pull:1500:7:worker:host/a:1:ab");
        assert_eq!(lease_of(&consumer), Some(Duration::from_millis(1500)));
        let lease = MessageLease { partition: 3, id: EntryId::new(5, 1), consumer };
        assert_eq!(lease.to_string().parse::<MessageLease>().unwrap(), lease);
    }

    #[test]
    fn a_lease_of_another_consumer_is_rejected() {
        for text in
            ["", "1", "0/5-1", "0/5-1/worker:host:1:ab", "0/5-1/pull", "x/5-1/pull:1000:0:a"]
                .into_iter()
                .chain(["0/5/pull:1000:0:a", "0/5-1/pull:0:0:a", "0/5-1/pull:99999999:0:a"])
        {
            assert!(text.parse::<MessageLease>().is_err(), "{text}");
        }
    }
}
