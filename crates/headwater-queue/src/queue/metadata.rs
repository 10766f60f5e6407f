//! Cached metadata of topics.
//!
//! Upstream: every module that needs the partitions or the policies of a topic. Downstream: the registry of the backend.
//! Guarantees: concurrent callers share one read; a copy from before an invalidation is not used after it. A copy that is
//! older than the topic's `refresh` is used only while the metadata cannot be read, and only by callers that permit it.
//!
//! On a cluster, the metadata and the set of the topic's streams are usually on different servers. While the metadata cannot
//! be read, the set tells whether the partitions of an older copy are still those of the topic.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::StreamError;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::Queue;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::topic::{Topic, TopicName};

/// How long callers that can use an expired copy wait for a read: one second. In slices, so that a pause of this process
/// counts as one slice and not as an unavailable backend.
const WAIT_SLICE: Duration = Duration::from_millis(250);
const WAIT_SLICES: u32 = 4;
/// After so long without a reply, the set of the topic's streams is read, too.
const CHECK_AFTER: Duration = Duration::from_millis(500);
/// After so long without a reply, the set counts as unreadable.
const CHECK_WAIT_MAX: Duration = Duration::from_millis(500);
/// Pause after a failed read, for callers that can use an expired copy; at most half the topic's `refresh`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(1);
/// Cached topics; beyond it, expired ones are evicted.
const TOPICS_MAX: usize = 100_000;

// When callers begin to use expired copies, it is known whether the set can be read.
const _: () = assert!(
    CHECK_AFTER.as_millis() + CHECK_WAIT_MAX.as_millis()
        <= WAIT_SLICE.as_millis() * WAIT_SLICES as u128
);

/// The metadata that this process has read.
#[derive(Default)]
pub(super) struct MetadataCache {
    topics: Mutex<HashMap<TopicName, TopicEntry>>,
    /// Counts invalidations, for callers with a cache of their own.
    invalidations: AtomicU64,
}

#[derive(Default)]
struct TopicEntry {
    copy: Option<TopicCopy>,
    /// The last read that callers shared, in progress or ended.
    read: Option<SharedRead>,
}

/// The metadata of a topic as it was at one moment.
#[derive(Clone)]
pub(crate) struct TopicCopy {
    pub(crate) topic: Arc<Topic>,
    /// Its partitions were those of the topic at this time.
    pub(crate) read_at: Instant,
}

/// A read of the metadata for all callers that wait for it. A task of its own, so that callers can be cancelled.
#[derive(Clone)]
struct SharedRead {
    began: Instant,
    progress: watch::Receiver<ReadProgress>,
}

#[derive(Clone)]
struct ReadProgress {
    state: ReadState,
    partitions: PartitionCheck,
}

#[derive(Clone)]
enum ReadState {
    /// There is no reply yet. All callers wait.
    Waiting,
    /// There has been no reply for a second, or the read began shortly after one that failed. Callers that can use an
    /// expired copy do not wait.
    Overdue,
    Done(TopicCopy),
    Failed {
        at: Instant,
        error: Arc<QueueError>,
    },
}

/// What the set of the topic's streams tells while the metadata cannot be read.
#[derive(Clone, Copy)]
enum PartitionCheck {
    /// It has not been read, or cannot be read either.
    Unknown,
    /// At this time the partitions were those of the copy. Counts for the topic's `refresh`.
    Current { at: Instant },
    /// The topic was resized or deleted.
    Changed,
}

/// Whether a caller can use a copy older than the topic's `refresh` while the metadata cannot be read.
#[derive(Clone, Copy)]
pub(crate) enum UseExpired {
    /// It waits for the metadata, and fails with the read.
    Never,
    /// If another key tells that the partitions are the same. For callers that choose a partition by a key or an id.
    IfCurrent,
    /// Unless another key tells that the partitions changed. For callers that send to any existing partition.
    UnlessChanged,
    /// For callers that send no messages. Partitions are added, never removed.
    Always,
}

impl UseExpired {
    /// The copy to use while the metadata cannot be read.
    fn select(self, copy: &TopicCopy, check: PartitionCheck) -> Option<TopicCopy> {
        let topic = &copy.topic;
        match (self, check) {
            (Self::Never, _) => None,
            (Self::Always, _) => Some(copy.clone()),
            // The partitions are on the server that does not answer. Messages that wait for it could arrive after a resize
            // that they do not know of.
            _ if !topic.layout.is_spread() => None,
            (_, PartitionCheck::Current { at }) if at.elapsed() < topic.policies.refresh => {
                Some(TopicCopy { topic: Arc::clone(topic), read_at: at.max(copy.read_at) })
            }
            (Self::UnlessChanged, PartitionCheck::Unknown) => Some(copy.clone()),
            // Waits for the next check, or for the metadata. An old check tells nothing about changes since then.
            (Self::UnlessChanged | Self::IfCurrent, _) => None,
        }
    }
}

impl TopicCopy {
    fn is_expired(&self, now: Instant) -> bool {
        now.duration_since(self.read_at) >= self.topic.policies.refresh
    }
}

impl TopicEntry {
    fn fresh(&self, now: Instant) -> Option<TopicCopy> {
        self.copy.clone().filter(|copy| !copy.is_expired(now))
    }

    fn read_in_progress(&self) -> Option<SharedRead> {
        let read = self.read.as_ref()?;
        let is_over =
            matches!(read.progress.borrow().state, ReadState::Done(_) | ReadState::Failed { .. });
        // The task of a read ends without a result if its runtime shuts down.
        let is_cancelled = read.progress.has_changed().is_err();
        (!is_over && !is_cancelled).then(|| read.clone())
    }

    /// How long ago the last read failed because the backend was unavailable, and what was known of the partitions.
    fn failure(&self, now: Instant) -> Option<(Duration, PartitionCheck)> {
        let progress = self.read.as_ref()?.progress.borrow();
        match &progress.state {
            ReadState::Failed { at, error } if error.is_transient() => {
                Some((now.duration_since(*at), progress.partitions))
            }
            _ => None,
        }
    }

    /// The expired copy, if the last read failed so recently that another one would fail, too.
    fn after_failure(&self, now: Instant, use_expired: UseExpired) -> Option<TopicCopy> {
        let (copy, (age, check)) = (self.copy.as_ref()?, self.failure(now)?);
        let pause = (copy.topic.policies.refresh / 2).min(RETRY_AFTER_MAX);
        if age < pause { use_expired.select(copy, check) } else { None }
    }
}

impl MetadataCache {
    fn lock(&self) -> MutexGuard<'_, HashMap<TopicName, TopicEntry>> {
        self.topics.lock().expect("no code panics while it holds this lock")
    }
}

/// The entry of a topic. Evicts expired ones if there are too many.
fn entry<'a>(
    topics: &'a mut HashMap<TopicName, TopicEntry>,
    name: &TopicName,
    now: Instant,
) -> &'a mut TopicEntry {
    if topics.len() >= TOPICS_MAX && !topics.contains_key(name) {
        topics.retain(|_, entry| entry.fresh(now).is_some());
    }
    topics.entry(name.clone()).or_default()
}

impl Queue {
    /// A topic, at most its `refresh` old. A topic that was not created is plain. Cancel-safe.
    pub(crate) async fn topic(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.topic_copy(name, UseExpired::Never).await?.topic)
    }

    /// Like [`Self::topic`], but returns an expired topic if the metadata cannot be read in time. For callers that need the
    /// layout only: partitions are added, never removed.
    pub(crate) async fn topic_or_expired(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.topic_copy(name, UseExpired::Always).await?.topic)
    }

    /// Like [`Self::topic`], with the time it was read; expired if the metadata cannot be read in time and the caller
    /// permits it. Then only the first callers wait, for a second.
    pub(crate) async fn topic_copy(
        &self,
        name: &TopicName,
        use_expired: UseExpired,
    ) -> Result<TopicCopy> {
        let now = Instant::now();
        loop {
            let (copy, mut read) = {
                let mut topics = self.inner.metadata.lock();
                let entry = entry(&mut topics, name, now);
                let found = entry.fresh(now).or_else(|| entry.after_failure(now, use_expired));
                if let Some(copy) = found {
                    return Ok(copy);
                }
                (entry.copy.clone(), self.join_read(name, entry, now))
            };
            let expired = |progress: &ReadProgress| {
                copy.as_ref().and_then(|copy| use_expired.select(copy, progress.partitions))
            };
            let is_over = |progress: &ReadProgress| match progress.state {
                ReadState::Waiting => false,
                ReadState::Overdue => expired(progress).is_some(),
                ReadState::Done(_) | ReadState::Failed { .. } => true,
            };
            let Ok(progress) = read.progress.wait_for(is_over).await.map(|it| it.clone()) else {
                let problem = format!("reading the metadata of topic `{name}` was cancelled");
                return Err(StreamError::Unavailable { problem, source: None }.into());
            };
            match &progress.state {
                ReadState::Done(new) if !new.is_expired(now) => return Ok(new.clone()),
                ReadState::Failed { error, .. } if !error.is_transient() => {
                    return Err(error.duplicate());
                }
                ReadState::Failed { error, .. } => match expired(&progress) {
                    Some(copy) => return Ok(copy),
                    // Part of the deadline of the read had passed before this call.
                    None if read.began < now => {}
                    None => return Err(error.duplicate()),
                },
                ReadState::Overdue => {
                    if let Some(copy) = expired(&progress) {
                        return Ok(copy);
                    }
                }
                // What was requested long before this call may be older than permitted.
                ReadState::Done(_) | ReadState::Waiting => {}
            }
        }
    }

    /// The read of a topic that is in progress, or a new one.
    fn join_read(&self, name: &TopicName, entry: &mut TopicEntry, now: Instant) -> SharedRead {
        if let Some(read) = entry.read_in_progress() {
            return read;
        }
        let known = entry.copy.as_ref().map(|copy| Arc::clone(&copy.topic));
        // Calls do not wait for each attempt while the backend stays unavailable.
        let recent = entry
            .failure(now)
            .filter(|(age, _)| known.as_ref().is_some_and(|topic| *age < topic.policies.refresh));
        let first = match recent {
            Some((_, partitions)) => ReadProgress { state: ReadState::Overdue, partitions },
            None => ReadProgress { state: ReadState::Waiting, partitions: PartitionCheck::Unknown },
        };
        let (sender, receiver) = watch::channel(first);
        let read = SharedRead { began: Instant::now(), progress: receiver };
        entry.read = Some(read.clone());
        let (queue, name) = (self.clone(), name.clone());
        tokio::spawn(async move {
            let state = queue.read_shared(&name, known, &sender).await;
            sender.send_modify(|progress| progress.state = state);
        });
        read
    }

    /// Reads a topic for all callers that wait. Consumes the queue, so that the backend is released before they continue.
    async fn read_shared(
        self,
        name: &TopicName,
        known: Option<Arc<Topic>>,
        progress: &watch::Sender<ReadProgress>,
    ) -> ReadState {
        let has_copy = known.is_some();
        let result = tokio::select! {
            biased;
            result = self.read_copy(name) => result,
            never = self.report_progress(name, known, progress) => match never {},
        };
        let is_waiting = matches!(progress.borrow().state, ReadState::Waiting);
        match result {
            Ok(copy) => {
                if !is_waiting && has_copy {
                    info!(topic = %name, "the metadata of the topic can be read again");
                }
                ReadState::Done(copy)
            }
            Err(error) => {
                if is_waiting && has_copy && error.is_transient() {
                    warn!(topic = %name, %error, "the metadata of the topic cannot be read");
                }
                ReadState::Failed { at: Instant::now(), error: Arc::new(error) }
            }
        }
    }

    /// Tells callers how a read proceeds that has no reply yet. Never completes.
    async fn report_progress(
        &self,
        name: &TopicName,
        known: Option<Arc<Topic>>,
        progress: &watch::Sender<ReadProgress>,
    ) -> Infallible {
        let is_waiting = matches!(progress.borrow().state, ReadState::Waiting);
        let has_copy = known.is_some();
        let overdue = async {
            if is_waiting {
                for _ in 0..WAIT_SLICES {
                    sleep(WAIT_SLICE).await;
                }
                if has_copy {
                    warn!(topic = %name, "the metadata of the topic cannot be read in time, an older copy is used where possible");
                }
                progress.send_modify(|progress| progress.state = ReadState::Overdue);
            }
            pending::<Infallible>().await
        };
        let checks = async {
            let Some(topic) = known.filter(|topic| topic.layout.is_spread()) else {
                return pending::<Infallible>().await;
            };
            if is_waiting {
                sleep(CHECK_AFTER).await;
            }
            self.check_partitions(&topic, progress).await
        };
        tokio::join!(overdue, checks).0
    }

    /// Keeps comparing the partitions of a topic with the set of its streams. Never completes.
    async fn check_partitions(
        &self,
        topic: &Topic,
        progress: &watch::Sender<ReadProgress>,
    ) -> Infallible {
        let mut streams: Vec<String> = match topic.layout.is_plain() {
            // Only created topics have the set.
            true => Vec::new(),
            false => (0..topic.partitions).map(|p| keys::stream(topic, p).to_string()).collect(),
        };
        streams.sort_unstable();
        let (set, refresh) = (keys::partitions(&topic.name), topic.policies.refresh);
        let record = |check: PartitionCheck| {
            progress.send_modify(|progress| {
                let is_kept = match (progress.partitions, check) {
                    (PartitionCheck::Current { at }, PartitionCheck::Unknown) => {
                        at.elapsed() < refresh
                    }
                    (PartitionCheck::Changed, PartitionCheck::Unknown) => true,
                    _ => false,
                };
                if !is_kept {
                    progress.partitions = check;
                }
            });
        };
        loop {
            let at = Instant::now();
            let mut reading = pin!(self.inner.backend.set_members(&set));
            let members = match timeout(CHECK_WAIT_MAX, reading.as_mut()).await {
                Ok(members) => members,
                Err(_) => {
                    record(PartitionCheck::Unknown);
                    reading.await
                }
            };
            record(match members {
                Ok(mut members) => {
                    members.sort_unstable();
                    match members == streams {
                        true => PartitionCheck::Current { at },
                        false => PartitionCheck::Changed,
                    }
                }
                Err(_) => PartitionCheck::Unknown,
            });
            sleep(refresh / 2).await;
        }
    }

    /// Reads a topic from the backend.
    pub(crate) async fn read_topic(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.read_copy(name).await?.topic)
    }

    async fn read_copy(&self, name: &TopicName) -> Result<TopicCopy> {
        let invalidations = self.invalidations();
        // The age counts from before the request: the reply may be that old.
        let read_at = Instant::now();
        let topic = Arc::new(Topic::read(&*self.inner.backend, name).await?);
        let copy = TopicCopy { topic, read_at };
        let mut topics = self.inner.metadata.lock();
        // Otherwise it may lack a change of this process.
        if self.invalidations() == invalidations {
            let entry = entry(&mut topics, name, read_at);
            if entry.copy.as_ref().is_none_or(|known| known.read_at <= read_at) {
                entry.copy = Some(copy.clone());
            }
        }
        Ok(copy)
    }

    /// Drops a topic from the cache after it was changed.
    pub(crate) fn invalidate(&self, name: &TopicName) {
        let mut topics = self.inner.metadata.lock();
        topics.remove(name);
        self.inner.metadata.invalidations.fetch_add(1, Ordering::Release);
    }

    /// Number of invalidations so far.
    pub(crate) fn invalidations(&self) -> u64 {
        self.inner.metadata.invalidations.load(Ordering::Acquire)
    }
}
