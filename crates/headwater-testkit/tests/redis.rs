//! Private Redis servers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use headwater_testkit::{
    Child, Persistence, Redis, RedisConnection, RedisReply, is_alive, wait_until,
};

#[test]
fn a_server_starts_and_answers() {
    let begin = Instant::now();

    let redis = Redis::start().unwrap();

    eprintln!("measured: redis {:?}", begin.elapsed());
    assert_eq!(redis.url(), format!("redis://127.0.0.1:{}/", redis.port()));
    assert_eq!(redis.command(&["SET", "key", "value"]).unwrap().text(), "OK");
    assert_eq!(redis.command(&["GET", "key"]).unwrap(), RedisReply::Text(b"value".to_vec()));
    assert_eq!(redis.command(&["GET", "absent"]).unwrap(), RedisReply::Nil);
    assert_eq!(redis.command(&["INCR", "count"]).unwrap().int(), Some(1));
    assert_eq!(redis.command(&["MGET", "key", "absent"]).unwrap().items().len(), 2);
    assert!(redis.command(&["INCR", "key"]).unwrap().ok().is_err());
}

#[test]
fn a_server_with_an_append_only_file_keeps_its_data_over_kill_9() {
    for persistence in [Persistence::Always, Persistence::EverySecond] {
        let redis = Redis::builder().persistence(persistence).start().unwrap();
        let (port, pid) = (redis.port(), redis.pid().unwrap());
        redis.command(&["SET", "key", "value"]).unwrap();

        redis.kill9().unwrap();
        assert!(!is_alive(pid));
        assert!(redis.command(&["PING"]).is_err());
        assert!(redis.pid().is_err());
        redis.restart().unwrap();

        assert_eq!(redis.port(), port);
        assert_ne!(redis.pid().unwrap(), pid);
        assert_eq!(redis.command(&["GET", "key"]).unwrap().text(), "value");
    }
}

#[test]
fn a_server_without_persistence_loses_its_data_on_kill() {
    let redis = Redis::start().unwrap();
    redis.command(&["SET", "key", "value"]).unwrap();

    redis.restart().unwrap();

    assert_eq!(redis.command(&["GET", "key"]).unwrap(), RedisReply::Nil);
}

#[test]
fn the_port_of_a_killed_server_is_kept_for_it() {
    let redis = Redis::start().unwrap();
    let (ours, theirs) = (redis.addr(), Redis::start().unwrap().addr());

    redis.kill9().unwrap();

    assert_ne!(ours, theirs);
    assert!(TcpStream::connect(ours).is_err());
    redis.restart().unwrap();
    assert!(TcpListener::bind(ours).is_err());
}

#[test]
fn a_stopped_server_can_be_started_again() {
    let redis = Redis::builder().persistence(Persistence::EverySecond).start().unwrap();
    redis.command(&["SET", "key", "value"]).unwrap();

    redis.stop().unwrap();
    assert!(redis.command(&["PING"]).is_err());
    redis.restart().unwrap();

    assert_eq!(redis.command(&["GET", "key"]).unwrap().text(), "value");
}

#[test]
fn a_paused_server_answers_after_it_is_resumed() {
    let redis = Redis::start().unwrap();
    let mut connection = redis.connect().unwrap();
    let mut probe = TcpStream::connect(redis.addr()).unwrap();
    probe.set_read_timeout(Some(Duration::from_millis(200))).unwrap();

    redis.pause().unwrap();
    connection.send(&["PING"]).unwrap();
    probe.write_all(b"PING\r\n").unwrap();
    assert!(probe.read(&mut [0; 16]).is_err());
    redis.resume().unwrap();

    assert_eq!(connection.receive().unwrap().text(), "PONG");
}

#[test]
fn a_paused_server_can_be_restarted_and_dropped() {
    let redis = Redis::start().unwrap();

    redis.pause().unwrap();
    redis.restart().unwrap();
    redis.pause().unwrap();

    let pid = redis.pid().unwrap();
    drop(redis);
    assert!(!is_alive(pid));
}

#[test]
fn a_server_with_tls_rejects_plaintext() {
    let redis = Redis::builder().tls().start().unwrap();

    let mut plain = TcpStream::connect(redis.addr()).unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    plain.write_all(b"PING\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);

    assert!(!answer.starts_with(b"+PONG"));
    assert!(redis.url().starts_with("rediss://127.0.0.1:"));
    let authority = std::fs::read_to_string(redis.ca_certificate().unwrap()).unwrap();
    assert!(authority.starts_with("-----BEGIN CERTIFICATE-----"));
    assert_eq!(redis.command(&["PING"]).unwrap().text(), "PONG");
}

#[test]
fn a_server_with_tls_completes_a_handshake() {
    let redis = Redis::builder().tls().start().unwrap();
    let mut stream = TcpStream::connect(redis.addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();

    // The smallest hello of TLS 1.2 that OpenSSL answers: one elliptic cipher, one curve.
    let extensions =
        [&[0, 10, 0, 4, 0, 2, 0, 23][..], &[0, 11, 0, 2, 1, 0], &[0, 13, 0, 4, 0, 2, 4, 3]]
            .concat();
    let body = [
        &[3, 3][..],
        &[7; 32],
        &[0],
        &[0, 2, 0xc0, 0x2b],
        &[1, 0],
        &[0, extensions.len() as u8],
        &extensions,
    ]
    .concat();
    let hello =
        [&[22, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8][..], &body].concat();
    stream.write_all(&hello).unwrap();
    let mut answer = [0; 6];
    stream.read_exact(&mut answer).unwrap();

    // A handshake record (22) that begins with a server hello (2).
    assert_eq!((answer[0], answer[5]), (22, 2), "{answer:?}");
}

#[test]
fn an_acl_user_is_bound_by_its_rules() {
    let redis = Redis::builder().user("alice", "secret", "~a:* +get +set").start().unwrap();
    assert_eq!(redis.url(), format!("redis://alice:secret@{}/", redis.addr()));
    let mut alice = RedisConnection::open(redis.addr()).unwrap();

    assert!(alice.command(&["AUTH", "alice", "wrong"]).unwrap().ok().is_err());
    assert_eq!(alice.command(&["AUTH", "alice", "secret"]).unwrap().text(), "OK");

    assert_eq!(alice.command(&["SET", "a:1", "x"]).unwrap().text(), "OK");
    assert!(alice.command(&["SET", "b:1", "x"]).unwrap().text().starts_with("NOPERM"));
    assert_eq!(redis.command(&["SET", "b:1", "x"]).unwrap().text(), "OK");
}

#[test]
fn a_server_with_a_password_rejects_other_clients() {
    let redis = Redis::builder().password("secret").start().unwrap();
    let mut other = RedisConnection::open(redis.addr()).unwrap();

    assert!(other.command(&["PING"]).unwrap().text().starts_with("NOAUTH"));
    assert_eq!(redis.command(&["PING"]).unwrap().text(), "PONG");
    assert_eq!(redis.url(), format!("redis://:secret@{}/", redis.addr()));
}

#[test]
fn a_full_server_refuses_writes() {
    let redis = Redis::builder().maxmemory(3_000_000).start().unwrap();
    let megabyte = "x".repeat(1_000_000);

    let replies: Vec<String> = (0..5)
        .map(|n| redis.command(&["SET", &format!("key{n}"), &megabyte]).unwrap().text())
        .collect();

    assert!(replies.last().unwrap().starts_with("OOM"), "{replies:?}");
}

#[test]
fn notify_flags_and_settings_reach_the_server() {
    let redis = Redis::builder().notify("Ex").setting("databases", "3").start().unwrap();

    let flags = redis.command(&["CONFIG", "GET", "notify-keyspace-events"]).unwrap();
    let databases = redis.command(&["CONFIG", "GET", "databases"]).unwrap();

    assert_eq!(flags.items()[1].text(), "xE");
    assert_eq!(databases.items()[1].text(), "3");
}

#[test]
fn a_server_that_cannot_start_fails_with_its_log() {
    let error = Redis::builder().setting("no-such-setting", "1").start().unwrap_err();

    let message = format!("{error:#}");
    assert!(message.contains("no-such-setting"), "{message}");
}

#[test]
fn a_missing_program_is_an_error_with_the_next_step() {
    let environment = [("PATH", "/nonexistent")];
    let child = Child::spawn_self("child_starts_a_server", &environment).unwrap();

    let message = child.line_after("ERROR ", Duration::from_secs(20)).unwrap();

    assert!(message.contains("`redis-server` not found"), "{message}");
    assert!(message.contains("run `cargo xtask setup` to install it"), "{message}");
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_starts_a_server() {
    println!("ERROR {:#}", Redis::start().unwrap_err());
}

#[test]
fn a_server_that_ends_unexpectedly_can_be_restarted() {
    let redis = Redis::start().unwrap();
    let pid = redis.pid().unwrap();

    let _ = redis.command(&["SHUTDOWN", "NOSAVE"]);
    wait_until("the server to end", Duration::from_secs(10), || !is_alive(pid)).unwrap();
    redis.restart().unwrap();

    assert_eq!(redis.command(&["PING"]).unwrap().text(), "PONG");
}
