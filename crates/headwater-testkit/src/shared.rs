//! Servers shared by all test processes of one run.
//!
//! Under `cargo nextest` every test is a process. The first one that needs a server starts it while holding a
//! file lock and writes a `ready` file; the others read that. The guard of the home stops the
//! server when the runner is gone (see `temp_server_dir`).

use std::env;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process;
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::process::read_proc_stat;
use crate::temp_server_dir::TempServerDir;

/// Tells a child of a test which run it belongs to: `KEY:PID`.
pub(crate) const RUN_VARIABLE: &str = "HEADWATER_TESTKIT_RUN";

/// The program that runs each test as a process.
const RUNNER: &str = "cargo-nextest";

/// The test run this process belongs to.
pub(crate) struct TestRun {
    key: String,
    /// When this process is gone, the run is over.
    watched: u32,
}

impl TestRun {
    pub(crate) fn current() -> TestRun {
        if let Ok(run) = env::var(RUN_VARIABLE)
            && let Some((key, watched)) = run.rsplit_once(':')
            && let Ok(watched) = watched.parse()
        {
            return TestRun { key: key.to_string(), watched };
        }
        match (env::var("NEXTEST_RUN_ID"), runner()) {
            (Ok(key), Some(watched)) => TestRun { key, watched },
            _ => TestRun { key: own_key(), watched: process::id() },
        }
    }

    /// The value of `RUN_VARIABLE` for children.
    pub(crate) fn to_variable(&self) -> String {
        format!("{}:{}", self.key, self.watched)
    }

    fn server_dir_path(&self, kind: &str) -> PathBuf {
        env::temp_dir().join(format!("headwater-testkit-{}-{kind}", self.key))
    }
}

/// Opens the shared server of this `kind`; starts it if needed.
///
/// `start` runs the server in the server directory, leaves it running and returns the text of the `ready` file.
/// `open` makes a handle from that text and fails if the server does not answer.
pub(crate) fn server<T>(
    kind: &str,
    start: impl FnOnce(&Arc<TempServerDir>) -> Result<String>,
    open: impl Fn(&str) -> Result<T>,
) -> Result<T> {
    let run = TestRun::current();
    let path = run.server_dir_path(kind);
    let ready = path.join("ready");
    let open_ready = || open(&fs::read_to_string(&ready).ok()?).ok();
    if let Some(server) = open_ready() {
        return Ok(server);
    }

    fs::create_dir_all(&path)?;
    let lock = File::create(path.join("lock"))?;
    lock.lock()?;
    if let Some(server) = open_ready() {
        return Ok(server);
    }
    let server_dir = Arc::new(TempServerDir::shared(&path, run.watched)?);
    let text = start(&server_dir).with_context(|| format!("cannot start the shared {kind}"))?;
    // By rename, because others read without the lock.
    let unfinished = path.join("ready.new");
    fs::write(&unfinished, &text)?;
    fs::rename(&unfinished, &ready)?;
    open(&text)
}

/// The test runner among the ancestors of this process.
fn runner() -> Option<u32> {
    let mut process = read_proc_stat(process::id())?;
    while process.parent != 0 {
        let parent = read_proc_stat(process.parent)?;
        if parent.name == RUNNER {
            return Some(process.parent);
        }
        process = parent;
    }
    None
}

/// Process id and start time: unique even if the id is reused.
fn own_key() -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let started = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(19));
    format!("{}-{}", process::id(), started.unwrap_or_default())
}
