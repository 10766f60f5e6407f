//! Issue-centric processing: inbox, nudge, claim, worker, complete, outbox and sweeper, with SQL as the truth.
//!
//! Upstream: `headwater`. Downstream: `headwater-bus` and a SQL store.
//! Not here yet: everything. The crate holds its place in the workspace; see CHANGELOG.md for what works.
