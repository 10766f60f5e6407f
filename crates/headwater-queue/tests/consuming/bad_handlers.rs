//! Handlers that panic, block their thread, take too long or never return.

use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Backoff, ConsumerConfig, Message, Outcome, RetryPolicy, metrics};
use headwater_stream::{Fields, Retention};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually, text};
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::{payload, recording_handler};
use crate::shared::shared;

fn fast_retries() -> RetryPolicy {
    let backoff = Backoff::Fixed(Duration::from_millis(10));
    RetryPolicy { backoff, max_attempts: Some(2), ..Default::default() }
}

async fn a_panic_is_a_failed_attempt_and_does_not_stop_the_consumer(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    fixture.send(0, None, "panic").await?;
    fixture.send(0, None, "fine").await?;
    let (handler, mut seen) = recording_handler(|message| match message.payload.as_ref() {
        b"panic" => panic!("out of luck"),
        _ => Outcome::Done,
    });
    let config = ConsumerConfig { retry: fast_retries(), ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    assert_eq!(seen.payloads(1).await?, ["fine"]);
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "panic");
    let reason = "the handler panicked: out of luck (attempt 2 of 2)";
    assert_eq!(text(&letters[0], "reason"), reason);
    fixture.wait_until_settled(0).await?;
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "panic"), 2);
    subscription.stop().await;
    Ok(())
}

async fn a_handler_timeout_is_a_failed_attempt(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.send(0, None, "slow").await?;
    let handler = async |_: Message| std::future::pending::<()>().await;
    let timeout = Some(Duration::from_millis(50));
    let config = ConsumerConfig { retry: fast_retries(), handler_timeout: timeout, ..shared() };
    let subscription =
        fixture.queue.subscribe(&fixture.topic, GROUP, boxed(handler), config).await?;
    let letters = fixture.wait_for_dead_letters(1).await?;
    let reason = "the handler took longer than 50ms (attempt 2 of 2)";
    assert_eq!(text(&letters[0], "reason"), reason);
    assert_eq!(text(&letters[0], "payload"), "slow");
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "timeout"), 2);
    assert_eq!(counter_value(metrics::HANDLER_TIMEOUTS, &fixture.topic, "dropped"), 2);
    assert_eq!(counter_value(metrics::HANDLER_TIMEOUTS, &fixture.topic, "late"), 0);
    subscription.stop().await;
    Ok(())
}

async fn a_handler_that_blocks_past_its_timeout_is_counted_and_its_outcome_counts(
    fixture: Fixture,
) -> Result<()> {
    const LIMIT: Duration = Duration::from_millis(300);
    install_metric_recorder();
    fixture.send(0, None, "blocks").await?;
    fixture.send(0, None, "blocks and waits").await?;
    let handler = async |message: Message| {
        std::thread::sleep(2 * LIMIT);
        if message.payload.as_ref() != b"blocks" {
            std::future::pending::<()>().await;
        }
    };
    let config = ConsumerConfig { retry: fast_retries(), handler_timeout: Some(LIMIT), ..shared() };
    let subscription =
        fixture.queue.subscribe(&fixture.topic, GROUP, boxed(handler), config).await?;
    // The first returns late and is done; the second is dropped when it stops blocking, and becomes a dead letter.
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "blocks and waits");
    fixture.wait_until_settled(0).await?;
    assert_eq!(counter_value(metrics::HANDLER_TIMEOUTS, &fixture.topic, "late"), 1);
    assert_eq!(counter_value(metrics::HANDLER_TIMEOUTS, &fixture.topic, "dropped"), 2);
    assert_eq!(counter_value(metrics::CONSUMED, &fixture.topic, "done"), 1);
    subscription.stop().await;
    Ok(())
}

/// An async closure as a handler.
fn boxed<F, Fut>(handle: F) -> impl Fn(Message) -> Fut + Send + Sync + 'static
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future + Send,
{
    handle
}

async fn a_handler_that_never_returns_delays_only_its_own_partition(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    fixture.create(2).await?;
    let (seen_tx, mut seen) = unbounded_channel();
    let handler = move |message: Message| {
        let seen = seen_tx.clone();
        async move {
            if message.payload.as_ref() == b"forever" {
                std::future::pending::<()>().await;
            }
            let _ = seen.send(payload(&message));
        }
    };
    let config = ConsumerConfig { drain: Duration::from_millis(100), ..Default::default() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(0, None, "before").await?;
    fixture.send(0, None, "forever").await?;
    for n in 0..500 {
        fixture.send(1, None, &format!("m{n}")).await?;
    }
    let mut got = Vec::new();
    while got.len() < 501 {
        got.extend(tokio::time::timeout(TIMEOUT, seen.recv()).await?);
    }
    assert!(got.contains(&"before".to_owned()));
    fixture.wait_until_settled(1).await?;
    eventually("messages that finished before it are settled", async || {
        Ok(fixture.pending(0).await?.len() == 1)
    })
    .await?;

    // Stopping the subscription aborts it and releases its message without counting an attempt.
    subscription.stop().await;
    let pending = fixture.pending(0).await?;
    assert_eq!((pending.len(), pending[0].deliveries), (1, 0));
    assert_eq!(pending[0].consumer.as_str(), "~released");
    assert_eq!(counter_value(metrics::CONSUMED, &fixture.topic, "done"), 501);
    Ok(())
}

async fn a_handler_that_blocks_its_thread_delays_only_its_own_partition(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    fixture.create(2).await?;
    let (seen_tx, mut seen) = unbounded_channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = std::sync::Mutex::new(may_go);
    let (handler, _) = recording_handler(move |message| {
        if message.payload.as_ref() == b"block" {
            // Blocks a thread of the runtime for longer than the timeout of the other messages.
            let _ =
                may_go.lock().expect("no test panicked while holding it").recv_timeout(TIMEOUT * 4);
        }
        let _ = seen_tx.send(payload(message));
        Outcome::Done
    });
    let config = ConsumerConfig::default();
    for n in 0..300 {
        fixture.send(0, None, &format!("fast{n}")).await?;
    }
    fixture.send(0, None, "block").await?;
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let mut next = async || Ok::<_, anyhow::Error>(timeout(TIMEOUT, seen.recv()).await?);
    for n in 0..300 {
        assert_eq!(next().await?, Some(format!("fast{n}")));
    }
    for n in 0..500 {
        fixture.send(1, None, &format!("m{n}")).await?;
    }
    for n in 0..500 {
        assert_eq!(next().await?, Some(format!("m{n}")));
    }
    fixture.wait_until_settled(1).await?;
    // Messages before it in its own partition are settled, too.
    eventually("only the blocked message is pending", async || {
        Ok(fixture.pending(0).await?.len() == 1)
    })
    .await?;
    go.send(())?;
    assert_eq!(next().await?.as_deref(), Some("block"));
    fixture.wait_until_settled(0).await?;
    assert_eq!(counter_value(metrics::CONSUMED, &fixture.topic, "done"), 801);
    subscription.stop().await;
    Ok(())
}

/// The blocking message is the only event, so that nothing else wakes another thread of the runtime.
async fn a_blocked_thread_does_not_stall_the_runtime(fixture: Fixture) -> Result<()> {
    fixture.create(2).await?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // A runtime must not be dropped in an async context.
    let runtime = std::mem::ManuallyDrop::new(runtime);
    let (seen_tx, mut seen) = unbounded_channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = std::sync::Mutex::new(may_go);
    let (handler, _) = recording_handler(move |message| {
        let _ = seen_tx.send(payload(message));
        if message.payload.as_ref() == b"block" {
            let _ =
                may_go.lock().expect("no test panicked while holding it").recv_timeout(TIMEOUT * 4);
        }
        Outcome::Done
    });
    let (url, topic) = (fixture.url.clone(), fixture.topic.clone());
    let consuming = runtime.spawn(async move {
        let backend = headwater_stream::connect(&url, &Default::default()).await?;
        let queue = headwater_queue::Queue::with_config(backend, crate::fixture::short_leases())?;
        let config = ConsumerConfig::default();
        anyhow::Ok(queue.subscribe(&topic, GROUP, handler, config).await?)
    });
    let subscription = consuming.await??;
    for round in 0..20 {
        fixture.send(1, None, &round.to_string()).await?;
        assert_eq!(timeout(TIMEOUT, seen.recv()).await?, Some(round.to_string()));
    }
    fixture.send(0, None, "block").await?;
    assert_eq!(timeout(TIMEOUT, seen.recv()).await?.as_deref(), Some("block"));
    for round in 0..20 {
        let sent = std::time::Instant::now();
        fixture.send(1, None, &round.to_string()).await?;
        assert_eq!(timeout(TIMEOUT, seen.recv()).await?, Some(round.to_string()));
        println!("handled after {:?}", sent.elapsed());
    }
    go.send(())?;
    runtime.spawn(async move { subscription.stop().await }).await?;
    std::mem::ManuallyDrop::into_inner(runtime).shutdown_background();
    Ok(())
}

/// As many messages as this block their handlers at once.
const BLOCKING: usize = 32;

async fn handlers_that_block_after_quick_ones_run_at_once(fixture: Fixture) -> Result<()> {
    // Far more than the threads of the runtime: `block_in_place` passes the other tasks of a thread on.
    let running = Arc::new((Mutex::new(0), Condvar::new()));
    let handler_running = Arc::clone(&running);
    let (handler, mut seen) = recording_handler(move |message| {
        if message.payload.as_ref() == b"block" {
            let (count, changed) = &*handler_running;
            tokio::task::block_in_place(|| {
                let mut count = count.lock().expect("no test panicked while holding it");
                *count += 1;
                changed.notify_all();
                let all = |count: &mut usize| *count < BLOCKING;
                let waited = changed.wait_timeout_while(count, TIMEOUT, all);
                let waited = waited.expect("no test panicked while holding it").1;
                assert!(!waited.timed_out(), "not all handlers were called at once");
            });
        }
        Outcome::Done
    });
    let config = ConsumerConfig { concurrency: BLOCKING, retry: fast_retries(), ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    for round in 0..3 {
        *running.0.lock().expect("no test panicked while holding it") = 0;
        let kinds = [("quick", 500), ("block", BLOCKING)];
        for (payload, count) in kinds {
            let entry = Fields::new([("payload", payload)]);
            let stream = fixture.stream(0).await?;
            let entries = vec![entry; count];
            fixture.backend.append(&stream, &entries, &Retention::KEEP_ALL).await?;
            let got = seen.payloads(count).await?;
            assert!(got.iter().all(|got| got == payload), "round {round}");
        }
    }
    fixture.wait_until_settled(0).await?;
    assert!(fixture.dead_letters().await?.is_empty());
    subscription.stop().await;
    Ok(())
}

async fn a_handler_that_blocks_its_thread_after_quick_ones_does_not_stop_the_others(
    fixture: Fixture,
) -> Result<()> {
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = Mutex::new(may_go);
    let (handler, mut seen) = recording_handler(move |message| {
        if message.payload.as_ref() == b"block" {
            let may_go = may_go.lock().expect("no test panicked while holding it");
            let _ = may_go.recv_timeout(TIMEOUT * 4);
        }
        Outcome::Done
    });
    let config = ConsumerConfig { concurrency: BLOCKING, ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let stream = fixture.stream(0).await?;
    let payloads = |from: usize, to: usize| (from..to).map(|n| n.to_string());
    let mut entries: Vec<Fields> =
        payloads(0, 600).map(|n| Fields::new([("payload", n)])).collect();
    entries.insert(300, Fields::new([("payload", "block")]));
    fixture.backend.append(&stream, &entries, &Retention::KEEP_ALL).await?;
    let mut got = seen.payloads(600).await?;
    got.sort_by_key(|n| n.parse::<usize>().ok());
    assert_eq!(got, payloads(0, 600).collect::<Vec<_>>());
    eventually("only the blocked message is pending", async || {
        Ok(fixture.pending(0).await?.len() == 1)
    })
    .await?;
    go.send(())?;
    assert_eq!(seen.payloads(1).await?, ["block"]);
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

mod alone {
    use super::a_blocked_thread_does_not_stall_the_runtime;

    on_backends!(redis, cluster: a_blocked_thread_does_not_stall_the_runtime);
}

on_every_backend!(
    a_panic_is_a_failed_attempt_and_does_not_stop_the_consumer,
    a_handler_timeout_is_a_failed_attempt,
    a_handler_that_blocks_past_its_timeout_is_counted_and_its_outcome_counts,
    a_handler_that_never_returns_delays_only_its_own_partition,
    a_handler_that_blocks_its_thread_delays_only_its_own_partition,
    handlers_that_block_after_quick_ones_run_at_once,
    a_handler_that_blocks_its_thread_after_quick_ones_does_not_stop_the_others,
);
