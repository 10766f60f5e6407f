//! Test setup: a queue on some backend, and access to its entries.

use std::sync::Arc;

use anyhow::{Context, Result};
use headwater_queue::{EntryFormat, Policies, Producer, ProducerConfig, Queue};
use headwater_stream::{Backend, Entry, Options, Range, StreamName, connect};
use headwater_testkit::{Cluster, Redis, unique};

/// A queue on some backend and a topic unique to the test.
pub(crate) struct Setup {
    pub(crate) queue: Queue,
    pub(crate) producer: Producer,
    pub(crate) topic: String,
}

impl Setup {
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
        Self::on(connect(url, &Options::default()).await?)
    }

    pub(crate) fn on(backend: Arc<dyn Backend>) -> Result<Self> {
        let queue = Queue::new(backend);
        let producer = queue.producer(ProducerConfig::default())?;
        Ok(Self { queue, producer, topic: unique("orders") })
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        self.queue.backend()
    }

    /// The stream of a partition, by the key that `describe` reports.
    pub(crate) async fn stream(&self, partition: u16) -> Result<StreamName> {
        let described = self.queue.topics().describe(&self.topic).await?;
        let found =
            described.partitions.get(usize::from(partition)).context("no such partition")?;
        Ok(StreamName::new(&found.stream_key)?)
    }

    /// The entries of a partition.
    pub(crate) async fn entries(&self, partition: u16) -> Result<Vec<Entry>> {
        let stream = self.stream(partition).await?;
        Ok(self.backend().range(&stream, Range::first(10_000)).await?)
    }

    /// The number of entries in all partitions.
    pub(crate) async fn count(&self) -> Result<usize> {
        let described = self.queue.topics().describe(&self.topic).await?;
        let mut count = 0;
        for partition in described.partitions {
            count += self.entries(partition.partition).await?.len();
        }
        Ok(count)
    }
}

/// Policies for other programs: all documented fields are in every entry.
pub(crate) fn full() -> Policies {
    Policies { entry_format: EntryFormat::Full, ..Policies::default() }
}

/// The text of a field.
pub(crate) fn text<'a>(entry: &'a Entry, field: &str) -> Option<&'a str> {
    entry.fields.get(field).map(|value| std::str::from_utf8(value).expect("text"))
}

/// The same test on every backend. With `in one thread`, a recorder for the current thread sees all metrics and spans.
macro_rules! on_every_backend {
    ($($name:ident)*) => {
        $crate::setup::on_every_backend!(flavor = "multi_thread", $($name)*);
    };
    (in one thread: $($name:ident)*) => {
        $crate::setup::on_every_backend!(flavor = "current_thread", $($name)*);
    };
    (flavor = $flavor:literal, $($name:ident)*) => {
        $(
            mod $name {
                use crate::setup::Setup;

                #[tokio::test(flavor = $flavor)]
                async fn embedded() -> anyhow::Result<()> {
                    super::bodies::$name(Setup::embedded().await?).await
                }

                #[tokio::test(flavor = $flavor)]
                async fn on_redis() -> anyhow::Result<()> {
                    super::bodies::$name(Setup::redis().await?).await
                }

                #[tokio::test(flavor = $flavor)]
                async fn on_a_cluster() -> anyhow::Result<()> {
                    super::bodies::$name(Setup::cluster().await?).await
                }
            }
        )*
    };
}
pub(crate) use on_every_backend;
