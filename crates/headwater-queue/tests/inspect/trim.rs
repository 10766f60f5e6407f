//! Trimming a topic by request.

use crate::setup::on_every_backend;

on_every_backend! {
    a_trim_by_count_keeps_the_newest_of_each_partition
    a_trim_by_age_removes_what_is_old
    a_safe_trim_leaves_what_a_group_needs_and_says_so
    a_forced_trim_removes_what_a_group_needs
    bad_trims_are_refused_without_effect
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{Trim, TrimmedPartition};
    use headwater_stream::{Retention, TrimGuard};

    use crate::setup::*;

    fn keep(count: u64) -> Trim {
        Trim { keep: Retention::max_len(count), ..Trim::default() }
    }

    async fn lengths(setup: &Setup) -> Result<Vec<u64>> {
        let view = setup.queue.inspect().topic(&setup.topic).await?;
        Ok(view.partitions.iter().map(|partition| partition.length).collect())
    }

    pub(super) async fn a_trim_by_count_keeps_the_newest_of_each_partition(
        setup: Setup,
    ) -> Result<()> {
        setup.create(3).await?;
        let sent = setup.send_many(2, 10).await?;
        let report = setup.queue.trim(&setup.topic, &keep(2)).await?;
        assert_eq!((report.removed, report.held_back), (6, false));
        let first = TrimmedPartition { partition: 0, removed: 3, held_back: false };
        assert_eq!(report.partitions[0], first);
        assert_eq!(lengths(&setup).await?, [2, 2, 0]);
        assert_eq!(setup.entries(0).await?[0].id, sent[6].id, "the oldest went");
        let only = Trim { partition: Some(1), ..keep(0) };
        setup.queue.trim(&setup.topic, &only).await?;
        assert_eq!(lengths(&setup).await?, [2, 0, 0]);
        Ok(())
    }

    pub(super) async fn a_trim_by_age_removes_what_is_old(setup: Setup) -> Result<()> {
        setup.create(2).await?;
        setup.send_many(2, 4).await?;
        let by_age = |age| Trim {
            keep: Retention { max_age: Some(age), ..Retention::KEEP_ALL },
            ..Trim::default()
        };
        let report = setup.queue.trim(&setup.topic, &by_age(Duration::from_secs(3600))).await?;
        assert_eq!(report.removed, 0);
        tokio::time::sleep(Duration::from_millis(30)).await;
        let report = setup.queue.trim(&setup.topic, &by_age(Duration::from_millis(10))).await?;
        assert_eq!((report.removed, lengths(&setup).await?), (4, vec![0, 0]));
        Ok(())
    }

    pub(super) async fn a_safe_trim_leaves_what_a_group_needs_and_says_so(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        let sent = setup.send_many(2, 10).await?;
        // On partition 0 one is settled, one in hand, three unread.
        setup.deliver(0, "ann", 2).await?;
        setup.settle(0, "ann", &[sent[0].id]).await?;
        let report = setup.queue.trim(&setup.topic, &keep(0)).await?;
        assert_eq!((report.removed, report.held_back), (6, true));
        assert_eq!(lengths(&setup).await?, [4, 0]);
        assert!(report.partitions[0].held_back && !report.partitions[1].held_back);
        Ok(())
    }

    pub(super) async fn a_forced_trim_removes_what_a_group_needs(setup: Setup) -> Result<()> {
        setup.create(1).await?;
        setup.send_many(1, 5).await?;
        setup.deliver(0, "ann", 2).await?;
        let force = Trim { guard: TrimGuard::Force, ..keep(1) };
        let report = setup.queue.trim(&setup.topic, &force).await?;
        assert_eq!((report.removed, lengths(&setup).await?), (4, vec![1]));
        Ok(())
    }

    pub(super) async fn bad_trims_are_refused_without_effect(setup: Setup) -> Result<()> {
        assert_no_topic(setup.queue.trim(&setup.topic, &keep(1)).await);
        setup.create(2).await?;
        setup.send_many(2, 4).await?;
        let age = Retention { max_age: Some(Duration::ZERO), ..Retention::max_len(0) };
        let bytes = Retention { max_bytes: Some(0), ..Retention::max_len(0) };
        for keep in [Retention::KEEP_ALL, age, bytes] {
            let trim = Trim { keep, ..Trim::default() };
            assert_invalid(setup.queue.trim(&setup.topic, &trim).await, "keeps");
        }
        let nowhere = Trim { partition: Some(2), ..keep(0) };
        assert_invalid(setup.queue.trim(&setup.topic, &nowhere).await, "a partition");
        assert_eq!(lengths(&setup).await?, [2, 2]);
        Ok(())
    }
}
