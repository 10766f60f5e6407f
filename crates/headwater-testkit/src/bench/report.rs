//! Prints results as a table.

use std::time::Duration;

/// The median of several measurements.
pub fn median(times: &[Duration]) -> Duration {
    percentile(times, 50)
}

/// The time below which `percent` of the measurements lie.
pub fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[(sorted.len() - 1) * percent / 100]
}

/// Prints each row as soon as it is measured.
///
/// A ratio is the median of the ratios of all rounds, so a disturbance of the machine affects both sides of a few
/// rounds.
#[derive(Debug, Default)]
pub struct BenchReport;

impl BenchReport {
    /// Begins a table.
    pub fn heading(&mut self, text: &str) {
        println!("\n{text}");
    }

    /// Throughput of both sides for a number of entries per round; more is better. Both lists are in round order.
    pub fn throughput(
        &mut self,
        name: &str,
        entries: usize,
        theirs: &[Duration],
        ours: &[Duration],
    ) {
        let mut ratios: Vec<f64> = theirs
            .iter()
            .zip(ours)
            .map(|(theirs, ours)| theirs.as_secs_f64() / ours.as_secs_f64())
            .collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let at = |percent| ratios[(ratios.len() - 1) * percent / 100];
        let per_second = |times| entries as f64 / median(times).as_secs_f64();
        println!(
            "  {name:<40} {:>10.0}/s   ours {:>10.0}/s   ratio {:>5.2}   ({:.2} to {:.2})",
            per_second(theirs),
            per_second(ours),
            at(50),
            at(0),
            at(100)
        );
    }

    /// Times of single events, by both sides or by ours only; less is better.
    pub fn latency(&mut self, name: &str, theirs: Option<&[Duration]>, ours: &[Duration]) {
        for percent in [50, 99] {
            let mine = percentile(ours, percent);
            let name = format!("{name}, p{percent}");
            match theirs.map(|times| percentile(times, percent)) {
                Some(theirs) => println!(
                    "  {name:<40} {theirs:>10.1?}     ours {mine:>10.1?}     ratio {:>5.2}",
                    mine.as_secs_f64() / theirs.as_secs_f64()
                ),
                None => println!("  {name:<40} {:>12} ours {mine:>10.1?}", ""),
            }
        }
    }

    /// Delays with a target for each; less is better.
    pub fn delays(&mut self, name: &str, aim: Duration, times: &[Duration]) {
        let (middle, longest) = (median(times), percentile(times, 100));
        println!("  {name:<40} p50 {middle:>9.2?}   max {longest:>9.2?}   target {aim:?}");
    }

    /// Cost of a large case relative to a small one; 1 is best.
    pub fn cost(&mut self, name: &str, small: Duration, large: Duration) {
        println!("  {name:<64} cost {:>5.2}", large.as_secs_f64() / small.as_secs_f64());
    }
}
