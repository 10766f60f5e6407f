//! The keeper renews all leases of a process, one round trip for all of them.
//!
//! Upstream: whoever owns partitions or streams. Downstream: [`Leases`].
//! Promises: a holder learns that it must stop *before* its lease can expire on the server. Time is counted from the
//! moment a request was sent, so a slow reply shortens the trust and never stretches it; a process that was paused
//! finds its trust gone when it wakes. A lease whose trust has run out has lapsed, and that is final: no renewal brings it
//! back, it is released, and a new acquire gets a new epoch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use std::{fmt, mem, slice};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::check;
use crate::error::{Result, StreamError};
use crate::leases::{Acquire, Fence, Leases, Renewal};
use crate::limits::LEASES_MAX;
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
    held: Mutex<Held>,
    /// Signalled when a lease was acquired.
    acquired: Notify,
}

/// The leases of a keeper.
#[derive(Default)]
struct Held {
    /// Those that are renewed.
    leases: HashMap<LeaseName, (Fence, Trust)>,
    /// Those that ended here and may still be held at the server, with the time by which they have expired there. They are
    /// not renewed, and are released before they are acquired again, so that the next ownership has an epoch of its own.
    ended: HashMap<LeaseName, (Fence, Instant)>,
    /// Those that lapsed, until a caller is told.
    lapsed: Vec<LostLease>,
}

impl Held {
    /// Ends a lease here, for those who watch it too.
    fn end(&mut self, lease: &LeaseName, gone_at: Instant) -> Option<Fence> {
        let (fence, trust) = self.leases.remove(lease)?;
        trust.send_replace(None);
        self.ended.insert(lease.clone(), (fence.clone(), gone_at));
        Some(fence)
    }

    /// Ends a lease that is no longer trusted.
    fn lapse(&mut self, lease: &LeaseName, gone_at: Instant) {
        let fence = self.end(lease, gone_at);
        self.lapsed.extend(fence.map(|fence| LostLease { fence, cause: LossCause::Lapsed }));
    }

    /// Ends all leases that are no longer trusted.
    fn lapse_overdue(&mut self, now: Instant, gone_at: Instant) {
        let is_overdue = |trust: &Trust| trust.borrow().is_none_or(|until| until <= now);
        let overdue: Vec<LeaseName> = self
            .leases
            .iter()
            .filter(|(_, (_, trust))| is_overdue(trust))
            .map(|(lease, _)| lease.clone())
            .collect();
        overdue.iter().for_each(|lease| self.lapse(lease, gone_at));
    }

    /// The server does not hold these any more.
    fn forget_ended(&mut self, fences: &[Fence]) {
        for fence in fences {
            if self.ended.get(&fence.lease).is_some_and(|(ended, _)| ended == fence) {
                self.ended.remove(&fence.lease);
            }
        }
    }

    /// When the next lease lapses, unless it is renewed.
    fn next_lapse(&self) -> Option<Instant> {
        self.leases.values().filter_map(|(_, trust)| *trust.borrow()).min()
    }
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
    /// How it was lost.
    pub cause: LossCause,
}

/// How a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCause {
    /// It was not renewed in time, so this process gave it up.
    Lapsed,
    /// It expired at the server, or has another holder there.
    Gone,
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
        Ok(Self { leases, holder, config, held: Mutex::default(), acquired: Notify::new() })
    }

    /// Who this keeper is to others.
    pub fn holder(&self) -> &HolderName {
        &self.holder
    }

    /// Takes a lease if it is free; from then on it is renewed.
    pub async fn acquire(&self, lease: &LeaseName) -> Result<Acquired> {
        // The server gives the epoch of a lease that it still holds for us again. One that has ended here must not come
        // back with the epoch of those who were told that they lost it.
        let ended = {
            let mut held = self.lock();
            held.lapse_overdue(Instant::now(), self.gone_at());
            held.ended.get(lease).map(|(fence, _)| fence.clone())
        };
        if let Some(fence) = ended {
            self.release_fences(slice::from_ref(&fence)).await?;
        }
        let sent = Instant::now();
        let epoch = match self.leases.acquire(lease, &self.holder, self.config.ttl).await? {
            Acquire::Won(epoch) => epoch,
            Acquire::Held { by, remaining } => return Ok(Acquired::Held { by, remaining }),
        };
        let fence = Fence { lease: lease.clone(), epoch };
        let until = Some(self.trusted_until(sent));
        let mut held = self.lock();
        held.lapse_overdue(Instant::now(), self.gone_at());
        let trust = match held.leases.get(lease) {
            Some((known, trust)) if *known == fence => {
                trust.send_replace(until);
                trust.subscribe()
            }
            // It lapsed while the answer was under way: lost from the beginning.
            _ if held.ended.get(lease).is_some_and(|(ended, _)| *ended == fence) => {
                watch::channel(None).1
            }
            _ => {
                let (trust, receiver) = watch::channel(until);
                // An older epoch of the same lease is lost to those who still watch it.
                if let Some((_, old)) = held.leases.insert(lease.clone(), (fence.clone(), trust)) {
                    old.send_replace(None);
                }
                receiver
            }
        };
        drop(held);
        self.acquired.notify_one();
        Ok(Acquired::Won(HeldLease { fence, trust }))
    }

    /// Renews everything once, in one round trip, and releases what has lapsed. Returns what is lost; what has lapsed is
    /// told once, here or by [`lapsed`](Self::lapsed).
    pub async fn run_once(&self) -> Result<Vec<LostLease>> {
        let fences: Vec<Fence> = {
            let mut held = self.lock();
            // First of all: what has lapsed must not be renewed.
            held.lapse_overdue(Instant::now(), self.gone_at());
            held.leases.values().map(|(fence, _)| fence.clone()).collect()
        };
        let mut lost = Vec::new();
        if !fences.is_empty() {
            let sent = Instant::now();
            let renewals = self.leases.renew(&self.holder, &fences, self.config.ttl).await?;
            lost = self.note_renewals(fences, renewals, sent);
        }
        let ended: Vec<Fence> = {
            let mut held = self.lock();
            let now = Instant::now();
            held.ended.retain(|_, (_, gone_at)| *gone_at > now);
            lost.append(&mut held.lapsed);
            held.ended.values().map(|(fence, _)| fence.clone()).collect()
        };
        if let Err(error) = self.release_fences(&ended).await {
            debug!(count = ended.len(), %error, "leases that ended were not released, trying again");
        }
        Ok(lost)
    }

    /// Takes in the answers to a renewal. Returns what the server does not hold for us any more.
    fn note_renewals(
        &self,
        fences: Vec<Fence>,
        renewals: Vec<Renewal>,
        sent: Instant,
    ) -> Vec<LostLease> {
        let mut lost = Vec::new();
        let mut held = self.lock();
        // What lapsed while the answer was under way stays lost, whatever the answer is.
        held.lapse_overdue(Instant::now(), self.gone_at());
        for (fence, renewal) in fences.into_iter().zip(renewals) {
            // Ended or acquired anew while the renewal was under way: this answer is not about it.
            if held.leases.get(&fence.lease).is_none_or(|(known, _)| *known != fence) {
                continue;
            }
            match renewal {
                Renewal::Kept => {
                    held.leases[&fence.lease].1.send_replace(Some(self.trusted_until(sent)));
                }
                Renewal::Lost => {
                    if let Some((_, trust)) = held.leases.remove(&fence.lease) {
                        trust.send_replace(None);
                    }
                    lost.push(LostLease { fence, cause: LossCause::Gone });
                }
            }
        }
        lost
    }

    /// Returns the leases that lapsed, at the moment when the first of them does. Each is told once, here or by
    /// [`run_once`](Self::run_once). Cancel-safe.
    pub async fn lapsed(&self) -> Vec<LostLease> {
        loop {
            let next = {
                let mut held = self.lock();
                held.lapse_overdue(Instant::now(), self.gone_at());
                if !held.lapsed.is_empty() {
                    return mem::take(&mut held.lapsed);
                }
                held.next_lapse()
            };
            let lapse = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = lapse => {}
                // It may lapse before all others, if its answer was slow.
                () = self.acquired.notified() => {}
            }
        }
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
                    for LostLease { fence, cause } in lost {
                        warn!(lease = %fence.lease, epoch = %fence.epoch, ?cause, "lease lost");
                    }
                }
                Err(error) => warn!(%error, "leases were not renewed, trying again"),
            }
        }
    }

    /// Gives leases up so that others get them at once. Returns how many were still held. If it fails,
    /// [`run_once`](Self::run_once) tries again until they have expired.
    pub async fn release(&self, leases: &[LeaseName]) -> Result<usize> {
        // Ended first: no owner may work under a lease that is being released.
        let fences: Vec<Fence> = {
            let mut held = self.lock();
            for lease in leases {
                held.end(lease, self.gone_at());
            }
            let ended = leases.iter().filter_map(|lease| held.ended.get(lease));
            ended.map(|(fence, _)| fence.clone()).collect()
        };
        if !fences.is_empty() {
            debug!(count = fences.len(), "releasing leases");
        }
        self.release_fences(&fences).await
    }

    async fn release_fences(&self, fences: &[Fence]) -> Result<usize> {
        let mut released = 0;
        for part in fences.chunks(LEASES_MAX) {
            released += self.leases.release(&self.holder, part).await?;
            self.lock().forget_ended(part);
        }
        Ok(released)
    }

    /// The leases that the server may hold for this keeper, in no particular order: those that are held now, and those that
    /// have ended here and are still to be released.
    pub fn held(&self) -> Vec<Fence> {
        let held = self.lock();
        let ended = held.ended.values().map(|(fence, _)| fence.clone());
        held.leases.values().map(|(fence, _)| fence.clone()).chain(ended).collect()
    }

    /// Whether a lease is held now and trusted.
    pub fn holds(&self, lease: &LeaseName) -> bool {
        let now = Instant::now();
        let held = self.lock();
        held.leases
            .get(lease)
            .is_some_and(|(_, trust)| trust.borrow().is_some_and(|until| now < until))
    }

    fn trusted_until(&self, sent: Instant) -> Instant {
        sent + (self.config.ttl - self.config.margin)
    }

    /// By when a lease that is no longer renewed has expired, also if a last renewal is still under way.
    fn gone_at(&self) -> Instant {
        Instant::now() + 2 * self.config.ttl
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("no code panics while it holds this lock")
    }
}
