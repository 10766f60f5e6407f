//! Listing pending entries of all partitions.

use crate::fixture::on_every_backend;

on_every_backend! {
    pending_entries_of_all_partitions_are_one_list_oldest_first
    concatenated_pages_are_the_whole_list
    settling_between_two_pages_neither_skips_nor_repeats_entries
    filters_select_by_partition_consumer_and_idle_time
    a_page_over_many_partitions_reads_little_of_each
    invalid_queries_are_rejected
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{PendingFilter, PendingView};
    use headwater_stream::EntryId;

    use crate::fixture::*;

    fn page_of(limit: usize) -> PendingFilter {
        PendingFilter { limit, ..PendingFilter::default() }
    }

    fn ids(items: &[PendingView]) -> Vec<(EntryId, u16)> {
        items.iter().map(|pending| (pending.id, pending.partition)).collect()
    }

    async fn walk(fixture: &QueueFixture, mut filter: PendingFilter) -> Result<Vec<PendingView>> {
        let mut items = Vec::new();
        loop {
            let page = fixture.queue.inspect().pending(&fixture.topic, GROUP, &filter).await?;
            assert!(page.items.len() <= filter.limit);
            items.extend(page.items);
            let Some(next) = page.next else { return Ok(items) };
            filter.cursor = Some(next);
        }
    }

    /// Twelve messages on three of four partitions, all pending.
    async fn deliver_all(fixture: &QueueFixture) -> Result<Vec<(EntryId, u16)>> {
        fixture.create(4).await?;
        let sent = fixture.send_many(3, 12).await?;
        fixture.deliver(0, "ann", 10).await?;
        fixture.deliver(1, "bob", 10).await?;
        fixture.deliver(2, "ann", 2).await?;
        fixture.deliver(2, "bob", 10).await?;
        let mut positions: Vec<_> = sent.iter().map(|sent| (sent.id, sent.partition)).collect();
        positions.sort();
        Ok(positions)
    }

    pub(super) async fn pending_entries_of_all_partitions_are_one_list_oldest_first(
        fixture: QueueFixture,
    ) -> Result<()> {
        let positions = deliver_all(&fixture).await?;
        let inspect = fixture.queue.inspect();
        let page = inspect.pending(&fixture.topic, GROUP, &page_of(100)).await?;
        assert_eq!((ids(&page.items), page.next), (positions.clone(), None));
        // The oldest of some partitions; nothing was sent to the last one, and there is no partition 9.
        let oldest = inspect.oldest_pending(&fixture.topic, GROUP, &[2, 0, 3, 9]).await?;
        let first = |of: u16| {
            *positions.iter().find(|(_, partition)| *partition == of).expect("it was sent")
        };
        assert_eq!(ids(&oldest), [first(2), first(0)]);
        for pending in &page.items {
            assert_eq!(pending.deliveries, 1);
            assert!(pending.idle.is_some_and(|idle| idle < Duration::from_secs(60)));
            assert!(["ann", "bob"].contains(&pending.consumer.as_deref().unwrap_or_default()));
            let (inspect, topic) = (fixture.queue.inspect(), &fixture.topic);
            let alone = async |group, partition, id| {
                inspect.pending_message(topic, group, partition, id).await
            };
            let found = alone(GROUP, pending.partition, pending.id).await?;
            assert_eq!(found.map(|found| found.consumer), Some(pending.consumer.clone()));
            assert_eq!(alone(GROUP, 3, pending.id).await?, None, "it is on another partition");
            assert_eq!(alone("other", pending.partition, pending.id).await?, None);
        }
        Ok(())
    }

    pub(super) async fn concatenated_pages_are_the_whole_list(fixture: QueueFixture) -> Result<()> {
        let positions = deliver_all(&fixture).await?;
        for limit in [1, 2, 5, 11, 12, 13] {
            assert_eq!(ids(&walk(&fixture, page_of(limit)).await?), positions, "pages of {limit}");
        }
        Ok(())
    }

    pub(super) async fn settling_between_two_pages_neither_skips_nor_repeats_entries(
        fixture: QueueFixture,
    ) -> Result<()> {
        let positions = deliver_all(&fixture).await?;
        let inspect = fixture.queue.inspect();
        let first = inspect.pending(&fixture.topic, GROUP, &page_of(5)).await?;
        // The last of the page and the one after it.
        for (id, partition) in &positions[4..6] {
            fixture.settle(*partition, "ann", &[*id]).await?;
        }
        let rest = walk(&fixture, PendingFilter { cursor: first.next, ..page_of(5) }).await?;
        assert_eq!(ids(&rest), positions[6..]);
        Ok(())
    }

    pub(super) async fn filters_select_by_partition_consumer_and_idle_time(
        fixture: QueueFixture,
    ) -> Result<()> {
        let positions = deliver_all(&fixture).await?;
        let of_two = PendingFilter { partition: Some(2), ..page_of(3) };
        let expected: Vec<_> = positions.iter().copied().filter(|(_, p)| *p == 2).collect();
        assert_eq!(ids(&walk(&fixture, of_two).await?), expected);
        let of_bob = PendingFilter { consumer: Some("bob".to_owned()), ..page_of(4) };
        let found = walk(&fixture, of_bob).await?;
        assert_eq!(found.len(), 6);
        assert!(found.iter().all(|pending| pending.consumer.as_deref() == Some("bob")));
        let of_nobody = PendingFilter { consumer: Some("zoe".to_owned()), ..page_of(4) };
        assert_eq!(walk(&fixture, of_nobody).await?, []);
        let old = PendingFilter { min_idle: Duration::from_secs(3600), ..page_of(4) };
        assert_eq!(walk(&fixture, old).await?, []);
        let on_the_empty_one = PendingFilter { partition: Some(3), ..page_of(4) };
        assert_eq!(walk(&fixture, on_the_empty_one).await?, []);
        Ok(())
    }

    pub(super) async fn a_page_over_many_partitions_reads_little_of_each(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(256).await?;
        let mut positions = Vec::new();
        for partition in [3, 200, 255] {
            let sent = fixture.send(partition, "x").await?;
            fixture.deliver(partition, "ann", 1).await?;
            positions.push((sent.id, partition));
        }
        assert_eq!(ids(&walk(&fixture, page_of(2)).await?), positions);
        Ok(())
    }

    pub(super) async fn invalid_queries_are_rejected(fixture: QueueFixture) -> Result<()> {
        let inspect = fixture.queue.inspect();
        assert_no_topic(inspect.pending(&fixture.topic, GROUP, &page_of(1)).await);
        fixture.create(2).await?;
        assert_no_group(inspect.pending(&fixture.topic, GROUP, &page_of(1)).await);
        fixture.group(0).await?;
        let on_another = PendingFilter { partition: Some(1), ..page_of(1) };
        assert_eq!(inspect.pending(&fixture.topic, GROUP, &on_another).await?.items, []);
        for limit in [0, 1001] {
            assert_invalid(inspect.pending(&fixture.topic, GROUP, &page_of(limit)).await, "limit");
        }
        let nowhere = PendingFilter { partition: Some(2), ..page_of(1) };
        assert_invalid(inspect.pending(&fixture.topic, GROUP, &nowhere).await, "a partition");
        let nobody = PendingFilter { consumer: Some(String::new()), ..page_of(1) };
        assert!(inspect.pending(&fixture.topic, GROUP, &nobody).await.is_err());

        fixture.send_many(1, 2).await?;
        fixture.deliver(0, "ann", 2).await?;
        let cursor = inspect.pending(&fixture.topic, GROUP, &page_of(1)).await?.next;
        let other = QueueFixture { topic: headwater_testkit::unique("other"), ..fixture };
        other.create(2).await?;
        other.group(0).await?;
        let elsewhere = PendingFilter { cursor: cursor.clone(), ..page_of(1) };
        assert_invalid(inspect.pending(&other.topic, GROUP, &elsewhere).await, "a cursor");
        let nonsense = PendingFilter { cursor: Some("nonsense".to_owned()), ..page_of(1) };
        assert_invalid(inspect.pending(&other.topic, GROUP, &nonsense).await, "a cursor");
        Ok(())
    }
}
