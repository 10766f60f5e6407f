//! Resizing a topic with active consumers keeps the order per key.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    ConsumerConfig, Message, MessageOrder, NewMessage, Policies, ProducerConfig, Queue,
};

use crate::dead_shard::stream_set;
use crate::fixture::{Fixture, GROUP, eventually};
use crate::lossy_backend::LossyBackend;
use crate::recording_handler::payload;

/// Messages per key, before and after the resize together.
const EACH: usize = 60;
const KEYS: usize = 24;

async fn a_moved_key_keeps_its_order_when_its_topic_is_resized(fixture: Fixture) -> Result<()> {
    // Not a multiple: keys also move between old partitions, in both directions.
    let policies = Policies { refresh: Duration::from_millis(100), ..Default::default() };
    fixture.queue.topics().create(&fixture.topic, 4, policies).await?;
    let seen: Arc<Mutex<HashMap<String, Vec<usize>>>> = Arc::default();
    let shared = Arc::clone(&seen);
    let handler = move |message: Message| {
        let seen = Arc::clone(&shared);
        async move {
            let key = message.key.clone().unwrap_or_default();
            // Slow, so that old partitions still have older messages when newer ones arrive in the new partitions.
            tokio::time::sleep(Duration::from_millis(5)).await;
            let number = payload(&message).parse().unwrap_or(usize::MAX);
            seen.lock()
                .expect("no test panicked while holding it")
                .entry(key)
                .or_default()
                .push(number);
        }
    };
    // So few that the payloads of most blocked messages are dropped.
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        concurrency: 2,
        blocked_max: 5,
        ..Default::default()
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;

    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let other = fixture.second_queue().await?.producer(ProducerConfig::default())?;
    let send = async |numbers: std::ops::Range<usize>, pause: Duration| {
        for n in numbers {
            for key in 0..KEYS {
                // Two producers, which learn of the resize at different times; each key has one producer.
                let producer = if key % 2 == 0 { &producer } else { &other };
                let message = NewMessage::keyed(format!("key{key}"), n.to_string());
                producer.send(&fixture.topic, message).await?;
            }
            tokio::time::sleep(pause).await;
        }
        anyhow::Ok(())
    };
    // A backlog in the old partitions, which newer messages could overtake.
    send(0..EACH / 2, Duration::ZERO).await?;
    let sending = async {
        eventually("the topic is resized", async || {
            Ok(fixture.queue.topics().describe(&fixture.topic).await?.partitions.len() == 6)
        })
        .await?;
        // Before, during and after the producers learn of it.
        send(EACH / 2..EACH, Duration::from_millis(10)).await
    };
    let growing = async {
        fixture.queue.topics().grow(&fixture.topic, 6).await?;
        anyhow::Ok(())
    };
    let (sent, grown) = tokio::join!(sending, growing);
    sent?;
    grown?;
    eventually("all messages are done", async || {
        Ok(subscription.stats().done == (KEYS * EACH) as u64)
    })
    .await?;
    let expected: Vec<usize> = (0..EACH).collect();
    for (key, numbers) in seen.lock().expect("no test panicked while holding it").iter() {
        assert_eq!(numbers, &expected, "{key}");
    }
    for partition in 0..6 {
        fixture.wait_until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

async fn moved_messages_of_a_dead_owner_do_not_take_the_capacity_of_those_that_block_them(
    fixture: Fixture,
) -> Result<()> {
    let policies = Policies { refresh: Duration::from_secs(1), ..Default::default() };
    fixture.queue.topics().create(&fixture.topic, 2, policies).await?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let keys: Vec<String> = (0..12).map(|n| format!("key{n}")).collect();
    let mut old = Vec::new();
    for key in &keys {
        old.push(producer.send(&fixture.topic, NewMessage::keyed(key, "0")).await?.partition);
    }
    let sending = async {
        eventually("the topic is resized", async || {
            Ok(fixture.queue.topics().describe(&fixture.topic).await?.partitions.len() == 3)
        })
        .await?;
        // Not the first producer, which may not know of the resize.
        let producer = fixture.second_queue().await?.producer(ProducerConfig::default())?;
        let mut moved = [0; 2];
        let mut stay = Vec::new();
        for (key, old) in keys.iter().zip(&old) {
            let new = producer.send(&fixture.topic, NewMessage::keyed(key, "1")).await?.partition;
            for n in 2..6 {
                fixture.send(new, Some(key), &n.to_string()).await?;
            }
            match new == *old {
                true => stay.push((key, new)),
                false if new < 2 => moved[usize::from(new)] += 1,
                false => {}
            }
        }
        assert!(moved.iter().all(|keys| *keys > 0), "keys move in both directions: {moved:?}");
        // Behind the blocked messages: the messages that block them.
        for (key, partition) in &stay {
            fixture.send(*partition, Some(key), "6").await?;
        }
        anyhow::Ok(stay.len())
    };
    let topics = fixture.queue.topics();
    let (grown, stayed) = tokio::join!(topics.grow(&fixture.topic, 3), sending);
    grown?;
    let all = keys.len() * 6 + stayed?;
    for partition in 0..3 {
        crate::bad_input::read_and_die(&fixture, &fixture.stream(partition).await?).await?;
    }
    let (handler, mut seen) =
        crate::recording_handler::recording_handler(|_| headwater_queue::Outcome::Done);
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        in_flight_max: 4,
        blocked_max: 2,
        ..Default::default()
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let mut last: HashMap<Option<String>, String> = HashMap::new();
    for _ in 0..all {
        let message = seen.next().await?;
        let before = last.insert(message.key.clone(), payload(&message));
        assert!(before < Some(payload(&message)), "{:?} after {before:?}", message.key);
    }
    for partition in 0..3 {
        fixture.wait_until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

/// A resize adds its streams to the set before the metadata counts them, and fails in between. Producers that cannot read the
/// metadata take a set that differs from it for a resize.
async fn repeating_a_failed_resize_removes_the_streams_that_the_topic_does_not_have(
    fixture: Fixture,
) -> Result<()> {
    let (topic, topics) = (&fixture.topic, fixture.queue.topics());
    let policies = Policies { refresh: Duration::from_millis(100), ..Default::default() };
    topics.create(topic, 2, policies).await?;
    let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
    let failing = Queue::new(lossy.clone()).topics();
    let listed = async || anyhow::Ok(fixture.backend.set_members(&stream_set(topic)?).await?);
    let existing = async || {
        let partitions = topics.describe(topic).await?.partitions;
        let mut streams: Vec<String> = partitions.into_iter().map(|it| it.stream_key).collect();
        streams.sort();
        anyhow::Ok(streams)
    };
    for repeated in [2, 3] {
        lossy.failing_updates.store(1, Ordering::SeqCst);
        let error = failing.grow(topic, 8).await.expect_err("the update of the metadata fails");
        assert!(error.is_transient(), "{error:?}");
        assert_eq!(listed().await?.len(), 8);
        assert_ne!(existing().await?.len(), 8);

        topics.grow(topic, repeated).await?;

        assert_eq!(existing().await?.len(), usize::from(repeated));
        assert_eq!(listed().await?, existing().await?);
    }
    Ok(())
}

/// Producers learn of the new count only after the set is written: a slow write there must not use up their time.
async fn the_time_of_a_resize_counts_from_after_its_streams_are_in_the_set(
    fixture: Fixture,
) -> Result<()> {
    const HELD: Duration = Duration::from_millis(20);
    let policies = Policies { refresh: Duration::from_millis(100), ..Default::default() };
    fixture.queue.topics().create(&fixture.topic, 2, policies).await?;
    let slow = LossyBackend::new(Arc::clone(&fixture.backend));
    let topics = Queue::new(slow.clone()).topics();

    slow.set_gate.close();
    let holding = async {
        slow.set_gate.until_waiting(1).await;
        let since = fixture.backend.now().await?;
        eventually("the clock of the backend goes on", async || {
            Ok(fixture.backend.now().await?.since(since) >= HELD)
        })
        .await?;
        slow.set_gate.open();
        anyhow::Ok(since)
    };
    let growing = async { anyhow::Ok(topics.grow(&fixture.topic, 3).await?) };
    let ((), held_since) = tokio::try_join!(growing, holding)?;

    let topic = fixture.queue.topics().describe(&fixture.topic).await?.topic;
    let held = topic.resizes[0].began.since(held_since);
    assert!(held >= HELD, "it counts from {held:?} after the set began to be written");
    Ok(())
}

on_every_backend!(
    a_moved_key_keeps_its_order_when_its_topic_is_resized,
    moved_messages_of_a_dead_owner_do_not_take_the_capacity_of_those_that_block_them,
    repeating_a_failed_resize_removes_the_streams_that_the_topic_does_not_have,
    the_time_of_a_resize_counts_from_after_its_streams_are_in_the_set,
);
