//! `cargo xtask demo`: the binary at work, on the embedded backend, with nothing installed.

use crate::cargo::{self, cargo};
use crate::failure::Failure;

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    // Without optimisation: the first look at Headwater should not wait for the compiler.
    let mut demo = cargo(["run", "--package", "headwater", "--", "demo"])?;
    cargo::run("demo", demo.args(arguments))
}
