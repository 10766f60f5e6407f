//! `headwater loop` of the real binary: requests and replies between processes, also when a worker is killed.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::process::{Child, Stdio};

use headwater_testkit::{Redis, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::cli::CliFixture;
use support::{LIMIT, text};

/// A worker process, killed with -9 when dropped.
struct LoopWorker(Child);

impl LoopWorker {
    fn start(cli: &CliFixture, script: &str) -> Self {
        let verb = ["loop", "worker", "reviews", "--exec", script];
        let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
        let mut command = cli.dir.command(&[&verb[..], &direct].concat());
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for LoopWorker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Redis and commands that open it, without a database.
fn fixture(redis: &Redis) -> CliFixture {
    let mut cli = CliFixture::embedded();
    cli.direct_args = vec!["--stream-url".to_owned(), redis.url()];
    cli.args = cli.direct_args.clone();
    cli
}

#[test]
fn a_request_is_executed_by_the_command_of_a_worker_and_its_output_is_the_reply() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let script = r#"printf '{"got": %s, "in": "%s", "attempt": %s}' "$(cat)" "$HEADWATER_NAMESPACE" "$HEADWATER_ATTEMPT""#;
    let mut worker = LoopWorker::start(&cli, script);

    let out = cli.stdout(&["loop", "submit", "reviews", "--request", r#"{"file": "main.rs"}"#]);
    let reply: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(reply, json!({"got": {"file": "main.rs"}, "in": "reviews", "attempt": 1}));
    // From standard input, with an id: repeated, it is not executed again.
    let verb = ["loop", "submit", "reviews", "--id", "r-1"];
    let first = cli.json_of(&verb, "7");
    assert_eq!((&first[0]["request_id"], &first[0]["output"]["got"]), (&json!("r-1"), &json!(7)));
    assert_eq!(cli.json_of(&verb, "7"), first);
    // The original control stream, with the documented types.
    let entries = redis.command(&["xrange", "wink:control:reviews", "-", "+"]).unwrap();
    let shown = format!("{entries:?}");
    assert!(!entries.items().is_empty(), "{shown}");

    kill_process(Pid::from_raw(i32::try_from(worker.0.id()).unwrap()).unwrap(), Signal::TERM)
        .unwrap();
    let mut status = None;
    wait_until("the worker to end", LIMIT, || {
        status = worker.0.try_wait().unwrap();
        status.is_some()
    })
    .unwrap();
    assert!(status.unwrap().success());
}

#[test]
fn failures_of_a_command_are_retried_and_reported() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let script = r#"case $(cat) in
        1) test "$HEADWATER_ATTEMPT" -ge 2 || { echo not yet >&2; exit 1; }; echo '"second"';;
        2) echo no json;;
        *) echo always fails >&2; exit 9;;
    esac"#;
    let _worker = LoopWorker::start(&cli, script);
    assert_eq!(cli.stdout(&["loop", "submit", "reviews", "--request", "1"]).trim(), "\"second\"");
    let message = cli.fails(&["loop", "submit", "reviews", "--request", "2"], 1);
    assert!(message.contains("did not print JSON"), "{message}");
    let message = cli.fails(&["loop", "submit", "reviews", "--request", "3"], 1);
    assert!(message.contains("exit status: 9: always fails"), "{message}");
    assert!(cli.fails(&["loop", "submit", "reviews", "--request", "{"], 2).contains("not JSON"));
    let output = cli.run_at(
        &["loop", "submit", "reviews", "--request", "1"],
        &["--url", "http://127.0.0.1:1"],
        "",
    );
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn a_request_of_a_killed_worker_is_executed_by_another() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let begun = cli.dir.path().join("begun");
    let first = LoopWorker::start(&cli, "touch begun; exec sleep 600");
    let verb = ["loop", "submit", "reviews", "--request", "1", "--timeout", "120s"];
    let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    let mut command = cli.dir.command(&[&verb[..], &direct].concat());
    let submit = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the command to begin", LIMIT, || begun.exists()).unwrap();
    drop(first);
    let _second = LoopWorker::start(&cli, "echo '\"done by another\"'");

    let output = submit.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), "\"done by another\"");
}

/// As another program writes it: three fields, no reply stream, no event id.
#[test]
fn a_request_of_redis_cli_is_executed_and_its_reply_is_on_the_control_stream() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let _worker = LoopWorker::start(&cli, r#"printf '{"got": %s}' "$(cat)""#);
    let output = std::process::Command::new("redis-cli")
        .args(["-p", &redis.port().to_string(), "XADD", "wink:control:reviews", "*"])
        .args(["type", "weakincentives.runtime.main_loop.MainLoopRequest"])
        .args(["payload", r#"{"request_id": "theirs", "request": {"file": "main.rs"}}"#])
        .args(["timestamp", "2026-01-01T00:00:00+00:00"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));

    let completed = || {
        let entries = redis.command(&["xrange", "wink:control:reviews", "-", "+"]).unwrap();
        let texts = entries.items().iter().map(|entry| {
            let fields = entry.items().get(1).map(|fields| fields.items()).unwrap_or_default();
            fields.iter().map(|field| field.text()).collect::<Vec<_>>().join(" ")
        });
        texts.into_iter().find(|text| text.contains("main_loop.MainLoopCompleted"))
    };
    wait_until("the reply", LIMIT, || completed().is_some()).unwrap();
    let reply = completed().unwrap();
    assert!(reply.contains(r#""request_id":"theirs""#), "{reply}");
    assert!(reply.contains(r#"{"got":{"file":"main.rs"}}"#), "{reply}");
}

/// The rules of a page as the words of one command, with this password.
fn acl_rules(page: &str, user: &str) -> Vec<String> {
    let path = headwater_testkit::package_folder().join("../..").join(page);
    let page = std::fs::read_to_string(path).unwrap();
    let start = format!("\nACL SETUSER {user} ");
    let (_, rules) = page.split_once(&start).expect("the page has ACL rules");
    let (rules, _) = rules.split_once("\n```").expect("the rules end");
    let words = rules.split_whitespace().filter(|word| *word != "\\");
    let words = words.map(|word| word.replace("PASSWORD", "secret"));
    ["ACL", "SETUSER", user].into_iter().map(str::to_owned).chain(words).collect()
}

#[test]
fn the_documented_user_of_the_bus_can_run_the_main_loop_and_nothing_else() {
    let redis = Redis::start().unwrap();
    redis.command(&["CONFIG", "SET", "notify-keyspace-events", "Ex"]).unwrap().ok().unwrap();
    let rules = acl_rules("docs/bus.md", "bus");
    let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    redis.command(&rules).unwrap().ok().unwrap();
    let mut cli = fixture(&redis);
    let url = format!("redis://bus:secret@{}/", redis.addr());
    cli.direct_args = vec!["--stream-url".to_owned(), url];
    cli.args = cli.direct_args.clone();

    // With a failed attempt, so that retries are covered, and a killed worker, so that its request is taken over.
    let first = LoopWorker::start(&cli, "touch begun; exec sleep 600");
    let verb = ["loop", "submit", "reviews", "--request", "1", "--timeout", "60s"];
    let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    let mut command = cli.dir.command(&[&verb[..], &direct].concat());
    let submit = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the command to begin", LIMIT, || cli.dir.path().join("begun").exists()).unwrap();
    let script = r#"[ -e failed ] || { touch failed; exit 1; }; printf '{"got": %s}' "$(cat)""#;
    let _second = LoopWorker::start(&cli, script);
    drop(first);
    let output = submit.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), r#"{"got":1}"#);
    assert!(cli.dir.path().join("failed").exists());

    let denied = redis.command(&["ACL", "LOG"]).unwrap();
    assert!(denied.items().is_empty(), "nothing was denied: {denied:?}");
    for topic in ["ticket_events", "issue_work", "orders"] {
        let output = cli.run(&["tail", topic, "--from", "beginning", "--count", "1"], "");
        let message = text(&output.stderr);
        assert!(!output.status.success() && message.contains("NOPERM"), "{message}");
    }
}

#[test]
fn the_settings_of_the_bus_apply_to_the_main_loop() {
    let redis = Redis::start().unwrap();
    let mut cli = fixture(&redis);
    let settings = ["--bus-request-attempts", "2", "--bus-retry-backoff", "1ms"];
    cli.direct_args.extend(settings.map(str::to_owned));
    let _worker = LoopWorker::start(&cli, "echo x >> attempts; exit 9");
    let message = cli.fails(&["loop", "submit", "reviews", "--request", "3"], 1);
    assert!(message.contains("exit status: 9"), "{message}");
    let attempts = std::fs::read_to_string(cli.dir.path().join("attempts")).unwrap();
    assert_eq!(attempts.lines().count(), 2);

    for (flag, value, part) in [
        ("--bus-namespace", "a{b", "`bus.namespace`"),
        ("--bus-breaker-failures", "0", "`bus.breaker_failures`"),
        ("--bus-stream-len-max", "1", "`bus.stream_len_max`"),
    ] {
        let output = cli.run_at(&["config"], &[flag, value], "");
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
    }
}
