//! Producing, on every backend: each test body is written once and runs embedded, on Redis and on a Redis Cluster.

mod sending;
mod setup;
