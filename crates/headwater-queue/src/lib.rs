//! Partitioned topics: producers, consumers, rebalance, retry, dead letters and inspection.
//!
//! Upstream: applications and `headwater-bus`. Downstream: `headwater-stream`.
//! Not here yet: everything. The crate holds its place in the workspace; see CHANGELOG.md for what works.
