//! `cargo xtask bench`: the speed of streams and queue, embedded and on a Redis of their own, what heartbeats and waiting
//! cost, and the speed of issues on SQLite and on a Postgres of their own.

use crate::cargo::{self, cargo};
use crate::failure::Failure;
use crate::setup;

/// What is measured, from the bottom up.
const BENCHES: [(&str, &[&str]); 3] = [
    ("headwater-stream", &["streams", "heartbeat", "waiting"]),
    ("headwater-queue", &["queue"]),
    ("headwater-issue", &["store", "flow"]),
];

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    setup::system(&[setup::C_COMPILER, setup::REDIS, setup::POSTGRES])?;
    for (package, names) in BENCHES {
        let mut bench = cargo(["bench", "-p", package, "--all-features"])?;
        for name in names {
            bench.args(["--bench", name]);
        }
        cargo::run("benchmark", bench.arg("--").args(arguments))?;
    }
    Ok(())
}
