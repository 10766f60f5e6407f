//! Order per key: a key's messages are handled one after the other, also across retries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Backoff, ConsumerConfig, Message, Order, Outcome, RetryPolicy};

use crate::env::{Env, GROUP, text};
use crate::record::{payload, recorder};

fn per_key() -> ConsumerConfig {
    let backoff = Backoff::Fixed(Duration::from_millis(100));
    ConsumerConfig {
        order: Order::PerKey,
        concurrency: 4,
        retry: RetryPolicy { backoff, ..Default::default() },
        ..Default::default()
    }
}

async fn while_a_key_is_tried_again_its_later_messages_wait_and_others_go_on(
    env: Env,
) -> Result<()> {
    for (key, payload) in [("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3"), ("b", "b2")] {
        env.send(0, Some(key), payload).await?;
    }
    let (handler, mut seen) =
        recorder(|message| match (message.payload.as_ref(), message.attempt) {
            (b"a1", attempt) if attempt < 3 => Outcome::retry("not yet"),
            _ => Outcome::Done,
        });
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, per_key()).await?;
    let mut order: HashMap<Option<String>, Vec<(String, u32)>> = HashMap::new();
    let mut all = Vec::new();
    for _ in 0..7 {
        let message = seen.next().await?;
        all.push(payload(&message));
        order.entry(message.key.clone()).or_default().push((payload(&message), message.attempt));
        assert_eq!(message.original_id, None, "it stays the same entry");
        assert_eq!(message.deliveries, u64::from(message.attempt));
    }
    let pairs = |list: &[(&str, u32)]| -> Vec<_> {
        list.iter().map(|(payload, attempt)| ((*payload).to_owned(), *attempt)).collect()
    };
    let a = pairs(&[("a1", 1), ("a1", 2), ("a1", 3), ("a2", 1), ("a3", 1)]);
    assert_eq!(order[&Some("a".to_owned())], a);
    assert_eq!(order[&Some("b".to_owned())], pairs(&[("b1", 1), ("b2", 1)]));
    let place = |payload: &str| all.iter().rposition(|p| p == payload);
    assert!(place("b2") < place("a1"), "b did not wait for a: {all:?}");
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_key_goes_on_behind_a_message_that_was_given_up(env: Env) -> Result<()> {
    env.send(0, Some("a"), "poison").await?;
    env.send(0, Some("a"), "next").await?;
    let mut config = per_key();
    config.retry.max_attempts = Some(3);
    let (handler, mut seen) = recorder(|message| match message.payload.as_ref() {
        b"poison" => Outcome::retry("never"),
        _ => Outcome::Done,
    });
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    assert_eq!(seen.payloads(4).await?, ["poison", "poison", "poison", "next"]);
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "reason"), "never (attempt 3 of 3)");
    assert_eq!(text(&letters[0], "retryCount"), "3");
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn keys_are_handled_at_once_up_to_the_limit_and_each_in_order(env: Env) -> Result<()> {
    const KEYS: usize = 10;
    const EACH: usize = 30;
    for n in 0..EACH {
        for key in 0..KEYS {
            env.send(0, Some(&format!("k{key}")), &n.to_string()).await?;
        }
    }
    #[derive(Default)]
    struct Now {
        at_once: usize,
        most: usize,
        keys: HashMap<String, usize>,
        next: HashMap<String, usize>,
        problems: Vec<String>,
    }
    let now = Arc::new(Mutex::new(Now::default()));
    let shared = Arc::clone(&now);
    let handler = move |message: Message| {
        let now = Arc::clone(&shared);
        async move {
            let key = message.key.clone().unwrap_or_default();
            {
                let mut now = now.lock().expect("nobody panicked");
                now.at_once += 1;
                now.most = now.most.max(now.at_once);
                if now.keys.insert(key.clone(), 1).is_some() {
                    now.problems.push(format!("{key} twice at once"));
                }
                let next = now.next.entry(key.clone()).or_default();
                let expected = std::mem::replace(next, *next + 1);
                if payload(&message) != expected.to_string() {
                    now.problems.push(format!("{key}: {} not {expected}", payload(&message)));
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            let mut now = now.lock().expect("nobody panicked");
            now.at_once -= 1;
            now.keys.remove(&key);
        }
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, per_key()).await?;
    crate::env::eventually("all are done", async || {
        Ok(subscription.stats().done == (KEYS * EACH) as u64)
    })
    .await?;
    {
        let now = now.lock().expect("nobody panicked");
        assert!(now.problems.is_empty(), "{:?}", now.problems);
        assert!((2..=4).contains(&now.most), "{} at once", now.most);
    }
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    while_a_key_is_tried_again_its_later_messages_wait_and_others_go_on,
    a_key_goes_on_behind_a_message_that_was_given_up,
    keys_are_handled_at_once_up_to_the_limit_and_each_in_order,
);
