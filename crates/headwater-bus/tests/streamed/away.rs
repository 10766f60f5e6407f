//! A backend that can be taken away from a bus that works with it.
//!
//! A Redis is killed. Of a cluster the one node is killed that has the session of the place; the others go on, and no
//! replica takes over. An embedded backend lives in the process of the bus and is never away, but it can be full, and then
//! it does for a bus what a server does that is away: nothing, and the same call may succeed later.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{BusError, EventBusExt, EventId, Outgoing, SessionId, Stored, StreamedBus};
use headwater_stream::{Backend, Fields, Options, Retention, StreamError, StreamName, connect};
use headwater_testkit::{Cluster, Persistence, Redis};
use tokio::time::{Instant, sleep};

use crate::place::{Place, noted};

/// Nothing that should happen takes longer.
pub(crate) const LIMIT: Duration = Duration::from_secs(90);

/// Writes each scenario once and runs it on a backend of each kind that can be taken away.
macro_rules! away {
    ($($scenario:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::away::Away::embedded().await).await;
            })*
        }
        servers!($($scenario),*);
    };
}

/// The same for scenarios that need a server.
macro_rules! servers {
    ($($scenario:ident),* $(,)?) => {
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::away::Away::redis()).await;
            })*
        }
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::away::Away::cluster()).await;
            })*
        }
    };
}

pub(crate) struct Away {
    server: Server,
    pub(crate) place: Place,
}

enum Server {
    Embedded(Arc<dyn Backend>),
    Redis(Box<Redis>),
    Cluster(Cluster),
}

impl Away {
    pub(crate) async fn embedded() -> Self {
        let url = "embedded:memory?max_bytes=1000000";
        let backend = connect(url, &Options::default()).await.unwrap();
        Self { place: Place::on(Arc::clone(&backend)), server: Server::Embedded(backend) }
    }

    pub(crate) fn redis() -> Self {
        let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
        Self { place: Place::at(redis.url()), server: Server::Redis(Box::new(redis)) }
    }

    pub(crate) fn cluster() -> Self {
        let cluster = Cluster::builder()
            .setting("appendonly", "yes")
            .setting("appendfsync", "always")
            .setting("cluster-require-full-coverage", "no")
            .start()
            .unwrap();
        for node in cluster.nodes() {
            let no_failover = ["CONFIG", "SET", "cluster-replica-no-failover", "yes"];
            node.command(&no_failover).unwrap().ok().unwrap();
        }
        Self { place: Place::at(cluster.url()), server: Server::Cluster(cluster) }
    }

    /// Takes the backend away, as far as the place's session is concerned.
    pub(crate) async fn begin(&self) {
        match &self.server {
            Server::Embedded(backend) => fill(&**backend).await,
            _ => self.node().kill9().unwrap(),
        }
    }

    /// Brings it back, with all it had.
    pub(crate) async fn end(&self) {
        match &self.server {
            Server::Embedded(backend) => {
                backend.delete_stream(&filler()).await.unwrap();
            }
            Server::Redis(redis) => redis.restart().unwrap(),
            Server::Cluster(cluster) => {
                let is_away = |node: &&Redis| node.pid().is_err();
                cluster.nodes().iter().filter(is_away).for_each(|node| node.restart().unwrap());
                cluster.wait_until_ok(LIMIT).unwrap();
            }
        }
    }

    /// The server that has the place's session.
    pub(crate) fn node(&self) -> &Redis {
        match &self.server {
            Server::Embedded(_) => panic!("there is no server"),
            Server::Redis(redis) => redis,
            Server::Cluster(cluster) => self.node_of(cluster, &self.place.session),
        }
    }

    /// Sessions on nodes of a cluster that stay.
    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = SessionId> {
        let Server::Cluster(cluster) = &self.server else { panic!("it is no cluster") };
        let leaves = self.node().port();
        let stays = move |session: &SessionId| self.node_of(cluster, session).port() != leaves;
        std::iter::repeat_with(SessionId::random).filter(stays)
    }

    /// Carries out a command at the node that has this session.
    pub(crate) fn command_at(&self, session: &SessionId, words: &[&str]) {
        let node = match &self.server {
            Server::Embedded(_) => panic!("there is no server"),
            Server::Redis(redis) => redis,
            Server::Cluster(cluster) => self.node_of(cluster, session),
        };
        node.command(words).unwrap().ok().unwrap();
    }

    /// Removes everything from every server.
    pub(crate) fn flush(&self) {
        let nodes = match &self.server {
            Server::Embedded(_) => panic!("there is no server"),
            Server::Redis(redis) => std::slice::from_ref(&**redis),
            Server::Cluster(cluster) => &cluster.nodes()[..3],
        };
        nodes.iter().for_each(|node| drop(node.command(&["FLUSHALL"]).unwrap().ok().unwrap()));
    }

    fn node_of<'a>(&self, cluster: &'a Cluster, session: &SessionId) -> &'a Redis {
        let stream = self.place.stream_of(session.as_str());
        let slot = cluster.slot_of(stream.as_str()).unwrap();
        cluster.primary_of_slot(slot).unwrap()
    }
}

fn filler() -> StreamName {
    StreamName::new("filler").unwrap()
}

/// Leaves no room for an event, however small.
async fn fill(backend: &dyn Backend) {
    for bytes in [50_000, 1000, 1] {
        let entry = [Fields::new([("x", "x".repeat(bytes))])];
        loop {
            match backend.append(&filler(), &entry, &Retention::KEEP_ALL).await {
                Ok(_) => {}
                Err(StreamError::Full { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Publishes an event under one id until it is stored.
pub(crate) async fn publish_until_stored(bus: &StreamedBus, session: &SessionId, number: u64) {
    let id = EventId::random();
    until(|| async {
        let event = Outgoing::new(noted(session, number)).unwrap().with_id(id.clone());
        match bus.publish_outgoing(event).await {
            Ok(result) => matches!(result.stored, Stored::Entry(_) | Stored::Duplicate(_)),
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                false
            }
        }
    })
    .await;
}

/// Waits until something is so.
pub(crate) async fn until<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not happen within {LIMIT:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Publishes events until the breaker is open.
pub(crate) async fn open_breaker(bus: &StreamedBus, place: &Place) {
    until(|| async {
        let error = bus.publish(place.noted(1000)).await.unwrap_err();
        matches!(error, BusError::BreakerOpen { .. })
    })
    .await;
}
