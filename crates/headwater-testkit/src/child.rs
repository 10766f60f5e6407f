//! A child process for crash tests: the test binary itself, running one other test.
//!
//! Guarantees: the child belongs to the same test run (it shares the same servers), and is killed with the parent.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process::{Launch, Process, ProcessOutput};
use crate::shared::{RUN_VARIABLE, TestRun};
use crate::temp_server_dir::TempServerDir;
use crate::wait::{lock, poll};

/// The test binary, started again to run one test; killed with SIGKILL on drop.
#[derive(Debug)]
pub struct Child {
    process: Process,
    pid: u32,
    lines: Mutex<Receiver<String>>,
}

impl Child {
    /// Runs the test `name` (its full path, ignored or not) of this binary with more environment variables.
    pub fn spawn_self(name: &str, environment: &[(&str, &str)]) -> Result<Child> {
        let owned = |(key, value): &(&str, &str)| (key.to_string(), value.to_string());
        let run = (RUN_VARIABLE.to_string(), TestRun::current().to_variable());
        let launch = Launch {
            program: env::current_exe()?,
            arguments: ["--exact", name, "--nocapture", "--include-ignored"]
                .map(Into::into)
                .to_vec(),
            // The run first, so that a test of the run itself can say otherwise.
            environment: [run].into_iter().chain(environment.iter().map(owned)).collect(),
            user: None,
            output: ProcessOutput::Pipe,
        };
        let server_dir = Arc::new(TempServerDir::private()?);
        let process = Process::spawn(&server_dir, &server_dir.new_directory("child")?, launch)?;
        let pid = process.pid()?;
        let stdout = process.take_stdout().context("the child has no standard output")?;

        // Ends with the child, which closes the pipe.
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Child { process, pid, lines: Mutex::new(lines) })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The next line the child prints.
    pub fn line(&self, limit: Duration) -> Result<String> {
        match lock(&self.lines).recv_timeout(limit) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => bail!("the child printed nothing for {limit:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the child has ended"),
        }
    }

    /// Waits for a line with `marker` in it and returns what follows the marker.
    ///
    /// The test harness prints on the same lines, so use a distinctive marker.
    pub fn line_after(&self, marker: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.line(left).with_context(|| format!("no line with {marker:?}"))?;
            if let Some((_, rest)) = line.split_once(marker) {
                return Ok(rest.trim().to_string());
            }
        }
    }

    /// Kills the child with SIGKILL and waits until it is gone.
    pub fn kill9(&self) -> Result<()> {
        self.process.kill9()
    }

    /// Freezes the child (SIGSTOP).
    pub fn pause(&self) -> Result<()> {
        self.process.pause()
    }

    /// Resumes a paused child (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.process.resume()
    }

    /// Waits until the child exits; a failed test exits without success.
    pub fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        poll("the child to end", limit, || self.process.try_wait())
    }
}
