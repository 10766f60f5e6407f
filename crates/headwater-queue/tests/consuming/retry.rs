//! Retries with backoff and dead letters, with relaxed order.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    Backoff, ConsumerConfig, Mode, Outcome, Policies, PolicyChanges, RetryPolicy,
};

use crate::fixture::{Fixture, GROUP, eventually, text};
use crate::recording_handler::{payload, recording_handler};
use crate::shared::shared;

fn quick_retries() -> ConsumerConfig {
    let backoff = Backoff::Fixed(Duration::from_millis(50));
    ConsumerConfig { retry: RetryPolicy { backoff, ..Default::default() }, ..shared() }
}

async fn a_failed_message_is_retried_unchanged_until_it_succeeds(fixture: Fixture) -> Result<()> {
    let first = fixture.send(0, Some("k"), "fragile").await?;
    let (handler, mut seen) = recording_handler(|message| match message.attempt {
        3 => Outcome::Done,
        _ => Outcome::retry("not yet"),
    });
    let subscription =
        fixture.queue.subscribe(&fixture.topic, GROUP, handler, quick_retries()).await?;
    for attempt in 1..=3 {
        let message = seen.next().await?;
        assert_eq!((message.attempt, message.first_id()), (attempt, first));
        assert_eq!((payload(&message), message.key.as_deref()), ("fragile".into(), Some("k")));
    }
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    assert_eq!((subscription.stats().retried, subscription.stats().done), (2, 1));
    assert!(fixture.dead_letters().await?.is_empty());
    Ok(())
}

async fn a_message_that_always_fails_becomes_a_dead_letter(fixture: Fixture) -> Result<()> {
    let first = fixture.send(0, Some("k"), "poison").await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::retry("never"));
    let mut config = quick_retries();
    config.retry.max_attempts = Some(3);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let letters = fixture.wait_for_dead_letters(1).await?;
    subscription.stop().await;
    let attempts: Vec<u32> = std::iter::from_fn(|| seen.now()).map(|m| m.attempt).collect();
    assert_eq!(attempts, [1, 2, 3]);
    let fields = &letters[0].fields;
    for (name, value) in [
        ("originalTopic", fixture.topic.as_str()),
        ("partitionId", "0"),
        ("originalMessageId", &first.to_string()),
        ("key", "k"),
        ("payload", "poison"),
        ("headers", "{}"),
        ("retryCount", "3"),
        ("timestamp", "2026-01-01T00:00:00Z"),
        ("reason", "never (attempt 3 of 3)"),
    ] {
        assert_eq!(fields.get(name).map(|v| v.as_ref()), Some(value.as_bytes()), "{name}");
    }
    assert!(fields.get("failedAt").is_some());
    fixture.wait_until_settled(0).await?;
    Ok(())
}

async fn a_handler_can_make_a_dead_letter_at_once(fixture: Fixture) -> Result<()> {
    fixture.send(0, None, "hopeless").await?;
    let (handler, _seen) = recording_handler(|_| Outcome::dead_letter("no such customer"));
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "reason"), "no such customer");
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    assert_eq!(subscription.stats().dead_letters, 1);
    Ok(())
}

async fn a_changed_limit_of_a_topic_applies_to_running_consumers(fixture: Fixture) -> Result<()> {
    let refresh = Duration::from_millis(50);
    let policies = Policies { max_retries: 0, refresh, ..Policies::default() };
    fixture.queue.topics().create(&fixture.topic, 1, policies).await?;
    let (handler, _seen) = recording_handler(|_| Outcome::retry("never"));
    let config = ConsumerConfig { mode: Mode::Owned, ..quick_retries() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    // Without `maxRetries`, as in compact entries.
    fixture.send(0, None, "before").await?;
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "reason"), "never (attempt 1 of 1)");
    let changes = PolicyChanges { max_retries: Some(2), ..PolicyChanges::default() };
    fixture.queue.topics().alter(&fixture.topic, &changes).await?;
    eventually("the new limit", async || {
        let known = fixture.dead_letters().await?.len();
        fixture.send(0, None, "after").await?;
        let letters = fixture.wait_for_dead_letters(known + 1).await?;
        Ok(text(&letters[known], "reason") == "never (attempt 3 of 3)")
    })
    .await?;
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    a_failed_message_is_retried_unchanged_until_it_succeeds,
    a_message_that_always_fails_becomes_a_dead_letter,
    a_handler_can_make_a_dead_letter_at_once,
    a_changed_limit_of_a_topic_applies_to_running_consumers,
);
