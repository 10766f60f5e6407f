//! A queue on Redis with a key prefix, as a user who may use only keys and channels that begin with it.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    Backoff, ConsumerConfig, Mode, NewMessage, Outcome, Policies, ProducerConfig, Queue,
    RetryPolicy,
};
use headwater_stream::{Options, connect};
use headwater_testkit::Redis;

use crate::fixture::{Fixture, GROUP, eventually, short_leases, text};
use crate::recording_handler::{payload, recording_handler};

const RULES: &str = "resetkeys ~app1:* resetchannels &app1:* &__keyevent@* +@all";

/// Another program in the same database, with the same topic and group and another prefix.
async fn other_program(redis: &Redis) -> Result<Queue> {
    let url = format!("redis://{}/?prefix=app2:", redis.addr());
    Ok(Queue::with_config(connect(&url, &Options::default()).await?, short_leases())?)
}

async fn messages_are_handled_retried_delayed_and_dead_lettered(mode: Mode) -> Result<()> {
    let redis = Redis::builder().user("app1", "secret", RULES).start()?;
    let fixture = Fixture::open(&format!("{}?prefix=app1:", redis.url()), ()).await?;
    fixture.create(2).await?;
    let backoff = Backoff::Fixed(Duration::from_millis(50));
    let retry = RetryPolicy { backoff, ..Default::default() };
    let config = ConsumerConfig { mode, retry, ..Default::default() };
    let (handler, mut other_seen) = recording_handler(|_| Outcome::Done);
    let other = other_program(&redis).await?;
    other.topics().create(&fixture.topic, 2, Policies::default()).await?;
    let others = other.subscribe(&fixture.topic, GROUP, handler, config.clone()).await?;

    let (handler, mut seen) = recording_handler(|message| match payload(message).as_str() {
        "fragile" if message.attempt < 3 => Outcome::retry("not yet"),
        "poison" => Outcome::dead_letter("never"),
        _ => Outcome::Done,
    });
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    for text in ["plain", "fragile", "poison"] {
        producer.send(&fixture.topic, NewMessage::keyed(text, text)).await?;
    }
    let soon = Duration::from_millis(100);
    producer.send_after(&fixture.topic, NewMessage::new("delayed"), soon).await?;

    let mut handled = seen.payloads(6).await?;
    handled.sort_unstable();
    assert_eq!(handled, ["delayed", "fragile", "fragile", "fragile", "plain", "poison"]);
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "poison");
    for partition in 0..2 {
        fixture.wait_until_settled(partition).await?;
    }
    let stats = || subscription.stats();
    eventually("all are counted", async || Ok((stats().done, stats().dead_letters) == (3, 1)))
        .await?;
    subscription.stop().await;

    // The other program has received nothing of it, and works.
    let producer = other.producer(ProducerConfig::default())?;
    producer.send(&fixture.topic, NewMessage::new("other")).await?;
    assert_eq!(other_seen.payloads(1).await?, ["other"]);
    others.stop().await;
    for key in redis.command(&["KEYS", "*"])?.ok()?.items() {
        let key = key.text();
        assert!(["app1:", "app2:"].iter().any(|prefix| key.starts_with(prefix)), "{key}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_with_a_prefix_serves_owners() -> Result<()> {
    messages_are_handled_retried_delayed_and_dead_lettered(Mode::Owned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_with_a_prefix_serves_competing_consumers() -> Result<()> {
    messages_are_handled_retried_delayed_and_dead_lettered(Mode::Shared).await
}
