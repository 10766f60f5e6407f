//! Consuming on every backend: each test body is written once and runs on the embedded backend, on Redis and on a Redis
//! Cluster.

#[macro_use]
mod env;
mod counted;
mod forgetful;
mod record;

mod backlog;
mod bad_handlers;
mod bad_input;
mod crash;
mod cut_off;
mod dropped;
mod flow;
mod frozen;
mod growth;
mod lost_replies;
mod lost_server;
mod observed;
mod ordered;
mod owned;
mod retry;
mod sequence;
mod shared;
mod timing;
mod two_groups;
