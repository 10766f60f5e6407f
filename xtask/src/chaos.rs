//! `cargo xtask chaos`: the crash tests, the differential tests, the fault tests and the simulations with more work, under a
//! time limit. Ends with the sum of what the tests counted: messages sent, handled, doubled and lost, and the longest stop
//! of a partition of a healthy server.
//!
//! Guarantees: the run ends soon after its limit, and servers that tests started end with it,
//! because the test runner is asked to stop before it is made to.

use std::ffi::OsStr;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fmt, fs, thread};

use crate::cargo;
use crate::duckdb::{self, cargo_on_everything};
use crate::exit::ExitError;
use crate::setup;

/// Work per minute of the limit, by the variable that the tests read.
const WORK: [(&str, u32); 7] = [
    ("HEADWATER_SEQUENCES", 100),
    ("HEADWATER_KILLS", 200),
    ("HEADWATER_STEPS", 14),
    ("HEADWATER_FAULTS", 12),
    ("HEADWATER_WEBHOOKS", 200),
    ("HEADWATER_STALL_SECONDS", 10),
    ("HEADWATER_COMMAND_KILLS", 7),
];

/// They run first, and two at a time.
const MEASURING: ChaosPass = ChaosPass { filter: crate::test::MEASURING, threads: Some("2") };
/// All others.
const LOADING: ChaosPass = ChaosPass {
    filter: "(binary(/differential|crash|simulation|chaos|clock_steps|consume_exec|full_disk|fault_matrix|topologies/)
     | binary(/^(redis_(append_order|client|clocks|disconnect_reader|discovery|failures)|rebalance|database_pools|kill_points)$/)
     | binary(/^(start_without_redis|streams_unavailable)$/)
     | test(/differential|crash|full_server|slot_migration|data_loss|lost_replies|lost_nudges|outage|tests::processes::/)
     | (binary(consuming) & test(/^deleted::/))) & !(test(/dead_shard/) | binary(dead_shard))",
    threads: None,
};

/// Tests that run together.
struct ChaosPass {
    filter: &'static str,
    /// Tests at a time; by default as many as the profile says.
    threads: Option<&'static str>,
}

/// The file to which tests add a line of counts each.
const REPORT_VARIABLE: &str = "HEADWATER_CHAOS_REPORT";
/// When the simulations begin no further fault, in seconds since 1970.
const END_VARIABLE: &str = "HEADWATER_CHAOS_END";
/// The part of the limit in which the simulations begin faults, in percent. The rest is for what remains to be handled.
const FAULTS_PERCENT: u32 = 70;

/// Exit code of a stopped run, as for `timeout`.
const STOPPED: u8 = 124;

const POLL_EVERY: Duration = Duration::from_millis(200);
/// Time for the test runner to stop its tests before it is killed.
const GRACE: Duration = Duration::from_secs(30);

pub(crate) fn run(minutes: u32) -> Result<(), ExitError> {
    setup::system(&[setup::C_COMPILER, setup::REDIS, setup::POSTGRES])?;
    setup::nextest()?;
    duckdb::provide();

    // Build first, so that compilation does not count towards the time limit.
    let nextest = ["nextest", "run", "--profile", "chaos"];
    for mut build in cargo_on_everything(&nextest)? {
        cargo::run("build", build.arg("--no-run"))?;
    }

    let limit = Duration::from_secs(60 * u64::from(minutes));
    let end = Instant::now() + limit;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let last_fault = (now + limit * FAULTS_PERCENT / 100).as_secs().to_string();
    let report = env::temp_dir().join(format!("headwater-chaos-{}.jsonl", std::process::id()));
    let amounts = WORK.map(|(variable, per_minute)| {
        (variable, amount(env::var(variable).ok(), per_minute, minutes))
    });
    for (variable, amount) in &amounts {
        eprintln!("{variable}={amount}");
    }
    let result = run_tests(
        &nextest,
        &amounts,
        &[(REPORT_VARIABLE, report.as_os_str()), (END_VARIABLE, last_fault.as_ref())],
        end,
        minutes,
    );
    // Also after a failure: the counts say what happened until then.
    let totals = ChaosTotals::read(&fs::read_to_string(&report).unwrap_or_default());
    eprintln!("{totals}");
    let _ = fs::remove_file(&report);
    result?;
    if totals.tests == 0 {
        return Err(ExitError::new("no test counted a message: the filters match none of them"));
    }
    Ok(())
}

fn run_tests(
    nextest: &[&str],
    amounts: &[(&str, String)],
    environment: &[(&str, &OsStr)],
    end: Instant,
    minutes: u32,
) -> Result<(), ExitError> {
    let mut failed = None;
    for pass in [MEASURING, LOADING] {
        for mut tests in cargo_on_everything(nextest)? {
            tests.args(["--no-tests", "pass", "-E", pass.filter]).envs(amounts.iter().cloned());
            tests.args(pass.threads.map(|threads| format!("--test-threads={threads}")));
            tests.envs(environment.iter().copied());
            let child =
                tests.spawn().map_err(|error| cargo::cannot_start("chaos", &tests, &error))?;
            let Some(status) = wait(child, end.saturating_duration_since(Instant::now()))? else {
                return Err(ExitError::with_code(
                    format!(
                        "the run was stopped at its limit of {minutes} min before it completed"
                    ),
                    STOPPED,
                ));
            };
            // The other pass runs all the same: one run shows everything that is broken.
            failed = failed.or(cargo::ended("chaos", status).err());
        }
    }
    failed.map_or(Ok(()), Err)
}

/// The sum of the counts of all tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct ChaosTotals {
    tests: u64,
    sent: u64,
    handled: u64,
    doubled: u64,
    lost: u64,
    longest_stop_ms: u64,
    longest_loss_window_ms: u64,
}

impl ChaosTotals {
    /// Adds up the lines of a report (`headwater-testkit/src/chaos_report.rs`). Incomplete lines are skipped.
    fn read(report: &str) -> Self {
        let mut totals = Self::default();
        for line in report.lines() {
            let number = |name: &str| -> Option<u64> {
                let (_, rest) = line.split_once(&format!("\"{name}\":"))?;
                rest.split([',', '}']).next()?.parse().ok()
            };
            let names =
                ["sent", "handled", "doubled", "lost", "longest_stop_ms", "longest_loss_window_ms"];
            let [Some(sent), Some(handled), Some(doubled), Some(lost), Some(stop), Some(window)] =
                names.map(number)
            else {
                continue;
            };
            totals.tests += 1;
            totals.sent += sent;
            totals.handled += handled;
            totals.doubled += doubled;
            totals.lost += lost;
            totals.longest_stop_ms = totals.longest_stop_ms.max(stop);
            totals.longest_loss_window_ms = totals.longest_loss_window_ms.max(window);
        }
        totals
    }
}

impl fmt::Display for ChaosTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tests, sent, handled, doubled, lost, longest_stop_ms, longest_loss_window_ms } =
            self;
        write!(
            f,
            "chaos: {tests} tests counted {sent} messages sent, {handled} handled, {doubled} doubled, {lost} lost with unreplicated \
             writes; the longest stop of a healthy partition was {longest_stop_ms} ms; the longest time in which unreplicated writes \
             could be lost was {longest_loss_window_ms} ms"
        )
    }
}

/// The amount of work; a value set by the caller takes precedence.
fn amount(chosen: Option<String>, per_minute: u32, minutes: u32) -> String {
    chosen.unwrap_or_else(|| (u64::from(per_minute) * u64::from(minutes)).to_string())
}

/// Waits for `child`; after `limit` terminates it and returns `None`.
fn wait(mut child: Child, limit: Duration) -> Result<Option<ExitStatus>, ExitError> {
    if let Some(status) = poll(&mut child, limit)? {
        return Ok(Some(status));
    }
    // `kill` is a shell builtin; the program may not be installed.
    let terminate = format!("kill -TERM {}", child.id());
    let _ = Command::new("sh").args(["-c", &terminate]).status();
    if poll(&mut child, GRACE)?.is_none() {
        child.kill().and_then(|()| child.wait()).map_err(|error| lost(&error))?;
    }
    Ok(None)
}

fn poll(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>, ExitError> {
    let started = Instant::now();
    loop {
        let status = child.try_wait().map_err(|error| lost(&error))?;
        if status.is_some() || started.elapsed() >= limit {
            return Ok(status);
        }
        thread::sleep(POLL_EVERY);
    }
}

fn lost(error: &std::io::Error) -> ExitError {
    ExitError::new(format!("waiting for the test run failed: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).spawn().unwrap()
    }

    #[test]
    fn the_work_grows_with_the_limit_unless_the_caller_chose_it() {
        assert_eq!(amount(None, 200, 10), "2000");
        assert_eq!(amount(Some("7".to_owned()), 200, 10), "7");
    }

    #[test]
    fn the_counts_of_all_tests_are_added_up() {
        let report = concat!(
            "{\"test\":\"a\",\"sent\":5,\"handled\":4,\"doubled\":2,\"lost\":1,\"longest_stop_ms\":70,\"longest_loss_window_ms\":8}\n",
            "{\"test\":\"b\",\"sent\":3,\"handled\":3,\"doubled\":0,\"lost\":0,\"longest_stop_ms\":900,\"longest_loss_window_ms\":7}\n",
            "{\"test\":\"c\",\"sent\":3,",
        );
        let expected = ChaosTotals {
            tests: 2,
            sent: 8,
            handled: 7,
            doubled: 2,
            lost: 1,
            longest_stop_ms: 900,
            longest_loss_window_ms: 8,
        };
        assert_eq!(ChaosTotals::read(report), expected);
        assert_eq!(ChaosTotals::read(""), ChaosTotals::default());
    }

    #[test]
    fn a_run_within_its_limit_keeps_its_verdict() {
        let status = wait(shell("exit 3"), Duration::from_secs(60)).unwrap();
        assert_eq!(status.and_then(|status| status.code()), Some(3));
    }

    #[test]
    fn a_run_past_its_limit_is_ended() {
        let started = Instant::now();
        let status = wait(shell("exec sleep 60"), Duration::from_millis(1)).unwrap();
        assert_eq!(status, None);
        assert!(started.elapsed() < GRACE, "SIGTERM was enough");
    }
}
