//! Concurrent creation, resizing and deletion of one topic.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{NewMessage, Queue};
use headwater_stream::{LeaseName, Options, connect};
use headwater_testkit::{Proxy, Redis};

use self::bodies::assert_consistent;
use crate::fixture::{QueueFixture, on_every_backend, quick};

on_every_backend! {
    of_many_concurrent_creations_one_returns_true
    of_two_concurrent_creations_with_different_settings_one_fails
    concurrent_creations_and_deletions_leave_registry_and_meta_consistent
    a_deletion_does_not_remove_messages_of_a_topic_created_since
    concurrent_resizes_are_recorded_once_each
    an_abandoned_topic_lock_expires
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use futures_util::future::join_all;
    use headwater_queue::{Queue, QueueError};
    use headwater_stream::{HolderName, LeaseName, MapName, SetName};

    use crate::fixture::*;

    /// Independent queues on the same backend.
    fn others(fixture: &QueueFixture, count: usize) -> Vec<Queue> {
        (0..count).map(|_| Queue::new(fixture.backend().clone())).collect()
    }

    pub(super) async fn assert_consistent(fixture: &QueueFixture) -> Result<()> {
        let meta = MapName::new(format!("streaming:mq:topic:{}:meta", fixture.topic))?;
        let exists = fixture.backend().map_get(&meta).await?.is_some();
        let listed = fixture.queue.topics().list().await?.contains(&fixture.topic);
        assert_eq!(listed, exists, "the registry lists what exists");
        let set = SetName::new(format!("streaming:mq:topic:{}:partitions", fixture.topic))?;
        let streams = fixture.backend().set_members(&set).await?;
        let described = fixture.queue.topics().describe(&fixture.topic).await?;
        let mut keys: Vec<String> =
            described.partitions.into_iter().map(|place| place.stream_key).collect();
        keys.sort();
        assert_eq!(streams, if exists { keys } else { Vec::new() });
        Ok(())
    }

    pub(super) async fn of_many_concurrent_creations_one_returns_true(
        fixture: QueueFixture,
    ) -> Result<()> {
        let queues = others(&fixture, 8);
        let topic = &fixture.topic;
        let created = join_all(
            queues
                .iter()
                .map(|queue| async move { queue.topics().create(topic, 4, quick()).await }),
        );
        let created = created.await.into_iter().collect::<Result<Vec<bool>, _>>()?;
        assert_eq!(created.iter().filter(|is_new| **is_new).count(), 1, "{created:?}");
        assert_consistent(&fixture).await
    }

    pub(super) async fn of_two_concurrent_creations_with_different_settings_one_fails(
        fixture: QueueFixture,
    ) -> Result<()> {
        let queues = others(&fixture, 2);
        let (one, two) = (queues[0].topics(), queues[1].topics());
        let (one, two) = tokio::join!(
            one.create(&fixture.topic, 2, quick()),
            two.create(&fixture.topic, 3, quick())
        );
        let partitions = fixture.queue.topics().describe(&fixture.topic).await?.topic.partitions;
        let (winner, loser) = if partitions == 2 { (one, two) } else { (two, one) };
        assert!(winner?, "the winner created it");
        assert!(matches!(loser, Err(QueueError::TopicExists { .. })), "{loser:?}");
        assert_consistent(&fixture).await
    }

    pub(super) async fn concurrent_creations_and_deletions_leave_registry_and_meta_consistent(
        fixture: QueueFixture,
    ) -> Result<()> {
        let queues = others(&fixture, 6);
        for _ in 0..5 {
            let work = queues.iter().enumerate().map(|(index, queue)| {
                let topic = &fixture.topic;
                async move {
                    for _ in 0..3 {
                        if index % 2 == 0 {
                            queue.topics().create(topic, 2, quick()).await?;
                        } else {
                            queue.topics().delete(topic).await?;
                        }
                    }
                    anyhow::Ok(())
                }
            });
            join_all(work).await.into_iter().collect::<Result<Vec<()>>>()?;
            assert_consistent(&fixture).await?;
        }
        Ok(())
    }

    pub(super) async fn a_deletion_does_not_remove_messages_of_a_topic_created_since(
        fixture: QueueFixture,
    ) -> Result<()> {
        let queues = others(&fixture, 3);
        for round in 0..5 {
            fixture.queue.topics().create(&fixture.topic, 2, quick()).await?;
            let deletes = async {
                let (one, two) = (queues[0].topics(), queues[1].topics());
                tokio::join!(one.delete(&fixture.topic), two.delete(&fixture.topic))
            };
            let creates = async {
                // Until it is the new topic and not the old one.
                while !queues[2].topics().create(&fixture.topic, 2, quick()).await? {}
                let producer = queues[2].producer(Default::default())?;
                let message = headwater_queue::NewMessage::new("new").to_partition(1);
                // Fails if the second deletion comes in between: a topic without metadata has one partition.
                anyhow::Ok(producer.send(&fixture.topic, message).await)
            };
            let ((one, two), created) = tokio::join!(deletes, creates);
            one?;
            two?;
            let sent = created?;
            let view = fixture.queue.inspect().topic(&fixture.topic).await;
            // The second deletion may have come last; then nothing remains.
            match view {
                Ok(view) if !view.layout.is_plain() => {
                    sent?;
                    assert_eq!(view.length, 1, "{round}");
                }
                Ok(view) => panic!("parts of the topic remain: {view:?}"),
                Err(error) => assert_no_topic::<()>(Err(error)),
            }
            assert_consistent(&fixture).await?;
            fixture.queue.topics().delete(&fixture.topic).await?;
        }
        Ok(())
    }

    pub(super) async fn concurrent_resizes_are_recorded_once_each(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let queues = others(&fixture, 6);
        let grown = queues.iter().enumerate().map(|(index, queue)| {
            let partitions = 2 + index as u16 / 2;
            let topic = &fixture.topic;
            async move { (partitions, queue.topics().grow(topic, partitions).await) }
        });
        for (partitions, answer) in join_all(grown).await {
            // A request for fewer partitions than exist fails.
            assert!(
                matches!(answer, Ok(()) | Err(QueueError::Invalid { .. })),
                "{partitions}: {answer:?}"
            );
        }
        let topic = fixture.queue.topics().describe(&fixture.topic).await?.topic;
        assert_eq!(topic.partitions, 4, "the largest request won");
        let mut from = 1;
        for growth in &topic.resizes {
            assert_eq!(growth.from, from, "each resize starts where the last one ended");
            assert!(growth.to > growth.from && growth.last_ids.is_some(), "{growth:?}");
            from = growth.to;
        }
        assert_eq!(from, 4);
        assert_consistent(&fixture).await
    }

    pub(super) async fn an_abandoned_topic_lock_expires(fixture: QueueFixture) -> Result<()> {
        fixture.create(1).await?;
        // Another process took the lock and died.
        let lease = LeaseName::new(format!("streaming:mq:change:{}", fixture.topic))?;
        let dead = HolderName::new("change:dead")?;
        fixture.backend().acquire(&lease, &dead, Duration::from_millis(300)).await?;
        fixture.queue.topics().grow(&fixture.topic, 2).await?;
        assert_eq!(fixture.queue.topics().describe(&fixture.topic).await?.topic.partitions, 2);
        Ok(())
    }
}

/// Latency that lets other processes act between two steps.
const FAR_AWAY: Duration = Duration::from_millis(4);

/// A queue with high latency.
async fn slow_queue(proxy: &Proxy) -> Result<Queue> {
    let url = Redis::shared()?.url_at(proxy.addr());
    let queue = Queue::new(connect(&url, &Options::default()).await?);
    proxy.delay(FAR_AWAY)?;
    Ok(queue)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_a_topic_during_its_creation_leaves_no_registry_entry_without_meta() -> Result<()>
{
    let fixture = QueueFixture::redis().await?;
    let proxy = Proxy::start(Redis::shared()?.addr())?;
    let slow = slow_queue(&proxy).await?;
    for step in 0..24 {
        fixture.create(2).await?;
        let (creating, deleting) = (slow.topics(), fixture.queue.topics());
        let (created, deleted) = tokio::join!(creating.create(&fixture.topic, 2, quick()), async {
            tokio::time::sleep(FAR_AWAY * step).await;
            deleting.delete(&fixture.topic).await
        });
        created?;
        deleted?;
        assert_consistent(&fixture).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_deletion_does_not_touch_a_topic_created_again_meanwhile() -> Result<()> {
    let fixture = QueueFixture::redis().await?;
    let proxy = Proxy::start(Redis::shared()?.addr())?;
    let slow = slow_queue(&proxy).await?;
    for step in 0..24 {
        fixture.create(2).await?;
        let (deleting, lease) =
            (slow.topics(), LeaseName::new(format!("streaming:mq:change:{}", fixture.topic))?);
        let (deleted, sent) = tokio::join!(deleting.delete(&fixture.topic), async {
            // The slow deletion is running or done.
            for _ in 0..1000 {
                if fixture.backend().leases(std::slice::from_ref(&lease)).await?[0].is_some() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(FAR_AWAY * step).await;
            fixture.queue.topics().delete(&fixture.topic).await?;
            let is_new = fixture.queue.topics().create(&fixture.topic, 2, quick()).await?;
            let message = NewMessage::new("new").to_partition(1);
            fixture.producer.send(&fixture.topic, message).await?;
            anyhow::Ok(is_new)
        });
        deleted?;
        assert!(sent?, "it was created again");
        let view = fixture.queue.inspect().topic(&fixture.topic).await?;
        assert_eq!(view.length, 1, "step {step}");
        fixture.queue.topics().delete(&fixture.topic).await?;
    }
    Ok(())
}
