//! The public suite: every promise of a store, as a test whose name is the promise.
//!
//! A store's author gives [`store_conformance_suite!`](crate::store_conformance_suite) an expression that makes an [`StoreTestEnv`]; the macro
//! makes one `#[test]` of each promise, in a module per subject:
//!
//! ```ignore
//! mod my_store {
//!     async fn setup() -> headwater_issue::conformance::StoreTestResult<headwater_issue::conformance::StoreTestEnv> {
//!         let store = MyStore::open().await?;
//!         headwater_issue::conformance::StoreTestEnv::new(store.clone(), store, |duration| { ... }).await
//!     }
//!     headwater_issue::store_conformance_suite!(setup());
//! }
//! ```
//!
//! Promises: time passes only when a test says so ([`StoreTestEnv::pass`]), nothing is asserted to be fast, and random sequences
//! print their seed. Not here: how a store is opened, or killed.

#![allow(missing_docs, reason = "the name of a promise is its documentation")]

mod cases;
mod env;
mod random;

pub mod admin;
pub mod bad_input;
pub mod claims;
pub mod completion;
pub mod concurrency;
pub mod differential;
pub mod failure;
pub mod outbox;
pub mod record;
pub mod sweep;
pub mod transaction;

pub use cases::run;
pub use env::{StoreTestEnv, StoreTestResult, TestFailure};
