//! Installs the programs that the tests need.
//!
//! On Debian-based systems, as root, missing packages are installed; otherwise the command to run is printed.
//! Guarantees: a machine that has everything is not changed.
//! Not here: starting servers; tests do that on free ports through `headwater-testkit`.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::cargo::{cargo, run, succeeds};
use crate::duckdb;
use crate::exit::ExitError;
use crate::npm_files;
use crate::python_client;

/// A program from a system package.
#[derive(Clone, Copy)]
pub(crate) struct DevTool {
    binary: &'static str,
    package: &'static str,
}

pub(crate) const C_COMPILER: DevTool = DevTool { binary: "cc", package: "build-essential" };
pub(crate) const REDIS: DevTool = DevTool { binary: "redis-server", package: "redis-server" };
pub(crate) const POSTGRES: DevTool = DevTool { binary: "initdb", package: "postgresql" };
/// Sets the clock of a process under test; the library comes with the program.
pub(crate) const FAKETIME: DevTool = DevTool { binary: "faketime", package: "faketime" };

/// The browser of the console's tests, and the program that drives it.
pub(crate) const BROWSER: DevTool = DevTool { binary: "chromium", package: "chromium" };
pub(crate) const BROWSER_DRIVER: DevTool =
    DevTool { binary: "chromedriver", package: "chromium-driver" };

/// Pinned, because a later release may need a newer Rust.
const NEXTEST_VERSION: &str = "0.9.143";

/// Debian installs the server programs of PostgreSQL outside PATH, in one directory per version.
const POSTGRES_VERSIONS: &str = "/usr/lib/postgresql";

/// Installs everything that `cargo xtask test` needs.
pub(crate) fn everything() -> Result<(), ExitError> {
    system(&[C_COMPILER, REDIS, POSTGRES, FAKETIME, BROWSER, BROWSER_DRIVER])?;
    components()?;
    duckdb::provide();
    npm_files::provide()?;
    python_client::provide()?;
    nextest()
}

/// Installs system programs.
pub(crate) fn system(tools: &[DevTool]) -> Result<(), ExitError> {
    let absent = missing(tools, is_present);
    if absent.is_empty() {
        return Ok(());
    }
    if !succeeds(Command::new("apt-get").arg("--version")) {
        return Err(ExitError::new(format!(
            "install these programs and add them to PATH: {}",
            list(&absent, |tool| tool.binary)
        )));
    }
    let packages = list(&absent, |tool| tool.package);
    if !is_root() {
        return Err(ExitError::new(format!(
            "some programs are missing; run this command and try again:\n\n    {}\n",
            apt_line(&packages)
        )));
    }

    eprintln!("installing {packages}");
    // An unavailable package source does not matter if the others have the packages.
    if run("apt-get update", &mut apt_get(&["update"])).is_err() {
        eprintln!("warning: updating the package lists failed, using the old ones");
    }
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(packages.split(' '));
    run("apt-get install", &mut apt_get(&arguments))?;

    let absent = missing(tools, is_present);
    if absent.is_empty() {
        return Ok(());
    }
    Err(ExitError::new(format!(
        "the packages are installed, but these programs were not found: {}",
        list(&absent, |tool| tool.binary)
    )))
}

/// Installs components of the Rust toolchain that a minimal installation lacks.
fn components() -> Result<(), ExitError> {
    for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if !succeeds(&mut cargo([subcommand, "--version"])?) {
            eprintln!("installing {component}");
            run(
                &format!("rustup component add {component}"),
                Command::new("rustup").args(["component", "add", component]),
            )?;
        }
    }
    Ok(())
}

/// Installs the test runner.
pub(crate) fn nextest() -> Result<(), ExitError> {
    if succeeds(&mut cargo(["nextest", "--version"])?) {
        return Ok(());
    }
    eprintln!("building the test runner cargo-nextest, which takes some minutes, once per machine");
    let install = ["install", "cargo-nextest", "--locked", "--version", NEXTEST_VERSION];
    run("cargo install cargo-nextest", &mut cargo(install)?)
}

fn missing(tools: &[DevTool], is_present: impl Fn(&str) -> bool) -> Vec<DevTool> {
    tools.iter().copied().filter(|tool| !is_present(tool.binary)).collect()
}

fn list(tools: &[DevTool], name: impl Fn(&DevTool) -> &'static str) -> String {
    tools.iter().map(name).collect::<Vec<_>>().join(" ")
}

fn is_present(binary: &str) -> bool {
    program_folders().iter().any(|folder| folder.join(binary).is_file())
}

fn program_folders() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let postgres = fs::read_dir(POSTGRES_VERSIONS).into_iter().flatten().flatten();
    env::split_paths(&path).chain(postgres.map(|version| version.path().join("bin"))).collect()
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}

fn apt_line(packages: &str) -> String {
    format!("sudo apt-get update && sudo apt-get install -y --no-install-recommends {packages}")
}

fn apt_get(arguments: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
    // Keeps the packages from starting their servers, under sysvinit and systemd. Where it has no effect, the servers
    // idle on their default ports, which no test uses.
    command.env("RUNLEVEL", "1").env("SYSTEMD_OFFLINE", "1");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_absent_is_asked_for() {
        let tools = [C_COMPILER, REDIS, POSTGRES, FAKETIME];

        let absent = missing(&tools, |binary| binary == "redis-server");
        assert_eq!(list(&absent, |tool| tool.package), "build-essential postgresql faketime");
        assert_eq!(list(&absent, |tool| tool.binary), "cc initdb faketime");

        assert!(missing(&tools, |_| true).is_empty());
    }

    #[test]
    fn the_line_for_people_without_root_can_be_pasted() {
        assert_eq!(
            apt_line("redis-server postgresql"),
            "sudo apt-get update && \
             sudo apt-get install -y --no-install-recommends redis-server postgresql"
        );
    }
}
