//! Random numbers for unique names and jitter. Not for secrets.

use std::hash::{BuildHasher, RandomState};

/// A random number. The standard library seeds `RandomState` from the operating system.
pub(crate) fn u64() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// A random number from 0 to 1.
pub(crate) fn unit_f64() -> f64 {
    u64() as f64 / u64::MAX as f64
}
