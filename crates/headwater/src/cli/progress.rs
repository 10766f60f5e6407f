//! A progress line on standard error, shown only on a terminal.
//!
//! Guarantees: programs never see it; it is erased when the bar is dropped.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

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
}
