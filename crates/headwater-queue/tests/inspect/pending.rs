//! Pending entries of all partitions in one list.

use crate::setup::on_every_backend;

on_every_backend! {
    pending_entries_of_all_partitions_are_one_list_oldest_first
    pages_put_together_are_the_whole_list
    what_is_settled_between_two_pages_is_not_missed_nor_doubled
    filters_choose_partition_consumer_and_idle_time
    a_page_over_many_partitions_costs_little_of_each
    bad_questions_are_refused
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{PendingFilter, PendingView};
    use headwater_stream::EntryId;

    use crate::setup::*;

    fn page_of(limit: usize) -> PendingFilter {
        PendingFilter { limit, ..PendingFilter::default() }
    }

    fn ids(items: &[PendingView]) -> Vec<(EntryId, u16)> {
        items.iter().map(|pending| (pending.id, pending.partition)).collect()
    }

    async fn walk(setup: &Setup, mut filter: PendingFilter) -> Result<Vec<PendingView>> {
        let mut items = Vec::new();
        loop {
            let page = setup.queue.inspect().pending(&setup.topic, GROUP, &filter).await?;
            assert!(page.items.len() <= filter.limit);
            items.extend(page.items);
            let Some(next) = page.next else { return Ok(items) };
            filter.cursor = Some(next);
        }
    }

    /// Twelve messages on three of four partitions, all in hand.
    async fn in_hand(setup: &Setup) -> Result<Vec<(EntryId, u16)>> {
        setup.create(4).await?;
        let sent = setup.send_many(3, 12).await?;
        setup.deliver(0, "ann", 10).await?;
        setup.deliver(1, "bob", 10).await?;
        setup.deliver(2, "ann", 2).await?;
        setup.deliver(2, "bob", 10).await?;
        let mut places: Vec<_> = sent.iter().map(|sent| (sent.id, sent.partition)).collect();
        places.sort();
        Ok(places)
    }

    pub(super) async fn pending_entries_of_all_partitions_are_one_list_oldest_first(
        setup: Setup,
    ) -> Result<()> {
        let places = in_hand(&setup).await?;
        let page = setup.queue.inspect().pending(&setup.topic, GROUP, &page_of(100)).await?;
        assert_eq!((ids(&page.items), page.next), (places, None));
        for pending in &page.items {
            assert_eq!(pending.deliveries, 1);
            assert!(pending.idle < Duration::from_secs(60));
            assert!(["ann", "bob"].contains(&pending.consumer.as_str()));
        }
        Ok(())
    }

    pub(super) async fn pages_put_together_are_the_whole_list(setup: Setup) -> Result<()> {
        let places = in_hand(&setup).await?;
        for limit in [1, 2, 5, 11, 12, 13] {
            assert_eq!(ids(&walk(&setup, page_of(limit)).await?), places, "pages of {limit}");
        }
        Ok(())
    }

    pub(super) async fn what_is_settled_between_two_pages_is_not_missed_nor_doubled(
        setup: Setup,
    ) -> Result<()> {
        let places = in_hand(&setup).await?;
        let inspect = setup.queue.inspect();
        let first = inspect.pending(&setup.topic, GROUP, &page_of(5)).await?;
        // The last of the page and the one after it.
        for (id, partition) in &places[4..6] {
            setup.settle(*partition, "ann", &[*id]).await?;
        }
        let rest = walk(&setup, PendingFilter { cursor: first.next, ..page_of(5) }).await?;
        assert_eq!(ids(&rest), places[6..]);
        Ok(())
    }

    pub(super) async fn filters_choose_partition_consumer_and_idle_time(
        setup: Setup,
    ) -> Result<()> {
        let places = in_hand(&setup).await?;
        let of_two = PendingFilter { partition: Some(2), ..page_of(3) };
        let expected: Vec<_> = places.iter().copied().filter(|(_, p)| *p == 2).collect();
        assert_eq!(ids(&walk(&setup, of_two).await?), expected);
        let of_bob = PendingFilter { consumer: Some("bob".to_owned()), ..page_of(4) };
        let found = walk(&setup, of_bob).await?;
        assert_eq!(found.len(), 6);
        assert!(found.iter().all(|pending| pending.consumer == "bob"));
        let of_nobody = PendingFilter { consumer: Some("zoe".to_owned()), ..page_of(4) };
        assert_eq!(walk(&setup, of_nobody).await?, []);
        let old = PendingFilter { min_idle: Duration::from_secs(3600), ..page_of(4) };
        assert_eq!(walk(&setup, old).await?, []);
        let on_the_empty_one = PendingFilter { partition: Some(3), ..page_of(4) };
        assert_eq!(walk(&setup, on_the_empty_one).await?, []);
        Ok(())
    }

    pub(super) async fn a_page_over_many_partitions_costs_little_of_each(
        setup: Setup,
    ) -> Result<()> {
        setup.create(256).await?;
        let mut places = Vec::new();
        for partition in [3, 200, 255] {
            let sent = setup.send(partition, "x").await?;
            setup.deliver(partition, "ann", 1).await?;
            places.push((sent.id, partition));
        }
        assert_eq!(ids(&walk(&setup, page_of(2)).await?), places);
        Ok(())
    }

    pub(super) async fn bad_questions_are_refused(setup: Setup) -> Result<()> {
        let inspect = setup.queue.inspect();
        assert_no_topic(inspect.pending(&setup.topic, GROUP, &page_of(1)).await);
        setup.create(2).await?;
        assert_no_group(inspect.pending(&setup.topic, GROUP, &page_of(1)).await);
        setup.group(0).await?;
        let on_another = PendingFilter { partition: Some(1), ..page_of(1) };
        assert_eq!(inspect.pending(&setup.topic, GROUP, &on_another).await?.items, []);
        for limit in [0, 1001] {
            assert_invalid(inspect.pending(&setup.topic, GROUP, &page_of(limit)).await, "limit");
        }
        let nowhere = PendingFilter { partition: Some(2), ..page_of(1) };
        assert_invalid(inspect.pending(&setup.topic, GROUP, &nowhere).await, "a partition");
        let nobody = PendingFilter { consumer: Some(String::new()), ..page_of(1) };
        assert!(inspect.pending(&setup.topic, GROUP, &nobody).await.is_err());

        setup.send_many(1, 2).await?;
        setup.deliver(0, "ann", 2).await?;
        let cursor = inspect.pending(&setup.topic, GROUP, &page_of(1)).await?.next;
        let other = Setup { topic: headwater_testkit::unique("other"), ..setup };
        other.create(2).await?;
        other.group(0).await?;
        let elsewhere = PendingFilter { cursor: cursor.clone(), ..page_of(1) };
        assert_invalid(inspect.pending(&other.topic, GROUP, &elsewhere).await, "a cursor");
        let nonsense = PendingFilter { cursor: Some("nonsense".to_owned()), ..page_of(1) };
        assert_invalid(inspect.pending(&other.topic, GROUP, &nonsense).await, "a cursor");
        Ok(())
    }
}
