//! Sentinels know each other and promote the replica.

use std::time::{Duration, Instant};

use headwater_testkit::{Sentinel, wait_until};

const FAILOVER_LIMIT: Duration = Duration::from_secs(60);

#[test]
fn the_sentinels_promote_the_replica_of_a_killed_primary() {
    let begin = Instant::now();
    let sentinel = Sentinel::start().unwrap();
    eprintln!("measured: sentinel {:?}", begin.elapsed());
    assert_eq!(sentinel.current_primary().unwrap(), sentinel.primary().addr());
    let (primary, replica) = (sentinel.primary(), sentinel.replica());
    primary.command(&["SET", "key", "value"]).unwrap();
    wait_until("the value to reach the replica", FAILOVER_LIMIT, || {
        replica.command(&["GET", "key"]).unwrap().text() == "value"
    })
    .unwrap();

    let begin = Instant::now();
    primary.kill9().unwrap();
    wait_until("the replica to be promoted", FAILOVER_LIMIT, || {
        sentinel.current_primary().is_ok_and(|address| address == replica.addr())
    })
    .unwrap();
    eprintln!("measured: sentinel failover {:?}", begin.elapsed());

    assert_eq!(replica.command(&["SET", "key", "newer"]).unwrap().text(), "OK");
}

#[test]
fn a_sentinel_may_be_lost() {
    let sentinel = Sentinel::start().unwrap();
    let ports: Vec<String> =
        sentinel.sentinels().iter().map(|one| format!("127.0.0.1:{}", one.port())).collect();
    assert_eq!(sentinel.url(), format!("redis-sentinel://{}/mymaster", ports.join(",")));

    sentinel.sentinels()[0].kill9().unwrap();

    assert_eq!(sentinel.current_primary().unwrap(), sentinel.primary().addr());
}
