//! Removing a group.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_removed_group_is_gone_from_every_partition_and_messages_remain
    a_removed_group_does_not_block_a_trim
    an_interrupted_removal_can_be_repeated
    a_group_with_a_live_or_reserved_member_is_not_removed
    removing_a_missing_group_or_topic_fails
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{QueueError, RemovedGroup, Trim};
    use headwater_stream::{
        Fence, GroupName, GroupStart, HolderName, LeaseName, Retention, SetName,
    };

    use crate::fixture::*;

    /// Two partitions with three messages each; the group has one pending and the rest unread.
    async fn with_lag(fixture: &QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        fixture.send_many(2, 6).await?;
        fixture.deliver(0, "ann", 1).await?;
        fixture.group(1).await
    }

    async fn remove(fixture: &QueueFixture) -> headwater_queue::Result<RemovedGroup> {
        fixture.queue.remove_group(&fixture.topic, GROUP).await
    }

    pub(super) async fn a_removed_group_is_gone_from_every_partition_and_messages_remain(
        fixture: QueueFixture,
    ) -> Result<()> {
        with_lag(&fixture).await?;
        let other = GroupName::new("audit")?;
        let stream = fixture.stream(0).await?;
        fixture.backend().ensure_group(&stream, &other, GroupStart::Beginning).await?;
        let removed = remove(&fixture).await?;
        assert_eq!(removed, RemovedGroup { pending: 1, lag: Some(5), partitions: 2 });
        let view = fixture.queue.inspect().topic(&fixture.topic).await?;
        assert_eq!((view.length, view.groups), (6, vec!["audit".to_owned()]));
        assert_no_group(remove(&fixture).await);
        // A new group of the same name starts from the beginning.
        assert_eq!(fixture.deliver(0, "bob", 10).await?.len(), 3);
        Ok(())
    }

    pub(super) async fn a_removed_group_does_not_block_a_trim(fixture: QueueFixture) -> Result<()> {
        with_lag(&fixture).await?;
        let trim = Trim { keep: Retention::max_len(0), ..Trim::default() };
        let held = fixture.queue.trim(&fixture.topic, &trim).await?;
        assert_eq!((held.removed, held.held_back), (0, true));
        remove(&fixture).await?;
        let trimmed = fixture.queue.trim(&fixture.topic, &trim).await?;
        assert_eq!((trimmed.removed, trimmed.held_back), (6, false));
        Ok(())
    }

    pub(super) async fn an_interrupted_removal_can_be_repeated(
        fixture: QueueFixture,
    ) -> Result<()> {
        with_lag(&fixture).await?;
        // As if the process had died after the first partition.
        assert!(fixture.backend().remove_group(&fixture.stream(0).await?, &group()).await?);
        assert_eq!(remove(&fixture).await?.partitions, 1);
        assert_no_group(fixture.queue.inspect().group(&fixture.topic, GROUP).await);
        Ok(())
    }

    pub(super) async fn a_group_with_a_live_or_reserved_member_is_not_removed(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        fixture.send_many(1, 3).await?;
        let name = format!("alive-{}", fixture.topic);
        let (group, stream) = (GroupName::new(&name)?, fixture.stream(0).await?);
        fixture.backend().ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let working = format!("m1 worker:a:1 owned {}", fixture.topic);
        let resting = format!("m2 {{0}} owned {}", fixture.topic);
        let tags = membership_tags(&**fixture.backend());
        for tag in tags {
            let members = SetName::new(format!("streaming:mq:members:{tag}{name}"))?;
            fixture.backend().set_add(&members, &[&working, &resting], None).await?;
        }
        for (lease, named) in [("~member", "m1"), ("~resting", "m2")] {
            let holder = HolderName::new("worker:a:1")?;
            let mut fences = Vec::new();
            for tag in tags {
                let lease = format!("streaming:mq:lease:{lease}:{tag}{name}:{named}");
                let (lease, ttl) = (LeaseName::new(lease)?, Duration::from_secs(60));
                let won = fixture.backend().acquire(&lease, &holder, ttl).await?;
                let headwater_stream::AcquireResult::Won(epoch) = won else { panic!("{won:?}") };
                fences.push(Fence { lease, epoch });
            }
            let answer = fixture.queue.remove_group(&fixture.topic, &name).await;
            let Err(QueueError::GroupActive { who, .. }) = &answer else { panic!("{answer:?}") };
            assert_eq!(who, if named == "m1" { "worker:a:1" } else { "m2" });
            assert_eq!(fixture.queue.inspect().group(&fixture.topic, &name).await?.lag, Some(3));
            fixture.backend().release(&holder, &fences).await?;
        }
        fixture.queue.remove_group(&fixture.topic, &name).await?;
        assert_no_group(fixture.queue.inspect().group(&fixture.topic, &name).await);
        Ok(())
    }

    pub(super) async fn removing_a_missing_group_or_topic_fails(
        fixture: QueueFixture,
    ) -> Result<()> {
        assert_no_topic(remove(&fixture).await);
        fixture.create(1).await?;
        assert_no_group(remove(&fixture).await);
        let long = "g".repeat(1000);
        assert_invalid(fixture.queue.remove_group(&fixture.topic, &long).await, "group");
        Ok(())
    }
}
