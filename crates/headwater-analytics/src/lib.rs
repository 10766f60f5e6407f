//! The DuckDB sink and its reports. Knows the bus and below, nothing of issues.
//!
//! Upstream: `headwater`. Downstream: `headwater-bus` and DuckDB.
//! Not here yet: everything. The crate holds its place in the workspace; see CHANGELOG.md for what works.
