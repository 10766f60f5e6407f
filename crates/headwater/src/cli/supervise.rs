//! The parent of a command of `consume --exec`: ends the command when its consumer ends, however that happens.
//!
//! Upstream: `execute` starts this program again with [`VERB`], as the leader of a process group and with a pipe to the
//! consumer as standard error; `command` calls [`run`] before anything else. Downstream: `sh -c`.
//! Promises: if the consumer is gone, the command is not started; if it goes later, the whole group is killed: this process,
//! the shell, and what the shell started (unless that left the group with `setsid`). A process that is killed cannot end
//! its children, so this takes a process of its own; the kernel closes the consumer's end of the pipe for it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process_group};

/// Comes first on the command line of a supervisor; for this program only.
pub(super) const VERB: &str = "__supervise";

/// What shells answer for a command that was ended by a signal: this and its number.
const ENDED_BY_SIGNAL: i32 = 128;
/// What shells answer for a program that cannot be started.
const NOT_STARTED: u8 = 127;

/// Runs the command if this process was started as a supervisor; `None` if it was not.
pub(crate) fn run(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    if arguments.next()? != VERB {
        return None;
    }
    let command = arguments.next().unwrap_or_default();
    Some(ExitCode::from(supervise(&command).unwrap_or_else(|error| {
        eprintln!("headwater: the shell could not be started: {error}");
        NOT_STARTED
    })))
}

fn supervise(command: &OsString) -> io::Result<u8> {
    let group = getpid();
    if getpgrp() != group {
        // Killing the group would kill who started this by hand.
        return Err(io::Error::other("this verb is for `consume --exec` only"));
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

/// Waits for the end of the consumer, and kills everything here.
fn watch(group: Pid) {
    while !consumer_is_gone(None) {}
    let _ = kill_process_group(group, Signal::KILL);
}

/// Whether the reading end of standard error is closed; waits for that, at most for `limit`.
fn consumer_is_gone(limit: Option<&Timespec>) -> bool {
    let pipe = io::stderr();
    // No event is asked for; an error is told always.
    let mut watched = [PollFd::new(&pipe, PollFlags::empty())];
    match poll(&mut watched, limit) {
        Ok(_) => watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP),
        Err(_) => false,
    }
}
