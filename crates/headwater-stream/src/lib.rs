#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod error;
pub mod limits;
mod name;

pub mod clock;
mod entry;

mod dedup;
mod delays;
mod leases;
mod registry;
mod streams;

// Backends make the checks; without one, the seams and what stands on them are all there is.
#[cfg_attr(not(any(feature = "embedded", feature = "redis")), allow(dead_code))]
mod check;

mod backend;
mod coalescer;
mod keeper;

#[cfg(feature = "embedded")]
mod embedded;
#[cfg(feature = "redis")]
mod redis;

mod connect;

pub use backend::{Backend, Description};
pub use coalescer::{Coalescer, CoalescerConfig, Gone};
pub use connect::{Options, check_url, connect};
pub use dedup::{Begin, Dedup};
pub use delays::{DelayId, DelayStats, Delayed, Delays, Due, PutAside, Returned};
pub use entry::{Delivery, Entry, EntryId, EntrySize, Fields, Own, ParseEntryIdError};
pub use error::{BoxError, Result, StreamError};
pub use keeper::{Acquired, HeldLease, KeeperConfig, LeaseKeeper, LossCause, LostLease};
pub use leases::{
    Acquire, Epoch, Fence, HintKind, LeaseHint, LeaseInfo, LeaseWatch, Leases, Renewal, WatchMode,
};
pub use name::{
    ConsumerName, DedupScope, DelayName, GroupName, HolderName, LeaseName, MapName, SetName,
    StreamName, hash_tag,
};
pub use registry::{Registry, RegistryMap};
pub use streams::{
    Append, Appended, Batch, ConsumerStats, Direction, Entries, GroupReader, GroupStart,
    GroupStats, Once, Pending, PendingQuery, Range, Reclaim, ReclaimFrom, Reclaimed, Retention,
    Settle, Settled, Settlement, Silenced, StreamStats, Streams, TailReader, Then, TrimGuard,
    Trimmed,
};
