//! Resetting a group: it goes on from another position of the topic.
//!
//! Upstream: administrators. Downstream: the groups of a topic's streams.
//! Promises: a dry run changes nothing and says what would be read again, skipped and dropped; a group that somebody
//! works for is left alone, unless [`ResetGuard::Force`] is named; each partition changes in one atomic step.
//! An error after the first partition says which partitions are reset, and what to repeat. Refused: a group that does not
//! exist.

use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Direction, EntryId, GroupStart, GroupStats, PendingQuery, Range, StreamName, StreamStats,
};

use crate::error::{QueueError, Result};
use crate::inspect::{GroupView, select_partitions};
use crate::interrupted::PartitionProgress;
use crate::keys;
use crate::limits::COUNTED_MAX;
use crate::pagination::previous;
use crate::queue::Queue;
use crate::topic::{GroupName, Partition, Topic, group_name};

/// Entries that are counted with one call; each may be large.
const COUNT_BATCH: usize = 100;
/// Pending entries that are counted with one call; they are small.
const PENDING_BATCH: usize = 1000;
/// Those at work that an error names.
const NAMED_MAX: usize = 3;

/// Where a group goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetTo {
    /// At the oldest message.
    Beginning,
    /// At what comes after now.
    End,
    /// At this message, or the next one if it is gone. Where there are several partitions, ids say when.
    Id(EntryId),
    /// At the first message stored at this time or later.
    Time(Timestamp),
}

/// Whom a reset may surprise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetGuard {
    /// Nobody: it is refused while a member lives or a partition is owned.
    #[default]
    RequireInactive,
    /// Anybody: what they have in hand is finished, but counts for nothing.
    Force,
}

/// Where to reset a group to, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// Where it goes on.
    pub to: ResetTo,
    /// Only on this partition.
    pub partition: Option<Partition>,
    /// Whom it may surprise. Default: nobody.
    pub guard: ResetGuard,
    /// Only says what would happen.
    pub dry_run: bool,
}

impl Reset {
    /// A reset of all partitions, while nobody is at work.
    pub fn to(to: ResetTo) -> Self {
        Self { to, partition: None, guard: ResetGuard::default(), dry_run: false }
    }

    /// The same, but only to see what would happen.
    pub fn dry_run(self) -> Self {
        Self { dry_run: true, ..self }
    }
}

/// A count that ends somewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundedCount {
    /// How many there are.
    pub count: u64,
    /// Whether there may be more: counting stopped here.
    pub or_more: bool,
}

/// What a reset did, or would do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetReport {
    /// Messages the group has read and will read again.
    pub again: BoundedCount,
    /// Messages the group has not read and will not read.
    pub skipped: BoundedCount,
    /// Messages that were delivered and not settled, before the new position: nobody will handle them.
    pub dropped: BoundedCount,
    /// Whether it was done; `false` after a dry run.
    pub is_done: bool,
    /// Partition by partition, by number.
    pub partitions: Vec<ResetPartition>,
}

/// What a reset did, or would do, to one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetPartition {
    /// The partition.
    pub partition: Partition,
    /// The newest message delivered before; `None` if the group had not begun here.
    pub was_at: Option<EntryId>,
    /// The newest message that counts as delivered afterwards.
    pub is_at: EntryId,
    /// Messages to be read again.
    pub again: BoundedCount,
    /// Messages never to be read.
    pub skipped: BoundedCount,
    /// Messages delivered, not settled, and never to be handled.
    pub dropped: BoundedCount,
}

impl Queue {
    /// Resets a group of a topic.
    pub async fn reset_group(
        &self,
        topic: &str,
        group: &str,
        reset: &Reset,
    ) -> Result<ResetReport> {
        let group = group_name(group)?;
        let topic = self.existing_topic(topic).await?;
        let partitions = select_partitions(&topic, reset.partition)?;
        let stats = self.partition_stats(&topic).await?;
        let of_group =
            |stats: &StreamStats| stats.groups.iter().find(|found| found.name == group).cloned();
        if !stats.iter().flatten().any(|stats| of_group(stats).is_some()) {
            let (topic, group) = (topic.name.to_string(), group.to_string());
            return Err(QueueError::NoGroup { topic, group });
        }
        if reset.guard == ResetGuard::RequireInactive && !reset.dry_run {
            self.check_inactive(&topic, &group).await?;
        }
        let mut planned = Vec::new();
        for partition in partitions {
            let stats = stats[usize::from(partition)].as_ref();
            let look = ResetPlanner {
                queue: self,
                stream: keys::stream(&topic, partition),
                group: &group,
                stats,
                was: stats.and_then(of_group),
            };
            planned.push(look.plan(partition, reset.to).await?);
        }
        if !reset.dry_run {
            self.reset_planned(&topic, &group, &planned, reset.to).await?;
        }
        Ok(report(planned, !reset.dry_run))
    }

    async fn check_inactive(&self, topic: &Topic, group: &GroupName) -> Result<()> {
        let view = self.inspect().group(topic.name.as_str(), group.as_str()).await?;
        // One that rests has nothing in hand.
        let members = view.members.iter().filter(|member| member.heartbeat_age.is_some());
        let at_work = members.filter_map(|member| member.consumer.clone());
        require_inactive(&view, at_work.collect())
    }

    async fn reset_planned(
        &self,
        topic: &Topic,
        group: &GroupName,
        planned: &[ResetPartition],
        to: ResetTo,
    ) -> Result<()> {
        let began = self.inner.backend.now().await?;
        let mut progress = PartitionProgress::new(planned.iter().map(|plan| plan.partition));
        for plan in planned {
            progress.next(1);
            if let Err(error) = self.reset_partition(topic, group, plan, to).await {
                let what = format!("the reset of group `{group}` on topic `{}`", topic.name);
                let next = match to {
                    // The end has moved on; what came since would be skipped where it is not skipped yet.
                    ResetTo::End => format!(
                        "repeat the reset with `to` = `{}` to finish it without skipping more",
                        began.to_rfc3339()
                    ),
                    _ => "repeat the reset to finish it".to_owned(),
                };
                return Err(progress.interrupt(what, next, error));
            }
        }
        Ok(())
    }

    async fn reset_partition(
        &self,
        topic: &Topic,
        group: &GroupName,
        plan: &ResetPartition,
        to: ResetTo,
    ) -> Result<()> {
        let stream = keys::stream(topic, plan.partition);
        let start = match to {
            ResetTo::Beginning => GroupStart::Beginning,
            ResetTo::End => GroupStart::End,
            ResetTo::Id(_) | ResetTo::Time(_) => GroupStart::After(plan.is_at),
        };
        let backend = &self.inner.backend;
        if backend.reset_group(&stream, group, start).await? {
            return Ok(());
        }
        // It has not begun here. If it does so at this moment, it is reset all the same.
        if !backend.ensure_group(&stream, group, start).await? {
            backend.reset_group(&stream, group, start).await?;
        }
        Ok(())
    }
}

/// An error if there is one of these, or an owner of a partition.
pub(crate) fn require_inactive(view: &GroupView, mut who: Vec<String>) -> Result<()> {
    let owners = view.partitions.iter().filter_map(|partition| partition.owner.as_ref());
    who.extend(owners.map(|owner| owner.holder.clone()));
    who.sort();
    who.dedup();
    if who.is_empty() {
        return Ok(());
    }
    let more = who.len().saturating_sub(NAMED_MAX);
    who.truncate(NAMED_MAX);
    let mut who = who.join(", ");
    if more > 0 {
        who += &format!(" and {more} more");
    }
    let (topic, group) = (view.topic.clone(), view.group.clone());
    Err(QueueError::GroupAtWork { topic, group, who })
}

/// What there is before a partition is reset.
struct ResetPlanner<'a> {
    queue: &'a Queue,
    stream: StreamName,
    group: &'a GroupName,
    stats: Option<&'a StreamStats>,
    was: Option<GroupStats>,
}

impl ResetPlanner<'_> {
    async fn plan(&self, partition: Partition, to: ResetTo) -> Result<ResetPartition> {
        let was_at = self.was.as_ref().map(|group| group.last_delivered);
        let last_id = self.stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
        let is_at = match to {
            ResetTo::Beginning => EntryId::MIN,
            // What was deleted behind the last message does not make the position go back.
            ResetTo::End => last_id.max(was_at.unwrap_or(EntryId::MIN)),
            ResetTo::Id(id) => previous(id).unwrap_or(EntryId::MIN),
            ResetTo::Time(at) => previous(EntryId::new(at.as_millis(), 0)).unwrap_or(EntryId::MIN),
        };
        let from = was_at.unwrap_or(EntryId::MIN);
        let mut plan = ResetPartition {
            partition,
            was_at,
            is_at,
            again: BoundedCount::default(),
            skipped: BoundedCount::default(),
            dropped: BoundedCount::default(),
        };
        if is_at < from {
            plan.again = match (to, self.lag()) {
                (ResetTo::Beginning, Some(lag)) => self.exactly(self.length() - lag),
                _ => self.count(is_at, from).await?,
            };
        } else if is_at > from {
            plan.skipped = match (to, self.lag()) {
                (ResetTo::End, Some(lag)) => self.exactly(lag),
                _ => self.count(from, is_at).await?,
            };
        }
        plan.dropped = self.count_pending(is_at).await?;
        Ok(plan)
    }

    fn length(&self) -> u64 {
        self.stats.map_or(0, |stats| stats.length)
    }

    /// How many messages the group has not read, where the server can tell.
    fn lag(&self) -> Option<u64> {
        match &self.was {
            None => Some(self.length()),
            Some(group) => group.lag.filter(|lag| *lag <= self.length()),
        }
    }

    fn exactly(&self, count: u64) -> BoundedCount {
        BoundedCount { count, or_more: false }
    }

    /// The messages after one position up to another.
    async fn count(&self, after: EntryId, to: EntryId) -> Result<BoundedCount> {
        let mut counted = 0;
        let (mut from, direction, count) = (after.next(), Direction::Forward, COUNT_BATCH);
        while from <= to {
            let page = Range { from, to, direction, count };
            let entries = self.queue.inner.backend.range(&self.stream, page).await?;
            counted += entries.len() as u64;
            match entries.last() {
                Some(last) if entries.len() == count => from = last.id.next(),
                _ => break,
            }
            if counted >= COUNTED_MAX {
                return Ok(BoundedCount { count: counted, or_more: true });
            }
        }
        Ok(self.exactly(counted))
    }

    /// The pending messages up to a position.
    async fn count_pending(&self, to: EntryId) -> Result<BoundedCount> {
        let mut counted = 0;
        if self.was.as_ref().is_none_or(|group| group.pending == 0) {
            return Ok(BoundedCount::default());
        }
        let mut after = None;
        loop {
            let query = PendingQuery {
                stream: &self.stream,
                group: self.group,
                consumer: None,
                min_idle: std::time::Duration::ZERO,
                after,
                count: PENDING_BATCH,
            };
            let pending = self.queue.inner.backend.pending(query).await?;
            counted += pending.iter().take_while(|pending| pending.id <= to).count() as u64;
            match pending.last() {
                Some(last) if pending.len() == PENDING_BATCH && last.id < to => {
                    after = Some(last.id);
                }
                _ => return Ok(self.exactly(counted)),
            }
            if counted >= COUNTED_MAX {
                return Ok(BoundedCount { count: counted, or_more: true });
            }
        }
    }
}

fn report(partitions: Vec<ResetPartition>, is_done: bool) -> ResetReport {
    let sum = |part: fn(&ResetPartition) -> BoundedCount| {
        partitions.iter().map(part).fold(BoundedCount::default(), |sum, one| BoundedCount {
            count: sum.count + one.count,
            or_more: sum.or_more || one.or_more,
        })
    };
    ResetReport {
        again: sum(|partition| partition.again),
        skipped: sum(|partition| partition.skipped),
        dropped: sum(|partition| partition.dropped),
        is_done,
        partitions,
    }
}
