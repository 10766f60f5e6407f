//! Test suite for backends of `headwater-stream`: one test per guarantee, named after the guarantee.
//!
//! The author of a backend passes [`stream_suite!`](crate::stream_suite) an expression that creates a
//! [`StreamTestEnv`]. The macro generates one `#[test]` per test case, in a module per topic:
//!
//! ```ignore
//! mod my_backend {
//!     use headwater_conformance::stream::{StreamTestEnv, TestResult};
//!
//!     async fn setup() -> TestResult<StreamTestEnv> {
//!         let backend = MyBackend::open().await?;
//!         Ok(StreamTestEnv::new(backend.clone(), backend))
//!     }
//!     headwater_conformance::stream_suite!(setup());
//! }
//! ```
//!
//! `stream_suite!(setup(), faulty)` skips the cases that only hold while every reply arrives. It is for a backend on a
//! network with injected faults, wrapped in [`Retrying`]. There are no other options: a backend passes all tests or does not
//! conform.
//!
//! Guarantees: tests wait only where time is the subject, never require an operation to be faster than seconds, and use
//! unique names, so they can share one server. Not here: opening, restarting or killing a backend.

#![allow(missing_docs, reason = "the name of a test case is its documentation")]

mod cases;
mod env;
mod retrying;
mod steps;

pub mod append;
pub mod append_once;
pub mod bad_input;
pub mod close;
pub mod concurrency;
pub mod dedup;
pub mod delays;
pub mod disconnect_reader;
pub mod fault_injection;
pub mod fences;
pub mod groups;
pub mod leases;
pub mod pending;
pub mod range;
pub mod read;
pub mod reclaim;
pub mod registry;
pub mod rename;
pub mod settle;
pub mod stats;
pub mod tail;
pub mod trim;
pub mod wrong_type;

pub use crate::{TestFailure, TestResult};
pub use cases::{TEST_CASES, TestCase, run};
pub use env::StreamTestEnv;
pub use retrying::Retrying;
