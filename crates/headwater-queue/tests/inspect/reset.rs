//! Resetting a group.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_dry_run_reports_a_reset_and_changes_nothing
    a_group_reset_to_the_beginning_reads_everything_again
    a_group_reset_to_the_end_skips_the_rest
    a_group_reset_to_an_id_reads_it_next
    a_group_reset_to_a_time_reads_messages_stored_since
    one_partition_can_be_reset_alone
    a_reset_applies_to_partitions_the_group_has_not_read
    a_group_with_a_live_member_or_owner_is_reset_only_with_force
    invalid_resets_are_rejected_without_effect
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{QueueError, Reset, ResetGuard, ResetReport, ResetTo, Sent};
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{EntryId, GroupName, GroupStart, HolderName, LeaseName, SetName};

    use crate::fixture::*;

    /// Two partitions with six messages each. On the first the group has two settled, two pending and two unread; on
    /// the second all are unread.
    async fn with_some_pending(fixture: &QueueFixture) -> Result<Vec<Sent>> {
        fixture.create(2).await?;
        let sent = fixture.send_many(2, 12).await?;
        fixture.deliver(0, "ann", 4).await?;
        fixture.settle(0, "ann", &[sent[0].id, sent[2].id]).await?;
        fixture.group(1).await?;
        Ok(sent)
    }

    async fn reset(fixture: &QueueFixture, reset: Reset) -> headwater_queue::Result<ResetReport> {
        fixture.queue.reset_group(&fixture.topic, GROUP, &reset).await
    }

    fn counts(report: &ResetReport) -> (u64, u64, u64) {
        assert!(!(report.redelivered.or_more || report.skipped.or_more || report.dropped.or_more));
        (report.redelivered.count, report.skipped.count, report.dropped.count)
    }

    async fn position(fixture: &QueueFixture) -> Result<(u64, Option<u64>)> {
        let view = fixture.queue.inspect().group(&fixture.topic, GROUP).await?;
        Ok((view.pending, view.lag))
    }

    /// What the group reads next, over both partitions.
    async fn reads(fixture: &QueueFixture) -> Result<usize> {
        Ok(fixture.deliver(0, "bob", 100).await?.len()
            + fixture.deliver(1, "bob", 100).await?.len())
    }

    pub(super) async fn a_dry_run_reports_a_reset_and_changes_nothing(
        fixture: QueueFixture,
    ) -> Result<()> {
        let sent = with_some_pending(&fixture).await?;
        let before = position(&fixture).await?;
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
            let report = reset(&fixture, Reset::to(to).dry_run()).await?;
            assert!(!report.is_done);
            match expected {
                Some(expected) => assert_eq!(counts(&report), expected, "{to:?}"),
                None => assert_eq!(report.partitions[0].redelivered.count, again as u64, "{to:?}"),
            }
            assert_eq!(report.partitions[0].previous_position, Some(sent[6].id), "{to:?}");
            assert_eq!(position(&fixture).await?, before, "{to:?}");
        }
        Ok(())
    }

    pub(super) async fn a_group_reset_to_the_beginning_reads_everything_again(
        fixture: QueueFixture,
    ) -> Result<()> {
        with_some_pending(&fixture).await?;
        let report = reset(&fixture, Reset::to(ResetTo::Beginning)).await?;
        assert!(report.is_done);
        assert_eq!(counts(&report), (4, 0, 0));
        assert_eq!(position(&fixture).await?, (0, Some(12)));
        assert_eq!(reads(&fixture).await?, 12);
        Ok(())
    }

    pub(super) async fn a_group_reset_to_the_end_skips_the_rest(
        fixture: QueueFixture,
    ) -> Result<()> {
        with_some_pending(&fixture).await?;
        let report = reset(&fixture, Reset::to(ResetTo::End)).await?;
        assert_eq!(counts(&report), (0, 8, 2));
        assert_eq!(position(&fixture).await?, (0, Some(0)));
        assert_eq!(reads(&fixture).await?, 0);
        fixture.send(0, "new").await?;
        assert_eq!(reads(&fixture).await?, 1, "it continues with new messages");
        Ok(())
    }

    pub(super) async fn a_group_reset_to_an_id_reads_it_next(fixture: QueueFixture) -> Result<()> {
        let sent = with_some_pending(&fixture).await?;
        let back = Reset { partition: Some(0), ..Reset::to(ResetTo::Id(sent[2].id)) };
        let report = reset(&fixture, back).await?;
        assert_eq!(counts(&report), (3, 0, 0));
        assert_eq!(fixture.deliver(0, "bob", 1).await?[0].id, sent[2].id);
        let ahead = Reset { partition: Some(1), ..Reset::to(ResetTo::Id(sent[7].id)) };
        let report = reset(&fixture, ahead).await?;
        assert_eq!(counts(&report), (0, 3, 0));
        assert_eq!(fixture.deliver(1, "bob", 1).await?[0].id, sent[7].id);
        Ok(())
    }

    pub(super) async fn a_group_reset_to_a_time_reads_messages_stored_since(
        fixture: QueueFixture,
    ) -> Result<()> {
        with_some_pending(&fixture).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let late = fixture.send(1, "late").await?;
        let at = Timestamp::from_millis(late.id.ms);
        reset(&fixture, Reset::to(ResetTo::Time(at))).await?;
        assert_eq!(fixture.deliver(0, "bob", 10).await?, []);
        assert_eq!(fixture.deliver(1, "bob", 10).await?[0].id, late.id);
        Ok(())
    }

    pub(super) async fn one_partition_can_be_reset_alone(fixture: QueueFixture) -> Result<()> {
        with_some_pending(&fixture).await?;
        let one = Reset { partition: Some(1), ..Reset::to(ResetTo::End) };
        let report = reset(&fixture, one).await?;
        assert_eq!((report.partitions.len(), counts(&report)), (1, (0, 6, 0)));
        assert_eq!(position(&fixture).await?, (2, Some(2)), "the other partition is unchanged");
        Ok(())
    }

    pub(super) async fn a_reset_applies_to_partitions_the_group_has_not_read(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        fixture.send_many(2, 4).await?;
        fixture.deliver(0, "ann", 1).await?;
        let report = reset(&fixture, Reset::to(ResetTo::End)).await?;
        assert_eq!(counts(&report), (0, 3, 1));
        assert_eq!(report.partitions[1].previous_position, None);
        assert_eq!(reads(&fixture).await?, 0);
        Ok(())
    }

    pub(super) async fn a_group_with_a_live_member_or_owner_is_reset_only_with_force(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        fixture.send_many(1, 3).await?;
        let name = format!("at-work-{}", fixture.topic);
        let (group, stream) = (GroupName::new(&name)?, fixture.stream(0).await?);
        fixture.backend().ensure_group(&stream, &group, GroupStart::Beginning).await?;
        let text = format!("m1 worker:a:1 owned {}", fixture.topic);
        let tags = membership_tags(&**fixture.backend());
        for tag in tags {
            let members = SetName::new(format!("streaming:mq:members:{tag}{name}"))?;
            fixture.backend().set_add(&members, &[&text], None).await?;
        }
        let to_end = Reset::to(ResetTo::End);
        let reset = async |reset| fixture.queue.reset_group(&fixture.topic, &name, &reset).await;
        let lag = async || {
            let view = fixture.queue.inspect().group(&fixture.topic, &name).await?;
            anyhow::Ok(view.lag)
        };
        let owned = if fixture.backend().cluster_slot("").is_some() {
            format!("streaming:mq:lease:{{{}:0}}:{name}", fixture.topic)
        } else {
            format!("streaming:mq:lease:{}:{name}:0", fixture.topic)
        };
        let alive = |tag| format!("streaming:mq:lease:~member:{tag}{name}:m1");

        for leases in [vec![owned], tags.iter().map(alive).collect()] {
            let holder = HolderName::new("worker:a:1")?;
            let mut fences = Vec::new();
            for lease in leases {
                let (lease, ttl) = (LeaseName::new(lease)?, Duration::from_secs(60));
                let won = fixture.backend().acquire(&lease, &holder, ttl).await?;
                let headwater_stream::AcquireResult::Won(epoch) = won else { panic!("{won:?}") };
                fences.push(headwater_stream::Fence { lease, epoch });
            }
            let answer = reset(to_end).await;
            let Err(QueueError::GroupActive { who, .. }) = &answer else { panic!("{answer:?}") };
            assert_eq!(who, "worker:a:1");
            assert_eq!(lag().await?, Some(3), "nothing happened");
            assert_eq!(reset(to_end.dry_run()).await?.skipped.count, 3, "a dry run is allowed");
            fixture.backend().release(&holder, &fences).await?;
        }
        reset(to_end).await?;
        assert_eq!(lag().await?, Some(0), "no member is active");

        let holder = HolderName::new("worker:a:2")?;
        for tag in tags {
            let lease = LeaseName::new(alive(tag))?;
            fixture.backend().acquire(&lease, &holder, Duration::from_secs(60)).await?;
        }
        let forced = Reset { guard: ResetGuard::Force, ..Reset::to(ResetTo::Beginning) };
        reset(forced).await?;
        assert_eq!(lag().await?, Some(3));
        Ok(())
    }

    pub(super) async fn invalid_resets_are_rejected_without_effect(
        fixture: QueueFixture,
    ) -> Result<()> {
        let to_end = Reset::to(ResetTo::End);
        assert_no_topic(reset(&fixture, to_end).await);
        fixture.create(2).await?;
        assert_no_group(reset(&fixture, to_end).await);
        with_some_pending(&fixture).await?;
        let before = position(&fixture).await?;
        let nowhere = Reset { partition: Some(2), ..to_end };
        assert_invalid(reset(&fixture, nowhere).await, "a partition");
        let answer = fixture.queue.reset_group(&fixture.topic, "unknown", &to_end).await;
        assert_no_group(answer);
        let answer = fixture.queue.reset_group(&fixture.topic, &"g".repeat(101), &to_end).await;
        assert_invalid(answer, "a group name");
        assert_eq!(position(&fixture).await?, before);
        let groups = fixture.queue.inspect().topic(&fixture.topic).await?.groups;
        assert_eq!(groups, [GROUP], "no group was created");
        Ok(())
    }
}
