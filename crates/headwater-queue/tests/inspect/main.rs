//! Topics, inspection, dead letters and administration, on every backend: each test body is written once and runs
//! embedded, on Redis and on a Redis Cluster.

mod fixture;

mod active_subscription;
mod dead_letters;
mod groups;
mod interrupted;
mod messages;
mod pending;
mod races;
mod remove_group;
mod replay;
mod replay_batches;
mod reset;
mod sampler;
mod tail;
mod threads;
mod topics;
mod trim;
