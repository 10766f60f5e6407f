//! Fault injection by the proxy.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::time::{Duration, Instant};

use headwater_testkit::{Proxy, Redis, RedisConnection, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LIMIT: Duration = Duration::from_secs(60);

fn start() -> (Redis, Proxy) {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    (redis, proxy)
}

fn pong(connection: &mut RedisConnection) -> bool {
    connection.command(&["PING"]).is_ok_and(|reply| reply.text() == "PONG")
}

#[test]
fn a_proxy_forwards() {
    let (redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    let large = "x".repeat(1_000_000);

    client.command(&["SET", "key", &large]).unwrap();

    assert_eq!(client.command(&["GET", "key"]).unwrap().text(), large);
    assert_eq!((proxy.connections(), proxy.open_connections()), (1, 1));
    assert_eq!(redis.url_at(proxy.addr()), format!("redis://{}/", proxy.addr()));
    drop(client);
    wait_until("the connection to close", LIMIT, || proxy.open_connections() == 0).unwrap();
}

#[test]
fn a_cut_closes_connections_and_refuses_new_ones_until_healed() {
    let (_redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    assert!(pong(&mut client));

    proxy.cut().unwrap();
    assert_eq!(proxy.open_connections(), 0);
    assert!(!pong(&mut client));
    assert!(RedisConnection::open(proxy.addr()).is_err());
    proxy.heal().unwrap();

    assert!(!pong(&mut client));
    assert!(pong(&mut RedisConnection::open(proxy.addr()).unwrap()));
}

#[test]
fn a_single_cut_does_not_affect_new_connections() {
    let (_redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    assert!(pong(&mut client));

    proxy.cut_once().unwrap();

    assert!(!pong(&mut client));
    assert!(pong(&mut RedisConnection::open(proxy.addr()).unwrap()));
}

#[test]
fn a_stalled_proxy_forwards_nothing_until_healed() {
    let (redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    assert!(pong(&mut client));
    let before = commands_processed(&redis);

    proxy.stall().unwrap();
    client.send(&["INCR", "key"]).unwrap();
    let mut late = RedisConnection::open(proxy.addr()).unwrap();
    late.send(&["INCR", "key"]).unwrap();
    wait_until("the late connection to be accepted", LIMIT, || proxy.connections() == 2).unwrap();
    assert_eq!(redis.command(&["EXISTS", "key"]).unwrap().int(), Some(0));
    assert_eq!(commands_processed(&redis), before + 2);
    proxy.heal().unwrap();

    let mut counts = [client, late].map(|mut c| c.receive().unwrap().int().unwrap());
    counts.sort_unstable();
    assert_eq!(counts, [1, 2]);
}

/// The server counts a command after its reply, so the INFO itself is not included.
fn commands_processed(redis: &Redis) -> u64 {
    let info = redis.command(&["INFO", "stats"]).unwrap().text();
    let line = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn a_stall_holds_replies_back_too() {
    let (redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    client.send(&["BLPOP", "list", "0"]).unwrap();
    wait_until("the client to block", LIMIT, || {
        redis.command(&["INFO", "clients"]).unwrap().text().contains("blocked_clients:1")
    })
    .unwrap();

    proxy.stall().unwrap();
    redis.command(&["RPUSH", "list", "value"]).unwrap();
    let begin = Instant::now();
    let healer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        proxy.heal().unwrap();
        proxy
    });

    assert_eq!(client.receive().unwrap().items()[1].text(), "value");
    assert!(begin.elapsed() >= Duration::from_millis(200));
    drop(healer.join().unwrap());
}

#[test]
fn a_delay_holds_back_each_chunk_both_ways() {
    let (_redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    proxy.delay(Duration::from_millis(100)).unwrap();

    let begin = Instant::now();
    assert!(pong(&mut client));

    assert!(begin.elapsed() >= Duration::from_millis(200));
    // Longer than the reply timeout; no longer in effect.
    proxy.delay(Duration::from_secs(60)).unwrap();
    proxy.heal().unwrap();
    assert!(pong(&mut client));
}

#[test]
fn a_command_cut_in_the_middle_has_no_effect() {
    let (redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    assert!(pong(&mut client));

    proxy.drop_after(20).unwrap();
    let outcome = client.command(&["SET", "key", "value"]);

    assert!(outcome.is_err());
    assert_eq!(proxy.faults(), 1);
    wait_until("the server to see the cut", LIMIT, || proxy.open_connections() == 0).unwrap();
    assert_eq!(redis.command(&["EXISTS", "key"]).unwrap().int(), Some(0));
    assert!(pong(&mut RedisConnection::open(proxy.addr()).unwrap()));
}

#[test]
fn a_command_whose_reply_is_dropped_has_its_effect() {
    let (redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();
    let large = "x".repeat(1_000_000);
    assert!(pong(&mut client));

    proxy.drop_reply().unwrap();
    let outcome = client.command(&["SET", "key", &large]);

    assert!(outcome.is_err());
    assert_eq!(redis.command(&["STRLEN", "key"]).unwrap().int(), Some(1_000_000));
    assert!(pong(&mut RedisConnection::open(proxy.addr()).unwrap()));
}

#[test]
fn healing_removes_pending_faults() {
    let (_redis, proxy) = start();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();

    proxy.drop_reply().unwrap();
    proxy.drop_after(3).unwrap();
    proxy.heal().unwrap();

    assert!(pong(&mut client));
    assert_eq!(proxy.faults(), 0);
}

#[test]
fn clients_that_retry_get_through_a_flaky_proxy() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::flaky(redis.addr(), 1).unwrap();
    let mut client = RedisConnection::open(proxy.addr()).unwrap();

    let mut failures = 0;
    for n in 0..400 {
        while client.command(&["SADD", "numbers", &n.to_string()]).is_err() {
            failures += 1;
            client = RedisConnection::open(proxy.addr()).unwrap();
        }
    }

    assert_eq!(redis.command(&["SCARD", "numbers"]).unwrap().int(), Some(400));
    assert!((2..=8).contains(&failures), "{failures} failures");
    assert_eq!(proxy.faults(), failures);
}

#[tokio::test]
async fn a_proxy_works_inside_a_runtime_of_one_thread() {
    let (_redis, proxy) = start();
    let address = proxy.addr();

    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    client.write_all(b"PING\r\n").await.unwrap();
    let mut answer = [0; 7];
    client.read_exact(&mut answer).await.unwrap();

    assert_eq!(&answer, b"+PONG\r\n");
    proxy.cut().unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}
