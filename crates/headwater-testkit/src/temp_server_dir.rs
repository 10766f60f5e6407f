//! A temporary directory for test servers, and the guard process that removes it.
//!
//! The guard (`guard.sh`) is a shell outside the process group of the test. When the test process panics, exits or is
//! killed with SIGKILL, the guard kills the servers and removes the directory.
//! Guarantees: no process or file remains, however the test process ends.
//! Not here: starting servers (see `process`), finding the directory of a shared server (see `shared`).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::process::is_alive;

/// Absolute path, because a test may run without PATH.
pub(crate) const SHELL: &str = "/bin/sh";

const GUARD: &str = include_str!("guard.sh");

/// The directory of one or more servers and, if they are private, its guard.
#[derive(Debug)]
pub(crate) struct TempServerDir {
    path: PathBuf,
    guard: Option<Child>,
}

impl TempServerDir {
    /// A directory that is removed when this value is dropped or the test process dies.
    pub(crate) fn private() -> Result<TempServerDir> {
        let path = tempfile::Builder::new().prefix("headwater-testkit-").tempdir()?.keep();
        open_to_other_users(&path)?;
        let guard = guard(&path, "").stdin(Stdio::piped()).spawn();
        Ok(TempServerDir { guard: Some(guard.context("cannot run the shell")?), path })
    }

    /// The directory at `path`, removed when the process `watched` is gone.
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
            // Waiting closes the pipe first, which makes the guard clean up.
            let _ = guard.wait();
        }
    }
}

/// Postgres refuses to run as root, so its user needs access to its directory.
fn open_to_other_users(path: &Path) -> Result<()> {
    Ok(fs::set_permissions(path, Permissions::from_mode(0o711))?)
}

/// Its own process group keeps signals to the test (Ctrl-C, timeouts) from the guard. It inherits no output pipes, so
/// that the test runner does not report a leak.
fn guard(server_dir: &Path, watched: &str) -> Command {
    let mut command = Command::new(SHELL);
    command.args(["-c", GUARD, "headwater-testkit-guard"]).arg(server_dir).arg(watched);
    command.current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}
