//! Order per key: messages of a key are handled one after the other, also across retries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{Backoff, ConsumerConfig, Message, MessageOrder, Outcome, RetryPolicy};
use headwater_stream::{ConsumerName, GroupName, ReclaimFrom, ReclaimRequest};

use crate::fixture::{Fixture, GROUP, TIMEOUT, text};
use crate::recording_handler::{payload, recording_handler};

fn per_key() -> ConsumerConfig {
    let backoff = Backoff::Fixed(Duration::from_millis(100));
    ConsumerConfig {
        order: MessageOrder::PerKey,
        concurrency: 4,
        retry: RetryPolicy { backoff, ..Default::default() },
        ..Default::default()
    }
}

async fn later_messages_of_a_key_wait_for_its_retry_and_other_keys_continue(
    fixture: Fixture,
) -> Result<()> {
    for (key, payload) in [("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3"), ("b", "b2")] {
        fixture.send(0, Some(key), payload).await?;
    }
    let (handler, mut seen) =
        recording_handler(|message| match (message.payload.as_ref(), message.attempt) {
            (b"a1", attempt) if attempt < 3 => Outcome::retry("not yet"),
            _ => Outcome::Done,
        });
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, per_key()).await?;
    let mut order: HashMap<Option<String>, Vec<(String, u32)>> = HashMap::new();
    let mut all = Vec::new();
    for _ in 0..7 {
        let message = seen.next().await?;
        all.push(payload(&message));
        order.entry(message.key.clone()).or_default().push((payload(&message), message.attempt));
        assert_eq!(message.original_id, None, "a retry in place keeps the entry");
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
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_released_message_blocks_its_key_and_counts_no_attempt(fixture: Fixture) -> Result<()> {
    fixture.send(0, Some("a"), "a1").await?;
    fixture.send(0, Some("a"), "a2").await?;
    let is_first = std::sync::atomic::AtomicBool::new(true);
    let (handler, mut seen) = recording_handler(move |_| {
        match is_first.swap(false, std::sync::atomic::Ordering::SeqCst) {
            true => Outcome::Release,
            false => Outcome::Done,
        }
    });
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, per_key()).await?;
    for expected in ["a1", "a1", "a2"] {
        let message = seen.next().await?;
        assert_eq!(
            (payload(&message).as_str(), message.attempt, message.deliveries),
            (expected, 1, 1)
        );
    }
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_message_that_fails_during_shutdown_is_released_at_once(fixture: Fixture) -> Result<()> {
    fixture.send(0, Some("a"), "a1").await?;
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let permits = Arc::new(tokio::sync::Semaphore::new(0));
    let handler = {
        let permits = Arc::clone(&permits);
        move |_: Message| {
            let (permits, started) = (Arc::clone(&permits), started.clone());
            async move {
                let _ = started.send(());
                let _permit = permits.acquire().await;
                Outcome::retry("the database is gone")
            }
        }
    };
    let config = ConsumerConfig { drain: 2 * crate::fixture::TIMEOUT, ..per_key() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    starts.recv().await;
    let failing = async {
        // The handler fails after the shutdown has started.
        tokio::time::sleep(Duration::from_millis(100)).await;
        permits.add_permits(1);
    };
    let stopping = async { tokio::join!(subscription.stop(), failing) };
    tokio::time::timeout(crate::fixture::TIMEOUT, stopping).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, per_key()).await?;
    assert_eq!(seen.next().await?.attempt, 1);
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_key_continues_after_a_dead_letter(fixture: Fixture) -> Result<()> {
    fixture.send(0, Some("a"), "poison").await?;
    fixture.send(0, Some("a"), "next").await?;
    let mut config = per_key();
    config.retry.max_attempts = Some(3);
    let (handler, mut seen) = recording_handler(|message| match message.payload.as_ref() {
        b"poison" => Outcome::retry("never"),
        _ => Outcome::Done,
    });
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    assert_eq!(seen.payloads(4).await?, ["poison", "poison", "poison", "next"]);
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "reason"), "never (attempt 3 of 3)");
    assert_eq!(text(&letters[0], "retryCount"), "3");
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn keys_are_handled_concurrently_up_to_the_limit_and_each_in_order(
    fixture: Fixture,
) -> Result<()> {
    const KEYS: usize = 10;
    const EACH: usize = 30;
    for n in 0..EACH {
        for key in 0..KEYS {
            fixture.send(0, Some(&format!("k{key}")), &n.to_string()).await?;
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
                let mut now = now.lock().expect("no test panicked while holding it");
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
            let mut now = now.lock().expect("no test panicked while holding it");
            now.at_once -= 1;
            now.keys.remove(&key);
        }
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, per_key()).await?;
    crate::fixture::eventually("all messages are done", async || {
        Ok(subscription.stats().done == (KEYS * EACH) as u64)
    })
    .await?;
    {
        let now = now.lock().expect("no test panicked while holding it");
        assert!(now.problems.is_empty(), "{:?}", now.problems);
        assert!((2..=4).contains(&now.most), "{} at once", now.most);
    }
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

/// Entries with many deliveries are reclaimed a few at a time, while no handler is running. A message in backoff is not
/// being handled.
async fn reclaiming_does_not_wait_for_messages_in_backoff(fixture: Fixture) -> Result<()> {
    const MESSAGES: usize = 20;
    fixture.create(1).await?;
    for n in 0..MESSAGES {
        fixture.send(0, Some(&format!("k{n}")), &n.to_string()).await?;
    }
    let stream = fixture.stream(0).await?;
    crate::bad_input::read_and_die(&fixture, &stream).await?;
    let (group, dead) = (GroupName::new(GROUP)?, ConsumerName::new("foreign")?);
    for _ in 0..2 {
        let reclaim = ReclaimRequest {
            stream: &stream,
            group: &group,
            consumer: &dead,
            fence: None,
            from: ReclaimFrom::Anyone,
            min_idle: Duration::ZERO,
            after: None,
            count: MESSAGES,
        };
        fixture.backend.reclaim(reclaim).await?;
    }
    let (handler, mut seen) = recording_handler(|message| match message.attempt {
        1 => Outcome::retry("later"),
        _ => Outcome::Done,
    });
    let backoff = Backoff::Fixed(TIMEOUT);
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        concurrency: 2,
        retry: RetryPolicy { backoff, ..Default::default() },
        drain: Duration::from_millis(100),
        ..Default::default()
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let all = tokio::time::timeout(TIMEOUT, seen.payloads(MESSAGES)).await;
    all.context("each page waited for the one before it")??;
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    reclaiming_does_not_wait_for_messages_in_backoff,
    a_released_message_blocks_its_key_and_counts_no_attempt,
    a_message_that_fails_during_shutdown_is_released_at_once,
    later_messages_of_a_key_wait_for_its_retry_and_other_keys_continue,
    a_key_continues_after_a_dead_letter,
    keys_are_handled_concurrently_up_to_the_limit_and_each_in_order,
);
