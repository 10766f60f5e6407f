//! Consumers: deliver the messages of the partitions of this process to its handlers.
//!
//! Upstream: applications subscribe. Downstream: `group` assigns partitions, the backend holds the messages.
//!
//! A message passes `fetcher` (reads, as `fetch_credits` selects), `partition_driver` (the task that owns the
//! `partition_state`, which keeps it in `key_queues`), `handler_pool` (calls the handler) and `retry_or_dead_letter`
//! (decides its disposition); the driver settles it.

// The subscription and its partitions.
mod capacity_pool;
mod partition_set;
mod subscription;
mod subscription_context;

// The path of a message.
mod fetch_credits;
mod fetcher;
mod handler_pool;
mod key_queues;
mod partition_context;
mod partition_driver;
mod retry_or_dead_letter;

// The state machine of a partition.
mod partition_state;
mod reclaim_state;
mod settle_state;
mod shutdown_state;

// Failures and resizes.
mod barrier_watcher;
mod data_loss_recovery;
mod repartition_barrier;

// Messages for holders of leases instead of a handler.
mod pull;
mod pull_driver;
mod pull_member;
mod pull_reassign;
mod pull_streams;

// Background work and metrics.
mod delay_scheduler;
mod maintenance;
mod metrics;
mod runtime_waker;
mod shared_tasks;

pub use pull::{LeaseResult, MessageLease, PullRequest, PulledMessage, Puller};
pub(crate) use shared_tasks::SharedTasks;
pub use subscription::Subscription;
pub use subscription_context::SubscriptionStats;
