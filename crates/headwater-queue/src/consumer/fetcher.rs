//! The fetcher: one blocking read for all partitions that one consumer name reads for one group.
//!
//! Upstream: the backend. Downstream: each `partition_consumer` receives its entries.
//! Guarantees: a partition without capacity is skipped and the others continue; after `remove` has returned, no read can
//! deliver from that partition; one stream of the wrong type does not stop the reading of the others.
//! All subscriptions of a process with the same group, consumer name, batch and poll share a fetcher, so that a
//! thousand topics need one read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::{TryStreamExt, stream};
use headwater_stream::limits::READ_STREAMS_MAX;
use headwater_stream::{
    Backend, Backoff, ConsumerName, DeliveredEntry, DisconnectOutcome, GroupName, GroupReader,
    SettleAction, SettleBatch, Settlement, StreamBatch, StreamError, StreamName,
};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::fetch_plan::{FetchPlanner, next_bulk_size};
use super::handler_task::yield_to_queue;
use super::partition_consumer::PartitionConsumer;

/// While some partitions are read in bulk, the others are read this often.
const REGULAR_FETCH_EVERY: Duration = Duration::from_millis(5);
/// How long a stream of the wrong type is skipped.
const WRONG_TYPE_PAUSE: Duration = Duration::from_secs(2);
/// How long a failed read may still be executing at the server, beyond its own wait time.
const UNCERTAIN_FOR: Duration = Duration::from_secs(30);
/// Streams whose reads are disconnected concurrently.
const DISCONNECTS_AT_ONCE: usize = 16;
/// After a read of at most this many entries, their handlers run before the next read.
const SMALL_BATCH: usize = 8;
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF: Backoff = Backoff::doubling(BACKOFF_MIN, Duration::from_secs(2));

/// Subscriptions with the same key share a fetcher.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct FetcherKey {
    pub(super) group: GroupName,
    pub(super) consumer_name: ConsumerName,
    pub(super) batch: usize,
    pub(super) poll: Duration,
}

/// Handle of a fetch loop, which ends when the last handle is dropped.
pub(super) struct Fetcher {
    shared: Arc<FetchLoop>,
    task: JoinHandle<()>,
}

struct FetchLoop {
    backend: Arc<dyn Backend>,
    key: FetcherKey,
    sources: Mutex<FetchSources>,
    changed: Notify,
    /// Removals up to this number are in effect.
    removals_done: watch::Sender<u64>,
    turn: AtomicU64,
    /// Entries that a bulk read asks of each partition.
    bulk_size: AtomicUsize,
    /// When partitions were last read without bulk.
    regular_fetched_at: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct FetchSources {
    all: HashMap<StreamName, FetchSource>,
    removals: u64,
}

struct FetchSource {
    consumer: Arc<PartitionConsumer>,
    /// The number of the removal that ends it.
    removal_seq: Option<u64>,
    /// Skipped until then, because its stream has the wrong type.
    skipped_until: Option<Instant>,
}

/// The next read.
struct FetchRequest {
    turn: u64,
    streams: Vec<StreamName>,
    count: usize,
    wait: Duration,
    is_bulk: bool,
    /// Whether partitions wait for capacity for a bulk read.
    awaits_bulk: bool,
    /// Removals up to this number are in effect once this read has returned.
    removals: u64,
    has_removals: bool,
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fetcher {
    pub(super) fn start(backend: Arc<dyn Backend>, key: FetcherKey) -> Self {
        let bulk_size = AtomicUsize::new(key.batch);
        let shared = Arc::new(FetchLoop {
            backend,
            key,
            bulk_size,
            regular_fetched_at: Mutex::default(),
            sources: Mutex::default(),
            changed: Notify::new(),
            removals_done: watch::Sender::new(0),
            turn: AtomicU64::new(0),
        });
        let task = tokio::spawn(Arc::clone(&shared).run());
        Self { shared, task }
    }

    /// Whether one read can include one more partition. Each partition holds one handle.
    pub(super) fn has_capacity(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) <= READ_STREAMS_MAX
    }

    /// Starts reading a partition.
    pub(super) fn add(&self, consumer: &Arc<PartitionConsumer>) {
        let stream = consumer.policy.stream.clone();
        let consumer = Arc::clone(consumer);
        let source = FetchSource { consumer, removal_seq: None, skipped_until: None };
        self.shared.lock().all.insert(stream, source);
        self.wake();
    }

    /// Plans the next read again: a partition has capacity, was added or removed.
    pub(super) fn wake(&self) {
        self.shared.changed.notify_one();
    }

    /// Stops reading a partition. When it returns, no read can deliver from it, and reads in flight have delivered.
    pub(super) async fn remove(&self, consumer: &Arc<PartitionConsumer>) {
        let mut removals_done = self.shared.removals_done.subscribe();
        let number = {
            let mut sources = self.shared.lock();
            let number = sources.removals + 1;
            let Some(source) = sources.find(consumer) else { return };
            let number = *source.removal_seq.get_or_insert(number);
            sources.removals = sources.removals.max(number);
            number
        };
        self.wake();
        // Fails if the fetch loop has ended: then nothing reads.
        let _ = removals_done.wait_for(|done| *done >= number).await;
    }

    /// Removes a partition without waiting. A read in flight may still fetch entries for its next owner.
    pub(super) fn remove_now(&self, consumer: &PartitionConsumer) {
        let mut sources = self.shared.lock();
        if sources.find(consumer).is_some() {
            sources.all.remove(&consumer.policy.stream);
        }
        drop(sources);
        self.wake();
    }
}

impl FetchSources {
    /// The source of this consumer, unless another consumer has replaced it.
    fn find(&mut self, consumer: &PartitionConsumer) -> Option<&mut FetchSource> {
        let source = self.all.get_mut(&consumer.policy.stream)?;
        std::ptr::eq(Arc::as_ptr(&source.consumer), consumer).then_some(source)
    }
}

impl FetchLoop {
    fn lock(&self) -> MutexGuard<'_, FetchSources> {
        self.sources.lock().expect("no code panics while it holds the sources")
    }

    async fn run(self: Arc<Self>) {
        let mut reader: Option<Box<dyn GroupReader>> = None;
        // Whether a read that was dropped may still deliver.
        let mut read_in_flight = false;
        // Until when a failed read may still be executing at the server.
        let mut uncertain_until: Option<Instant> = None;
        let mut retry = BACKOFF.timer();
        loop {
            let request = self.next_request();
            if request.streams.is_empty() {
                // A partition that awaits bulk capacity uses the reader again in a moment.
                if ((read_in_flight && !request.awaits_bulk) || request.has_removals)
                    && let Some(reader) = reader.take()
                    && !self.close(reader).await
                {
                    uncertain_until = Some(self.uncertainty_deadline());
                }
                read_in_flight &= reader.is_some();
                if self.confirm_removals(&request, &mut uncertain_until).await {
                    self.wait_for_change(request.awaits_bulk).await;
                }
                continue;
            }
            let open = match reader.take() {
                Some(open) => Ok(open),
                None => self.backend.reader(&self.key.group, &self.key.consumer_name).await,
            };
            let result = match open {
                Err(error) => Some(Err(error)),
                Ok(open) => self.read(reader.insert(open).as_mut(), &request).await,
            };
            match result {
                // The sources changed while the read was blocking.
                None => read_in_flight = true,
                Some(Ok(batches)) => {
                    read_in_flight = false;
                    retry.reset();
                    let entries: usize = batches.iter().map(|batch| batch.entries.len()).sum();
                    let is_empty = entries == 0;
                    self.record_backlog(&request, &batches);
                    self.deliver(batches).await;
                    if (1..=SMALL_BATCH).contains(&entries) {
                        // The handler tasks are on this thread, where they cannot be stolen, and preparing the next
                        // read may take longer than they do.
                        yield_to_queue().await;
                    }
                    if self.confirm_removals(&request, &mut uncertain_until).await
                        && is_empty
                        && request.awaits_bulk
                    {
                        self.wait_for_change(true).await;
                    }
                }
                Some(Err(error)) => {
                    read_in_flight = false;
                    // The partition consumers reclaim what the failed read may have fetched.
                    self.on_read_error(&error);
                    let is_wrong_type = matches!(error, StreamError::WrongType { .. });
                    if !is_wrong_type {
                        uncertain_until = Some(self.uncertainty_deadline());
                    }
                    self.confirm_removals(&request, &mut uncertain_until).await;
                    if !is_wrong_type {
                        retry.wait().await;
                    }
                }
            }
        }
    }

    /// Reads; `None` if the sources changed before an entry arrived.
    async fn read(
        &self,
        reader: &mut dyn GroupReader,
        request: &FetchRequest,
    ) -> Option<headwater_stream::Result<Vec<StreamBatch<DeliveredEntry>>>> {
        let read = reader.read(&request.streams, request.count, request.wait);
        if request.wait.is_zero() {
            return Some(read.await);
        }
        tokio::select! {
            biased;
            result = read => Some(result),
            () = self.changed.notified() => None,
        }
    }

    /// Waits for a change of the sources, or until a skipped stream is due.
    async fn wait_for_change(&self, awaits_bulk: bool) {
        let next = self.lock().all.values().filter_map(|source| source.skipped_until).min();
        let longest = if awaits_bulk { REGULAR_FETCH_EVERY } else { Duration::from_secs(3600) };
        let latest = Instant::now() + longest;
        let until = next.map_or(latest, |next| next.min(latest));
        tokio::select! {
            () = self.changed.notified() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }

    /// Plans the next read.
    fn next_request(&self) -> FetchRequest {
        let now = Instant::now();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let sources = self.lock();
        let removals = sources.removals;
        let has_removals = sources.all.values().any(|source| source.removal_seq.is_some());
        let mut planner = FetchPlanner::default();
        let mut soonest: Option<Instant> = None;
        for source in sources.all.values() {
            if source.removal_seq.is_some() {
                continue;
            }
            if let Some(until) = source.skipped_until.filter(|until| *until > now) {
                soonest = Some(soonest.map_or(until, |soonest| soonest.min(until)));
                continue;
            }
            planner.add(&source.consumer, now);
        }
        drop(sources);
        let mut regular_fetched_at =
            self.regular_fetched_at.lock().expect("no code panics while it holds the time");
        let regular_due =
            regular_fetched_at.is_none_or(|at| now.duration_since(at) >= REGULAR_FETCH_EVERY);
        let bulk_size = self.bulk_size.load(Ordering::Relaxed);
        let selection = planner.select(turn, bulk_size, regular_due, now);
        if !selection.is_bulk {
            *regular_fetched_at = Some(now);
        }
        drop(regular_fetched_at);
        let mut wait = self.key.poll.min(selection.wait_max.unwrap_or(self.key.poll));
        if let Some(soonest) = soonest {
            wait = wait.min(soonest - now);
        }
        if has_removals {
            // Without blocking, so that the server no longer reads the removed streams.
            wait = Duration::ZERO;
        }
        let count = selection.count.clamp(1, self.key.batch);
        FetchRequest {
            turn,
            streams: selection.streams,
            count,
            wait,
            is_bulk: selection.is_bulk,
            awaits_bulk: selection.awaits_bulk,
            removals,
            has_removals,
        }
    }

    /// Records which partitions may have a backlog.
    fn record_backlog(&self, request: &FetchRequest, batches: &[StreamBatch<DeliveredEntry>]) {
        let sources = self.lock();
        if request.is_bulk {
            let asked = request.streams.iter().filter_map(|stream| sources.all.get(stream));
            asked.for_each(|source| source.consumer.backlog.record_fetch(request.turn, false));
            let entries = batches.iter().map(|batch| batch.entries.len()).sum();
            let bulk_size = next_bulk_size(request.streams.len(), entries, self.key.batch);
            self.bulk_size.store(bulk_size, Ordering::Relaxed);
        }
        for batch in batches {
            if let Some(source) = sources.all.get(&batch.stream) {
                let has_more = batch.entries.len() >= request.count;
                source.consumer.backlog.record_fetch(request.turn, has_more);
            }
        }
    }

    async fn deliver(&self, batches: Vec<StreamBatch<DeliveredEntry>>) {
        for batch in self.dispatch(batches) {
            self.release_unrouted(batch).await;
        }
    }

    /// Passes each batch to its partition consumer. Returns batches of partitions that are no longer consumed here.
    fn dispatch(
        &self,
        batches: Vec<StreamBatch<DeliveredEntry>>,
    ) -> Vec<StreamBatch<DeliveredEntry>> {
        let mut unrouted = Vec::new();
        let sources = self.lock();
        let routed: Vec<_> = batches
            .into_iter()
            .filter_map(|batch| match sources.all.get(&batch.stream) {
                Some(source) => Some((Arc::clone(&source.consumer), batch.entries)),
                None => {
                    unrouted.push(batch);
                    None
                }
            })
            .collect();
        drop(sources);
        for (consumer, entries) in routed {
            consumer.receive(entries);
        }
        unrouted
    }

    /// Releases entries of a partition that is no longer consumed here, so that its owner gets them at once.
    async fn release_unrouted(&self, StreamBatch { stream, entries }: StreamBatch<DeliveredEntry>) {
        debug!(%stream, entries = entries.len(), "releasing entries of a partition that was removed");
        let release =
            |entry: &DeliveredEntry| Settlement { id: entry.id, action: SettleAction::Release };
        let entries: Vec<Settlement> = entries.iter().map(release).collect();
        let settle = SettleBatch {
            stream: &stream,
            group: &self.key.group,
            consumer: &self.key.consumer_name,
            fence: None,
            entries: &entries,
        };
        if let Err(error) = self.backend.settle(settle).await {
            debug!(%stream, %error, "entries of a removed partition could not be released and stay pending");
        }
    }

    /// Handles a failed read: skips a stream of the wrong type for a while, else lets all partition consumers look for
    /// entries that the read may have fetched.
    fn on_read_error(&self, error: &StreamError) {
        let mut sources = self.lock();
        if let StreamError::WrongType { name } = error {
            for (stream, source) in &mut sources.all {
                if stream.as_str() == name {
                    source.skipped_until = Some(Instant::now() + WRONG_TYPE_PAUSE);
                    source.consumer.metrics.record_anomaly("wrong_type", 1);
                }
            }
            warn!(%error, "partition cannot be read");
            return;
        }
        warn!(group = %self.key.group, consumer = %self.key.consumer_name, %error, "read failed, retrying");
        // Also partitions that this read did not include: it was to deliver what an earlier read had fetched for them.
        let consumers: Vec<_> =
            sources.all.values().map(|source| Arc::clone(&source.consumer)).collect();
        drop(sources);
        for consumer in consumers {
            consumer.reclaim_unseen_soon();
        }
    }

    /// Closes a reader. Returns whether it certainly delivers nothing any more.
    async fn close(&self, reader: Box<dyn GroupReader>) -> bool {
        match reader.close().await {
            Ok(batches) => {
                self.deliver(batches).await;
                true
            }
            Err(error) => {
                debug!(%error, "closing the reader failed");
                self.on_read_error(&error);
                false
            }
        }
    }

    fn uncertainty_deadline(&self) -> Instant {
        Instant::now() + self.key.poll + UNCERTAIN_FOR
    }

    /// Confirms the removals of a request. If a failed read of a removed stream may still be executing, it is
    /// disconnected first. Returns whether they are confirmed; if not, after a pause.
    async fn confirm_removals(
        &self,
        request: &FetchRequest,
        uncertain_until: &mut Option<Instant>,
    ) -> bool {
        if request.has_removals && uncertain_until.is_some_and(|until| Instant::now() < until) {
            if let Err(error) = self.disconnect_removed(request.removals).await {
                warn!(group = %self.key.group, consumer = %self.key.consumer_name, %error,
                    "a failed read may still be executing; partitions are revoked when it has ended");
                tokio::time::sleep(BACKOFF_MIN).await;
                return false;
            }
            *uncertain_until = None;
        }
        self.publish_removals(request.removals);
        true
    }

    /// Ends reads of removed streams that may still be executing at the server.
    async fn disconnect_removed(&self, removals: u64) -> headwater_stream::Result<()> {
        let removed: Vec<StreamName> = {
            let sources = self.lock();
            let all = sources.all.iter();
            let removed =
                all.filter(|(_, source)| source.removal_seq.is_some_and(|n| n <= removals));
            removed.map(|(stream, _)| stream.clone()).collect()
        };
        let FetcherKey { group, consumer_name, .. } = &self.key;
        stream::iter(removed.iter().map(Ok))
            .try_for_each_concurrent(DISCONNECTS_AT_ONCE, async |stream| {
                match self.backend.disconnect_reader(stream, group, consumer_name).await? {
                    DisconnectOutcome::Disconnected { readers: ended } => debug!(%stream, ended, "disconnected our own reads"),
                    DisconnectOutcome::Denied { reason } => warn!(%stream, reason,
                        "a failed read cannot be disconnected; it may take messages from the next owner"),
                }
                Ok(())
            })
            .await
    }

    /// Puts removals up to this number into effect.
    fn publish_removals(&self, removals: u64) {
        if *self.removals_done.borrow() >= removals {
            return;
        }
        let mut sources = self.lock();
        sources.all.retain(|_, source| source.removal_seq.is_none_or(|number| number > removals));
        drop(sources);
        self.removals_done.send_if_modified(|done| {
            let is_new = *done < removals;
            *done = removals.max(*done);
            is_new
        });
    }
}
