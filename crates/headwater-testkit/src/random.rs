//! Random numbers: a small seeded generator for faults, entropy for ports and unique names.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::process;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// An xorshift generator: the same seed gives the same faults.
#[derive(Debug)]
pub struct TestRandom(u64);

impl TestRandom {
    /// The generator of a seed.
    pub fn seeded(seed: u64) -> TestRandom {
        // Zero is the one state xorshift never leaves; multiplying spreads small seeds.
        TestRandom(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn from_entropy() -> TestRandom {
        TestRandom::seeded(entropy())
    }

    /// Uses the seed in `HEADWATER_SEED`, or a random one. Prints the seed, so that a failed test can be repeated.
    pub fn for_test() -> TestRandom {
        let chosen = std::env::var("HEADWATER_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = chosen.unwrap_or_else(entropy);
        println!("HEADWATER_SEED={seed}");
        TestRandom::seeded(seed)
    }

    /// The next number, from `range`, which is not empty.
    pub fn between(&mut self, range: Range<u64>) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        range.start + self.0 % (range.end - range.start)
    }
}

/// A name that is unique across tests and processes: `prefix_PID_RANDOM_COUNT`.
pub fn unique(prefix: &str) -> String {
    static START: LazyLock<u32> = LazyLock::new(|| entropy() as u32);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}_{:x}_{:x}_{count}", process::id(), *START)
}

/// The standard library draws the keys of its hash maps from the operating system.
fn entropy() -> u64 {
    RandomState::new().hash_one(process::id())
}
