//! Handlers that panic, block their thread, take too long or never return.

use std::sync::mpsc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Backoff, ConsumerConfig, Message, Outcome, RetryPolicy, metrics};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use crate::counted::{counted, start_counting};
use crate::env::{Env, GROUP, PATIENCE, eventually, text};
use crate::record::{payload, recorder};
use crate::shared::shared;

fn quick() -> RetryPolicy {
    let backoff = Backoff::Fixed(Duration::from_millis(10));
    RetryPolicy { backoff, max_attempts: Some(2), ..Default::default() }
}

async fn a_panic_is_a_failure_and_stops_nobody(env: Env) -> Result<()> {
    start_counting();
    env.send(0, None, "panic").await?;
    env.send(0, None, "fine").await?;
    let (handler, mut seen) = recorder(|message| match message.payload.as_ref() {
        b"panic" => panic!("out of luck"),
        _ => Outcome::Done,
    });
    let config = ConsumerConfig { retry: quick(), ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    assert_eq!(seen.payloads(1).await?, ["fine"]);
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "panic");
    let reason = "the handler panicked: out of luck (attempt 2 of 2)";
    assert_eq!(text(&letters[0], "reason"), reason);
    env.until_settled(0).await?;
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "panic"), 2);
    subscription.stop().await;
    Ok(())
}

async fn a_handler_that_takes_too_long_is_a_failure(env: Env) -> Result<()> {
    start_counting();
    env.send(0, None, "slow").await?;
    let handler = async |_: Message| std::future::pending::<()>().await;
    let timeout = Some(Duration::from_millis(50));
    let config = ConsumerConfig { retry: quick(), handler_timeout: timeout, ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, boxed(handler), config).await?;
    let letters = env.until_dead_letters(1).await?;
    let reason = "the handler took longer than 50ms (attempt 2 of 2)";
    assert_eq!(text(&letters[0], "reason"), reason);
    assert_eq!(text(&letters[0], "payload"), "slow");
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "timeout"), 2);
    assert_eq!(counted(metrics::HANDLER_TIMEOUTS, &env.topic, "dropped"), 2);
    assert_eq!(counted(metrics::HANDLER_TIMEOUTS, &env.topic, "late"), 0);
    subscription.stop().await;
    Ok(())
}

async fn a_handler_that_blocks_for_too_long_is_counted_and_its_outcome_counts(
    env: Env,
) -> Result<()> {
    const LIMIT: Duration = Duration::from_millis(300);
    start_counting();
    env.send(0, None, "blocks").await?;
    env.send(0, None, "blocks and waits").await?;
    let handler = async |message: Message| {
        std::thread::sleep(2 * LIMIT);
        if message.payload.as_ref() != b"blocks" {
            std::future::pending::<()>().await;
        }
    };
    let config = ConsumerConfig { retry: quick(), handler_timeout: Some(LIMIT), ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, boxed(handler), config).await?;
    // One ends late and is done; the other can be dropped when it has ceased to block, and is safe.
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "blocks and waits");
    env.until_settled(0).await?;
    assert_eq!(counted(metrics::HANDLER_TIMEOUTS, &env.topic, "late"), 1);
    assert_eq!(counted(metrics::HANDLER_TIMEOUTS, &env.topic, "dropped"), 2);
    assert_eq!(counted(metrics::CONSUMED, &env.topic, "done"), 1);
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

async fn a_handler_that_never_returns_holds_up_its_partition_only(env: Env) -> Result<()> {
    start_counting();
    env.create(2).await?;
    let (seen_tx, mut seen) = unbounded_channel();
    let handler = move |message: Message| {
        let seen = seen_tx.clone();
        async move {
            if message.payload.as_ref() == b"for ever" {
                std::future::pending::<()>().await;
            }
            let _ = seen.send(payload(&message));
        }
    };
    let config = ConsumerConfig { drain: Duration::from_millis(100), ..Default::default() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    env.send(0, None, "before").await?;
    env.send(0, None, "for ever").await?;
    for n in 0..500 {
        env.send(1, None, &format!("m{n}")).await?;
    }
    let mut got = Vec::new();
    while got.len() < 501 {
        got.extend(tokio::time::timeout(PATIENCE, seen.recv()).await?);
    }
    assert!(got.contains(&"before".to_owned()));
    env.until_settled(1).await?;
    eventually("what ended before it is settled", async || Ok(env.pending(0).await?.len() == 1))
        .await?;

    // It is cancelled when the subscription stops, and its message is given back without a count.
    subscription.stop().await;
    let pending = env.pending(0).await?;
    assert_eq!((pending.len(), pending[0].deliveries), (1, 0));
    assert_eq!(pending[0].consumer.as_str(), "~released");
    assert_eq!(counted(metrics::CONSUMED, &env.topic, "done"), 501);
    Ok(())
}

async fn a_handler_that_blocks_its_thread_holds_up_its_partition_only(env: Env) -> Result<()> {
    start_counting();
    env.create(2).await?;
    let (seen_tx, mut seen) = unbounded_channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = std::sync::Mutex::new(may_go);
    let (handler, _) = recorder(move |message| {
        if message.payload.as_ref() == b"block" {
            // Blocks a thread of the runtime, as no handler should; longer than anybody waits for the others.
            let _ = may_go.lock().expect("nobody panicked").recv_timeout(PATIENCE * 4);
        }
        let _ = seen_tx.send(payload(message));
        Outcome::Done
    });
    let config = ConsumerConfig::default();
    for n in 0..300 {
        env.send(0, None, &format!("fast{n}")).await?;
    }
    env.send(0, None, "block").await?;
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    let mut next = async || Ok::<_, anyhow::Error>(timeout(PATIENCE, seen.recv()).await?);
    for n in 0..300 {
        assert_eq!(next().await?, Some(format!("fast{n}")));
    }
    for n in 0..500 {
        env.send(1, None, &format!("m{n}")).await?;
    }
    for n in 0..500 {
        assert_eq!(next().await?, Some(format!("m{n}")));
    }
    env.until_settled(1).await?;
    // Those before it in its own partition are settled, too.
    eventually("only the blocked one is pending", async || Ok(env.pending(0).await?.len() == 1))
        .await?;
    go.send(())?;
    assert_eq!(next().await?.as_deref(), Some("block"));
    env.until_settled(0).await?;
    assert_eq!(counted(metrics::CONSUMED, &env.topic, "done"), 801);
    subscription.stop().await;
    Ok(())
}

/// The message that blocks is the only thing that happens, so nothing else wakes a thread that could look for more.
async fn a_blocked_thread_does_not_keep_the_others_from_looking_for_work(env: Env) -> Result<()> {
    env.create(2).await?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // It may not be dropped where others must not wait for it.
    let runtime = std::mem::ManuallyDrop::new(runtime);
    let (seen_tx, mut seen) = unbounded_channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = std::sync::Mutex::new(may_go);
    let (handler, _) = recorder(move |message| {
        let _ = seen_tx.send(payload(message));
        if message.payload.as_ref() == b"block" {
            let _ = may_go.lock().expect("nobody panicked").recv_timeout(PATIENCE * 4);
        }
        Outcome::Done
    });
    let (url, topic) = (env.url.clone(), env.topic.clone());
    let consuming = runtime.spawn(async move {
        let backend = headwater_stream::connect(&url, &Default::default()).await?;
        let queue = headwater_queue::Queue::with_config(backend, crate::env::quick())?;
        let config = ConsumerConfig::default();
        anyhow::Ok(queue.subscribe(&topic, GROUP, handler, config).await?)
    });
    let subscription = consuming.await??;
    for round in 0..20 {
        env.send(1, None, &round.to_string()).await?;
        assert_eq!(timeout(PATIENCE, seen.recv()).await?, Some(round.to_string()));
    }
    env.send(0, None, "block").await?;
    assert_eq!(timeout(PATIENCE, seen.recv()).await?.as_deref(), Some("block"));
    for round in 0..20 {
        let sent = std::time::Instant::now();
        env.send(1, None, &round.to_string()).await?;
        assert_eq!(timeout(PATIENCE, seen.recv()).await?, Some(round.to_string()));
        println!("handled after {:?}", sent.elapsed());
    }
    go.send(())?;
    runtime.spawn(async move { subscription.stop().await }).await?;
    std::mem::ManuallyDrop::into_inner(runtime).shutdown_background();
    Ok(())
}

mod alone {
    use super::a_blocked_thread_does_not_keep_the_others_from_looking_for_work;

    on_backends!(redis, cluster: a_blocked_thread_does_not_keep_the_others_from_looking_for_work);
}

on_every_backend!(
    a_panic_is_a_failure_and_stops_nobody,
    a_handler_that_takes_too_long_is_a_failure,
    a_handler_that_blocks_for_too_long_is_counted_and_its_outcome_counts,
    a_handler_that_never_returns_holds_up_its_partition_only,
    a_handler_that_blocks_its_thread_holds_up_its_partition_only,
);
