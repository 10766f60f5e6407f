//! One server process: start, kill, pause, resume and restart in the same directory.
//!
//! Upstream: `redis`, `postgres` and `child` say what to run. Downstream: `temp_server_dir` provides the directory and
//! removes it.
//! Guarantees: `kill9` and `pause` are complete when they return, also for forked children of a server.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::temp_server_dir::{SHELL, TempServerDir};
use crate::wait::{SERVER_LIMIT, lock, poll, wait_until};

/// Writes the pid file for the guard, then replaces itself with the server, keeping the process id.
/// If the guard has already started to remove the directory, the file cannot be opened and nothing starts.
const LAUNCHER: &str = r#"echo $$ >"$0/pid" && exec "$@""#;

const LOG_TAIL_LINES: usize = 20;

/// The program to run, its user and its output.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) user: Option<User>,
    pub(crate) output: ProcessOutput,
}

/// The numeric user and group of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Where standard output and standard error go.
#[derive(Debug)]
pub(crate) enum ProcessOutput {
    /// Both into the file `log` of the directory.
    Log,
    /// Standard output through a pipe; standard error is inherited.
    Pipe,
}

/// A server process and its directory; killed with SIGKILL on drop.
#[derive(Debug)]
pub(crate) struct Process {
    launch: Launch,
    directory: PathBuf,
    running: Mutex<Option<Child>>,
    // Last field, so that the directory is removed after the process is dead.
    _server_dir: Arc<TempServerDir>,
}

impl Process {
    pub(crate) fn spawn(
        server_dir: &Arc<TempServerDir>,
        directory: &Path,
        launch: Launch,
    ) -> Result<Process> {
        let process = Process {
            launch,
            directory: directory.to_path_buf(),
            running: Mutex::new(None),
            _server_dir: Arc::clone(server_dir),
        };
        process.respawn()?;
        Ok(process)
    }

    /// Runs the same command in the same directory once more.
    pub(crate) fn respawn(&self) -> Result<()> {
        let mut running = lock(&self.running);
        if running.is_some() {
            bail!("{} still runs", self.name());
        }
        let mut command = Command::new(SHELL);
        command.args(["-c", LAUNCHER]).arg(&self.directory).arg(&self.launch.program);
        command.args(&self.launch.arguments).envs(self.launch.environment.iter().cloned());
        command.process_group(0).stdin(Stdio::null());
        if let Some(user) = self.launch.user {
            command.uid(user.uid).gid(user.gid);
        }
        match self.launch.output {
            ProcessOutput::Log => {
                let log = File::options().create(true).append(true).open(self.log_path())?;
                command.current_dir(&self.directory).stdout(log.try_clone()?).stderr(log);
            }
            ProcessOutput::Pipe => {
                command.stdout(Stdio::piped());
            }
        }
        *running = Some(command.spawn().context("cannot run the shell")?);
        Ok(())
    }

    /// The process id, if it was not killed or stopped.
    pub(crate) fn pid(&self) -> Result<u32> {
        match lock(&self.running).as_ref() {
            Some(child) => Ok(child.id()),
            None => bail!("{} does not run", self.name()),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        lock(&self.running).is_some()
    }

    /// Fails with the end of the log if the process has exited by itself.
    pub(crate) fn check(&self) -> Result<()> {
        let how = match self.try_wait() {
            Ok(None) => return Ok(()),
            Ok(Some(status)) => status.to_string(),
            Err(_) => "it was stopped".to_string(),
        };
        bail!("{} has ended: {how}\n{}", self.name(), self.log_tail())
    }

    /// Takes the pipe of `ProcessOutput::Pipe`.
    pub(crate) fn take_stdout(&self) -> Option<std::process::ChildStdout> {
        lock(&self.running).as_mut()?.stdout.take()
    }

    /// Kills the process and its forks with SIGKILL and waits until they are gone.
    pub(crate) fn kill9(&self) -> Result<()> {
        let mut running = lock(&self.running);
        let Some(mut child) = running.take() else { return Ok(()) };
        // Stopped first: it must not fork while its forks are listed. Not yet waited for, so the process id cannot have been reused.
        signal(child.id(), Signal::STOP);
        wait_until("the server to be stopped", SERVER_LIMIT, || is_stopped(child.id()))?;
        let forks = forks_of(child.id());
        signal(child.id(), Signal::KILL);
        forks.iter().for_each(|pid| signal(*pid, Signal::KILL));
        child.wait()?;
        self.remove_pid_file();
        wait_until("the killed forks of the server to be gone", SERVER_LIMIT, || {
            !forks.iter().any(|pid| is_alive(*pid))
        })
    }

    /// Sends the signal `how` and waits until the process has exited.
    pub(crate) fn stop(&self, how: Signal) -> Result<()> {
        if let Ok(pid) = self.pid() {
            self.resume()?;
            signal(pid, how);
            poll("the server to stop", SERVER_LIMIT, || self.try_wait())?;
        }
        Ok(())
    }

    /// The exit status, once the process has ended.
    pub(crate) fn try_wait(&self) -> Result<Option<ExitStatus>> {
        let mut running = lock(&self.running);
        let Some(child) = running.as_mut() else { bail!("{} does not run", self.name()) };
        let status = child.try_wait()?;
        if status.is_some() {
            self.remove_pid_file();
            *running = None;
        }
        Ok(status)
    }

    /// Stops the process and its forks with SIGSTOP, and waits until they are stopped.
    pub(crate) fn pause(&self) -> Result<()> {
        let pid = self.pid()?;
        signal(pid, Signal::STOP);
        wait_until("the server to be stopped", SERVER_LIMIT, || is_stopped(pid))?;
        let forks = forks_of(pid);
        forks.iter().for_each(|fork| signal(*fork, Signal::STOP));
        wait_until("the forks of the server to be stopped", SERVER_LIMIT, || {
            forks.iter().all(|fork| is_stopped(*fork))
        })
    }

    /// Resumes a paused process.
    pub(crate) fn resume(&self) -> Result<()> {
        let pid = self.pid()?;
        forks_of(pid).into_iter().chain([pid]).for_each(|pid| signal(pid, Signal::CONT));
        Ok(())
    }

    /// Leaves the process to the guard of its shared directory.
    pub(crate) fn detach(&self) {
        *lock(&self.running) = None;
    }

    /// The last lines the server wrote.
    pub(crate) fn log_tail(&self) -> String {
        let log = fs::read(self.log_path()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
        format!("--- end of its log ---\n{}", tail.join("\n"))
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("log")
    }

    fn name(&self) -> std::path::Display<'_> {
        self.launch.program.display()
    }

    /// Removes the pid file, because the guard kills the process in it and a process id may be reused.
    fn remove_pid_file(&self) {
        let _ = fs::remove_file(self.directory.join("pid"));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill9();
    }
}

/// Whether the process `pid` is running; a zombie is not.
pub fn is_alive(pid: u32) -> bool {
    read_proc_stat(pid).is_some_and(|process| !matches!(process.state, 'Z' | 'X'))
}

fn is_stopped(pid: u32) -> bool {
    read_proc_stat(pid).is_none_or(|process| matches!(process.state, 'T' | 't' | 'Z' | 'X'))
}

/// The children of a server that run the same program, such as the backends of Postgres. Children that run another
/// program, such as guards, are not part of the server.
fn forks_of(server: u32) -> Vec<u32> {
    let Some(ProcStat { name, .. }) = read_proc_stat(server) else { return Vec::new() };
    let is_fork = |process: ProcStat| process.parent == server && process.name == name;
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| read_proc_stat(*pid).is_some_and(is_fork)).collect()
}

/// Fields of `/proc/PID/stat`: `PID (NAME) STATE PARENT ...`.
pub(crate) struct ProcStat {
    pub(crate) name: String,
    state: char,
    pub(crate) parent: u32,
}

pub(crate) fn read_proc_stat(pid: u32) -> Option<ProcStat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and parentheses.
    let (start, rest) = stat.rsplit_once(") ")?;
    let (_, name) = start.split_once(" (")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    Some(ProcStat { name: name.to_string(), state, parent: fields.next()?.parse().ok()? })
}

/// Sends a signal; ignores a process that is already gone.
fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// The path of a program in PATH or one of `more`; an error that says how to install it.
pub(crate) fn find_program(name: &str, more: &[PathBuf]) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(more.iter().cloned());
    directories
        .map(|directory| directory.join(name))
        .find(|program| program.is_file())
        .with_context(|| format!("`{name}` not found; run `cargo xtask setup` to install it"))
}
