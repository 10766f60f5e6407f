//! A home is a temporary directory in which servers run, and the guard that clears it.
//!
//! The guard (`guard.sh`) is a shell outside the process group of the test. It outlives a test process
//! that panics, exits or is killed with -9, then kills the servers and removes the directory.
//! Promises: nothing is left behind, whichever way the test process ends.
//! Not here: starting servers (see `process`), finding the home of a shared server (see `shared`).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::process::is_alive;

/// By its full path: a test may run without PATH.
pub(crate) const SHELL: &str = "/bin/sh";

const GUARD: &str = include_str!("guard.sh");

/// The directory of some servers and, if they are private, the guard that waits for us.
#[derive(Debug)]
pub(crate) struct TempServerDir {
    path: PathBuf,
    guard: Option<Child>,
}

impl TempServerDir {
    /// A home that is cleared when this value is dropped or the test process dies.
    pub(crate) fn private() -> Result<TempServerDir> {
        let path = tempfile::Builder::new().prefix("headwater-testkit-").tempdir()?.keep();
        open_to_other_users(&path)?;
        let guard = guard(&path, "").stdin(Stdio::piped()).spawn();
        Ok(TempServerDir { guard: Some(guard.context("cannot run the shell")?), path })
    }

    /// The home at `path`, which is cleared when the process `watched` is gone.
    pub(crate) fn shared(path: &Path, watched: u32) -> Result<TempServerDir> {
        open_to_other_users(path)?;
        let pid_file = path.join("guard.pid");
        let guarded =
            fs::read_to_string(&pid_file).is_ok_and(|pid| pid.parse().is_ok_and(is_alive));
        if !guarded {
            let guard =
                guard(path, &watched.to_string()).spawn().context("cannot run the shell")?;
            fs::write(&pid_file, guard.id().to_string())?;
        }
        Ok(TempServerDir { path: path.to_path_buf(), guard: None })
    }

    /// The path of a file in it.
    pub(crate) fn new_file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A new directory for one server.
    pub(crate) fn new_directory(&self, name: &str) -> Result<PathBuf> {
        let prefix = format!("{name}-");
        Ok(tempfile::Builder::new().prefix(&prefix).tempdir_in(&self.path)?.keep())
    }
}

impl Drop for TempServerDir {
    fn drop(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            // Waiting closes the pipe first, which is the sign to clear up.
            let _ = guard.wait();
        }
    }
}

/// Postgres refuses to run as root, so another user has to reach its directory in here.
fn open_to_other_users(path: &Path) -> Result<()> {
    Ok(fs::set_permissions(path, Permissions::from_mode(0o711))?)
}

/// In a process group of its own, the signals to a test (Ctrl-C, a time-out) spare its guard.
/// With none of the test's output pipes, it does not look like a leak to the runner.
fn guard(server_dir: &Path, watched: &str) -> Command {
    let mut command = Command::new(SHELL);
    command.args(["-c", GUARD, "headwater-testkit-guard"]).arg(server_dir).arg(watched);
    command.current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}
