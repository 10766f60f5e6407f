//! Resetting a group.

use crate::setup::on_every_backend;

on_every_backend! {
    a_dry_run_says_what_a_reset_would_do_and_does_nothing
    a_group_that_is_reset_to_the_beginning_reads_everything_again
    a_group_that_is_reset_to_the_end_skips_the_rest
    a_group_that_is_reset_to_an_id_reads_it_next
    a_group_that_is_reset_to_a_time_reads_what_was_stored_then
    one_partition_can_be_reset_alone
    a_group_begins_where_it_is_reset_to_also_on_partitions_it_has_not_read
    a_group_with_a_living_member_or_owner_is_left_alone_unless_forced
    bad_resets_are_refused_without_effect
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{QueueError, Reset, ResetGuard, ResetReport, ResetTo, Sent};
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{EntryId, GroupName, GroupStart, HolderName, LeaseName, SetName};

    use crate::setup::*;

    /// Two partitions with six messages each. On the first the group has two settled, two in hand and two unread; on the
    /// second it has all unread.
    async fn half_way(setup: &Setup) -> Result<Vec<Sent>> {
        setup.create(2).await?;
        let sent = setup.send_many(2, 12).await?;
        setup.deliver(0, "ann", 4).await?;
        setup.settle(0, "ann", &[sent[0].id, sent[2].id]).await?;
        setup.group(1).await?;
        Ok(sent)
    }

    async fn reset(setup: &Setup, reset: Reset) -> headwater_queue::Result<ResetReport> {
        setup.queue.reset_group(&setup.topic, GROUP, &reset).await
    }

    fn counts(report: &ResetReport) -> (u64, u64, u64) {
        assert!(!(report.redelivered.or_more || report.skipped.or_more || report.dropped.or_more));
        (report.redelivered.count, report.skipped.count, report.dropped.count)
    }

    async fn position(setup: &Setup) -> Result<(u64, Option<u64>)> {
        let view = setup.queue.inspect().group(&setup.topic, GROUP).await?;
        Ok((view.pending, view.lag))
    }

    /// What the group reads next, over both partitions.
    async fn reads(setup: &Setup) -> Result<usize> {
        Ok(setup.deliver(0, "bob", 100).await?.len() + setup.deliver(1, "bob", 100).await?.len())
    }

    pub(super) async fn a_dry_run_says_what_a_reset_would_do_and_does_nothing(
        setup: Setup,
    ) -> Result<()> {
        let sent = half_way(&setup).await?;
        let before = position(&setup).await?;
        let at = |index: usize| Timestamp::from_millis(sent[index].id.ms);
        let again_from_the_third = sent.iter().step_by(2).take(4);
        let again = again_from_the_third.filter(|one| one.id.ms >= at(4).as_millis()).count();
        for (to, expected) in [
            (ResetTo::Beginning, Some((4, 0, 0))),
            (ResetTo::End, Some((0, 8, 2))),
            (ResetTo::Id(EntryId::MIN), Some((4, 0, 0))),
            (ResetTo::Id(EntryId::MAX), Some((0, 8, 2))),
            (ResetTo::Time(at(4)), None),
        ] {
            let report = reset(&setup, Reset::to(to).dry_run()).await?;
            assert!(!report.is_done);
            match expected {
                Some(expected) => assert_eq!(counts(&report), expected, "{to:?}"),
                None => assert_eq!(report.partitions[0].redelivered.count, again as u64, "{to:?}"),
            }
            assert_eq!(report.partitions[0].previous_position, Some(sent[6].id), "{to:?}");
            assert_eq!(position(&setup).await?, before, "{to:?}");
        }
        Ok(())
    }

    pub(super) async fn a_group_that_is_reset_to_the_beginning_reads_everything_again(
        setup: Setup,
    ) -> Result<()> {
        half_way(&setup).await?;
        let report = reset(&setup, Reset::to(ResetTo::Beginning)).await?;
        assert!(report.is_done);
        assert_eq!(counts(&report), (4, 0, 0));
        assert_eq!(position(&setup).await?, (0, Some(12)));
        assert_eq!(reads(&setup).await?, 12);
        Ok(())
    }

    pub(super) async fn a_group_that_is_reset_to_the_end_skips_the_rest(
        setup: Setup,
    ) -> Result<()> {
        half_way(&setup).await?;
        let report = reset(&setup, Reset::to(ResetTo::End)).await?;
        assert_eq!(counts(&report), (0, 8, 2));
        assert_eq!(position(&setup).await?, (0, Some(0)));
        assert_eq!(reads(&setup).await?, 0);
        setup.send(0, "new").await?;
        assert_eq!(reads(&setup).await?, 1, "it goes on with what comes");
        Ok(())
    }

    pub(super) async fn a_group_that_is_reset_to_an_id_reads_it_next(setup: Setup) -> Result<()> {
        let sent = half_way(&setup).await?;
        let back = Reset { partition: Some(0), ..Reset::to(ResetTo::Id(sent[2].id)) };
        let report = reset(&setup, back).await?;
        assert_eq!(counts(&report), (3, 0, 0));
        assert_eq!(setup.deliver(0, "bob", 1).await?[0].id, sent[2].id);
        let ahead = Reset { partition: Some(1), ..Reset::to(ResetTo::Id(sent[7].id)) };
        let report = reset(&setup, ahead).await?;
        assert_eq!(counts(&report), (0, 3, 0));
        assert_eq!(setup.deliver(1, "bob", 1).await?[0].id, sent[7].id);
        Ok(())
    }

    pub(super) async fn a_group_that_is_reset_to_a_time_reads_what_was_stored_then(
        setup: Setup,
    ) -> Result<()> {
        half_way(&setup).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let late = setup.send(1, "late").await?;
        let at = Timestamp::from_millis(late.id.ms);
        reset(&setup, Reset::to(ResetTo::Time(at))).await?;
        assert_eq!(setup.deliver(0, "bob", 10).await?, []);
        assert_eq!(setup.deliver(1, "bob", 10).await?[0].id, late.id);
        Ok(())
    }

    pub(super) async fn one_partition_can_be_reset_alone(setup: Setup) -> Result<()> {
        half_way(&setup).await?;
        let one = Reset { partition: Some(1), ..Reset::to(ResetTo::End) };
        let report = reset(&setup, one).await?;
        assert_eq!((report.partitions.len(), counts(&report)), (1, (0, 6, 0)));
        assert_eq!(position(&setup).await?, (2, Some(2)), "the other one is as it was");
        Ok(())
    }

    pub(super) async fn a_group_begins_where_it_is_reset_to_also_on_partitions_it_has_not_read(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        setup.send_many(2, 4).await?;
        setup.deliver(0, "ann", 1).await?;
        let report = reset(&setup, Reset::to(ResetTo::End)).await?;
        assert_eq!(counts(&report), (0, 3, 1));
        assert_eq!(report.partitions[1].previous_position, None);
        assert_eq!(reads(&setup).await?, 0);
        Ok(())
    }

    pub(super) async fn a_group_with_a_living_member_or_owner_is_left_alone_unless_forced(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        setup.send_many(1, 3).await?;
        let name = format!("at-work-{}", setup.topic);
        let (group, stream) = (GroupName::new(&name)?, setup.stream(0).await?);
        setup.backend().ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let members = SetName::new(format!("streaming:mq:members:{name}"))?;
        let text = format!("m1 worker:a:1 owned {}", setup.topic);
        setup.backend().set_add(&members, &[&text], None).await?;
        let to_end = Reset::to(ResetTo::End);
        let reset = async |reset| setup.queue.reset_group(&setup.topic, &name, &reset).await;
        let lag = async || {
            let view = setup.queue.inspect().group(&setup.topic, &name).await?;
            anyhow::Ok(view.lag)
        };
        let owned = if setup.backend().cluster_slot("").is_some() {
            format!("streaming:mq:lease:{{{}:0}}:{name}", setup.topic)
        } else {
            format!("streaming:mq:lease:{}:{name}:0", setup.topic)
        };
        let alive = format!("streaming:mq:lease:~member:{name}:m1");

        for lease in [owned, alive] {
            let (lease, holder) = (LeaseName::new(lease)?, HolderName::new("worker:a:1")?);
            let ttl = Duration::from_secs(60);
            let won = setup.backend().acquire(&lease, &holder, ttl).await?;
            let headwater_stream::Acquire::Won(epoch) = won else { panic!("{won:?}") };
            let answer = reset(to_end).await;
            let Err(QueueError::GroupAtWork { who, .. }) = &answer else { panic!("{answer:?}") };
            assert_eq!(who, "worker:a:1");
            assert_eq!(lag().await?, Some(3), "nothing happened");
            assert_eq!(reset(to_end.dry_run()).await?.skipped.count, 3, "a look is free");
            let fence = headwater_stream::Fence { lease, epoch };
            setup.backend().release(&holder, &[fence]).await?;
        }
        reset(to_end).await?;
        assert_eq!(lag().await?, Some(0), "nobody is at work any more");

        let lease = LeaseName::new(format!("streaming:mq:lease:~member:{name}:m1"))?;
        let holder = HolderName::new("worker:a:2")?;
        setup.backend().acquire(&lease, &holder, Duration::from_secs(60)).await?;
        let forced = Reset { guard: ResetGuard::Force, ..Reset::to(ResetTo::Beginning) };
        reset(forced).await?;
        assert_eq!(lag().await?, Some(3));
        Ok(())
    }

    pub(super) async fn bad_resets_are_refused_without_effect(setup: Setup) -> Result<()> {
        let to_end = Reset::to(ResetTo::End);
        assert_no_topic(reset(&setup, to_end).await);
        setup.create(2).await?;
        assert_no_group(reset(&setup, to_end).await);
        half_way(&setup).await?;
        let before = position(&setup).await?;
        let nowhere = Reset { partition: Some(2), ..to_end };
        assert_invalid(reset(&setup, nowhere).await, "a partition");
        let answer = setup.queue.reset_group(&setup.topic, "unknown", &to_end).await;
        assert_no_group(answer);
        let answer = setup.queue.reset_group(&setup.topic, &"g".repeat(101), &to_end).await;
        assert_invalid(answer, "a group name");
        assert_eq!(position(&setup).await?, before);
        let groups = setup.queue.inspect().topic(&setup.topic).await?.groups;
        assert_eq!(groups, [GROUP], "no group was made");
        Ok(())
    }
}
