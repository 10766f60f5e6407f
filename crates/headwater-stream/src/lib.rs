#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod error;
pub mod limits;
mod name;

mod backoff;
mod credentials;
mod process_name;

pub mod clock;
mod entry;

mod dedup;
mod delays;
mod leases;
mod registry;
mod streams;

// Used by the backends only.
#[cfg_attr(not(any(feature = "embedded", feature = "redis")), allow(dead_code))]
mod validate;

mod backend;
mod coalescer;
mod lease_renewer;
mod membership;

mod majority_lease;

#[cfg(feature = "embedded")]
mod embedded;
#[cfg(feature = "redis")]
mod redis;

mod connect;

pub use backend::{Backend, BackendDescription};
pub use backoff::{Backoff, RetryTimer};
pub use coalescer::{BatchError, Coalescer, CoalescerConfig};
pub use connect::{Options, connect, validate_url};
pub use credentials::{CredentialProvider, Credentials};
pub use dedup::{Dedup, DedupStatus};
pub use delays::{
    DelayId, DelayStats, DelayedEntry, Delays, DueTime, PromotedEntry, ScheduleRequest,
};
pub use entry::{DeliveredEntry, Entry, EntryId, EntrySize, FieldRef, Fields, ParseEntryIdError};
pub use error::{BoxError, Result, StreamError};
pub use lease_renewer::{
    HeldLease, LeaseAcquisition, LeaseRenewer, LeaseRenewerConfig, LossCause, LostLease, LostLeases,
};
pub use leases::{
    AcquireResult, Epoch, Fence, LeaseEvent, LeaseEventKind, LeaseInfo, LeaseWatch, Leases,
    Renewal, WatchMode,
};
pub use majority_lease::MajorityLease;
pub use membership::{Liveness, LivenessLease, MemberList, MemberSnapshot};
pub use name::{
    ConsumerName, DedupScope, DelayName, GroupName, HolderName, LeaseName, MapName, SetName,
    StreamName, hash_tag,
};
pub use process_name::{process_name, stable_name, start_id, unique_holder};
pub use registry::{Registry, RegistryMap};
pub use streams::{
    AppendRequest, AppendedEntry, ConsumerStats, Direction, DisconnectOutcome, EntrySource,
    GroupCondition, GroupReader, GroupStart, GroupStats, IdempotentEntry, PendingDelivery,
    PendingDeliveryQuery, Range, ReclaimFrom, ReclaimRequest, ReclaimResult, Retention,
    SettleAction, SettleBatch, SettleResult, Settlement, StreamBatch, StreamReadFailure,
    StreamStats, Streams, TailReader, TakeParts, TrimGuard, TrimResult,
};
