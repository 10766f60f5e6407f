//! A backend that does what it is asked and then, as often as it is told to, loses the reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::*;

pub(crate) struct Forgetful {
    inner: Arc<dyn Backend>,
    /// Replies to `reclaim` and to `settle` that are still to be lost.
    pub(crate) reclaims: AtomicUsize,
    pub(crate) settles: AtomicUsize,
}

impl Forgetful {
    pub(crate) fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self { inner, reclaims: AtomicUsize::new(0), settles: AtomicUsize::new(0) })
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
    (impl $seam:ident { $(fn $name:ident($($arg:ident: $type:ty),*) -> $reply:ty $(, loses $left:ident)?;)* }) => {
        #[async_trait]
        impl $seam for Forgetful {
            $(async fn $name(&self, $($arg: $type),*) -> Result<$reply> {
                let reply = self.inner.$name($($arg),*).await;
                $(let reply = lose(&self.$left, reply);)?
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
        fn reader(group: &GroupName, consumer: &ConsumerName) -> Box<dyn GroupReader>;
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
