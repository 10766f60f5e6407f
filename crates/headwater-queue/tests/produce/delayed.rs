//! Delayed messages and their cancellation.

use crate::setup::on_every_backend;

on_every_backend! {
    a_delayed_message_is_appended_to_its_partition_when_it_is_due
    a_cancelled_message_is_not_delivered
    a_message_of_a_partition_added_meanwhile_is_cancelled
    invalid_delayed_messages_are_rejected
}

mod bodies {
    use std::sync::Arc;
    use std::time::Duration;

    use anyhow::{Result, bail};
    use headwater_queue::limits::PAYLOAD_BYTES_MAX;
    use headwater_queue::{DelayedMessage, NewMessage, Policies, Queue, QueueError, TopicName};
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{DelayId, DelayName};

    use crate::setup::{Setup, full, text};

    const HOUR: Duration = Duration::from_secs(3600);

    /// Promotes due messages, as a consumer does. Returns how many.
    async fn promote_due(setup: &Setup, wait: Duration) -> Result<usize> {
        let mut moved = 0;
        let described = setup.queue.topics().describe(&setup.topic).await?;
        for partition in described.partitions {
            let delays = DelayName::new(&partition.delays_key)?;
            setup.backend().wait_until_due(&delays, wait).await?;
            moved += setup.backend().promote_due(&delays, 100).await?.len();
        }
        Ok(moved)
    }

    async fn waiting(setup: &Setup, partition: u16) -> Result<u64> {
        let described = setup.queue.topics().describe(&setup.topic).await?;
        let delays = DelayName::new(&described.partitions[usize::from(partition)].delays_key)?;
        Ok(setup.backend().delay_stats(&delays).await?.waiting)
    }

    pub(super) async fn a_delayed_message_is_appended_to_its_partition_when_it_is_due(
        setup: Setup,
    ) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, full()).await?;
        let producer = &setup.producer;
        let soon = NewMessage::keyed("k29", "soon").header("h", "1");
        let delayed = producer.send_after(&setup.topic, soon, Duration::from_millis(200)).await?;
        assert_eq!(delayed.partition, 1);
        let at = setup.backend().now().await?.after(HOUR);
        producer.send_at(&setup.topic, NewMessage::keyed("k29", "later"), at).await?;
        let past = NewMessage::new("at once").to_partition(2);
        producer.send_at(&setup.topic, past, Timestamp::from_millis(1)).await?;
        assert_eq!(setup.count().await?, 0, "nothing is promoted without a consumer");

        let mut moved = 0;
        for _ in 0..100 {
            moved += promote_due(&setup, Duration::from_millis(50)).await?;
            if moved == 2 {
                break;
            }
        }
        let (one, two) = (setup.entries(1).await?, setup.entries(2).await?);
        assert_eq!((moved, one.len(), two.len()), (2, 1, 1));
        assert_eq!(text(&one[0], "payload"), Some("soon"));
        assert_eq!((text(&one[0], "key"), text(&one[0], "retryCount")), (Some("k29"), Some("0")));
        assert_eq!(text(&one[0], "headers"), Some(r#"{"h":"1"}"#));
        assert_eq!(text(&two[0], "payload"), Some("at once"));
        let Some(sent_at) = text(&one[0], "timestamp").and_then(Timestamp::from_rfc3339) else {
            bail!("no timestamp");
        };
        assert!(sent_at.as_millis() <= one[0].id.ms, "the timestamp is that of the send");
        Ok(())
    }

    /// The producer that cancels has read the topic just before it was resized.
    pub(super) async fn a_message_of_a_partition_added_meanwhile_is_cancelled(
        setup: Setup,
    ) -> Result<()> {
        let topic = &setup.topic;
        let refresh = Duration::from_secs(60);
        setup.queue.topics().create(topic, 2, Policies { refresh, ..Default::default() }).await?;
        setup.producer.send(topic, NewMessage::new("p")).await?;
        let other = Queue::new(Arc::clone(setup.backend()));
        let topics = other.topics();
        let cancelling = async {
            while topics.describe(topic).await?.partitions.len() < 3 {
                tokio::task::yield_now().await;
            }
            let producer = Queue::new(Arc::clone(setup.backend())).producer(Default::default())?;
            let message = NewMessage::new("p").to_partition(2);
            let delayed = producer.send_after(topic, message, HOUR).await?;
            assert!(setup.producer.cancel(&delayed).await?, "it was waiting");
            assert!(!setup.producer.cancel(&delayed).await?, "it was cancelled before");
            anyhow::Ok(())
        };
        tokio::select! {
            cancelled = cancelling => cancelled?,
            // Returns after twice the topic's `refresh`.
            grown = topics.grow(topic, 3) => bail!("the resize ended first: {grown:?}"),
        }
        assert_eq!(waiting(&setup, 2).await?, 0);
        Ok(())
    }

    pub(super) async fn a_cancelled_message_is_not_delivered(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        let producer = &setup.producer;
        let delayed = producer.send_after(&setup.topic, NewMessage::keyed("k1", "p"), HOUR).await?;
        let other = producer.send_after(&setup.topic, NewMessage::keyed("k1", "p"), HOUR).await?;
        assert_ne!(delayed.id, other.id);
        assert!(producer.cancel(&delayed).await?);
        assert!(!producer.cancel(&delayed).await?, "it was cancelled already");
        assert_eq!(waiting(&setup, delayed.partition).await?, 1);

        // An unknown id in a partition that does not exist.
        let nowhere =
            DelayedMessage { topic: TopicName::new(&setup.topic)?, partition: 9, id: DelayId(1) };
        assert!(!producer.cancel(&nowhere).await?);
        Ok(())
    }

    pub(super) async fn invalid_delayed_messages_are_rejected(setup: Setup) -> Result<()> {
        let too_far = Duration::from_secs(11 * 366 * 24 * 3600);
        for (message, after, complaint) in [
            (NewMessage::new("p").with_id("a"), HOUR, "id"),
            (NewMessage::new("p"), too_far, "the delay"),
            (NewMessage::new(vec![0; PAYLOAD_BYTES_MAX + 1]), HOUR, "payload"),
            (NewMessage::new("p").to_partition(1), HOUR, "partition"),
        ] {
            let rejected = setup.producer.send_after(&setup.topic, message, after).await;
            let error = rejected.expect_err("it is rejected");
            assert!(matches!(error, QueueError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().starts_with(complaint), "{error}");
        }
        assert_eq!(waiting(&setup, 0).await?, 0);
        Ok(())
    }
}
