//! Streams and consumer groups: append-only logs, read by groups with acknowledgement and redelivery.
//!
//! Upstream: `headwater-queue`, `headwater-bus` and direct readers of a stream. Downstream: a backend.
//! Guarantees: the suite in `headwater-conformance` tests each one; every backend passes it.
//! Not here: topics, partitions and retry policies (see `headwater-queue`).

use std::borrow::Cow;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;

use crate::delays::DueTime;
use crate::entry::{DeliveredEntry, Entry, EntryId, EntrySize, FieldRef, Fields};
use crate::error::{Result, StreamError};
use crate::leases::Fence;
use crate::name::{ConsumerName, DelayName, GroupName, MapName, StreamName};

/// Append-only logs with consumer groups.
#[async_trait]
pub trait Streams: Send + Sync {
    /// Appends entries in order and returns their ids. Ids increase within a call and across calls.
    ///
    /// `retention` trims the stream safely as part of the append. The stream may stay longer than requested: by the
    /// entries that a group still needs, and by a few more for speed. Concurrent calls share round trips and disk syncs.
    ///
    /// After an error other than `Invalid`, a prefix of the entries may be in the stream.
    async fn append(
        &self,
        stream: &StreamName,
        entries: &[Fields],
        retention: &Retention,
    ) -> Result<Vec<EntryId>>;

    /// Appends to several streams, in one round trip if one server holds all of them and they are small. Returns one result
    /// per request, in order. The requests are independent: one may fail alone, nothing is atomic across them, and they
    /// take effect in any order, also two for the same stream.
    async fn append_many(&self, appends: &[AppendRequest<'_>]) -> Vec<Result<Vec<EntryId>>> {
        let each = appends.iter().map(async |append| {
            let made = (0..append.entries.len()).map(|at| append.entries.entry(at).into_owned());
            let entries: Vec<Fields> = made.collect();
            self.append(append.stream, &entries, append.retention).await
        });
        join_all(each).await
    }

    /// Appends each entry unless its id was already appended, in order and in one atomic step. Returns where each
    /// entry is.
    ///
    /// An id that was appended to this stream within `keep` is a duplicate: nothing is appended, and the id of its first
    /// entry is returned, even if that entry has been trimmed or deleted. The same holds for an id that occurs twice in
    /// one call. A duplicate does not extend `keep`.
    ///
    /// Idempotent: may be retried after any error. `keep` must be longer than the time during which callers retry.
    async fn append_once(
        &self,
        stream: &StreamName,
        entries: &[IdempotentEntry],
        keep: Duration,
        retention: &Retention,
    ) -> Result<Vec<AppendedEntry>>;

    /// Looks up where the entries with these ids are; `None` if [`append_once`](Self::append_once) does not remember
    /// the id.
    async fn appended(&self, stream: &StreamName, ids: &[&str]) -> Result<Vec<Option<EntryId>>>;

    /// Creates the group, and the stream if it does not exist. Returns whether the group is new; an existing group keeps
    /// its position.
    async fn ensure_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool>;

    /// The same if a condition holds; otherwise it fails with `NoGroup` and creates nothing. An existing group needs no
    /// condition.
    async fn ensure_group_if(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
        condition: GroupCondition<'_>,
    ) -> Result<bool>;

    /// Removes the group with its consumers and pending entries. Returns whether it existed.
    async fn remove_group(&self, stream: &StreamName, group: &GroupName) -> Result<bool>;

    /// Moves a group to a new position and removes its consumers and pending entries, in one atomic step: a blocked
    /// reader never sees the group missing. Returns whether the group existed; if not, nothing changes.
    async fn reset_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool>;

    /// Opens a reader of new entries for one consumer of a group. It uses its own connections.
    async fn reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>>;

    /// Disconnects the readers of a consumer, in any process. After [`DisconnectOutcome::Disconnected`], no read that the
    /// consumer started before this call can deliver an entry of this stream.
    ///
    /// A new owner calls this before it takes over from a paused or partitioned process, whose last read may still be
    /// blocked on the server or in transit. Completed later, that read would assign entries to a dead consumer.
    ///
    /// Disconnected reads fail with `Unavailable`. All readers with this name in this group are disconnected, on other
    /// streams too, so consumer names must be unique per process start. A read that starts afterwards works normally.
    async fn disconnect_reader(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<DisconnectOutcome>;

    /// Opens a reader without a consumer group. Reading changes nothing.
    async fn tail(&self) -> Result<Box<dyn TailReader>>;

    /// Settles delivered entries: applies the [`SettleAction`] of each one, in one atomic step per stream.
    ///
    /// With a stale fence nothing happens and the call fails with `Fenced`.
    async fn settle(&self, settle: SettleBatch<'_>) -> Result<SettleResult>;

    /// Resets the idle time of entries that this consumer still processes; their delivery count does not change. Returns
    /// the entries that are no longer pending for this consumer.
    async fn keep_alive(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
        ids: &[EntryId],
    ) -> Result<Vec<EntryId>>;

    /// Takes over pending entries from other consumers. Each counts as one more delivery, except with [`ReclaimFrom::Own`].
    async fn reclaim(&self, reclaim: ReclaimRequest<'_>) -> Result<ReclaimResult>;

    /// Lists pending entries in id order. Read-only.
    async fn pending(&self, query: PendingDeliveryQuery<'_>) -> Result<Vec<PendingDelivery>>;

    /// Reads entries by id, both bounds included. Empty if the stream does not exist.
    async fn range(&self, stream: &StreamName, range: Range) -> Result<Vec<Entry>>;

    /// Removes exactly the oldest entries that `retention` does not cover.
    async fn trim(
        &self,
        stream: &StreamName,
        retention: &Retention,
        guard: TrimGuard,
    ) -> Result<TrimResult>;

    /// Deletes these entries, read or not. Returns how many existed.
    async fn delete_entries(&self, stream: &StreamName, ids: &[EntryId]) -> Result<usize>;

    /// Deletes the stream with its groups. Returns whether it existed.
    async fn delete_stream(&self, stream: &StreamName) -> Result<bool>;

    /// Renames a stream with its entries and groups, in one atomic step, unless `to` has entries. An empty stream `to` is
    /// replaced; its groups are lost. Returns whether the stream was renamed: not if `from` does not exist. Ids remembered
    /// by [`append_once`](Self::append_once) belong to the name and stay with it.
    ///
    /// On a Redis Cluster, both names must share a slot.
    async fn rename_stream(&self, from: &StreamName, to: &StreamName) -> Result<bool>;

    /// Statistics of a stream; `None` if it does not exist.
    async fn stats(&self, stream: &StreamName) -> Result<Option<StreamStats>>;

    /// The same, and every `lag` is `None`: a server that cannot tell it would have to read entries.
    async fn stats_without_lag(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        Ok(self.stats(stream).await?.map(StreamStats::without_lag))
    }

    /// Removes a consumer, unless entries are pending for it. Returns whether it was removed.
    async fn remove_consumer(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<bool>;

    /// Removes consumers without pending entries that were idle for at least `idle`. Returns their names, sorted.
    async fn remove_idle_consumers(
        &self,
        stream: &StreamName,
        group: &GroupName,
        idle: Duration,
    ) -> Result<Vec<ConsumerName>>;
}

/// Reads new entries for one consumer of a group.
#[async_trait]
pub trait GroupReader: Send {
    /// From now on, a missing group fails the read with `NoGroup`: also if it was removed, or its stream was deleted, while the
    /// read was blocked. Neither is created.
    fn require_groups(&mut self);

    /// Reads up to `count` new entries of each stream. If there are none, blocks up to `wait`, then returns an empty list.
    /// Batches come in the order of `streams`; none is empty.
    ///
    /// A missing group is created from the beginning, and its stream if it does not exist: also after they were lost (flush,
    /// restart without persistence) or removed. See [`require_groups`](Self::require_groups).
    ///
    /// A read whose connection broke is not re-sent: it fails with `Unavailable`, and at most the one command in flight per
    /// connection can still deliver entries. So an owner can check its lease before each read.
    ///
    /// Cancel-safe: entries delivered to a dropped read are returned by the next one. After an error, entries may be
    /// pending for this consumer that it never received: list them with `pending` and reclaim them.
    ///
    /// Fails if no stream could be read. If some could, see [`take_failures`](Self::take_failures).
    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<DeliveredEntry>>>;

    /// Streams whose reads have failed while others succeeded, as on a cluster of which one server is unreachable. What is
    /// said about an error holds for them.
    fn take_failures(&mut self) -> Vec<StreamReadFailure> {
        Vec::new()
    }

    /// Stops reading. After it returns, no read of this reader can deliver an entry. Returns the entries that a dropped
    /// read had fetched.
    async fn close(self: Box<Self>) -> Result<Vec<StreamBatch<DeliveredEntry>>>;
}

/// Reads entries after given positions, without a consumer group.
#[async_trait]
pub trait TailReader: Send {
    /// Reads up to `count` entries after each position. If there are none, blocks up to `wait`. Cancel-safe.
    async fn read(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<Entry>>>;
}

/// Entries to append to one stream.
#[derive(Clone, Copy)]
pub struct AppendRequest<'a> {
    /// The stream.
    pub stream: &'a StreamName,
    /// The entries, in order.
    pub entries: &'a dyn EntrySource,
    /// How much of the stream to keep.
    pub retention: &'a Retention,
}

/// Entries to append, produced on demand: the first ones are sent while later ones are still being built, so they need
/// not all be in memory. Lists of [`Fields`] implement it.
pub trait EntrySource: Send + Sync {
    /// Number of entries.
    fn len(&self) -> usize;

    /// Whether there are no entries.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of one entry. All sizes are checked before the first entry is sent: if one exceeds a limit, nothing happens.
    fn size(&self, at: usize) -> EntrySize;

    /// One entry. Must return the same entry each time.
    fn entry(&self, at: usize) -> Cow<'_, Fields>;

    /// Calls `take` once with the parts of the same entry, as [`Fields::with_shared`] joins them. Override it if the parts are known,
    /// so that a backend can encode them without an entry in between.
    fn parts(&self, at: usize, take: &mut TakeParts<'_>) {
        take(&[], &self.entry(at), &[]);
    }
}

/// Takes the parts of an entry: fields before those that it shares with other entries, the shared ones, and fields after them.
pub type TakeParts<'a> = dyn FnMut(&[FieldRef<'_>], &Fields, &[FieldRef<'_>]) + 'a;

impl<T: AsRef<[Fields]> + Send + Sync> EntrySource for T {
    fn len(&self) -> usize {
        self.as_ref().len()
    }

    fn size(&self, at: usize) -> EntrySize {
        self.as_ref()[at].size()
    }

    fn entry(&self, at: usize) -> Cow<'_, Fields> {
        Cow::Borrowed(&self.as_ref()[at])
    }
}

/// An entry with an idempotency id, for [`Streams::append_once`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotentEntry {
    /// Idempotency id, unique within the stream.
    pub id: String,
    /// The fields of the entry.
    pub fields: Fields,
}

/// Where an entry of [`Streams::append_once`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendedEntry {
    /// Its id in the stream.
    pub id: EntryId,
    /// Whether it was already there: appended by an earlier call, or by this call if its reply was lost and it was re-sent.
    pub duplicate: bool,
}

/// Result of [`Streams::disconnect_reader`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "readers may still be connected"]
pub enum DisconnectOutcome {
    /// The readers are disconnected.
    Disconnected {
        /// Number of readers that were disconnected; they were blocked in a read or could have started one.
        readers: usize,
    },
    /// The server does not permit it for this user. A paused reader may still receive the entries of one read.
    Denied {
        /// The server's error message.
        reason: String,
    },
}

/// Entries of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamBatch<T> {
    /// The stream.
    pub stream: StreamName,
    /// The entries in id order, never empty.
    pub entries: Vec<T>,
}

/// Streams that could not be read.
#[derive(Debug)]
pub struct StreamReadFailure {
    /// The streams.
    pub streams: Vec<StreamName>,
    /// Why.
    pub error: StreamError,
}

/// Where a new group starts to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupStart {
    /// At the oldest entry.
    Beginning,
    /// After the newest entry.
    End,
    /// After this id.
    After(EntryId),
}

/// When [`Streams::ensure_group_if`] creates a group. Checked in one atomic step with the creation, except for a map
/// in another slot of a cluster: that one is checked before, and again afterwards; if it is gone then, the stream is
/// deleted unless it is used.
#[derive(Clone, Copy, Debug)]
pub enum GroupCondition<'a> {
    /// The stream exists.
    StreamExists,
    /// The stream exists, or a registry map exists and does not have this field: then the stream is created, too.
    StreamOrMap {
        /// The map.
        map: &'a MapName,
        /// The field.
        without: &'a str,
    },
}

/// How much of a stream to keep. Default: everything. The strictest limit applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Maximum number of entries.
    pub max_len: Option<u64>,
    /// Maximum age of an entry, by the time in its id.
    pub max_age: Option<Duration>,
    /// Approximate maximum of bytes in the backend's memory.
    pub max_bytes: Option<u64>,
}

impl Retention {
    /// Keeps everything.
    pub const KEEP_ALL: Self = Self { max_len: None, max_age: None, max_bytes: None };

    /// Keeps the newest `len` entries.
    pub const fn max_len(len: u64) -> Self {
        Self { max_len: Some(len), ..Self::KEEP_ALL }
    }
}

/// What a trim may remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrimGuard {
    /// Only entries that every group has read and acknowledged.
    Safe,
    /// Any entry. Unread and pending entries are lost.
    Force,
}

/// Result of [`Streams::trim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimResult {
    /// Number of removed entries.
    pub removed: u64,
    /// Whether entries beyond the retention remain because a group still needs them.
    pub held_back: bool,
}

/// Delivered entries to settle.
#[derive(Clone, Copy, Debug)]
pub struct SettleBatch<'a> {
    /// The stream the entries were read from.
    pub stream: &'a StreamName,
    /// The group they were read for.
    pub group: &'a GroupName,
    /// The consumer they are pending for.
    pub consumer: &'a ConsumerName,
    /// The lease under which they were processed. If it is stale, the call fails with `Fenced` and has no effect. On a
    /// Redis Cluster it must share the slot of the stream.
    ///
    /// One exception lets an owner repeat a settle whose reply was lost after the lease has ended: if every entry is to be
    /// deleted and is gone, and the lease had no other holder since, all entries are reported as stale.
    pub fence: Option<&'a Fence>,
    /// The entries and their actions.
    pub entries: &'a [Settlement],
}

/// A delivered entry and how to settle it.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// The entry.
    pub id: EntryId,
    /// What happens to it.
    pub action: SettleAction,
}

impl Settlement {
    /// Acknowledges the entry.
    pub fn ack(id: EntryId) -> Self {
        Self { id, action: SettleAction::Ack }
    }
}

/// How a delivered entry is settled.
///
/// `Ack` and `Delete` take effect for any caller: completed work stays completed. The other actions take effect only while
/// the entry is pending for the settling consumer, so a follow-up entry is written once.
#[derive(Clone, Debug)]
pub enum SettleAction {
    /// Acknowledges the entry.
    Ack,
    /// Acknowledges the entry and deletes it from the stream, for other groups too.
    Delete,
    /// Acknowledges the entry and appends `fields` to a stream: an immediate retry, or a dead letter.
    ///
    /// If that stream is in another slot of a Redis Cluster, the append happens before the acknowledgement: a crash in
    /// between causes a duplicate, never a loss.
    Append {
        /// The stream to append to.
        to: StreamName,
        /// The fields to append.
        fields: Fields,
    },
    /// Acknowledges the entry and schedules `fields` for later. On a Redis Cluster, `delays` must share the slot of the
    /// stream.
    Reschedule {
        /// The delay set.
        delays: DelayName,
        /// The stream the entry is appended to when it is due.
        to: StreamName,
        /// When it is due.
        due: DueTime,
        /// The fields to append.
        fields: Fields,
    },
    /// Releases the entry unprocessed: the next `reclaim` of any consumer receives it, whatever its `min_idle`, and this
    /// delivery is not counted. Until then it is pending for [`SettleAction::RELEASED`].
    Release,
}

impl SettleAction {
    /// Name of the consumer that released entries are pending for. It never reads.
    pub const RELEASED: &'static str = "~released";
}

/// Result of [`Streams::settle`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettleResult {
    /// Number of entries that were settled by this call.
    pub applied: usize,
    /// Number of entries without effect: settled before, reclaimed by another consumer, or unknown.
    pub stale: usize,
}

/// Pending entries to take over.
#[derive(Clone, Copy, Debug)]
pub struct ReclaimRequest<'a> {
    /// The stream.
    pub stream: &'a StreamName,
    /// The group.
    pub group: &'a GroupName,
    /// The consumer that takes the entries over.
    pub consumer: &'a ConsumerName,
    /// The lease that authorizes the call. If it is stale, the call fails with `Fenced` and has no effect.
    pub fence: Option<&'a Fence>,
    /// Whose entries to take.
    pub from: ReclaimFrom<'a>,
    /// Only entries that were idle for at least this long. Zero also takes entries that are being processed.
    pub min_idle: Duration,
    /// Only entries after this id: the cursor.
    pub after: Option<EntryId>,
    /// Maximum number of pending entries to examine.
    pub count: usize,
}

/// Whose pending entries to take over.
#[derive(Clone, Copy, Debug)]
pub enum ReclaimFrom<'a> {
    /// Those of every consumer, including the caller's.
    Anyone,
    /// Those of every other consumer.
    Others,
    /// Those of one consumer.
    Consumer(&'a ConsumerName),
    /// These entries, whichever consumer they are pending for. The cursor does not apply.
    Ids(&'a [EntryId]),
    /// Those of these entries that are pending for the caller already: the reply that would have delivered them was lost.
    /// This is not one more delivery. The cursor does not apply.
    Own(&'a [EntryId]),
}

impl<'a> ReclaimFrom<'a> {
    /// The entries, if they are listed.
    pub(crate) fn ids(self) -> Option<&'a [EntryId]> {
        match self {
            Self::Ids(ids) | Self::Own(ids) => Some(ids),
            Self::Anyone | Self::Others | Self::Consumer(_) => None,
        }
    }
}

/// Result of [`Streams::reclaim`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimResult {
    /// Entries that are now pending for the caller, in id order.
    pub entries: Vec<DeliveredEntry>,
    /// Pending entries that no longer exist (trimmed or deleted); they were acknowledged.
    pub deleted: Vec<EntryId>,
    /// The next cursor: pass it as `after`. `None` at the end.
    pub next: Option<EntryId>,
}

/// Which pending entries to list.
#[derive(Clone, Copy, Debug)]
pub struct PendingDeliveryQuery<'a> {
    /// The stream.
    pub stream: &'a StreamName,
    /// The group.
    pub group: &'a GroupName,
    /// Only entries of this consumer.
    pub consumer: Option<&'a ConsumerName>,
    /// Only entries that were idle for at least this long.
    pub min_idle: Duration,
    /// Only entries after this id.
    pub after: Option<EntryId>,
    /// Maximum number of entries.
    pub count: usize,
}

/// A pending entry: delivered, not yet settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingDelivery {
    /// Its id.
    pub id: EntryId,
    /// The consumer it is pending for.
    pub consumer: ConsumerName,
    /// Time since it was last delivered or kept alive.
    pub idle: Duration,
    /// Number of deliveries.
    pub deliveries: u64,
}

/// A range of entries, by id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The smallest id.
    pub from: EntryId,
    /// The largest id.
    pub to: EntryId,
    /// The order of the result.
    pub direction: Direction,
    /// Maximum number of entries.
    pub count: usize,
}

impl Range {
    /// The first `count` entries.
    pub const fn first(count: usize) -> Self {
        Self { from: EntryId::MIN, to: EntryId::MAX, direction: Direction::Forward, count }
    }

    /// The last `count` entries, newest first.
    pub const fn last(count: usize) -> Self {
        Self { direction: Direction::Backward, ..Self::first(count) }
    }
}

/// The order of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Oldest first.
    Forward,
    /// Newest first.
    Backward,
}

/// Statistics of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamStats {
    /// Number of entries.
    pub length: u64,
    /// Id of the oldest entry.
    pub first_id: Option<EntryId>,
    /// Id of the newest entry.
    pub last_id: Option<EntryId>,
    /// The newest id that the stream ever generated, even if that entry is gone; `MIN` before the first. Greater than
    /// `last_id` if the newest entries were deleted.
    pub last_generated_id: EntryId,
    /// Number of entries ever added, including removed ones. `None` where the backend does not count them: the embedded
    /// backend, and Redis before 7.0. For a stream that Redis 7.0 loaded from an older version's file, the count starts at
    /// the load.
    pub entries_added: Option<u64>,
    /// Id of the newest entry that was deleted individually (trims do not count). `None` if there was none, or where
    /// `entries_added` is `None`.
    pub max_deleted_id: Option<EntryId>,
    /// Approximate memory use in bytes, where the backend reports it.
    pub bytes: Option<u64>,
    /// Its groups, sorted by name.
    pub groups: Vec<GroupStats>,
}

impl StreamStats {
    /// For backends: as [`Streams::stats_without_lag`] returns them.
    pub(crate) fn without_lag(mut self) -> Self {
        self.groups.iter_mut().for_each(|group| group.lag = None);
        self
    }
}

/// Statistics of a group on one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStats {
    /// The group.
    pub name: GroupName,
    /// Number of entries delivered and not settled.
    pub pending: u64,
    /// Number of entries not yet delivered; `None` where the server cannot tell.
    pub lag: Option<u64>,
    /// The newest delivered id; `MIN` before the first delivery.
    pub last_delivered: EntryId,
    /// Its consumers, sorted by name.
    pub consumers: Vec<ConsumerStats>,
}

/// Statistics of one consumer in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerStats {
    /// The consumer.
    pub name: ConsumerName,
    /// Number of entries pending for it.
    pub pending: u64,
    /// Time since it last read, settled or reclaimed.
    pub idle: Duration,
}
