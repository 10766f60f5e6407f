//! Removing a group: nothing is kept for it any more.
//!
//! Upstream: administrators. Downstream: the groups of a topic's streams.
//! Promises: a group with a member that lives, or will be back, is left alone; each partition changes in one atomic step.
//! After an error, which says so, or a crash half way, some partitions are without it: repeat it. Messages and dead letters stay; the
//! epochs of its partitions stay, too, so that whoever takes the name again fences those who had it.
//! Not here: consumers of other programs, which show no sign of life; they are told that there is no such group.

use tracing::info;

use crate::error::Result;
use crate::interrupted::PartitionProgress;
use crate::keys;
use crate::queue::Queue;
use crate::reset::require_inactive;
use crate::topic::group_name;

/// What became of a group that was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemovedGroup {
    /// Messages it had not settled.
    pub pending: u64,
    /// Messages it had not read; `None` if the server cannot tell for some partition.
    pub lag: Option<u64>,
    /// Partitions it was removed from; those that an earlier, broken removal reached are not among them.
    pub partitions: u16,
}

impl Queue {
    /// Removes a group from all partitions of a topic. What it has not settled or read, it never will.
    ///
    /// A process that joins at the same moment may make it anew.
    pub async fn remove_group(&self, topic: &str, group: &str) -> Result<RemovedGroup> {
        let view = self.inspect().group(topic, group).await?;
        let members = view.members.iter().filter(|member| member.heartbeat_age.is_some());
        let living = members.map(|one| one.consumer.clone().unwrap_or_else(|| one.member.clone()));
        require_inactive(&view, living.collect())?;
        let (topic, group) = (self.existing_topic(topic).await?, group_name(group)?);
        let mut partitions = 0;
        let mut progress = PartitionProgress::new(0..topic.partitions);
        for partition in 0..topic.partitions {
            let stream = keys::stream(&topic, partition);
            progress.next(1);
            match self.inner.backend.remove_group(&stream, &group).await {
                Ok(is_removed) => partitions += u16::from(is_removed),
                Err(error) => {
                    let what =
                        format!("the removal of group `{group}` from topic `{}`", topic.name);
                    let next = "repeat the removal to finish it".to_owned();
                    return Err(progress.interrupt(what, next, error.into()));
                }
            }
        }
        let (pending, lag) = (view.pending, view.lag);
        info!(topic = %topic.name, %group, pending, partitions, "group removed");
        Ok(RemovedGroup { pending, lag, partitions })
    }
}
