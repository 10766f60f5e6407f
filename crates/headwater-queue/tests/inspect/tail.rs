//! The live tail of a topic.

use crate::setup::on_every_backend;

on_every_backend! {
    a_tail_brings_what_comes_after_it_began_from_all_partitions
    a_tail_from_the_beginning_brings_everything_once
    a_tail_from_a_time_begins_there
    a_tail_sees_partitions_that_are_added_later
    a_tail_of_a_topic_that_does_not_exist_yet_brings_its_first_message
    a_tail_that_is_dropped_while_it_waits_loses_nothing
    bad_tails_are_refused
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{StoredMessage, Tail, TailConfig, TailStart};
    use headwater_stream::clock::Timestamp;

    use crate::setup::*;

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
            String::from_utf8_lossy(&message.message.as_ref().expect("it is there").payload)
                .into_owned()
        };
        let mut payloads: Vec<String> = messages.iter().map(payload).collect();
        payloads.sort();
        payloads
    }

    pub(super) async fn a_tail_brings_what_comes_after_it_began_from_all_partitions(
        setup: Setup,
    ) -> Result<()> {
        setup.create(3).await?;
        setup.send_many(3, 6).await?;
        let mut tail = setup.queue.tail(&setup.topic, TailConfig::default()).await?;
        let sending = async {
            for partition in 0..3 {
                setup.send(partition, &format!("new {partition}")).await?;
            }
            anyhow::Ok(())
        };
        let (found, sent) = tokio::join!(take(&mut tail, 3), sending);
        sent?;
        assert_eq!(payloads(&found?), ["new 0", "new 1", "new 2"]);
        assert_eq!(tail.next(Duration::ZERO).await?, []);
        Ok(())
    }

    pub(super) async fn a_tail_from_the_beginning_brings_everything_once(
        setup: Setup,
    ) -> Result<()> {
        setup.create(3).await?;
        let sent = setup.send_many(3, 20).await?;
        let config = TailConfig { start: TailStart::Beginning, batch: 4, partition: None };
        let mut tail = setup.queue.tail(&setup.topic, config).await?;
        let mut found: Vec<_> =
            take(&mut tail, 20).await?.iter().map(|found| (found.id, found.partition)).collect();
        assert_eq!(tail.next(Duration::ZERO).await?, []);
        let mut expected: Vec<_> = sent.iter().map(|sent| (sent.id, sent.partition)).collect();
        expected.sort();
        found.sort();
        assert_eq!(found, expected);
        let only = TailConfig { partition: Some(1), ..config };
        let mut tail = setup.queue.tail(&setup.topic, only).await?;
        assert!(take(&mut tail, 7).await?.iter().all(|found| found.partition == 1));
        Ok(())
    }

    pub(super) async fn a_tail_from_a_time_begins_there(setup: Setup) -> Result<()> {
        setup.create(2).await?;
        setup.send_many(2, 4).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let sent = setup.send(1, "late").await?;
        let start = TailStart::Time(Timestamp::from_millis(sent.id.ms));
        let config = TailConfig { start, ..TailConfig::default() };
        let mut tail = setup.queue.tail(&setup.topic, config).await?;
        assert_eq!(payloads(&take(&mut tail, 1).await?), ["late"]);
        Ok(())
    }

    pub(super) async fn a_tail_sees_partitions_that_are_added_later(setup: Setup) -> Result<()> {
        setup.create(1).await?;
        let mut tail = setup.queue.tail(&setup.topic, TailConfig::default()).await?;
        let growing = async {
            setup.queue.topics().grow(&setup.topic, 3).await?;
            setup.send(2, "grown").await?;
            anyhow::Ok(())
        };
        let (found, grown) = tokio::join!(take(&mut tail, 1), growing);
        grown?;
        assert_eq!(payloads(&found?), ["grown"]);
        Ok(())
    }

    pub(super) async fn a_tail_of_a_topic_that_does_not_exist_yet_brings_its_first_message(
        setup: Setup,
    ) -> Result<()> {
        let mut tail = setup.queue.tail(&setup.topic, TailConfig::default()).await?;
        setup.send(0, "first").await?;
        assert_eq!(payloads(&take(&mut tail, 1).await?), ["first"]);
        Ok(())
    }

    pub(super) async fn a_tail_that_is_dropped_while_it_waits_loses_nothing(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        let mut tail = setup.queue.tail(&setup.topic, TailConfig::default()).await?;
        let mut found = Vec::new();
        for number in 0..20 {
            // Dropped at once, or after some time, while a message arrives.
            let wait = Duration::from_millis(number % 5);
            let sending = setup.send(number as u16 % 2, "x");
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

    pub(super) async fn bad_tails_are_refused(setup: Setup) -> Result<()> {
        setup.create(2).await?;
        for batch in [0, 1001] {
            let config = TailConfig { batch, ..TailConfig::default() };
            assert_invalid(setup.queue.tail(&setup.topic, config).await, "limit");
        }
        let config = TailConfig { partition: Some(2), ..TailConfig::default() };
        assert_invalid(setup.queue.tail(&setup.topic, config).await, "a partition");
        let mut tail = setup.queue.tail(&setup.topic, TailConfig::default()).await?;
        assert_invalid(tail.next(Duration::from_secs(61)).await, "wait");
        Ok(())
    }
}
