//! The public conformance suite for implementations of `Store`: one test per guarantee.
//!
//! [`store_suite!`](crate::store_suite) takes an expression that creates a [`StoreTestEnv`],
//! and generates one `#[test]` per case, in a module per subject:
//!
//! ```ignore
//! mod my_store {
//!     async fn setup() -> headwater_conformance::issue::TestResult<headwater_conformance::issue::StoreTestEnv> {
//!         let store = MyStore::open().await?;
//!         headwater_conformance::issue::StoreTestEnv::new(store.clone(), store, |duration| { ... }).await
//!     }
//!     headwater_conformance::store_suite!(setup());
//! }
//! ```
//!
//! Time advances only with [`StoreTestEnv::advance`]; no case depends on speed; random sequences print their seed. Not
//! here: opening a store, or killing its process.

#![allow(missing_docs, reason = "the name of a case is its documentation")]

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
pub mod runs;
pub mod sweep;
pub mod transaction;

pub use crate::{TestFailure, TestResult};
pub use cases::run;
pub use env::StoreTestEnv;
