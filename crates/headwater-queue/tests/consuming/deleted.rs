//! Streams and groups that are deleted under a running consumer.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    ConsumerConfig, Outcome, PullRequest, PulledMessage, Queue, QueueError, metrics,
};
use headwater_stream::{Backend, GroupName, StreamName};

use crate::fixture::{Fixture, GROUP, eventually, short_leases};
use crate::lossy_backend::LossyBackend;
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::recording_handler;
use crate::shared::shared;

/// Both modes, with short reads, and a group for each.
fn modes() -> [(ConsumerConfig, &'static str); 2] {
    let poll = Duration::from_millis(100);
    [ConsumerConfig::default(), shared()].map(|config| ConsumerConfig { poll, ..config }).map(
        |config| {
            let group = if config.mode == shared().mode { "shared" } else { "owned" };
            (config, group)
        },
    )
}

fn anomalies(fixture: &Fixture, what: &str) -> u64 {
    counter_value(metrics::ANOMALIES, &fixture.topic, what)
}

async fn a_deleted_stream_does_not_come_back_until_a_message_is_sent(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    for (config, group) in modes() {
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        let subscription = fixture.queue.subscribe(&fixture.topic, group, handler, config).await?;
        fixture.send(0, None, "before").await?;
        assert_eq!(seen.payloads(1).await?, ["before"]);
        let (stream, before) = (fixture.stream(0).await?, anomalies(&fixture, "stream_deleted"));
        assert!(fixture.backend.delete_stream(&stream).await?);
        // Many reads later it is still deleted.
        eventually("it is noticed", async || Ok(anomalies(&fixture, "stream_deleted") > before))
            .await?;
        assert_eq!(fixture.backend.stats(&stream).await?, None);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(fixture.backend.stats(&stream).await?, None);
        for payload in ["after", "last"] {
            fixture.send(0, None, payload).await?;
        }
        assert_eq!(seen.payloads(2).await?, ["after", "last"]);
        subscription.stop().await;
        fixture.backend.delete_stream(&stream).await?;
    }
    Ok(())
}

async fn a_group_that_was_removed_continues_after_the_last_message(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    for (config, group) in modes() {
        fixture.send(0, None, "old").await?;
        let (handler, mut seen) = recording_handler(|message| match message.payload.as_ref() {
            b"retry" if message.attempt == 1 => Outcome::retry_after(Duration::ZERO, "no"),
            _ => Outcome::Done,
        });
        let subscription = fixture.queue.subscribe(&fixture.topic, group, handler, config).await?;
        assert_eq!(seen.payloads(1).await?, ["old"]);
        let stream = fixture.stream(0).await?;
        for round in 0..2 {
            let before = anomalies(&fixture, "group_removed");
            let name = GroupName::new(group)?;
            assert!(fixture.backend.remove_group(&stream, &name).await?);
            eventually("it is noticed", async || Ok(anomalies(&fixture, "group_removed") > before))
                .await?;
            let payload = format!("new {round}");
            fixture.send(0, None, &payload).await?;
            fixture.send(0, None, "retry").await?;
            assert_eq!(seen.payloads(3).await?, [&payload, "retry", "retry"]);
        }
        subscription.stop().await;
        assert!(seen.now().is_none(), "nothing is handled again");
        fixture.backend.delete_stream(&stream).await?;
    }
    Ok(())
}

async fn a_deleted_topic_does_not_come_back_through_its_consumers(fixture: Fixture) -> Result<()> {
    for (config, group) in modes() {
        fixture.create(3).await?;
        let streams = streams_of(&fixture).await?;
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        // One read is longer than the test: it is blocked when the topic is deleted.
        for poll in [Duration::from_secs(30), config.poll] {
            let config = ConsumerConfig { poll, ..config.clone() };
            let subscription =
                fixture.queue.subscribe(&fixture.topic, group, handler.clone(), config).await?;
            // Every partition has been read, so its consumer knows its group.
            for partition in 0..3 {
                fixture.send(partition, None, "before").await?;
            }
            assert_eq!(seen.payloads(3).await?, ["before"; 3]);
            assert!(fixture.queue.topics().delete(&fixture.topic).await?);
            for _ in 0..30 {
                assert_deleted(&fixture, &streams, "").await?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            subscription.stop().await;
            assert_deleted(&fixture, &streams, "at the end").await?;
            fixture.create(3).await?;
        }
        fixture.queue.topics().delete(&fixture.topic).await?;
    }
    Ok(())
}

/// The streams of a topic, and the one that it would have without its metadata.
async fn streams_of(fixture: &Fixture) -> Result<Vec<StreamName>> {
    let described = fixture.queue.topics().describe(&fixture.topic).await?;
    let mut streams = vec![fixture.topic.clone(), described.dead_letters_key];
    streams.extend(described.partitions.into_iter().map(|partition| partition.stream_key));
    Ok(streams.into_iter().map(StreamName::new).collect::<Result<_, _>>()?)
}

async fn assert_deleted(fixture: &Fixture, streams: &[StreamName], when: &str) -> Result<()> {
    for stream in streams {
        let stats = fixture.backend.stats(stream).await?;
        assert_eq!(stats, None, "`{stream}` came back {when}");
    }
    Ok(())
}

async fn a_topic_that_is_deleted_while_it_is_subscribed_or_pulled_does_not_come_back(
    fixture: Fixture,
) -> Result<()> {
    for (config, group) in modes() {
        fixture.create(3).await?;
        let streams = streams_of(&fixture).await?;
        let slow = LossyBackend::new(Arc::clone(&fixture.backend));
        let queue = Queue::with_config(Arc::clone(&slow) as Arc<dyn Backend>, short_leases())?;
        slow.group_gate.close();
        let (handler, _seen) = recording_handler(|_| Outcome::Done);
        let puller = queue.puller();
        let request =
            PullRequest { max: 1, wait: Duration::from_secs(1), lease: Duration::from_secs(10) };
        let delete = async {
            // Both have read the metadata.
            slow.group_gate.until_waiting(4).await;
            let is_deleted = fixture.queue.topics().delete(&fixture.topic).await;
            slow.group_gate.open();
            is_deleted
        };
        let (subscribed, pulled, deleted) = tokio::join!(
            queue.subscribe(&fixture.topic, group, handler, config),
            puller.pull(&fixture.topic, "pulled", request),
            delete,
        );
        assert!(deleted?);
        assert!(matches!(subscribed, Err(QueueError::NoTopic { .. })), "{subscribed:?}");
        assert!(matches!(pulled, Err(QueueError::NoTopic { .. })), "{pulled:?}");
        assert_deleted(&fixture, &streams, "through a start").await?;
        puller.close().await;
    }
    Ok(())
}

/// The consumers have partitions whose group they have not seen yet: those that were added.
async fn a_topic_that_is_deleted_while_it_grows_does_not_come_back(fixture: Fixture) -> Result<()> {
    for (config, group) in modes() {
        fixture.create(1).await?;
        let slow = LossyBackend::new(Arc::clone(&fixture.backend));
        let queue = Queue::with_config(Arc::clone(&slow) as Arc<dyn Backend>, short_leases())?;
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        let subscription = queue.subscribe(&fixture.topic, group, handler, config).await?;
        fixture.send(0, None, "before").await?;
        assert_eq!(seen.payloads(1).await?, ["before"]);
        slow.group_gate.close();
        let topics = fixture.queue.topics();
        let delete = async {
            // The new partitions have drivers, which are about to create the group.
            slow.group_gate.until_waiting(2).await;
            let streams = streams_of(&fixture).await?;
            assert!(topics.delete(&fixture.topic).await?);
            slow.group_gate.open();
            anyhow::Ok(streams)
        };
        let streams = tokio::select! {
            streams = delete => streams?,
            grown = topics.grow(&fixture.topic, 3) => panic!("it waits for producers: {grown:?}"),
        };
        assert_eq!(streams.len(), 5);
        for _ in 0..10 {
            assert_deleted(&fixture, &streams, "through a consumer").await?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        subscription.stop().await;
        assert_deleted(&fixture, &streams, "at the end").await?;
    }
    Ok(())
}

async fn a_stream_that_is_deleted_while_it_is_pulled_comes_back_with_the_next_message(
    fixture: Fixture,
) -> Result<()> {
    let (puller, poll) = (fixture.queue.puller(), Duration::from_millis(1500));
    let request = PullRequest { max: 5, wait: poll, lease: Duration::from_secs(30) };
    let pull = async || -> Result<Vec<String>> {
        let pulled = puller.pull(&fixture.topic, GROUP, request).await?;
        let text = |one: &PulledMessage| String::from_utf8_lossy(&one.message.payload).into_owned();
        let outcomes = pulled.iter().map(|one| (one.lease.clone(), Outcome::Done)).collect();
        puller.settle(&fixture.topic, GROUP, outcomes).await?;
        Ok(pulled.iter().map(text).collect())
    };
    fixture.send(0, None, "before").await?;
    assert_eq!(pull().await?, ["before"]);
    let stream = fixture.stream(0).await?;
    // A read is blocked when it is deleted.
    let (pulled, _) = tokio::join!(pull(), async {
        tokio::time::sleep(poll / 5).await;
        fixture.backend.delete_stream(&stream).await
    });
    assert!(pulled?.is_empty());
    assert!(pull().await?.is_empty());
    assert_eq!(fixture.backend.stats(&stream).await?, None);
    fixture.send(0, None, "after").await?;
    assert_eq!(pull().await?, ["after"]);
    // A group that was removed by hand continues where it was.
    assert!(fixture.backend.remove_group(&stream, &GroupName::new(GROUP)?).await?);
    assert!(pull().await?.is_empty());
    fixture.send(0, None, "last").await?;
    assert_eq!(pull().await?, ["last"]);
    puller.close().await;
    Ok(())
}

on_every_backend!(
    a_topic_that_is_deleted_while_it_is_subscribed_or_pulled_does_not_come_back,
    a_topic_that_is_deleted_while_it_grows_does_not_come_back,
    a_stream_that_is_deleted_while_it_is_pulled_comes_back_with_the_next_message,
    a_deleted_topic_does_not_come_back_through_its_consumers,
    a_deleted_stream_does_not_come_back_until_a_message_is_sent,
    a_group_that_was_removed_continues_after_the_last_message,
);
