//! Producing, on every backend: each test body is written once and runs embedded, on Redis and on a Redis Cluster.

mod backlog;
mod delaying;
mod failing;
mod observing;
mod repeating;
mod sending;
mod setup;
