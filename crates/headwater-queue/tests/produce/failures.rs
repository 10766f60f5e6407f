//! A server that does not answer, answers too late, or whose reply is lost.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{NewMessage, Policies, ProducerConfig, Queue, QueueError};
use headwater_stream::{Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::setup::Setup;

/// A queue behind a proxy that injects faults, and one with a direct connection.
struct ProxiedQueue {
    proxy: Proxy,
    far: Setup,
    near: Setup,
    // Last, so that it is dropped after its users.
    _redis: Redis,
}

async fn connect_through_proxy(call_deadline: Duration) -> Result<ProxiedQueue> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline, ..Default::default() };
    let far = Setup::on(connect(&redis.url_at(proxy.addr()), &options).await?)?;
    let mut near = Setup::at(&redis.url()).await?;
    near.topic.clone_from(&far.topic);
    near.queue.topics().create(&near.topic, 2, Policies::default()).await?;
    Ok(ProxiedQueue { proxy, far, near, _redis: redis })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_send_fails_at_its_deadline_and_may_still_arrive() -> Result<()> {
    let ProxiedQueue { proxy, far, near, _redis } =
        connect_through_proxy(Duration::from_secs(30)).await?;
    let deadline = Duration::from_millis(300);
    let config = ProducerConfig { deadline, ..Default::default() };
    let producer = far.queue.producer(config)?;
    far.producer.send(&far.topic, NewMessage::new("before")).await?;

    proxy.stall()?;
    let message = NewMessage::new("p").with_id("order 7");
    let started = std::time::Instant::now();
    let late =
        producer.send(&far.topic, message.clone()).await.expect_err("the server does not answer");
    assert!(matches!(&late, QueueError::DeadlineExceeded { .. }), "{late:?}");
    assert!(late.is_transient());
    assert!((deadline..Duration::from_secs(20)).contains(&started.elapsed()));
    let batch = vec![NewMessage::new("in a batch").to_partition(0), NewMessage::new("another")];
    for result in producer.send_batch(&far.topic, batch).await? {
        assert!(matches!(result, Err(QueueError::DeadlineExceeded { .. })), "{result:?}");
    }
    // Reading the metadata of an uncached topic fails, too.
    let unknown = producer.send("another", NewMessage::new("p")).await;
    assert!(matches!(unknown, Err(QueueError::DeadlineExceeded { .. })), "{unknown:?}");

    // Whether it arrived or not: after a retry with its id, it is stored once.
    proxy.heal()?;
    let producer = far.queue.producer(ProducerConfig::default())?;
    producer.send(&far.topic, message.clone()).await?;
    producer.send(&far.topic, message).await?;
    let mut with_id = 0;
    for partition in 0..2 {
        let entries = near.entries(partition).await?;
        with_id += entries
            .iter()
            .filter(|entry| entry.fields.get("payload").is_some_and(|p| p == "p"))
            .count();
    }
    assert_eq!(with_id, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_reply_was_lost_is_stored_once_after_a_retry() -> Result<()> {
    let ProxiedQueue { proxy, far, near, _redis } =
        connect_through_proxy(Duration::from_secs(5)).await?;
    for number in 0..5 {
        let message = NewMessage::new("p").with_id(format!("id-{number}"));
        far.producer.send(&far.topic, NewMessage::new("warm").with_id("warm")).await?;
        proxy.drop_reply()?;
        // The backend retries idempotent calls; the caller retries the others.
        let mut attempts = 0;
        while let Err(error) = far.producer.send(&far.topic, message.clone()).await {
            assert!(error.is_transient(), "{error:?}");
            attempts += 1;
            assert!(attempts < 20, "still failing: {error}");
        }
    }
    assert_eq!(near.count().await?, 6);
    assert!(proxy.faults() >= 5, "replies were lost");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_server_is_an_error_and_its_return_is_noticed() -> Result<()> {
    let redis = Redis::start()?;
    let options = Options { call_deadline: Duration::from_secs(5), ..Default::default() };
    let queue = Queue::new(connect(&redis.url(), &options).await?);
    let producer = queue.producer(ProducerConfig::default())?;
    producer.send("orders", NewMessage::new("p")).await?;
    redis.kill9()?;
    let error =
        producer.send("orders", NewMessage::new("p")).await.expect_err("the server is unavailable");
    assert!(matches!(error, QueueError::Backend(_)) && error.is_transient(), "{error:?}");
    redis.restart()?;
    let mut attempts = 0;
    while let Err(error) = producer.send("orders", NewMessage::new("p")).await {
        assert!(error.is_transient(), "{error:?}");
        attempts += 1;
        assert!(attempts < 20, "still unavailable: {error}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_the_wrong_type_fails_only_its_partition() -> Result<()> {
    let redis = Redis::start()?;
    let setup = Setup::at(&redis.url()).await?;
    setup.queue.topics().create(&setup.topic, 2, Policies::default()).await?;
    redis.command(&["SET", setup.stream(1).await?.as_str(), "not a stream"])?;
    let batch = (0..4).map(|n| NewMessage::new("p").to_partition(n % 2)).collect();
    let results = setup.producer.send_batch(&setup.topic, batch).await?;
    let sent: Vec<bool> = results.iter().map(Result::is_ok).collect();
    assert_eq!(sent, [true, false, true, false]);
    assert!(results.iter().flatten().all(|sent| sent.partition == 0));
    let error = results.into_iter().nth(3).and_then(Result::err).expect("it failed");
    assert!(!error.is_transient(), "{error:?}");
    Ok(())
}
