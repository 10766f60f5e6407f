//! What a person types: sizes, ages, bytes, beginnings of ids, options in any place; and what a change says it did.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::wait_until;
use serde_json::json;

use crate::support::cli::CliFixture;
use crate::support::{LIMIT, text};

#[test]
fn sizes_and_durations_have_units_on_the_way_in_and_out() {
    let cli = CliFixture::embedded();
    let words = ["topic", "create", "orders", "--byte-budget", "10MB", "--retention-bytes", "1GiB"];
    let created = cli.stdout(&[&words[..], &["--retention-age", "7d"]].concat());
    assert_eq!(created, "created topic `orders` with 1 partition\n");
    let policies = &cli.json(&["topic", "describe", "orders"])[0]["policies"];
    assert_eq!(
        (&policies["byte_budget"], &policies["retention_bytes"]),
        (&json!(10_000_000), &json!(1 << 30))
    );
    let described = cli.stdout(&["topic", "describe", "orders"]);
    for part in ["byte budget", "10 MB\n", "1 GiB\n", "retention age", "7 d\n", "1 MiB\n"] {
        assert!(described.contains(part), "lacks {part:?}:\n{described}");
    }
    let name = described.find("name").unwrap();
    assert!(name < described.find("layout").unwrap(), "what it is comes first:\n{described}");
    // Below a second, and idle times of consumers.
    cli.json(&["produce", "orders", "--payload", "x"]);
    let mut group = String::new();
    cli.json(&["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"]);
    wait_until("the group", LIMIT, || {
        group = cli.stdout(&["group", "describe", "orders", "g"]);
        group.contains("partitions")
    })
    .unwrap();
    assert!(!group.contains("IDLE MS") && !group.contains("{\""), "{group}");
}

fn a_topic_is_altered(cli: &CliFixture) {
    cli.json(&["topic", "create", "orders", "--retention-age", "7d", "--byte-budget", "1GB"]);
    let altered = cli.stdout(&[
        "topic",
        "alter",
        "orders",
        "--retention-age",
        "14d",
        "--byte-budget",
        "none",
    ]);
    assert_eq!(altered, "altered topic `orders`: byte budget none, retention age 14 d\n");
    let policies =
        |name: &str| cli.json(&["topic", "describe", "orders"])[0]["policies"][name].clone();
    assert_eq!(policies("retention_age_ms"), 14 * 86_400_000_u64);
    assert_eq!(policies("byte_budget"), json!(null));
    assert_eq!(policies("max_retries"), 4, "what is not given is kept");
    let answer =
        &cli.json(&["topic", "alter", "orders", "--retention-count", "5", "--max-retries", "0"])[0];
    assert_eq!(
        (&answer["policies"]["retention_count"], &answer["policies"]["max_retries"]),
        (&json!(5), &json!(0))
    );
    assert_eq!(policies("retention_age_ms"), 14 * 86_400_000_u64);
    cli.json(&["topic", "alter", "orders", "--retention-count", "none"]);
    assert_eq!(policies("retention_count"), json!(null));

    let message = cli.fails(&["topic", "alter", "orders"], 2);
    assert!(message.contains("nothing to change"), "{message}");
    let message = cli.fails(&["topic", "alter", "nothing", "--max-retries", "1"], 1);
    assert!(message.contains("`nothing` does not exist"), "{message}");
    cli.fails(&["topic", "alter", "orders", "--retention-bytes", "0"], 2);
    cli.fails(&["topic", "alter", "ticket_events", "--max-retries", "1"], 1);
    assert_eq!(policies("max_retries"), 0, "a rejected change has no effect");
}

#[test]
fn a_topic_is_altered_on_embedded_streams() {
    a_topic_is_altered(&CliFixture::embedded());
}

#[test]
fn a_topic_is_altered_on_redis() {
    a_topic_is_altered(&CliFixture::redis());
}

#[test]
fn a_topic_is_altered_over_a_server() {
    a_topic_is_altered(&CliFixture::with_server());
}

#[test]
fn a_budget_that_is_altered_takes_effect() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    cli.json(&["topic", "alter", "orders", "--byte-budget", "1"]);
    cli.json(&["produce", "orders", "--payload", "first"]);
    let mut refused = String::new();
    // The size of a topic is measured from time to time.
    wait_until("the budget to be enforced", LIMIT, || {
        let output = cli.run(&["produce", "orders", "--payload", "more"], "");
        refused = text(&output.stderr);
        !output.status.success()
    })
    .unwrap();
    assert!(refused.contains("budget"), "{refused}");
    assert!(refused.contains(" ms, consume faster or raise the budget\n"), "{refused}");
    assert!(refused.contains("help: headwater topic alter orders --byte-budget SIZE"), "{refused}");
    cli.json(&["topic", "alter", "orders", "--byte-budget", "none"]);
    cli.json(&["produce", "orders", "--payload", "again"]);
}

#[test]
fn payloads_are_bytes_from_a_file_base64_or_standard_input() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "images"]);
    let bytes: &[u8] = b"\xff\xd8\x00\xff\n\x01";
    std::fs::write(cli.dir.path().join("photo.jpg"), bytes).unwrap();
    cli.json(&["produce", "images", "--payload-file", "photo.jpg"]);
    cli.json(&["produce", "images", "--payload-base64", "/9gA/woB"]);
    cli.json_of(&["produce", "images", "--payload-file", "-"], "two\nlines\n");
    let script = "cat > out-$HEADWATER_ID";
    let verb =
        ["consume", "images", "--group", "g", "--count", "3", "--timeout", "90s", "--exec", script];
    assert!(cli.run(&verb, "").status.success());
    let files = std::fs::read_dir(cli.dir.path()).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files.filter(|file| file.to_string_lossy().contains("out-")).collect();
    files.sort();
    let payloads: Vec<_> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert_eq!(payloads, [bytes, bytes, b"two\nlines\n"]);

    let message =
        cli.fails(&["produce", "images", "--payload", "x", "--payload-file", "photo.jpg"], 2);
    assert!(message.contains("cannot be used with"), "{message}");
    let message = cli.fails(&["produce", "images", "--payload-base64", "%"], 2);
    assert!(message.contains("invalid --payload-base64"), "{message}");
    let message = cli.fails(&["produce", "images", "--payload-file", "none.jpg"], 2);
    assert!(message.contains("cannot read `none.jpg`"), "{message}");
    std::fs::write(cli.dir.path().join("large"), vec![0; 1024 * 1024 + 1]).unwrap();
    let message = cli.fails(&["produce", "images", "--payload-file", "large"], 2);
    assert!(message.contains("larger than 1 MiB"), "{message}");
}

#[test]
fn positions_may_be_ages() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    cli.json(&["produce", "orders", "--payload", "x"]);
    let found = cli.json(&["tail", "orders", "--from", "5m", "--count", "1"]);
    assert_eq!(found[0]["payload"], "x");
    cli.json(&["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"]);
    let reset = ["group", "reset", "orders", "g", "--to", "1h", "--dry-run"];
    assert_eq!(cli.json(&reset)[0]["again"]["count"], 1);
    let said = cli.stdout(&reset);
    assert!(said.starts_with("would move group `g` of topic `orders` to 20"), "{said}");
    assert!(said.ends_with("1 redelivered, 0 skipped, 0 in flight ignored\n"), "{said}");
    assert!(cli.json(&["dlq", "list", "orders", "--from", "1d", "--to", "0ms"]).is_empty());
}

#[test]
fn a_url_may_come_before_the_command() {
    let cli = CliFixture::embedded().start_server();
    let url = format!("http://{}", cli.server().address);
    for words in [
        &["--url", &url, "--json", "topic", "create", "orders"][..],
        &["topic", "--url", &url, "--json", "create", "orders"],
        &["topic", "create", "orders", "--json", "--url", &url],
    ] {
        let output = cli.dir.run(words).unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        assert!(text(&output.stdout).starts_with("{\"name\":\"orders\""), "{words:?}");
    }
    let output = cli.dir.run(&["--url", &url, "serve"]).unwrap();
    assert_eq!(output.status.code(), Some(2), "a server cannot be asked to serve");
}

#[test]
fn arguments_are_checked_before_a_person_is_asked() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    for (verb, code, problem) in [
        (&["dlq", "purge", "orders"][..], 2, "select dead letters"),
        (&["dlq", "purge", "nothing", "--all"], 1, "topic `nothing` does not exist"),
        (&["group", "reset", "orders", "g", "--to", "yesterday"], 2, "expected `beginning`"),
        (&["group", "reset", "orders", "g", "--to", "end"], 1, "no group `g`"),
        (&["group", "delete", "orders", "g"], 1, "no group `g`"),
        (&["topic", "delete", "nothing"], 1, "topic `nothing` does not exist"),
        (&["topic", "trim", "nothing", "--count", "1"], 1, "topic `nothing` does not exist"),
    ] {
        let message = cli.fails(verb, code);
        assert!(message.contains(problem) && !message.contains("--yes"), "{verb:?}: {message}");
    }
    let message = cli.fails(&["topic", "delete", "orders"], 2);
    assert!(
        message.contains("Delete topic `orders` with 0 messages and 0 dead letters?"),
        "{message}"
    );
    assert!(message.contains("help: headwater topic delete orders "), "{message}");
    for verb in [
        &["consume", "orders", "--group", "g", "--count", "0"][..],
        &["tail", "orders", "--count", "0"],
    ] {
        let message = cli.fails(verb, 2);
        assert!(message.contains("expected at least 1"), "{verb:?}: {message}");
    }
}

#[test]
fn every_change_says_what_it_did() {
    let cli = CliFixture::embedded();
    let said = |verb: &[&str]| cli.stdout(verb).trim_end().to_owned();
    assert_eq!(
        said(&["topic", "create", "jobs", "--max-retries", "0"]),
        "created topic `jobs` with 1 partition"
    );
    assert_eq!(
        said(&["topic", "create", "jobs", "--max-retries", "0"]),
        "topic `jobs` already exists with these settings"
    );
    assert!(
        said(&["produce", "jobs", "--payload", "bad", "--id", "7"]).ends_with(" to partition 0")
    );
    assert!(
        said(&["produce", "jobs", "--payload", "bad", "--id", "7"]).ends_with(" was sent before")
    );
    assert!(
        said(&["produce", "jobs", "--payload", "x", "--delay", "1h"]).starts_with("scheduled ")
    );
    let failing = ["consume", "jobs", "--group", "g", "--timeout", "3s", "--exec", "exit 1"];
    cli.run(&failing, "");
    assert_eq!(
        said(&["dlq", "replay", "jobs", "--all", "--dry-run"]),
        "would replay 1 dead letter of topic `jobs`"
    );
    assert_eq!(
        said(&["dlq", "purge", "jobs", "--all", "--dry-run"]),
        "would purge 1 dead letter of topic `jobs`"
    );
    assert_eq!(said(&["dlq", "replay", "jobs", "--all"]), "replayed 1 dead letter of topic `jobs`");
    assert_eq!(
        said(&["dlq", "purge", "jobs", "--all", "--yes"]),
        "purged 0 dead letters of topic `jobs`"
    );
    assert_eq!(
        said(&["topic", "trim", "jobs", "--count", "0", "--yes", "--force"]),
        "removed 2 messages of topic `jobs`"
    );
    let deleted = said(&["group", "delete", "jobs", "g", "--yes"]);
    assert!(deleted.starts_with("deleted group `g` of topic `jobs`; it skipped "), "{deleted}");
    assert_eq!(said(&["topic", "delete", "jobs", "--yes"]), "deleted topic `jobs`");
    assert!(
        said(&["ticket", "new", "--title", "t", "--content", "c"]).starts_with("opened ticket ")
    );
    assert_eq!(
        said(&["outbox", "retry", "--all", "--yes"]),
        "queued 0 dead replies and events for delivery"
    );
    assert_eq!(said(&["issue", "release", "--all", "--yes"]), "released 0 quarantined issues");
    assert_eq!(
        said(&["erase", "--user", "ada", "--yes"]),
        "erased 0 tickets and 0 sessions of user `ada`"
    );
}
