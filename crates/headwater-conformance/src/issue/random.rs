//! Random numbers from a printed seed, so that a failed test can be reproduced.

use std::hash::{BuildHasher, RandomState};

/// SplitMix64 generator.
#[derive(Clone, Debug)]
pub(super) struct SeededRandom(u64);

impl SeededRandom {
    pub(super) fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A random element.
    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        let index = self.below(from.len() as u64);
        &from[usize::try_from(index).expect("an index of a slice")]
    }

    /// Shuffles the items.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            let other = self.below(end as u64 + 1);
            items.swap(end, usize::try_from(other).expect("an index of a slice"));
        }
    }
}

/// A number from the environment.
pub(super) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// `HEADWATER_SEED`, or a new seed; printed.
pub(super) fn seed() -> u64 {
    let seed = from_environment("HEADWATER_SEED")
        .unwrap_or_else(|| RandomState::new().hash_one("seed") >> 32);
    println!("HEADWATER_SEED={seed}");
    seed
}
