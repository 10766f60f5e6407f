//! The live tail of a topic.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_tail_returns_new_messages_of_all_partitions
    a_tail_from_the_beginning_returns_everything_once
    a_tail_from_a_time_starts_there
    a_tail_reads_partitions_that_are_added_later
    a_tail_of_a_missing_topic_returns_its_first_message
    cancelling_a_tail_read_loses_no_message
    invalid_tail_settings_are_rejected
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{StoredMessage, Tail, TailConfig, TailStart};
    use headwater_stream::clock::Timestamp;

    use crate::fixture::*;

    const LONG: Duration = Duration::from_secs(30);

    /// Reads until there are `count` messages.
    async fn take(tail: &mut Tail, count: usize) -> Result<Vec<StoredMessage>> {
        let mut found = Vec::new();
        while found.len() < count {
            let some = tail.next(LONG).await?;
            assert!(!some.is_empty(), "only {} of {count} came", found.len());
            found.extend(some);
        }
        Ok(found)
    }

    fn payloads(messages: &[StoredMessage]) -> Vec<String> {
        let payload = |message: &StoredMessage| {
            String::from_utf8_lossy(&message.message.as_ref().expect("it exists").payload)
                .into_owned()
        };
        let mut payloads: Vec<String> = messages.iter().map(payload).collect();
        payloads.sort();
        payloads
    }

    pub(super) async fn a_tail_returns_new_messages_of_all_partitions(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(3).await?;
        fixture.send_many(3, 6).await?;
        let mut tail = fixture.queue.tail(&fixture.topic, TailConfig::default()).await?;
        let sending = async {
            for partition in 0..3 {
                fixture.send(partition, &format!("new {partition}")).await?;
            }
            anyhow::Ok(())
        };
        let (found, sent) = tokio::join!(take(&mut tail, 3), sending);
        sent?;
        assert_eq!(payloads(&found?), ["new 0", "new 1", "new 2"]);
        assert_eq!(tail.next(Duration::ZERO).await?, []);
        Ok(())
    }

    pub(super) async fn a_tail_from_the_beginning_returns_everything_once(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(3).await?;
        let sent = fixture.send_many(3, 20).await?;
        let config = TailConfig { start: TailStart::Beginning, batch: 4, partition: None };
        let mut tail = fixture.queue.tail(&fixture.topic, config).await?;
        let mut found: Vec<_> =
            take(&mut tail, 20).await?.iter().map(|found| (found.id, found.partition)).collect();
        assert_eq!(tail.next(Duration::ZERO).await?, []);
        let mut expected: Vec<_> = sent.iter().map(|sent| (sent.id, sent.partition)).collect();
        expected.sort();
        found.sort();
        assert_eq!(found, expected);
        let only = TailConfig { partition: Some(1), ..config };
        let mut tail = fixture.queue.tail(&fixture.topic, only).await?;
        assert!(take(&mut tail, 7).await?.iter().all(|found| found.partition == 1));
        Ok(())
    }

    pub(super) async fn a_tail_from_a_time_starts_there(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        fixture.send_many(2, 4).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let sent = fixture.send(1, "late").await?;
        let start = TailStart::Time(Timestamp::from_millis(sent.id.ms));
        let config = TailConfig { start, ..TailConfig::default() };
        let mut tail = fixture.queue.tail(&fixture.topic, config).await?;
        assert_eq!(payloads(&take(&mut tail, 1).await?), ["late"]);
        Ok(())
    }

    pub(super) async fn a_tail_reads_partitions_that_are_added_later(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let mut tail = fixture.queue.tail(&fixture.topic, TailConfig::default()).await?;
        let growing = async {
            fixture.queue.topics().grow(&fixture.topic, 3).await?;
            fixture.send(2, "grown").await?;
            anyhow::Ok(())
        };
        let (found, grown) = tokio::join!(take(&mut tail, 1), growing);
        grown?;
        assert_eq!(payloads(&found?), ["grown"]);
        Ok(())
    }

    pub(super) async fn a_tail_of_a_missing_topic_returns_its_first_message(
        fixture: QueueFixture,
    ) -> Result<()> {
        let mut tail = fixture.queue.tail(&fixture.topic, TailConfig::default()).await?;
        fixture.send(0, "first").await?;
        assert_eq!(payloads(&take(&mut tail, 1).await?), ["first"]);
        Ok(())
    }

    pub(super) async fn cancelling_a_tail_read_loses_no_message(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let mut tail = fixture.queue.tail(&fixture.topic, TailConfig::default()).await?;
        let mut found = Vec::new();
        for number in 0..20 {
            // Cancelled at once or after a while, as a message arrives.
            let wait = Duration::from_millis(number % 5);
            let sending = fixture.send(number as u16 % 2, "x");
            let (some, sent) = tokio::join!(tokio::time::timeout(wait, tail.next(LONG)), sending);
            sent?;
            if let Ok(some) = some {
                found.extend(some?);
            }
        }
        found.extend(take(&mut tail, 20 - found.len()).await?);
        let mut ids: Vec<_> = found.iter().map(|found| (found.id, found.partition)).collect();
        ids.sort();
        ids.dedup();
        assert_eq!((ids.len(), found.len()), (20, 20));
        Ok(())
    }

    pub(super) async fn invalid_tail_settings_are_rejected(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        for batch in [0, 1001] {
            let config = TailConfig { batch, ..TailConfig::default() };
            assert_invalid(fixture.queue.tail(&fixture.topic, config).await, "limit");
        }
        let config = TailConfig { partition: Some(2), ..TailConfig::default() };
        assert_invalid(fixture.queue.tail(&fixture.topic, config).await, "a partition");
        let mut tail = fixture.queue.tail(&fixture.topic, TailConfig::default()).await?;
        assert_invalid(tail.next(Duration::from_secs(61)).await, "wait");
        Ok(())
    }
}
