//! Trimming a topic on request.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_trim_by_count_keeps_the_newest_of_each_partition
    a_trim_by_age_removes_old_messages
    a_safe_trim_keeps_and_reports_messages_a_group_needs
    a_forced_trim_removes_messages_a_group_needs
    invalid_trims_are_rejected_without_effect
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{Trim, TrimmedPartition};
    use headwater_stream::{Retention, TrimGuard};

    use crate::fixture::*;

    fn keep(count: u64) -> Trim {
        Trim { keep: Retention::max_len(count), ..Trim::default() }
    }

    async fn lengths(fixture: &QueueFixture) -> Result<Vec<u64>> {
        let view = fixture.queue.inspect().topic(&fixture.topic).await?;
        Ok(view.partitions.iter().map(|partition| partition.length).collect())
    }

    pub(super) async fn a_trim_by_count_keeps_the_newest_of_each_partition(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(3).await?;
        let sent = fixture.send_many(2, 10).await?;
        let report = fixture.queue.trim(&fixture.topic, &keep(2)).await?;
        assert_eq!((report.removed, report.held_back), (6, false));
        let first = TrimmedPartition { partition: 0, removed: 3, held_back: false };
        assert_eq!(report.partitions[0], first);
        assert_eq!(lengths(&fixture).await?, [2, 2, 0]);
        assert_eq!(fixture.entries(0).await?[0].id, sent[6].id, "the oldest were removed");
        let only = Trim { partition: Some(1), ..keep(0) };
        fixture.queue.trim(&fixture.topic, &only).await?;
        assert_eq!(lengths(&fixture).await?, [2, 0, 0]);
        Ok(())
    }

    pub(super) async fn a_trim_by_age_removes_old_messages(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        fixture.send_many(2, 4).await?;
        let by_age = |age| Trim {
            keep: Retention { max_age: Some(age), ..Retention::KEEP_ALL },
            ..Trim::default()
        };
        let report = fixture.queue.trim(&fixture.topic, &by_age(Duration::from_secs(3600))).await?;
        assert_eq!(report.removed, 0);
        tokio::time::sleep(Duration::from_millis(30)).await;
        let report = fixture.queue.trim(&fixture.topic, &by_age(Duration::from_millis(10))).await?;
        assert_eq!((report.removed, lengths(&fixture).await?), (4, vec![0, 0]));
        Ok(())
    }

    pub(super) async fn a_safe_trim_keeps_and_reports_messages_a_group_needs(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let sent = fixture.send_many(2, 10).await?;
        // On partition 0 one is settled, one pending, three unread.
        fixture.deliver(0, "ann", 2).await?;
        fixture.settle(0, "ann", &[sent[0].id]).await?;
        let report = fixture.queue.trim(&fixture.topic, &keep(0)).await?;
        assert_eq!((report.removed, report.held_back), (6, true));
        assert_eq!(lengths(&fixture).await?, [4, 0]);
        assert!(report.partitions[0].held_back && !report.partitions[1].held_back);
        Ok(())
    }

    pub(super) async fn a_forced_trim_removes_messages_a_group_needs(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        fixture.send_many(1, 5).await?;
        fixture.deliver(0, "ann", 2).await?;
        let force = Trim { guard: TrimGuard::Force, ..keep(1) };
        let report = fixture.queue.trim(&fixture.topic, &force).await?;
        assert_eq!((report.removed, lengths(&fixture).await?), (4, vec![1]));
        Ok(())
    }

    pub(super) async fn invalid_trims_are_rejected_without_effect(
        fixture: QueueFixture,
    ) -> Result<()> {
        assert_no_topic(fixture.queue.trim(&fixture.topic, &keep(1)).await);
        fixture.create(2).await?;
        fixture.send_many(2, 4).await?;
        let age = Retention { max_age: Some(Duration::ZERO), ..Retention::max_len(0) };
        let bytes = Retention { max_bytes: Some(0), ..Retention::max_len(0) };
        for keep in [Retention::KEEP_ALL, age, bytes] {
            let trim = Trim { keep, ..Trim::default() };
            assert_invalid(fixture.queue.trim(&fixture.topic, &trim).await, "keeps");
        }
        let nowhere = Trim { partition: Some(2), ..keep(0) };
        assert_invalid(fixture.queue.trim(&fixture.topic, &nowhere).await, "a partition");
        assert_eq!(lengths(&fixture).await?, [2, 2]);
        Ok(())
    }
}
