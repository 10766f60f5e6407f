//! `headwater status` and the head of `headwater top`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::wait_until;
use serde_json::{Value, json};

use crate::support::cli::{CliFixture, until};
use crate::support::{LIMIT, text};

fn status_on_one_screen(cli: &CliFixture) {
    cli.json(&["topic", "create", "orders"]);
    cli.json(&["produce", "orders", "--payload", "x"]);
    cli.json(&["produce", "orders", "--payload", "y"]);
    cli.json(&["consume", "orders", "--group", "baristas", "--count", "1", "--timeout", "90s"]);
    cli.json(&["ticket", "new", "--title", "t", "--content", "c"]);
    let ask = |verb: &[&str]| cli.run(verb, "");
    // The server listens before its worker is registered.
    let found = until(&ask, &["status"], |status| {
        let workers = status[0]["workers"].as_array().map_or(0, Vec::len);
        workers == 1 && status[0]["issues"]["queued"] == 0 && status[0]["issues"]["processing"] == 0
    });
    let status = &found[0];
    assert_eq!(
        (&status["health"], &status["streams"]["ok"]),
        (&json!("ready"), &json!(true)),
        "{status}"
    );
    assert_eq!(status["issues"]["quarantined"], 0, "{status}");
    assert_eq!(status["outbox"]["dead"], 0, "{status}");
    assert_eq!(status["model"]["url"], "scripted:", "{status}");
    let topics = status["topics"].as_array().unwrap();
    let orders = topics.iter().find(|topic| topic["name"] == "orders").unwrap();
    assert_eq!(
        (&orders["length"], &orders["groups"][0]["lag"]),
        (&json!(2), &json!(1)),
        "{status}"
    );

    let screen = cli.stdout(&["status"]);
    for part in [
        "health    ready",
        "streams   ok, ",
        "database  ok, ",
        "0 quarantined",
        "outbox    0 pending",
        "workers   1 active",
        "model     scripted:",
    ] {
        assert!(screen.contains(part), "lacks {part:?}:\n{screen}");
    }
    let row = screen.lines().find(|line| line.starts_with("orders ")).unwrap();
    let row: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(row[..5], ["orders", "2", "0", "baristas", "1"], "{screen}");
    assert!(screen.lines().count() <= 24, "one screen:\n{screen}");

    let top = cli.stdout(&["top", "--once", "--every", "100ms"]);
    assert!(top.contains("workers   1 active") && top.contains("model     scripted:"), "{top}");
    assert!(top.contains("\nTOPIC"), "{top}");
    let lines = cli.json(&["top", "--once", "--every", "100ms"]);
    assert_eq!(lines.last().unwrap()["status"]["issues"]["quarantined"], 0, "{lines:?}");
}

#[test]
fn status_and_top_of_an_embedded_server() {
    status_on_one_screen(&CliFixture::embedded().start_server());
}

#[test]
fn status_and_top_of_a_server_on_redis_and_postgres() {
    status_on_one_screen(&CliFixture::with_server());
}

#[test]
fn status_works_without_a_server_and_names_what_is_missing() {
    let cli = CliFixture::redis();
    cli.json(&["ticket", "new", "--title", "t", "--content", "c"]);
    let status = &cli.json(&["status"])[0];
    assert_eq!((&status["health"], &status["issues"]["queued"]), (&json!("not ready"), &json!(1)));
    let screen = cli.stdout(&["status"]);
    assert!(screen.contains("workers   none active; start `headwater serve`"), "{screen}");
    // Without Redis there is nothing to open.
    cli.redis.as_ref().unwrap().stop().unwrap();
    cli.fails(&["status"], 3);
}

#[test]
fn the_status_of_an_empty_directory_names_what_does_not_exist() {
    let dir = crate::support::ServerDir::new().unwrap();
    for verb in [&["status"][..], &["top", "--once", "--every", "100ms"]] {
        let output = dir.run(verb).unwrap();
        let screen = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        for name in ["streams ", "database"] {
            let expected = format!("{name}  none yet; `headwater serve` creates it");
            assert!(screen.contains(&expected) && !screen.contains("memory"), "{screen}");
        }
    }
}

#[test]
fn the_status_of_a_server_without_redis_says_so() {
    let cli = CliFixture::with_server();
    cli.redis.as_ref().unwrap().stop().unwrap();
    let mut status = Value::Null;
    wait_until("the server to notice", LIMIT, || {
        status = cli.json(&["status"]).remove(0);
        status["streams"]["ok"] == false
    })
    .unwrap();
    assert_eq!(status["health"], "degraded", "{status}");
    assert_eq!(status["topics"], json!([]));
    let screen = cli.stdout(&["status"]);
    assert!(screen.contains("streams   unreachable, redis"), "{screen}");
}

#[test]
fn topics_without_a_database_are_watched() {
    let cli = CliFixture::redis();
    cli.json(&["topic", "create", "orders"]);
    let redis = cli.redis.as_ref().unwrap().url();
    let to = ["--stream-url", &redis, "--database-url", "postgres://nobody:no@127.0.0.1:1/none"];
    let output = cli.run_at(&["top", "--once", "--every", "100ms"], &to, "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("TOPIC"), "{}", text(&output.stdout));
}

#[tokio::test]
async fn topics_that_do_not_fit_are_mentioned() {
    let cli = CliFixture::embedded().start_server();
    for number in 0..201 {
        let body = json!({"name": format!("topic-{number:03}"), "partitions": 1});
        assert_eq!(cli.server().post("/api/v1/topics", &body).await.unwrap().0, 201);
    }
    let said = "only the first 200 topics are shown; name others: `headwater top TOPIC`";
    let top = cli.stdout(&["top", "--once", "--every", "100ms"]);
    // System topics are among them.
    assert!(top.contains("topic-190") && !top.contains("topic-200"), "{top}");
    assert!(top.trim_end().ends_with(said), "{top}");
    let named = cli.stdout(&["top", "topic-200", "--once", "--every", "100ms"]);
    assert!(named.contains("topic-200") && !named.contains(said), "{named}");
}
