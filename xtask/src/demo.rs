//! `cargo xtask demo`: the server at work, embedded, with nothing installed; with analytics where its library is to be had.

use crate::cargo::{self, cargo};
use crate::duckdb;
use crate::exit::ExitError;

pub(crate) fn run(arguments: &[String]) -> Result<(), ExitError> {
    duckdb::provide();
    let mut demo = cargo(["run", "--release", "--package", "headwater"])?;
    if duckdb::folder().is_some() {
        demo.args(["--features", "analytics"]);
    }
    cargo::run("demo", demo.args(["--", "serve", "--demo"]).args(arguments))
}
