//! Abandoned groups: deleted directly and over a server, and reported by the doctor.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::process::{Child, Stdio};

use serde_json::{Value, json};
use support::cli::{CliFixture, until};
use support::text;

/// A topic with retention 1 and five messages; groups `g` and `typo` have read one of them.
fn behind(cli: &CliFixture) {
    cli.json(&["topic", "create", "orders", "--partitions", "1", "--retention-count", "1"]);
    cli.json(&["produce", "orders", "--payload", "first"]);
    for group in ["g", "typo"] {
        let words = ["consume", "orders", "--group", group, "--count", "1", "--timeout", "90s"];
        assert_eq!(cli.json(&words).len(), 1);
    }
    assert_eq!(cli.json_of(&["produce", "orders", "--payload", "-"], "2\n3\n4\n5\n").len(), 4);
    // A server stays a member for a few seconds after the last pull.
    until(&|verb| cli.run(verb, ""), &["group", "list", "orders"], |groups| {
        groups.iter().all(|group| group["members"].as_array().unwrap().is_empty())
    });
}

/// The doctor's findings about groups.
fn of_groups(cli: &CliFixture) -> Vec<Value> {
    let output = cli.run(&["doctor", "--json"], "");
    let lines = text(&output.stdout);
    let findings = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    findings.filter(|finding| finding["subject"] == "groups").collect()
}

fn a_group_is_removed(cli: &CliFixture) {
    behind(cli);
    let found = of_groups(cli);
    assert_eq!(found.len(), 2, "{found:?}");
    for finding in &found {
        assert_eq!(finding["severity"], "warning", "{finding}");
        assert!(finding["found"].as_str().unwrap().contains("4 messages"), "{finding}");
    }
    assert!(found[1]["advice"].as_str().unwrap().contains("headwater group delete orders typo"));

    let message = cli.fails(&["group", "delete", "orders", "typo"], 2);
    assert!(message.contains("--yes"), "{message}");
    let removed = cli.json(&["group", "delete", "orders", "typo", "--yes"]);
    let expected =
        json!({"topic": "orders", "group": "typo", "pending": 0, "lag": 4, "partitions": 1});
    assert_eq!(removed, [expected]);
    let message = cli.fails(&["group", "delete", "orders", "typo", "--yes"], 1);
    assert!(message.contains("`typo`"), "{message}");
    cli.fails(&["group", "delete", "nothing", "typo", "--yes"], 1);
    let left: Vec<Value> = cli
        .json(&["group", "list", "orders"])
        .into_iter()
        .map(|one| one["group"].clone())
        .collect();
    assert_eq!(left, ["g"]);

    // The other group still blocks retention until it is deleted.
    let trim = ["topic", "trim", "orders", "--count", "0", "--yes"];
    assert_eq!(cli.json(&trim)[0]["held_back"], true);
    assert!(
        cli.stdout(&["group", "delete", "orders", "g", "--yes"]).starts_with("deleted group `g`")
    );
    let trimmed = &cli.json(&trim)[0];
    assert_eq!((&trimmed["held_back"], &trimmed["removed"]), (&json!(false), &json!(4)));
    let found = of_groups(cli);
    assert_eq!((found.len(), &found[0]["severity"]), (1, &json!("ok")), "{found:?}");
}

#[test]
fn a_group_is_removed_on_embedded_streams() {
    a_group_is_removed(&CliFixture::embedded());
}

#[test]
fn a_group_is_removed_on_redis() {
    a_group_is_removed(&CliFixture::redis());
}

#[test]
fn a_group_is_removed_over_a_server() {
    let cli = CliFixture::with_server();
    a_group_is_removed(&cli);
    let log = cli.json(&["audit", "log"]);
    let path = "/api/v1/topics/orders/groups/typo";
    let entry = log.iter().find(|entry| entry["path"] == path && entry["status"] == 200);
    assert_eq!(entry.unwrap()["method"], "DELETE", "{log:?}");
}

/// A process that is killed on drop.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_group_with_an_active_member_is_not_deleted() {
    let cli = CliFixture::redis();
    cli.json(&["topic", "create", "orders", "--partitions", "1"]);
    let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    let words = [&["consume", "orders", "--group", "g"][..], &direct].concat();
    let mut command = cli.dir.command(&words);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let consumer = KillOnDrop(command.spawn().unwrap());
    let ask = |verb: &[&str]| cli.run(verb, "");
    until(&ask, &["group", "list", "orders"], |groups| {
        groups.iter().any(|group| !group["members"].as_array().unwrap().is_empty())
    });
    let message = cli.fails(&["group", "delete", "orders", "g", "--yes"], 1);
    assert!(message.contains("is active"), "{message}");
    assert_eq!(cli.json(&["group", "list", "orders"]).len(), 1);
    drop(consumer);
}
