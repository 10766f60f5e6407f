//! Producer tests on every backend: each test body runs embedded, on Redis and on a Redis Cluster.

mod backlog;
mod delayed;
mod failures;
mod idempotent;
mod observability;
mod send;
mod setup;
