//! Test fixture: a queue on some backend and a topic unique to the test.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_queue::{Policies, Queue, QueueConfig};
use headwater_stream::{
    Backend, Entry, EntryId, Fields, GroupName, LeaseRenewerConfig, Options, PendingDelivery,
    PendingDeliveryQuery, Range, Retention, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis, unique};

pub(crate) const GROUP: &str = "workers";
/// Generous timeout, for busy machines.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Fixture {
    pub(crate) url: String,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) queue: Queue,
    pub(crate) topic: String,
    _server: Box<dyn Any + Send + Sync>,
}

impl Fixture {
    pub(crate) async fn embedded() -> Result<Self> {
        Self::open("embedded:memory", ()).await
    }

    pub(crate) async fn redis() -> Result<Self> {
        let redis = Redis::shared()?;
        Self::open(&redis.url(), redis).await
    }

    pub(crate) async fn cluster() -> Result<Self> {
        let cluster = Cluster::shared()?;
        Self::open(&cluster.url(), cluster).await
    }

    pub(crate) async fn open(url: &str, server: impl Any + Send + Sync) -> Result<Self> {
        let backend = connect(url, &Options::default()).await?;
        let queue = Queue::with_config(Arc::clone(&backend), short_leases())?;
        let topic = unique("orders");
        Ok(Self { url: url.to_owned(), backend, queue, topic, _server: Box::new(server) })
    }

    /// A second process on the same data.
    pub(crate) async fn second_queue(&self) -> Result<Queue> {
        let backend = match self.url.starts_with("embedded") {
            true => Arc::clone(&self.backend),
            false => connect(&self.url, &Options::default()).await?,
        };
        Ok(Queue::with_config(backend, short_leases())?)
    }

    pub(crate) async fn create(&self, partitions: u16) -> Result<()> {
        self.queue.topics().create(&self.topic, partitions, Policies::default()).await?;
        Ok(())
    }

    /// The stream of a partition.
    pub(crate) async fn stream(&self, partition: u16) -> Result<StreamName> {
        let described = self.queue.topics().describe(&self.topic).await?;
        let partition = described.partitions.get(usize::from(partition)).context("no partition")?;
        Ok(StreamName::new(&partition.stream_key)?)
    }

    /// Sends a message as another program would: an entry with the documented fields.
    pub(crate) async fn send(
        &self,
        partition: u16,
        key: Option<&str>,
        payload: &str,
    ) -> Result<EntryId> {
        let mut pairs = vec![
            ("payload", payload.to_owned()),
            ("timestamp", "2026-01-01T00:00:00Z".to_owned()),
            ("retryCount", "0".to_owned()),
            ("topic", self.topic.clone()),
            ("partitionId", partition.to_string()),
            ("headers", "{}".to_owned()),
        ];
        pairs.extend(key.map(|key| ("key", key.to_owned())));
        self.append(partition, Fields::new(pairs)).await
    }

    pub(crate) async fn append(&self, partition: u16, fields: Fields) -> Result<EntryId> {
        let stream = self.stream(partition).await?;
        let ids = self.backend.append(&stream, &[fields], &Retention::KEEP_ALL).await?;
        Ok(ids[0])
    }

    /// The pending entries.
    pub(crate) async fn pending(&self, partition: u16) -> Result<Vec<PendingDelivery>> {
        let stream = self.stream(partition).await?;
        let query = PendingDeliveryQuery {
            stream: &stream,
            group: &GroupName::new(GROUP)?,
            consumer: None,
            min_idle: Duration::ZERO,
            after: None,
            count: 1000,
        };
        Ok(self.backend.pending(query).await?)
    }

    /// Waits until nothing is pending.
    pub(crate) async fn wait_until_settled(&self, partition: u16) -> Result<()> {
        eventually("nothing is pending", async || Ok(self.pending(partition).await?.is_empty()))
            .await
    }

    pub(crate) async fn dead_letters(&self) -> Result<Vec<Entry>> {
        let described = self.queue.topics().describe(&self.topic).await?;
        let stream = StreamName::new(&described.dead_letters_key)?;
        Ok(self.backend.range(&stream, Range::first(1000)).await?)
    }

    /// Waits for this many dead letters and returns them.
    pub(crate) async fn wait_for_dead_letters(&self, count: usize) -> Result<Vec<Entry>> {
        let what = format!("{count} dead letters");
        eventually(&what, async || Ok(self.dead_letters().await?.len() >= count)).await?;
        self.dead_letters().await
    }
}

/// A field of an entry, as text.
pub(crate) fn text(entry: &Entry, field: &str) -> String {
    let value = entry.fields.get(field).map(|value| String::from_utf8_lossy(value));
    value.unwrap_or_default().into_owned()
}

/// Short leases, to keep tests fast.
pub(crate) fn short_leases() -> QueueConfig {
    let lease = LeaseRenewerConfig {
        ttl: Duration::from_secs(3),
        renew_every: Duration::from_millis(500),
        safety_margin: Duration::from_millis(500),
    };
    QueueConfig { lease, rebalance_every: Duration::from_millis(500), ..Default::default() }
}

/// Polls until a condition holds; fails after the timeout.
pub(crate) async fn eventually(
    what: &str,
    condition: impl AsyncFn() -> Result<bool>,
) -> Result<()> {
    let until = tokio::time::Instant::now() + TIMEOUT;
    while !condition().await? {
        if tokio::time::Instant::now() > until {
            bail!("timed out waiting until {what}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Runs test bodies on some backends: `on_backends!(embedded, redis: one, another)`.
macro_rules! on_backends {
    ($($backend:ident),* : $($name:ident),* $(,)?) => {
        on_backends!(@each [$($backend)*] [$($name)*]);
    };
    (@each [] $names:tt) => {};
    (@each [$backend:ident $($rest:ident)*] [$($name:ident)*]) => {
        mod $backend {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $name() -> anyhow::Result<()> {
                super::$name(crate::fixture::Fixture::$backend().await?).await
            })*
        }
        on_backends!(@each [$($rest)*] [$($name)*]);
    };
}

/// Runs test bodies on every backend.
macro_rules! on_every_backend {
    ($($name:ident),* $(,)?) => {
        on_backends!(embedded, redis, cluster: $($name),*);
    };
}
