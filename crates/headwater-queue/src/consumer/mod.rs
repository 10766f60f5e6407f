//! Consumers: deliver the messages of the partitions of this process to its handlers.
//!
//! Upstream: applications subscribe. Downstream: `group` assigns partitions, the backend holds the messages.
//!
//! A message passes `fetcher` (reads, as `fetch_plan` selects), `partition_consumer` (keeps it in `key_queues`),
//! `handler_task` (calls the handler), `retry_or_dead_letter` (decides its disposition) and `ack_batcher` (settles it).

// The subscription and its partitions.
mod partition_set;
mod subscription;
mod subscription_context;

// The path of a message.
mod capacity;
mod fetch_plan;
mod fetcher;
mod key_queues;
mod partition_consumer;

mod handler_task;
mod retry_or_dead_letter;

mod ack_batcher;
mod in_place_retry;
mod shutdown;

// Failures and resizes.
mod barrier_watcher;
mod data_loss_recovery;
mod reclaim;
mod repartition_barrier;

// Background work and metrics.
mod delay_scheduler;
mod maintenance;
mod metrics;
mod runtime_waker;
mod shared_tasks;

pub(crate) use shared_tasks::SharedTasks;
pub use subscription::Subscription;
pub use subscription_context::SubscriptionStats;
