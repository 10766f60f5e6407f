//! Removing a group.

use crate::setup::on_every_backend;

on_every_backend! {
    a_group_that_is_removed_is_gone_from_every_partition_and_the_messages_stay
    a_group_that_was_removed_holds_back_no_trim
    a_removal_that_was_cut_off_is_repeated
    a_group_with_a_member_that_lives_or_rests_is_left_alone
    what_is_not_there_is_not_removed
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{QueueError, RemovedGroup, Trim};
    use headwater_stream::{
        Fence, GroupName, GroupStart, HolderName, LeaseName, Retention, SetName,
    };

    use crate::setup::*;

    /// Two partitions with three messages each; the group has one in hand and the rest unread.
    async fn behind(setup: &Setup) -> Result<()> {
        setup.create(2).await?;
        setup.send_many(2, 6).await?;
        setup.deliver(0, "ann", 1).await?;
        setup.group(1).await
    }

    async fn remove(setup: &Setup) -> headwater_queue::Result<RemovedGroup> {
        setup.queue.remove_group(&setup.topic, GROUP).await
    }

    pub(super) async fn a_group_that_is_removed_is_gone_from_every_partition_and_the_messages_stay(
        setup: Setup,
    ) -> Result<()> {
        behind(&setup).await?;
        let other = GroupName::new("audit")?;
        let stream = setup.stream(0).await?;
        setup.backend().ensure_group(&stream, &other, GroupStart::Beginning).await?;
        let removed = remove(&setup).await?;
        assert_eq!(removed, RemovedGroup { pending: 1, lag: Some(5), partitions: 2 });
        let view = setup.queue.inspect().topic(&setup.topic).await?;
        assert_eq!((view.length, view.groups), (6, vec!["audit".to_owned()]));
        assert_no_group(remove(&setup).await);
        // Whoever takes the name again begins anew.
        assert_eq!(setup.deliver(0, "bob", 10).await?.len(), 3);
        Ok(())
    }

    pub(super) async fn a_group_that_was_removed_holds_back_no_trim(setup: Setup) -> Result<()> {
        behind(&setup).await?;
        let trim = Trim { keep: Retention::max_len(0), ..Trim::default() };
        let held = setup.queue.trim(&setup.topic, &trim).await?;
        assert_eq!((held.removed, held.held_back), (0, true));
        remove(&setup).await?;
        let trimmed = setup.queue.trim(&setup.topic, &trim).await?;
        assert_eq!((trimmed.removed, trimmed.held_back), (6, false));
        Ok(())
    }

    pub(super) async fn a_removal_that_was_cut_off_is_repeated(setup: Setup) -> Result<()> {
        behind(&setup).await?;
        // As if the process had died after the first partition.
        assert!(setup.backend().remove_group(&setup.stream(0).await?, &group()).await?);
        assert_eq!(remove(&setup).await?.partitions, 1);
        assert_no_group(setup.queue.inspect().group(&setup.topic, GROUP).await);
        Ok(())
    }

    pub(super) async fn a_group_with_a_member_that_lives_or_rests_is_left_alone(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        setup.send_many(1, 3).await?;
        let name = format!("alive-{}", setup.topic);
        let (group, stream) = (GroupName::new(&name)?, setup.stream(0).await?);
        setup.backend().ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let members = SetName::new(format!("streaming:mq:members:{name}"))?;
        let working = format!("m1 worker:a:1 owned {}", setup.topic);
        let resting = format!("m2 {{0}} owned {}", setup.topic);
        setup.backend().set_add(&members, &[&working, &resting], None).await?;
        for (lease, named) in [("~member", "m1"), ("~resting", "m2")] {
            let lease = LeaseName::new(format!("streaming:mq:lease:{lease}:{name}:{named}"))?;
            let holder = HolderName::new("worker:a:1")?;
            let won = setup.backend().acquire(&lease, &holder, Duration::from_secs(60)).await?;
            let headwater_stream::Acquire::Won(epoch) = won else { panic!("{won:?}") };
            let answer = setup.queue.remove_group(&setup.topic, &name).await;
            let Err(QueueError::GroupAtWork { who, .. }) = &answer else { panic!("{answer:?}") };
            assert_eq!(who, if named == "m1" { "worker:a:1" } else { "m2" });
            assert_eq!(setup.queue.inspect().group(&setup.topic, &name).await?.lag, Some(3));
            setup.backend().release(&holder, &[Fence { lease, epoch }]).await?;
        }
        setup.queue.remove_group(&setup.topic, &name).await?;
        assert_no_group(setup.queue.inspect().group(&setup.topic, &name).await);
        Ok(())
    }

    pub(super) async fn what_is_not_there_is_not_removed(setup: Setup) -> Result<()> {
        assert_no_topic(remove(&setup).await);
        setup.create(1).await?;
        assert_no_group(remove(&setup).await);
        let long = "g".repeat(1000);
        assert_invalid(setup.queue.remove_group(&setup.topic, &long).await, "group");
        Ok(())
    }
}
