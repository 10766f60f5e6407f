//! A backend that executes calls but loses a given number of replies, or does not execute them, whose reads can be failed
//! while they still block at the server, and whose readers cannot be closed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::*;
use tokio::sync::watch;

pub(crate) struct LossyBackend {
    inner: Arc<dyn Backend>,
    readers: Arc<Readers>,
    /// Number of replies to `reclaim` and to `settle` still to be lost.
    pub(crate) reclaims: AtomicUsize,
    pub(crate) settles: AtomicUsize,
    /// Number of updates of maps that are still to fail without an effect.
    pub(crate) failing_updates: AtomicUsize,
    /// Holds back the creation of groups.
    pub(crate) group_gate: CallGate,
    /// Holds back additions to sets.
    pub(crate) set_gate: CallGate,
}

/// Holds calls back before they reach the server, while it is closed.
#[derive(Default)]
pub(crate) struct CallGate {
    is_closed: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

impl CallGate {
    pub(crate) fn close(&self) {
        self.is_closed.send_replace(true);
    }

    pub(crate) fn open(&self) {
        self.is_closed.send_replace(false);
    }

    /// Waits until so many calls have been held back.
    pub(crate) async fn until_waiting(&self, calls: usize) {
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting >= calls).await;
    }

    async fn pass(&self) {
        let mut is_closed = self.is_closed.subscribe();
        if *is_closed.borrow() {
            self.waiting.send_modify(|waiting| *waiting += 1);
            let _ = is_closed.wait_for(|is_closed| !is_closed).await;
        }
    }
}

impl LossyBackend {
    pub(crate) fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            readers: Arc::default(),
            reclaims: AtomicUsize::default(),
            settles: AtomicUsize::default(),
            failing_updates: AtomicUsize::default(),
            group_gate: CallGate::default(),
            set_gate: CallGate::default(),
        })
    }

    /// Fails the reads in flight. They keep blocking at the server.
    pub(crate) fn fail_reads(&self) {
        self.readers.failures.send_modify(|failures| *failures += 1);
    }

    /// Makes closing a reader fail.
    pub(crate) fn fail_closes(&self) {
        self.readers.are_closes_failing.store(true, Ordering::SeqCst);
    }

    /// How many reads were failed.
    pub(crate) fn failed_reads(&self) -> usize {
        self.readers.failed.lock().expect("no code panics while it holds it").len()
    }

    fn failing_reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
        reader: Result<Box<dyn GroupReader>>,
    ) -> Result<Box<dyn GroupReader>> {
        Ok(Box::new(FailingReader {
            backend: Arc::clone(&self.inner),
            identity: (group.clone(), consumer.clone()),
            failures: self.readers.failures.subscribe(),
            readers: Arc::clone(&self.readers),
            inner: Some(reader?),
        }))
    }
}

#[derive(Default)]
struct Readers {
    failures: watch::Sender<usize>,
    are_closes_failing: AtomicBool,
    /// Failed readers, with their connections.
    failed: Mutex<Vec<Box<dyn GroupReader>>>,
}

struct FailingReader {
    backend: Arc<dyn Backend>,
    identity: (GroupName, ConsumerName),
    failures: watch::Receiver<usize>,
    readers: Arc<Readers>,
    inner: Option<Box<dyn GroupReader>>,
}

#[async_trait]
impl GroupReader for FailingReader {
    fn require_groups(&mut self) {
        self.inner.iter_mut().for_each(|inner| inner.require_groups());
    }

    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        if self.inner.is_none() {
            let mut inner = self.backend.reader(&self.identity.0, &self.identity.1).await?;
            // As the consumer wants it.
            inner.require_groups();
            self.inner = Some(inner);
        }
        if let Some(inner) = &mut self.inner {
            tokio::select! {
                biased;
                result = inner.read(streams, count, wait) => return result,
                _ = self.failures.changed() => {}
            }
        }
        self.readers
            .failed
            .lock()
            .expect("no code panics while it holds it")
            .extend(self.inner.take());
        Err(StreamError::Unavailable { problem: "the read failed".to_owned(), source: None })
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        if self.readers.are_closes_failing.load(Ordering::SeqCst) {
            let problem = "the reader cannot be closed".to_owned();
            return Err(StreamError::Unavailable { problem, source: None });
        }
        match self.inner.take() {
            Some(inner) => inner.close().await,
            None => Ok(Vec::new()),
        }
    }
}

fn lose<T>(left: &AtomicUsize, reply: Result<T>) -> Result<T> {
    let is_lost = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    match is_lost {
        Ok(_) => {
            Err(StreamError::Unavailable { problem: "the reply was lost".to_owned(), source: None })
        }
        Err(_) => reply,
    }
}

/// Delegates calls.
macro_rules! delegate {
    (impl $seam:ident { $(fn $name:ident($($arg:ident: $type:ty),*) -> $reply:ty $(, after $gate:ident)? $(, fails $failing:ident)? $(, loses $left:ident)? $(, by $wrap:ident($($with:ident),*))?;)* }) => {
        #[async_trait]
        impl $seam for LossyBackend {
            $(async fn $name(&self, $($arg: $type),*) -> Result<$reply> {
                $(self.$gate.pass().await;)?
                $(lose(&self.$failing, Ok(()))?;)?
                let reply = self.inner.$name($($arg),*).await;
                $(let reply = lose(&self.$left, reply);)?
                $(let reply = self.$wrap($($with,)* reply);)?
                reply
            })*
        }
    };
}

#[async_trait]
impl Backend for LossyBackend {
    fn describe(&self) -> BackendDescription {
        self.inner.describe()
    }

    fn cluster_slot(&self, key: &str) -> Option<u16> {
        self.inner.cluster_slot(key)
    }

    async fn now(&self) -> Result<Timestamp> {
        self.inner.now().await
    }

    async fn server_run(&self, key: &str) -> Result<Option<String>> {
        self.inner.server_run(key).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

delegate! {
    impl Streams {
        fn append(stream: &StreamName, entries: &[Fields], retention: &Retention) -> Vec<EntryId>;
        fn append_once(stream: &StreamName, entries: &[IdempotentEntry], keep: Duration, retention: &Retention) -> Vec<AppendedEntry>;
        fn appended(stream: &StreamName, ids: &[&str]) -> Vec<Option<EntryId>>;
        fn ensure_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool, after group_gate;
        fn ensure_group_if(stream: &StreamName, group: &GroupName, start: GroupStart, condition: GroupCondition<'_>) -> bool, after group_gate;
        fn remove_group(stream: &StreamName, group: &GroupName) -> bool;
        fn reset_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool;
        fn reader(group: &GroupName, consumer: &ConsumerName) -> Box<dyn GroupReader>, by failing_reader(group, consumer);
        fn disconnect_reader(stream: &StreamName, group: &GroupName, consumer: &ConsumerName) -> DisconnectOutcome;
        fn tail() -> Box<dyn TailReader>;
        fn settle(settle: SettleBatch<'_>) -> SettleResult, loses settles;
        fn keep_alive(stream: &StreamName, group: &GroupName, consumer: &ConsumerName, ids: &[EntryId]) -> Vec<EntryId>;
        fn reclaim(reclaim: ReclaimRequest<'_>) -> ReclaimResult, loses reclaims;
        fn pending(query: PendingDeliveryQuery<'_>) -> Vec<PendingDelivery>;
        fn range(stream: &StreamName, range: Range) -> Vec<Entry>;
        fn trim(stream: &StreamName, retention: &Retention, guard: TrimGuard) -> TrimResult;
        fn delete_entries(stream: &StreamName, ids: &[EntryId]) -> usize;
        fn delete_stream(stream: &StreamName) -> bool;
        fn rename_stream(from: &StreamName, to: &StreamName) -> bool;
        fn stats(stream: &StreamName) -> Option<StreamStats>;
        fn remove_consumer(stream: &StreamName, group: &GroupName, consumer: &ConsumerName) -> bool;
        fn remove_idle_consumers(stream: &StreamName, group: &GroupName, idle: Duration) -> Vec<ConsumerName>;
    }
}

delegate! {
    impl Delays {
        fn schedule(delays: &DelayName, items: &[ScheduleRequest]) -> Vec<DelayId>;
        fn cancel(delays: &DelayName, id: DelayId) -> bool;
        fn promote_due(delays: &DelayName, count: usize) -> Vec<PromotedEntry>;
        fn wait_until_due(delays: &DelayName, wait: Duration) -> bool;
        fn delay_stats(delays: &DelayName) -> DelayStats;
        fn delayed(delays: &DelayName, offset: usize, count: usize) -> Vec<DelayedEntry>;
        fn delete_delay_set(delays: &DelayName) -> bool;
    }
}

delegate! {
    impl Leases {
        fn acquire(lease: &LeaseName, holder: &HolderName, ttl: Duration) -> AcquireResult;
        fn renew(holder: &HolderName, leases: &[Fence], ttl: Duration) -> Vec<Renewal>;
        fn release(holder: &HolderName, leases: &[Fence]) -> usize;
        fn leases(leases: &[LeaseName]) -> Vec<Option<LeaseInfo>>;
        fn watch(prefix: &str) -> Box<dyn LeaseWatch>;
    }
}

delegate! {
    impl Registry {
        fn set_add(set: &SetName, members: &[&str], ttl: Option<Duration>) -> usize, after set_gate;
        fn set_remove(set: &SetName, members: &[&str]) -> usize;
        fn set_members(set: &SetName) -> Vec<String>;
        fn set_contains(set: &SetName, members: &[&str]) -> Vec<bool>;
        fn map_create(map: &MapName, fields: &RegistryMap) -> bool;
        fn map_update(map: &MapName, expect: Option<(&str, &[u8])>, fields: &RegistryMap) -> bool, fails failing_updates;
        fn map_get(map: &MapName) -> Option<RegistryMap>;
        fn map_delete(map: &MapName) -> bool;
    }
}

delegate! {
    impl Dedup {
        fn dedup_begin(scope: &DedupScope, ids: &[&str], hold: Duration) -> Vec<DedupStatus>;
        fn dedup_finish(scope: &DedupScope, done: &[(&str, Bytes)], keep: Duration) -> ();
        fn dedup_abandon(scope: &DedupScope, ids: &[&str]) -> ();
    }
}
