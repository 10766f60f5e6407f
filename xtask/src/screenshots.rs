//! `cargo xtask screenshots`: writes the pictures that README and docs/console.md show.
//!
//! Upstream: `main`. Downstream: the test `pictures_of_the_demo_for_the_documentation`, which opens the demo in a browser.

use crate::cargo::{self, cargo};
use crate::duckdb;
use crate::exit::ExitError;
use crate::setup;

const PICTURES: &str = "test(pictures_of_the_demo_for_the_documentation)";

pub(crate) fn run() -> Result<(), ExitError> {
    setup::everything()?;
    duckdb::provide();
    let mut pictures = cargo(["nextest", "run", "--package", "headwater", "--test", "console"])?;
    pictures.args(["--run-ignored", "only", "-E", PICTURES]);
    pictures.env("HEADWATER_SCREENSHOTS", cargo::workspace_root()?.join("docs/images"));
    cargo::run("screenshots", &mut pictures)
}
