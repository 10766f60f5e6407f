//! `cargo xtask test`: from a machine with nothing but Rust to the verdict of the test runner.
//!
//! Cheap checks stand first. The tests stand last, so that the run closes with their summary.

use std::process::Command;
use std::time::Instant;

use crate::cargo::{self, cargo};
use crate::failure::Failure;
use crate::{setup, tidy};

pub(crate) fn run(nextest_arguments: &[String]) -> Result<(), Failure> {
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
    let mut tests = cargo(["nextest", "run", "--workspace", "--all-features"])?;
    cargo::run("tests", tests.args(nextest_arguments))
}

/// Everything but the tests, each with its heading.
fn checks() -> Result<Vec<(&'static str, Command)>, Failure> {
    let mut clippy = cargo(["clippy", "--workspace", "--all-targets", "--all-features"])?;
    clippy.args(["--", "-D", "warnings"]);

    // A feature that is only ever built beside others may miss what they bring along.
    let alone = |package: &str, feature: &str| {
        cargo(["check", "-p", package, "--no-default-features", "--features", feature])
    };

    let mut documentation = cargo(["doc", "--workspace", "--no-deps", "--all-features"])?;
    documentation.env("RUSTDOCFLAGS", "-D warnings");

    Ok(vec![
        ("format", cargo(["fmt", "--all", "--check"])?),
        ("clippy", clippy),
        ("headwater-stream without a backend", alone("headwater-stream", "")?),
        (
            "headwater-stream with the embedded backend alone",
            alone("headwater-stream", "embedded")?,
        ),
        ("headwater-stream with the Redis backend alone", alone("headwater-stream", "redis")?),
        ("headwater-issue with the SQLite store alone", alone("headwater-issue", "sqlite")?),
        ("headwater-issue with the Postgres store alone", alone("headwater-issue", "postgres")?),
        ("documentation", documentation),
        (
            "examples in the documentation",
            cargo(["test", "--doc", "--workspace", "--all-features"])?,
        ),
    ])
}

fn heading(step: &str, started: Instant) {
    eprintln!("\n== {step} (after {} s)", started.elapsed().as_secs());
}
