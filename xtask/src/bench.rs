//! `cargo xtask bench`: benchmarks of streams and queue (embedded and Redis), of heartbeats and waiting, of issues
//! (SQLite and Postgres), and of analytics.

use std::env;
use std::path::PathBuf;

use crate::cargo::{self, cargo};
use crate::duckdb;
use crate::exit::ExitError;
use crate::setup;

/// Benchmarks per package, in dependency order.
const BENCHES: [(&str, &[&str]); 5] = [
    ("headwater-stream", &["streams", "waiting"]),
    ("headwater-assignment", &["heartbeat"]),
    ("headwater-queue", &["queue"]),
    ("headwater-issue", &["store", "flow"]),
    (ANALYTICS, &["ingest"]),
];

const ANALYTICS: &str = "headwater-analytics";

const CONSOLE_MEASURES: &str = "test(measures_of_the_console)";

/// Names the program that is measured; without it, a release build is made.
const MEASURED_BINARY: &str = "HEADWATER_MEASURE_BINARY";

pub(crate) fn run(arguments: &[String]) -> Result<(), ExitError> {
    setup::system(&[setup::C_COMPILER, setup::REDIS, setup::POSTGRES])?;
    duckdb::provide();
    for (package, names) in BENCHES {
        if package == ANALYTICS && duckdb::folder().is_none() {
            continue;
        }
        let mut bench = cargo(["bench", "-p", package, "--all-features"])?;
        for name in names {
            bench.args(["--bench", name]);
        }
        cargo::run("benchmark", bench.arg("--").args(arguments))?;
    }
    Ok(())
}

/// Measures the console, in part in a browser: tests that ordinary runs leave out, on a release build of the server alone. They run one
/// after another, because nothing of their output is captured. `only`: those with this text in their name.
pub(crate) fn console(quick: bool, only: Option<&str>) -> Result<(), ExitError> {
    setup::everything()?;
    duckdb::provide();
    let mut measures =
        cargo(["nextest", "run", "--workspace", "--all-features", "--test", "console"])?;
    let tests = match only {
        Some(name) => format!("{CONSOLE_MEASURES} & test({name})"),
        None => CONSOLE_MEASURES.to_owned(),
    };
    measures.args(["--run-ignored", "only", "--no-capture", "-E", &tests]);
    if !quick {
        // Filling a million messages takes longer than the limit of ordinary tests.
        measures.args(["--profile", "chaos"]).env("HEADWATER_MEASURES", "full");
        if env::var_os(MEASURED_BINARY).is_none() {
            measures.env(MEASURED_BINARY, release_binary()?);
        }
    }
    cargo::run("measures of the console", &mut measures)
}

/// Builds the server and returns its path.
fn release_binary() -> Result<PathBuf, ExitError> {
    let arguments =
        ["build", "--release", "-p", "headwater", "--all-features", "--bin", "headwater"];
    cargo::run("release build", &mut cargo(arguments)?)?;
    let target = cargo::target()?;
    Ok(target.join("release").join("headwater"))
}
