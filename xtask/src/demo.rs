//! `cargo xtask demo`: runs the server with embedded backends.
//!
//! It is for a first look, so it builds fast: little optimization, and analytics, whose crates take as long to build as
//! all others, only on request.

use crate::cargo::{self, cargo};
use crate::duckdb;
use crate::exit::ExitError;

pub(crate) fn run(with_analytics: bool, arguments: &[String]) -> Result<(), ExitError> {
    if with_analytics {
        duckdb::provide();
        if duckdb::folder().is_none() {
            return Err(ExitError::new(
                "analytics needs the DuckDB library; see docs/analytics.md",
            ));
        }
    }
    let mut demo = cargo(["run", "--profile", "demo", "--package", "headwater"])?;
    demo.args(if with_analytics { &["--features", "analytics"][..] } else { &[] });
    cargo::run("demo", demo.args(["--", "serve", "--demo"]).args(arguments))
}
