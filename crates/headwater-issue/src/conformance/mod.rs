//! The public suite: every promise of a store, as a test whose name is the promise.
//!
//! A store's author gives [`conformance_suite!`](crate::conformance_suite) an expression that makes an [`Env`]; the macro
//! makes one `#[test]` of each promise, in a module per subject:
//!
//! ```ignore
//! mod my_store {
//!     async fn setup() -> headwater_issue::conformance::TestResult<headwater_issue::conformance::Env> {
//!         let store = MyStore::open().await?;
//!         headwater_issue::conformance::Env::new(store.clone(), store, |duration| { ... }).await
//!     }
//!     headwater_issue::conformance_suite!(setup());
//! }
//! ```
//!
//! Promises: time passes only when a test says so ([`Env::pass`]), nothing is asserted to be fast, and random sequences
//! print their seed. Not here: how a store is opened, or killed.

#![allow(missing_docs, reason = "the name of a promise is its documentation")]

mod env;
mod list;
mod random;

pub mod bad_input;
pub mod claims;
pub mod completion;
pub mod concurrency;
pub mod differential;
pub mod failure;
pub mod operator;
pub mod outbox;
pub mod record;
pub mod sweep;
pub mod transaction;

pub use env::{Env, Failure, TestResult};
pub use list::run;
