//! Nothing is left behind, whichever way a test ends.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use headwater_testkit::{Child, Redis, is_alive, wait_until};

const LIMIT: Duration = Duration::from_secs(20);

/// The home of a server, one level above its data.
fn home_of(redis: &Redis) -> PathBuf {
    let directory = redis.command(&["CONFIG", "GET", "dir"]).unwrap();
    PathBuf::from(directory.items()[1].text()).parent().unwrap().to_path_buf()
}

fn nothing_is_left(pid: u32, home: &Path) -> bool {
    let gone = PathBuf::from(format!("{}.gone", home.display()));
    !is_alive(pid) && !home.exists() && !gone.exists()
}

#[test]
fn dropping_a_server_leaves_nothing_behind() {
    let redis = Redis::start().unwrap();
    let (pid, home) = (redis.pid().unwrap(), home_of(&redis));
    assert!(is_alive(pid) && home.exists());

    drop(redis);

    assert!(nothing_is_left(pid, &home));
}

#[test]
fn a_panic_leaves_nothing_behind() {
    let mut left = None;

    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let redis = Redis::start().unwrap();
        left = Some((redis.pid().unwrap(), home_of(&redis)));
        panic!("as planned");
    }));

    assert!(outcome.is_err());
    let (pid, home) = left.unwrap();
    assert!(nothing_is_left(pid, &home));
}

#[test]
fn a_test_process_killed_with_9_leaves_nothing_behind() {
    for state in ["runs", "paused", "killed"] {
        let child = Child::spawn_self("child_owns_a_server", &[("STATE", state)]).unwrap();
        let line = child.line_after("SERVER ", LIMIT).unwrap();
        let (pid, home) = line.split_once(' ').unwrap();
        let (pid, home) = (pid.parse().unwrap(), PathBuf::from(home));
        assert!(is_alive(pid) == (state != "killed") && home.exists());

        child.kill9().unwrap();

        assert!(!is_alive(child.pid()));
        wait_until("the guard to clear up", LIMIT, || nothing_is_left(pid, &home)).unwrap();
    }
}

#[test]
fn the_servers_of_a_child_die_with_the_parent_of_the_child() {
    let parent = Child::spawn_self("child_owns_a_child", &[]).unwrap();
    let line = parent.line_after("SERVER ", LIMIT).unwrap();
    let (pid, home) = line.split_once(' ').unwrap();
    let (pid, home) = (pid.parse().unwrap(), PathBuf::from(home));

    parent.kill9().unwrap();

    wait_until("the guard to clear up", LIMIT, || nothing_is_left(pid, &home)).unwrap();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn child_owns_a_server() {
    let redis = Redis::start().unwrap();
    let (pid, home) = (redis.pid().unwrap(), home_of(&redis));
    match std::env::var("STATE").as_deref() {
        Ok("paused") => redis.pause().unwrap(),
        Ok("killed") => redis.kill9().unwrap(),
        _ => {}
    }
    println!("SERVER {pid} {}", home.display());
    std::thread::park();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn child_owns_a_child() {
    let child = Child::spawn_self("child_owns_a_server", &[]).unwrap();
    println!("SERVER {}", child.line_after("SERVER ", LIMIT).unwrap());
    std::thread::park();
}

#[test]
fn a_child_reports_how_it_ended() {
    let child = Child::spawn_self("child_owns_a_server", &[]).unwrap();
    child.line_after("SERVER ", LIMIT).unwrap();
    assert!(child.wait(Duration::from_millis(50)).is_err());
    child.pause().unwrap();
    child.resume().unwrap();
    child.kill9().unwrap();

    let none = Child::spawn_self("no_such_test", &[]).unwrap();
    assert!(none.wait(LIMIT).unwrap().success());
    assert!(none.line_after("never printed", LIMIT).is_err());
}
