//! Test fixture: a service on a backend, and its consumers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use headwater_assignment::{
    Assignment, AssignmentConfig, Disowned, Notification, Notifications, Owned, add,
};
use headwater_stream::{
    Backend, ConsumerName, Direction, Entry, EntryId, Fence, GroupName, HolderName, LeaseName,
    Options, PendingDelivery, PendingDeliveryQuery, Range, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis, unique};
use tokio::time::{Instant, timeout};

/// Timeout for anything that should happen.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Tolerance for a slow machine; far less than a sweep interval that must not help.
pub(crate) const SLACK: Duration = Duration::from_secs(20);

/// How long nothing must happen before a test concludes that nothing does.
pub(crate) const QUIET: Duration = Duration::from_millis(300);

/// Runs each scenario on all three backends.
macro_rules! everywhere {
    ($($scenario:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::fixture::ServiceFixture::embedded().await).await;
            })*
        }
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::fixture::ServiceFixture::redis()).await;
            })*
        }
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::fixture::ServiceFixture::cluster()).await;
            })*
        }
    };
}

/// A service on a backend.
pub(crate) struct ServiceFixture {
    target: Target,
    pub(crate) service: String,
}

enum Target {
    /// All consumers share the embedded backend.
    Shared(Arc<dyn Backend>),
    /// Each consumer has its own connections.
    Url(String),
}

impl ServiceFixture {
    pub(crate) async fn embedded() -> Self {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        Self { target: Target::Shared(backend), service: unique("svc") }
    }

    pub(crate) fn redis() -> Self {
        Self::at(Redis::shared().unwrap().url())
    }

    pub(crate) fn cluster() -> Self {
        Self::in_cluster(&Cluster::shared().unwrap())
    }

    pub(crate) fn in_cluster(cluster: &Cluster) -> Self {
        Self { target: Target::Url(cluster.url()), service: format!("{{{}}}", unique("svc")) }
    }

    pub(crate) fn at(url: String) -> Self {
        Self { target: Target::Url(url), service: unique("svc") }
    }

    /// The same service at another URL.
    pub(crate) fn by(&self, url: String) -> Self {
        Self { target: Target::Url(url), service: self.service.clone() }
    }

    pub(crate) async fn connect(&self) -> Arc<dyn Backend> {
        match &self.target {
            Target::Shared(backend) => Arc::clone(backend),
            Target::Url(url) => connect(url, &Options::default()).await.unwrap(),
        }
    }

    pub(crate) async fn consumer(&self, name: &str, config: AssignmentConfig) -> Consumer {
        let backend = self.connect().await;
        let (assignment, notifications) =
            Assignment::start(backend, &self.service, name, config).await.unwrap();
        Consumer { assignment, notifications }
    }

    /// Adds streams with these names, made unique by the name of the service.
    pub(crate) async fn add(&self, names: &[&str]) -> Vec<StreamName> {
        let backend = self.connect().await;
        let mut streams = Vec::new();
        for name in names {
            let stream = self.stream(name);
            add(&*backend, &self.service, &stream, None).await.unwrap();
            streams.push(stream);
        }
        streams
    }

    pub(crate) fn stream(&self, name: &str) -> StreamName {
        let service = self.service.trim_matches(['{', '}']);
        StreamName::new(format!("{service}:{name}")).unwrap()
    }

    pub(crate) fn input(&self) -> StreamName {
        StreamName::new(format!("{}-input", self.service)).unwrap()
    }

    pub(crate) fn group(&self) -> GroupName {
        GroupName::new(format!("{}-group", self.service)).unwrap()
    }

    pub(crate) fn lease(&self, stream: &StreamName) -> LeaseName {
        let tag = if self.service.starts_with('{') {
            format!("{}:", self.service)
        } else {
            String::new()
        };
        LeaseName::new(format!("mutex:{tag}{stream}")).unwrap()
    }

    pub(crate) async fn entries(&self, stream: &StreamName) -> Vec<Entry> {
        let range = Range {
            from: EntryId::MIN,
            to: EntryId::MAX,
            direction: Direction::Forward,
            count: 5000,
        };
        self.connect().await.range(stream, range).await.unwrap()
    }

    pub(crate) async fn dead_letters(&self) -> Vec<Entry> {
        self.entries(&StreamName::new(format!("{}-input:dlq", self.service)).unwrap()).await
    }

    pub(crate) async fn pending(&self) -> Vec<PendingDelivery> {
        let (input, group) = (self.input(), self.group());
        let query = PendingDeliveryQuery {
            stream: &input,
            group: &group,
            consumer: None,
            min_idle: Duration::ZERO,
            after: None,
            count: 5000,
        };
        self.connect().await.pending(query).await.unwrap()
    }

    /// Deletes the lease of an owner, as an operator could.
    pub(crate) async fn break_lease(&self, owned: &Owned, holder: &HolderName) {
        let fence = Fence { lease: self.lease(owned.stream()), epoch: owned.epoch() };
        assert_eq!(self.connect().await.release(holder, &[fence]).await.unwrap(), 1);
    }

    /// Reads one new entry as a consumer that then dies.
    pub(crate) async fn read_and_die(&self) {
        let (group, ghost) = (self.group(), ConsumerName::new("ghost").unwrap());
        let backend = self.connect().await;
        let mut reader = backend.reader(&group, &ghost).await.unwrap();
        let read = reader.read(&[self.input()], 1, LIMIT).await.unwrap();
        assert_eq!(read[0].entries.len(), 1);
        reader.close().await.unwrap();
    }
}

/// Fast enough for a test, slow enough for a slow machine.
pub(crate) fn quick() -> AssignmentConfig {
    AssignmentConfig {
        heartbeat_every: Duration::from_secs(2),
        sweep_every: Duration::from_millis(500),
        ..Default::default()
    }
}

/// A consumer and its notifications.
pub(crate) struct Consumer {
    pub(crate) assignment: Assignment,
    pub(crate) notifications: Notifications,
}

impl Consumer {
    pub(crate) async fn next(&mut self) -> Notification {
        self.next_within(LIMIT).await.expect("a notification in time")
    }

    pub(crate) async fn next_within(&mut self, limit: Duration) -> Option<Notification> {
        let next = timeout(limit, self.notifications.recv()).await.ok()?;
        Some(next.expect("the channel is open"))
    }

    /// The next notification, which is `Added`.
    pub(crate) async fn added(&mut self) -> Owned {
        match self.next().await {
            Notification::Added(owned) => owned,
            other => panic!("expected Added, got {other:?}"),
        }
    }

    /// The next notification, which is `Expired`.
    pub(crate) async fn expired(&mut self) -> StreamName {
        match self.next().await {
            Notification::Expired(stream) => stream,
            other => panic!("expected Expired, got {other:?}"),
        }
    }

    /// The next notification, which is `Disowned`.
    pub(crate) async fn disowned(&mut self) -> (StreamName, Disowned) {
        match self.next().await {
            Notification::Disowned { stream, reason } => (stream, reason),
            other => panic!("expected Disowned, got {other:?}"),
        }
    }

    /// Expects no notification for a while.
    pub(crate) async fn expect_no_notification_for(&mut self, quiet: Duration) {
        if let Some(notification) = self.next_within(quiet).await {
            panic!("expected nothing, got {notification:?}");
        }
    }

    /// The next `count` streams that are added, ignoring other notifications.
    pub(crate) async fn added_many(&mut self, count: usize) -> Vec<Owned> {
        let mut added = Vec::new();
        while added.len() < count {
            if let Notification::Added(owned) = self.next().await {
                added.push(owned);
            }
        }
        added
    }

    /// The names of the streams it owns.
    pub(crate) fn owns(&self) -> BTreeSet<StreamName> {
        self.assignment.owned().iter().map(|owned| owned.stream().clone()).collect()
    }

    /// Dies like a killed process: nothing is released.
    pub(crate) fn die(self) {
        drop(self.assignment);
    }
}

/// Polls until `condition` holds.
pub(crate) async fn eventually<F: Future<Output = bool>>(
    what: &str,
    mut condition: impl FnMut() -> F,
) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
