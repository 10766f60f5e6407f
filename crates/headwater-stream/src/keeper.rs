//! The keeper renews all leases of a process, one round trip for all of them.
//!
//! Upstream: whoever owns partitions or streams. Downstream: [`Leases`].
//! Promises: a holder learns that it must stop *before* its lease can expire on the server. Time is counted from the
//! moment a request was sent, so a slow reply shortens the trust and never stretches it; a process that was paused
//! finds its trust gone when it wakes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::check;
use crate::error::{Result, StreamError};
use crate::leases::{Acquire, Fence, Leases, Renewal};
use crate::name::{HolderName, LeaseName};

/// How leases are kept.
#[derive(Clone, Copy, Debug)]
pub struct KeeperConfig {
    /// How long a lease lives without renewal. Default: 15 s.
    pub ttl: Duration,
    /// How often all leases are renewed; at most a third of `ttl`. Default: 5 s.
    pub renew_every: Duration,
    /// How long before the end of its life a lease is no longer trusted. Default: 1.5 s.
    pub margin: Duration,
}

const TTL_DEFAULT: Duration = Duration::from_secs(15);
const RENEW_EVERY_DEFAULT: Duration = Duration::from_secs(5);
const MARGIN_DEFAULT: Duration = Duration::from_millis(1500);

// Two renewals may be lost before ownership is; otherwise one slow round trip is a failover.
const _: () = assert!(RENEW_EVERY_DEFAULT.as_millis() * 3 <= TTL_DEFAULT.as_millis());
const _: () =
    assert!(MARGIN_DEFAULT.as_millis() + RENEW_EVERY_DEFAULT.as_millis() < TTL_DEFAULT.as_millis());

impl Default for KeeperConfig {
    fn default() -> Self {
        Self { ttl: TTL_DEFAULT, renew_every: RENEW_EVERY_DEFAULT, margin: MARGIN_DEFAULT }
    }
}

impl KeeperConfig {
    /// Checks that the times fit together.
    pub fn validate(&self) -> Result<()> {
        check::lease_ttl(self.ttl)?;
        if self.renew_every.is_zero() || self.renew_every * 3 > self.ttl {
            return Err(StreamError::invalid(
                "renew_every",
                format!("{:?} is not within a third of the ttl {:?}", self.renew_every, self.ttl),
            ));
        }
        if self.margin + self.renew_every >= self.ttl {
            return Err(StreamError::invalid(
                "margin",
                format!("{:?} leaves no trust between renewals", self.margin),
            ));
        }
        Ok(())
    }
}

/// When a lease stops being trusted; `None` once it is lost or released.
type Trust = watch::Sender<Option<Instant>>;

/// Holds the leases of a process.
pub struct LeaseKeeper {
    leases: Arc<dyn Leases>,
    holder: HolderName,
    config: KeeperConfig,
    held: Mutex<HashMap<LeaseName, (Fence, Trust)>>,
}

impl fmt::Debug for LeaseKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseKeeper").field("holder", &self.holder).finish_non_exhaustive()
    }
}

/// A lease this process holds. Work only while it is trusted; present its fence with every effect.
#[derive(Clone, Debug)]
pub struct HeldLease {
    fence: Fence,
    trust: watch::Receiver<Option<Instant>>,
}

/// What became of the wish to hold a lease.
#[derive(Clone, Debug)]
pub enum Acquired {
    /// It is this process's now, and is renewed.
    Won(HeldLease),
    /// Somebody else has it.
    Held {
        /// Who.
        by: HolderName,
        /// For how long at least, unless it is released.
        remaining: Duration,
    },
}

impl Acquired {
    /// The lease, for whoever does not care who else has it.
    pub fn won(self) -> Option<HeldLease> {
        match self {
            Self::Won(held) => Some(held),
            Self::Held { .. } => None,
        }
    }
}

/// A lease this process held and lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostLease {
    /// The lease and the epoch in which it was held.
    pub fence: Fence,
}

impl HeldLease {
    /// What to present with every effect.
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Whether the lease cannot have expired yet.
    pub fn is_trusted(&self) -> bool {
        self.trust.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Returns when the lease is no longer trusted. Cancel-safe.
    pub async fn lost(&self) {
        let mut trust = self.trust.clone();
        loop {
            let Some(until) = *trust.borrow_and_update() else { return };
            tokio::select! {
                changed = trust.changed() => if changed.is_err() { return },
                () = tokio::time::sleep_until(until) => return,
            }
        }
    }
}

impl LeaseKeeper {
    /// A keeper that holds nothing yet. `holder` is unique per process start.
    pub fn new(leases: Arc<dyn Leases>, holder: HolderName, config: KeeperConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self { leases, holder, config, held: Mutex::default() })
    }

    /// Who this keeper is to others.
    pub fn holder(&self) -> &HolderName {
        &self.holder
    }

    /// Takes a lease if it is free; from then on it is renewed.
    pub async fn acquire(&self, lease: &LeaseName) -> Result<Acquired> {
        let sent = Instant::now();
        let epoch = match self.leases.acquire(lease, &self.holder, self.config.ttl).await? {
            Acquire::Won(epoch) => epoch,
            Acquire::Held { by, remaining } => return Ok(Acquired::Held { by, remaining }),
        };
        let fence = Fence { lease: lease.clone(), epoch };
        let until = Some(self.trusted_until(sent));
        let mut held = self.lock();
        let trust = match held.get(lease) {
            Some((known, trust)) if *known == fence => {
                trust.send_replace(until);
                trust.subscribe()
            }
            _ => {
                let (trust, receiver) = watch::channel(until);
                // An older epoch of the same lease is lost to those who still watch it.
                if let Some((_, old)) = held.insert(lease.clone(), (fence.clone(), trust)) {
                    old.send_replace(None);
                }
                receiver
            }
        };
        Ok(Acquired::Won(HeldLease { fence, trust }))
    }

    /// Renews everything once, in one round trip. Returns what is lost.
    pub async fn run_once(&self) -> Result<Vec<LostLease>> {
        let fences: Vec<Fence> = self.lock().values().map(|(fence, _)| fence.clone()).collect();
        if fences.is_empty() {
            return Ok(Vec::new());
        }
        let sent = Instant::now();
        let renewals = self.leases.renew(&self.holder, &fences, self.config.ttl).await?;
        let until = Some(self.trusted_until(sent));
        let mut lost = Vec::new();
        let mut held = self.lock();
        for (fence, renewal) in fences.into_iter().zip(renewals) {
            // Released or acquired anew while the renewal was under way: this answer is not about it.
            if held.get(&fence.lease).is_none_or(|(known, _)| *known != fence) {
                continue;
            }
            match renewal {
                Renewal::Kept => {
                    held[&fence.lease].1.send_replace(until);
                }
                Renewal::Lost => {
                    if let Some((_, trust)) = held.remove(&fence.lease) {
                        trust.send_replace(None);
                    }
                    lost.push(LostLease { fence });
                }
            }
        }
        Ok(lost)
    }

    /// Renews until `shutdown` completes. A backend that does not answer is asked again; meanwhile trust runs out.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let mut ticks = tokio::time::interval(self.config.renew_every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return,
                _ = ticks.tick() => {}
            }
            // Not inside `select!`: a renewal that has begun is finished.
            match self.run_once().await {
                Ok(lost) => {
                    for LostLease { fence } in lost {
                        warn!(lease = %fence.lease, epoch = %fence.epoch, "lease lost");
                    }
                }
                Err(error) => warn!(%error, "leases were not renewed, trying again"),
            }
        }
    }

    /// Gives leases up so that others get them at once. Returns how many were still held.
    pub async fn release(&self, leases: &[LeaseName]) -> Result<usize> {
        // Forgotten first: nobody may work under a lease that is being given away.
        let fences: Vec<Fence> = {
            let mut held = self.lock();
            leases
                .iter()
                .filter_map(|lease| held.remove(lease))
                .map(|(fence, trust)| {
                    trust.send_replace(None);
                    fence
                })
                .collect()
        };
        if fences.is_empty() {
            return Ok(0);
        }
        debug!(count = fences.len(), "releasing leases");
        self.leases.release(&self.holder, &fences).await
    }

    /// The leases held now, in no particular order.
    pub fn held(&self) -> Vec<Fence> {
        self.lock().values().map(|(fence, _)| fence.clone()).collect()
    }

    fn trusted_until(&self, sent: Instant) -> Instant {
        sent + (self.config.ttl - self.config.margin)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<LeaseName, (Fence, Trust)>> {
        self.held.lock().expect("no code panics while it holds this lock")
    }
}
