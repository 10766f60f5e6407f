//! A full Redis (`maxmemory` with `noeviction`) is drained, and a dead owner is replaced; only what grows is refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{
    ConsumerConfig, LeaseResult, Message, Mode, NewMessage, Outcome, ProducerConfig, PullRequest,
    Queue, QueueError,
};
use headwater_stream::{Fields, Options, Retention, StreamError, StreamName, TrimGuard, connect};
use headwater_testkit::{ChaosCounts, Redis};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fixture::{Fixture, GROUP, eventually, short_leases};

const PARTITIONS: u16 = 4;
const MESSAGES: usize = 2000;

/// A handler of a process that dies before it has handled anything.
async fn never(_: Message) -> Outcome {
    std::future::pending().await
}

/// A process that consumes all partitions and dies: its leases and pending messages stay.
fn die_as_member(url: String, topic: String, mode: Mode) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let backend = connect(&url, &Options::default()).await?;
        let queue = Queue::with_config(backend, short_leases())?;
        let config = ConsumerConfig { mode, ..Default::default() };
        let subscription = queue.subscribe(&topic, GROUP, never, config).await?;
        eventually("it has messages of all partitions", async || {
            let stats = subscription.stats();
            Ok(stats.partitions == usize::from(PARTITIONS) && stats.in_flight > 0)
        })
        .await?;
        // Not dropped: it would leave the group.
        std::mem::forget(subscription);
        anyhow::Ok(())
    })?;
    runtime.shutdown_background();
    Ok(())
}

async fn streams_of(fixture: &Fixture) -> Result<Vec<StreamName>> {
    let mut streams = Vec::new();
    for partition in 0..PARTITIONS {
        streams.push(fixture.stream(partition).await?);
    }
    Ok(streams)
}

/// Bytes that the server uses, as it compares them with `maxmemory`.
fn used_memory(redis: &Redis) -> Result<u64> {
    let info = redis.command(&["INFO", "memory"])?.ok()?.text();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
    Ok(used.context("the server says how much it uses")?.trim().parse()?)
}

/// What docs/operations.md says of servers before Redis 7: consumers that run go on, and others start after the limit is raised
/// into the reserve.
async fn running_consumers_go_on_and_others_start_with_a_reserve(mode: Mode) -> Result<()> {
    const MESSAGES: usize = 1000;
    let redis = Redis::builder().maxmemory(0).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(PARTITIONS).await?;
    let (go, may_go) = watch::channel(false);
    let handler = move |_: Message| {
        let mut may_go = may_go.clone();
        async move {
            let _ = may_go.wait_for(|go| *go).await;
            Outcome::Done
        }
    };
    let config = || ConsumerConfig { mode, ..Default::default() };
    let (queue, topic) = (&fixture.queue, &fixture.topic);
    let running = queue.subscribe(topic, GROUP, handler.clone(), config()).await?;
    let payload = "x".repeat(10_000);
    for number in 0..MESSAGES {
        fixture.send(number as u16 % PARTITIONS, None, &payload).await?;
    }
    // What it has not received yet would be in buffers of the server.
    let before = std::cell::Cell::new(0);
    eventually("it has read all that it may", async || {
        let stats = running.stats();
        let has_stopped = stats.in_flight > 0 && before.replace(stats.in_flight) == stats.in_flight;
        let clients = redis.command(&["CLIENT", "LIST"])?.ok()?.text();
        let is_empty = clients.lines().all(|client| client.contains(" omem=0 "));
        Ok(stats.partitions == usize::from(PARTITIONS) && has_stopped && is_empty)
    })
    .await?;

    let used = used_memory(&redis)?;
    let limit = |bytes: u64| {
        redis.command(&["CONFIG", "SET", "maxmemory", &bytes.to_string()])?.ok().map(drop)
    };
    // Buffers of connections come and go: clearly below what the messages need.
    limit(used / 10 * 8)?;
    let producer = queue.producer(ProducerConfig::default())?;
    let refused = producer.send(topic, NewMessage::new("more")).await;
    assert!(matches!(&refused, Err(QueueError::Backend(StreamError::Full { .. }))), "{refused:?}");
    // Longer than the lifetime of its leases, which it renews; anew if this process had no processor meanwhile.
    let all = usize::from(PARTITIONS);
    let mut looked = Instant::now();
    let mut until = looked + short_leases().lease.ttl * 2;
    while looked < until {
        tokio::time::sleep(Duration::from_millis(50)).await;
        if looked.elapsed() > Duration::from_secs(1) {
            eventually("it has all again", async || Ok(running.stats().partitions == all)).await?;
            until = Instant::now() + short_leases().lease.ttl * 2;
        } else {
            assert_eq!(running.stats().partitions, all);
        }
        looked = Instant::now();
    }
    go.send_replace(true);
    eventually("all messages are handled", async || Ok(running.stats().done == MESSAGES as u64))
        .await?;
    for partition in 0..PARTITIONS {
        fixture.wait_until_settled(partition).await?;
    }
    assert!(used_memory(&redis)? > used / 10 * 8, "the server was full until now");

    limit(used / 10 * 11)?;
    let second_queue = fixture.second_queue().await?;
    let second = second_queue.subscribe(topic, GROUP, handler, config()).await?;
    if mode == Mode::Owned {
        eventually("both have partitions", async || {
            let shares = [running.stats().partitions, second.stats().partitions];
            Ok(shares == [usize::from(PARTITIONS) / 2; 2])
        })
        .await?;
    }
    for partition in 0..PARTITIONS {
        let message = NewMessage::new("more").to_partition(partition);
        producer.send(topic, message).await?;
    }
    eventually("the new messages are handled", async || {
        Ok(running.stats().done + second.stats().done == MESSAGES as u64 + u64::from(PARTITIONS))
    })
    .await?;
    tokio::join!(running.stop(), second.stop());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_running_owner_drains_a_full_server_and_another_starts_with_a_reserve() -> Result<()> {
    running_consumers_go_on_and_others_start_with_a_reserve(Mode::Owned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_running_shared_consumer_drains_a_full_server_and_another_starts_with_a_reserve()
-> Result<()> {
    running_consumers_go_on_and_others_start_with_a_reserve(Mode::Shared).await
}

async fn a_full_server_is_drained(mode: Mode) -> Result<()> {
    let redis = Redis::builder().maxmemory(0).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(PARTITIONS).await?;
    let streams = streams_of(&fixture).await?;
    let entry = |number: usize| {
        Fields::new([
            ("payload", format!("{number} {}", "x".repeat(500))),
            ("timestamp", "2026-01-01T00:00:00Z".to_owned()),
            ("retryCount", "0".to_owned()),
            ("topic", fixture.topic.clone()),
            ("partitionId", (number % streams.len()).to_string()),
            ("headers", "{}".to_owned()),
        ])
    };
    for (at, stream) in streams.iter().enumerate() {
        let entries: Vec<Fields> = (at..MESSAGES).step_by(streams.len()).map(entry).collect();
        fixture.backend.append(stream, &entries, &Retention::KEEP_ALL).await?;
    }
    let (url, topic) = (redis.url(), fixture.topic.clone());
    tokio::task::spawn_blocking(move || die_as_member(url, topic, mode)).await??;

    redis.command(&["CONFIG", "SET", "maxmemory", "1mb"])?.ok()?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let message = NewMessage::new("more");
    let refused = producer.send(&fixture.topic, message).await;
    assert!(matches!(&refused, Err(QueueError::Backend(StreamError::Full { .. }))), "{refused:?}");
    let attempts: Arc<Mutex<HashMap<usize, usize>>> = Arc::default();
    let seen = Arc::clone(&attempts);
    // A process that starts while the server is full. Every tenth message fails once, every hundredth for good.
    let handler = move |message: Message| {
        let text = String::from_utf8_lossy(&message.payload).into_owned();
        let number: usize = text.split(' ').next().expect("a word").parse().expect("a number");
        let mut seen = seen.lock().expect("no panic");
        let attempt = seen.entry(number).or_default();
        *attempt += 1;
        let outcome = match number % 100 {
            50 => Outcome::DeadLetter { reason: "a test".to_owned() },
            10 | 20 | 30 if *attempt == 1 => Outcome::retry("a test"),
            _ => Outcome::Done,
        };
        async move { outcome }
    };
    let queue = fixture.second_queue().await?;
    let config = ConsumerConfig { mode, ..Default::default() };
    let subscription = queue.subscribe(&fixture.topic, GROUP, handler, config).await?;

    eventually("all messages are handled", async || {
        Ok(attempts.lock().expect("no panic").len() == MESSAGES)
    })
    .await?;
    // The others are acknowledged; retries and dead letters cannot be written, so their messages stay pending.
    let waiting = MESSAGES / 100 * 4;
    eventually("only what cannot be written is pending", async || {
        let mut pending = 0;
        for partition in 0..PARTITIONS {
            pending += fixture.pending(partition).await?.len();
        }
        Ok(pending == waiting)
    })
    .await?;
    assert!(fixture.dead_letters().await?.is_empty());
    for stream in &streams {
        let keep = Retention::max_len(0);
        let trimmed = fixture.backend.trim(stream, &keep, TrimGuard::Safe).await?;
        assert!(trimmed.removed > 0, "{trimmed:?}");
    }

    redis.command(&["CONFIG", "SET", "maxmemory", "0"])?.ok()?;
    fixture.wait_for_dead_letters(MESSAGES / 100).await?;
    eventually("the retries are handled", async || {
        let attempts = attempts.lock().expect("no panic");
        let is_retried = |number: &usize| matches!(number % 100, 10 | 20 | 30);
        Ok((0..MESSAGES).filter(is_retried).all(|number| attempts[&number] >= 2))
    })
    .await?;
    for partition in 0..PARTITIONS {
        fixture.wait_until_settled(partition).await?;
    }
    assert_eq!(fixture.dead_letters().await?.len(), MESSAGES / 100, "each once");
    subscription.stop().await;
    let attempts = attempts.lock().expect("no panic");
    let planned = |number: usize| if matches!(number % 100, 10 | 20 | 30) { 2 } else { 1 };
    let repeated = attempts.iter().map(|(number, count)| count.saturating_sub(planned(*number)));
    let counts = ChaosCounts {
        sent: MESSAGES as u64,
        handled: attempts.len() as u64,
        doubled: repeated.sum::<usize>() as u64,
        ..Default::default()
    };
    counts.report("full server")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_full_server_is_drained_by_an_owner_that_replaces_a_dead_one() -> Result<()> {
    a_full_server_is_drained(Mode::Owned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_full_server_is_drained_by_a_shared_consumer_that_replaces_a_dead_one() -> Result<()> {
    a_full_server_is_drained(Mode::Shared).await
}

/// A subscription that ends while the server is full leaves its messages to the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_consumer_can_stop_while_the_server_is_full() -> Result<()> {
    let redis = Redis::builder().maxmemory(0).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(1).await?;
    for number in 0..5 {
        fixture.send(0, None, &number.to_string()).await?;
    }
    redis.command(&["CONFIG", "SET", "maxmemory", "1"])?.ok()?;
    let failing = |_: Message| async { Outcome::retry("a test") };
    let config = ConsumerConfig::default;
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, failing, config()).await?;
    eventually("all attempts have failed", async || Ok(subscription.stats().retried >= 5)).await?;
    tokio::time::timeout(Duration::from_secs(10), subscription.stop()).await?;
    assert_eq!(fixture.pending(0).await?.len(), 5);

    let done = |_: Message| async { Outcome::Done };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, done, config()).await?;
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

/// A delayed message that is due only changes its place: it is delivered although the server is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn due_messages_are_delivered_while_the_server_is_full() -> Result<()> {
    const DELAYED: usize = 50;
    let redis = Redis::builder().maxmemory(0).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(2).await?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    for number in 0..DELAYED {
        let message = NewMessage::new(format!("{number} {}", "x".repeat(500)));
        producer.send_after(&fixture.topic, message, Duration::from_millis(100)).await?;
    }
    redis.command(&["CONFIG", "SET", "maxmemory", "1"])?.ok()?;
    let message = NewMessage::new("more");
    let refused = producer.send_after(&fixture.topic, message, Duration::from_secs(1)).await;
    assert!(matches!(&refused, Err(QueueError::Backend(StreamError::Full { .. }))), "{refused:?}");

    let done = |_: Message| async { Outcome::Done };
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, done, config).await?;
    eventually("all due messages are handled", async || {
        Ok(subscription.stats().done == DELAYED as u64)
    })
    .await?;
    for partition in 0..2 {
        fixture.wait_until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

/// Also messages whose first holder died.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_full_server_is_drained_by_pulls() -> Result<()> {
    const MESSAGES: usize = 400;
    let redis = Redis::builder().maxmemory(0).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(PARTITIONS).await?;
    for number in 0..MESSAGES {
        fixture.send(number as u16 % PARTITIONS, None, &"x".repeat(2000)).await?;
    }
    redis.command(&["CONFIG", "SET", "maxmemory", "1mb"])?.ok()?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let refused = producer.send(&fixture.topic, NewMessage::new("more")).await;
    assert!(matches!(&refused, Err(QueueError::Backend(StreamError::Full { .. }))), "{refused:?}");

    // A process that starts while the server is full.
    let puller = fixture.second_queue().await?.puller();
    let (wait, lease) = (Duration::from_secs(20), Duration::from_secs(1));
    let request = PullRequest { max: 50, wait, lease };
    let abandoned = puller.pull(&fixture.topic, GROUP, request).await?.len();
    assert!(abandoned > 0);
    let (mut settled, mut repeated) = (0, 0);
    while settled < MESSAGES {
        let pulled = puller.pull(&fixture.topic, GROUP, request).await?;
        repeated += pulled.iter().filter(|one| one.message.deliveries > 1).count();
        let done = pulled.into_iter().map(|one| (one.lease, Outcome::Done)).collect();
        let results = puller.settle(&fixture.topic, GROUP, done).await?;
        settled += results.iter().filter(|result| **result == LeaseResult::Applied).count();
    }
    assert!(repeated >= abandoned, "{repeated} of {abandoned}");
    for partition in 0..PARTITIONS {
        assert!(fixture.pending(partition).await?.is_empty());
    }
    puller.close().await;
    Ok(())
}
