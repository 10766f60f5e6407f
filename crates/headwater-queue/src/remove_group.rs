//! Removing a consumer group from a topic.
//!
//! Upstream: administrators. Downstream: the groups of a topic's streams.
//! Guarantees: a group with a live or a reserved member is not removed; each partition changes in one atomic step.
//! After an error or a crash the group may be removed from some partitions only: repeat the call. Messages and dead
//! letters remain. The epochs of its partitions remain, too, so that a new group of the same name fences the old
//! consumers. Not detected: consumers of other programs, which have no heartbeat; their reads fail because the group
//! is gone.

use tracing::info;

use crate::error::Result;
use crate::interrupted::PartitionProgress;
use crate::keys;
use crate::queue::Queue;
use crate::reset::require_inactive;
use crate::topic::group_name;

/// The result of removing a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemovedGroup {
    /// Messages delivered and not settled.
    pub pending: u64,
    /// Messages not delivered; `None` if the server cannot tell for some partition.
    pub lag: Option<u64>,
    /// Partitions it was removed from by this call.
    pub partitions: u16,
}

impl Queue {
    /// Removes a group from all partitions of a topic. Its pending and unread messages will not be delivered to it.
    ///
    /// Fails with [`QueueError::GroupActive`](crate::QueueError::GroupActive) while it has a live member or an owned
    /// partition. A process that joins concurrently may create the group again.
    pub async fn remove_group(&self, topic: &str, group: &str) -> Result<RemovedGroup> {
        let view = self.inspect().group(topic, group).await?;
        view.require_complete()?;
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
