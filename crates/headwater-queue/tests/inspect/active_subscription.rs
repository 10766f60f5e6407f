//! Inspection and administration while a subscription is active.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_subscription_is_listed_as_member_owner_and_consumer
    an_active_group_is_reset_only_with_force_and_reads_again
    a_dead_letter_is_browsed_replayed_and_handled
    a_topic_deleted_while_consumed_and_created_again_is_consumed_again
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{
        ConsumerConfig, DeadLetterFilter, DeadLetterQuery, DeadLetterSelection, Message,
        NewMessage, Outcome, QueueError, ReplayConfig, Reset, ResetGuard, ResetTo, Subscription,
    };
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use crate::fixture::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A subscription that dead-letters messages with the payload `bad`, unless replayed, and reports all others.
    async fn subscribe(
        fixture: &QueueFixture,
    ) -> Result<(Subscription, UnboundedReceiver<Message>)> {
        let (seen, handled) = unbounded_channel();
        let handler = move |message: Message| {
            let seen = seen.clone();
            async move {
                if message.payload == "bad" && message.replayed_from.is_none() {
                    return Outcome::DeadLetter { reason: "it is bad".to_owned() };
                }
                // The test may have ended.
                let _ = seen.send(message);
                Outcome::Done
            }
        };
        let config = ConsumerConfig { poll: Duration::from_millis(200), ..Default::default() };
        Ok((
            fixture.queue.subscribe(&fixture.topic, &name(fixture), handler, config).await?,
            handled,
        ))
    }

    /// A group that no other test uses, because members are listed per group.
    fn name(fixture: &QueueFixture) -> String {
        format!("group-of-{}", fixture.topic)
    }

    async fn next(handled: &mut UnboundedReceiver<Message>) -> Result<Message> {
        let message = tokio::time::timeout(LONG, handled.recv()).await?;
        Ok(message.expect("the subscription is active"))
    }

    /// Waits until the group has read and settled everything.
    async fn wait_until_all_settled(fixture: &QueueFixture) -> Result<()> {
        let settled = async {
            loop {
                let view = fixture.queue.inspect().group(&fixture.topic, &name(fixture)).await?;
                if (view.pending, view.lag) == (0, Some(0)) {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONG, settled).await?
    }

    pub(super) async fn a_subscription_is_listed_as_member_owner_and_consumer(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let (subscription, mut handled) = subscribe(&fixture).await?;
        for partition in [0, 1] {
            fixture.send(partition, "good").await?;
            next(&mut handled).await?;
        }
        let view = fixture.queue.inspect().group(&fixture.topic, &name(&fixture)).await?;
        let [member] = &view.members[..] else { panic!("one member: {view:?}") };
        let consumer = member.consumer.as_ref().expect("it works");
        assert!(member.heartbeat_age.is_some_and(|age| age <= Duration::from_secs(15)));
        for partition in &view.partitions {
            let owner = partition.owner.as_ref().expect("it is owned");
            assert_eq!(&owner.holder, consumer);
            assert!(owner.epoch > 0 && owner.heartbeat_age <= Duration::from_secs(15));
        }
        assert!(view.consumers.iter().any(|found| &found.name == consumer), "{view:?}");

        subscription.stop().await;
        let view = fixture.queue.inspect().group(&fixture.topic, &name(&fixture)).await?;
        assert!(view.partitions.iter().all(|partition| partition.owner.is_none()), "{view:?}");
        assert!(view.members.iter().all(|member| member.heartbeat_age.is_none()), "{view:?}");
        Ok(())
    }

    pub(super) async fn an_active_group_is_reset_only_with_force_and_reads_again(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let (subscription, mut handled) = subscribe(&fixture).await?;
        fixture.send(0, "good").await?;
        let first = next(&mut handled).await?;
        wait_until_all_settled(&fixture).await?;
        let back = Reset::to(ResetTo::Beginning);
        let answer = fixture.queue.reset_group(&fixture.topic, &name(&fixture), &back).await;
        assert!(matches!(answer, Err(QueueError::GroupActive { .. })), "{answer:?}");

        let forced = Reset { guard: ResetGuard::Force, ..back };
        let report = fixture.queue.reset_group(&fixture.topic, &name(&fixture), &forced).await?;
        assert_eq!(report.redelivered.count, 1);
        assert_eq!(next(&mut handled).await?.id, first.id, "it is delivered again");
        subscription.stop().await;
        fixture.queue.reset_group(&fixture.topic, &name(&fixture), &back).await?;
        Ok(())
    }

    pub(super) async fn a_dead_letter_is_browsed_replayed_and_handled(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(3).await?;
        let (subscription, mut handled) = subscribe(&fixture).await?;
        let message = NewMessage::keyed("k1", "bad").header("h", "1").to_partition(2);
        let sent = fixture.producer.send(&fixture.topic, message).await?;
        let letters = fixture.queue.dead_letters(&fixture.topic).await?;
        let given_up = async {
            loop {
                let page = letters.browse(&DeadLetterQuery::default()).await?;
                if let Some(letter) = page.items.into_iter().next() {
                    return anyhow::Ok(letter);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let letter = tokio::time::timeout(LONG, given_up).await??;
        assert_eq!((letter.partition, letter.original_id), (Some(2), Some(sent.id)));
        assert_eq!((letter.reason.as_str(), letter.key.as_deref()), ("it is bad", Some("k1")));

        let all = DeadLetterSelection::Matching(DeadLetterFilter::default());
        assert_eq!(letters.replay(all, &ReplayConfig::default()).await?.replayed, 1);

        let message = next(&mut handled).await?;
        assert_eq!((message.partition, message.payload.as_ref()), (2, &b"bad"[..]));
        assert_eq!((message.key.as_deref(), message.headers["h"].as_str()), (Some("k1"), "1"));
        assert_eq!((message.first_id(), message.attempt), (sent.id, 1));
        assert_eq!(message.replayed_from, Some(letter.id));
        subscription.stop().await;
        Ok(())
    }

    pub(super) async fn a_topic_deleted_while_consumed_and_created_again_is_consumed_again(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let (subscription, mut handled) = subscribe(&fixture).await?;
        fixture.send(1, "before").await?;
        assert_eq!(next(&mut handled).await?.payload, "before");
        assert!(fixture.queue.topics().delete(&fixture.topic).await?);
        assert!(!fixture.queue.topics().list().await?.contains(&fixture.topic));

        fixture.create(4).await?;
        fixture.send(3, "after").await?;

        assert_eq!(next(&mut handled).await?.payload, "after");
        subscription.stop().await;
        Ok(())
    }
}
