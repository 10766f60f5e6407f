//! Counts of a test for `cargo xtask chaos`, which adds them up.
//!
//! Guarantees: one line of JSON per call, written at once, so that the lines of several processes do not mix. Without
//! `HEADWATER_CHAOS_REPORT` nothing is written.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};

/// The variable with the path of the report.
const VARIABLE: &str = "HEADWATER_CHAOS_REPORT";

/// What happened to the messages of a test.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChaosCounts {
    /// Messages confirmed to a producer.
    pub sent: u64,
    /// Those of them that were handled by all groups.
    pub handled: u64,
    /// Deliveries of messages that were handled before.
    pub doubled: u64,
    /// Confirmed messages that were not handled: a server lost them with writes that were not replicated.
    pub lost: u64,
    /// The longest time from sending a message to a partition of a healthy server until it was handled.
    pub longest_stop: Duration,
}

impl ChaosCounts {
    /// Prints the counts and adds them to the report.
    pub fn report(&self, test: &str) -> Result<()> {
        let Self { sent, handled, doubled, lost, longest_stop } = self;
        let longest_stop_ms = longest_stop.as_millis();
        let line = format!(
            "{{\"test\":\"{test}\",\"sent\":{sent},\"handled\":{handled},\"doubled\":{doubled},\"lost\":{lost},\"longest_stop_ms\":{longest_stop_ms}}}\n"
        );
        print!("{line}");
        if let Some(path) = std::env::var_os(VARIABLE) {
            let mut report =
                OpenOptions::new().create(true).append(true).open(&path).with_context(|| {
                    format!("cannot open the chaos report `{}`", path.display())
                })?;
            report.write_all(line.as_bytes())?;
        }
        Ok(())
    }
}
