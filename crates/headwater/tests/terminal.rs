//! Output for people contains no terminal control characters; output for programs is exact.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};

use crate::support::cli::CliFixture;
use crate::support::text;

/// Escape sequences, C1 controls, bidirectional overrides and isolates, zero-width characters.
const NASTY: &str = "a\u{1b}[2J\u{7f}\u{9b}31m\u{202e}\u{2066}\u{200b}\u{feff}z";

fn nasty_in(printed: &str) -> Vec<char> {
    let is_nasty = |c: &char| *c != 'a' && *c != 'z' && !c.is_ascii_graphic() && NASTY.contains(*c);
    printed.chars().filter(is_nasty).collect()
}

#[test]
fn output_is_escaped_for_people_and_exact_for_programs() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "jobs", "--max-retries", "0"]);
    cli.json(&["produce", "jobs", "--key", NASTY, "--payload", NASTY]);

    let tail = ["tail", "jobs", "--from", "beginning", "--count", "1"];
    let consume = |group| ["consume", "jobs", "--group", group, "--count", "1", "--timeout", "90s"];
    for verb in [&tail[..], &consume("people")] {
        let message = cli.stdout(verb);
        assert!(nasty_in(&message).is_empty(), "{verb:?}: {message:?}");
        let value: Value = serde_json::from_str(&message).unwrap();
        assert_eq!((&value["payload"], &value["key"]), (&json!(NASTY), &json!(NASTY)), "{verb:?}");
    }
    for verb in [&tail[..], &consume("programs")] {
        let message = cli.stdout(&[verb, &["--json"]].concat());
        assert!(message.contains("\u{9b}31m\u{202e}\u{2066}\u{200b}"), "{verb:?}: {message:?}");
    }

    // The reason comes from the command's standard error: arbitrary bytes.
    let script = "cat >&2; exit 1";
    let failing = ["consume", "jobs", "--group", "g", "--timeout", "3s", "--exec", script];
    let stderr = text(&cli.run(&failing, "").stderr);
    assert!(stderr.contains("becomes a dead letter"), "{stderr}");
    assert!(nasty_in(&stderr).is_empty(), "{stderr:?}");
    let list = cli.stdout(&["dlq", "list", "jobs"]);
    assert!(list.contains("a\\u001b[2J") && nasty_in(&list).is_empty(), "{list:?}");
    let letter = &cli.json(&["dlq", "list", "jobs"])[0];
    assert!(letter["reason"].as_str().unwrap().contains(NASTY), "{letter}");
    let shown = cli.stdout(&["dlq", "show", "jobs", letter["id"].as_str().unwrap()]);
    assert!(nasty_in(&shown).is_empty(), "{shown:?}");
}
