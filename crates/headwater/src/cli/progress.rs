//! Progress of long work: one line on standard error that is painted over, and only on a terminal.
//!
//! Promises: programs that read us never see it; it is gone when the work is done, so that the answer stands alone.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the line is painted.
const PAINT_EVERY: Duration = Duration::from_millis(100);
/// Characters of the bar.
const BAR: u64 = 30;

/// How far something is.
pub(super) struct Progress {
    what: &'static str,
    total: Option<u64>,
    state: Mutex<State>,
}

struct State {
    done: u64,
    began: Instant,
    painted: Option<Instant>,
    is_shown: bool,
}

impl Progress {
    /// Work of so many steps, if that is known.
    pub(super) fn new(what: &'static str, total: Option<u64>) -> Self {
        let is_shown = std::io::stderr().is_terminal();
        let state = State { done: 0, began: Instant::now(), painted: None, is_shown };
        Self { what, total, state: Mutex::new(state) }
    }

    /// So many more are done.
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

impl Drop for Progress {
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
        None => format!("{what} {done}, {rate:.0} a second"),
        Some(total) => {
            let full = (done.min(total) as u128 * u128::from(BAR) / u128::from(total)) as usize;
            let bar = format!("{}{}", "#".repeat(full), "-".repeat(BAR as usize - full));
            format!("[{bar}] {what} {done} of {total}, {rate:.0} a second")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_full_as_the_work_is_done() {
        let second = Duration::from_secs(1);
        let half = line("sent", 50, Some(100), second);
        assert_eq!(half, "[###############---------------] sent 50 of 100, 50 a second");
        assert!(line("sent", 200, Some(100), second).starts_with(&format!("[{}]", "#".repeat(30))));
        assert_eq!(line("sent", 5, None, second), "sent 5, 5 a second");
        assert_eq!(line("sent", 5, Some(0), second), "sent 5, 5 a second");
    }
}
