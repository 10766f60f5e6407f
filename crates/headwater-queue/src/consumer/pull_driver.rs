//! The driver of the pulls of one group on one topic: one task that reads for all callers that wait in this process.
//!
//! Upstream: `pull` sends it the demand of each caller. Downstream: the backend.
//! Guarantees: it reads only while a caller waits, so no message is held back from other processes, and no more bytes
//! than callers get, as far as recent messages tell. It reassigns
//! entries whose lease ran out, that were released, or whose consumer died. A message that was delivered several
//! times without an outcome comes alone, so that others do not reach the crash limit with it. Entries that it read
//! and cannot deliver to a caller within [`HOLD_MAX`] are released. While it runs, this process is a member of the
//! group, and due messages of the topic are promoted; it ends when no caller came for [`IDLE_MAX`]. A partition that fails
//! does not stop the others (`pull_streams`).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use headwater_stream::{
    Backend, ConsumerName, DeliveredEntry, GroupName, GroupReader, GroupStart, SettleAction,
    SettleBatch, Settlement, StreamBatch, StreamError, StreamName, StreamReadFailure,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use super::capacity_pool::{RecentSize, largest_bytes, read_max};
use super::delay_scheduler::DelayScheduler;
use super::pull::{
    MessageLease, PulledMessage, PullerShared, in_flight, lease_consumer, lease_of, metrics, policy,
};
use super::pull_member::PullMember;
use super::pull_reassign::LeaseCheck;
use super::pull_streams::{PullStreams, partition_of};
use super::retry_or_dead_letter::DeliveryResult;
use crate::config::Mode;
use crate::error::{QueueError, Result};
use crate::group::coordinator::MembershipHandle;
use crate::group::rebalance_listener::{JoinRequest, RebalanceListener};
use crate::keys;
use crate::limits::{LEASED_MAX, PULL_BYTES_MAX};
use crate::queue::Queue;
use crate::topic::{Partition, Topic, TopicName};

/// How long the driver stays without a caller.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// How long a read blocks at most, and how often leases are checked.
const TICK: Duration = Duration::from_secs(1);
/// The same while callers with leases of another length wait, which need another read.
const TICK_SHARED: Duration = Duration::from_millis(50);
/// How long an entry is kept for the next caller, and the part of its lease that this may take.
const HOLD_MAX: Duration = Duration::from_secs(1);
const HOLD_PART: u32 = 4;
/// Maximum bytes of one read if its entries are as large as recent ones.
const READ_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Maximum entries of one read or reclaim, whatever their size.
pub(super) const READ_MAX: usize = read_max(READ_BYTES_MAX);
/// Partitions whose idle consumers are removed concurrently.
const TIDIED_AT_ONCE: usize = 64;
/// A message with more deliveries comes alone: one caller died with it, then a second one.
const TOGETHER_MAX: u64 = 2;
/// Readers at once, one for each length of leases.
const READERS_MAX: usize = 4;
/// Refused entries of this many reads are settled at once.
const SETTLES_MAX: usize = 64;
/// Consumers without entries that are idle for this long are removed.
const STALE_AFTER: Duration = Duration::from_secs(60 * 60);
/// How long closing waits for the backend.
const CLOSE_MAX: Duration = Duration::from_secs(5);

/// A caller that waits for messages.
pub(super) struct PullDemand {
    pub(super) max: usize,
    pub(super) deadline: Instant,
    pub(super) lease: Duration,
    /// Whether entries were looked for since it came. At least once, also if it does not wait.
    pub(super) has_looked: bool,
    pub(super) reply: oneshot::Sender<Result<Vec<PulledMessage>>>,
}

pub(super) struct PullDriver {
    puller: Weak<PullerShared>,
    queue: Queue,
    pub(super) key: (TopicName, GroupName),
    demands: mpsc::UnboundedReceiver<PullDemand>,
    pub(super) waiting: VecDeque<PullDemand>,
    /// Entries that were read for a caller that has gone, or beyond the demand.
    held: VecDeque<PulledMessage>,
}

/// A driver that has joined its group.
pub(super) struct JoinedPullDriver {
    pub(super) driver: PullDriver,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) member: Arc<PullMember>,
    pub(super) name: ConsumerName,
    readers: HashMap<Duration, Box<dyn GroupReader>>,
    delays: (Arc<Topic>, Vec<Arc<DelayScheduler>>),
    pub(super) check: LeaseCheck,
    pub(super) message_size: RecentSize,
    pub(super) streams: PullStreams,
    /// Entries that are being released, and refused ones that are being settled.
    settles: JoinSet<()>,
}

impl PullDriver {
    pub(super) fn new(
        puller: Weak<PullerShared>,
        queue: Queue,
        key: &(TopicName, GroupName),
        demands: mpsc::UnboundedReceiver<PullDemand>,
    ) -> Self {
        let (waiting, held) = Default::default();
        Self { puller, queue, key: key.clone(), demands, waiting, held }
    }

    /// Serves callers until none comes any more, or the puller is closed.
    pub(super) async fn run(mut self) {
        loop {
            let (member, membership, unreached) = match self.join().await {
                Ok(joined) => joined,
                Err(error) => return self.fail(&error),
            };
            let mut name = member.name.subscribe();
            // Fails only if the sender is gone, which `member` has.
            let Ok(name) = name.wait_for(Option::is_some).await.map(|name| name.clone()) else {
                return;
            };
            let backend = Arc::clone(&self.queue.inner.backend);
            let topic = member.topic.borrow().clone();
            let streams = PullStreams::new(&backend, &self.key.1, unreached);
            let mut joined = JoinedPullDriver {
                delays: (Arc::clone(&topic), Vec::new()),
                driver: self,
                backend,
                name: name.expect("it was waited for"),
                member,
                readers: HashMap::new(),
                check: LeaseCheck::default(),
                message_size: RecentSize::default(),
                streams,
                settles: JoinSet::new(),
            };
            joined.promote_due(&topic);
            joined.serve().await;
            self = joined.close().await;
            membership.leave().await;
            if self.is_finished() {
                return;
            }
        }
    }

    /// Joins the group. Returns the partitions whose servers cannot be reached, too.
    async fn join(&mut self) -> Result<(Arc<PullMember>, MembershipHandle, Vec<Partition>)> {
        let (name, group) = &self.key;
        let topic = self.queue.read_topic(name).await?;
        let backend = &self.queue.inner.backend;
        let unreached = self.queue.ensure_groups(&topic, group, GroupStart::Beginning).await?;
        // Every member has its own consumer names, so unused ones must be removed: by a later member if this fails.
        let reached = (0..topic.partitions).filter(|partition| !unreached.contains(partition));
        let remove_idle = async |partition| {
            let stream = keys::stream(&topic, partition);
            let removed = backend.remove_idle_consumers(&stream, group, STALE_AFTER).await;
            if let Err(error) = removed {
                debug!(%stream, %group, %error, "idle consumers could not be removed");
            }
        };
        stream::iter(reached).for_each_concurrent(TIDIED_AT_ONCE, remove_idle).await;
        let member = Arc::new(PullMember::new(backend, group, &topic));
        let listener = Arc::clone(&member) as Arc<dyn RebalanceListener>;
        let group = group.clone();
        let request = JoinRequest { group, topic, mode: Mode::Shared, member: None, listener };
        let membership = self.queue.inner.coordinator.join(request).await?;
        Ok((member, membership, unreached))
    }

    /// Whether no caller came meanwhile; then none comes to this driver any more.
    fn is_finished(&self) -> bool {
        let Some(puller) = self.puller.upgrade() else { return true };
        puller.remove_idle(&self.key, &self.demands)
    }

    /// Answers all callers with an error.
    fn fail(&mut self, error: &QueueError) {
        loop {
            while let Ok(demand) = self.demands.try_recv() {
                self.waiting.push_back(demand);
            }
            self.fail_waiting(error);
            if self.is_finished() {
                return;
            }
        }
    }

    fn fail_waiting(&mut self, error: &QueueError) {
        for demand in self.waiting.drain(..) {
            let _ = demand.reply.send(Err(error.duplicate()));
        }
    }

    /// Removes callers that have gone, and answers those that have waited long enough.
    fn end_waits(&mut self, now: Instant) {
        for _ in 0..self.waiting.len() {
            let Some(demand) = self.waiting.pop_front() else { return };
            if demand.has_looked && demand.deadline <= now {
                let _ = demand.reply.send(Ok(Vec::new()));
            } else if !demand.reply.is_closed() {
                self.waiting.push_back(demand);
            }
        }
    }

    /// Delivers held entries to callers that asked for leases of their length.
    pub(super) fn deliver_held(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(demand) = self.waiting.pop_front() else { return };
            let messages = self.take_held(demand.max, demand.lease);
            if messages.is_empty() {
                self.waiting.push_back(demand);
            } else if let Err(Ok(messages)) = demand.reply.send(Ok(messages)) {
                // The caller has gone: the entries are for the next one.
                messages.into_iter().rev().for_each(|message| self.held.push_front(message));
            }
        }
    }

    /// The bytes that are held for callers with leases of this length.
    pub(super) fn held_bytes(&self, lease: Duration) -> usize {
        let held = self.held.iter().filter(|held| lease_of(&held.lease.consumer) == Some(lease));
        held.map(|held| held.message.fields.bytes()).sum()
    }

    fn take_held(&mut self, max: usize, lease: Duration) -> Vec<PulledMessage> {
        let mut taken: Vec<PulledMessage> = Vec::new();
        let mut bytes = 0;
        let mut at = 0;
        while taken.len() < max && at < self.held.len() {
            let next = &self.held[at];
            if lease_of(&next.lease.consumer) != Some(lease) {
                at += 1;
                continue;
            }
            let is_suspect = next.message.deliveries > TOGETHER_MAX;
            let next_bytes = next.message.fields.bytes();
            if !taken.is_empty() && (is_suspect || bytes + next_bytes > PULL_BYTES_MAX) {
                break;
            }
            bytes += next_bytes;
            taken.extend(self.held.remove(at));
            if is_suspect {
                break;
            }
        }
        taken
    }
}

impl JoinedPullDriver {
    /// Returns when no caller came for a while, or the puller is closed.
    async fn serve(&mut self) {
        let mut last_demand = Instant::now();
        loop {
            let now = Instant::now();
            self.driver.deliver_held();
            self.driver.end_waits(now);
            self.release_stale(now);
            if self.driver.waiting.is_empty() {
                let end = match self.driver.held.is_empty() {
                    true => last_demand + IDLE_MAX,
                    false => now + HOLD_MAX / 2,
                };
                match tokio::time::timeout_at(end, self.driver.demands.recv()).await {
                    Ok(Some(demand)) => self.driver.waiting.push_back(demand),
                    Ok(None) => return,
                    Err(_) if last_demand + IDLE_MAX <= Instant::now() => return,
                    Err(_) => {}
                }
                continue;
            }
            last_demand = now;
            match self.turn().await {
                Ok(true) => {}
                // The puller is closed.
                Ok(false) => return,
                Err(error) => {
                    let (topic, group) = &self.driver.key;
                    warn!(%topic, %group, %error, "pulling messages failed");
                    self.driver.fail_waiting(&error);
                }
            }
        }
    }

    /// Looks for entries once: first those whose lease ran out, then new ones. Returns whether to continue.
    async fn turn(&mut self) -> Result<bool> {
        let topic = self.member.topic.borrow().clone();
        self.promote_due(&topic);
        let is_due = self.check.last.is_none_or(|last| last.elapsed() >= TICK);
        self.streams.probe(&topic, is_due).await?;
        if is_due {
            self.reassign_expired(&topic).await?;
        }
        self.driver.deliver_held();
        let leased: u64 = self.check.pending.values().sum();
        if leased >= LEASED_MAX {
            let (topic, group) = (topic.name.to_string(), self.driver.key.1.to_string());
            return Err(QueueError::TooManyLeased { topic, group, leased });
        }
        self.read_new(&topic).await
    }

    /// Promotes due messages of the topic while this driver runs.
    fn promote_due(&mut self, topic: &Arc<Topic>) {
        if self.delays.1.is_empty() || !Arc::ptr_eq(&self.delays.0, topic) {
            let schedulers = &self.driver.queue.inner.shared_tasks.delay_schedulers;
            let sets = keys::all_delays(topic);
            let start = |delays| schedulers.get_or_start(&self.backend, delays);
            self.delays = (Arc::clone(topic), sets.iter().map(start).collect());
        }
    }

    /// Reads new entries for the first caller and those with leases of the same length; waits for at most one tick.
    async fn read_new(&mut self, topic: &Arc<Topic>) -> Result<bool> {
        let Some(lease) = self.driver.waiting.front().map(|demand| demand.lease) else {
            return Ok(true);
        };
        let consumer = lease_consumer(lease, 0, &self.name);
        if !self.readers.contains_key(&lease) {
            if self.readers.len() >= READERS_MAX {
                let closed = self.close_reader(topic).await;
                let _ = closed.inspect_err(|error| warn!(%error, "closing a reader failed; what it has read is delivered again when the lease runs out"));
            }
            let mut reader = self.backend.reader(&self.driver.key.1, &consumer).await?;
            // A stream that was deleted must not come back through its readers.
            reader.require_groups();
            self.readers.insert(lease, reader);
        }
        let streams = self.streams.next(topic);
        let Self { driver, readers, message_size, .. } = self;
        let reader = readers.get_mut(&lease).expect("it was inserted above");
        let same = driver.waiting.iter().filter(|demand| demand.lease == lease);
        let callers = same.clone().count();
        let bytes_max = callers.saturating_mul(PULL_BYTES_MAX).min(READ_BYTES_MAX);
        let demanded = same.map(|demand| demand.max).sum::<usize>();
        let demanded = demanded.min(message_size.fitting(bytes_max)).min(READ_MAX);
        let count = demanded.div_ceil(streams.len().max(1)).max(1);
        let is_partial = streams.len() == READ_MAX && usize::from(topic.partitions) > READ_MAX;
        let is_shared = callers < driver.waiting.len() || is_partial;
        let now = Instant::now();
        let deadlines = driver.waiting.iter().map(|demand| demand.deadline);
        let end = deadlines.min().unwrap_or(now).saturating_duration_since(now);
        let wait = end.min(if is_shared { TICK_SHARED } else { TICK });
        for demand in driver.waiting.iter_mut().filter(|demand| demand.lease == lease) {
            demand.has_looked = true;
        }
        let batches = {
            let mut reading = pin!(async {
                if streams.is_empty() {
                    tokio::time::sleep(wait).await;
                    return Ok(Vec::new());
                }
                reader.read(&streams, count, wait).await
            });
            loop {
                tokio::select! {
                    batches = &mut reading => break batches,
                    demand = driver.demands.recv() => {
                        // If this read is dropped, the next one, or closing the reader, returns its entries.
                        let Some(demand) = demand else { return Ok(false) };
                        let is_sooner = demand.deadline < now + wait;
                        driver.waiting.push_back(demand);
                        if is_sooner {
                            return Ok(true);
                        }
                    }
                }
            }
        };
        let batches = match batches {
            Ok(batches) => batches,
            Err(error @ (StreamError::NoGroup { .. } | StreamError::WrongType { .. })) => {
                self.on_read_failed(topic, &streams, error).await?;
                return Ok(true);
            }
            Err(error) => {
                // Entries that it has read and not returned are reassigned when the lease runs out.
                readers.remove(&lease);
                return Err(error.into());
            }
        };
        let failures = reader.take_failures();
        if batches.is_empty() && is_shared {
            driver.waiting.rotate_left(1);
        }
        if let Some(largest) = batches.iter().map(|batch| largest_bytes(&batch.entries)).max() {
            message_size.record(largest);
        }
        for StreamBatch { stream, entries } in batches {
            let Some(partition) = partition_of(topic, stream.as_str()) else {
                debug!(%stream, "entries of a partition that was removed stay pending");
                continue;
            };
            // A blocked read delivers when an entry arrives. Entries that a dropped read got are held no longer than
            // a tick, which the caller loses of its lease.
            self.hold(topic, partition, &consumer, Instant::now(), entries);
        }
        for StreamReadFailure { streams, error } in failures {
            // Entries that were read and not returned are reassigned when the lease runs out.
            self.on_read_failed(topic, &streams, error).await?;
        }
        Ok(true)
    }

    /// Restores a missing group; excludes partitions that cannot be read. Fails if none is left.
    async fn on_read_failed(
        &mut self,
        topic: &Arc<Topic>,
        streams: &[StreamName],
        error: StreamError,
    ) -> Result<()> {
        let failed = match &error {
            StreamError::NoGroup { stream: name, .. } | StreamError::WrongType { name } => {
                partition_of(topic, name).map_or_else(Vec::new, |partition| vec![partition])
            }
            _ => streams.iter().filter_map(|name| partition_of(topic, name.as_str())).collect(),
        };
        for partition in failed {
            let error = match &error {
                StreamError::NoGroup { .. } => {
                    self.streams.restore_group(topic, partition).await.err()
                }
                error => Some(error.duplicate()),
            };
            if let Some(error) = error {
                self.streams.exclude(topic, partition, error)?;
            }
        }
        Ok(())
    }

    /// Keeps entries for callers. Entries that no caller may see are settled in the background: malformed ones, those for
    /// another group, and those that were delivered too often.
    pub(super) fn hold(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
        consumer: &ConsumerName,
        leased_at: Instant,
        entries: Vec<DeliveredEntry>,
    ) {
        if let Some(newest) = entries.iter().map(|entry| entry.id).max() {
            self.streams.record_read(partition, newest);
        }
        let group = &self.driver.key.1;
        let policy = policy(topic, partition, group);
        let lease = lease_of(consumer).expect("it is the name of a lease");
        let mut refused = Vec::new();
        for entry in entries {
            let id = entry.id;
            match policy.accept(&in_flight(entry)) {
                Ok(message) => {
                    let retries = message.max_retries.unwrap_or(topic.policies.max_retries);
                    self.driver.held.push_back(PulledMessage {
                        lease: MessageLease { partition, id, consumer: consumer.clone() },
                        message,
                        attempts_max: retries.saturating_add(1),
                        expires_at: leased_at + lease,
                    });
                }
                Err(finished) => {
                    if finished.result != DeliveryResult::Skipped {
                        warn!(
                            topic = %topic.name, partition, entry_id = %id, result = ?finished.result,
                            "message moved to the dead letters without a pull"
                        );
                    }
                    metrics(topic, partition, group).record_result(finished.result, None);
                    refused.push(Settlement { id, action: finished.action });
                }
            }
        }
        // Beyond the limit, as while no dead letter can be written, they stay pending until their lease runs out.
        if !refused.is_empty() && self.settles.len() < SETTLES_MAX {
            self.settle_later(topic, partition, consumer.clone(), refused, 1);
        }
    }

    /// Settles entries in the background, so many at a time: a server that does not answer must not delay the callers.
    fn settle_later(
        &mut self,
        topic: &Topic,
        partition: Partition,
        consumer: ConsumerName,
        settlements: Vec<Settlement>,
        batch: usize,
    ) {
        while self.settles.try_join_next().is_some() {}
        let (backend, group) = (Arc::clone(&self.backend), self.driver.key.1.clone());
        let stream = keys::stream(topic, partition);
        self.settles.spawn(async move {
            for entries in settlements.chunks(batch) {
                let (stream, group, consumer) = (&stream, &group, &consumer);
                let settle = SettleBatch { stream, group, consumer, fence: None, entries };
                if let Err(error) = backend.settle(settle).await {
                    warn!(%stream, %group, %error, "settling entries failed; they are delivered again when their lease runs out");
                    return;
                }
            }
        });
    }

    /// Releases entries that no caller took in time.
    fn release_stale(&mut self, now: Instant) {
        let is_stale = |held: &PulledMessage| {
            let lease = lease_of(&held.lease.consumer).unwrap_or_default();
            let left = held.expires_at.saturating_duration_since(now);
            lease.saturating_sub(left) >= HOLD_MAX.min(lease / HOLD_PART)
        };
        if !self.driver.held.iter().any(is_stale) {
            return;
        }
        let (stale, kept) = self.driver.held.drain(..).partition(is_stale);
        self.driver.held = kept;
        self.release(stale);
    }

    /// Releases entries without counting an attempt. If that fails, they are reassigned when their lease runs out.
    fn release(&mut self, messages: VecDeque<PulledMessage>) {
        let topic = self.member.topic.borrow().clone();
        let mut batches: BTreeMap<(Partition, ConsumerName), Vec<Settlement>> = BTreeMap::new();
        for PulledMessage { lease: MessageLease { partition, id, consumer }, .. } in messages {
            let settlement = Settlement { id, action: SettleAction::Release };
            batches.entry((partition, consumer)).or_default().push(settlement);
        }
        for ((partition, consumer), entries) in batches {
            let all = entries.len();
            self.settle_later(&topic, partition, consumer, entries, all);
        }
    }

    /// Closes one reader and holds what it has read.
    async fn close_reader(&mut self, topic: &Arc<Topic>) -> Result<()> {
        let Some(lease) = self.readers.keys().next().copied() else { return Ok(()) };
        let reader = self.readers.remove(&lease).expect("its key was found");
        let consumer = lease_consumer(lease, 0, &self.name);
        for StreamBatch { stream, entries } in reader.close().await? {
            if let Some(partition) = partition_of(topic, stream.as_str()) {
                self.hold(topic, partition, &consumer, Instant::now(), entries);
            }
        }
        Ok(())
    }

    /// Answers all callers, stops reading, and releases what no caller has got.
    async fn close(mut self) -> PullDriver {
        for demand in self.driver.waiting.drain(..) {
            let _ = demand.reply.send(Ok(Vec::new()));
        }
        let topic = self.member.topic.borrow().clone();
        let closing = async {
            let mut closed = Ok(());
            while !self.readers.is_empty() {
                closed = closed.and(self.close_reader(&topic).await);
            }
            let held = std::mem::take(&mut self.driver.held);
            self.release(held);
            while self.settles.join_next().await.is_some() {}
            closed
        };
        match timeout(CLOSE_MAX, closing).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(%error, "ending the pulls of a group failed; its messages are delivered again");
            }
            Err(_) => {
                warn!(
                    "ending the pulls of a group took too long; its messages are delivered again"
                );
            }
        }
        self.driver.held.clear();
        self.driver
    }
}
