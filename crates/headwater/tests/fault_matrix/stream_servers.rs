//! The servers of the fault matrix that have the streams.

use headwater_testkit::{Cluster, Proxy, Redis, Sentinel};

use crate::Fault;
use crate::support::disk::SmallDisk;
use crate::support::{ServerDir, directory};

/// The servers that have the streams.
pub(super) enum StreamServers {
    One {
        redis: Box<Redis>,
        proxy: Proxy,
    },
    /// With a proxy of each node, or none.
    Cluster {
        cluster: Cluster,
        proxies: Vec<Proxy>,
    },
    Sentinel(Box<Sentinel>),
    /// The embedded log of the server, which all others call over HTTP.
    Embedded {
        disk: SmallDisk,
        url: String,
    },
}

impl StreamServers {
    /// `None` if this process may not mount the disk that the fault needs.
    pub(super) fn start(fault: Fault, dir: &ServerDir) -> Option<Self> {
        Some(match fault {
            Fault::ShardDown
            | Fault::ShardHangs
            | Fault::ClusterFull
            | Fault::ClusterReadOnly
            | Fault::ClusterDenies => {
                let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no");
                let cluster = cluster.setting("appendonly", "yes").start().unwrap();
                cluster.nodes().iter().for_each(add_user);
                Self::Cluster { cluster, proxies: Vec::new() }
            }
            Fault::ClusterDown | Fault::ClusterStalls | Fault::ClusterSlow => {
                let cluster = Cluster::start().unwrap();
                cluster.nodes().iter().for_each(add_user);
                let proxies = cluster.start_proxies().unwrap();
                Self::Cluster { cluster, proxies }
            }
            Fault::EmbeddedFull => {
                let streams = directory(dir, "streams").unwrap();
                let disk = SmallDisk::mount(&streams).unwrap()?;
                Self::Embedded { disk, url: format!("embedded:{}", streams.display()) }
            }
            Fault::SentinelsDown | Fault::SentinelsHang | Fault::SentinelsDeny => {
                let sentinel = Sentinel::start().unwrap();
                sentinel.sentinels().iter().for_each(add_user);
                Self::Sentinel(Box::new(sentinel))
            }
            _ => {
                let redis = Redis::start().unwrap();
                add_user(&redis);
                let proxy = Proxy::start(redis.addr()).unwrap();
                Self::One { redis: Box::new(redis), proxy }
            }
        })
    }

    pub(super) fn url(&self) -> String {
        match self {
            Self::One { proxy, .. } => format!("redis://app:secret@{}", proxy.addr()),
            Self::Cluster { cluster, proxies } if proxies.is_empty() => {
                cluster.url().replace("//", "//app:secret@")
            }
            Self::Cluster { proxies, .. } => {
                let seeds: Vec<String> =
                    proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
                format!("redis-cluster://app:secret@{}", seeds.join(","))
            }
            Self::Embedded { url, .. } => url.clone(),
            Self::Sentinel(sentinel) => {
                format!("{}?sentinel_user=app&sentinel_password=secret", sentinel.url())
            }
        }
    }

    pub(super) fn proxies(&self) -> &[Proxy] {
        match self {
            Self::One { proxy, .. } => std::slice::from_ref(proxy),
            Self::Cluster { proxies, .. } => proxies,
            Self::Sentinel(_) | Self::Embedded { .. } => panic!("a fault of proxies"),
        }
    }

    /// Runs a command at every server.
    pub(super) fn command(&self, words: &[&str]) {
        for server in self.servers_with_user() {
            server.command(words).unwrap().ok().unwrap();
        }
    }

    /// The servers at which the processes log in as `app`.
    pub(super) fn servers_with_user(&self) -> &[Redis] {
        match self {
            Self::One { redis, .. } => std::slice::from_ref(redis),
            Self::Cluster { cluster, .. } => cluster.nodes(),
            Self::Sentinel(sentinel) => sentinel.sentinels(),
            Self::Embedded { .. } => &[],
        }
    }

    /// Changes the password of the user, and ends its connections.
    pub(super) fn deny(&self) {
        self.command(&["ACL", "SETUSER", "app", "resetpass", ">other"]);
        self.command(&["CLIENT", "KILL", "USER", "app"]);
    }

    /// Accepts the password again.
    pub(super) fn allow(&self) {
        self.command(&["ACL", "SETUSER", "app", ">secret"]);
    }

    pub(super) fn sentinels(&self) -> &[Redis] {
        let Self::Sentinel(sentinel) = self else { panic!("a fault of Sentinels") };
        sentinel.sentinels()
    }

    pub(super) fn cluster(&self) -> &Cluster {
        let Self::Cluster { cluster, .. } = self else { panic!("a fault of a cluster") };
        cluster
    }

    pub(super) fn disk(&self) -> Option<&SmallDisk> {
        let Self::Embedded { disk, .. } = self else { return None };
        Some(disk)
    }

    /// A shard, primary and replica, that holds neither the topic nor the list of topics.
    pub(super) fn shard(&self) -> [&Redis; 2] {
        let cluster = self.cluster();
        let primary = |key: &str| {
            let slot = cluster.slot_of(key).unwrap();
            cluster.primary_of_slot(slot).unwrap().port()
        };
        let needed = [
            "streaming:mq:topics:registry",
            "streaming:mq:topics:plain",
            "streaming:mq:topic:sales:meta",
            "stream:topic:{sales:0}",
        ]
        .map(primary);
        let nodes = cluster.nodes();
        let replicas = nodes.len() / 2;
        let free = (0..replicas).find(|at| !needed.contains(&nodes[*at].port()));
        let free = free.expect("one of three shards has none of them");
        [&nodes[free], &nodes[free + replicas]]
    }
}

/// Adds the user as which the processes log in.
fn add_user(server: &Redis) {
    let user = ["ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all"];
    server.command(&user).unwrap().ok().unwrap();
}
