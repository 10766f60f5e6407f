//! Streams and consumer groups: the first seam of a backend.
//!
//! Upstream: `headwater-queue` and whoever reads a stream directly. Downstream: a backend.
//! Promises: the suite in `conformance` states them one by one; every backend passes it.
//! Not here: topics and partitions, retries and their policies (see `headwater-queue`).

use std::borrow::Cow;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;

use crate::delays::Due;
use crate::entry::{Delivery, Entry, EntryId, EntrySize, Fields};
use crate::error::Result;
use crate::leases::Fence;
use crate::name::{ConsumerName, DelayName, GroupName, StreamName};

/// Append-only logs with consumer groups.
#[async_trait]
pub trait Streams: Send + Sync {
    /// Appends entries in order and returns their ids, which grow within the call and over calls.
    ///
    /// `retention` trims safely while appending, so the stream may stay longer than asked for: by what groups still
    /// need, and by a few entries for speed. Calls made at the same time share round trips and disk syncs.
    ///
    /// After an error other than `Invalid`, the first of the entries may be in the stream.
    async fn append(
        &self,
        stream: &StreamName,
        entries: &[Fields],
        retention: &Retention,
    ) -> Result<Vec<EntryId>>;

    /// Appends to several streams, in one round trip where one server holds them all. Returns what became of each append,
    /// in order: one that fails does not touch the others, and nothing is atomic over them.
    async fn append_many(&self, appends: &[Append<'_>]) -> Vec<Result<Vec<EntryId>>> {
        let each = appends.iter().map(async |append| {
            let made = (0..append.entries.len()).map(|at| append.entries.entry(at).into_owned());
            let entries: Vec<Fields> = made.collect();
            self.append(append.stream, &entries, append.retention).await
        });
        join_all(each).await
    }

    /// Appends entries that are not in the stream yet, in order and in one atomic step. Returns where each one is.
    ///
    /// An id that was appended to this stream within `keep` is a duplicate: nothing is appended for it, and the id of
    /// its first entry is returned, also if that entry is trimmed or deleted by now. The same holds for an id that
    /// stands twice in one call. A duplicate does not prolong `keep`.
    ///
    /// The call may be repeated after any error. `keep` must be longer than whoever repeats it does so.
    async fn append_once(
        &self,
        stream: &StreamName,
        entries: &[Once],
        keep: Duration,
        retention: &Retention,
    ) -> Result<Vec<Appended>>;

    /// Where the entries with these ids are, if [`append_once`](Self::append_once) remembers them.
    async fn appended(&self, stream: &StreamName, ids: &[&str]) -> Result<Vec<Option<EntryId>>>;

    /// Creates the group, and the stream if it is missing. Returns whether the group is new; an old one keeps its position.
    async fn ensure_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool>;

    /// Removes the group with all it knows, pending entries included. Returns whether there was one.
    async fn remove_group(&self, stream: &StreamName, group: &GroupName) -> Result<bool>;

    /// Gives a group a new position, and forgets its consumers and what was pending, in one atomic step: no reader that
    /// waits meanwhile sees the group gone. Returns whether there was such a group; nothing happens if not.
    async fn reset_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool>;

    /// A reader of new entries for one consumer of a group, on connections of its own.
    async fn reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>>;

    /// Ends the reads of a consumer that may still be under way on a stream, wherever they are: after it says
    /// [`Silenced::Yes`], no read that this consumer began before the call delivers anything of this stream.
    ///
    /// For whoever takes over from a process that was stopped or cut off. Its last read may wait at the server, or lie in
    /// the network; answered later, it would take entries for a consumer that is gone.
    ///
    /// Reads that were ended fail with `Unavailable`. All readers of that name in that group are ended, on other streams,
    /// too: so give consumers names that are unique per process start. A read that is begun afterwards delivers as ever.
    async fn silence(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Silenced>;

    /// A reader that belongs to no group and changes nothing.
    async fn tail(&self) -> Result<Box<dyn TailReader>>;

    /// Ends deliveries: acknowledges each entry and does what its [`Then`] says, in one atomic step per stream.
    ///
    /// With a fence that is no longer current nothing happens and the call fails with `Fenced`.
    async fn settle(&self, settle: Settle<'_>) -> Result<Settled>;

    /// Tells the group that this consumer still works on these entries: their idle time starts anew, their delivery
    /// count stays. Returns those that are no longer pending for this consumer.
    async fn keep_alive(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
        ids: &[EntryId],
    ) -> Result<Vec<EntryId>>;

    /// Takes pending entries over from other consumers; each counts as one more delivery.
    async fn reclaim(&self, reclaim: Reclaim<'_>) -> Result<Reclaimed>;

    /// Lists pending entries in id order without touching them.
    async fn pending(&self, query: PendingQuery<'_>) -> Result<Vec<Pending>>;

    /// Reads entries by id, both ends included, from a stream that need not exist.
    async fn range(&self, stream: &StreamName, range: Range) -> Result<Vec<Entry>>;

    /// Removes the oldest entries that `retention` does not cover, exactly.
    async fn trim(
        &self,
        stream: &StreamName,
        retention: &Retention,
        guard: TrimGuard,
    ) -> Result<Trimmed>;

    /// Removes these entries, read or not. Returns how many there were.
    async fn delete_entries(&self, stream: &StreamName, ids: &[EntryId]) -> Result<usize>;

    /// Removes the stream with its groups. Returns whether there was one.
    async fn delete_stream(&self, stream: &StreamName) -> Result<bool>;

    /// What there is to know of a stream; `None` if it does not exist.
    async fn stats(&self, stream: &StreamName) -> Result<Option<StreamStats>>;

    /// Removes consumers that have nothing pending and did nothing for `idle`. Returns their names, sorted.
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
    /// Reads up to `count` new entries of each stream, and waits up to `wait` if there are none; the result is empty
    /// after that. Batches come in the order of `streams`, without empty ones.
    ///
    /// A group that is lost (flush, restart without persistence) is created again from the beginning.
    ///
    /// A read whose connection broke is not sent again: it fails with `Unavailable`, and nothing more of it can be
    /// delivered than what one command per connection was about to. So an owner can look at its lease before each read.
    ///
    /// Cancel-safe: what was delivered to a read that was dropped comes with the next read. After an error, entries may
    /// have been delivered that nobody has seen: list what is `pending` for this consumer and reclaim what is not in hand.
    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<Batch<Delivery>>>;

    /// Stops reading. When it returns, no read of this reader can deliver anything any more; what a dropped read had
    /// fetched and nobody took comes back here.
    async fn close(self: Box<Self>) -> Result<Vec<Batch<Delivery>>>;
}

/// Reads entries after given positions, for nobody in particular.
#[async_trait]
pub trait TailReader: Send {
    /// Reads up to `count` entries after each position, and waits up to `wait` if there are none. Cancel-safe.
    async fn read(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<Batch<Entry>>>;
}

/// Entries for one of several streams.
#[derive(Clone, Copy)]
pub struct Append<'a> {
    /// The stream.
    pub stream: &'a StreamName,
    /// What to append, in order.
    pub entries: &'a dyn Entries,
    /// How much of the stream to keep.
    pub retention: &'a Retention,
}

/// Entries to append, each made when it is needed: the first are on their way while the others are still made, and nobody
/// holds all of them. Lists of fields are such entries.
pub trait Entries: Send + Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The size of one of them, asked of all before the first is sent: if one is too large, nothing happens.
    fn size(&self, at: usize) -> EntrySize;

    /// One of them, always the same.
    fn entry(&self, at: usize) -> Cow<'_, Fields>;
}

impl<T: AsRef<[Fields]> + Send + Sync> Entries for T {
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

/// An entry to append once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Once {
    /// What it is known by, for as long as it is remembered; unique within its stream.
    pub id: String,
    /// What it carries.
    pub fields: Fields,
}

/// Where an entry is that was to be appended once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Its id in the stream.
    pub id: EntryId,
    /// Whether it was there before: by an earlier call, or by this one if its reply was lost and it was sent again.
    pub duplicate: bool,
}

/// Whether the reads of a consumer were ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "reads may go on"]
pub enum Silenced {
    /// They were.
    Yes {
        /// How many readers were ended: they waited, or could have.
        ended: usize,
    },
    /// The server does not let this user do it. A stopped reader may still take entries, once.
    No {
        /// What the server said.
        reason: String,
    },
}

/// Entries of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<T> {
    /// The stream they come from.
    pub stream: StreamName,
    /// The entries in id order, never empty.
    pub entries: Vec<T>,
}

/// Where a new group begins to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupStart {
    /// At the oldest entry.
    Beginning,
    /// At what comes after now.
    End,
    /// After this id.
    After(EntryId),
}

/// How much of a stream to keep. Everything by default; the strictest limit decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// At most this many entries.
    pub max_len: Option<u64>,
    /// Nothing older than this, by the time in the entry's id.
    pub max_age: Option<Duration>,
    /// At most about this many bytes in the backend's memory.
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
    /// Anything, unread and pending entries too: they are lost.
    Force,
}

/// What a trim did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trimmed {
    /// How many entries went.
    pub removed: u64,
    /// Whether entries stayed that the retention does not cover, because a group still needs them.
    pub held_back: bool,
}

/// Which deliveries to end, and how.
#[derive(Clone, Copy, Debug)]
pub struct Settle<'a> {
    /// The stream the entries were read from.
    pub stream: &'a StreamName,
    /// The group they were read for.
    pub group: &'a GroupName,
    /// The consumer that has them in hand.
    pub consumer: &'a ConsumerName,
    /// The lease under which they were handled; not current = `Fenced` and no effect. On a Redis Cluster it lives in the slot
    /// of the stream.
    ///
    /// One exception, so that a settle whose reply was lost can be repeated after its lease has ended: if all entries are to be
    /// deleted and are gone, and the lease has had no other holder since, the answer is that all are stale.
    pub fence: Option<&'a Fence>,
    /// Entry by entry, what becomes of it.
    pub entries: &'a [Settlement],
}

/// How one delivery ends.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// The entry.
    pub id: EntryId,
    /// What becomes of it.
    pub then: Then,
}

impl Settlement {
    /// The entry is handled.
    pub fn done(id: EntryId) -> Self {
        Self { id, then: Then::Done }
    }
}

/// What becomes of an entry when its delivery ends.
///
/// `Done` and `Delete` hold whoever says so: work that is done is done. The others take effect only while the entry is
/// pending for the consumer that settles it, so a follow-up is written once.
#[derive(Clone, Debug)]
pub enum Then {
    /// It is acknowledged.
    Done,
    /// It is acknowledged and removed from the stream, for other groups too.
    Delete,
    /// It is acknowledged and `fields` are appended to a stream: a retry at once, or a dead letter.
    ///
    /// Where that stream lives in another slot of a Redis Cluster, the append comes first and the acknowledgement
    /// second: a crash in between gives a duplicate, never a loss.
    Append {
        /// The stream to append to.
        to: StreamName,
        /// What to append.
        fields: Fields,
    },
    /// It is acknowledged and `fields` are put aside until they are due. On a Redis Cluster, `delays` lives in the slot
    /// of the stream.
    PutAside {
        /// The set of delayed entries to put it into.
        delays: DelayName,
        /// The stream it returns to.
        to: StreamName,
        /// When.
        due: Due,
        /// What returns.
        fields: Fields,
    },
    /// It is given back unhandled: the next `reclaim` by anyone gets it, whatever idle time it asks for, and this
    /// delivery does not count. Until then it is pending for [`Then::RELEASED`].
    Release,
}

impl Then {
    /// The consumer that released entries are pending for. It never reads.
    pub const RELEASED: &'static str = "~released";
}

/// What a settle did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Entries that were settled now.
    pub applied: usize,
    /// Entries for which nothing happened: settled before, taken over by another consumer, or unknown.
    pub stale: usize,
}

/// Which pending entries to take over.
#[derive(Clone, Copy, Debug)]
pub struct Reclaim<'a> {
    /// The stream.
    pub stream: &'a StreamName,
    /// The group.
    pub group: &'a GroupName,
    /// The consumer that takes them.
    pub consumer: &'a ConsumerName,
    /// The lease that gives the right to do so; not current = `Fenced` and no effect.
    pub fence: Option<&'a Fence>,
    /// Whose entries.
    pub from: ReclaimFrom<'a>,
    /// Only entries that nobody touched for this long. Zero takes live ones too.
    pub min_idle: Duration,
    /// Only entries after this id: the cursor.
    pub after: Option<EntryId>,
    /// Look at no more than this many pending entries.
    pub count: usize,
}

/// Whose pending entries to take over.
#[derive(Clone, Copy, Debug)]
pub enum ReclaimFrom<'a> {
    /// Everybody's, one's own included.
    Anyone,
    /// Everybody's but one's own.
    Others,
    /// Those of one consumer.
    Consumer(&'a ConsumerName),
    /// These entries, whoever has them. The cursor does not apply.
    Ids(&'a [EntryId]),
}

/// What a reclaim found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Entries that are the caller's now, in id order.
    pub entries: Vec<Delivery>,
    /// Entries that were pending but exist no more (trimmed or deleted); they are pending no longer.
    pub deleted: Vec<EntryId>,
    /// Where to go on: pass it as `after`. `None` at the end.
    pub next: Option<EntryId>,
}

/// Which pending entries to list.
#[derive(Clone, Copy, Debug)]
pub struct PendingQuery<'a> {
    /// The stream.
    pub stream: &'a StreamName,
    /// The group.
    pub group: &'a GroupName,
    /// Only those of this consumer.
    pub consumer: Option<&'a ConsumerName>,
    /// Only those nobody touched for this long.
    pub min_idle: Duration,
    /// Only those after this id.
    pub after: Option<EntryId>,
    /// At most this many.
    pub count: usize,
}

/// One pending entry: delivered, not yet settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Its id.
    pub id: EntryId,
    /// Who has it.
    pub consumer: ConsumerName,
    /// How long nobody touched it.
    pub idle: Duration,
    /// How often it was delivered.
    pub deliveries: u64,
}

/// Which entries to read, by id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The smallest id.
    pub from: EntryId,
    /// The largest id.
    pub to: EntryId,
    /// Which end comes first.
    pub direction: Direction,
    /// At most this many.
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

/// Which end of a range comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Oldest first.
    Forward,
    /// Newest first.
    Backward,
}

/// What there is to know of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamStats {
    /// How many entries it holds.
    pub length: u64,
    /// The oldest entry's id.
    pub first_id: Option<EntryId>,
    /// The newest entry's id.
    pub last_id: Option<EntryId>,
    /// The newest id that the stream ever generated, also if that entry is gone; `MIN` before the first. Greater than
    /// `last_id` if the newest entries were deleted.
    pub last_generated_id: EntryId,
    /// How many entries were ever added, those included that are gone; `None` where the backend does not count them: the
    /// embedded one, and Redis before 7.0. A stream that Redis 7.0 loaded from a file of an older version counts from then on.
    pub entries_added: Option<u64>,
    /// The newest entry that was deleted one by one, which trims do not; `None` if none was, or where `entries_added` is.
    pub max_deleted_id: Option<EntryId>,
    /// About how many bytes of memory it takes, where the backend tells.
    pub bytes: Option<u64>,
    /// Its groups, sorted by name.
    pub groups: Vec<GroupStats>,
}

/// What there is to know of a group on one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStats {
    /// The group.
    pub name: GroupName,
    /// How many entries are delivered and not settled.
    pub pending: u64,
    /// How many entries are not delivered yet; `None` where the server cannot tell.
    pub lag: Option<u64>,
    /// The newest delivered id; `MIN` before the first delivery.
    pub last_delivered: EntryId,
    /// Its consumers, sorted by name.
    pub consumers: Vec<ConsumerStats>,
}

/// What there is to know of one consumer in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerStats {
    /// The consumer.
    pub name: ConsumerName,
    /// How many entries it has in hand.
    pub pending: u64,
    /// How long ago it last read, settled or reclaimed anything.
    pub idle: Duration,
}
