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

#[async_trait]
impl Streams for Retrying {
    async fn append(
        &self,
        stream: &StreamName,
        entries: &[Fields],
        retention: &Retention,
    ) -> Result<Vec<EntryId>> {
        self.repeat(|| self.inner.append(stream, entries, retention)).await
    }

    async fn append_once(
        &self,
        stream: &StreamName,
        entries: &[IdempotentEntry],
        keep: Duration,
        retention: &Retention,
    ) -> Result<Vec<AppendedEntry>> {
        self.repeat(|| self.inner.append_once(stream, entries, keep, retention)).await
    }

    async fn appended(&self, stream: &StreamName, ids: &[&str]) -> Result<Vec<Option<EntryId>>> {
        self.repeat(|| self.inner.appended(stream, ids)).await
    }

    async fn ensure_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool> {
        self.repeat(|| self.inner.ensure_group(stream, group, start)).await
    }

    async fn remove_group(&self, stream: &StreamName, group: &GroupName) -> Result<bool> {
        self.repeat(|| self.inner.remove_group(stream, group)).await
    }

    async fn reset_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool> {
        self.repeat(|| self.inner.reset_group(stream, group, start)).await
    }

    async fn reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>> {
        let inner = self.repeat(|| self.inner.reader(group, consumer)).await?;
        Ok(Box::new(RetryingReader::new(self.clone(), inner, group, consumer)))
    }

    async fn disconnect_reader(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<DisconnectOutcome> {
        self.repeat(|| self.inner.disconnect_reader(stream, group, consumer)).await
    }

    async fn tail(&self) -> Result<Box<dyn TailReader>> {
        let inner = self.repeat(|| self.inner.tail()).await?;
        Ok(Box::new(RetryingTail::new(self.clone(), inner)))
    }

    async fn settle(&self, settle: SettleBatch<'_>) -> Result<SettleResult> {
        self.repeat(|| self.inner.settle(settle)).await
    }

    async fn keep_alive(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
        ids: &[EntryId],
    ) -> Result<Vec<EntryId>> {
        self.repeat(|| self.inner.keep_alive(stream, group, consumer, ids)).await
    }

    async fn reclaim(&self, reclaim: ReclaimRequest<'_>) -> Result<ReclaimResult> {
        self.repeat(|| self.inner.reclaim(reclaim)).await
    }

    async fn pending(&self, query: PendingDeliveryQuery<'_>) -> Result<Vec<PendingDelivery>> {
        self.repeat(|| self.inner.pending(query)).await
    }

    async fn range(&self, stream: &StreamName, range: Range) -> Result<Vec<Entry>> {
        self.repeat(|| self.inner.range(stream, range)).await
    }

    async fn trim(
        &self,
        stream: &StreamName,
        retention: &Retention,
        guard: TrimGuard,
    ) -> Result<TrimResult> {
        self.repeat(|| self.inner.trim(stream, retention, guard)).await
    }

    async fn delete_entries(&self, stream: &StreamName, ids: &[EntryId]) -> Result<usize> {
        self.repeat(|| self.inner.delete_entries(stream, ids)).await
    }

    async fn delete_stream(&self, stream: &StreamName) -> Result<bool> {
        self.repeat(|| self.inner.delete_stream(stream)).await
    }

    async fn rename_stream(&self, from: &StreamName, to: &StreamName) -> Result<bool> {
        self.repeat(|| self.inner.rename_stream(from, to)).await
    }

    async fn stats(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        self.repeat(|| self.inner.stats(stream)).await
    }

    async fn remove_idle_consumers(
        &self,
        stream: &StreamName,
        group: &GroupName,
        idle: Duration,
    ) -> Result<Vec<ConsumerName>> {
        self.repeat(|| self.inner.remove_idle_consumers(stream, group, idle)).await
    }
}

#[async_trait]
impl Delays for Retrying {
    async fn schedule(
        &self,
        delays: &DelayName,
        items: &[ScheduleRequest],
    ) -> Result<Vec<DelayId>> {
        self.repeat(|| self.inner.schedule(delays, items)).await
    }

    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool> {
        self.repeat(|| self.inner.cancel(delays, id)).await
    }

    async fn promote_due(&self, delays: &DelayName, count: usize) -> Result<Vec<PromotedEntry>> {
        self.repeat(|| self.inner.promote_due(delays, count)).await
    }

    async fn wait_until_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        self.repeat(|| self.inner.wait_until_due(delays, wait)).await
    }

    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats> {
        self.repeat(|| self.inner.delay_stats(delays)).await
    }

    async fn delayed(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<DelayedEntry>> {
        self.repeat(|| self.inner.delayed(delays, offset, count)).await
    }

    async fn delete_delay_set(&self, delays: &DelayName) -> Result<bool> {
        self.repeat(|| self.inner.delete_delay_set(delays)).await
    }
}

#[async_trait]
impl Leases for Retrying {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        self.repeat(|| self.inner.acquire(lease, holder, ttl)).await
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        self.repeat(|| self.inner.renew(holder, leases, ttl)).await
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        self.repeat(|| self.inner.release(holder, leases)).await
    }

    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        self.repeat(|| self.inner.leases(leases)).await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        self.repeat(|| self.inner.watch(prefix)).await
    }
}

#[async_trait]
impl Registry for Retrying {
    async fn set_add(
        &self,
        set: &SetName,
        members: &[&str],
        ttl: Option<Duration>,
    ) -> Result<usize> {
        self.repeat(|| self.inner.set_add(set, members, ttl)).await
    }

    async fn set_remove(&self, set: &SetName, members: &[&str]) -> Result<usize> {
        self.repeat(|| self.inner.set_remove(set, members)).await
    }

    async fn set_members(&self, set: &SetName) -> Result<Vec<String>> {
        self.repeat(|| self.inner.set_members(set)).await
    }

    async fn set_contains(&self, set: &SetName, members: &[&str]) -> Result<Vec<bool>> {
        self.repeat(|| self.inner.set_contains(set, members)).await
    }

    async fn map_create(&self, map: &MapName, fields: &RegistryMap) -> Result<bool> {
        self.repeat(|| self.inner.map_create(map, fields)).await
    }

    async fn map_update(
        &self,
        map: &MapName,
        expect: Option<(&str, &[u8])>,
        fields: &RegistryMap,
    ) -> Result<bool> {
        self.repeat(|| self.inner.map_update(map, expect, fields)).await
    }

    async fn map_get(&self, map: &MapName) -> Result<Option<RegistryMap>> {
        self.repeat(|| self.inner.map_get(map)).await
    }

    async fn map_delete(&self, map: &MapName) -> Result<bool> {
        self.repeat(|| self.inner.map_delete(map)).await
    }
}

#[async_trait]
impl Dedup for Retrying {
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<DedupStatus>> {
        self.repeat(|| self.inner.dedup_begin(scope, ids, hold)).await
    }

    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()> {
        self.repeat(|| self.inner.dedup_finish(scope, done, keep)).await
    }

    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()> {
        self.repeat(|| self.inner.dedup_abandon(scope, ids)).await
    }
}
