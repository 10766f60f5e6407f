//! What tests and `cargo xtask chaos` tell each other: until when faults may begin, and counts, which are added up.
//!
//! Guarantees: one line of JSON per call, written at once, so that the lines of several processes do not mix. Without
//! `HEADWATER_CHAOS_REPORT` nothing is written.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// The variable with the path of the report.
const VARIABLE: &str = "HEADWATER_CHAOS_REPORT";

/// The variable with the time after which no further fault begins, in seconds since 1970.
const END_VARIABLE: &str = "HEADWATER_CHAOS_END";

/// Whether a test that repeats faults has to come to its end. Never without `HEADWATER_CHAOS_END`.
pub fn chaos_is_over() -> bool {
    let end = std::env::var(END_VARIABLE).ok().and_then(|end| end.parse().ok());
    let is_past = |end: u64| {
        SystemTime::now().duration_since(UNIX_EPOCH).is_ok_and(|now| now.as_secs() > end)
    };
    let is_over = end.is_some_and(is_past);
    if is_over {
        println!("no more faults: the time is over");
    }
    is_over
}

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
    /// The longest time in which confirmed writes could be lost, because they were not replicated.
    pub longest_loss_window: Duration,
}

impl ChaosCounts {
    /// Prints the counts and adds them to the report.
    pub fn report(&self, test: &str) -> Result<()> {
        let Self { sent, handled, doubled, lost, longest_stop, longest_loss_window } = self;
        let (stop_ms, window_ms) = (longest_stop.as_millis(), longest_loss_window.as_millis());
        let line = format!(
            "{{\"test\":\"{test}\",\"sent\":{sent},\"handled\":{handled},\"doubled\":{doubled},\"lost\":{lost},\"longest_stop_ms\":{stop_ms},\"longest_loss_window_ms\":{window_ms}}}\n"
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
