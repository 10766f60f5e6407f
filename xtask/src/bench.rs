//! `cargo xtask bench`: the speed of the streams, embedded and on a Redis of their own.

use crate::cargo::{self, cargo};
use crate::failure::Failure;
use crate::setup;

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    setup::system(&[setup::C_COMPILER, setup::REDIS])?;
    let mut bench = cargo(["bench", "-p", "headwater-stream", "--all-features"])?;
    cargo::run("benchmark", bench.args(["--bench", "streams", "--"]).args(arguments))
}
