//! Resetting a group to another position of its topic.
//!
//! Upstream: administrators. Downstream: the groups of a topic's streams.
//! Guarantees: a dry run changes nothing and reports what would be redelivered, skipped and dropped; a group with
//! active members is not reset unless [`ResetGuard::Force`] is set; each partition changes in one atomic step. An
//! error after the first partition says which partitions are reset and what to repeat. A group that does not exist is
//! an error.

use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Direction, EntryId, GroupStart, GroupStats, PendingDeliveryQuery, Range, StreamName,
    StreamStats,
};

use crate::error::{QueueError, Result};
use crate::inspect::{GroupView, select_partitions};
use crate::interrupted::PartitionProgress;
use crate::keys;
use crate::limits::COUNTED_MAX;
use crate::pagination::previous;
use crate::queue::Queue;
use crate::topic::{GroupName, Partition, Topic, group_name};

/// Entries counted per call; each may be large.
const COUNT_BATCH: usize = 100;
/// Pending entries counted per call; they are small.
const PENDING_BATCH: usize = 1000;
/// Active members listed in an error.
const LISTED_MAX: usize = 3;

/// The new position of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetTo {
    /// The oldest message.
    Beginning,
    /// After the newest message.
    End,
    /// This message, or the next one if it was removed. The id applies to every partition.
    Id(EntryId),
    /// The first message stored at this time or later.
    Time(Timestamp),
}

/// Whether a group with active members may be reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetGuard {
    /// Fails while a member is alive or a partition is owned.
    #[default]
    RequireInactive,
    /// Resets anyway. Messages in flight are still handled, but their acknowledgements have no effect.
    Force,
}

/// Options of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// The new position.
    pub to: ResetTo,
    /// Only this partition. Default: all.
    pub partition: Option<Partition>,
    /// Whether active members are allowed. Default: [`ResetGuard::RequireInactive`].
    pub guard: ResetGuard,
    /// Report what would happen without changing anything.
    pub dry_run: bool,
}

impl Reset {
    /// A reset of all partitions of an inactive group.
    pub fn to(to: ResetTo) -> Self {
        Self { to, partition: None, guard: ResetGuard::default(), dry_run: false }
    }

    /// Turns this reset into a dry run.
    pub fn dry_run(self) -> Self {
        Self { dry_run: true, ..self }
    }
}

/// A count that stops at a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundedCount {
    /// The number counted.
    pub count: u64,
    /// Whether counting stopped at the limit, so there may be more.
    pub or_more: bool,
}

/// The result of a reset or its dry run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetReport {
    /// Messages already delivered that will be delivered again.
    pub redelivered: BoundedCount,
    /// Messages not delivered that never will be.
    pub skipped: BoundedCount,
    /// Pending messages before the new position; they will not be handled.
    pub dropped: BoundedCount,
    /// Whether it was done; `false` after a dry run.
    pub is_done: bool,
    /// Partition by partition, by number.
    pub partitions: Vec<ResetPartition>,
}

/// The result of a reset or its dry run on one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetPartition {
    /// The partition.
    pub partition: Partition,
    /// The last delivered message before the reset; `None` if the group did not exist on this partition.
    pub previous_position: Option<EntryId>,
    /// The last message that counts as delivered after the reset.
    pub new_position: EntryId,
    /// Messages that will be delivered again.
    pub redelivered: BoundedCount,
    /// Messages that will not be delivered.
    pub skipped: BoundedCount,
    /// Pending messages that will not be handled.
    pub dropped: BoundedCount,
}

impl Queue {
    /// Resets a group of a topic. Fails with [`QueueError::NoGroup`] or, while it is active, with
    /// [`QueueError::GroupActive`].
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
            let planner = ResetPlanner {
                queue: self,
                stream: keys::stream(&topic, partition),
                group: &group,
                stats,
                group_stats: stats.and_then(of_group),
            };
            planned.push(planner.plan(partition, reset.to).await?);
        }
        if !reset.dry_run {
            self.reset_planned(&topic, &group, &planned, reset.to).await?;
        }
        Ok(report(planned, !reset.dry_run))
    }

    async fn check_inactive(&self, topic: &Topic, group: &GroupName) -> Result<()> {
        let view = self.inspect().group(topic.name.as_str(), group.as_str()).await?;
        view.require_complete()?;
        // A reserved member has nothing in flight.
        let members = view.members.iter().filter(|member| member.heartbeat_age.is_some());
        let active = members.filter_map(|member| member.consumer.clone());
        require_inactive(&view, active.collect())
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
                    // Repeating with `End` would also skip messages that arrived since.
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
            ResetTo::Id(_) | ResetTo::Time(_) => GroupStart::After(plan.new_position),
        };
        let backend = &self.inner.backend;
        if backend.reset_group(&stream, group, start).await? {
            return Ok(());
        }
        // The group does not exist on this partition. If another process creates it now, reset it after all.
        if !backend.ensure_group(&stream, group, start).await? {
            backend.reset_group(&stream, group, start).await?;
        }
        Ok(())
    }
}

/// Fails if there are active members or partition owners.
pub(crate) fn require_inactive(view: &GroupView, mut who: Vec<String>) -> Result<()> {
    let owners = view.partitions.iter().filter_map(|partition| partition.owner.as_ref());
    who.extend(owners.map(|owner| owner.holder.clone()));
    who.sort();
    who.dedup();
    if who.is_empty() {
        return Ok(());
    }
    let more = who.len().saturating_sub(LISTED_MAX);
    who.truncate(LISTED_MAX);
    let mut who = who.join(", ");
    if more > 0 {
        who += &format!(" and {more} more");
    }
    let (topic, group) = (view.topic.clone(), view.group.clone());
    Err(QueueError::GroupActive { topic, group, who })
}

/// Plans the reset of one partition.
struct ResetPlanner<'a> {
    queue: &'a Queue,
    stream: StreamName,
    group: &'a GroupName,
    stats: Option<&'a StreamStats>,
    group_stats: Option<GroupStats>,
}

impl ResetPlanner<'_> {
    async fn plan(&self, partition: Partition, to: ResetTo) -> Result<ResetPartition> {
        let previous_position = self.group_stats.as_ref().map(|group| group.last_delivered);
        let last_id = self.stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
        let new_position = match to {
            ResetTo::Beginning => EntryId::MIN,
            // Deleted messages at the end must not move the position back.
            ResetTo::End => last_id.max(previous_position.unwrap_or(EntryId::MIN)),
            ResetTo::Id(id) => previous(id).unwrap_or(EntryId::MIN),
            ResetTo::Time(at) => previous(EntryId::new(at.as_millis(), 0)).unwrap_or(EntryId::MIN),
        };
        let from = previous_position.unwrap_or(EntryId::MIN);
        let mut plan = ResetPartition {
            partition,
            previous_position,
            new_position,
            redelivered: BoundedCount::default(),
            skipped: BoundedCount::default(),
            dropped: BoundedCount::default(),
        };
        if new_position < from {
            plan.redelivered = match (to, self.lag()) {
                (ResetTo::Beginning, Some(lag)) => self.exactly(self.length() - lag),
                _ => self.count(new_position, from).await?,
            };
        } else if new_position > from {
            plan.skipped = match (to, self.lag()) {
                (ResetTo::End, Some(lag)) => self.exactly(lag),
                _ => self.count(from, new_position).await?,
            };
        }
        plan.dropped = self.count_pending(new_position).await?;
        Ok(plan)
    }

    fn length(&self) -> u64 {
        self.stats.map_or(0, |stats| stats.length)
    }

    /// Messages not delivered to the group, if the server can tell.
    fn lag(&self) -> Option<u64> {
        match &self.group_stats {
            None => Some(self.length()),
            Some(group) => group.lag.filter(|lag| *lag <= self.length()),
        }
    }

    fn exactly(&self, count: u64) -> BoundedCount {
        BoundedCount { count, or_more: false }
    }

    /// Counts the messages after one position up to another.
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

    /// Counts the pending messages up to a position.
    async fn count_pending(&self, to: EntryId) -> Result<BoundedCount> {
        let mut counted = 0;
        if self.group_stats.as_ref().is_none_or(|group| group.pending == 0) {
            return Ok(BoundedCount::default());
        }
        let mut after = None;
        loop {
            let query = PendingDeliveryQuery {
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
        redelivered: sum(|partition| partition.redelivered),
        skipped: sum(|partition| partition.skipped),
        dropped: sum(|partition| partition.dropped),
        is_done,
        partitions,
    }
}
