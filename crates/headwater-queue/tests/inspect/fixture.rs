//! Fixture: queues on every backend, with messages, groups and dead letters.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{NewMessage, Policies, Producer, ProducerConfig, Queue, QueueError, Sent};
use headwater_stream::{
    Backend, ConsumerName, DeliveredEntry, Entry, EntryId, Fields, GroupName, GroupReader,
    GroupStart, Options, Range, Retention, SettleBatch, Settlement, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis, unique};

/// A queue on some backend, and a topic that no other test uses.
pub(crate) struct QueueFixture {
    pub(crate) queue: Queue,
    pub(crate) producer: Producer,
    pub(crate) topic: String,
}

pub(crate) const GROUP: &str = "billing";

/// The copies of a group's membership: on a cluster there are three.
pub(crate) fn membership_tags(backend: &dyn Backend) -> &'static [&'static str] {
    if backend.cluster_slot("").is_some() { &["{l7}:", "{p2}:", "{br}:"] } else { &[""] }
}

impl QueueFixture {
    pub(crate) async fn embedded() -> Result<Self> {
        Self::at("embedded:memory").await
    }

    pub(crate) async fn redis() -> Result<Self> {
        Self::at(&Redis::shared()?.url()).await
    }

    pub(crate) async fn cluster() -> Result<Self> {
        Self::at(&Cluster::shared()?.url()).await
    }

    pub(crate) async fn at(url: &str) -> Result<Self> {
        let queue = Queue::new(connect(url, &Options::default()).await?);
        let producer = queue.producer(ProducerConfig::default())?;
        Ok(Self { queue, producer, topic: unique("orders") })
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        self.queue.backend()
    }

    /// Creates the topic with a short refresh, so that growing is fast.
    pub(crate) async fn create(&self, partitions: u16) -> Result<()> {
        self.queue.topics().create(&self.topic, partitions, quick()).await?;
        Ok(())
    }

    /// Sends a message to a partition.
    pub(crate) async fn send(&self, partition: u16, payload: &str) -> Result<Sent> {
        let message = NewMessage::new(payload.to_owned()).to_partition(partition);
        Ok(self.producer.send(&self.topic, message).await?)
    }

    /// Sends `count` messages in turn to the partitions; returns their entries in the order they were sent.
    pub(crate) async fn send_many(&self, partitions: u16, count: usize) -> Result<Vec<Sent>> {
        let mut sent = Vec::new();
        for number in 0..count {
            sent.push(self.send(number as u16 % partitions, &number.to_string()).await?);
        }
        Ok(sent)
    }

    /// The stream of a partition, by the key that `describe` shows.
    pub(crate) async fn stream(&self, partition: u16) -> Result<StreamName> {
        let described = self.queue.topics().describe(&self.topic).await?;
        let found =
            described.partitions.get(usize::from(partition)).context("no such partition")?;
        Ok(StreamName::new(&found.stream_key)?)
    }

    /// The stream of the dead letters.
    pub(crate) async fn letters_stream(&self) -> Result<StreamName> {
        Ok(StreamName::new(self.queue.topics().describe(&self.topic).await?.dead_letters_key)?)
    }

    /// The entries of a partition.
    pub(crate) async fn entries(&self, partition: u16) -> Result<Vec<Entry>> {
        Ok(self.backend().range(&self.stream(partition).await?, Range::first(10_000)).await?)
    }

    pub(crate) async fn group(&self, partition: u16) -> Result<()> {
        let stream = self.stream(partition).await?;
        self.backend().ensure_group(&stream, &group(), GroupStart::Beginning).await?;
        Ok(())
    }

    /// Delivers up to `count` messages of a partition to a consumer of the group.
    pub(crate) async fn deliver(
        &self,
        partition: u16,
        consumer: &str,
        count: usize,
    ) -> Result<Vec<DeliveredEntry>> {
        self.group(partition).await?;
        let stream = self.stream(partition).await?;
        let mut reader: Box<dyn GroupReader> =
            self.backend().reader(&group(), &ConsumerName::new(consumer)?).await?;
        let batches = reader.read(&[stream], count, Duration::ZERO).await?;
        reader.close().await?;
        Ok(batches.into_iter().flat_map(|batch| batch.entries).collect())
    }

    /// Acknowledges these messages of a partition.
    pub(crate) async fn settle(
        &self,
        partition: u16,
        consumer: &str,
        ids: &[EntryId],
    ) -> Result<()> {
        let stream = self.stream(partition).await?;
        let entries: Vec<Settlement> = ids.iter().copied().map(Settlement::ack).collect();
        let settle = SettleBatch {
            stream: &stream,
            group: &group(),
            consumer: &ConsumerName::new(consumer)?,
            fence: None,
            entries: &entries,
        };
        self.backend().settle(settle).await?;
        Ok(())
    }

    /// Writes a dead letter with its wire fields.
    pub(crate) async fn dead_letter(&self, letter: &Letter) -> Result<EntryId> {
        let stream = self.letters_stream().await?;
        let fields = letter.to_fields(&self.topic);
        let ids = self.backend().append(&stream, &[fields], &Retention::KEEP_ALL).await?;
        Ok(ids[0])
    }

    /// Writes any entry to the dead-letter stream.
    pub(crate) async fn foreign_letter(&self, fields: &[(&'static str, &str)]) -> Result<EntryId> {
        let stream = self.letters_stream().await?;
        let fields = Fields::new(fields.iter().map(|(name, value)| (*name, value.to_string())));
        let ids = self.backend().append(&stream, &[fields], &Retention::KEEP_ALL).await?;
        Ok(ids[0])
    }

    pub(crate) async fn remaining_letters(&self) -> Result<Vec<EntryId>> {
        let stream = self.letters_stream().await?;
        let left = self.backend().range(&stream, Range::first(10_000)).await?;
        Ok(left.into_iter().map(|entry| entry.id).collect())
    }
}

/// A dead letter to write.
#[derive(Clone)]
pub(crate) struct Letter {
    pub(crate) partition: u16,
    pub(crate) original: EntryId,
    pub(crate) key: &'static str,
    pub(crate) reason: &'static str,
    pub(crate) payload: Vec<u8>,
}

impl Letter {
    pub(crate) fn of(partition: u16, original: u64) -> Self {
        let (original, payload) = (EntryId::new(original, 0), b"\x00\xffpayload".to_vec());
        Self { partition, original, key: "k1", reason: "boom: no such customer", payload }
    }

    fn to_fields(&self, topic: &str) -> Fields {
        Fields::new([
            ("payload", self.payload.clone()),
            ("timestamp", b"2026-01-01T00:00:00.000Z".to_vec()),
            ("retryCount", b"5".to_vec()),
            ("maxRetries", b"4".to_vec()),
            ("topic", topic.as_bytes().to_vec()),
            ("partitionId", self.partition.to_string().into_bytes()),
            ("key", self.key.as_bytes().to_vec()),
            ("headers", br#"{"h":"1","traceparent":"00-x"}"#.to_vec()),
            ("originalTopic", topic.as_bytes().to_vec()),
            ("originalMessageId", self.original.to_string().into_bytes()),
            ("failedAt", b"2026-01-01T00:00:09.000Z".to_vec()),
            ("reason", self.reason.as_bytes().to_vec()),
        ])
    }
}

pub(crate) fn group() -> GroupName {
    GroupName::new(GROUP).expect("a valid name")
}

pub(crate) fn quick() -> Policies {
    Policies { refresh: Duration::from_millis(20), ..Policies::default() }
}

/// The text of a field.
pub(crate) fn text<'a>(entry: &'a Entry, field: &str) -> Option<&'a str> {
    entry.fields.get(field).map(|value| std::str::from_utf8(value).expect("text"))
}

/// Asserts an invalid-argument error for this argument.
#[track_caller]
pub(crate) fn assert_invalid<T: std::fmt::Debug>(
    answer: headwater_queue::Result<T>,
    argument: &str,
) {
    match answer {
        Err(QueueError::Invalid { what, .. }) if what.contains(argument) => {}
        other => panic!("expected an invalid {argument}, found {other:?}"),
    }
}

#[track_caller]
pub(crate) fn assert_no_topic<T: std::fmt::Debug>(answer: headwater_queue::Result<T>) {
    assert!(matches!(answer, Err(QueueError::NoTopic { .. })), "{answer:?}");
}

#[track_caller]
pub(crate) fn assert_no_group<T: std::fmt::Debug>(answer: headwater_queue::Result<T>) {
    assert!(matches!(answer, Err(QueueError::NoGroup { .. })), "{answer:?}");
}

/// Runs each test body on every backend.
macro_rules! on_every_backend {
    ($($name:ident)*) => {
        $(
            mod $name {
                use crate::fixture::QueueFixture;

                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn embedded() -> anyhow::Result<()> {
                    super::bodies::$name(QueueFixture::embedded().await?).await
                }

                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn on_redis() -> anyhow::Result<()> {
                    super::bodies::$name(QueueFixture::redis().await?).await
                }

                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn on_a_cluster() -> anyhow::Result<()> {
                    super::bodies::$name(QueueFixture::cluster().await?).await
                }
            }
        )*
    };
}
pub(crate) use on_every_backend;
