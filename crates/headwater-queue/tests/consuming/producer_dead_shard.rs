//! The server of a topic's metadata dies, or hangs: producers go on with what they have read.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use headwater_queue::{
    HashPartitioner, NewMessage, Partitioner, Policies, Producer, ProducerConfig, QueueError,
};
use headwater_stream::{Range, StreamName};
use tokio::time::Instant;

use crate::dead_shard::{PARTITIONS, ServerFault, ShardFixture, Victim, stream_set};
use crate::fixture::eventually;

/// How long producers use what they have read.
const REFRESH: Duration = Duration::from_secs(2);
/// Longer than twice that, and than the deadline of a call.
const OUTAGE: Duration = Duration::from_secs(8);

/// A call waits a second for the metadata by design. A read of it fails after the deadline of a call, 5 s: this is less, so that
/// no call has waited for that.
const SEND_MAX: Duration = Duration::from_secs(4);

/// The result of a call that must succeed soon.
async fn soon<T>(what: &str, call: impl Future<Output = Result<T, QueueError>>) -> Result<T> {
    let started = Instant::now();
    let result = call.await.with_context(|| format!("{what} fails"))?;
    let took = started.elapsed();
    ensure!(took < SEND_MAX, "{what} took {took:?}");
    Ok(result)
}

/// A key of this partition.
fn key_of(partition: u16, partitions: u16) -> String {
    let partitioner = HashPartitioner::default();
    let mut keys = (0..).map(|number| format!("key {number}"));
    let is_there = |key: &String| partitioner.partition(Some(key), partitions) == partition;
    keys.find(is_there).expect("keys are on all partitions")
}

impl ShardFixture {
    async fn start_producing(victim: Victim) -> Result<Self> {
        Self::start_with(victim, Policies { refresh: REFRESH, ..Default::default() }).await
    }

    fn healthy_partitions(&self) -> Vec<u16> {
        self.healthy().into_iter().map(|partition| partition as u16).collect()
    }

    /// Sends one message to each healthy partition, and another one in a batch. All at the same time.
    async fn send_to_partitions(&self, producer: &Producer) -> Result<()> {
        let topic = &self.fixture.topic;
        let sending = self.healthy_partitions().into_iter().map(async |partition| {
            let message = NewMessage::new("p").to_partition(partition);
            soon("a send", producer.send(topic, message.clone())).await?;
            let after = Duration::from_secs(3600);
            let delayed =
                soon("a delayed send", producer.send_after(topic, message, after)).await?;
            ensure!(soon("a cancellation", producer.cancel(&delayed)).await?);
            Ok(())
        });
        try_join_all(sending).await?;
        let message = |partition| NewMessage::new("p").to_partition(partition);
        let batch = self.healthy_partitions().into_iter().map(message).collect();
        for sent in soon("a batch", producer.send_batch(topic, batch)).await? {
            sent?;
        }
        Ok(())
    }

    /// The same with keys, and an id where there is no batch.
    async fn send_keys(&self, producer: &Producer, round: usize) -> Result<()> {
        let topic = &self.fixture.topic;
        let message = |partition| NewMessage::keyed(key_of(partition, PARTITIONS), "p");
        let sending = self.healthy_partitions().into_iter().map(async |partition| {
            let message = message(partition).with_id(format!("{partition} {round}"));
            let sent = soon("a send with a key", producer.send(topic, message)).await?;
            ensure!(sent.partition == partition && !sent.duplicate, "{sent:?}");
            Ok(())
        });
        try_join_all(sending).await?;
        let batch = self.healthy_partitions().into_iter().map(message).collect();
        for sent in soon("a batch with keys", producer.send_batch(topic, batch)).await? {
            sent?;
        }
        Ok(())
    }

    /// How many messages each healthy partition holds.
    async fn stored(&self) -> Result<Vec<usize>> {
        let mut stored = Vec::new();
        for partition in self.healthy() {
            let entries =
                self.fixture.backend.range(&self.streams[partition], Range::first(10_000)).await?;
            stored.push(entries.len());
        }
        Ok(stored)
    }
}

/// Changes of the topic are noticed when the server is back.
async fn sends_go_on_without_the_server_of_the_metadata(fault: ServerFault) -> Result<()> {
    let shards = ShardFixture::start_producing(Victim::Metadata).await?;
    let topic = &shards.fixture.topic;
    let producer = shards.fixture.queue.producer(ProducerConfig::default())?;
    shards.send_to_partitions(&producer).await?;
    shards.send_keys(&producer, 0).await?;

    fault.begin(shards.victims()?)?;
    let (until, mut rounds) = (Instant::now() + OUTAGE, 1);
    while Instant::now() < until {
        shards.send_to_partitions(&producer).await?;
        shards.send_keys(&producer, rounds).await?;
        rounds += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(shards.stored().await?, vec![4 * rounds; shards.healthy().len()]);

    fault.end(shards.victims()?)?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    let other = shards.fixture.second_queue().await?;
    other.topics().grow(topic, PARTITIONS + 1).await?;
    let message = NewMessage::keyed(key_of(PARTITIONS, PARTITIONS + 1), "p");
    assert_eq!(producer.send(topic, message).await?.partition, PARTITIONS);
    assert!(other.topics().delete(topic).await?);
    tokio::time::sleep(REFRESH).await;
    let message = NewMessage::new("p").to_partition(PARTITIONS);
    let error = producer.send(topic, message).await.expect_err("the topic was deleted");
    assert!(matches!(error, QueueError::Invalid { .. }), "{error:?}");
    for stream in &shards.streams {
        assert_eq!(shards.fixture.backend.stats(stream).await?, None, "{stream} came back");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sends_to_healthy_servers_go_on_without_the_server_of_the_metadata() -> Result<()> {
    sends_go_on_without_the_server_of_the_metadata(ServerFault::Dead).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sends_to_healthy_servers_go_on_while_the_server_of_the_metadata_hangs() -> Result<()> {
    sends_go_on_without_the_server_of_the_metadata(ServerFault::Hangs).await
}

/// Messages with a key need the number of partitions, which only the dead server has. A producer whose deadline is shorter
/// than a read of the metadata goes on, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_the_metadata_and_the_set_of_streams_only_messages_with_a_key_are_rejected()
-> Result<()> {
    let shards = ShardFixture::start_producing(Victim::MetadataAndStreamSet).await?;
    let topic = &shards.fixture.topic;
    let producer = shards.fixture.queue.producer(ProducerConfig::default())?;
    let second = shards.fixture.second_queue().await?;
    for producer in [&producer, &second.producer(ProducerConfig::default())?] {
        shards.send_to_partitions(producer).await?;
    }
    let config = ProducerConfig { deadline: Duration::from_millis(300), ..Default::default() };
    let impatient = second.producer(config)?;

    let partition = shards.healthy_partitions()[0];
    ServerFault::Dead.begin(shards.victims()?)?;
    let until = Instant::now() + OUTAGE;
    while Instant::now() < until {
        shards.send_to_partitions(&producer).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let before = shards.stored().await?;
    let message = NewMessage::keyed(key_of(partition, PARTITIONS), "p");
    let error = producer.send(topic, message).await.expect_err("the partition is not known");
    assert!(error.is_transient(), "{error:?}");
    assert_eq!(shards.stored().await?, before);
    eventually("a producer with a short deadline sends", async || {
        let message = NewMessage::new("p").to_partition(partition);
        Ok(impatient.send(topic, message).await.is_ok())
    })
    .await
}

/// The producer cannot reach the server of the metadata, and another process that can changes the topic.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_the_metadata_nothing_is_sent_to_a_topic_that_was_resized_or_deleted() -> Result<()>
{
    let shards = ShardFixture::start_producing(Victim::Metadata).await?;
    let (topic, backend) = (&shards.fixture.topic, &shards.fixture.backend);
    let config = ProducerConfig { deadline: Duration::from_secs(3), ..Default::default() };
    let producer = shards.fixture.queue.producer(config)?;
    shards.send_to_partitions(&producer).await?;

    ServerFault::Dead.begin(shards.victims()?)?;
    let set = stream_set(topic)?;
    let added = format!("stream:topic:{{{topic}:{PARTITIONS}}}");
    backend.set_add(&set, &[&added], None).await?;
    let partition = shards.healthy_partitions()[0];
    let keyed = || NewMessage::keyed(key_of(partition, PARTITIONS), "p");
    let is_rejected = async |message: NewMessage| {
        // What the producer has read before the change expires.
        tokio::time::sleep(REFRESH).await;
        let before = shards.stored().await?;
        let error = producer.send(topic, message).await.expect_err("the topic was changed");
        assert!(error.is_transient(), "{error:?}");
        assert_eq!(shards.stored().await?, before);
        anyhow::Ok(())
    };
    is_rejected(keyed()).await?;

    backend.set_remove(&set, &[&added]).await?;
    eventually("it sends again", async || Ok(producer.send(topic, keyed()).await.is_ok())).await?;

    let streams: Vec<&str> = shards.streams.iter().map(StreamName::as_str).collect();
    backend.set_remove(&set, &streams).await?;
    is_rejected(NewMessage::new("p").to_partition(partition)).await
}

/// The producer has read the topic before another process resized it, and cannot read it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_delayed_message_of_an_unknown_partition_is_not_taken_for_delivered() -> Result<()> {
    const GROWN: u16 = 2 * PARTITIONS;
    let shards = ShardFixture::start_producing(Victim::Metadata).await?;
    let topic = &shards.fixture.topic;
    let producer = shards.fixture.queue.producer(ProducerConfig::default())?;
    shards.send_to_partitions(&producer).await?;
    let second = shards.fixture.second_queue().await?;
    second.topics().grow(topic, GROWN).await?;
    let victim = shards.victims()?.0.port();
    let mut added = None;
    for partition in PARTITIONS..GROWN {
        let slot = shards.cluster.slot_of(&format!("stream:topic:{{{topic}:{partition}}}"))?;
        if shards.cluster.primary_of_slot(slot)?.port() != victim {
            added = Some(partition);
        }
    }
    let message = NewMessage::new("p").to_partition(added.context("one is on another server")?);
    let other = second.producer(ProducerConfig::default())?;
    let delayed = other.send_after(topic, message, Duration::from_secs(3600)).await?;

    ServerFault::Dead.begin(shards.victims()?)?;
    let error = producer.cancel(&delayed).await.expect_err("the partition is not known");
    assert!(error.is_transient(), "{error:?}");

    ServerFault::Dead.end(shards.victims()?)?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    eventually("it is cancelled", async || match producer.cancel(&delayed).await {
        Ok(is_cancelled) => Ok(is_cancelled),
        Err(error) if error.is_transient() => Ok(false),
        Err(error) => Err(error.into()),
    })
    .await
}
