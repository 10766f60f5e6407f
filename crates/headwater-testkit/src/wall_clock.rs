//! A wall clock that a test can set for real processes, by preloading libfaketime.
//!
//! Upstream: tests that set the clock back or forward while a server runs. Downstream: the file that libfaketime
//! reads on every call. Guarantees: the monotonic clock of the processes is unchanged, as when an operator or NTP sets
//! the clock.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::temp_server_dir::TempServerDir;

/// The variant for programs with several threads.
const LIBRARY: &str = "faketime/libfaketimeMT.so.1";

/// Library directories of distributions; Debian has a subdirectory per architecture.
const LIBRARY_FOLDERS: [&str; 4] = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib"];

/// A wall clock for processes started with its environment. It starts at the time of the machine.
#[derive(Debug)]
pub struct WallClock {
    library: PathBuf,
    file: PathBuf,
    _server_dir: TempServerDir,
}

impl WallClock {
    /// A new clock. Fails if libfaketime is not installed (the package `faketime`).
    pub fn start() -> Result<WallClock> {
        let library = find_library().context(
            "libfaketime was not found; install the package `faketime`, or run `cargo xtask setup`",
        )?;
        let server_dir = TempServerDir::private()?;
        let file = server_dir.new_file("clock");
        let clock = WallClock { library, file, _server_dir: server_dir };
        clock.set(0)?;
        Ok(clock)
    }

    /// Sets the clock to this many seconds after (or, if negative, before) the time of the machine.
    pub fn set(&self, offset_seconds: i64) -> Result<()> {
        // Renamed into place: a process that reads it meanwhile sees the old text or the new one.
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{offset_seconds:+}\n"))?;
        Ok(fs::rename(new, &self.file)?)
    }

    /// The environment variables that make a process use this clock.
    pub fn environment(&self) -> Vec<(String, String)> {
        let text = |path: &PathBuf| path.display().to_string();
        let variables = [
            ("LD_PRELOAD", text(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", text(&self.file)),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            // The second name is that of later versions.
            ("DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            // A killed process would leave its shared memory behind.
            ("FAKETIME_DISABLE_SHM", "1".to_owned()),
        ];
        variables.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

fn find_library() -> Option<PathBuf> {
    LIBRARY_FOLDERS.iter().map(PathBuf::from).find_map(|folder| {
        let below = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let folders = std::iter::once(folder).chain(below);
        folders.map(|folder| folder.join(LIBRARY)).find(|library| library.is_file())
    })
}
