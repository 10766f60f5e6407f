//! `cargo xtask bench`: the speed of the streams, embedded and on a Redis of their own, and what heartbeats and waiting cost.

use crate::cargo::{self, cargo};
use crate::failure::Failure;
use crate::setup;

/// The benchmarks of `headwater-stream`.
const BENCHES: [&str; 3] = ["streams", "heartbeat", "waiting"];

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    setup::system(&[setup::C_COMPILER, setup::REDIS])?;
    let mut bench = cargo(["bench", "-p", "headwater-stream", "--all-features"])?;
    for name in BENCHES {
        bench.args(["--bench", name]);
    }
    cargo::run("benchmark", bench.arg("--").args(arguments))
}
