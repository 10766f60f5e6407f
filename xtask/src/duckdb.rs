//! The DuckDB library that analytics links with: found, or fetched ready-made. Building it would take hours.
//!
//! Promises: a machine without it can do everything else; what is left out is said once, with the way to have it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cargo::{cache, cargo, succeeds};
use crate::exit::ExitError;

/// Where the library lies: the name that its crate reads.
pub(crate) const VARIABLE: &str = "DUCKDB_LIB_DIR";

/// The release of the library that the crate `duckdb` of the workspace is made for, and the package that carries it.
const RELEASE: &str = "1.5.6-r.1";

const LIBRARY: &str = if cfg!(target_os = "macos") { "libduckdb.dylib" } else { "libduckdb.so" };

/// The folder of a library that is there.
pub(crate) fn folder() -> Option<PathBuf> {
    let chosen = env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    chosen.or_else(kept).filter(|folder| folder.join(LIBRARY).is_file())
}

/// Fetches a library if there is none, or says what is left out without it.
pub(crate) fn provide() {
    if folder().is_some() {
        return;
    }
    match kept()
        .ok_or_else(|| "there is no place for a cache".to_owned())
        .and_then(|kept| fetch(&kept))
    {
        Ok(()) => {}
        Err(problem) => eprintln!(
            "analytics is left out: no DuckDB library ({problem}); install npm, or put {LIBRARY} {} into a folder \
             and name it in {VARIABLE}",
            RELEASE.split('-').next().unwrap_or(RELEASE)
        ),
    }
}

/// The commands that act on everything that can be built here: on the whole workspace, or, without the library, on all
/// but analytics.
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
    let package = package().ok_or("none is known for this system")?;
    if !succeeds(Command::new("npm").arg("--version")) {
        return Err("there is no npm to fetch it with".to_owned());
    }
    eprintln!("fetching a DuckDB library, once per machine");
    let parent = kept.parent().ok_or("the cache has no folder")?;
    fs::create_dir_all(parent).map_err(|error| error.to_string())?;
    // Unpacked beside its place and moved there whole, so that a fetch that is cut off leaves nothing behind.
    let work = parent.join(format!("duckdb-fetch-{}", std::process::id()));
    let fetched = unpack(&work, &package).and_then(|()| {
        match fs::rename(work.join("package"), kept) {
            // Somebody else was faster.
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
        // Without a network it gives up soon: somebody waits for the demo.
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
