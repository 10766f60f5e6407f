//! Shared benchmark code: a raw client as a baseline, statistics, and CPU time.
//!
//! Upstream: the benchmarks of all crates. Machines are noisy, so results are ratios of two candidates that alternate
//! in the same run; see [`BenchReport`].

mod processor;
mod raw;
mod report;

use std::time::{Duration, Instant};

use anyhow::Result;

pub use self::processor::processor_seconds;
pub use self::raw::{Pipelines, Raw, RawBatches, command, read_command};
pub use self::report::{BenchReport, median, percentile};

/// How long some work takes.
pub fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

/// Command-line options of a benchmark.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Run with less work: `--quick`.
    pub quick: bool,
    /// Settings with a number: `--rounds=9`.
    numbers: Vec<(String, usize)>,
    /// The parts to run; all if empty.
    parts: Vec<String>,
}

impl Request {
    /// Reads the command line. Ignores `--bench`, which `cargo bench` adds.
    pub fn from_arguments() -> Self {
        let mut request = Self::default();
        for argument in std::env::args().skip(1) {
            if argument == "--quick" {
                request.quick = true;
            } else if let Some((name, number)) = argument.split_once('=')
                && let Ok(number @ 1..) = number.parse()
            {
                request.numbers.push((name.to_owned(), number));
            } else if !argument.starts_with('-') {
                request.parts.push(argument);
            }
        }
        request
    }

    /// The value of a numeric option such as `--rounds`, if given.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.numbers.iter().find(|(known, _)| known == name).map(|(_, number)| *number)
    }

    /// Whether a part is wanted.
    pub fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }
}
