//! Leases: time-limited exclusive ownership, with an epoch that increases with each change of holder.
//!
//! Upstream: partition ownership and stream assignment, through [`LeaseRenewer`](crate::LeaseRenewer). Downstream: a backend.
//! Guarantees: one holder at a time; epochs only increase, also across expiry, restart and a flush of the server (an epoch is at
//! least the millisecond in which it began); a fenced effect is rejected unless the lease is held now in that epoch.
//! Not here: choosing which leases to acquire (see `headwater-queue`).

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::limits::LEASE_TTL_MAX;
use crate::name::{HolderName, LeaseName};

/// Leases of a backend.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Acquires the lease if it is free. For the current holder it extends the lease by `ttl` and returns the same epoch.
    /// Idempotent.
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult>;

    /// Renews leases in one round trip. Returns one result per lease, in order; fails only if all are unknown. An expired lease is lost even if it had no
    /// other holder since. A name that holds a value of another type counts as lost and does not affect the other leases.
    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>>;

    /// Releases leases in one round trip. Returns how many were still held. Leases held by others, and names that hold a
    /// value of another type, are not changed. Fails if the server of one did not answer; the others are released.
    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize>;

    /// The holders of these leases, in order; `None` for a free one. For a name that holds a value of another type,
    /// [`LeaseInfo::is_wrong_type`] is true; for a lease whose server did not answer, [`LeaseInfo::is_unknown`] is. The
    /// other leases are not affected. Fails only if all are unknown.
    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>>;

    /// Watches leases whose names start with `prefix`. Best effort: events may be lost or duplicated, so poll as well.
    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>>;
}

/// Receives an event when a lease becomes free.
#[async_trait]
pub trait LeaseWatch: Send {
    /// Which events this watch receives.
    fn mode(&self) -> &WatchMode;

    /// Waits for the next event. Cancel-safe.
    async fn next(&mut self) -> LeaseEvent;
}

/// Which events a watch receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchMode {
    /// Expiry and release.
    All,
    /// Releases only; expired leases must be found by polling.
    ReleasesOnly {
        /// Why the server does not notify about expiry.
        reason: String,
    },
}

/// A lease may have become free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseEvent {
    /// The lease; `None` for [`LeaseEventKind::Lagged`].
    pub lease: Option<LeaseName>,
    /// What happened.
    pub kind: LeaseEventKind,
}

/// Kind of a [`LeaseEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEventKind {
    /// The lease expired.
    Expired,
    /// The holder released the lease.
    Released,
    /// Events were lost (broken connection, full buffer): check every lease.
    Lagged,
}

/// Fencing token: a number that increases with each change of holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A lease and the epoch in which it is held. Effects that carry a stale fence are rejected.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The lease.
    pub lease: LeaseName,
    /// The epoch.
    pub epoch: Epoch,
}

/// Result of [`Leases::acquire`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcquireResult {
    /// The caller holds the lease in this epoch.
    Won(Epoch),
    /// Another holder has the lease.
    Held {
        /// The current holder.
        by: HolderName,
        /// Remaining time, unless it is released earlier.
        remaining: Duration,
    },
}

/// A renewal of all leases of a holder may take this part of their time to live.
pub(crate) const RENEWAL_PART: u32 = 3;
/// Of that, the leases beside one with copies (`MajorityLease`) have this part.
pub(crate) const OTHER_LEASES_PART: u32 = 4;
/// Of that, the other servers have this part after the first one has answered.
pub(crate) const OTHER_SERVERS_PART: u32 = 6;
// Otherwise one server that does not answer would discard the renewals of those that did.
const _: () = assert!(OTHER_SERVERS_PART > OTHER_LEASES_PART && OTHER_LEASES_PART > RENEWAL_PART);

/// Result of renewing one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease was extended.
    Kept,
    /// The lease expired or has another holder. Stop working on what it protects.
    Lost,
    /// The server of this lease did not answer. Repeat the call before the lease expires.
    Unknown,
}

/// A held lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseInfo {
    /// The holder.
    pub holder: HolderName,
    /// Its epoch; 0 if another program without epochs holds it.
    pub epoch: Epoch,
    /// Remaining time.
    pub remaining: Duration,
}

impl LeaseInfo {
    /// Holder name that stands for a value of another type.
    pub const WRONG_TYPE: &str = "~wrong-type";

    /// Holder name that stands for a holder that could not be read.
    pub const UNKNOWN: &str = "~unknown";

    /// The result for a lease whose server did not answer. It counts as held by another holder.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only this backend makes one"))]
    pub(crate) fn unknown() -> Self {
        let holder = HolderName::new(Self::UNKNOWN).expect("the name is valid");
        Self { holder, epoch: Epoch(0), remaining: LEASE_TTL_MAX }
    }

    /// Whether the server of the lease did not answer.
    pub fn is_unknown(&self) -> bool {
        self.holder.as_str() == Self::UNKNOWN
    }

    /// The result for a value of another type. The lease cannot be acquired until an operator deletes the value, so its
    /// remaining time is the maximum.
    #[cfg_attr(
        not(any(feature = "embedded", feature = "redis")),
        allow(dead_code, reason = "only the backends make one")
    )]
    pub(crate) fn wrong_type() -> Self {
        let holder = HolderName::new(Self::WRONG_TYPE).expect("the name is valid");
        Self { holder, epoch: Epoch(0), remaining: LEASE_TTL_MAX }
    }

    /// Whether the name of the lease holds a value of another type, or an invalid holder name.
    pub fn is_wrong_type(&self) -> bool {
        self.holder.as_str() == Self::WRONG_TYPE
    }
}
