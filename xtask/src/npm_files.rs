//! Files of npm packages that tests read: the accessibility checker axe-core, which the browser tests run in each page, and
//! the official JSON schema of OpenAPI 3.1. Downloaded, neither committed nor shipped.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::cargo::{cache, succeeds};
use crate::exit::ExitError;

/// A package, and a file of it that shows that it is there.
struct NpmPackage {
    name: &'static str,
    /// Pinned: a newer one may find more. `headwater-testkit/src/npm_files.rs` names the same one.
    release: &'static str,
    /// Name of its folder in the cache, before the release.
    folder: &'static str,
    file: &'static str,
}

const PACKAGES: [NpmPackage; 2] = [
    NpmPackage { name: "axe-core", release: "4.14.0", folder: "axe-core", file: "axe.min.js" },
    NpmPackage {
        name: "@seriousme/openapi-schema-validator",
        release: "2.9.0",
        folder: "openapi-schemas",
        file: "schemas/v3.1/schema.json",
    },
];

/// Downloads the packages that are not there.
pub(crate) fn provide() -> Result<(), ExitError> {
    let Some(cache) = cache() else {
        return Err(ExitError::new("no cache directory is available; set XDG_CACHE_HOME"));
    };
    PACKAGES.iter().try_for_each(|package| package.provide(&cache))
}

impl NpmPackage {
    fn provide(&self, cache: &Path) -> Result<(), ExitError> {
        let Self { name, release, folder, file } = self;
        let kept = cache.join(format!("{folder}-{release}"));
        if kept.join(file).is_file() {
            return Ok(());
        }
        eprintln!("downloading {name} {release} (once per machine)");
        let work = cache.join(format!("{folder}-fetch-{}", std::process::id()));
        let fetched =
            self.unpack(&work).and_then(|()| match fs::rename(work.join("package"), &kept) {
                // Another process was faster.
                Err(_) if kept.join(file).is_file() => Ok(()),
                moved => moved.map_err(|error| error.to_string()),
            });
        let _ = fs::remove_dir_all(&work);
        fetched.map_err(|problem| {
            let path = kept.join(file);
            ExitError::new(format!(
                "failed to download {name} ({problem}); install npm, or put {file} of {name} {release} at {}",
                path.display()
            ))
        })
    }

    fn unpack(&self, work: &Path) -> Result<(), String> {
        fs::create_dir_all(work).map_err(|error| error.to_string())?;
        let package = format!("{}@{}", self.name, self.release);
        let steps: [(&str, &[&str]); 2] = [
            ("npm", &["pack", "--silent", "--fetch-retries=1", "--fetch-timeout=60000", &package]),
            ("sh", &["-c", "tar -xzf *.tgz"]),
        ];
        for (program, arguments) in steps {
            let mut step = Command::new(program);
            step.args(arguments).current_dir(work).stdin(Stdio::null());
            if !succeeds(&mut step) {
                return Err(format!("`{program} {}` failed", arguments.join(" ")));
            }
        }
        Ok(())
    }
}
