//! Private Postgres servers, and databases in the shared one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use headwater_testkit::{Child, Postgres, Proxy, is_alive, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn databases_are_separate_and_removed() {
    let postgres = Postgres::shared().unwrap();
    let (first, second) = (postgres.database().unwrap(), postgres.database().unwrap());

    first.query("CREATE TABLE numbers (n int)").unwrap();
    first.query("INSERT INTO numbers VALUES (1), (2)").unwrap();

    assert_eq!(first.query("SELECT n, n * 2 FROM numbers ORDER BY n").unwrap(), "1|2\n2|4");
    let error = second.query("SELECT n FROM numbers").unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
    assert!(first.url().starts_with(&format!("postgres://postgres@{}/", postgres.addr())));
    let count = format!("SELECT count(*) FROM pg_database WHERE datname = '{}'", first.name());
    assert_eq!(second.query(&count).unwrap(), "1");
    drop(first);
    assert_eq!(second.query(&count).unwrap(), "0");
}

#[test]
fn a_server_keeps_its_data_over_kill_9() {
    let begin = Instant::now();
    let postgres = Postgres::start().unwrap();
    eprintln!("measured: postgres {:?}", begin.elapsed());
    let begin = Instant::now();
    let database = postgres.database().unwrap();
    eprintln!("measured: database {:?}", begin.elapsed());
    let (port, pid) = (postgres.port(), postgres.pid().unwrap());
    database.query("CREATE TABLE numbers AS SELECT 7 AS n").unwrap();

    postgres.kill9().unwrap();
    assert!(!is_alive(pid));
    assert!(database.query("SELECT 1").is_err());
    postgres.restart().unwrap();

    assert_eq!(postgres.port(), port);
    assert_ne!(postgres.pid().unwrap(), pid);
    assert_eq!(database.query("SELECT n FROM numbers").unwrap(), "7");
    postgres.restart().unwrap();
    assert_eq!(database.query("SELECT n FROM numbers").unwrap(), "7");
}

#[test]
fn a_paused_server_answers_after_it_is_resumed() {
    let postgres = Postgres::start().unwrap();
    let database = postgres.database().unwrap();

    postgres.pause().unwrap();
    let waiting = std::thread::scope(|scope| {
        let query = scope.spawn(|| database.query("SELECT 1"));
        std::thread::sleep(Duration::from_millis(300));
        let waiting = !query.is_finished();
        postgres.resume().unwrap();
        assert_eq!(query.join().unwrap().unwrap(), "1");
        waiting
    });

    assert!(waiting);
}

#[test]
fn a_server_is_reached_through_a_proxy() {
    let postgres = Postgres::shared().unwrap();
    let database = postgres.database().unwrap();
    let proxy = Proxy::start(postgres.addr()).unwrap();

    // Requests TLS, which this server declines.
    let mut client = TcpStream::connect(proxy.addr()).unwrap();
    client.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).unwrap();
    let mut answer = [0];
    client.read_exact(&mut answer).unwrap();

    assert_eq!(&answer, b"N");
    let (direct, through) = (database.url(), database.url_at(proxy.addr()));
    let [direct_port, proxy_port] = [postgres.port(), proxy.addr().port()].map(|p| p.to_string());
    assert_eq!(direct.replace(&direct_port, &proxy_port), through);
}

#[test]
fn a_killed_server_leaves_no_shared_memory_behind() {
    let postgres = Postgres::start().unwrap();
    let data = postgres.database().unwrap().query("SHOW data_directory").unwrap();
    let pid_file = std::fs::read_to_string(format!("{data}/postmaster.pid")).unwrap();
    let segment = pid_file.lines().nth(6).unwrap().split_whitespace().last().unwrap().to_string();
    let exists = || {
        let segments = std::fs::read_to_string("/proc/sysvipc/shm").unwrap();
        segments.lines().any(|line| line.split_whitespace().nth(1) == Some(&segment))
    };
    assert!(exists());

    postgres.kill9().unwrap();
    drop(postgres);

    assert!(!exists());
    assert!(!std::fs::exists(data).unwrap());
}

#[test]
fn a_paused_server_dies_with_its_test_process() {
    let child = Child::spawn_self("child_pauses_a_server", &[]).unwrap();
    let pids: Vec<u32> = child
        .line_after("SERVER ", LIMIT)
        .unwrap()
        .split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect();
    assert!(pids.len() > 3, "a server has backends: {pids:?}");

    child.kill9().unwrap();

    wait_until("server and backends to end", LIMIT, || !pids.iter().any(|pid| is_alive(*pid)))
        .unwrap();
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_pauses_a_server() {
    let postgres = Postgres::start().unwrap();
    let database = postgres.database().unwrap();
    let backends = database.query("SELECT string_agg(pid::text, ' ') FROM pg_stat_activity");
    let backends = backends.unwrap();
    postgres.pause().unwrap();
    println!("SERVER {} {backends}", postgres.pid().unwrap());
    std::thread::park();
}

#[test]
fn the_shared_server_is_the_same_in_two_processes() {
    let children = [(); 2].map(|()| Child::spawn_self("child_uses_a_database", &[]).unwrap());
    let lines = children.map(|child| {
        let line = child.line_after("DATABASE ", LIMIT).unwrap();
        assert!(child.wait(LIMIT).unwrap().success());
        line
    });

    let [first, second] = lines.each_ref().map(|line| line.split_once(' ').unwrap());

    assert_eq!(first.0, second.0);
    assert_ne!(first.1, second.1);
    assert!(Postgres::shared().unwrap().kill9().is_err());
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_uses_a_database() {
    let postgres = Postgres::shared().unwrap();
    let database = postgres.database().unwrap();
    assert_eq!(database.query("SELECT 1").unwrap(), "1");
    println!("DATABASE {} {}", postgres.pid().unwrap(), database.name());
}
