//! Consuming on every backend: each test body is written once and runs on the embedded backend, on Redis and on a Redis
//! Cluster.

#[macro_use]
mod env;
mod record;

mod retry;
mod shared;
