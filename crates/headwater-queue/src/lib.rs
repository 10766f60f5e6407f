#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod error;
pub mod limits;
pub mod metrics;

mod keys;
mod partitioner;
mod topic;

mod interrupted;

mod dead_letter;
mod handler;
mod message;
mod trace;

mod config;
mod group;
mod queue;

mod topic_lock;
mod topics;

mod pagination;

mod merge_pages;

mod inspect;

mod dead_letters;
mod remove_group;
mod reset;
mod sampler;
mod tail;
mod trim;

mod producer;

mod consumer;

pub use config::{ConsumerConfig, MessageOrder, Mode, ProducerConfig, QueueConfig};
pub use consumer::{
    LeaseResult, MessageLease, PullRequest, PulledMessage, Puller, Subscription, SubscriptionStats,
};
pub use dead_letter::DeadLetter;
pub use dead_letters::{
    CandidatePage, DeadLetterFilter, DeadLetterQuery, DeadLetterSelection, DeadLetters,
    DeadLettersRevision, PurgeConfig, PurgeReport, ReplayCandidate, ReplayConfig, ReplayOrder,
    ReplayOutcomes, ReplayReadiness, ReplayRefusal, ReplayReport, ReplayedLetter,
    ReplayedLetterOutcome,
};
pub use error::{Interrupted, QueueError, Result};
pub use handler::{Handler, Outcome, RetryPolicy};
pub use headwater_stream::Backoff;
pub use inspect::{
    Bound, ConsumerView, DelayedView, GroupPartitionView, GroupView, Inspector, MemberView,
    MessageQuery, OwnerView, PartitionView, PendingFilter, PendingView, StoredMessage, TopicView,
    read_each,
};
pub use keys::Layout;
pub use message::{MalformedMessage, Message, MessageHeaders, NewMessage};
pub use pagination::Page;
pub use partitioner::{
    ConsistentHash, HashPartitioner, Partitioner, RandomPartitioner, RoundRobin, hash_code,
};
pub use producer::{DelayedMessage, Producer, Sent};
pub use queue::Queue;
pub use remove_group::RemovedGroup;
pub use reset::{BoundedCount, Reset, ResetGuard, ResetPartition, ResetReport, ResetTo};
pub use sampler::{GroupMeasure, Sampler, TopicMeasure};
pub use tail::{Tail, TailConfig, TailStart};
pub use topic::{
    EntryFormat, GroupName, Partition, Policies, PolicyChanges, Resize, Topic, TopicName,
};
pub use topics::{PartitionDescription, TopicDescription, Topics};
pub use trace::{TRACEPARENT, TraceBridge, TraceContext};
pub use trim::{Trim, TrimReport, TrimmedPartition};

/// The user documentation, whose examples are doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/topics.md")]
struct TopicsPage;
