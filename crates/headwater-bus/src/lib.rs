//! Typed events, subscriptions, sessions with replay, and a distributed main loop.
//!
//! Upstream: applications and `headwater-issue`. Downstream: `headwater-queue`.
//! Not here yet: everything. The crate holds its place in the workspace; see CHANGELOG.md for what works.
