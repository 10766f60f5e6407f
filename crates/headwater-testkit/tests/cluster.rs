//! A Redis Cluster: complete, shared, and available after the loss of a primary.

use std::time::{Duration, Instant};

use headwater_testkit::{Cluster, is_alive, unique, wait_until};

const FAILOVER_LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_started_cluster_is_complete() {
    let begin = Instant::now();

    let cluster = Cluster::start().unwrap();

    eprintln!("measured: cluster {:?}", begin.elapsed());
    for node in cluster.nodes() {
        let info = node.command(&["CLUSTER", "INFO"]).unwrap().text();
        assert!(info.contains("cluster_state:ok"), "{info}");
        assert!(info.contains("cluster_slots_ok:16384"), "{info}");
        assert!(info.contains("cluster_known_nodes:6"), "{info}");
    }
    let [first, second, third] = [0, 1, 2].map(|n| cluster.nodes()[n].addr());
    assert_eq!(cluster.url(), format!("redis-cluster://{first},{second},{third}"));

    let pids: Vec<u32> = cluster.nodes().iter().map(|node| node.pid().unwrap()).collect();
    drop(cluster);
    assert!(!pids.into_iter().any(is_alive));
}

#[test]
fn a_replica_takes_over_from_a_killed_primary() {
    let cluster = Cluster::start().unwrap();
    let slot = cluster.slot_of("key").unwrap();
    let primary = cluster.primary_of_slot(slot).unwrap();
    let replica = cluster.replica_of_slot(slot).unwrap();
    primary.command(&["SET", "key", "value"]).unwrap().ok().unwrap();
    wait_until("the value to reach the replica", FAILOVER_LIMIT, || {
        replica.command(&["DBSIZE"]).unwrap().int() == Some(1)
    })
    .unwrap();

    let begin = Instant::now();
    primary.kill9().unwrap();
    wait_until("the replica to take over", FAILOVER_LIMIT, || {
        cluster.primary_of_slot(slot).is_ok_and(|node| node.port() == replica.port())
            && replica.command(&["GET", "key"]).is_ok_and(|reply| reply.text() == "value")
    })
    .unwrap();
    eprintln!("measured: cluster failover {:?}", begin.elapsed());

    primary.restart().unwrap();
    cluster.wait_until_ok(FAILOVER_LIMIT).unwrap();
    wait_until("the old primary to follow", FAILOVER_LIMIT, || {
        cluster.replica_of_slot(slot).is_ok_and(|node| node.port() == primary.port())
    })
    .unwrap();
}

#[test]
fn a_node_can_be_paused_and_resumed() {
    let cluster = Cluster::builder().setting("notify-keyspace-events", "Ex").start().unwrap();
    let node = &cluster.nodes()[1];

    node.pause().unwrap();
    node.resume().unwrap();

    let flags = node.command(&["CONFIG", "GET", "notify-keyspace-events"]).unwrap();
    assert_eq!(flags.items()[1].text(), "xE");
}

#[test]
fn the_shared_cluster_is_the_same_each_time() {
    let (first, second) = (Cluster::shared().unwrap(), Cluster::shared().unwrap());
    let key = unique("key");
    let slot = first.slot_of(&key).unwrap();

    first.primary_of_slot(slot).unwrap().command(&["SET", &key, "value"]).unwrap().ok().unwrap();

    let node = second.primary_of_slot(slot).unwrap();
    assert_eq!(node.command(&["GET", &key]).unwrap().text(), "value");
    assert!(node.kill9().is_err());
    assert_eq!(first.url(), second.url());
}
