//! Consumers: how the messages of the partitions of this process are handled.
//!
//! Upstream: applications subscribe. Downstream: `group` says which partitions, the backend has the messages.
//!
//! The way of a message: `feed` reads it as `plan` says, `worker` keeps it until a `runner` calls the handler, `verdict` says what
//! becomes of it, `settling` ends its delivery. The others look after what goes wrong meanwhile.

// In dependency order: each module uses only those above it.
mod gate;
mod lanes;
mod verdict;

mod pace;

mod job;
mod meters;

mod rescue;

mod feed;
mod plan;
mod room;
mod worker;

mod runner;
mod settling;

mod adoption;
mod closing;
mod resting;

mod mover;
mod pulse;
mod upkeep;

mod consumers;
mod workplace;

mod gatekeeper;

mod subscription;

pub(crate) use consumers::Consumers;
pub use job::SubscriptionStats;
pub use subscription::Subscription;
