//! Group statistics.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_group_is_the_sum_of_its_partitions
    the_lag_of_an_unread_partition_is_its_length
    owners_are_shown_with_epoch_and_heartbeat_age
    members_of_the_topic_are_shown_with_their_heartbeat
    all_groups_of_a_topic_are_listed
    a_group_of_another_program_with_a_long_name_is_shown_without_owners
    a_group_that_does_not_exist_is_an_error
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::Mode;
    use headwater_stream::{AcquireResult, GroupName, GroupStart, HolderName, LeaseName, SetName};

    use crate::fixture::*;

    pub(super) async fn a_group_is_the_sum_of_its_partitions(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        let sent = fixture.send_many(2, 10).await?;
        fixture.deliver(0, "ann", 3).await?;
        fixture.settle(0, "ann", &[sent[0].id]).await?;
        fixture.deliver(1, "ann", 1).await?;
        fixture.deliver(1, "bob", 2).await?;

        let view = fixture.queue.inspect().group(&fixture.topic, GROUP).await?;

        assert_eq!((view.topic.as_str(), view.group.as_str()), (fixture.topic.as_str(), GROUP));
        assert_eq!((view.pending, view.lag), (5, Some(4)));
        let consumers: Vec<_> = view
            .consumers
            .iter()
            .map(|consumer| (consumer.name.as_str(), consumer.pending, consumer.partitions))
            .collect();
        assert_eq!(consumers, [("ann", 3, 2), ("bob", 2, 1)]);
        assert!(view.consumers.iter().all(|consumer| consumer.idle < Duration::from_secs(60)));
        let [first, second] = &view.partitions[..] else { panic!("{view:?}") };
        assert_eq!((first.pending, first.lag), (Some(2), Some(2)));
        assert_eq!(first.last_delivered, Some(sent[4].id));
        assert_eq!(first.last_id, Some(sent[8].id));
        assert_eq!((second.pending, second.lag), (Some(3), Some(2)));
        assert_eq!((&first.owner, &view.members[..]), (&None, &[][..]));
        Ok(())
    }

    pub(super) async fn the_lag_of_an_unread_partition_is_its_length(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(3).await?;
        fixture.send_many(2, 6).await?;
        fixture.deliver(0, "ann", 1).await?;
        let view = fixture.queue.inspect().group(&fixture.topic, GROUP).await?;
        let lags: Vec<_> = view.partitions.iter().map(|partition| partition.lag).collect();
        assert_eq!(lags, [Some(2), Some(3), Some(0)]);
        assert_eq!(view.partitions[1].last_delivered, None);
        assert_eq!(view.lag, Some(5));
        Ok(())
    }

    /// The lease of a partition: the name another program knows, or the one with a hash tag.
    fn lease(fixture: &QueueFixture, partition: u16) -> LeaseName {
        let topic = &fixture.topic;
        let name = if fixture.backend().cluster_slot("").is_some() {
            format!("streaming:mq:lease:{{{topic}:{partition}}}:{GROUP}")
        } else {
            format!("streaming:mq:lease:{topic}:{GROUP}:{partition}")
        };
        LeaseName::new(name).expect("a valid name")
    }

    pub(super) async fn owners_are_shown_with_epoch_and_heartbeat_age(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        fixture.group(1).await?;
        let holder = HolderName::new("worker:host:1:a")?;
        // The lease TTL of this queue is 15 s; with 10 s remaining, the lease was renewed 5 s ago.
        let left = Duration::from_secs(10);
        let won = fixture.backend().acquire(&lease(&fixture, 1), &holder, left).await?;
        let AcquireResult::Won(epoch) = won else { panic!("{won:?}") };

        let view = fixture.queue.inspect().group(&fixture.topic, GROUP).await?;

        assert_eq!(view.partitions[0].owner, None);
        let owner = view.partitions[1].owner.as_ref().expect("it is owned");
        assert_eq!((owner.holder.as_str(), owner.epoch), ("worker:host:1:a", epoch.0));
        assert!(owner.remaining <= left, "{owner:?}");
        assert_eq!(owner.heartbeat_age + owner.remaining, Duration::from_secs(15));
        Ok(())
    }

    pub(super) async fn members_of_the_topic_are_shown_with_their_heartbeat(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        // Its own group, because members are listed per group.
        let name = format!("members-of-{}", fixture.topic);
        let group = GroupName::new(&name)?;
        let stream = fixture.stream(0).await?;
        fixture.backend().ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let alive = format!("alive worker:a:1 owned {}", fixture.topic);
        let dead = format!("dead worker:b:2 shared {}", fixture.topic);
        let rests = format!("rests {{0,2}} owned {}", fixture.topic);
        let texts = [
            alive.as_str(),
            dead.as_str(),
            rests.as_str(),
            "other worker:c:3 owned another topic",
            "odd",
        ];
        let holder = HolderName::new("worker:a:1")?;
        for tag in membership_tags(&**fixture.backend()) {
            let members = SetName::new(format!("streaming:mq:members:{tag}{name}"))?;
            fixture.backend().set_add(&members, &texts, None).await?;
            let lease = LeaseName::new(format!("streaming:mq:lease:~member:{tag}{name}:alive"))?;
            fixture.backend().acquire(&lease, &holder, Duration::from_secs(15)).await?;
        }

        let found = fixture.queue.inspect().group(&fixture.topic, &name).await?.members;

        let names: Vec<_> = found
            .iter()
            .map(|member| (member.member.as_str(), member.consumer.as_deref(), member.mode))
            .collect();
        let expected = [
            ("alive", Some("worker:a:1"), Mode::Owned),
            ("dead", Some("worker:b:2"), Mode::Shared),
            ("rests", None, Mode::Owned),
        ];
        assert_eq!(names, expected);
        assert!(found[0].heartbeat_age.is_some() && found[1].heartbeat_age.is_none(), "{found:?}");
        assert_eq!(found[2].reserved, [0, 2]);
        Ok(())
    }

    pub(super) async fn all_groups_of_a_topic_are_listed(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        assert_eq!(fixture.queue.inspect().groups(&fixture.topic).await?, []);
        fixture.send_many(2, 4).await?;
        fixture.deliver(0, "ann", 1).await?;
        let stream = fixture.stream(1).await?;
        let audit = GroupName::new("audit")?;
        fixture.backend().ensure_group(&stream, &audit, GroupStart::End).await?;

        let views = fixture.queue.inspect().groups(&fixture.topic).await?;

        let found: Vec<_> =
            views.iter().map(|view| (view.group.as_str(), view.pending, view.lag)).collect();
        assert_eq!(found, [("audit", 0, Some(2)), (GROUP, 1, Some(3))]);
        let names = fixture.queue.inspect().group_names(&fixture.topic).await?;
        assert_eq!(names, ["audit", GROUP]);
        Ok(())
    }

    pub(super) async fn a_group_of_another_program_with_a_long_name_is_shown_without_owners(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        fixture.send(0, "x").await?;
        fixture.deliver(0, "ann", 1).await?;
        let long = "g".repeat(500);
        let stream = fixture.stream(0).await?;
        let group = GroupName::new(&long)?;
        fixture.backend().ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let won = fixture
            .backend()
            .acquire(&lease(&fixture, 0), &HolderName::new("ann")?, Duration::from_secs(60))
            .await?;
        assert!(matches!(won, AcquireResult::Won(_)));

        let views = fixture.queue.inspect().groups(&fixture.topic).await?;
        let foreign = views.iter().find(|view| view.group == long).expect("the group is listed");
        assert_eq!((foreign.lag, &foreign.partitions[0].owner), (Some(1), &None));
        let both = [(fixture.topic.clone(), long), (fixture.topic.clone(), GROUP.to_owned())];
        let owners = fixture.queue.inspect().owners(&both).await?;
        let holders: Vec<Vec<_>> = owners
            .iter()
            .map(|owners| owners.iter().flatten().map(|owner| owner.holder.as_str()).collect())
            .collect();
        assert_eq!(holders, [vec![], vec!["ann"]]);
        Ok(())
    }

    pub(super) async fn a_group_that_does_not_exist_is_an_error(
        fixture: QueueFixture,
    ) -> Result<()> {
        let inspect = fixture.queue.inspect();
        assert_no_topic(inspect.group(&fixture.topic, GROUP).await);
        assert_no_topic(inspect.groups(&fixture.topic).await);
        fixture.create(2).await?;
        assert_no_group(inspect.group(&fixture.topic, GROUP).await);
        fixture.send(0, "x").await?;
        assert_no_group(inspect.group(&fixture.topic, GROUP).await);
        assert_invalid(inspect.group(&fixture.topic, &"g".repeat(101)).await, "a group name");
        Ok(())
    }
}
