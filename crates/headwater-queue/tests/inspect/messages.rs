//! Listing messages of all partitions.

use crate::fixture::on_every_backend;

on_every_backend! {
    messages_of_all_partitions_are_one_list_by_time
    concatenated_pages_in_both_directions_are_the_whole_list
    a_range_by_id_and_by_time_includes_both_ends
    messages_of_other_programs_and_malformed_ones_are_shown
    large_messages_come_in_short_pages
    one_message_is_found_by_its_id
    invalid_ranges_are_rejected
}

mod bodies {
    use anyhow::Result;
    use headwater_queue::{Bound, MessageQuery, NewMessage, StoredMessage};
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{Direction, EntryId, Fields, Retention};

    use crate::fixture::*;

    fn page_of(limit: usize) -> MessageQuery {
        MessageQuery { limit, ..MessageQuery::default() }
    }

    async fn walk(fixture: &QueueFixture, mut query: MessageQuery) -> Result<Vec<StoredMessage>> {
        let mut items = Vec::new();
        loop {
            let page = fixture.queue.inspect().messages(&fixture.topic, &query).await?;
            assert!(page.items.len() <= query.limit);
            items.extend(page.items);
            let Some(next) = page.next else { return Ok(items) };
            query.cursor = Some(next);
        }
    }

    fn positions(items: &[StoredMessage]) -> Vec<(EntryId, u16)> {
        items.iter().map(|message| (message.id, message.partition)).collect()
    }

    async fn sent(fixture: &QueueFixture) -> Result<Vec<(EntryId, u16)>> {
        fixture.create(5).await?;
        let sent = fixture.send_many(4, 23).await?;
        let mut positions: Vec<_> = sent.iter().map(|sent| (sent.id, sent.partition)).collect();
        positions.sort();
        Ok(positions)
    }

    pub(super) async fn messages_of_all_partitions_are_one_list_by_time(
        fixture: QueueFixture,
    ) -> Result<()> {
        let expected = sent(&fixture).await?;
        let page = fixture.queue.inspect().messages(&fixture.topic, &page_of(100)).await?;
        assert_eq!((positions(&page.items), page.next), (expected, None));
        let first = &page.items[0];
        let message = first.message.as_ref().expect("it is well-formed");
        assert_eq!((message.payload.as_ref(), message.deliveries), (&b"0"[..], 0));
        assert_eq!(first.stored_at, Timestamp::from_millis(first.id.ms));
        Ok(())
    }

    pub(super) async fn concatenated_pages_in_both_directions_are_the_whole_list(
        fixture: QueueFixture,
    ) -> Result<()> {
        let mut expected = sent(&fixture).await?;
        for limit in [1, 4, 22, 23, 24] {
            assert_eq!(positions(&walk(&fixture, page_of(limit)).await?), expected, "{limit}");
        }
        expected.reverse();
        for limit in [1, 4, 23] {
            let query = MessageQuery { direction: Direction::Backward, ..page_of(limit) };
            assert_eq!(positions(&walk(&fixture, query).await?), expected, "{limit} backward");
        }
        let one = MessageQuery { partition: Some(2), ..page_of(2) };
        expected.reverse();
        expected.retain(|(_, partition)| *partition == 2);
        assert_eq!(positions(&walk(&fixture, one).await?), expected);
        Ok(())
    }

    pub(super) async fn a_range_by_id_and_by_time_includes_both_ends(
        fixture: QueueFixture,
    ) -> Result<()> {
        let all = sent(&fixture).await?;
        let (from, to) = (all[5].0, all[15].0);
        let expected: Vec<_> =
            all.iter().copied().filter(|(id, _)| (from..=to).contains(id)).collect();
        let by_id =
            MessageQuery { from: Some(Bound::Id(from)), to: Some(Bound::Id(to)), ..page_of(3) };
        assert_eq!(positions(&walk(&fixture, by_id).await?), expected);
        let at = |id: EntryId| Some(Bound::Time(Timestamp::from_millis(id.ms)));
        let by_time = MessageQuery { from: at(from), to: at(to), ..page_of(3) };
        let expected: Vec<_> =
            all.iter().copied().filter(|(id, _)| (from.ms..=to.ms).contains(&id.ms)).collect();
        assert_eq!(positions(&walk(&fixture, by_time).await?), expected);
        let never = Some(Bound::Time(Timestamp::from_millis(7)));
        let before = MessageQuery { to: never, ..page_of(3) };
        assert_eq!(walk(&fixture, before).await?, []);
        Ok(())
    }

    pub(super) async fn messages_of_other_programs_and_malformed_ones_are_shown(
        fixture: QueueFixture,
    ) -> Result<()> {
        let stream = fixture.stream(0).await?;
        let foreign = Fields::new([("data", "{}"), ("issue_id", "7")]);
        let malformed = Fields::new([("payload", "p"), ("retryCount", "many")]);
        let entries = [foreign.clone(), malformed.clone()];
        fixture.backend().append(&stream, &entries, &Retention::KEEP_ALL).await?;
        let found = walk(&fixture, page_of(10)).await?;
        assert_eq!(found[0].message.as_ref().expect("it exists").fields, foreign);
        assert_eq!(found[1].message.as_ref().expect_err("it is malformed").field, "retryCount");
        assert_eq!(found[1].fields, malformed);
        Ok(())
    }

    pub(super) async fn large_messages_come_in_short_pages(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        for partition in [0, 1] {
            for _ in 0..10 {
                let message = NewMessage::new(vec![7; 1 << 20]).to_partition(partition);
                fixture.producer.send(&fixture.topic, message).await?;
            }
        }
        let first = fixture.queue.inspect().messages(&fixture.topic, &page_of(1000)).await?;
        assert!(first.items.len() < 20 && first.next.is_some(), "{} items", first.items.len());
        assert_eq!(walk(&fixture, page_of(1000)).await?.len(), 20);
        Ok(())
    }

    pub(super) async fn one_message_is_found_by_its_id(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        let sent = fixture.send(1, "this").await?;
        let inspect = fixture.queue.inspect();
        let found = inspect.message(&fixture.topic, 1, sent.id).await?.expect("it exists");
        assert_eq!(found.message.expect("it exists").payload, "this");
        assert_eq!(inspect.message(&fixture.topic, 0, sent.id).await?, None);
        assert_invalid(inspect.message(&fixture.topic, 2, sent.id).await, "a partition");
        Ok(())
    }

    pub(super) async fn invalid_ranges_are_rejected(fixture: QueueFixture) -> Result<()> {
        let inspect = fixture.queue.inspect();
        assert_no_topic(inspect.messages(&fixture.topic, &page_of(1)).await);
        assert_no_topic(inspect.message(&fixture.topic, 0, EntryId::MIN).await);
        fixture.create(2).await?;
        assert_eq!(inspect.messages(&fixture.topic, &page_of(1)).await?.items, []);
        for limit in [0, 1001] {
            assert_invalid(inspect.messages(&fixture.topic, &page_of(limit)).await, "limit");
        }
        let nowhere = MessageQuery { partition: Some(2), ..page_of(1) };
        assert_invalid(inspect.messages(&fixture.topic, &nowhere).await, "a partition");
        let upside_down = MessageQuery {
            from: Some(Bound::Id(EntryId::new(8, 0))),
            to: Some(Bound::Time(Timestamp::from_millis(7))),
            ..page_of(1)
        };
        assert_invalid(inspect.messages(&fixture.topic, &upside_down).await, "a range");

        fixture.send_many(2, 4).await?;
        let cursor = inspect.messages(&fixture.topic, &page_of(1)).await?.next;
        let other_way =
            MessageQuery { cursor: cursor.clone(), direction: Direction::Backward, ..page_of(1) };
        assert_invalid(inspect.messages(&fixture.topic, &other_way).await, "a cursor");
        let other = headwater_testkit::unique("other");
        fixture.queue.topics().create(&other, 1, quick()).await?;
        let elsewhere = MessageQuery { cursor, ..page_of(1) };
        assert_invalid(inspect.messages(&other, &elsewhere).await, "a cursor");
        Ok(())
    }
}
