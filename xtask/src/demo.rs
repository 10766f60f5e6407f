//! `cargo xtask demo`: runs the server with embedded backends; with analytics if DuckDB is available.

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
