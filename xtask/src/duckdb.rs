//! The prebuilt DuckDB library that analytics links: found or downloaded. Building it would take hours.
//!
//! Guarantees: without it everything else still builds, and a message says what is skipped and how to get it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cargo::{cache, cargo, succeeds};
use crate::exit::ExitError;

/// The variable with the directory of the library, read by the crate `duckdb`.
pub(crate) const VARIABLE: &str = "DUCKDB_LIB_DIR";

/// The library release that matches the crate `duckdb` of the workspace.
const RELEASE: &str = "1.5.6-r.1";

const LIBRARY: &str = if cfg!(target_os = "macos") { "libduckdb.dylib" } else { "libduckdb.so" };

/// The directory of an available library.
pub(crate) fn folder() -> Option<PathBuf> {
    let chosen = env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    chosen.or_else(kept).filter(|folder| folder.join(LIBRARY).is_file())
}

/// Downloads a library if none is available, or prints what is skipped without it.
pub(crate) fn provide() {
    if folder().is_some() {
        return;
    }
    match kept()
        .ok_or_else(|| "no cache directory is available".to_owned())
        .and_then(|kept| fetch(&kept))
    {
        Ok(()) => {}
        Err(problem) => eprintln!(
            "analytics is skipped: no DuckDB library ({problem}); install npm, or put {LIBRARY} {} into a directory \
             and set {VARIABLE} to it",
            RELEASE.split('-').next().unwrap_or(RELEASE)
        ),
    }
}

/// Commands for everything that can be built: the whole workspace or, without the library, all but analytics.
pub(crate) fn cargo_on_everything(command: &[&str]) -> Result<Vec<Command>, ExitError> {
    let on = |arguments: &[&str]| cargo(command.iter().chain(arguments));
    if folder().is_some() {
        return Ok(vec![on(&["--workspace", "--all-features"])?]);
    }
    let apart = ["headwater", "headwater-analytics"];
    Ok(vec![
        on(&["--workspace", "--all-features", "--exclude", apart[0], "--exclude", apart[1]])?,
        on(&["-p", apart[0], "-p", apart[1]])?,
    ])
}

fn kept() -> Option<PathBuf> {
    cache().map(|cache| cache.join(format!("duckdb-{RELEASE}")))
}

fn fetch(kept: &Path) -> Result<(), String> {
    let package = package().ok_or("no package for this platform")?;
    if !succeeds(Command::new("npm").arg("--version")) {
        return Err("npm is not installed".to_owned());
    }
    eprintln!("downloading the DuckDB library (once per machine)");
    let parent = kept.parent().ok_or("the cache has no parent directory")?;
    fs::create_dir_all(parent).map_err(|error| error.to_string())?;
    // Unpacked next to its destination and then renamed, so that an interrupted download leaves nothing behind.
    let work = parent.join(format!("duckdb-fetch-{}", std::process::id()));
    let fetched = unpack(&work, &package).and_then(|()| {
        match fs::rename(work.join("package"), kept) {
            // Another process was faster.
            Err(_) if kept.join(LIBRARY).is_file() => Ok(()),
            moved => moved.map_err(|error| error.to_string()),
        }
    });
    let _ = fs::remove_dir_all(&work);
    fetched
}

fn unpack(work: &Path, package: &str) -> Result<(), String> {
    fs::create_dir_all(work).map_err(|error| error.to_string())?;
    let steps: [(&str, &[&str]); 2] = [
        // Fails fast without a network, because a user waits for the demo.
        (
            "npm",
            &[
                "pack",
                "--silent",
                "--fetch-retries=1",
                "--fetch-timeout=60000",
                &format!("{package}@{RELEASE}"),
            ],
        ),
        ("sh", &["-c", "tar -xzf *.tgz"]),
    ];
    for (program, arguments) in steps {
        let mut step = Command::new(program);
        step.args(arguments).current_dir(work).stdin(Stdio::null());
        if !succeeds(&mut step) {
            return Err(format!("`{program} {}` failed", arguments.join(" ")));
        }
    }
    if work.join("package").join(LIBRARY).is_file() {
        Ok(())
    } else {
        Err(format!("{package} has no {LIBRARY}"))
    }
}

fn package() -> Option<String> {
    let system = match env::consts::OS {
        "linux" => "linux",
        "macos" => "darwin",
        _ => return None,
    };
    let machine = match env::consts::ARCH {
        "x86_64" => "x64",
        "aarch64" => "arm64",
        _ => return None,
    };
    Some(format!("@duckdb/node-bindings-{system}-{machine}"))
}
