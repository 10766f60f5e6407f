//! What benchmarks have in common: a raw loop to compare with, rounds, figures, processor time.
//!
//! Upstream: the benchmarks of all crates. Machines are noisy, so what counts is the ratio of two things that took turns
//! on the same machine in the same run; see [`BenchReport`].

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

/// What the command line asks of a benchmark.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Whether a first look will do: `--quick`.
    pub quick: bool,
    /// Settings with a number: `--rounds=9`.
    numbers: Vec<(String, usize)>,
    /// The parts that are wanted; all if none is named.
    parts: Vec<String>,
}

impl Request {
    /// Reads the command line. `cargo bench` adds `--bench`, which says nothing.
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

    /// The number that a setting such as `--rounds` has, if it has one.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.numbers.iter().find(|(known, _)| known == name).map(|(_, number)| *number)
    }

    /// Whether a part is wanted.
    pub fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }
}
