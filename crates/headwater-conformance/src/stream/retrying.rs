//! A backend that retries calls after `Unavailable`.
//!
//! Upstream: a test environment on a faulty network. Downstream: the backend under test.
//! Guarantees: a call fails with `Unavailable` only after 20 s of retries. Entries that were delivered to a failed read are
//! found in the list of pending entries and returned once. Not here: deduplication of retried calls; an append whose reply
//! was lost is applied twice.

mod reader;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::*;
use tokio::time::Instant;

use self::reader::{RetryingReader, RetryingTail};

const PAUSE: Duration = Duration::from_millis(20);
/// Longer outages are not tested.
pub(super) const GIVE_UP_AFTER: Duration = Duration::from_secs(20);

/// Retries the calls of another backend.
#[derive(Clone)]
pub struct Retrying {
    inner: Arc<dyn Backend>,
    before: Arc<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Retrying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retrying").field("inner", &self.inner.describe()).finish_non_exhaustive()
    }
}

impl Retrying {
    /// Retries the calls of `inner`; `before` runs before each call and may inject a fault.
    pub fn new(inner: Arc<dyn Backend>, before: impl Fn() + Send + Sync + 'static) -> Self {
        Self { inner, before: Arc::new(before) }
    }

    async fn repeat<T, F: Future<Output = Result<T>>>(
        &self,
        call: impl Fn() -> F + Send,
    ) -> Result<T> {
        let started = Instant::now();
        (self.before)();
        loop {
            match call().await {
                Err(StreamError::Unavailable { .. }) if started.elapsed() < GIVE_UP_AFTER => {
                    tokio::time::sleep(PAUSE).await;
                }
                answer => return answer,
            }
        }
    }
}

#[async_trait]
impl Backend for Retrying {
    fn describe(&self) -> BackendDescription {
        self.inner.describe()
    }

    fn call_deadline(&self) -> Option<Duration> {
        self.inner.call_deadline().map(|deadline| deadline + GIVE_UP_AFTER)
    }

    fn cluster_slot(&self, key: &str) -> Option<u16> {
        self.inner.cluster_slot(key)
    }

    async fn now(&self) -> Result<Timestamp> {
        self.repeat(|| self.inner.now()).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// Implements a trait: each call that is listed by its signature is retried; other items follow the list.
macro_rules! retrying {
    ($trait:ident {
        $($name:ident($($arg:ident: $type:ty),*) -> $output:ty;)*
    } $($other:tt)*) => {
        #[async_trait]
        impl $trait for Retrying {
            $(async fn $name(&self, $($arg: $type),*) -> Result<$output> {
                self.repeat(|| self.inner.$name($($arg),*)).await
            })*

            $($other)*
        }
    };
}

retrying! {
    Streams {
        append(stream: &StreamName, entries: &[Fields], retention: &Retention) -> Vec<EntryId>;
        append_once(
            stream: &StreamName, entries: &[IdempotentEntry], keep: Duration, retention: &Retention
        ) -> Vec<AppendedEntry>;
        appended(stream: &StreamName, ids: &[&str]) -> Vec<Option<EntryId>>;
        ensure_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool;
        ensure_group_if(
            stream: &StreamName, group: &GroupName, start: GroupStart, condition: GroupCondition<'_>
        ) -> bool;
        remove_group(stream: &StreamName, group: &GroupName) -> bool;
        reset_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool;
        disconnect_reader(
            stream: &StreamName, group: &GroupName, consumer: &ConsumerName
        ) -> DisconnectOutcome;
        settle(settle: SettleBatch<'_>) -> SettleResult;
        keep_alive(
            stream: &StreamName, group: &GroupName, consumer: &ConsumerName, ids: &[EntryId]
        ) -> Vec<EntryId>;
        reclaim(reclaim: ReclaimRequest<'_>) -> ReclaimResult;
        pending(query: PendingDeliveryQuery<'_>) -> Vec<PendingDelivery>;
        range(stream: &StreamName, range: Range) -> Vec<Entry>;
        trim(stream: &StreamName, retention: &Retention, guard: TrimGuard) -> TrimResult;
        delete_entries(stream: &StreamName, ids: &[EntryId]) -> usize;
        delete_stream(stream: &StreamName) -> bool;
        rename_stream(from: &StreamName, to: &StreamName) -> bool;
        stats(stream: &StreamName) -> Option<StreamStats>;
        remove_consumer(stream: &StreamName, group: &GroupName, consumer: &ConsumerName) -> bool;
        remove_idle_consumers(
            stream: &StreamName, group: &GroupName, idle: Duration
        ) -> Vec<ConsumerName>;
    }

    async fn reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>> {
        let inner = self.repeat(|| self.inner.reader(group, consumer)).await?;
        Ok(Box::new(RetryingReader::new(self.clone(), inner, group, consumer)))
    }

    async fn tail(&self) -> Result<Box<dyn TailReader>> {
        let inner = self.repeat(|| self.inner.tail()).await?;
        Ok(Box::new(RetryingTail::new(self.clone(), inner)))
    }
}

retrying! {
    Delays {
        schedule(delays: &DelayName, items: &[ScheduleRequest]) -> Vec<DelayId>;
        cancel(delays: &DelayName, id: DelayId) -> bool;
        promote_due(delays: &DelayName, count: usize) -> Vec<PromotedEntry>;
        wait_until_due(delays: &DelayName, wait: Duration) -> bool;
        delay_stats(delays: &DelayName) -> DelayStats;
        delayed(delays: &DelayName, offset: usize, count: usize) -> Vec<DelayedEntry>;
        delete_delay_set(delays: &DelayName) -> bool;
    }
}

retrying! {
    Leases {
        acquire(lease: &LeaseName, holder: &HolderName, ttl: Duration) -> AcquireResult;
        renew(holder: &HolderName, leases: &[Fence], ttl: Duration) -> Vec<Renewal>;
        release(holder: &HolderName, leases: &[Fence]) -> usize;
        leases(leases: &[LeaseName]) -> Vec<Option<LeaseInfo>>;
        watch(prefix: &str) -> Box<dyn LeaseWatch>;
    }
}

retrying! {
    Registry {
        set_add(set: &SetName, members: &[&str], ttl: Option<Duration>) -> usize;
        set_remove(set: &SetName, members: &[&str]) -> usize;
        set_members(set: &SetName) -> Vec<String>;
        set_contains(set: &SetName, members: &[&str]) -> Vec<bool>;
        map_create(map: &MapName, fields: &RegistryMap) -> bool;
        map_update(map: &MapName, expect: Option<(&str, &[u8])>, fields: &RegistryMap) -> bool;
        map_get(map: &MapName) -> Option<RegistryMap>;
        map_delete(map: &MapName) -> bool;
    }
}

retrying! {
    Dedup {
        dedup_begin(scope: &DedupScope, ids: &[&str], hold: Duration) -> Vec<DedupStatus>;
        dedup_finish(scope: &DedupScope, done: &[(&str, Bytes)], keep: Duration) -> ();
        dedup_abandon(scope: &DedupScope, ids: &[&str]) -> ();
    }
}
