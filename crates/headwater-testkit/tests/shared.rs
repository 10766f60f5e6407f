//! Shared servers are shared by all processes of a run, and end with it.

use std::time::Duration;

use headwater_testkit::{Child, Redis, is_alive, unique, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn the_shared_server_is_the_same_in_two_processes() {
    let children =
        [(); 2].map(|()| Child::spawn_self("child_uses_the_shared_server", &[]).unwrap());
    let pids = children.map(|child| {
        let pid = child.line_after("SERVER ", LIMIT).unwrap();
        assert!(child.wait(LIMIT).unwrap().success());
        pid
    });

    let redis = Redis::shared().unwrap();

    assert_eq!(pids[0], pids[1]);
    assert_eq!(pids[0], redis.pid().unwrap().to_string());
    assert_eq!(redis.command(&["PING"]).unwrap().text(), "PONG");
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_uses_the_shared_server() {
    println!("SERVER {}", Redis::shared().unwrap().pid().unwrap());
}

#[test]
fn the_shared_server_cannot_be_killed_or_paused_by_a_test() {
    let redis = Redis::shared().unwrap();

    assert!(redis.kill9().is_err());
    assert!(redis.pause().is_err());
    assert!(redis.stop().is_err());
    assert!(redis.restart().is_err());

    assert_eq!(redis.command(&["PING"]).unwrap().text(), "PONG");
}

#[test]
fn the_shared_server_ends_with_the_run() {
    // Given a separate run whose runner is the child.
    let runner = Child::spawn_self("child_is_a_run_of_its_own", &[]).unwrap();
    let line = runner.line_after("SERVER ", LIMIT).unwrap();
    let (pid, directory) = line.split_once(' ').unwrap();
    let pid = pid.parse().unwrap();
    assert_ne!(pid, Redis::shared().unwrap().pid().unwrap());
    assert!(is_alive(pid) && std::fs::exists(directory).unwrap());

    // When the runner is killed, then the server and its directory are gone.
    runner.kill9().unwrap();
    wait_until("the shared server to end", LIMIT, || {
        !is_alive(pid) && !std::fs::exists(directory).unwrap()
    })
    .unwrap();
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_is_a_run_of_its_own() {
    let run = format!("{}:{}", unique("run"), std::process::id());
    let nested = [("HEADWATER_TESTKIT_RUN", run.as_str())];
    let starter = Child::spawn_self("child_uses_the_shared_server_of_its_run", &nested).unwrap();
    let line = starter.line_after("SERVER ", LIMIT).unwrap();
    assert!(starter.wait(LIMIT).unwrap().success());

    // The process that started it has exited; the server is still running.
    let (pid, _) = line.split_once(' ').unwrap();
    assert!(is_alive(pid.parse().unwrap()));
    println!("SERVER {line}");
    std::thread::park();
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_uses_the_shared_server_of_its_run() {
    let redis = Redis::shared().unwrap();
    let directory = redis.command(&["CONFIG", "GET", "dir"]).unwrap().items()[1].text();
    println!("SERVER {} {directory}", redis.pid().unwrap());
}

#[test]
fn unique_names_differ() {
    let (first, second) = (unique("topic"), unique("topic"));

    assert!(first.starts_with("topic_"));
    assert_ne!(first, second);
}
