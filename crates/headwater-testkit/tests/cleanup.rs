//! No process or file remains, however a test ends.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use headwater_testkit::{Child, Redis, is_alive, wait_until};

const LIMIT: Duration = Duration::from_secs(20);

/// The temporary directory of a server, one level above its data.
fn server_dir_of(redis: &Redis) -> PathBuf {
    let directory = redis.command(&["CONFIG", "GET", "dir"]).unwrap();
    PathBuf::from(directory.items()[1].text()).parent().unwrap().to_path_buf()
}

fn nothing_is_left(pid: u32, directory: &Path) -> bool {
    let gone = PathBuf::from(format!("{}.gone", directory.display()));
    !is_alive(pid) && !directory.exists() && !gone.exists()
}

#[test]
fn dropping_a_server_leaves_nothing_behind() {
    let redis = Redis::start().unwrap();
    let (pid, directory) = (redis.pid().unwrap(), server_dir_of(&redis));
    assert!(is_alive(pid) && directory.exists());

    drop(redis);

    assert!(nothing_is_left(pid, &directory));
}

#[test]
fn a_panic_leaves_nothing_behind() {
    let mut left = None;

    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let redis = Redis::start().unwrap();
        left = Some((redis.pid().unwrap(), server_dir_of(&redis)));
        panic!("as planned");
    }));

    assert!(outcome.is_err());
    let (pid, directory) = left.unwrap();
    assert!(nothing_is_left(pid, &directory));
}

#[test]
fn a_test_process_killed_with_9_leaves_nothing_behind() {
    for state in ["runs", "paused", "killed"] {
        let child = Child::spawn_self("child_owns_a_server", &[("STATE", state)]).unwrap();
        let line = child.line_after("SERVER ", LIMIT).unwrap();
        let (pid, directory) = line.split_once(' ').unwrap();
        let (pid, directory) = (pid.parse().unwrap(), PathBuf::from(directory));
        assert!(is_alive(pid) == (state != "killed") && directory.exists());

        child.kill9().unwrap();

        assert!(!is_alive(child.pid()));
        wait_until("the guard to clear up", LIMIT, || nothing_is_left(pid, &directory)).unwrap();
    }
}

#[test]
fn the_servers_of_a_child_die_with_the_parent_of_the_child() {
    let parent = Child::spawn_self("child_owns_a_child", &[]).unwrap();
    let line = parent.line_after("SERVER ", LIMIT).unwrap();
    let (pid, directory) = line.split_once(' ').unwrap();
    let (pid, directory) = (pid.parse().unwrap(), PathBuf::from(directory));

    parent.kill9().unwrap();

    wait_until("the guard to clear up", LIMIT, || nothing_is_left(pid, &directory)).unwrap();
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
fn child_owns_a_server() {
    let redis = Redis::start().unwrap();
    let (pid, directory) = (redis.pid().unwrap(), server_dir_of(&redis));
    match std::env::var("STATE").as_deref() {
        Ok("paused") => redis.pause().unwrap(),
        Ok("killed") => redis.kill9().unwrap(),
        _ => {}
    }
    println!("SERVER {pid} {}", directory.display());
    std::thread::park();
}

#[test]
#[ignore = "started as a child process by other tests of this file"]
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
