//! A backend that does what it is asked and then, as often as it is told to, loses the reply; and whose readers break off
//! while what they asked for is still under way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::*;
use tokio::sync::watch;

pub(crate) struct Forgetful {
    inner: Arc<dyn Backend>,
    readers: Arc<Readers>,
    /// Replies to `reclaim` and to `settle` that are still to be lost.
    pub(crate) reclaims: AtomicUsize,
    pub(crate) settles: AtomicUsize,
}

impl Forgetful {
    pub(crate) fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        let (readers, reclaims, settles) = Default::default();
        Arc::new(Self { inner, readers, reclaims, settles })
    }

    /// Reads fail that are under way. What they asked of the server stays there.
    pub(crate) fn break_off_reads(&self) {
        self.readers.breaks.send_modify(|breaks| *breaks += 1);
    }

    /// How many reads have failed so.
    pub(crate) fn broken_reads(&self) -> usize {
        self.readers.broken.lock().expect("nobody panics with it").len()
    }

    fn breaking(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
        reader: Result<Box<dyn GroupReader>>,
    ) -> Result<Box<dyn GroupReader>> {
        Ok(Box::new(Breaking {
            backend: Arc::clone(&self.inner),
            who: (group.clone(), consumer.clone()),
            breaks: self.readers.breaks.subscribe(),
            readers: Arc::clone(&self.readers),
            inner: Some(reader?),
        }))
    }
}

#[derive(Default)]
struct Readers {
    breaks: watch::Sender<usize>,
    /// Those that broke off, with their connections.
    broken: Mutex<Vec<Box<dyn GroupReader>>>,
}

struct Breaking {
    backend: Arc<dyn Backend>,
    who: (GroupName, ConsumerName),
    breaks: watch::Receiver<usize>,
    readers: Arc<Readers>,
    inner: Option<Box<dyn GroupReader>>,
}

#[async_trait]
impl GroupReader for Breaking {
    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<Batch<Delivery>>> {
        if self.inner.is_none() {
            self.inner = Some(self.backend.reader(&self.who.0, &self.who.1).await?);
        }
        if let Some(inner) = &mut self.inner {
            tokio::select! {
                biased;
                answer = inner.read(streams, count, wait) => return answer,
                _ = self.breaks.changed() => {}
            }
        }
        self.readers.broken.lock().expect("nobody panics with it").extend(self.inner.take());
        Err(StreamError::Unavailable { problem: "the read broke off".to_owned(), source: None })
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<Batch<Delivery>>> {
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

/// Passes calls on.
macro_rules! pass_on {
    (impl $seam:ident { $(fn $name:ident($($arg:ident: $type:ty),*) -> $reply:ty $(, loses $left:ident)? $(, by $wrap:ident($($with:ident),*))?;)* }) => {
        #[async_trait]
        impl $seam for Forgetful {
            $(async fn $name(&self, $($arg: $type),*) -> Result<$reply> {
                let reply = self.inner.$name($($arg),*).await;
                $(let reply = lose(&self.$left, reply);)?
                $(let reply = self.$wrap($($with,)* reply);)?
                reply
            })*
        }
    };
}

#[async_trait]
impl Backend for Forgetful {
    fn describe(&self) -> Description {
        self.inner.describe()
    }

    fn cluster_slot(&self, key: &str) -> Option<u16> {
        self.inner.cluster_slot(key)
    }

    async fn now(&self) -> Result<Timestamp> {
        self.inner.now().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

pass_on! {
    impl Streams {
        fn append(stream: &StreamName, entries: &[Fields], retention: &Retention) -> Vec<EntryId>;
        fn append_once(stream: &StreamName, entries: &[Once], keep: Duration, retention: &Retention) -> Vec<Appended>;
        fn appended(stream: &StreamName, ids: &[&str]) -> Vec<Option<EntryId>>;
        fn ensure_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool;
        fn remove_group(stream: &StreamName, group: &GroupName) -> bool;
        fn reset_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool;
        fn reader(group: &GroupName, consumer: &ConsumerName) -> Box<dyn GroupReader>, by breaking(group, consumer);
        fn silence(stream: &StreamName, group: &GroupName, consumer: &ConsumerName) -> Silenced;
        fn tail() -> Box<dyn TailReader>;
        fn settle(settle: Settle<'_>) -> Settled, loses settles;
        fn keep_alive(stream: &StreamName, group: &GroupName, consumer: &ConsumerName, ids: &[EntryId]) -> Vec<EntryId>;
        fn reclaim(reclaim: Reclaim<'_>) -> Reclaimed, loses reclaims;
        fn pending(query: PendingQuery<'_>) -> Vec<Pending>;
        fn range(stream: &StreamName, range: Range) -> Vec<Entry>;
        fn trim(stream: &StreamName, retention: &Retention, guard: TrimGuard) -> Trimmed;
        fn delete_entries(stream: &StreamName, ids: &[EntryId]) -> usize;
        fn delete_stream(stream: &StreamName) -> bool;
        fn stats(stream: &StreamName) -> Option<StreamStats>;
        fn remove_idle_consumers(stream: &StreamName, group: &GroupName, idle: Duration) -> Vec<ConsumerName>;
    }
}

pass_on! {
    impl Delays {
        fn put_aside(delays: &DelayName, items: &[PutAside]) -> Vec<DelayId>;
        fn cancel(delays: &DelayName, id: DelayId) -> bool;
        fn take_due(delays: &DelayName, count: usize) -> Vec<Returned>;
        fn wait_due(delays: &DelayName, wait: Duration) -> bool;
        fn delay_stats(delays: &DelayName) -> DelayStats;
        fn delayed(delays: &DelayName, offset: usize, count: usize) -> Vec<Delayed>;
        fn delete_delays(delays: &DelayName) -> bool;
    }
}

pass_on! {
    impl Leases {
        fn acquire(lease: &LeaseName, holder: &HolderName, ttl: Duration) -> Acquire;
        fn renew(holder: &HolderName, leases: &[Fence], ttl: Duration) -> Vec<Renewal>;
        fn release(holder: &HolderName, leases: &[Fence]) -> usize;
        fn leases(leases: &[LeaseName]) -> Vec<Option<LeaseInfo>>;
        fn watch(prefix: &str) -> Box<dyn LeaseWatch>;
    }
}

pass_on! {
    impl Registry {
        fn set_add(set: &SetName, members: &[&str], ttl: Option<Duration>) -> usize;
        fn set_remove(set: &SetName, members: &[&str]) -> usize;
        fn set_members(set: &SetName) -> Vec<String>;
        fn set_contains(set: &SetName, members: &[&str]) -> Vec<bool>;
        fn map_create(map: &MapName, fields: &RegistryMap) -> bool;
        fn map_update(map: &MapName, expect: Option<(&str, &[u8])>, fields: &RegistryMap) -> bool;
        fn map_get(map: &MapName) -> Option<RegistryMap>;
        fn map_delete(map: &MapName) -> bool;
    }
}

pass_on! {
    impl Dedup {
        fn dedup_begin(scope: &DedupScope, ids: &[&str], hold: Duration) -> Vec<Begin>;
        fn dedup_finish(scope: &DedupScope, done: &[(&str, Bytes)], keep: Duration) -> ();
        fn dedup_abandon(scope: &DedupScope, ids: &[&str]) -> ();
    }
}
