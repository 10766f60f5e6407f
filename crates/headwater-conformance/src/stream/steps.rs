//! Common steps of test cases.
//!
//! Setup and verification use the second connection, so that on a faulty network only the call under test
//! can fail.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    Backend, ConsumerName, DeliveredEntry, Entry, EntryId, Fence, Fields, GroupName, GroupReader,
    GroupStart, GroupStats, PendingDelivery, PendingDeliveryQuery, Range, ReclaimFrom,
    ReclaimRequest, ReclaimResult, Result, Retention, SettleAction, SettleBatch, SettleResult,
    Settlement, StreamBatch, StreamName,
};

use super::env::{StreamTestEnv, consumer, group};
use crate::failure::TestResult;

/// Timeout for anything that should complete.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// For waits that another event ends.
pub(super) const LONG: Duration = Duration::from_secs(20);
/// Longer than any test.
pub(super) const HOUR: Duration = Duration::from_secs(3600);
/// Clock granularity and skew.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// More entries than any test has.
pub(super) const ALL: usize = 10_000;

pub(super) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) async fn sleep_ms(duration: u64) {
    tokio::time::sleep(ms(duration)).await;
}

/// Fields that contain a number.
pub(super) fn numbered(number: usize) -> Fields {
    Fields::new([("number", number.to_string())])
}

/// `count` fields that contain the numbers from 0.
pub(super) fn numbers(count: usize) -> Vec<Fields> {
    (0..count).map(numbered).collect()
}

pub(super) fn ids_of(deliveries: &[DeliveredEntry]) -> Vec<EntryId> {
    deliveries.iter().map(|delivery| delivery.id).collect()
}

pub(super) fn done(ids: &[EntryId]) -> Vec<Settlement> {
    ids.iter().copied().map(Settlement::ack).collect()
}

pub(super) fn settled(applied: usize, stale: usize) -> SettleResult {
    SettleResult { applied, stale }
}

/// Fails the test if `future` does not complete in time.
pub(super) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("expected {what}, found nothing within {TIMEOUT:?}"),
    }
}

/// All entries of a stream.
pub(super) async fn contents(backend: &dyn Backend, stream: &StreamName) -> Result<Vec<Entry>> {
    let mut all = Vec::new();
    let mut from = EntryId::MIN;
    loop {
        let page = backend.range(stream, Range { from, ..Range::first(ALL) }).await?;
        let Some(last) = page.last() else { return Ok(all) };
        from = last.id.next();
        all.extend(page);
    }
}

/// The fields of all entries of a stream.
pub(super) async fn fields_in(backend: &dyn Backend, stream: &StreamName) -> Result<Vec<Fields>> {
    Ok(contents(backend, stream).await?.into_iter().map(|entry| entry.fields).collect())
}

/// Reads until there are `total` entries, in one or more reads.
pub(super) async fn read_all(
    reader: &mut dyn GroupReader,
    streams: &[StreamName],
    total: usize,
) -> TestResult<Vec<StreamBatch<DeliveredEntry>>> {
    let reading = async {
        let mut all = Vec::new();
        let mut found = 0;
        while found < total {
            let batches = reader.read(streams, ALL, ms(500)).await?;
            found += batches.iter().map(|batch| batch.entries.len()).sum::<usize>();
            all.extend(batches);
        }
        assert_eq!(found, total, "expected {total} entries, found {all:?}");
        Ok(all)
    };
    soon("all entries to be delivered", reading).await
}

/// A stream with one group that reads from the beginning.
pub(super) struct Flow {
    pub(super) stream: StreamName,
    pub(super) group: GroupName,
    backend: Arc<dyn Backend>,
    second: Arc<dyn Backend>,
}

impl StreamTestEnv {
    /// A stream with a group named `workers`.
    pub(super) async fn flow(&self) -> Result<Flow> {
        let stream = self.stream("orders");
        let group = group("workers");
        self.second.ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let (backend, second) = (Arc::clone(&self.backend), Arc::clone(&self.second));
        Ok(Flow { stream, group, backend, second })
    }

    /// The same with `count` numbered entries that are pending for `ann`.
    pub(super) async fn flow_with_pending(&self, count: usize) -> Result<(Flow, Vec<EntryId>)> {
        let flow = self.flow().await?;
        let ids = flow.append(count).await?;
        let delivered = flow.deliver("ann", count).await?;
        assert_eq!(ids_of(&delivered), ids, "what was appended is delivered");
        Ok((flow, ids))
    }
}

impl Flow {
    /// Appends `count` numbered entries.
    pub(super) async fn append(&self, count: usize) -> Result<Vec<EntryId>> {
        self.second.append(&self.stream, &numbers(count), &Retention::KEEP_ALL).await
    }

    /// Delivers up to `count` new entries to a consumer.
    pub(super) async fn deliver(&self, name: &str, count: usize) -> Result<Vec<DeliveredEntry>> {
        self.deliver_to(&self.group, name, count).await
    }

    /// Delivers up to `count` new entries to a consumer of another group on the same stream.
    pub(super) async fn deliver_to(
        &self,
        group: &GroupName,
        name: &str,
        count: usize,
    ) -> Result<Vec<DeliveredEntry>> {
        let mut reader = self.second.reader(group, &consumer(name)).await?;
        let read = reader.read(std::slice::from_ref(&self.stream), count, Duration::ZERO).await?;
        let left = reader.close().await?;
        assert_eq!(left, [], "no read was dropped, so nothing is buffered");
        Ok(read.into_iter().flat_map(|batch| batch.entries).collect())
    }

    /// Settles for a consumer, through the connection under test.
    pub(super) async fn settle(&self, name: &str, entries: &[Settlement]) -> Result<SettleResult> {
        self.settle_under(name, None, entries).await
    }

    /// Settles one entry for a consumer, through the connection under test.
    pub(super) async fn settle_one(
        &self,
        name: &str,
        id: EntryId,
        then: SettleAction,
    ) -> Result<SettleResult> {
        self.settle(name, &[Settlement { id, action: then }]).await
    }

    /// Settles under a lease, through the connection under test.
    pub(super) async fn settle_under(
        &self,
        name: &str,
        fence: Option<&Fence>,
        entries: &[Settlement],
    ) -> Result<SettleResult> {
        let (stream, group, consumer) = (&self.stream, &self.group, &consumer(name));
        self.backend.settle(SettleBatch { stream, group, consumer, fence, entries }).await
    }

    /// Reclaims from `from` without a minimum idle time, through the connection under test.
    pub(super) async fn reclaim(&self, name: &str, from: ReclaimFrom<'_>) -> Result<ReclaimResult> {
        let consumer = consumer(name);
        self.backend.reclaim(ReclaimRequest { from, ..self.reclaim_any(&consumer) }).await
    }

    /// A reclaim from anyone without conditions, as a template.
    pub(super) fn reclaim_any<'a>(&'a self, consumer: &'a ConsumerName) -> ReclaimRequest<'a> {
        ReclaimRequest {
            stream: &self.stream,
            group: &self.group,
            consumer,
            fence: None,
            from: ReclaimFrom::Anyone,
            min_idle: Duration::ZERO,
            after: None,
            count: ALL,
        }
    }

    /// A query for all pending entries, as a template.
    pub(super) fn pending_query(&self) -> PendingDeliveryQuery<'_> {
        let (stream, group) = (&self.stream, &self.group);
        let min_idle = Duration::ZERO;
        PendingDeliveryQuery { stream, group, consumer: None, min_idle, after: None, count: ALL }
    }

    /// All pending entries.
    pub(super) async fn pending(&self) -> Result<Vec<PendingDelivery>> {
        self.second.pending(self.pending_query()).await
    }

    /// The ids of all pending entries.
    pub(super) async fn pending_ids(&self) -> Result<Vec<EntryId>> {
        Ok(self.pending().await?.into_iter().map(|pending| pending.id).collect())
    }

    /// Id, consumer and delivery count of all pending entries.
    pub(super) async fn pending_owners(&self) -> Result<Vec<(EntryId, String, u64)>> {
        let pending = self.pending().await?.into_iter();
        Ok(pending.map(|p| (p.id, p.consumer.to_string(), p.deliveries)).collect())
    }

    /// All entries of the stream.
    pub(super) async fn contents(&self) -> Result<Vec<Entry>> {
        contents(&*self.second, &self.stream).await
    }

    /// The ids of all entries of the stream.
    pub(super) async fn ids(&self) -> Result<Vec<EntryId>> {
        Ok(self.contents().await?.into_iter().map(|entry| entry.id).collect())
    }

    /// Statistics of the group.
    pub(super) async fn group_stats(&self) -> Result<GroupStats> {
        let stats = self.second.stats(&self.stream).await?.expect("the flow's stream exists");
        let found = stats.groups.iter().find(|group| group.name == self.group);
        Ok(found
            .unwrap_or_else(|| panic!("expected group {}, found {stats:?}", self.group))
            .clone())
    }
}
