//! `cargo xtask demo`: the server at work, embedded, with nothing installed; with analytics where its library is to be had.

use crate::cargo::{self, cargo};
use crate::duckdb;
use crate::failure::Failure;

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    duckdb::provide();
    let mut demo = cargo(["run", "--release", "--package", "headwater"])?;
    if duckdb::folder().is_some() {
        demo.args(["--features", "analytics"]);
    }
    cargo::run("demo", demo.args(["--", "serve", "--demo"]).args(arguments))
}
