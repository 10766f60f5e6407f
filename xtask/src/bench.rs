//! `cargo xtask bench`: benchmarks of streams and queue (embedded and Redis), of heartbeats and waiting, of issues
//! (SQLite and Postgres), and of analytics.

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

/// Measures the console in a browser: a test that ordinary runs leave out.
pub(crate) fn console(quick: bool) -> Result<(), ExitError> {
    setup::everything()?;
    duckdb::provide();
    let mut measures =
        cargo(["nextest", "run", "--workspace", "--all-features", "--test", "console"])?;
    measures.args(["--run-ignored", "only", "--no-capture", "-E", CONSOLE_MEASURES]);
    if !quick {
        // Filling a million messages takes longer than the limit of ordinary tests.
        measures.args(["--release", "--profile", "chaos"]).env("HEADWATER_MEASURES", "full");
    }
    cargo::run("measures of the console", &mut measures)
}
