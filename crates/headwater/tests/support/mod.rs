//! The real binary as a child of a test, with its logs and an HTTP client.

// Each test file uses its own part of this.
#![allow(dead_code)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub(crate) mod cli;
pub(crate) mod desk;
pub(crate) mod disk;
pub(crate) mod hostile_text;
pub(crate) mod model;
pub(crate) mod pty;
pub(crate) mod receivers;
pub(crate) mod sender;
pub(crate) mod tool_desk;
pub(crate) mod tool_service;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Timeout of every wait, for slow and busy machines.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Temporary working directory of a server: its data and settings file.
pub(crate) struct ServerDir {
    directory: tempfile::TempDir,
    environment: Vec<(String, String)>,
    program: PathBuf,
}

impl ServerDir {
    pub(crate) fn new() -> Result<Self> {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_headwater"));
        Ok(Self { directory: tempfile::tempdir()?, environment: Vec::new(), program })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Runs this program instead of the binary.
    pub(crate) fn program(self, program: PathBuf) -> Self {
        Self { program, ..self }
    }

    /// Writes `headwater.toml`.
    pub(crate) fn settings(self, text: &str) -> Result<Self> {
        std::fs::write(self.path().join("headwater.toml"), text)?;
        Ok(self)
    }

    /// Sets an environment variable for everything that runs here.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A command of the binary here, without HEADWATER_ variables of the environment, and on any free port.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HEADWATER_") {
                command.env_remove(name);
            }
        }
        command.env("HEADWATER_HTTP_LISTEN", "127.0.0.1:0");
        command.envs(self.environment.iter().cloned());
        command.args(arguments).current_dir(self.path()).stdin(Stdio::null());
        command
    }

    /// Runs the binary and returns its output.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<Output> {
        Ok(self.command(arguments).output()?)
    }

    /// Starts `serve` on a free port and waits until it listens.
    pub(crate) fn serve(&self, arguments: &[&str]) -> Result<Server> {
        let always = ["serve", "--http-listen", "127.0.0.1:0"];
        Server::start(self.command(&[&always[..], arguments].concat()))
    }

    /// Starts `serve` on a free port without waiting.
    pub(crate) fn serve_soon(&self, arguments: &[&str]) -> Result<Server> {
        let always = ["serve", "--http-listen", "127.0.0.1:0"];
        Server::spawn(self.command(&[&always[..], arguments].concat()))
    }

    /// Starts the binary without waiting.
    pub(crate) fn start_soon(&self, arguments: &[&str]) -> Result<Server> {
        Server::spawn(self.command(arguments))
    }

    /// Starts `worker` and waits until it listens.
    pub(crate) fn worker(&self, arguments: &[&str]) -> Result<Server> {
        Server::start(self.command(&[&["worker"][..], arguments].concat()))
    }

    /// A path below the dir, as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.path().join(name).display().to_string()
    }
}

/// A running binary, killed with -9 when dropped.
pub(crate) struct Server {
    child: Child,
    logs: Arc<Mutex<Vec<Value>>>,
    pub(crate) address: SocketAddr,
    pub(crate) client: reqwest::Client,
}

impl Server {
    /// Starts the binary without waiting.
    fn spawn(mut command: Command) -> Result<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("failed to start the binary")?;
        let logs: Arc<Mutex<Vec<Value>>> = Arc::default();
        let stderr = child.stderr.take().context("no standard error")?;
        let kept = Arc::clone(&logs);
        // Ends when the child closes the pipe.
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                kept.lock().expect("no panic").push(line);
            }
        });
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        Ok(Self { child, logs, address, client: client() })
    }

    /// Starts the binary and waits until it listens.
    fn start(command: Command) -> Result<Self> {
        let mut server = Self::spawn(command)?;
        server.listening()?;
        Ok(server)
    }

    /// Waits until it listens.
    pub(crate) fn listening(&mut self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(line) = self.find_log("listening") {
                let address = line["address"].as_str().context("an address")?;
                self.address = address.parse()?;
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                thread::sleep(Duration::from_millis(100));
                bail!("the binary ended with {status}:\n{}", self.log());
            }
            if Instant::now() > deadline {
                bail!("the binary does not listen:\n{}", self.log());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn find_log(&self, message: &str) -> Option<Value> {
        let logs = self.logs.lock().expect("no panic");
        let contains =
            |line: &&Value| line["message"].as_str().is_some_and(|it| it.contains(message));
        logs.iter().find(contains).cloned()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log so far, as text.
    pub(crate) fn log(&self) -> String {
        let logs = self.logs.lock().expect("no panic");
        logs.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Reads what it prints on its standard output until a line begins with `begin`, and returns this line.
    pub(crate) fn printed_line(&mut self, begin: &str) -> Result<String> {
        let stdout = self.child.stdout.as_mut().context("no standard output")?;
        let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
        lines.find(|line| line.starts_with(begin)).with_context(|| format!("no line {begin:?}"))
    }

    /// Waits for a log line whose message contains this.
    pub(crate) fn wait_for_log(&self, message: &str) -> Result<Value> {
        let what = format!("the log line {message:?}");
        wait_until(&what, LIMIT, || self.find_log(message).is_some())
            .with_context(|| self.log())?;
        self.find_log(message).context("the log line was found")
    }

    pub(crate) async fn get(&self, path: &str) -> Result<(u16, Value)> {
        answer(self.client.get(self.url(path)).send().await?).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<(u16, Value)> {
        answer(self.client.post(self.url(path)).json(body).send().await?).await
    }

    /// Polls until `condition` holds for the response.
    pub(crate) async fn until(
        &self,
        path: &str,
        condition: impl Fn(u16, &Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let (status, body) = self.get(path).await.with_context(|| self.log())?;
            if condition(status, &body) {
                return Ok(body);
            }
            if Instant::now() > deadline {
                bail!("condition not met for {path}: {status} {body:#}\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.id())?).context("a process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Whether the process has exited.
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Waits until the process has exited.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut status = None;
        wait_until("the binary to end", limit, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        })?;
        status.context("it has ended")
    }

    /// Sends SIGTERM and waits for the exit.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(LIMIT)
    }

    pub(crate) fn kill9(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An HTTP client. It needs a TLS provider although the tests do not use TLS.
pub(crate) fn client() -> reqwest::Client {
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    // No pooled connections: the server closes idle ones, and a blocking test would notice only after the next request.
    let client = reqwest::Client::builder().timeout(LIMIT).no_proxy().pool_max_idle_per_host(0);
    client.build().expect("a client")
}

pub(crate) async fn answer(response: reqwest::Response) -> Result<(u16, Value)> {
    let status = response.status().as_u16();
    let text = response.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Ok((status, body))
}

/// Waits for a condition without blocking the runtime.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        anyhow::ensure!(Instant::now() < deadline, "timed out after {LIMIT:?} waiting for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Whether the answer of a search has looked at everything: each source has a limited time, which is too short on a busy machine.
pub(crate) fn is_whole_search(answer: &Value) -> bool {
    let is_searched = |source: &Value| source["problem"].is_null();
    let sources = answer["sources"].as_array();
    sources.is_some_and(|all| all.iter().all(is_searched))
        && has_looked_at_all_topics(&answer["sources"].to_string())
}

/// The same of the page of a search.
pub(crate) fn is_whole_search_page(page: &str) -> bool {
    !page.contains("not searched") && has_looked_at_all_topics(page)
}

/// Whether each `in 2 of 2 topics` in this text has the same number twice, and no topic did not answer.
fn has_looked_at_all_topics(text: &str) -> bool {
    if text.contains("did not answer") {
        return false;
    }
    let counts = |before: &str| {
        let (_, counts) = before.rsplit_once(" in ")?;
        let (looked_at, all) = counts.split_once(" of ")?;
        Some((looked_at.parse::<usize>().ok()?, all.parse::<usize>().ok()?))
    };
    text.split(" topics").filter_map(counts).all(|(looked_at, all)| looked_at == all)
}

/// Output of a process as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Creates a directory below the working directory.
pub(crate) fn directory(dir: &ServerDir, name: &str) -> Result<PathBuf> {
    let path = dir.path().join(name);
    std::fs::create_dir_all(&path)?;
    Ok(path)
}
