//! The conformance suite on every bus.
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use headwater_bus::{Namespace, StreamedBus, StreamedBusConfig};
use headwater_conformance::bus::{BusTestEnv, registry};
use headwater_stream::{Options, connect};
use headwater_testkit::{Cluster, Redis, unique};

async fn open(url: &str) -> BusTestEnv {
    let backend = connect(url, &Options::default()).await.unwrap();
    let namespace = Namespace::new(unique("conformance")).unwrap();
    let config = StreamedBusConfig { namespace, ..Default::default() };
    BusTestEnv::new(StreamedBus::open(backend, registry(), config).await.unwrap())
}

mod embedded {
    use super::*;

    async fn setup() -> BusTestEnv {
        BusTestEnv::new(StreamedBus::in_memory(registry()).await.unwrap())
    }

    headwater_conformance::bus_suite!(setup());
}

mod redis {
    use super::*;

    async fn setup() -> BusTestEnv {
        let redis = Redis::shared().unwrap();
        open(&redis.url()).await.keep(redis)
    }

    headwater_conformance::bus_suite!(setup());
}

mod redis_cluster {
    use super::*;

    async fn setup() -> BusTestEnv {
        let cluster = Cluster::shared().unwrap();
        open(&cluster.url()).await.keep(cluster)
    }

    headwater_conformance::bus_suite!(setup());
}

/// As a user that may use only keys and channels that begin with its prefix, besides the notifications of the server.
mod redis_prefix {
    use super::*;

    async fn setup() -> BusTestEnv {
        let redis = Redis::shared().unwrap();
        let allowed =
            ["resetkeys", "~bus1:*", "resetchannels", "&bus1:*", "&__keyevent@*", "+@all"];
        let user = [&["ACL", "SETUSER", "bus1", "on", ">secret"][..], &allowed].concat();
        redis.command(&user).unwrap().ok().unwrap();
        open(&format!("redis://bus1:secret@{}/?prefix=bus1:", redis.addr())).await.keep(redis)
    }

    headwater_conformance::bus_suite!(setup());
}
