//! `cargo xtask chaos`: the crash tests, the differential tests and the simulation with more work, under a time limit.
//!
//! Guarantees: the run ends soon after its limit, and servers that tests started end with it,
//! because the test runner is asked to stop before it is made to.

use std::env;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use crate::cargo;
use crate::duckdb::{self, cargo_on_everything};
use crate::exit::ExitError;
use crate::setup;

/// Work per minute of the limit, by the variable that the tests read.
const WORK: [(&str, u32); 7] = [
    ("HEADWATER_SEQUENCES", 2000),
    ("HEADWATER_KILLS", 200),
    ("HEADWATER_STEPS", 14),
    ("HEADWATER_FAULTS", 12),
    ("HEADWATER_WEBHOOKS", 200),
    ("HEADWATER_STALL_SECONDS", 10),
    ("HEADWATER_COMMAND_KILLS", 6),
];

const FILTER: &str =
    "binary(/differential|crash|simulation|chaos|clock_steps|consume_exec|full_disk/)
     | test(/differential|crash/)";

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

    let end = Instant::now() + Duration::from_secs(60 * u64::from(minutes));
    let amounts = WORK.map(|(variable, per_minute)| {
        (variable, amount(env::var(variable).ok(), per_minute, minutes))
    });
    for (variable, amount) in &amounts {
        eprintln!("{variable}={amount}");
    }
    for mut tests in cargo_on_everything(&nextest)? {
        tests.args(["--no-tests", "pass", "-E", FILTER]).envs(amounts.iter().cloned());
        let child = tests.spawn().map_err(|error| cargo::cannot_start("chaos", &tests, &error))?;
        match wait(child, end.saturating_duration_since(Instant::now()))? {
            Some(status) => cargo::ended("chaos", status)?,
            None => {
                return Err(ExitError::with_code(
                    format!(
                        "the run was stopped at its limit of {minutes} min before it completed"
                    ),
                    STOPPED,
                ));
            }
        }
    }
    Ok(())
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
