//! A topic grows under its consumers: the order per key is kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    ConsumerConfig, Message, MessageOrder, NewMessage, Policies, ProducerConfig,
};

use crate::env::{Env, GROUP, eventually};
use crate::record::payload;

/// Messages per key, before and after the growth together.
const EACH: usize = 60;
const KEYS: usize = 24;

async fn a_key_that_moves_keeps_its_order_when_its_topic_grows(env: Env) -> Result<()> {
    // Not a multiple: keys move between old partitions, too, past each other.
    let policies = Policies { refresh: Duration::from_millis(100), ..Default::default() };
    env.queue.topics().create(&env.topic, 4, policies).await?;
    let seen: Arc<Mutex<HashMap<String, Vec<usize>>>> = Arc::default();
    let shared = Arc::clone(&seen);
    let handler = move |message: Message| {
        let seen = Arc::clone(&shared);
        async move {
            let key = message.key.clone().unwrap_or_default();
            // Slow, so that older messages still wait in the old partitions when newer ones arrive in the new ones.
            tokio::time::sleep(Duration::from_millis(5)).await;
            let number = payload(&message).parse().unwrap_or(usize::MAX);
            seen.lock().expect("nobody panicked").entry(key).or_default().push(number);
        }
    };
    // So few that most of those that wait do so without their bytes.
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        concurrency: 2,
        blocked_max: 5,
        ..Default::default()
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;

    let producer = env.queue.producer(ProducerConfig::default())?;
    let other = env.second_queue().await?.producer(ProducerConfig::default())?;
    let send = async |numbers: std::ops::Range<usize>, pause: Duration| {
        for n in numbers {
            for key in 0..KEYS {
                // Two producers, which hear of the growth at different times; but a key is always sent by the same.
                let producer = if key % 2 == 0 { &producer } else { &other };
                let message = NewMessage::keyed(format!("key{key}"), n.to_string());
                producer.send(&env.topic, message).await?;
            }
            tokio::time::sleep(pause).await;
        }
        anyhow::Ok(())
    };
    // A backlog in the old partitions, so that there is something to overtake.
    send(0..EACH / 2, Duration::ZERO).await?;
    let sending = async {
        eventually("the topic grows", async || {
            Ok(env.queue.topics().describe(&env.topic).await?.partitions.len() == 6)
        })
        .await?;
        // Before, while and after the producers hear of it.
        send(EACH / 2..EACH, Duration::from_millis(10)).await
    };
    let growing = async {
        env.queue.topics().grow(&env.topic, 6).await?;
        anyhow::Ok(())
    };
    let (sent, grown) = tokio::join!(sending, growing);
    sent?;
    grown?;
    eventually("all are done", async || Ok(subscription.stats().done == (KEYS * EACH) as u64))
        .await?;
    let expected: Vec<usize> = (0..EACH).collect();
    for (key, numbers) in seen.lock().expect("nobody panicked").iter() {
        assert_eq!(numbers, &expected, "{key}");
    }
    for partition in 0..6 {
        env.until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

async fn moved_messages_that_a_dead_owner_left_do_not_take_the_room_of_those_they_wait_for(
    env: Env,
) -> Result<()> {
    let policies = Policies { refresh: Duration::from_secs(1), ..Default::default() };
    env.queue.topics().create(&env.topic, 2, policies).await?;
    let producer = env.queue.producer(ProducerConfig::default())?;
    let keys: Vec<String> = (0..12).map(|n| format!("key{n}")).collect();
    let mut old = Vec::new();
    for key in &keys {
        old.push(producer.send(&env.topic, NewMessage::keyed(key, "0")).await?.partition);
    }
    let sending = async {
        eventually("the topic grows", async || {
            Ok(env.queue.topics().describe(&env.topic).await?.partitions.len() == 3)
        })
        .await?;
        // Not the first one, which may not have heard of it.
        let producer = env.second_queue().await?.producer(ProducerConfig::default())?;
        let mut moved = [0; 2];
        let mut stay = Vec::new();
        for (key, old) in keys.iter().zip(&old) {
            let new = producer.send(&env.topic, NewMessage::keyed(key, "1")).await?.partition;
            for n in 2..6 {
                env.send(new, Some(key), &n.to_string()).await?;
            }
            match new == *old {
                true => stay.push((key, new)),
                false if new < 2 => moved[usize::from(new)] += 1,
                false => {}
            }
        }
        assert!(moved.iter().all(|keys| *keys > 0), "keys move past each other: {moved:?}");
        // Behind those that wait: what they wait for.
        for (key, partition) in &stay {
            env.send(*partition, Some(key), "6").await?;
        }
        anyhow::Ok(stay.len())
    };
    let topics = env.queue.topics();
    let (grown, stayed) = tokio::join!(topics.grow(&env.topic, 3), sending);
    grown?;
    let all = keys.len() * 6 + stayed?;
    for partition in 0..3 {
        crate::bad_input::read_and_die(&env, &env.stream(partition).await?).await?;
    }
    let (handler, mut seen) = crate::record::recorder(|_| headwater_queue::Outcome::Done);
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        in_flight_max: 4,
        blocked_max: 2,
        ..Default::default()
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    let mut last: HashMap<Option<String>, String> = HashMap::new();
    for _ in 0..all {
        let message = seen.next().await?;
        let before = last.insert(message.key.clone(), payload(&message));
        assert!(before < Some(payload(&message)), "{:?} after {before:?}", message.key);
    }
    for partition in 0..3 {
        env.until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    a_key_that_moves_keeps_its_order_when_its_topic_grows,
    moved_messages_that_a_dead_owner_left_do_not_take_the_room_of_those_they_wait_for,
);
