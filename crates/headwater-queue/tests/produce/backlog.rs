//! Backpressure: a topic accepts no more than its byte budget, and loses no message.

use crate::setup::on_every_backend;

on_every_backend! {
    a_topic_over_its_budget_rejects_sends_until_consumers_catch_up
    a_topic_without_a_group_is_not_trimmed_for_its_budget
    a_new_producer_sees_the_exceeded_budget_at_once
}

mod bodies {
    use std::time::Duration;

    use anyhow::{Result, bail};
    use headwater_queue::{NewMessage, Policies, ProducerConfig, Queue, QueueError};
    use headwater_stream::{
        ConsumerName, GroupName, GroupStart, SettleBatch, Settlement, StreamName,
    };

    use crate::setup::Setup;

    const BUDGET: u64 = 200_000;
    const PAYLOAD_BYTES: usize = 2_000;
    /// More messages than the budget holds.
    const SENT_MAX: usize = 1_000;

    async fn create(setup: &Setup) -> Result<()> {
        let policies = Policies { byte_budget: Some(BUDGET), ..Default::default() };
        setup.queue.topics().create(&setup.topic, 2, policies).await?;
        Ok(())
    }

    fn message() -> NewMessage {
        NewMessage::new(vec![b'x'; PAYLOAD_BYTES])
    }

    /// Sends until a send is rejected even after waiting for `retry_after`: before that, the producer only estimates
    /// the size. Returns how many messages were accepted.
    async fn fill(setup: &Setup) -> Result<usize> {
        let (mut sent, mut refusals) = (0, 0);
        while refusals < 2 {
            match setup.producer.send(&setup.topic, message()).await {
                Ok(_) => (sent, refusals) = (sent + 1, 0),
                Err(QueueError::BudgetExceeded { topic, bytes, budget, retry_after }) => {
                    assert_eq!((topic.as_str(), budget), (setup.topic.as_str(), BUDGET));
                    assert!(bytes >= BUDGET);
                    assert!(retry_after > Duration::ZERO && retry_after < Duration::from_secs(60));
                    refusals += 1;
                    tokio::time::sleep(retry_after).await;
                }
                Err(error) => bail!(error),
            }
            assert!(sent < SENT_MAX, "{sent} messages were taken");
        }
        Ok(sent)
    }

    /// Reads and acknowledges everything, as a consumer that catches up does.
    async fn consume(setup: &Setup, streams: &[StreamName]) -> Result<usize> {
        let (group, consumer) = (GroupName::new("group")?, ConsumerName::new("ann")?);
        let mut reader = setup.backend().reader(&group, &consumer).await?;
        let mut seen = 0;
        loop {
            let batches = reader.read(streams, 100, Duration::ZERO).await?;
            if batches.is_empty() {
                return Ok(seen);
            }
            for batch in batches {
                let entries: Vec<_> =
                    batch.entries.iter().map(|entry| Settlement::ack(entry.id)).collect();
                let settle = SettleBatch {
                    stream: &batch.stream,
                    group: &group,
                    consumer: &consumer,
                    fence: None,
                    entries: &entries,
                };
                seen += setup.backend().settle(settle).await?.applied;
            }
        }
    }

    pub(super) async fn a_topic_over_its_budget_rejects_sends_until_consumers_catch_up(
        setup: Setup,
    ) -> Result<()> {
        create(&setup).await?;
        let streams = [setup.stream(0).await?, setup.stream(1).await?];
        for stream in &streams {
            let group = GroupName::new("group")?;
            setup.backend().ensure_group(stream, &group, GroupStart::Beginning).await?;
        }
        let sent = fill(&setup).await?;
        assert!(sent > 10, "{sent} were taken");
        assert_eq!(
            setup.count().await?,
            sent,
            "accepted messages are stored, rejected ones are not"
        );

        // A batch is rejected as a whole, and so is a delayed message.
        let rejected = setup.producer.send_batch(&setup.topic, vec![message(); 3]).await;
        assert!(matches!(rejected, Err(QueueError::BudgetExceeded { .. })), "{rejected:?}");
        let rejected = setup.producer.send_after(&setup.topic, message(), Duration::ZERO).await;
        assert!(matches!(rejected, Err(QueueError::BudgetExceeded { .. })), "{rejected:?}");
        assert_eq!(setup.count().await?, sent);

        // The messages are not consumed, so waiting does not help.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(setup.producer.send(&setup.topic, message()).await.is_err());

        // Acknowledged messages make room.
        assert_eq!(consume(&setup, &streams).await?, sent);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            match setup.producer.send(&setup.topic, message()).await {
                Ok(_) => break,
                Err(QueueError::BudgetExceeded { retry_after, .. }) => {
                    assert!(tokio::time::Instant::now() < deadline, "the budget is still exceeded");
                    tokio::time::sleep(retry_after).await;
                }
                Err(error) => bail!(error),
            }
        }
        assert!(setup.count().await? < sent);
        assert_eq!(consume(&setup, &streams).await?, 1, "the new message is stored");
        Ok(())
    }

    pub(super) async fn a_topic_without_a_group_is_not_trimmed_for_its_budget(
        setup: Setup,
    ) -> Result<()> {
        create(&setup).await?;
        let sent = fill(&setup).await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(setup.producer.send(&setup.topic, message()).await.is_err());
        assert_eq!(setup.count().await?, sent);
        Ok(())
    }

    pub(super) async fn a_new_producer_sees_the_exceeded_budget_at_once(
        setup: Setup,
    ) -> Result<()> {
        create(&setup).await?;
        fill(&setup).await?;
        let other = Queue::new(setup.backend().clone()).producer(ProducerConfig::default())?;
        let rejected = other.send(&setup.topic, message()).await;
        let error = rejected.expect_err("it is rejected");
        assert!(matches!(error, QueueError::BudgetExceeded { .. }), "{error:?}");
        assert!(error.is_transient());
        Ok(())
    }
}
