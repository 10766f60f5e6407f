//! Set-up, tests, demo and benchmarks.

fn main() {}
