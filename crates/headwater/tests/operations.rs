//! The commands in `README.md` and in the pages of `docs` run, and `docs/operations.md` describes every metric.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use headwater_testkit::{Postgres, Redis, wait_until};
use rustix::process::{Pid, Signal, kill_process_group};
use support::{LIMIT, ServerDir, text};

fn root() -> PathBuf {
    headwater_testkit::package_folder().join("../..")
}

fn document(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// The command blocks of a document.
fn blocks(document: &str) -> Vec<String> {
    let blocks = document.split("```sh\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// Free ports outside the ephemeral range. Processes with other ids get others.
fn ports() -> Vec<u16> {
    let first = 20_000 + u16::try_from(std::process::id() % 1_200).unwrap() * 10;
    let free = (first..32_000).filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.take(3).collect()
}

/// The script with free ports instead of these, and the free addresses.
fn with_free_ports(script: &str, used: &[&str]) -> (String, Vec<String>) {
    let (mut script, free) = (script.to_owned(), ports());
    for (port, free) in used.iter().zip(&free) {
        assert!(script.contains(&format!("127.0.0.1:{port}")), "{port}");
        script = script
            .replace(&format!("127.0.0.1:{port}"), &format!("127.0.0.1:{free}"))
            .replace(&format!("(\"127.0.0.1\", {port})"), &format!("(\"127.0.0.1\", {free})"));
    }
    (script, free.iter().map(|port| format!("127.0.0.1:{port}")).collect())
}

/// Kills everything a script started, on drop.
struct ProcessGroup(Pid);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let _ = kill_process_group(self.0, Signal::KILL);
    }
}

/// The commands as one script that prints the number of each block on standard error.
fn script(blocks: &[String]) -> String {
    let mut script = "set -euo pipefail\n".to_owned();
    for (number, block) in blocks.iter().enumerate() {
        script +=
            &format!("echo '== block {number}' >&2; set -x\n{block}{{ set +x; }} 2>/dev/null\n");
    }
    script + "echo 'this is the end'\n"
}

/// Runs a script in its own directory and returns its output.
fn run(script: &str, variables: &[(&str, &str)]) -> String {
    let dir = ServerDir::new().unwrap();
    // The binary under its installed name.
    let programs = dir.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_headwater"), programs.join("headwater"))
        .unwrap();
    std::fs::write(dir.path().join("commands.sh"), script).unwrap();

    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new("bash");
    command.arg("commands.sh").current_dir(dir.path());
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HEADWATER_"))
    {
        command.env_remove(name);
    }
    command
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("HEADWATER_LOG_LEVEL", "warn")
        .envs(variables.iter().copied());
    // Into files: background processes would keep a pipe open.
    let file = |name: &str| std::fs::File::create(dir.path().join(name)).unwrap();
    command.stdin(Stdio::null()).stdout(file("out")).stderr(file("err")).process_group(0);
    let mut child = command.spawn().unwrap();
    let _group = ProcessGroup(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap());
    let mut status = None;
    let ended = wait_until("the commands to end", LIMIT * 5, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let read = |name: &str| text(&std::fs::read(dir.path().join(name)).unwrap());
    let (out, err) = (read("out"), read("err"));
    assert!(ended.is_ok() && status.unwrap().success(), "{status:?}\n{err}\n{out}");
    assert!(out.ends_with("this is the end\n"), "{err}\n{out}");
    out
}

#[test]
fn every_command_runs_from_top_to_bottom() {
    let blocks = blocks(&document("docs/operations.md"));
    assert!(blocks.len() > 15, "{}", blocks.len());
    let (redis, postgres) = (Redis::start().unwrap(), Postgres::shared().unwrap());
    let database = postgres.database().unwrap();
    let script = script(&blocks)
        .replace("redis://127.0.0.1:6379", &redis.url())
        .replace("postgres://headwater:secret@127.0.0.1/headwater", &database.url());
    let (script, _) = with_free_ports(&script, &["8080", "8081", "8082"]);
    let out = run(&script, &[]);
    assert!(out.contains("My parcel is late") && out.contains("espresso"), "{out}");
}

/// Runs the commands of `docs/topics.md` and checks their output.
fn run_topics(variables: &[(&str, &str)]) {
    let blocks = blocks(&document("docs/topics.md"));
    assert!(blocks.len() > 5, "{}", blocks.len());
    let out = run(&script(&blocks), variables);
    for expected in ["bob gets tea, attempt 3", "the bank is closed", "mocha", "exit code 1"] {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
    assert_eq!(
        out.matches("ada gets ristretto").count(),
        1,
        "its idempotency id is used twice: {out}"
    );
}

#[test]
fn every_command_about_topics_runs_with_nothing_installed() {
    run_topics(&[]);
}

#[test]
fn every_command_about_topics_runs_on_redis() {
    let redis = Redis::start().unwrap();
    run_topics(&[("HEADWATER_STREAM_URL", &redis.url())]);
}

#[test]
fn every_command_about_stream_assignment_runs_on_redis() {
    let redis = Redis::start().unwrap();
    let blocks = blocks(&document("docs/assignment.md"));
    assert_eq!(blocks.len(), 5);
    let out = run(&script(&blocks), &[("HEADWATER_STREAM_URL", &redis.url())]);
    for expected in ["ada works on clicks:berlin for {\"tenant\":\"acme\"}", "as owner 2"] {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
}

#[test]
fn every_command_about_the_main_loop_runs_on_redis() {
    let redis = Redis::start().unwrap();
    let blocks = blocks(&document("docs/bus.md"));
    assert_eq!(blocks.len(), 3);
    let out = run(&script(&blocks), &[("HEADWATER_STREAM_URL", &redis.url())]);
    for file in ["main.rs", "lib.rs", "after.rs"] {
        assert_eq!(out.matches(&format!("{{\"file\":\"{file}\"}}")).count(), 1, "{out}");
    }
    assert_eq!(out.matches("\"request_id\":\"review-7\"").count(), 2, "{out}");
}

#[test]
fn every_command_of_the_readme_runs_except_those_that_build_and_install() {
    let document = document("README.md");
    let blocks = blocks(&document);
    let [demo, checks, topics, inbox, production] = &blocks[..] else {
        panic!("{} blocks", blocks.len());
    };
    assert_eq!((demo.as_str(), checks.as_str()), ("cargo xtask demo\n", "cargo xtask test\n"));
    let without = |block: &str, starts: &[&str]| -> String {
        let is_kept = |line: &&str| !starts.iter().any(|start| line.starts_with(start));
        block.lines().filter(is_kept).map(|line| format!("{line}\n")).collect()
    };
    let topics = without(topics, &["cargo install "]);
    assert_eq!(topics.lines().count(), 3, "{topics}");
    // The handler of the readme is the example that is compiled; here the desk answers.
    let inbox = inbox.replace(
        "cargo run --release -p headwater --example own_handler -- serve &",
        "headwater serve &\nSERVER=$!",
    );
    assert!(inbox.contains("headwater serve &"), "{inbox}");
    let (redis, postgres) = (Redis::start().unwrap(), Postgres::shared().unwrap());
    let database = postgres.database().unwrap();
    let production = without(production, &["redis-server ", "sudo "])
        .replace("redis://127.0.0.1:6379", &redis.url())
        .replace("postgres://headwater:secret@127.0.0.1/headwater", &database.url());
    assert_eq!(production.lines().count(), 4, "{production}");
    let end = "kill $SERVER; wait $SERVER\n".to_owned();
    // The processes in the background answer until the script ends.
    let check = "until headwater status | grep '2 active'; do sleep 0.2; done\n".to_owned();
    let script = script(&[topics, inbox, end, production, check]);
    let (script, free) = with_free_ports(&script, &["8080"]);
    let listen = [("HEADWATER_HTTP_LISTEN", &*free[0]), ("HEADWATER_WORKER_LISTEN", &*free[1])];
    let out = run(&script, &listen);
    for expected in ["ada gets espresso", "\"ticket_id\":", "My parcel is late", "2 active"] {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
}

#[test]
fn every_command_from_a_webhook_to_a_comment_runs() {
    let blocks = blocks(&document("docs/webhooks.md"));
    assert_eq!(blocks.len(), 4);
    let (script, free) = with_free_ports(&script(&blocks), &["8080", "9000"]);
    let out = run(&script, &[("HEADWATER_HTTP_LISTEN", &free[0])]);
    for expected in
        ["\"status\":\"ok\"", "POST /repos/acme/shop/issues/42/comments", "last reply delivered"]
    {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
}

#[test]
fn every_command_about_the_desk_runs() {
    let blocks = blocks(&document("docs/desk.md"));
    assert!(blocks.len() >= 9, "{}", blocks.len());
    let (script, free) = with_free_ports(&script(&blocks), &["8080", "8081", "9000"]);
    let out = run(&script, &[("HEADWATER_HTTP_LISTEN", &free[0])]);
    for expected in [
        "Where is my parcel?",
        "open; answered",
        "is idle",
        "event: message",
        "POST /repos/acme/shop/issues/42/comments It arrives today.",
    ] {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
}

/// Words that look like metric names.
fn metrics(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    let words = text.split(|c: char| !is_name(c)).filter(|word| word.starts_with("headwater_"));
    let names = words.map(|word| word.trim_end_matches('_')).filter(|word| *word != "headwater");
    names.map(str::to_owned).collect()
}

fn measured(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            measured(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            // A metric is a constant with this prefix.
            let constants = text
                .lines()
                .filter(|line| line.contains("const ") && line.contains("\"headwater_"));
            found.extend(constants.flat_map(metrics));
            // A long name is on the line after its constant.
            let alone = text
                .lines()
                .map(str::trim)
                .filter(|line| line.starts_with("\"headwater_") && line.ends_with("\";"));
            found.extend(alone.flat_map(metrics));
        }
    }
}

#[test]
fn every_metric_is_documented_and_every_documented_metric_exists() {
    let mut there = BTreeSet::new();
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        measured(&entry.unwrap().path().join("src"), &mut there);
    }
    // A notification channel and a table of PostgreSQL.
    there.remove("headwater_outbox");
    there.remove("headwater_migrations");
    assert!(there.len() > 60, "{there:?}");
    let document = document("docs/operations.md");
    let (_, tables) = document.split_once("\n## Metrics\n").unwrap();
    assert_eq!(metrics(tables), there);
    // Metrics in alerts are documented as well.
    let unknown: Vec<_> = metrics(&document).difference(&there).cloned().collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}
