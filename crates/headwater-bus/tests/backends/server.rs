//! A backend of its own that can be made unavailable.
//!
//! A Redis server is killed. Of a cluster, the node with a given stream is killed; the others continue, and no replica
//! takes over. An embedded backend runs in the process and is never unavailable, but it can be full, which has the same
//! effect: calls fail and may succeed later.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Backend, Fields, Options, Retention, StreamError, StreamName, connect};
use headwater_testkit::{Cluster, Persistence, Redis};

use super::Target;

/// Timeout for anything that is expected to happen.
pub(crate) const LIMIT: Duration = Duration::from_secs(90);

pub(crate) enum Server {
    Embedded(Arc<dyn Backend>),
    Redis(Box<Redis>),
    Cluster(Cluster),
}

impl Server {
    pub(crate) async fn embedded() -> Self {
        let url = "embedded:memory?max_bytes=30000000";
        Self::Embedded(connect(url, &Options::default()).await.unwrap())
    }

    pub(crate) fn redis() -> Self {
        let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
        Self::Redis(Box::new(redis))
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
        Self::Cluster(cluster)
    }

    pub(crate) fn target(&self) -> Target {
        match self {
            Self::Embedded(backend) => Target::Shared(Arc::clone(backend)),
            Self::Redis(redis) => Target::Url(redis.url()),
            Self::Cluster(cluster) => Target::Url(cluster.url()),
        }
    }

    /// Stops the server that has this stream.
    pub(crate) async fn stop_node_of(&self, stream: &StreamName) {
        match self {
            Self::Embedded(backend) => fill(&**backend).await,
            _ => self.node_of(stream).kill9().unwrap(),
        }
    }

    /// Makes it available again, with all its data.
    pub(crate) async fn restart(&self) {
        match self {
            Self::Embedded(backend) => {
                backend.delete_stream(&filler()).await.unwrap();
            }
            Self::Redis(redis) => redis.restart().unwrap(),
            Self::Cluster(cluster) => {
                let is_away = |node: &&Redis| node.pid().is_err();
                cluster.nodes().iter().filter(is_away).for_each(|node| node.restart().unwrap());
                cluster.wait_until_ok(LIMIT).unwrap();
            }
        }
    }

    /// The server that has this stream.
    pub(crate) fn node_of(&self, stream: &StreamName) -> &Redis {
        match self {
            Self::Embedded(_) => panic!("there is no server"),
            Self::Redis(redis) => redis,
            Self::Cluster(cluster) => {
                let slot = cluster.slot_of(stream.as_str()).unwrap();
                cluster.primary_of_slot(slot).unwrap()
            }
        }
    }

    /// The primary nodes.
    pub(crate) fn primaries(&self) -> &[Redis] {
        match self {
            Self::Embedded(_) => panic!("there is no server"),
            Self::Redis(redis) => std::slice::from_ref(&**redis),
            Self::Cluster(cluster) => &cluster.nodes()[..3],
        }
    }
}

fn filler() -> StreamName {
    StreamName::new("filler").unwrap()
}

/// Leaves no space for even the smallest event.
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
