//! Browsing and purging dead letters.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_dead_letter_is_shown_with_all_its_fields
    concatenated_pages_in_both_directions_are_all_dead_letters
    filters_select_by_reason_key_partition_and_time
    a_filter_with_few_matches_returns_short_pages
    copies_of_a_dead_letter_are_shown_once
    a_message_that_failed_again_after_a_replay_is_not_a_copy
    malformed_dead_letters_are_shown_unchanged
    the_revision_changes_with_every_dead_letter_that_comes_or_goes
    a_purge_removes_matches_and_its_dry_run_does_not
    purging_a_dead_letter_purges_its_copies
    dead_letters_of_a_plain_topic_have_its_name_as_prefix
    invalid_queries_are_rejected_without_effect
}

mod bodies {
    use anyhow::Result;
    use headwater_queue::{
        DeadLetter, DeadLetterFilter, DeadLetterQuery, DeadLetterSelection, PurgeConfig, QueueError,
    };
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{Direction, EntryId, Fields};

    use crate::fixture::*;

    fn page_of(limit: usize) -> DeadLetterQuery {
        DeadLetterQuery { limit, ..DeadLetterQuery::default() }
    }

    fn matching(filter: DeadLetterFilter) -> DeadLetterQuery {
        DeadLetterQuery { filter, ..page_of(3) }
    }

    async fn walk(fixture: &QueueFixture, mut query: DeadLetterQuery) -> Result<Vec<DeadLetter>> {
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let mut items = Vec::new();
        loop {
            let page = letters.browse(&query).await?;
            assert!(page.items.len() <= query.limit);
            items.extend(page.items);
            let Some(next) = page.next else { return Ok(items) };
            query.cursor = Some(next);
        }
    }

    fn ids(letters: &[DeadLetter]) -> Vec<EntryId> {
        letters.iter().map(|letter| letter.id).collect()
    }

    async fn write(fixture: &QueueFixture, count: u64) -> Result<Vec<EntryId>> {
        fixture.create(3).await?;
        let mut ids = Vec::new();
        for number in 0..count {
            ids.push(fixture.dead_letter(&Letter::of(number as u16 % 3, 100 + number)).await?);
        }
        Ok(ids)
    }

    pub(super) async fn a_dead_letter_is_shown_with_all_its_fields(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(3).await?;
        let id = fixture.dead_letter(&Letter::of(2, 7)).await?;
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let letter = letters.show(id).await?;
        assert_eq!(letter.original_topic.as_ref(), Some(&fixture.topic));
        assert_eq!(letter.partition, Some(2));
        assert_eq!(letter.original_id, Some(EntryId::new(7, 0)));
        assert_eq!((letter.key.as_deref(), letter.failures), (Some("k1"), 5));
        assert_eq!(letter.payload.as_ref(), b"\x00\xffpayload");
        assert_eq!((letter.headers["h"].as_str(), letter.replays), ("1", 0));
        assert_eq!(letter.reason, "boom: no such customer");
        let failed_at = Timestamp::from_rfc3339("2026-01-01T00:00:09Z");
        assert_eq!((letter.failed_at, letter.replayed_from), (failed_at, None));
        assert_eq!(letters.browse(&page_of(10)).await?.items, [letter]);
        Ok(())
    }

    pub(super) async fn concatenated_pages_in_both_directions_are_all_dead_letters(
        fixture: QueueFixture,
    ) -> Result<()> {
        // More than one fetch.
        let mut expected = write(&fixture, 60).await?;
        for limit in [1, 7, 24, 60, 100] {
            assert_eq!(ids(&walk(&fixture, page_of(limit)).await?), expected, "{limit}");
        }
        expected.reverse();
        for limit in [7, 100] {
            let query = DeadLetterQuery { direction: Direction::Backward, ..page_of(limit) };
            assert_eq!(ids(&walk(&fixture, query).await?), expected, "{limit} backward");
        }
        Ok(())
    }

    pub(super) async fn filters_select_by_reason_key_partition_and_time(
        fixture: QueueFixture,
    ) -> Result<()> {
        let mut expected = write(&fixture, 6).await?;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        let odd = Letter { key: "k2", reason: "timed out", ..Letter::of(1, 7) };
        let late = fixture.dead_letter(&odd).await?;
        let filter = DeadLetterFilter::default;
        let at = |id: EntryId| Some(Timestamp::from_millis(id.ms));
        for (question, expected) in [
            (DeadLetterFilter { reason: Some("timed".into()), ..filter() }, vec![late]),
            (DeadLetterFilter { reason: Some("TIMED".into()), ..filter() }, vec![]),
            (DeadLetterFilter { key: Some("k2".into()), ..filter() }, vec![late]),
            (DeadLetterFilter { key: Some("k".into()), ..filter() }, vec![]),
            (
                DeadLetterFilter { partition: Some(1), ..filter() },
                vec![expected[1], expected[4], late],
            ),
            (DeadLetterFilter { from: at(late), ..filter() }, vec![late]),
            (DeadLetterFilter { partition: Some(0), from: at(late), ..filter() }, vec![]),
        ] {
            let found = walk(&fixture, matching(question.clone())).await?;
            assert_eq!(ids(&found), expected, "{question:?}");
        }
        let before = at(expected[5]);
        let last = expected[5];
        expected.retain(|id| id.ms <= last.ms);
        let found = walk(&fixture, matching(DeadLetterFilter { to: before, ..filter() })).await?;
        assert_eq!(ids(&found), expected);
        Ok(())
    }

    pub(super) async fn a_filter_with_few_matches_returns_short_pages(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        // More than one page scans.
        let stream = fixture.letters_stream().await?;
        let plain = Fields::new([("partitionId", "0"), ("reason", "common")]);
        let many = vec![plain; 2600];
        for _ in 0..4 {
            let keep = &headwater_stream::Retention::KEEP_ALL;
            fixture.backend().append(&stream, &many, keep).await?;
        }
        let rare = fixture.dead_letter(&Letter { reason: "rare", ..Letter::of(0, 7) }).await?;
        let filter = DeadLetterFilter { reason: Some("rare".into()), ..Default::default() };
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let first = letters.browse(&matching(filter.clone())).await?;
        assert!(first.items.is_empty() && first.next.is_some(), "a page is bounded");
        assert_eq!(ids(&walk(&fixture, matching(filter)).await?), [rare]);
        Ok(())
    }

    pub(super) async fn copies_of_a_dead_letter_are_shown_once(
        fixture: QueueFixture,
    ) -> Result<()> {
        let mut expected = write(&fixture, 4).await?;
        // As after a crash between writing the letter and settling the message.
        fixture.dead_letter(&Letter::of(1, 101)).await?;
        fixture.dead_letter(&Letter { reason: "again", ..Letter::of(1, 101) }).await?;
        // The same id on another partition is another message.
        expected.push(fixture.dead_letter(&Letter::of(2, 101)).await?);
        for limit in [1, 3, 100] {
            assert_eq!(ids(&walk(&fixture, page_of(limit)).await?), expected, "{limit}");
            let query = DeadLetterQuery { direction: Direction::Backward, ..page_of(limit) };
            assert_eq!(walk(&fixture, query).await?.len(), expected.len(), "{limit} backward");
        }
        Ok(())
    }

    pub(super) async fn a_message_that_failed_again_after_a_replay_is_not_a_copy(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let first = fixture.dead_letter(&Letter::of(0, 7)).await?;
        let again = fixture
            .foreign_letter(&[
                ("partitionId", "0"),
                ("originalMessageId", "7-0"),
                ("replayedFrom", &first.to_string()),
                ("replayCount", "1"),
            ])
            .await?;
        let found = walk(&fixture, page_of(10)).await?;
        assert_eq!(ids(&found), [first, again]);
        assert_eq!((found[1].replayed_from, found[1].replays), (Some(first), 1));
        Ok(())
    }

    pub(super) async fn malformed_dead_letters_are_shown_unchanged(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let odd =
            [("what", "ever"), ("partitionId", "many"), ("headers", "["), ("retryCount", "x")];
        let id = fixture.foreign_letter(&odd).await?;
        let second = fixture.foreign_letter(&odd).await?;
        let found = walk(&fixture, page_of(10)).await?;
        assert_eq!(ids(&found), [id, second], "a letter without an original id has no copies");
        assert_eq!(found[0].fields, Fields::new(odd));
        assert_eq!((found[0].partition, found[0].reason.as_str()), (None, ""));
        Ok(())
    }

    pub(super) async fn the_revision_changes_with_every_dead_letter_that_comes_or_goes(
        fixture: QueueFixture,
    ) -> Result<()> {
        let ids = write(&fixture, 3).await?;
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let three = letters.revision().await?;
        assert_eq!(letters.revision().await?, three);
        let mut seen = vec![three];
        let purge = |id| DeadLetterSelection::Ids(vec![id]);
        // One goes, another one comes, so that there are as many as before; then the newest one goes.
        assert_eq!(letters.purge(purge(ids[1]), &PurgeConfig::default()).await?.purged, 1);
        seen.push(letters.revision().await?);
        let newest = fixture.dead_letter(&Letter::of(1, 900)).await?;
        seen.push(letters.revision().await?);
        assert_eq!(letters.purge(purge(newest), &PurgeConfig::default()).await?.purged, 1);
        seen.push(letters.revision().await?);
        fixture.dead_letter(&Letter::of(1, 901)).await?;
        seen.push(letters.revision().await?);
        // The second and the fourth have the same dead letters, but nobody has to know that.
        for (index, one) in seen.iter().enumerate() {
            assert!(!seen[index + 1..].contains(one), "{seen:?}");
        }
        Ok(())
    }

    pub(super) async fn a_purge_removes_matches_and_its_dry_run_does_not(
        fixture: QueueFixture,
    ) -> Result<()> {
        let ids = write(&fixture, 60).await?;
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let some = DeadLetterFilter { partition: Some(1), ..Default::default() };
        let dry = PurgeConfig { dry_run: true };
        let report = letters.purge(DeadLetterSelection::Matching(some.clone()), &dry).await?;
        assert_eq!((report.purged, report.is_done), (20, false));
        assert_eq!(fixture.remaining_letters().await?, ids, "nothing happened");
        let report =
            letters.purge(DeadLetterSelection::Matching(some), &PurgeConfig::default()).await?;
        assert_eq!((report.purged, report.is_done), (20, true));
        assert_eq!(fixture.remaining_letters().await?.len(), 40);
        let all = DeadLetterSelection::Matching(DeadLetterFilter::default());
        assert_eq!(letters.purge(all.clone(), &PurgeConfig::default()).await?.purged, 40);
        assert_eq!(letters.purge(all, &PurgeConfig::default()).await?.purged, 0);
        Ok(())
    }

    pub(super) async fn purging_a_dead_letter_purges_its_copies(
        fixture: QueueFixture,
    ) -> Result<()> {
        let ids = write(&fixture, 3).await?;
        let copy = fixture.dead_letter(&Letter::of(1, 101)).await?;
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let report =
            letters.purge(DeadLetterSelection::Ids(vec![copy]), &PurgeConfig::default()).await?;
        assert_eq!(report.purged, 2);
        assert_eq!(fixture.remaining_letters().await?, [ids[0], ids[2]]);
        Ok(())
    }

    pub(super) async fn dead_letters_of_a_plain_topic_have_its_name_as_prefix(
        fixture: QueueFixture,
    ) -> Result<()> {
        let id = fixture.dead_letter(&Letter::of(0, 7)).await?;
        assert_eq!(fixture.letters_stream().await?.as_str(), format!("{}:dlq", fixture.topic));
        assert_eq!(ids(&walk(&fixture, page_of(10)).await?), [id]);
        assert_eq!(fixture.queue.inspect().topic(&fixture.topic).await?.dead_letters, 1);
        Ok(())
    }

    pub(super) async fn invalid_queries_are_rejected_without_effect(
        fixture: QueueFixture,
    ) -> Result<()> {
        assert_no_topic(fixture.queue.dead_letters(&fixture.topic).await);
        let ids = write(&fixture, 3).await?;
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        for limit in [0, 1001] {
            assert_invalid(letters.browse(&page_of(limit)).await, "limit");
        }
        let nowhere = DeadLetterFilter { partition: Some(3), ..Default::default() };
        let upside_down = DeadLetterFilter {
            from: Some(Timestamp::from_millis(8)),
            to: Some(Timestamp::from_millis(7)),
            ..Default::default()
        };
        for (filter, argument) in [(nowhere, "a partition"), (upside_down, "a time range")] {
            assert_invalid(letters.browse(&matching(filter.clone())).await, argument);
            let answer =
                letters.purge(DeadLetterSelection::Matching(filter), &PurgeConfig::default()).await;
            assert_invalid(answer, argument);
        }
        let unknown = EntryId::new(1, 1);
        let answer = letters.show(unknown).await;
        assert!(matches!(answer, Err(QueueError::NoDeadLetter { .. })), "{answer:?}");
        let some_unknown = DeadLetterSelection::Ids(vec![ids[0], unknown]);
        let answer = letters.purge(some_unknown, &PurgeConfig::default()).await;
        assert!(matches!(answer, Err(QueueError::NoDeadLetter { .. })), "{answer:?}");
        for count in [0, 101] {
            let named = DeadLetterSelection::Ids(vec![ids[0]; count]);
            assert_invalid(letters.purge(named, &PurgeConfig::default()).await, "number");
        }
        let cursor = letters.browse(&page_of(1)).await?.next;
        let other = headwater_testkit::unique("other");
        fixture.queue.topics().create(&other, 1, quick()).await?;
        let elsewhere = fixture.queue.dead_letters(&other).await?;
        let query = DeadLetterQuery { cursor, ..page_of(1) };
        assert_invalid(elsewhere.browse(&query).await, "a cursor");
        assert_eq!(fixture.remaining_letters().await?, ids, "nothing was purged");
        Ok(())
    }
}
