//! `consume --exec` of the real binary: the command's input, and its fate when the consumer is killed.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use headwater_testkit::{is_alive, wait_until};
use sha2::{Digest, Sha256};

use crate::support::LIMIT;
use crate::support::cli::CliFixture;

/// Larger than a pipe buffer.
const PAYLOAD_BYTES: usize = 400_000;

fn payload() -> String {
    (0..)
        .flat_map(|n: u32| format!("{n} ").into_bytes())
        .take(PAYLOAD_BYTES)
        .map(char::from)
        .collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

fn produce(cli: &CliFixture, topic: &str, payload: &str) {
    let sent = cli.json_of(&["produce", topic, "--payload", "-"], payload);
    assert_eq!(sent.len(), 1, "{sent:?}");
}

/// Starts a consumer that runs a script for each message.
fn consumer(cli: &CliFixture, group: &str, script: &str, more: &[&str]) -> Child {
    let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    let verb = ["consume", "jobs", "--group", group, "--exec", script];
    let mut command = cli.dir.command(&[&verb[..], more, &direct].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn process_ids(path: &Path) -> Vec<u32> {
    lines(path).iter().flat_map(|line| line.split(' ')).map(|pid| pid.parse().unwrap()).collect()
}

/// Waits until none of the processes is running.
fn none_survives(path: &Path) {
    for pid in process_ids(path) {
        let what = format!("process {pid} of a killed consumer to end");
        wait_until(&what, LIMIT, || !is_alive(pid)).unwrap();
    }
}

#[test]
fn a_command_gets_length_and_checksum_of_its_payload() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "jobs"]);
    let payload = payload();
    produce(&cli, "jobs", &payload);
    produce(&cli, "jobs", "x");
    let script = r#"set -- $(sha256sum); echo "$HEADWATER_PAYLOAD_BYTES $HEADWATER_PAYLOAD_SHA256 $1" >> seen"#;
    let verb = ["consume", "jobs", "--group", "g", "--count", "2", "--exec", script];
    let output = cli.run(&verb, "");
    assert!(output.status.success(), "{}", support::text(&output.stderr));
    let expected = [payload.as_str(), "x"].map(|payload| {
        let sha256 = sha256(payload.as_bytes());
        format!("{} {sha256} {sha256}", payload.len())
    });
    assert_eq!(lines(&cli.dir.path().join("seen")), expected);
}

#[test]
fn the_failure_reason_is_the_end_of_standard_error() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "jobs", "--max-retries", "0"]);
    produce(&cli, "jobs", "x");
    let script = "head -c 100000 /dev/zero | tr '\\0' y >&2; echo last >&2; exit 7";
    let verb = ["consume", "jobs", "--group", "g", "--timeout", "5s", "--exec", script];
    let stderr = support::text(&cli.run(&verb, "").stderr);
    let (_, reason) = stderr.trim().split_once("becomes a dead letter: ").unwrap();
    assert!(reason.contains("exit status: 7") && reason.ends_with("ylast"), "{reason}");
    assert!(reason.len() < 1000, "{}", reason.len());
}

/// The command reads its input only after the kill, so the consumer cannot have written all of it to a pipe.
#[test]
fn killing_the_consumer_kills_its_command_and_children() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "jobs"]);
    produce(&cli, "jobs", &payload());
    let file = |name: &str| cli.dir.path().join(name);
    let script = r#"sleep 600 & echo "$$ $!" > begun.new; mv begun.new begun
        until [ -e killed ]; do sleep 0.02; done
        wc -c >> ended"#;
    let mut child = consumer(&cli, "g", script, &[]);
    wait_until("the command to begin", LIMIT, || file("begun").exists()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::write(file("killed"), "").unwrap();

    none_survives(&file("begun"));
    let whole = PAYLOAD_BYTES.to_string();
    for ended in lines(&file("ended")) {
        assert_eq!(ended.trim(), whole, "a command accepted a truncated payload");
    }
}

#[test]
fn commands_of_randomly_killed_consumers_read_whole_payloads_and_do_not_survive() {
    let kills = number("HEADWATER_COMMAND_KILLS").unwrap_or(6);
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = number("HEADWATER_SEED").unwrap_or(clock.as_nanos() as u64) | 1;
    println!("HEADWATER_SEED={seed} HEADWATER_COMMAND_KILLS={kills}");
    let mut state = seed;
    let mut below = |limit: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % limit
    };
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "jobs", "--partitions", "4"]);
    let payload = payload();
    for _ in 0..20 {
        produce(&cli, "jobs", &payload);
    }
    let file = |name: &str| cli.dir.path().join(name);
    let script = r#"echo $$ >> begun; set -- $(sha256sum); echo "$1" >> ended"#;
    for kill in 0..kills {
        let _ = std::fs::remove_file(file("begun"));
        // A new group each time, so that no lease of a killed consumer has to expire.
        let group = format!("g{kill}");
        let mut child = consumer(&cli, &group, script, &["--concurrency", "4"]);
        let wanted = 1 + below(15) as usize;
        wait_until("commands to begin", LIMIT, || lines(&file("begun")).len() >= wanted).unwrap();
        std::thread::sleep(Duration::from_micros(below(20_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        none_survives(&file("begun"));
    }
    let (ended, whole) = (lines(&file("ended")), sha256(payload.as_bytes()));
    println!("{} commands ended normally", ended.len());
    assert!(!ended.is_empty());
    let cut = ended.iter().filter(|sum| **sum != whole).count();
    assert_eq!(cut, 0, "of {} commands that ended normally, seed {seed}", ended.len());
}
