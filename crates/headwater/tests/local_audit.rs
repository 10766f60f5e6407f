//! Audit log of commands that open the streams themselves.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::Redis;
use serde_json::{Value, json};
use support::cli::CliFixture;
use support::{ServerDir, text};

fn stream_changes_are_recorded(cli: &CliFixture) {
    cli.json(&["topic", "create", "orders", "--partitions", "2"]);
    cli.json(&["produce", "orders", "--payload", "espresso"]);
    let words = ["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"];
    assert_eq!(cli.json(&words).len(), 1);
    cli.json(&["topic", "list"]);
    cli.json(&["topic", "grow", "orders", "--partitions", "3", "--dry-run"]);
    cli.fails(&["group", "delete", "orders", "nobody", "--yes"], 1);
    cli.json(&["group", "delete", "orders", "g", "--yes"]);

    let log = cli.json(&["audit", "log"]);
    let of = |path: &str| -> Vec<(Value, Value)> {
        let found =
            log.iter().rev().filter(|entry| entry["path"] == format!("/api/v1/topics{path}"));
        found.map(|entry| (entry["method"].clone(), entry["status"].clone())).collect()
    };
    assert_eq!(of(""), [(json!("POST"), json!(201))], "{log:?}");
    assert_eq!(of("/orders/messages"), [], "moving messages is no change of the configuration");
    assert_eq!(of("/orders/grow"), [], "a dry run changes nothing");
    assert_eq!(of("/orders/groups/nobody"), [(json!("DELETE"), json!(404))]);
    assert_eq!(of("/orders/groups/g"), [(json!("DELETE"), json!(200))]);
    let find = |words: &[&str]| cli.json(&[&["audit", "log"], words].concat()).len();
    assert_eq!(find(&["--path", "Orders/groups/", "--from", "1d"]), 2, "{log:?}");
    assert_eq!(find(&["--path", "orders", "--caller", "nobody"]), 0, "{log:?}");
    let caller = log[0]["caller"].as_str().unwrap();
    assert_eq!(find(&["--caller", caller]), log.len(), "{log:?}");
    assert!(
        log.iter().all(|entry| entry["method"] != "GET" && entry["role"] == "admin"),
        "{log:?}"
    );
    assert!(log.iter().all(|entry| entry["caller"].as_str().unwrap().starts_with("cli:")));
}

#[test]
fn changes_of_embedded_streams_are_recorded() {
    stream_changes_are_recorded(&CliFixture::embedded());
}

#[test]
fn changes_of_redis_streams_are_recorded_in_postgres() {
    stream_changes_are_recorded(&CliFixture::redis());
}

#[test]
fn without_a_database_nothing_is_recorded_and_none_is_created() {
    let redis = Redis::start().unwrap();
    let dir = ServerDir::new().unwrap();
    let create = ["topic", "create", "orders", "--stream-url", &redis.url()];
    let output = dir.run(&create).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!dir.path().join("headwater-data").exists());
}

#[test]
fn a_change_that_cannot_be_recorded_is_rejected() {
    let redis = Redis::start().unwrap();
    let dir = ServerDir::new().unwrap();
    // No server listens there.
    let to = ["--stream-url", &redis.url(), "--database-url", "postgres://nobody@127.0.0.1:1/none"];
    let to = [&to[..], &["--start-wait", "0s"]].concat();
    let output = dir.run(&[&["topic", "create", "orders"][..], &to].concat()).unwrap();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert!(message.contains("cannot write the audit log"), "{message}");
    // Reading needs no database.
    let output = dir.run(&[&["topic", "list", "--json"][..], &to].concat()).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
}
