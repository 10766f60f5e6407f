//! `cargo xtask test`: installs the tools and runs all checks and tests.
//!
//! Cheap checks run first. The tests run last, so that their summary ends the output.

use std::process::Command;
use std::time::Instant;

use crate::cargo::{self, cargo};
use crate::duckdb::cargo_on_everything;
use crate::exit::ExitError;
use crate::{redis_versions, setup, tidy};

/// Tests that measure how long healthy work stops. Beside the others, which keep every processor busy, they would measure how long
/// tasks wait for a processor.
pub(crate) const MEASURING: &str = "test(/dead_shard/) | binary(dead_shard)";
const MEASURING_THREADS: &str = "--test-threads=3";

pub(crate) fn run(nextest_arguments: &[String]) -> Result<(), ExitError> {
    let started = Instant::now();

    heading("set-up", started);
    setup::everything()?;
    heading("tidy", started);
    tidy::run()?;
    for (step, mut command) in checks()? {
        heading(step, started);
        cargo::run(step, &mut command)?;
    }

    heading("tests", started);
    if nextest_arguments.is_empty() {
        run_tests("tests", "all()", |_| {})?;
    } else {
        for mut tests in cargo_on_everything(&["nextest", "run"])? {
            cargo::run("tests", tests.args(nextest_arguments))?;
        }
    }
    for server in redis_versions::provide()? {
        heading(&format!("tests on {}", server.name), started);
        run_tests(server.name, &server.tests, |tests| {
            tests.env(redis_versions::VARIABLE, &server.path);
        })?;
    }
    Ok(())
}

/// Runs the tests of a filter: first those that measure.
fn run_tests(step: &str, filter: &str, prepare: impl Fn(&mut Command)) -> Result<(), ExitError> {
    let measuring = (format!("({filter}) & ({MEASURING})"), Some(MEASURING_THREADS));
    let others = (format!("({filter}) & !({MEASURING})"), None);
    let mut failed = None;
    for (filter, threads) in [measuring, others] {
        for mut tests in cargo_on_everything(&["nextest", "run", "--no-tests", "pass"])? {
            prepare(tests.args(["-E", &filter]).args(threads));
            // The others run all the same: one run shows everything that is broken.
            failed = failed.or(cargo::run(step, &mut tests).err());
        }
    }
    failed.map_or(Ok(()), Err)
}

/// All checks except the tests, with their headings.
fn checks() -> Result<Vec<(&'static str, Command)>, ExitError> {
    let mut checks = vec![("format", cargo(["fmt", "--all", "--check"])?)];
    for mut clippy in cargo_on_everything(&["clippy", "--all-targets"])? {
        clippy.args(["--", "-D", "warnings"]);
        checks.push(("clippy", clippy));
    }

    // Builds features alone, because a feature may rely on what others enable.
    let alone = |package: &str, feature: &str| {
        cargo(["check", "-p", package, "--no-default-features", "--features", feature])
    };

    checks.extend([
        ("headwater-stream without a backend", alone("headwater-stream", "")?),
        (
            "headwater-stream with the embedded backend alone",
            alone("headwater-stream", "embedded")?,
        ),
        ("headwater-stream with the Redis backend alone", alone("headwater-stream", "redis")?),
        (
            "headwater-conformance with the stream suite alone",
            alone("headwater-conformance", "stream")?,
        ),
        ("headwater-conformance with the bus suite alone", alone("headwater-conformance", "bus")?),
        (
            "headwater-conformance with the issue suite alone",
            alone("headwater-conformance", "issue")?,
        ),
        ("headwater-issue with the SQLite store alone", alone("headwater-issue", "sqlite")?),
        ("headwater-issue with the PostgreSQL store alone", alone("headwater-issue", "postgres")?),
        ("headwater-analytics without DuckDB", alone("headwater-analytics", "")?),
        ("headwater without analytics", alone("headwater", "")?),
    ]);

    for mut documentation in cargo_on_everything(&["doc", "--no-deps"])? {
        documentation.env("RUSTDOCFLAGS", "-D warnings");
        checks.push(("documentation", documentation));
    }
    for examples in cargo_on_everything(&["test", "--doc"])? {
        checks.push(("examples in the documentation", examples));
    }
    Ok(checks)
}

fn heading(step: &str, started: Instant) {
    eprintln!("\n== {step} (after {} s)", started.elapsed().as_secs());
}
