//! Servers that are only reachable through proxies, which can stall and drop traffic.
//!
//! Part of the test binaries whose `Fixture` supports its own server.

use std::any::Any;
use std::time::Duration;

use headwater_testkit::{Cluster, Proxy, Redis};

use crate::fixture::Fixture;

/// Timeout for a cluster to agree on its addresses.
const LIMIT: Duration = Duration::from_secs(90);

pub(crate) struct ProxiedFixture {
    pub(crate) proxies: Vec<Proxy>,
    /// The fixture that connects through the proxies.
    pub(crate) fixture: Fixture,
    /// Kept alive as long as the proxies.
    _servers: Box<dyn Any + Send>,
}

impl ProxiedFixture {
    pub(crate) fn redis() -> Self {
        let redis = Redis::start().unwrap();
        let proxy = Proxy::start(redis.addr()).unwrap();
        let fixture = Fixture::at(redis.url_at(proxy.addr()));
        Self { proxies: vec![proxy], fixture, _servers: Box::new(redis) }
    }

    /// Its nodes announce the addresses of the proxies.
    pub(crate) async fn cluster() -> Self {
        let cluster = Cluster::start().unwrap();
        let set = |node: &Redis, name: &str, value: &str| {
            node.command(&["CONFIG", "SET", name, value]).unwrap().ok().unwrap();
        };
        for node in cluster.nodes() {
            set(node, "cluster-replica-no-failover", "yes");
        }
        let mut proxies = Vec::new();
        for node in &cluster.nodes()[..3] {
            let proxy = Proxy::start(node.addr()).unwrap();
            set(node, "cluster-announce-port", &proxy.addr().port().to_string());
            proxies.push(proxy);
        }
        let addresses: Vec<String> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
        let knows_all = |node: &Redis| {
            let known = node.command(&["CLUSTER", "NODES"]).unwrap().text();
            addresses.iter().all(|address| known.contains(&format!(" {address}@")))
        };
        let deadline = tokio::time::Instant::now() + LIMIT;
        while !cluster.nodes().iter().all(knows_all) {
            assert!(tokio::time::Instant::now() < deadline, "the nodes do not know the proxies");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        cluster.wait_until_ok(LIMIT).unwrap();
        let fixture = Fixture::at(format!("redis-cluster://{}", addresses.join(",")));
        Self { proxies, fixture, _servers: Box::new(cluster) }
    }

    /// Stops all traffic without closing connections.
    #[allow(dead_code, reason = "each test binary uses what it needs")]
    pub(crate) fn stall(&self) {
        self.proxies.iter().for_each(|proxy| proxy.stall().unwrap());
    }

    #[allow(dead_code, reason = "each test binary uses what it needs")]
    pub(crate) fn heal(&self) {
        self.proxies.iter().for_each(|proxy| proxy.heal().unwrap());
    }
}
