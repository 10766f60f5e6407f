//! Parent process of a `consume --exec` command: kills it when the consumer ends for any reason.
//!
//! Upstream: `consume_exec.rs` starts this program with [`VERB`] as leader of a process group, with a pipe to the
//! consumer as standard error; `entry.rs` calls [`run`] first. Downstream: `sh -c`. Guarantees: if the consumer is
//! gone, the command is not started; if it ends later, the whole group is killed: this process, the shell and its
//! children (unless they left the group with `setsid`). A killed process cannot clean up its children, so a separate
//! process is needed; the kernel closes the consumer's end of the pipe.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process_group};

/// First argument of a supervisor; internal.
pub(super) const VERB: &str = "__supervise";

/// Shells report a command killed by signal N as 128 + N.
const ENDED_BY_SIGNAL: i32 = 128;
/// Shells report a command that cannot be started as 127.
const NOT_STARTED: u8 = 127;

/// Runs the command if this process was started as a supervisor; otherwise `None`.
pub(crate) fn run(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    if arguments.next()? != VERB {
        return None;
    }
    let command = arguments.next().unwrap_or_default();
    Some(ExitCode::from(supervise(&command).unwrap_or_else(|error| {
        eprintln!("headwater: failed to start the shell: {error}");
        NOT_STARTED
    })))
}

fn supervise(command: &OsString) -> io::Result<u8> {
    let group = getpid();
    if getpgrp() != group {
        // Killing the group would kill the shell that started this by hand.
        return Err(io::Error::other("internal command of `consume --exec`"));
    }
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    if consumer_is_gone(Some(&at_once)) {
        return Err(io::Error::other("the consumer has ended"));
    }
    std::thread::Builder::new().spawn(move || watch(group))?;
    let status = Command::new("sh").arg("-c").arg(command).status()?;
    let code = status.code().or_else(|| status.signal().map(|signal| ENDED_BY_SIGNAL + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Waits until the consumer ends, then kills the process group.
fn watch(group: Pid) {
    while !consumer_is_gone(None) {}
    let _ = kill_process_group(group, Signal::KILL);
}

/// Whether the read end of standard error is closed; waits for at most `limit`.
fn consumer_is_gone(limit: Option<&Timespec>) -> bool {
    let pipe = io::stderr();
    // Errors are always reported, without requesting an event.
    let mut watched = [PollFd::new(&pipe, PollFlags::empty())];
    match poll(&mut watched, limit) {
        Ok(_) => watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP),
        Err(_) => false,
    }
}
