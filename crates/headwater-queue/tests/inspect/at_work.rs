//! Inspection and administration while a real subscription is at work.

use crate::setup::on_every_backend;

on_every_backend! {
    a_subscription_is_seen_as_member_owner_and_consumer
    a_group_at_work_is_not_reset_unless_forced_and_then_reads_again
    a_message_that_is_given_up_is_browsed_replayed_and_handled
    a_topic_that_is_deleted_under_a_consumer_and_created_anew_is_consumed_again
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{
        ConsumerConfig, DeadLetterFilter, DeadLetterQuery, DeadLetterSelection, Message,
        NewMessage, Outcome, QueueError, ReplayConfig, Reset, ResetGuard, ResetTo, Subscription,
    };
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use crate::setup::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A subscription that gives up messages with the payload `bad`, unless they were replayed, and shows all others.
    async fn subscribe(setup: &Setup) -> Result<(Subscription, UnboundedReceiver<Message>)> {
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
        Ok((setup.queue.subscribe(&setup.topic, &name(setup), handler, config).await?, handled))
    }

    /// A group that no other test uses: its members are known by its name alone.
    fn name(setup: &Setup) -> String {
        format!("group-of-{}", setup.topic)
    }

    async fn next(handled: &mut UnboundedReceiver<Message>) -> Result<Message> {
        let message = tokio::time::timeout(LONG, handled.recv()).await?;
        Ok(message.expect("the subscription lives"))
    }

    /// Waits until the group has everything read and settled.
    async fn all_is_settled(setup: &Setup) -> Result<()> {
        let settled = async {
            loop {
                let view = setup.queue.inspect().group(&setup.topic, &name(setup)).await?;
                if (view.pending, view.lag) == (0, Some(0)) {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONG, settled).await?
    }

    pub(super) async fn a_subscription_is_seen_as_member_owner_and_consumer(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        let (subscription, mut handled) = subscribe(&setup).await?;
        for partition in [0, 1] {
            setup.send(partition, "good").await?;
            next(&mut handled).await?;
        }
        let view = setup.queue.inspect().group(&setup.topic, &name(&setup)).await?;
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
        let view = setup.queue.inspect().group(&setup.topic, &name(&setup)).await?;
        assert!(view.partitions.iter().all(|partition| partition.owner.is_none()), "{view:?}");
        assert!(view.members.iter().all(|member| member.heartbeat_age.is_none()), "{view:?}");
        Ok(())
    }

    pub(super) async fn a_group_at_work_is_not_reset_unless_forced_and_then_reads_again(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        let (subscription, mut handled) = subscribe(&setup).await?;
        setup.send(0, "good").await?;
        let first = next(&mut handled).await?;
        all_is_settled(&setup).await?;
        let back = Reset::to(ResetTo::Beginning);
        let answer = setup.queue.reset_group(&setup.topic, &name(&setup), &back).await;
        assert!(matches!(answer, Err(QueueError::GroupAtWork { .. })), "{answer:?}");

        let forced = Reset { guard: ResetGuard::Force, ..back };
        let report = setup.queue.reset_group(&setup.topic, &name(&setup), &forced).await?;
        assert_eq!(report.redelivered.count, 1);
        assert_eq!(next(&mut handled).await?.id, first.id, "it is read again");
        subscription.stop().await;
        setup.queue.reset_group(&setup.topic, &name(&setup), &back).await?;
        Ok(())
    }

    pub(super) async fn a_message_that_is_given_up_is_browsed_replayed_and_handled(
        setup: Setup,
    ) -> Result<()> {
        setup.create(3).await?;
        let (subscription, mut handled) = subscribe(&setup).await?;
        let message = NewMessage::keyed("k1", "bad").header("h", "1").to_partition(2);
        let sent = setup.producer.send(&setup.topic, message).await?;
        let letters = setup.queue.dead_letters(&setup.topic).await?;
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

    pub(super) async fn a_topic_that_is_deleted_under_a_consumer_and_created_anew_is_consumed_again(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        let (subscription, mut handled) = subscribe(&setup).await?;
        setup.send(1, "before").await?;
        assert_eq!(next(&mut handled).await?.payload, "before");
        assert!(setup.queue.topics().delete(&setup.topic).await?);
        assert!(!setup.queue.topics().list().await?.contains(&setup.topic));

        setup.create(4).await?;
        setup.send(3, "after").await?;

        assert_eq!(next(&mut handled).await?.payload, "after");
        subscription.stop().await;
        Ok(())
    }
}
