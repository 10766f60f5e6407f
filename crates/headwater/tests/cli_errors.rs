//! Every command: invalid arguments and unreachable servers. A command without a line in the table fails.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::time::Instant;

use support::{LIMIT, ServerDir, text};

/// What a command requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requirement {
    /// Nothing.
    Nothing,
    /// Streams, or a server.
    Streams,
    /// Streams; with `--url` it is a usage error.
    StreamsDirect,
    /// A database, or a server.
    Database,
    /// Streams and a database, or a server.
    Both,
    /// Streams and a database; it has no `--url`.
    Direct,
    /// A database; it has no `--url`, and starts without Redis.
    Process,
    /// A server, or a local file.
    ServerOrFile,
}
use Requirement::{Both, Database, Direct, Nothing, Process, ServerOrFile, Streams, StreamsDirect};

/// Every command with valid arguments.
const VERBS: &[(&str, Requirement, &[&str])] = &[
    ("serve", Process, &["--http-listen", "127.0.0.1:0", "--start-wait", "1s"]),
    ("worker", Process, &["--start-wait", "1s"]),
    ("migrate", Process, &["--start-wait", "1s"]),
    ("config", Nothing, &[]),
    ("topic create", Streams, &["orders"]),
    ("topic list", Streams, &[]),
    ("topic describe", Streams, &["orders"]),
    ("topic alter", Streams, &["orders", "--retention-age", "7d"]),
    ("topic grow", Streams, &["orders", "--partitions", "2"]),
    ("topic trim", Streams, &["orders", "--count", "1", "--yes"]),
    ("topic delete", Streams, &["orders", "--yes"]),
    ("produce", Streams, &["orders", "--payload", "x"]),
    ("consume", Streams, &["orders", "--group", "g", "--timeout", "1s"]),
    ("tail", Streams, &["orders"]),
    ("group list", Streams, &["orders"]),
    ("group describe", Streams, &["orders", "g"]),
    ("group why", Streams, &["orders", "g"]),
    ("group owners", Streams, &[]),
    ("group moves", ServerOrFile, &[]),
    ("group reset", Streams, &["orders", "g", "--to", "end", "--yes"]),
    ("group delete", Streams, &["orders", "g", "--yes"]),
    ("pending", Streams, &["orders", "--group", "g"]),
    ("message list", Streams, &["orders"]),
    ("message delayed", Streams, &["orders"]),
    ("message show", Streams, &["orders", "1-1"]),
    ("message why", Streams, &["orders", "1-1"]),
    ("dlq list", Streams, &["orders"]),
    ("dlq show", Streams, &["orders", "1-1"]),
    ("dlq replay", Streams, &["orders", "--all"]),
    ("dlq purge", Streams, &["orders", "--all", "--yes"]),
    ("plan create", Both, &["orders"]),
    ("plan list", Database, &[]),
    ("plan show", Database, &["1"]),
    ("plan pause", Database, &["1"]),
    ("plan resume", Database, &["1"]),
    ("plan cancel", Database, &["1"]),
    ("assign add", Streams, &["encoder", "video-17"]),
    ("assign list", Streams, &["encoder"]),
    ("assign describe", Streams, &["encoder"]),
    ("assign release", Streams, &["encoder", "video-17", "--yes"]),
    ("assign run", StreamsDirect, &["encoder", "--exec", "true"]),
    ("loop worker", StreamsDirect, &["agents", "--exec", "true"]),
    ("loop submit", StreamsDirect, &["agents", "--request", "{}"]),
    ("issue list", Database, &[]),
    ("issue show", Database, &["1"]),
    ("issue event", Database, &["1"]),
    ("issue why", Database, &["1"]),
    ("issue timeline", Database, &["1"]),
    ("issue retry", Database, &["1"]),
    ("issue release", Database, &["1"]),
    ("ticket new", Database, &["--title", "t", "--content", "c"]),
    ("ticket list", Database, &[]),
    ("ticket show", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"]),
    ("ticket follow", Both, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"]),
    ("ticket why", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"]),
    ("ticket reply", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff", "--content", "c"]),
    ("ticket close", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"]),
    ("ticket take", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"]),
    ("ticket assign", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff", "--to", "n"]),
    ("ticket reopen", Database, &["6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"]),
    ("draft list", Database, &[]),
    ("draft show", Database, &["1"]),
    ("draft link", Database, &["1"]),
    ("draft approve", Database, &["1"]),
    ("draft edit", Database, &["1", "--content", "c"]),
    ("draft reject", Database, &["1", "--reason", "r"]),
    ("effect list", Database, &[]),
    ("effect show", Database, &["1"]),
    ("prompt list", Database, &[]),
    ("prompt show", Database, &["desk"]),
    ("prompt set", Database, &["desk", "--content", "c"]),
    ("prompt diff", Database, &["desk"]),
    ("prompt rollback", Database, &["desk"]),
    ("export", Both, &["--user", "ada"]),
    ("erase", Both, &["--user", "ada", "--yes"]),
    ("session list", Both, &[]),
    ("session show", Both, &["s"]),
    ("session replay", Both, &["s"]),
    ("session diff", Both, &["s", "t"]),
    ("session fork", Both, &["s", "t"]),
    ("session export", Both, &["s"]),
    ("session import", Both, &["s"]),
    ("outbox list", Database, &[]),
    ("outbox show", Database, &["1"]),
    ("outbox why", Database, &["1"]),
    ("outbox retry", Database, &["1"]),
    ("webhook list", ServerOrFile, &[]),
    ("webhook rejected", ServerOrFile, &[]),
    ("history", Database, &[]),
    ("audit books", Database, &[]),
    ("audit log", Database, &[]),
    ("top", Streams, &["--once"]),
    ("bench", Direct, &["record", "--count", "1"]),
    ("doctor", Both, &[]),
    ("status", Both, &[]),
    ("overview", Both, &[]),
    ("search", Both, &["router"]),
    ("failure list", Both, &[]),
    ("failure show", Both, &["3f2a51c09d7e8b64"]),
    ("process list", Database, &[]),
    ("process settings", ServerOrFile, &[]),
    ("me", Database, &[]),
    ("completion", Nothing, &["bash"]),
];

/// Commands of analytics, which may not be built in.
const ANALYTICS: &[(&str, Requirement, &[&str])] = &[
    ("sql", ServerOrFile, &["SELECT 1"]),
    ("report", ServerOrFile, &["tickets-per-day"]),
    ("analytics rebuild", ServerOrFile, &["--yes"]),
];

/// The table, with the analytics commands that this binary has.
fn table(dir: &ServerDir) -> Vec<(&'static str, Requirement, &'static [&'static str])> {
    let there = verbs(dir);
    let analytics = ANALYTICS.iter().filter(|(verb, _, _)| there.contains(*verb));
    VERBS.iter().chain(analytics).copied().collect()
}

/// The names below `Commands:` in a help text.
fn below(dir: &ServerDir, path: &[&str]) -> Vec<String> {
    let output = dir.run(&[path, &["--help"]].concat()).unwrap();
    assert!(output.status.success(), "{path:?}");
    let help = text(&output.stdout);
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| !line.trim().is_empty());
    // Names are indented by two spaces, continuation lines by more.
    let names =
        list.filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')));
    let names = names.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Every command of the binary.
fn verbs(dir: &ServerDir) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for verb in below(dir, &[]) {
        let words = below(dir, &[&verb]);
        if words.is_empty() {
            found.insert(verb.clone());
        }
        found.extend(words.iter().map(|word| format!("{verb} {word}")));
    }
    found
}

#[test]
fn every_command_is_in_the_table() {
    let dir = ServerDir::new().unwrap();
    let known = table(&dir).into_iter().map(|(verb, _, _)| verb.to_owned()).collect();
    assert_eq!(verbs(&dir), known);
}

/// By name: some test runs each command for its effect.
#[test]
fn every_command_is_run_by_a_test() {
    let mut tests = String::new();
    read(&headwater_testkit::package_folder().join("tests"), &mut tests);
    // Arguments may be on lines of their own.
    let tests = tests.split_whitespace().collect::<Vec<_>>().join(" ");
    let table = table(&ServerDir::new().unwrap());
    for (verb, _, _) in table.iter().filter(|(verb, _, _)| !["serve", "worker"].contains(verb)) {
        let words: Vec<String> = verb.split(' ').map(|word| format!("\"{word}\"")).collect();
        assert!(tests.contains(&words.join(", ")), "no test runs `{verb}`");
    }
}

/// The text of all other tests.
fn read(folder: &Path, tests: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read(&path, tests);
        } else if !path.ends_with("cli_errors.rs") {
            tests.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn unknown_arguments_are_exit_code_2_with_usage_and_hint() {
    let dir = ServerDir::new().unwrap();
    for (verb, _, right) in table(&dir) {
        let path: Vec<&str> = verb.split(' ').collect();
        let output = dir.run(&[&path[..], right, &["--nonsense"]].concat()).unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{verb}: {message}");
        assert!(message.contains(&format!("Usage: headwater {verb}")), "{verb}: {message}");
        assert!(message.contains("--help"), "{verb}: {message}");
        assert!(output.stdout.is_empty(), "{verb}: {}", text(&output.stdout));
    }
}

#[test]
fn arguments_rejected_by_the_api_are_exit_code_2_with_usage_and_hint() {
    let dir = ServerDir::new().unwrap();
    let direct = ["--stream-url", "embedded:memory", "--database-url", "sqlite:headwater.db"];
    for (words, hint) in [
        (&["topic", "create", "none", "--partitions", "0"][..], "partition"),
        (&["tail", "orders", "--from", "yesterday"][..], "such as"),
        (&["dlq", "replay", "orders"][..], "select dead letters"),
        (&["erase", "--user", "ada"][..], "--yes"),
        (&["session", "show", "no/such name"][..], "session"),
        (&["ticket", "new", "--title", "", "--content", "c"][..], "title"),
        (&["topic", "list", "--url", "ftp://here"][..], "begin with http://"),
        (&["outbox", "retry", "--all"][..], "--yes"),
        (&["issue", "release", "--all"][..], "--yes"),
        (&["outbox", "retry"][..], "--all"),
        (&["issue", "release", "1", "--all"][..], "cannot be used with"),
    ] {
        let output = dir.run(&[words, &direct].concat()).unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {message}");
        assert!(message.contains(hint), "{words:?}: {message}");
        let length = if ["tail", "erase"].contains(&words[0]) { 1 } else { 2 };
        let usage = format!("Usage: headwater {}", words[..length].join(" "));
        assert!(message.contains(&usage), "{words:?}: {message}");
        assert!(message.contains("\nhelp: headwater "), "{words:?}: {message}");
    }
}

/// Arguments for unreachable servers.
fn unreachable_args(needs: Requirement, port: u16) -> Vec<Vec<String>> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let server = words(&["--url", &format!("http://127.0.0.1:{port}")]);
    let streams = words(&["--stream-url", &format!("redis://127.0.0.1:{port}")]);
    let database = format!("postgres://nobody:nothing@127.0.0.1:{port}/none");
    let memory = match needs {
        // These commands do not need the streams, so an unreachable Redis does not matter.
        Database => format!("redis://127.0.0.1:{port}"),
        _ => "embedded:memory".to_owned(),
    };
    let database = words(&["--stream-url", &memory, "--database-url", &database]);
    match needs {
        Nothing => vec![],
        ServerOrFile => vec![server],
        Streams => vec![server, streams],
        StreamsDirect => vec![streams],
        Database => vec![server, database],
        Both => vec![server, streams, database],
        Direct => vec![streams, database],
        Process => vec![database],
    }
}

#[test]
fn an_unreachable_server_is_exit_code_3_within_the_deadline_of_every_command() {
    // A port without a listener: it was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut cases = Vec::new();
    for (verb, needs, right) in table(&ServerDir::new().unwrap()) {
        for args in unreachable_args(needs, port) {
            let words: Vec<String> =
                verb.split(' ').chain(right.iter().copied()).map(str::to_owned).collect();
            cases.push([words, args].concat());
        }
    }
    assert!(cases.len() > 80, "{}", cases.len());
    // They only wait, so many can run at once.
    for some in cases.chunks(24) {
        let dir = ServerDir::new().unwrap();
        let started = Instant::now();
        let running: Vec<_> = some
            .iter()
            .map(|words| {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let mut command = dir.command(&words);
                command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
                command.spawn().unwrap()
            })
            .collect();
        for (words, child) in some.iter().zip(running) {
            let output = child.wait_with_output().unwrap();
            let message = [text(&output.stdout), text(&output.stderr)].concat();
            assert_eq!(output.status.code(), Some(3), "{words:?}: {message}");
            assert!(message.contains("unreachable"), "{words:?}: {message}");
        }
        // The deadline is five seconds; the rest is for a busy machine.
        assert!(started.elapsed() < LIMIT * 5, "{some:?}");
    }
}

#[test]
fn a_ticket_is_stored_while_redis_is_unreachable_and_the_user_is_told() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let dir = ServerDir::new().unwrap();
    let streams = format!("redis://127.0.0.1:{port}");
    let to = ["--stream-url", &streams, "--database-url", "sqlite:headwater.db"];
    let new = ["ticket", "new", "--title", "Wi-Fi", "--content", "It is slow.", "--user", "ada"];
    let output = dir.run(&[&new[..], &to].concat()).unwrap();
    let message = text(&output.stderr);
    assert!(output.status.success(), "{message}");
    assert!(message.contains("the workers were not notified"), "{message}");
    let output = dir.run(&[&["ticket", "list"][..], &to].concat()).unwrap();
    assert!(text(&output.stdout).contains("Wi-Fi"), "{output:?}");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn an_invalid_id_is_explained() {
    let dir = ServerDir::new().unwrap();
    for (words, hint) in [
        (&["ticket", "show", "x"][..], "expected a UUID"),
        (&["ticket", "reopen", "7"], "expected a UUID"),
        (&["issue", "show", "abc"], "expected a numeric id"),
        (&["outbox", "retry", "abc"], "expected a numeric id"),
    ] {
        let output = dir.run(words).unwrap();
        let message = text(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(hint), "{words:?}: {message}");
    }
}

#[test]
fn read_only_commands_create_no_files_and_say_what_is_missing() {
    let dir = ServerDir::new().unwrap();
    for (words, code) in [
        (&["topic", "list"][..], 0),
        (&["topic", "describe", "orders"], 1),
        (&["group", "list", "orders"], 1),
        (&["dlq", "list", "orders"], 1),
        (&["pending", "orders", "--group", "g"], 1),
        (&["top", "--once"], 0),
        (&["status"], 0),
        (&["issue", "list"], 0),
        (&["issue", "why", "1"], 1),
        (&["issue", "timeline", "1"], 1),
        (&["ticket", "list"], 0),
        (&["ticket", "show", "6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"], 1),
        (&["session", "list"], 0),
        (&["session", "show", "s"], 1),
        (&["outbox", "list"], 0),
        (&["audit"], 0),
        (&["audit", "log"], 0),
        (&["doctor"], 4),
    ] {
        let output = dir.run(words).unwrap();
        let message = [text(&output.stdout), text(&output.stderr)].concat();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {message}");
        assert!(message.contains("at `headwater-data"), "{words:?}: {message}");
        assert!(!dir.path().join("headwater-data").exists(), "{words:?}");
    }
    // A configured database that does not exist is an error.
    for words in [&["audit"][..], &["audit", "log"]] {
        let given = [words, &["--database-url", "sqlite:some%20where.db"]].concat();
        let output = dir.run(&given).unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {message}");
        assert!(
            message.contains("database `some where.db` does not exist"),
            "{words:?}: {message}"
        );
    }
    // A change creates what it needs.
    assert!(dir.run(&["topic", "create", "orders"]).unwrap().status.success());
    assert!(dir.path().join("headwater-data").exists());
}
