//! The environments of the tests: three backends, with a key prefix unique to the test.
//!
//! Each test binary has its own `fixture::Fixture` with the buses of its scenarios.

#![allow(dead_code, reason = "each test binary uses what it needs")]

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::QueueConfig;
use headwater_stream::{
    Backend, Direction, Entry, EntryId, LeaseRenewerConfig, Options, Range, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis, unique};

/// Generates one module of tests: each scenario with one fixture and runtime flavor.
macro_rules! tests_in {
    ($module:ident, $fixture:expr, $runtime:tt, $($scenario:ident),* $(,)?) => {
        mod $module {
            $(#[tokio::test $runtime]
            async fn $scenario() {
                super::$scenario($fixture).await;
            })*
        }
    };
}

/// Runs each scenario on all three backends.
macro_rules! on_streams {
    ($($scenario:ident),* $(,)?) => {
        on_streams!((flavor = "multi_thread", worker_threads = 2): $($scenario),*);
    };
    ($runtime:tt: $($scenario:ident),* $(,)?) => {
        tests_in!(embedded, crate::fixture::Fixture::embedded().await, $runtime, $($scenario),*);
        tests_in!(redis, crate::fixture::Fixture::redis(), $runtime, $($scenario),*);
        tests_in!(cluster, crate::fixture::Fixture::cluster(), $runtime, $($scenario),*);
    };
}

/// Runs each scenario on a backend of each kind that can be made unavailable.
#[allow(unused_macros, reason = "each test binary uses what it needs")]
macro_rules! with_outage {
    ($($scenario:ident),* $(,)?) => {
        with_outage!((flavor = "multi_thread", worker_threads = 2): $($scenario),*);
    };
    ($runtime:tt: $($scenario:ident),* $(,)?) => {
        tests_in!(embedded, crate::outage_fixture::OutageFixture::embedded().await, $runtime, $($scenario),*);
        with_server_outage!($runtime: $($scenario),*);
    };
}

/// Runs each scenario on a server that can be made unavailable.
#[allow(unused_macros, reason = "each test binary uses what it needs")]
macro_rules! with_server_outage {
    ($($scenario:ident),* $(,)?) => {
        with_server_outage!((flavor = "multi_thread", worker_threads = 2): $($scenario),*);
    };
    ($runtime:tt: $($scenario:ident),* $(,)?) => {
        tests_in!(redis, crate::outage_fixture::OutageFixture::redis(), $runtime, $($scenario),*);
        tests_in!(cluster, crate::outage_fixture::OutageFixture::cluster(), $runtime, $($scenario),*);
    };
}

pub(crate) mod server;
pub(crate) mod telemetry;

/// The backend of the buses.
#[derive(Clone)]
pub(crate) enum Target {
    /// All buses share one backend.
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

    /// A backend, as another process would open it.
    pub(crate) async fn connect(&self, options: &Options) -> Arc<dyn Backend> {
        match self {
            Self::Shared(backend) => Arc::clone(backend),
            Self::Url(url) => connect(url, options).await.unwrap(),
        }
    }
}

/// A key prefix unique to the test.
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

/// Short leases: a crash is detected soon, but a slow process may also be considered dead.
pub(crate) fn quick_lease() -> LeaseRenewerConfig {
    LeaseRenewerConfig {
        ttl: Duration::from_secs(4),
        renew_every: Duration::from_millis(600),
        safety_margin: Duration::from_millis(500),
    }
}

pub(crate) fn quick_queue(lease: LeaseRenewerConfig) -> QueueConfig {
    QueueConfig { lease, rebalance_every: Duration::from_millis(300), ..Default::default() }
}
