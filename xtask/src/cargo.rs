//! Runs cargo: working directory, target directory and exit status.
//!
//! Guarantees: every command builds into the same cache with the same environment, so none invalidates the builds of
//! another.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use crate::duckdb;
use crate::exit::ExitError;

/// The root of the checkout.
pub(crate) fn workspace_root() -> Result<PathBuf, ExitError> {
    // Determined at run time, because two checkouts may share a target directory.
    env::var_os("CARGO_MANIFEST_DIR")
        .and_then(|folder| Path::new(&folder).parent().map(Path::to_owned))
        .ok_or_else(|| ExitError::new("run this program as `cargo xtask`"))
}

/// A cargo command in the root of the checkout that builds into the shared cache.
pub(crate) fn cargo<A: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = A>,
) -> Result<Command, ExitError> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(workspace_root()?);
    if let Some(folder) = shared_target()? {
        command.env("CARGO_TARGET_DIR", folder);
    }
    if let Some(folder) = duckdb::folder() {
        command.env(duckdb::VARIABLE, folder);
    }
    // Continuous integration builds each checkout once: what makes the next build faster would only cost time and disk space.
    if env::var_os("CI").is_some_and(|value| !value.is_empty()) {
        command.env("CARGO_INCREMENTAL", "0");
    }
    // `cargo run` sets these for xtask. Build scripts that watch them would rerun whenever cargo is called
    // alternately with and without xtask.
    for (name, _) in env::vars_os() {
        if describes_this_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    Ok(command)
}

/// The target directory of [`cargo`].
pub(crate) fn target() -> Result<PathBuf, ExitError> {
    Ok(shared_target()?.unwrap_or(workspace_root()?.join("target")))
}

fn shared_target() -> Result<Option<PathBuf>, ExitError> {
    let Some(folder) = target_dir(|name| env::var_os(name)) else { return Ok(None) };
    // A relative path is relative to the caller's directory.
    let folder = std::path::absolute(&folder)
        .map_err(|error| ExitError::new(format!("no usable target directory: {error}")))?;
    Ok(Some(folder))
}

/// Runs `command`; `step` names it in error messages.
pub(crate) fn run(step: &str, command: &mut Command) -> Result<(), ExitError> {
    let status = command.status().map_err(|error| cannot_start(step, command, &error))?;
    ended(step, status)
}

/// Whether `command` runs and succeeds, without showing its output.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

pub(crate) fn cannot_start(step: &str, command: &Command, error: &std::io::Error) -> ExitError {
    let program = command.get_program().to_string_lossy();
    ExitError::new(format!("{step}: cannot start `{program}`: {error}"))
}

/// Converts the exit status of a step.
pub(crate) fn ended(step: &str, status: ExitStatus) -> Result<(), ExitError> {
    if status.success() {
        return Ok(());
    }
    // As in the shell: death by a signal is 128 plus the signal number.
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    let code = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Err(ExitError::with_code(format!("step `{step}` failed ({status})"), code))
}

fn describes_this_package(variable: &str) -> bool {
    variable.starts_with("CARGO_PKG_") || variable.starts_with("CARGO_MANIFEST_")
}

/// The cache shared by all checkouts; `None` if no directory is available.
pub(crate) fn cache() -> Option<PathBuf> {
    cache_dir(&|name| env::var_os(name))
}

fn cache_dir(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // The XDG specification asks to ignore a relative path.
    let cache = folder("XDG_CACHE_HOME")
        .filter(|cache| cache.is_absolute())
        .or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("headwater"))
}

/// The target directory shared by all checkouts; `None` if no directory is available.
fn target_dir(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    match variable("CARGO_TARGET_DIR").filter(|chosen| !chosen.is_empty()) {
        Some(chosen) => Some(chosen.into()),
        None => cache_dir(&variable).map(|cache| cache.join("target")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target_dir_with(variables: &[(&str, &str)]) -> Option<PathBuf> {
        target_dir(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn a_chosen_target_directory_wins() {
        let chosen = target_dir_with(&[("CARGO_TARGET_DIR", "/t"), ("XDG_CACHE_HOME", "/c")]);
        assert_eq!(chosen, Some("/t".into()));
    }

    #[test]
    fn the_cache_directory_comes_before_the_home_directory() {
        let both = target_dir_with(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")]);
        assert_eq!(both, Some("/c/headwater/target".into()));

        let home = target_dir_with(&[("HOME", "/h")]);
        assert_eq!(home, Some("/h/.cache/headwater/target".into()));
    }

    #[test]
    fn empty_and_relative_settings_count_as_unset() {
        let variables = [("CARGO_TARGET_DIR", ""), ("XDG_CACHE_HOME", "c"), ("HOME", "/h")];
        assert_eq!(target_dir_with(&variables), Some("/h/.cache/headwater/target".into()));
        assert_eq!(target_dir_with(&[]), None);
    }

    #[test]
    fn a_step_ends_with_its_own_exit_code() {
        assert_eq!(ended("any", ExitStatus::from_raw(0)), Ok(()));
        assert_eq!(ended("any", ExitStatus::from_raw(101 << 8)).unwrap_err().code, 101);
        assert_eq!(ended("any", ExitStatus::from_raw(9)).unwrap_err().code, 137);
    }

    #[test]
    fn the_variables_that_describe_xtask_are_kept_from_the_inner_cargo() {
        assert!(describes_this_package("CARGO_PKG_NAME"));
        assert!(describes_this_package("CARGO_MANIFEST_DIR"));
        assert!(!describes_this_package("CARGO_HOME"));
    }
}
