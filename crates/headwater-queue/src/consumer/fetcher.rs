//! The fetcher: one blocking read for all partitions that one consumer name reads for one group.
//!
//! Upstream: the backend. Downstream: each `partition_driver` receives its entries, as far as it gave credits
//! (`fetch_credits`).
//! Guarantees: a partition without credits is skipped and the others continue; after `remove` has returned, no read can
//! deliver from that partition; one stream of the wrong type does not stop the reading of the others.
//! All subscriptions of a process with the same group, consumer name, batch and poll share a fetcher, so that a
//! thousand topics need one read. On a cluster, a server that does not answer stops only the reading of its own partitions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::{FutureExt, TryStreamExt, stream};
use headwater_stream::limits::READ_STREAMS_MAX;
use headwater_stream::{
    Backend, Backoff, ConsumerName, DeliveredEntry, DisconnectOutcome, GroupName, GroupReader,
    SettleAction, SettleBatch, Settlement, StreamBatch, StreamError, StreamName, StreamReadFailure,
};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::capacity_pool::largest_bytes;
use super::fetch_credits::{FetchCredits, FetchRequest, FetchSource, REGULAR_FETCH_EVERY};
use super::handler_pool::yield_to_queue;
use super::partition_context::PartitionContext;
use super::partition_driver::DriverEvent;
use super::partition_state::PartitionEvent;

/// How long a stream of the wrong type is skipped.
const WRONG_TYPE_PAUSE: Duration = Duration::from_secs(2);
/// How long a failed read may still be executing at the server, beyond its own wait time.
const UNCERTAIN_FOR: Duration = Duration::from_secs(30);
/// Streams whose reads are disconnected concurrently.
const DISCONNECTS_AT_ONCE: usize = 16;
/// Pause after a read in which only failures arrived.
const FAILURE_PAUSE: Duration = Duration::from_millis(50);
/// After a read of at most this many entries, their handlers run before the next read.
const SMALL_BATCH: usize = 8;
const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// How often a fetcher looks for free capacity of a subscription.
const CAPACITY_CHECK_EVERY: Duration = Duration::from_millis(500);
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

/// Where the entries of a partition go.
pub(super) struct FetchTarget {
    pub(super) context: Arc<PartitionContext>,
    pub(super) events: UnboundedSender<DriverEvent>,
}

struct FetchLoop {
    backend: Arc<dyn Backend>,
    key: FetcherKey,
    credits: Mutex<FetchCredits<FetchTarget>>,
    changed: Notify,
    /// Removals up to this number are in effect.
    removals_done: watch::Sender<u64>,
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fetcher {
    pub(super) fn start(backend: Arc<dyn Backend>, key: FetcherKey) -> Self {
        let shared = Arc::new(FetchLoop {
            backend,
            credits: Mutex::new(FetchCredits::new(key.batch, key.poll)),
            key,
            changed: Notify::new(),
            removals_done: watch::Sender::new(0),
        });
        let task = tokio::spawn(Arc::clone(&shared).run());
        Self { shared, task }
    }

    /// Whether one read can include one more partition. Each partition holds one handle.
    pub(super) fn has_capacity(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) <= READ_STREAMS_MAX
    }

    /// Adds a partition, which is read as far as it gets credits.
    pub(super) fn add(&self, id: u64, target: FetchTarget) {
        let PartitionContext { subscription, policy, .. } = &*target.context;
        let (pool, stream) = (Arc::clone(&subscription.pool), policy.stream.clone());
        let is_spread = policy.topic.layout.is_spread();
        let source = FetchSource::new(id, target, pool, is_spread);
        self.shared.lock().sources.insert(stream, source);
    }

    /// Stops reading a partition, or continues if its driver knows of all failed reads.
    pub(super) fn set_reading(&self, stream: &StreamName, id: u64, recovered_reads: Option<u64>) {
        let mut credits = self.shared.lock();
        let Some(source) = credits.find(stream, id) else { return };
        source.is_reading = recovered_reads.is_some();
        source.recovered_reads = recovered_reads.unwrap_or(source.recovered_reads);
        drop(credits);
        self.wake();
    }

    /// Changes the credits of a partition.
    pub(super) fn change_credits(
        &self,
        stream: &StreamName,
        id: u64,
        change: isize,
        is_fast: bool,
    ) {
        if self.shared.lock().change(stream, id, change, is_fast) {
            self.wake();
        }
    }

    /// Plans the next read again: a partition has credits, was added or removed, or capacity is free.
    pub(super) fn wake(&self) {
        if self.shared.lock().mark_woken() {
            self.shared.changed.notify_one();
        }
    }

    /// Stops reading a partition. When it returns, no read can deliver from it, and reads in flight have delivered.
    pub(super) async fn remove(&self, stream: &StreamName, id: u64) {
        let mut removals_done = self.shared.removals_done.subscribe();
        let number = {
            let mut credits = self.shared.lock();
            let number = credits.removals + 1;
            let Some(source) = credits.find(stream, id) else { return };
            let number = *source.removal_seq.get_or_insert(number);
            credits.removals = credits.removals.max(number);
            number
        };
        self.wake();
        // Fails if the fetch loop has ended: then nothing reads.
        let _ = removals_done.wait_for(|done| *done >= number).await;
    }

    /// Removes a partition without waiting. A read in flight may still fetch entries for its next owner.
    pub(super) fn remove_now(&self, stream: &StreamName, id: u64) {
        let mut credits = self.shared.lock();
        if credits.find(stream, id).is_some() {
            credits.sources.remove(stream);
        }
        drop(credits);
        self.wake();
    }
}

impl FetchLoop {
    fn lock(&self) -> MutexGuard<'_, FetchCredits<FetchTarget>> {
        self.credits.lock().expect("no code panics while it holds the credits")
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
                None => self.open_reader().await,
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
                    let failures = reader.as_mut().map(|open| open.take_failures());
                    let failures = failures.unwrap_or_default();
                    let has_failures = !failures.is_empty();
                    for StreamReadFailure { streams, error } in failures {
                        if matches!(error, StreamError::WrongType { .. }) {
                            self.on_read_error(&error);
                            continue;
                        }
                        uncertain_until = Some(self.uncertainty_deadline());
                        self.on_streams_failed(&error, |stream| streams.contains(stream));
                    }
                    let entries: usize = batches.iter().map(|batch| batch.entries.len()).sum();
                    let is_empty = entries == 0;
                    let lens = batches.iter().map(|batch| (&batch.stream, batch.entries.len()));
                    self.lock().record_read(&request, lens);
                    self.deliver(batches).await;
                    if has_failures && is_empty {
                        // A server that rejects every read at once must not keep this task busy.
                        tokio::time::sleep(FAILURE_PAUSE).await;
                    }
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

    async fn open_reader(&self) -> headwater_stream::Result<Box<dyn GroupReader>> {
        let FetcherKey { group, consumer_name, .. } = &self.key;
        let mut reader = self.backend.reader(group, consumer_name).await?;
        // The partition consumers decide whether a missing group is created.
        reader.require_groups();
        Ok(reader)
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
        let now = Instant::now();
        let is_due_later = |until: &Instant| *until > now;
        let (next, awaits_capacity) = {
            let credits = self.lock();
            let skipped = credits.sources.values().filter_map(|source| source.skipped_until);
            (skipped.filter(is_due_later).min(), credits.awaits_capacity())
        };
        let longest = match (awaits_bulk, awaits_capacity) {
            (true, _) => REGULAR_FETCH_EVERY,
            // Partitions of another fetcher may have freed it.
            (false, true) => CAPACITY_CHECK_EVERY,
            (false, false) => Duration::from_secs(3600),
        };
        let latest = now + longest;
        let until = next.map_or(latest, |next| next.min(latest));
        tokio::select! {
            () = self.changed.notified() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }

    /// Plans the next read.
    fn next_request(&self) -> FetchRequest {
        let mut credits = self.lock();
        // This plan covers a wake-up that came meanwhile; it must not cancel the read.
        let _ = self.changed.notified().now_or_never();
        credits.next_request(Instant::now(), |target| target.context.lease.is_valid())
    }

    async fn deliver(&self, batches: Vec<StreamBatch<DeliveredEntry>>) {
        for batch in self.dispatch(batches) {
            self.release_unrouted(batch).await;
        }
    }

    /// Passes each batch to its partition. Returns batches of partitions that are no longer consumed here.
    fn dispatch(
        &self,
        batches: Vec<StreamBatch<DeliveredEntry>>,
    ) -> Vec<StreamBatch<DeliveredEntry>> {
        let mut unrouted = Vec::new();
        // The largest message of each subscription.
        let mut largest = HashMap::new();
        let mut credits = self.lock();
        for batch in batches {
            let Some(source) = credits.sources.get_mut(&batch.stream) else {
                unrouted.push(batch);
                continue;
            };
            let entries = batch.entries.len();
            source.credits -= isize::try_from(entries).unwrap_or(isize::MAX);
            source.pool.add_in_flight(entries);
            let (_, most) = largest
                .entry(Arc::as_ptr(&source.pool))
                .or_insert_with(|| (Arc::clone(&source.pool), 0));
            *most = largest_bytes(&batch.entries).max(*most);
            let event = DriverEvent::State(PartitionEvent::EntriesRead(batch.entries));
            if source.target.events.send(event).is_err() {
                // It terminated: they stay pending for the next owner.
                source.pool.remove_in_flight(entries);
            }
        }
        drop(credits);
        largest.into_values().for_each(|(pool, bytes)| pool.record_largest(bytes));
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

    /// Handles a failed read: skips a stream of the wrong type for a while, else lets all partitions look for entries
    /// that the read may have fetched.
    fn on_read_error(&self, error: &StreamError) {
        let mut credits = self.lock();
        if let StreamError::WrongType { name } = error {
            for (stream, source) in &mut credits.sources {
                if stream.as_str() == name {
                    source.skipped_until = Some(Instant::now() + WRONG_TYPE_PAUSE);
                    source.target.context.metrics.record_anomaly("wrong_type", 1);
                }
            }
            warn!(%error, "partition cannot be read");
            return;
        }
        drop(credits);
        // Also partitions that this read did not include: it was to deliver what an earlier read had fetched for them.
        self.on_streams_failed(error, |_| true);
    }

    /// Lets these partitions look for entries that a failed read may have fetched. They are read again after that.
    fn on_streams_failed(&self, error: &StreamError, is_failed: impl Fn(&StreamName) -> bool) {
        warn!(group = %self.key.group, consumer = %self.key.consumer_name, %error, "read failed, retrying");
        let mut credits = self.lock();
        for (_, source) in credits.sources.iter_mut().filter(|(stream, _)| is_failed(stream)) {
            source.failed_reads += 1;
            // Fails if it terminated.
            let _ = source.target.events.send(DriverEvent::State(PartitionEvent::ReadFailed));
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
            let credits = self.lock();
            let all = credits.sources.iter();
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
        let mut credits = self.lock();
        credits
            .sources
            .retain(|_, source| source.removal_seq.is_none_or(|number| number > removals));
        drop(credits);
        self.removals_done.send_if_modified(|done| {
            let is_new = *done < removals;
            *done = removals.max(*done);
            is_new
        });
    }
}
