//! Where the tests of this crate run: on one of three backends, or on a local bus, with keys that no other test uses.
//!
//! Each test binary has a `place::Place` around it, with the buses that take part in its scenarios.

#![allow(dead_code, reason = "each test binary uses what it needs")]

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::EventBus;
use headwater_queue::QueueConfig;
use headwater_stream::{
    Backend, Direction, Entry, EntryId, KeeperConfig, Options, Range, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis, unique};

/// Writes each scenario once and runs it on all three backends.
macro_rules! on_streams {
    ($($scenario:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::place::Place::embedded().await).await;
            })*
        }
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::place::Place::redis()).await;
            })*
        }
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::place::Place::cluster()).await;
            })*
        }
    };
}

/// The same on a local bus: for scenarios that do not look into a backend.
#[allow(unused_macros, reason = "each test binary uses what it needs")]
macro_rules! locally {
    ($($scenario:ident),* $(,)?) => {
        mod local {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::place::Place::local()).await;
            })*
        }
    };
}

/// What buses work on.
#[derive(Clone)]
pub(crate) enum Target {
    /// There is one bus, and one process.
    Local(Arc<dyn EventBus>),
    /// All buses share the one backend there is.
    Shared(Arc<dyn Backend>),
    /// Each bus has its own connections.
    Url(String),
}

impl Target {
    pub(crate) async fn embedded() -> Self {
        Self::Shared(connect("embedded:memory", &Options::default()).await.unwrap())
    }

    pub(crate) fn redis() -> Self {
        Self::Url(Redis::shared().unwrap().url())
    }

    pub(crate) fn cluster() -> Self {
        Self::Url(Cluster::shared().unwrap().url())
    }

    /// A backend, as another process would have it.
    pub(crate) async fn connect(&self, options: &Options) -> Arc<dyn Backend> {
        match self {
            Self::Local(_) => panic!("a local bus has no backend to look into"),
            Self::Shared(backend) => Arc::clone(backend),
            Self::Url(url) => connect(url, options).await.unwrap(),
        }
    }
}

/// A prefix of keys that no other test uses.
pub(crate) fn new_prefix() -> String {
    unique("w").chars().take(32).collect()
}

/// All entries of a stream.
pub(crate) async fn entries(backend: &dyn Backend, stream: &StreamName) -> Vec<Entry> {
    let (mut all, mut from) = (Vec::new(), EntryId::MIN);
    loop {
        let range = Range { from, to: EntryId::MAX, direction: Direction::Forward, count: 10_000 };
        let page = backend.range(stream, range).await.unwrap();
        let Some(last) = page.last() else { return all };
        from = last.id.next();
        all.extend(page);
    }
}

/// Whoever dies is soon known to be dead. So may be those that are only slow.
pub(crate) fn quick_lease() -> KeeperConfig {
    KeeperConfig {
        ttl: Duration::from_millis(1500),
        renew_every: Duration::from_millis(300),
        margin: Duration::from_millis(200),
    }
}

pub(crate) fn quick_queue(lease: KeeperConfig) -> QueueConfig {
    QueueConfig { lease, rebalance_every: Duration::from_millis(300), ..Default::default() }
}
