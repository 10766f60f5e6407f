#![doc = include_str!("../README.md")]

#[cfg(feature = "stream")]
pub mod stream;
