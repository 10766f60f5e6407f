//! Consumer tests on every backend: each test body runs embedded, on Redis and on a Redis Cluster.

#[macro_use]
mod fixture;
mod lossy_backend;
mod metric_recorder;
mod recording_handler;

mod backlog;
mod bad_handlers;
mod bad_input;
mod crash;
mod data_loss;
mod dead_shard;
mod dead_shard_revoke;
mod deleted;
mod disconnect;
mod dropped;
mod flow_control;
mod full_server;
mod lost_replies;
mod observability;
mod ordered;
mod owned;
mod prefix;
mod producer_dead_shard;
mod pull;
mod pull_dead_shard;
mod pull_lost_replies;
mod resize;
mod retry;
mod sequence;
mod shared;
mod slot_migration;
mod stalled_process;
mod timing;
mod two_groups;
