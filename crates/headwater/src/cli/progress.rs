//! Progress lines on standard error, shown only on a terminal.
//!
//! Guarantees: programs never see them; a line is erased when its work ends. Work that takes less than a second shows
//! none, except where the number of steps is known.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

/// Work that takes longer than this shows that it goes on.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
/// How often the line of waiting work is drawn.
const TICK: Duration = Duration::from_millis(200);

/// Starts a line; `total` is the number of steps if known.
pub(super) fn start(what: &'static str, total: Option<u64>) -> ProgressBar {
    let total = total.filter(|total| *total > 0);
    let template = match total {
        Some(_) => "[{bar:30}] {msg} {pos} of {len}, {per_sec}, {eta} left",
        None => "{msg} {pos}, {per_sec}",
    };
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
    let bar = bar.with_style(style.progress_chars("#>-")).with_message(what);
    bar.with_finish(ProgressFinish::AndClear)
}

/// Waits for `work`. After a second, a line says what it waits for, and for how long already.
pub(super) async fn waiting<T>(what: impl Into<String>, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        () = tokio::time::sleep(SHOWN_AFTER) => {}
    }
    let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed} so far");
    let spinner = ProgressBar::new_spinner().with_elapsed(SHOWN_AFTER).with_message(what.into());
    let spinner = spinner.with_style(style.expect("the template is valid"));
    let spinner = spinner.with_finish(ProgressFinish::AndClear);
    spinner.enable_steady_tick(TICK);
    let done = work.await;
    spinner.finish_and_clear();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_has_a_length_only_if_the_total_is_known() {
        for (total, length) in [(Some(100), Some(100)), (Some(0), None), (None, None)] {
            let bar = start("sent", total);
            bar.inc(50);
            assert_eq!((bar.length(), bar.position()), (length, 50));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_returns_what_the_work_returns() {
        for seconds in [0, 5] {
            let work = async {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                seconds
            };
            assert_eq!(waiting("waiting", work).await, seconds);
        }
    }
}
