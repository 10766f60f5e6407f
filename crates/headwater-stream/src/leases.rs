//! A lease is a time-limited right to one thing, with an epoch that grows with each change of holder.
//!
//! Upstream: partition ownership and stream assignment, through [`LeaseKeeper`](crate::LeaseKeeper). Downstream: a backend.
//! Promises: one holder at a time; epochs only grow, also across expiry, restart and a flush of the server
//! (an epoch is at least the millisecond it began in); an effect is refused unless the lease is held now, in the epoch
//! that it presents.
//! Not here: which leases to want (see `headwater-queue`).

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::limits::LEASE_TTL_MAX;
use crate::name::{HolderName, LeaseName};

/// Time-limited rights.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Takes the lease if nobody holds it. Whoever holds it already gets the same epoch again and `ttl` more time, so a
    /// lost reply does no harm.
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<Acquire>;

    /// Extends leases, all in one round trip; one answer each, in order. A lease that has expired is lost even if
    /// nobody took it since; so is one whose name holds a value of another type, and the others are not affected.
    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>>;

    /// Gives leases up at once, all in one round trip. Returns how many were still held; the others are left alone, also
    /// those whose name holds a value of another type.
    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize>;

    /// Who holds these leases, in order; `None` where it is free. Where a name holds a value of another type, the answer
    /// says so ([`LeaseInfo::is_wrong_type`]), and the others are not affected.
    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>>;

    /// Hints about leases whose names begin with `prefix`. A hint may be lost or doubled: sweep as well.
    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>>;
}

/// Hears of leases that become free.
#[async_trait]
pub trait LeaseWatch: Send {
    /// What this watch can hear.
    fn mode(&self) -> &WatchMode;

    /// The next hint; waits for it without end. Cancel-safe.
    async fn next(&mut self) -> LeaseHint;
}

/// What a watch can hear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchMode {
    /// Expiry and release.
    All,
    /// Releases only; expired leases are found by sweeping.
    ReleasesOnly {
        /// Why the server does not tell of expiry.
        reason: String,
    },
}

/// Something may have happened to a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseHint {
    /// The lease; `None` for [`HintKind::Missed`].
    pub lease: Option<LeaseName>,
    /// What happened.
    pub kind: HintKind,
}

/// What may have happened to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintKind {
    /// Its time ran out.
    Expired,
    /// Its holder gave it up.
    Released,
    /// Hints were lost (a broken connection, a full buffer): look at every lease.
    Missed,
}

/// A number that grows with each change of holder: the fencing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A lease and the epoch in which it is held: what an effect presents to be allowed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The lease.
    pub lease: LeaseName,
    /// The epoch.
    pub epoch: Epoch,
}

/// What became of the wish to hold a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquire {
    /// It is the caller's now.
    Won(Epoch),
    /// Somebody else has it.
    Held {
        /// Who.
        by: HolderName,
        /// For how long at least, unless it is released.
        remaining: Duration,
    },
}

/// What became of one lease in a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// It lives on.
    Kept,
    /// It expired or has another holder. Stop working on what it guards.
    Lost,
}

/// Who holds a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseInfo {
    /// The holder.
    pub holder: HolderName,
    /// Its epoch; 0 for a foreign program that knows no epochs.
    pub epoch: Epoch,
    /// How much time is left.
    pub remaining: Duration,
}

impl LeaseInfo {
    /// The holder of a lease whose name holds a value of another type.
    pub const WRONG_TYPE: &str = "~wrong-type";

    /// What stands for a value that is not a lease: the lease cannot be acquired until a person has deleted the value, so
    /// it has no end in sight.
    #[cfg_attr(
        not(any(feature = "embedded", feature = "redis")),
        allow(dead_code, reason = "only the backends make one")
    )]
    pub(crate) fn wrong_type() -> Self {
        let holder = HolderName::new(Self::WRONG_TYPE).expect("the name is valid");
        Self { holder, epoch: Epoch(0), remaining: LEASE_TTL_MAX }
    }

    /// Whether the name of the lease holds a value of another type, or one that no holder can have written.
    pub fn is_wrong_type(&self) -> bool {
        self.holder.as_str() == Self::WRONG_TYPE
    }
}
