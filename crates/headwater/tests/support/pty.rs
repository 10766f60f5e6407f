//! Runs a command on a pseudo terminal.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// What a command prints on a terminal with this many columns; standard output and error are both the terminal.
pub(crate) fn on_terminal(command: Command, columns: u16) -> String {
    on_terminal_until(command, columns, None)
}

/// The same for a command that goes on: it is interrupted, as by Ctrl-C, as soon as it has printed all of `parts`.
pub(crate) fn on_terminal_until(
    mut command: Command,
    columns: u16,
    mut parts: Option<&[&str]>,
) -> String {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let noctty = rustix::fs::OFlags::NOCTTY.bits().cast_signed();
    let open = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(noctty);
        OwnedFd::from(options.open(name.to_str().unwrap()).unwrap())
    };
    let terminal = open();
    let size = Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).unwrap();
    command.env("TERM", "xterm-256color").env_remove("CLICOLOR").env_remove("CLICOLOR_FORCE");
    command.stdin(Stdio::null()).stdout(open()).stderr(terminal);
    let mut child = command.spawn().unwrap();
    // The copies in this process keep the terminal open.
    drop(command);
    let (mut master, mut printed, mut buffer) = (File::from(master), Vec::new(), [0; 4096]);
    // The end of the last process on a terminal is an error of its reader (EIO).
    while let Ok(length) = master.read(&mut buffer)
        && length > 0
    {
        printed.extend_from_slice(&buffer[..length]);
        let text = String::from_utf8_lossy(&printed);
        if parts.is_some_and(|parts| parts.iter().all(|part| text.contains(part))) {
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
            kill_process(pid, Signal::INT).unwrap();
            parts = None;
        }
    }
    child.wait().unwrap();
    String::from_utf8_lossy(&printed).replace("\r\n", "\n")
}
