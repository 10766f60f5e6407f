//! Random numbers: a small seeded generator for faults, entropy for ports and unique names.

use std::ops::Range;
use std::process;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;

/// A seeded generator: the same seed gives the same faults.
#[derive(Debug)]
pub struct TestRandom(Rng);

impl TestRandom {
    /// The generator of a seed.
    pub fn seeded(seed: u64) -> TestRandom {
        TestRandom(Rng::with_seed(seed))
    }

    pub(crate) fn from_entropy() -> TestRandom {
        TestRandom(Rng::new())
    }

    /// Uses the seed in `HEADWATER_SEED`, or a random one. Prints the seed, so that a failed test can be repeated.
    pub fn for_test() -> TestRandom {
        let chosen = std::env::var("HEADWATER_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = chosen.unwrap_or_else(|| fastrand::u64(..));
        println!("HEADWATER_SEED={seed}");
        TestRandom::seeded(seed)
    }

    /// The next number, from `range`, which is not empty.
    pub fn between(&mut self, range: Range<u64>) -> u64 {
        self.0.u64(range)
    }
}

/// A name that is unique across tests and processes: `prefix_PID_RANDOM_COUNT`.
pub fn unique(prefix: &str) -> String {
    static START: LazyLock<u32> = LazyLock::new(|| fastrand::u32(..));
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}_{:x}_{:x}_{count}", process::id(), *START)
}
