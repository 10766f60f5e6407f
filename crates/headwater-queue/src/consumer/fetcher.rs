//! The fetcher: one blocking read for all partitions that one consumer name reads for one group.
//!
//! Upstream: the backend. Downstream: each `partition_driver` receives its entries, as far as it gave credits
//! (`fetch_credits`).
//! Guarantees: a partition without credits is skipped and the others continue; after `remove` has returned, no read can
//! deliver from that partition; one stream of the wrong type does not stop the reading of the others.
//! All subscriptions of a process with the same group, consumer name, batch and poll share a fetcher, so that a
//! thousand topics need one read. On a cluster, a server that does not answer stops only the reading and the removal of
//! its own partitions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::FutureExt;
use headwater_stream::limits::READ_STREAMS_MAX;
use headwater_stream::{
    Backend, Backoff, ConsumerName, DeliveredEntry, DisconnectOutcome, GroupName, GroupReader,
    SettleAction, SettleBatch, Settlement, StreamBatch, StreamError, StreamName, StreamReadFailure,
};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};
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
/// Pause before failed reads that could not be disconnected are disconnected again.
const DISCONNECT_RETRY_AFTER: Duration = Duration::from_secs(1);
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
    uncertain: Mutex<UncertainReads>,
}

/// Failed reads that may still be executing at the server.
#[derive(Default)]
struct UncertainReads {
    /// Until when any stream may still be read.
    all_until: Option<Instant>,
    /// Until when these streams may still be read.
    until: HashMap<StreamName, Instant>,
}

impl UncertainReads {
    /// Until when this stream may still be read; `None` if no failed read of it can be executing.
    fn until(&self, stream: &StreamName) -> Option<Instant> {
        let until = self.all_until.max(self.until.get(stream).copied());
        until.filter(|until| *until > Instant::now())
    }
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
            uncertain: Mutex::default(),
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
        let mut removed = {
            let mut credits = self.shared.lock();
            let Some(source) = credits.find(stream, id) else { return };
            source.removal.get_or_insert_default().subscribe()
        };
        self.wake();
        // Fails when the source has been removed.
        let _ = removed.changed().await;
    }

    /// Removes a partition without waiting. A read in flight may still fetch entries for its next owner.
    pub(super) fn remove_now(&self, stream: &StreamName, id: u64) {
        self.shared.lock().remove(stream, id);
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
        // Calls that concern single partitions: no other partition waits for their servers. At most one for each.
        let mut calls = JoinSet::new();
        let mut retry = BACKOFF.timer();
        loop {
            while !calls.is_empty() && calls.try_join_next().is_some() {}
            let request = self.next_request();
            if request.streams.is_empty() {
                // A partition that awaits bulk capacity uses the reader again in a moment.
                if ((read_in_flight && !request.awaits_bulk) || !request.removals.is_empty())
                    && let Some(reader) = reader.take()
                {
                    self.close(reader, &mut calls).await;
                }
                read_in_flight &= reader.is_some();
                self.end_removals(&request.removals, &mut calls);
                self.wait_for_change(request.awaits_bulk).await;
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
                        let until = self.uncertainty_deadline();
                        self.set_uncertain(|uncertain| {
                            uncertain.until.retain(|_, until| *until > Instant::now());
                            uncertain
                                .until
                                .extend(streams.iter().map(|name| (name.clone(), until)));
                        });
                        self.on_streams_failed(&error, |stream| streams.contains(stream));
                    }
                    let entries: usize = batches.iter().map(|batch| batch.entries.len()).sum();
                    let is_empty = entries == 0;
                    let lens = batches.iter().map(|batch| (&batch.stream, batch.entries.len()));
                    self.lock().record_read(&request, lens);
                    self.deliver(batches, &mut calls);
                    if has_failures && is_empty {
                        // A server that rejects every read at once must not keep this task busy.
                        tokio::time::sleep(FAILURE_PAUSE).await;
                    }
                    if (1..=SMALL_BATCH).contains(&entries) {
                        // The handler tasks are on this thread, where they cannot be stolen, and preparing the next
                        // read may take longer than they do.
                        yield_to_queue().await;
                    }
                    self.end_removals(&request.removals, &mut calls);
                    if is_empty && request.awaits_bulk {
                        self.wait_for_change(true).await;
                    }
                }
                Some(Err(error)) => {
                    read_in_flight = false;
                    // The partition consumers reclaim what the failed read may have fetched.
                    self.on_read_error(&error);
                    let is_wrong_type = matches!(error, StreamError::WrongType { .. });
                    if !is_wrong_type {
                        self.set_all_uncertain();
                    }
                    self.end_removals(&request.removals, &mut calls);
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

    fn deliver(
        self: &Arc<Self>,
        batches: Vec<StreamBatch<DeliveredEntry>>,
        calls: &mut JoinSet<()>,
    ) {
        for batch in self.dispatch(batches) {
            calls.spawn(Arc::clone(self).release_unrouted(batch));
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
    async fn release_unrouted(
        self: Arc<Self>,
        StreamBatch { stream, entries }: StreamBatch<DeliveredEntry>,
    ) {
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

    /// Closes a reader. Afterwards it delivers nothing any more, except by failed reads.
    async fn close(self: &Arc<Self>, reader: Box<dyn GroupReader>, calls: &mut JoinSet<()>) {
        match reader.close().await {
            Ok(batches) => self.deliver(batches, calls),
            Err(error) => {
                debug!(%error, "closing the reader failed");
                self.on_read_error(&error);
                self.set_all_uncertain();
            }
        }
    }

    fn uncertainty_deadline(&self) -> Instant {
        Instant::now() + self.key.poll + UNCERTAIN_FOR
    }

    /// Records that a read has failed that may have included any stream.
    fn set_all_uncertain(&self) {
        let until = self.uncertainty_deadline();
        self.set_uncertain(|uncertain| uncertain.all_until = Some(until));
    }

    fn set_uncertain(&self, change: impl FnOnce(&mut UncertainReads)) {
        change(&mut self.uncertain.lock().expect("no code panics while it holds the reads"));
    }

    /// Ends removals of partitions that no read includes any more. If a failed read of one may still be executing, it is
    /// disconnected first, while the others are read.
    fn end_removals(self: &Arc<Self>, removals: &[(StreamName, u64)], calls: &mut JoinSet<()>) {
        if removals.is_empty() {
            return;
        }
        let uncertain = self.uncertain.lock().expect("no code panics while it holds the reads");
        let mut credits = self.lock();
        for (stream, id) in removals {
            let Some(until) = uncertain.until(stream) else {
                credits.remove(stream, *id);
                continue;
            };
            let source = credits.find(stream, *id);
            if let Some(removal) = source.and_then(|source| source.removal.as_mut()) {
                removal.is_disconnecting = true;
                let (fetch_loop, removed) = (Arc::clone(self), removal.subscribe());
                calls.spawn(fetch_loop.disconnect_removed(stream.clone(), *id, until, removed));
            }
        }
    }

    /// Ends failed reads of a removed stream, then its removal. They have ended by `until` in any case.
    async fn disconnect_removed(
        self: Arc<Self>,
        stream: StreamName,
        id: u64,
        until: Instant,
        mut removed: watch::Receiver<()>,
    ) {
        let disconnected = async {
            let mut has_failed = false;
            while let Err(error) = self.disconnect(&stream).await {
                if std::mem::replace(&mut has_failed, true) {
                    debug!(%stream, %error, "a failed read could not be disconnected, retrying");
                } else {
                    warn!(%stream, group = %self.key.group, consumer = %self.key.consumer_name, %error,
                        "a failed read may still be executing; the partition is revoked when it has ended");
                }
                tokio::time::sleep(DISCONNECT_RETRY_AFTER).await;
            }
        };
        tokio::select! {
            // Its lease was lost. If the stream is read again, this must not disconnect the new reads.
            _ = removed.changed() => {}
            _ = timeout_at(until, disconnected) => self.lock().remove(&stream, id),
        }
    }

    /// Ends reads of a stream that may still be executing at the server.
    async fn disconnect(&self, stream: &StreamName) -> headwater_stream::Result<()> {
        let FetcherKey { group, consumer_name, .. } = &self.key;
        // Reads that fail from now on are not covered.
        let covered = self.uncertainty_deadline();
        match self.backend.disconnect_reader(stream, group, consumer_name).await? {
            DisconnectOutcome::Disconnected { readers: ended } => {
                debug!(%stream, ended, "disconnected our own reads");
            }
            DisconnectOutcome::Denied { reason } => warn!(%stream, reason,
                "a failed read cannot be disconnected; it may take messages from the next owner"),
        }
        let is_one_server = self.backend.cluster_slot("").is_none();
        self.set_uncertain(|uncertain| {
            uncertain.until.retain(|name, until| name != stream || *until >= covered);
            // There, all reads of this consumer have ended.
            uncertain.all_until.take_if(|until| is_one_server && *until < covered);
        });
        Ok(())
    }
}
