//! Consumers: how the messages of the partitions of this process are handled.
//!
//! Upstream: applications subscribe. Downstream: `group` says which partitions, the backend has the messages.
