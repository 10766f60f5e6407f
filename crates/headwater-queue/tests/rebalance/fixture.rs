//! Fixture: a topic on a backend, and a log of handled messages.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_queue::{
    ConsumerConfig, Message, MessageOrder, NewMessage, Policies, ProducerConfig, Queue,
    QueueConfig, Subscription,
};
use headwater_stream::{LeaseRenewerConfig, Options, connect};
use headwater_testkit::unique;
use tokio::time::Instant;

pub(crate) const GROUP: &str = "billing";
/// Timeout for everything a test waits for.
pub(crate) const LIMIT: Duration = Duration::from_secs(40);

/// Fast enough for a test, slow enough for a busy machine.
pub(crate) fn fast_config() -> QueueConfig {
    QueueConfig {
        lease: LeaseRenewerConfig {
            ttl: Duration::from_secs(3),
            renew_every: Duration::from_millis(500),
            safety_margin: Duration::from_millis(500),
        },
        rebalance_every: Duration::from_secs(1),
        ..Default::default()
    }
}

pub(crate) fn ordered() -> ConsumerConfig {
    // A long poll, so that a blocking read is in progress when the process stops.
    ConsumerConfig {
        order: MessageOrder::PerKey,
        poll: Duration::from_secs(30),
        ..Default::default()
    }
}

pub(crate) struct QueueFixture {
    pub(crate) url: String,
    pub(crate) topic: String,
    /// For the embedded backend, which all queues share.
    queue: Option<Queue>,
}

impl QueueFixture {
    pub(crate) async fn embedded() -> Self {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        let queue = Queue::with_config(backend, fast_config()).unwrap();
        Self { url: String::new(), topic: unique("orders"), queue: Some(queue) }
    }

    pub(crate) fn with_server(url: String) -> Self {
        Self { url, topic: unique("orders"), queue: None }
    }

    /// A queue of its own, as another process would have.
    pub(crate) async fn queue(&self) -> Queue {
        let backend = match &self.queue {
            Some(queue) => Arc::clone(queue.backend()),
            None => connect(&self.url, &Options::default()).await.unwrap(),
        };
        Queue::with_config(backend, fast_config()).unwrap()
    }

    pub(crate) async fn create(&self, partitions: u16) {
        let policies = Policies { refresh: Duration::from_millis(200), ..Default::default() };
        self.queue().await.topics().create(&self.topic, partitions, policies).await.unwrap();
    }

    pub(crate) async fn send(&self, key: &str, numbers: std::ops::Range<u64>) {
        let producer = self.queue().await.producer(ProducerConfig::default()).unwrap();
        for number in numbers {
            let message = NewMessage::keyed(key, number.to_string());
            producer.send(&self.topic, message).await.unwrap();
        }
    }

    pub(crate) async fn consumer(&self, log: &HandledLog, name: &'static str) -> Subscription {
        let log = log.clone();
        let handler = move |message: Message| {
            log.write(name, &message);
            async {}
        };
        let queue = self.queue().await;
        queue.subscribe(&self.topic, GROUP, handler, ordered()).await.unwrap()
    }
}

/// Handled messages in order, with the name of the consumer.
#[derive(Clone, Default)]
pub(crate) struct HandledLog(Arc<Mutex<Vec<(String, String, u64)>>>);

impl HandledLog {
    pub(crate) fn write(&self, name: &str, message: &Message) {
        let number = String::from_utf8(message.payload.to_vec()).unwrap().parse().unwrap();
        let key = message.key.clone().unwrap_or_default();
        self.0.lock().unwrap().push((name.to_owned(), key, number));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(crate) fn by(&self, name: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|(who, ..)| who == name).count()
    }

    /// The handled numbers of each key, including repetitions.
    pub(crate) fn by_key(&self) -> BTreeMap<String, Vec<u64>> {
        let mut keys: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for (_, key, number) in self.0.lock().unwrap().iter() {
            keys.entry(key.clone()).or_default().push(*number);
        }
        keys
    }

    /// Checks that every number of every key was handled at least once, first occurrences in order.
    pub(crate) fn check(&self, keys: &[String], count: u64) {
        let seen = self.by_key();
        assert_eq!(seen.len(), keys.len());
        for (key, numbers) in seen {
            let mut first = Vec::new();
            for number in &numbers {
                if !first.contains(number) {
                    first.push(*number);
                }
            }
            assert_eq!(first, (0..count).collect::<Vec<_>>(), "key {key}: {numbers:?}");
        }
    }
}

/// Polls until `condition` holds.
pub(crate) async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
