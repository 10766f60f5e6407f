//! Prints figures as a table.

use std::time::Duration;

/// The middle of several measurements.
pub(crate) fn median(times: &[Duration]) -> Duration {
    percentile(times, 50)
}

/// The time below which `percent` of the measurements lie.
pub(crate) fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[(sorted.len() - 1) * percent / 100]
}

/// Writes rows as they come, so that a long run can be watched.
pub(crate) struct Report;

impl Report {
    pub(crate) fn heading(&mut self, text: &str) {
        println!("\n{text}");
    }

    pub(crate) fn throughput(
        &mut self,
        name: &str,
        entries: usize,
        theirs: &[Duration],
        ours: &[Duration],
    ) {
        let per_second = |times| entries as f64 / median(times).as_secs_f64();
        let (theirs, ours) = (per_second(theirs), per_second(ours));
        println!(
            "  {name:<34} {theirs:>10.0}/s   ours {ours:>10.0}/s   ratio {:>5.2}",
            ours / theirs
        );
    }

    pub(crate) fn latency(&mut self, name: &str, theirs: Option<&[Duration]>, ours: &[Duration]) {
        for percent in [50, 99] {
            let mine = percentile(ours, percent);
            let name = format!("{name}, p{percent}");
            match theirs.map(|times| percentile(times, percent)) {
                Some(theirs) => println!(
                    "  {name:<34} {theirs:>10.1?}     ours {mine:>10.1?}     ratio {:>5.2}",
                    mine.as_secs_f64() / theirs.as_secs_f64()
                ),
                None => println!("  {name:<34} {:>12} ours {mine:>10.1?}", ""),
            }
        }
    }

    pub(crate) fn cost(&mut self, name: &str, small: Duration, large: Duration) {
        println!("  {name:<58} cost {:>5.2}", large.as_secs_f64() / small.as_secs_f64());
    }
}
