//! Replay and purge of many dead letters: progress is shown only on a terminal, and there is no timeout.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};
use support::cli::CliFixture;
use support::text;

/// Number of dead letters.
const LETTERS: usize = 40;

/// Creates a topic with dead letters.
fn dead(cli: &CliFixture) {
    cli.json(&["topic", "create", "orders", "--partitions", "1", "--max-retries", "0"]);
    // The good message comes last and ends the command.
    let lines = "bad\n".repeat(LETTERS) + "good\n";
    cli.json_of(&["produce", "orders", "--payload", "-"], &lines);
    let script = r#"read -r line; [ "$line" = good ]"#;
    let words = ["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"];
    let output = cli.run(&[&words[..], &["--exec", script]].concat(), "");
    let message = text(&output.stderr);
    assert!(output.status.success(), "{message}");
    assert_eq!(message.matches("becomes a dead letter").count(), LETTERS, "{message}");
    assert!(!message.contains("will be retried"), "{message}");
}

fn left(cli: &CliFixture) -> usize {
    cli.json(&["dlq", "list", "orders", "--limit", "1000"]).len()
}

fn all_are_replayed_and_purged(cli: &CliFixture) {
    dead(cli);
    assert_eq!(left(cli), LETTERS);
    let dry = &cli.json(&["dlq", "replay", "orders", "--all", "--dry-run"])[0];
    assert_eq!((&dry["replayed"], &dry["is_done"]), (&json!(LETTERS), &json!(false)));
    // Slow enough for progress; a program sees only the result.
    let words = ["dlq", "replay", "orders", "--all", "--limit", "30", "--rate", "50", "--json"];
    let output = cli.run(&words, "");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["replayed"], &answer["is_done"]), (&json!(30), &json!(true)));
    assert_eq!(left(cli), LETTERS - 30);
    let purged = &cli.json(&["dlq", "purge", "orders", "--all", "--yes"])[0];
    assert_eq!((&purged["purged"], &purged["is_done"]), (&json!(LETTERS - 30), &json!(true)));
    assert_eq!(left(cli), 0);
    let message = cli.fails(&["dlq", "replay", "nothing", "--all"], 1);
    assert!(message.contains("`nothing`"), "{message}");
    cli.fails(&["dlq", "replay", "orders", "7-7"], 1);
    cli.fails(&["dlq", "replay", "orders"], 2);
}

#[test]
fn all_are_replayed_and_purged_on_embedded_streams() {
    all_are_replayed_and_purged(&CliFixture::embedded());
}

#[test]
fn all_are_replayed_and_purged_over_a_server() {
    all_are_replayed_and_purged(&CliFixture::with_server());
}

#[tokio::test]
async fn a_server_streams_progress_on_request() {
    let cli = CliFixture::embedded();
    dead(&cli);
    let cli = cli.start_server();
    let server = cli.server();
    let path = server.url("/api/v1/topics/orders/dead-letters/replay");
    let request = json!({"all": true, "per_second": 8, "progress": true});
    let mut response = server.client.post(path).json(&request).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    let ended = async || {
        let (_, page) = server.get("/api/v1/audit?limit=1").await.unwrap();
        let entry = page["entries"][0].clone();
        assert!(entry["path"].as_str().unwrap().ends_with("/replay"), "{entry}");
        entry["status"].clone()
    };
    let mut body = text(&response.chunk().await.unwrap().unwrap());
    assert_eq!(ended().await, Value::Null, "the replay is in progress");
    body += &response.text().await.unwrap();
    assert_eq!(ended().await, 200, "the entry is complete after the last line");
    let lines: Vec<Value> = body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, progress) = lines.split_last().unwrap();
    assert_eq!(last["end"]["replayed"], LETTERS, "{body}");
    let done: Vec<u64> =
        progress.iter().map(|line| line["progress"]["done"].as_u64().unwrap()).collect();
    assert!(done.len() >= 2 && done.is_sorted(), "{done:?}");
    assert!(done.iter().any(|done| *done > 0), "{done:?}");
}
