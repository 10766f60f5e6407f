//! Chance: for names that are unique and for waits that are spread. Nothing secret.

use std::hash::{BuildHasher, RandomState};

/// Random bits; the standard library draws the keys of its hash maps from the operating system and counts on.
pub(crate) fn bits() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// A number from 0 to 1.
pub(crate) fn part() -> f64 {
    bits() as f64 / u64::MAX as f64
}
