//! Many processes create, grow and delete one topic at once.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{NewMessage, Queue};
use headwater_stream::{LeaseName, Options, connect};
use headwater_testkit::{Proxy, Redis};

use self::bodies::assert_in_agreement;
use crate::setup::{Setup, on_every_backend, quick};

on_every_backend! {
    of_many_who_create_a_topic_one_is_the_first
    of_two_who_create_it_differently_one_is_told
    whoever_creates_and_deletes_at_once_leaves_registry_and_meta_in_agreement
    what_is_sent_to_a_topic_created_anew_is_not_deleted_with_the_old_one
    of_many_who_grow_a_topic_each_growth_is_written_once
    a_change_that_nobody_goes_on_with_does_not_stop_the_next_one
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use futures_util::future::join_all;
    use headwater_queue::{Queue, QueueError};
    use headwater_stream::{HolderName, LeaseName, MapName, SetName};

    use crate::setup::*;

    /// Others like this queue, which know nothing of each other.
    fn others(setup: &Setup, count: usize) -> Vec<Queue> {
        (0..count).map(|_| Queue::new(setup.backend().clone())).collect()
    }

    pub(super) async fn assert_in_agreement(setup: &Setup) -> Result<()> {
        let meta = MapName::new(format!("streaming:mq:topic:{}:meta", setup.topic))?;
        let exists = setup.backend().map_get(&meta).await?.is_some();
        let listed = setup.queue.topics().list().await?.contains(&setup.topic);
        assert_eq!(listed, exists, "the registry lists what exists");
        let set = SetName::new(format!("streaming:mq:topic:{}:partitions", setup.topic))?;
        let streams = setup.backend().set_members(&set).await?;
        let described = setup.queue.topics().describe(&setup.topic).await?;
        let mut keys: Vec<String> =
            described.partitions.into_iter().map(|place| place.stream_key).collect();
        keys.sort();
        assert_eq!(streams, if exists { keys } else { Vec::new() });
        Ok(())
    }

    pub(super) async fn of_many_who_create_a_topic_one_is_the_first(setup: Setup) -> Result<()> {
        let queues = others(&setup, 8);
        let topic = &setup.topic;
        let created = join_all(
            queues
                .iter()
                .map(|queue| async move { queue.topics().create(topic, 4, quick()).await }),
        );
        let created = created.await.into_iter().collect::<Result<Vec<bool>, _>>()?;
        assert_eq!(created.iter().filter(|is_new| **is_new).count(), 1, "{created:?}");
        assert_in_agreement(&setup).await
    }

    pub(super) async fn of_two_who_create_it_differently_one_is_told(setup: Setup) -> Result<()> {
        let queues = others(&setup, 2);
        let (one, two) = (queues[0].topics(), queues[1].topics());
        let (one, two) = tokio::join!(
            one.create(&setup.topic, 2, quick()),
            two.create(&setup.topic, 3, quick())
        );
        let partitions = setup.queue.topics().describe(&setup.topic).await?.topic.partitions;
        let (winner, loser) = if partitions == 2 { (one, two) } else { (two, one) };
        assert!(winner?, "the one whose settings count created it");
        assert!(matches!(loser, Err(QueueError::TopicExists { .. })), "{loser:?}");
        assert_in_agreement(&setup).await
    }

    pub(super) async fn whoever_creates_and_deletes_at_once_leaves_registry_and_meta_in_agreement(
        setup: Setup,
    ) -> Result<()> {
        let queues = others(&setup, 6);
        for _ in 0..5 {
            let work = queues.iter().enumerate().map(|(index, queue)| {
                let topic = &setup.topic;
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
            assert_in_agreement(&setup).await?;
        }
        Ok(())
    }

    pub(super) async fn what_is_sent_to_a_topic_created_anew_is_not_deleted_with_the_old_one(
        setup: Setup,
    ) -> Result<()> {
        let queues = others(&setup, 3);
        for round in 0..5 {
            setup.queue.topics().create(&setup.topic, 2, quick()).await?;
            let deletes = async {
                let (one, two) = (queues[0].topics(), queues[1].topics());
                tokio::join!(one.delete(&setup.topic), two.delete(&setup.topic))
            };
            let creates = async {
                // Until it is really a new one, and not the old one that is about to go.
                while !queues[2].topics().create(&setup.topic, 2, quick()).await? {}
                let producer = queues[2].producer(Default::default())?;
                let message = headwater_queue::NewMessage::new("new").to_partition(1);
                producer.send(&setup.topic, message).await?;
                anyhow::Ok(())
            };
            let ((one, two), created) = tokio::join!(deletes, creates);
            one?;
            two?;
            created?;
            let view = setup.queue.inspect().topic(&setup.topic).await;
            // The second delete may have come after everything else; then nothing is left at all.
            match view {
                Ok(view) if !view.layout.is_plain() => assert_eq!(view.length, 1, "{round}"),
                Ok(view) => panic!("half a topic is left: {view:?}"),
                Err(error) => assert_no_topic::<()>(Err(error)),
            }
            assert_in_agreement(&setup).await?;
            setup.queue.topics().delete(&setup.topic).await?;
        }
        Ok(())
    }

    pub(super) async fn of_many_who_grow_a_topic_each_growth_is_written_once(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        let queues = others(&setup, 6);
        let grown = queues.iter().enumerate().map(|(index, queue)| {
            let partitions = 2 + index as u16 / 2;
            let topic = &setup.topic;
            async move { (partitions, queue.topics().grow(topic, partitions).await) }
        });
        for (partitions, answer) in join_all(grown).await {
            // Whoever wanted fewer than there were already is told so.
            assert!(
                matches!(answer, Ok(()) | Err(QueueError::Invalid { .. })),
                "{partitions}: {answer:?}"
            );
        }
        let topic = setup.queue.topics().describe(&setup.topic).await?.topic;
        assert_eq!(topic.partitions, 4, "the largest wish came true");
        let mut from = 1;
        for growth in &topic.resizes {
            assert_eq!(growth.from, from, "one growth begins where the last one ended");
            assert!(growth.to > growth.from && growth.last_ids.is_some(), "{growth:?}");
            from = growth.to;
        }
        assert_eq!(from, 4);
        assert_in_agreement(&setup).await
    }

    pub(super) async fn a_change_that_nobody_goes_on_with_does_not_stop_the_next_one(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        // Somebody began a change and died.
        let lease = LeaseName::new(format!("streaming:mq:change:{}", setup.topic))?;
        let dead = HolderName::new("change:dead")?;
        setup.backend().acquire(&lease, &dead, Duration::from_millis(300)).await?;
        setup.queue.topics().grow(&setup.topic, 2).await?;
        assert_eq!(setup.queue.topics().describe(&setup.topic).await?.topic.partitions, 2);
        Ok(())
    }
}

/// Between two steps of a process that is this far away, others do all they want to.
const FAR_AWAY: Duration = Duration::from_millis(4);

/// The queue of a process that is far away.
async fn slow_queue(proxy: &Proxy) -> Result<Queue> {
    let url = Redis::shared()?.url_at(proxy.addr());
    let queue = Queue::new(connect(&url, &Options::default()).await?);
    proxy.delay(FAR_AWAY)?;
    Ok(queue)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_deleted_between_any_two_steps_of_a_creation_is_not_listed_without_meta()
-> Result<()> {
    let setup = Setup::redis().await?;
    let proxy = Proxy::start(Redis::shared()?.addr())?;
    let slow = slow_queue(&proxy).await?;
    for step in 0..24 {
        setup.create(2).await?;
        let (creating, deleting) = (slow.topics(), setup.queue.topics());
        let (created, deleted) = tokio::join!(creating.create(&setup.topic, 2, quick()), async {
            tokio::time::sleep(FAR_AWAY * step).await;
            deleting.delete(&setup.topic).await
        });
        created?;
        deleted?;
        assert_in_agreement(&setup).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_deletion_takes_nothing_of_a_topic_that_others_deleted_and_created_anew()
-> Result<()> {
    let setup = Setup::redis().await?;
    let proxy = Proxy::start(Redis::shared()?.addr())?;
    let slow = slow_queue(&proxy).await?;
    for step in 0..24 {
        setup.create(2).await?;
        let (deleting, lease) =
            (slow.topics(), LeaseName::new(format!("streaming:mq:change:{}", setup.topic))?);
        let (deleted, sent) = tokio::join!(deleting.delete(&setup.topic), async {
            // The slow one has begun, or is done already.
            for _ in 0..1000 {
                if setup.backend().leases(std::slice::from_ref(&lease)).await?[0].is_some() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(FAR_AWAY * step).await;
            setup.queue.topics().delete(&setup.topic).await?;
            let is_new = setup.queue.topics().create(&setup.topic, 2, quick()).await?;
            let message = NewMessage::new("new").to_partition(1);
            setup.producer.send(&setup.topic, message).await?;
            anyhow::Ok(is_new)
        });
        deleted?;
        assert!(sent?, "it was created anew");
        let view = setup.queue.inspect().topic(&setup.topic).await?;
        assert_eq!(view.length, 1, "step {step}");
        setup.queue.topics().delete(&setup.topic).await?;
    }
    Ok(())
}
