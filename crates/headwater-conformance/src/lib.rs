#![doc = include_str!("../README.md")]

#[cfg(feature = "bus")]
pub mod bus;
#[cfg(feature = "issue")]
pub mod issue;
#[cfg(feature = "stream")]
pub mod stream;

mod failure;

pub use failure::{TestFailure, TestResult};
