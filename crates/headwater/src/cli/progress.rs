//! A progress line on standard error, shown only on a terminal.
//!
//! Guarantees: programs never see it; it is erased when the work is done.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum interval between updates.
const PAINT_EVERY: Duration = Duration::from_millis(100);
/// Width of the bar in characters.
const BAR: u64 = 30;

/// A progress line, erased on drop.
pub(super) struct ProgressBar {
    what: &'static str,
    total: Option<u64>,
    state: Mutex<ProgressState>,
}

struct ProgressState {
    done: u64,
    began: Instant,
    painted: Option<Instant>,
    is_shown: bool,
}

impl ProgressBar {
    /// Starts a line; `total` is the number of steps if known.
    pub(super) fn new(what: &'static str, total: Option<u64>) -> Self {
        let is_shown = std::io::stderr().is_terminal();
        let state = ProgressState { done: 0, began: Instant::now(), painted: None, is_shown };
        Self { what, total, state: Mutex::new(state) }
    }

    /// Adds completed steps.
    pub(super) fn add(&self, steps: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += steps;
        if !state.is_shown || state.painted.is_some_and(|at| at.elapsed() < PAINT_EVERY) {
            return;
        }
        state.painted = Some(Instant::now());
        let line = line(self.what, state.done, self.total, state.began.elapsed());
        let mut out = std::io::stderr().lock();
        let _ = write!(out, "\r{line}\u{1b}[K").and_then(|()| out.flush());
    }
}

impl Drop for ProgressBar {
    fn drop(&mut self) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.painted.is_some() {
            let _ = write!(std::io::stderr(), "\r\u{1b}[K");
        }
    }
}

fn line(what: &str, done: u64, total: Option<u64>, took: Duration) -> String {
    let rate = done as f64 / took.as_secs_f64().max(0.001);
    match total.filter(|total| *total > 0) {
        None => format!("{what} {done}, {rate:.0}/s"),
        Some(total) => {
            let full = (done.min(total) as u128 * u128::from(BAR) / u128::from(total)) as usize;
            let bar = format!("{}{}", "#".repeat(full), "-".repeat(BAR as usize - full));
            format!("[{bar}] {what} {done} of {total}, {rate:.0}/s")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_shows_the_completed_share() {
        let second = Duration::from_secs(1);
        let half = line("sent", 50, Some(100), second);
        assert_eq!(half, "[###############---------------] sent 50 of 100, 50/s");
        assert!(line("sent", 200, Some(100), second).starts_with(&format!("[{}]", "#".repeat(30))));
        assert_eq!(line("sent", 5, None, second), "sent 5, 5/s");
        assert_eq!(line("sent", 5, Some(0), second), "sent 5, 5/s");
    }
}
