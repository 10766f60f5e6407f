//! `cargo xtask demo`: the server at work, embedded, with nothing installed.

use crate::cargo::{self, cargo};
use crate::failure::Failure;

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    let mut demo = cargo(["run", "--release", "--package", "headwater", "--", "serve", "--demo"])?;
    cargo::run("demo", demo.args(arguments))
}
