//! The public suite: every promise of a backend, as a test whose name is the promise.
//!
//! A backend's author gives [`stream_suite!`](crate::stream_suite) an expression that makes an [`Env`]; the
//! macro makes one `#[test]` of each promise, in a module per seam:
//!
//! ```ignore
//! mod my_backend {
//!     async fn setup() -> headwater_conformance::stream::TestResult<headwater_conformance::stream::Env> {
//!         let backend = MyBackend::open().await?;
//!         Ok(headwater_conformance::stream::Env::new(backend.clone(), backend))
//!     }
//!     crate::stream_suite!(setup());
//! }
//! ```
//!
//! There are no switches: a backend keeps all promises or is not one. `stream_suite!(setup(), faulty)` leaves out
//! the promises that only hold while every reply arrives; it is for a backend behind a network that loses some, wrapped
//! in [`Retrying`].
//!
//! Promises: time is awaited only where it is the subject, nothing is asserted to be faster than seconds, and names are
//! unique, so tests may share one server. Not here: how a backend is opened, restarted or killed.

#![allow(missing_docs, reason = "the name of a promise is its documentation")]

mod env;
mod failure;
mod list;
mod retrying;
mod steps;

pub mod append;
pub mod bad_input;
pub mod close;
pub mod concurrency;
pub mod dedup;
pub mod delays;
pub mod faults;
pub mod fences;
pub mod groups;
pub mod kinds;
pub mod leases;
pub mod once;
pub mod pending;
pub mod range;
pub mod read;
pub mod reclaim;
pub mod registry;
pub mod settle;
pub mod silence;
pub mod stats;
pub mod tail;
pub mod trim;

pub use env::Env;
pub use failure::{Failure, TestResult};
pub use list::{PROMISES, Promise, run};
pub use retrying::Retrying;
