//! Renews all leases of a process in one round trip, retries, and tells holders to stop before a lease can expire.
//!
//! Upstream: [`membership`](crate::Membership), owners of partitions, streams and requests. Downstream: [`Leases`].
//! Guarantees: a holder learns that it must stop *before* its lease can expire on the server. Validity is counted per lease from
//! the moment its request was sent, so a slow reply shortens it and never extends it; a process that was paused, also with its
//! machine, finds its leases invalid when it resumes. A lease that is no longer valid has lapsed, and that is final: no renewal restores it. It is
//! released, and a new acquire gets a new epoch. Each loss is reported once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use std::{fmt, slice};

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use crate::clock::{Clock, LeaseClock, SystemClock};
use crate::error::{Result, StreamError};
use crate::leases::{AcquireResult, Fence, Leases, RENEWAL_PART, Renewal};
use crate::limits::LEASES_MAX;
use crate::name::{HolderName, LeaseName};
use crate::validate;

/// How leases are renewed.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRenewerConfig {
    /// Lifetime of a lease without renewal. Default: 15 s.
    pub ttl: Duration,
    /// Interval between renewals; at most a third of `ttl`. Default: 5 s.
    pub renew_every: Duration,
    /// How long before its expiry a lease is no longer valid. Default: 1.5 s.
    pub safety_margin: Duration,
}

const TTL_DEFAULT: Duration = Duration::from_secs(15);
const RENEW_EVERY_DEFAULT: Duration = Duration::from_secs(5);
const SAFETY_MARGIN_DEFAULT: Duration = Duration::from_millis(1500);

// Two renewals may be lost before ownership is; otherwise one slow round trip is a failover.
const _: () = assert!(RENEW_EVERY_DEFAULT.as_millis() * 3 <= TTL_DEFAULT.as_millis());
const _: () = assert!(
    SAFETY_MARGIN_DEFAULT.as_millis() + RENEW_EVERY_DEFAULT.as_millis() < TTL_DEFAULT.as_millis()
);

impl Default for LeaseRenewerConfig {
    fn default() -> Self {
        Self {
            ttl: TTL_DEFAULT,
            renew_every: RENEW_EVERY_DEFAULT,
            safety_margin: SAFETY_MARGIN_DEFAULT,
        }
    }
}

impl LeaseRenewerConfig {
    /// Checks that the times are consistent.
    pub fn validate(&self) -> Result<()> {
        validate::lease_ttl(self.ttl)?;
        if self.renew_every.is_zero() || self.renew_every * 3 > self.ttl {
            return Err(StreamError::invalid(
                "renew_every",
                format!(
                    "{:?}; it must be positive and at most a third of the ttl {:?}",
                    self.renew_every, self.ttl
                ),
            ));
        }
        if self.safety_margin + self.renew_every >= self.ttl {
            return Err(StreamError::invalid(
                "safety_margin",
                format!(
                    "{:?}; with renew_every {:?} it must be less than the ttl {:?}",
                    self.safety_margin, self.renew_every, self.ttl
                ),
            ));
        }
        Ok(())
    }
}

/// Until when a lease is valid; `None` once it is lost or released.
type Validity = watch::Sender<Option<Instant>>;

/// Holds and renews the leases of a process, while [`run`](Self::run) is polled.
pub struct LeaseRenewer {
    leases: Arc<dyn Leases>,
    clock: LeaseClock,
    holder: HolderName,
    config: LeaseRenewerConfig,
    held: Mutex<HeldLeases>,
    /// Signalled when a lease was acquired.
    acquired: Notify,
    /// Signalled when a lease has ended and is to be released.
    ended: Notify,
}

/// The leases of a renewer.
struct HeldLeases {
    /// Leases that are renewed.
    leases: HashMap<LeaseName, (Fence, Validity)>,
    /// Leases that ended here and may still be held on the server, with the time by which they have expired there. They are
    /// not renewed, and are released before they are acquired again, so that the next ownership gets a new epoch.
    ended: HashMap<LeaseName, (Fence, Instant)>,
    /// Number of renewals.
    renewed: u64,
    /// Fails if nobody listens.
    losses: mpsc::UnboundedSender<LostLease>,
}

impl HeldLeases {
    /// Ends a lease and notifies its handles.
    fn end(&mut self, lease: &LeaseName, expired_by: Instant) -> Option<Fence> {
        let (fence, validity) = self.leases.remove(lease)?;
        validity.send_replace(None);
        self.ended.insert(lease.clone(), (fence.clone(), expired_by));
        Some(fence)
    }

    /// Ends all leases that are no longer valid.
    fn lapse_overdue(&mut self, now: Instant, expired_by: Instant) {
        let is_overdue = |validity: &Validity| validity.borrow().is_none_or(|until| until <= now);
        let overdue: Vec<LeaseName> = self
            .leases
            .iter()
            .filter(|(_, (_, validity))| is_overdue(validity))
            .map(|(lease, _)| lease.clone())
            .collect();
        for lease in &overdue {
            if let Some(fence) = self.end(lease, expired_by) {
                self.report(fence, LossCause::Lapsed);
            }
        }
    }

    fn report(&self, fence: Fence, cause: LossCause) {
        warn!(lease = %fence.lease, epoch = %fence.epoch, ?cause, "lease lost");
        let _ = self.losses.send(LostLease { fence, cause });
    }

    /// Forgets ended leases that the server no longer holds.
    fn forget_ended(&mut self, fences: &[Fence]) {
        for fence in fences {
            if self.ended.get(&fence.lease).is_some_and(|(ended, _)| ended == fence) {
                self.ended.remove(&fence.lease);
            }
        }
    }

    /// When the next lease lapses unless it is renewed.
    fn next_lapse(&self) -> Option<Instant> {
        self.leases.values().filter_map(|(_, validity)| *validity.borrow()).min()
    }
}

impl fmt::Debug for LeaseRenewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRenewer").field("holder", &self.holder).finish_non_exhaustive()
    }
}

/// A lease of this process. Work only while it is valid, and pass its fence with every effect.
#[derive(Clone, Debug)]
pub struct HeldLease {
    fence: Fence,
    validity: watch::Receiver<Option<Instant>>,
    clock: LeaseClock,
}

/// Result of [`LeaseRenewer::acquire`].
#[derive(Clone, Debug)]
pub enum LeaseAcquisition {
    /// This process holds the lease; it is renewed from now on.
    Won(HeldLease),
    /// Another holder has the lease.
    Held {
        /// The current holder.
        by: HolderName,
        /// Remaining time, unless it is released earlier.
        remaining: Duration,
    },
}

impl LeaseAcquisition {
    /// The lease, if it was acquired.
    pub fn won(self) -> Option<HeldLease> {
        match self {
            Self::Won(held) => Some(held),
            Self::Held { .. } => None,
        }
    }
}

/// A lease that this process has lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostLease {
    /// The lease and the epoch in which it was held.
    pub fence: Fence,
    /// Why it was lost.
    pub cause: LossCause,
}

/// Receives each lost lease once, as soon as the loss is known. At most one is queued for each lease that was held.
pub type LostLeases = mpsc::UnboundedReceiver<LostLease>;

/// Why a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCause {
    /// It was not renewed in time, so this process gave it up.
    Lapsed,
    /// It expired on the server, or has another holder there.
    LostOnServer,
}

impl HeldLease {
    /// The fence to pass with every effect.
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Whether the lease is held and cannot have expired on the server.
    pub fn is_valid(&self) -> bool {
        self.validity.borrow().is_some_and(|until| self.clock.now() < until)
    }

    /// Returns when the lease is no longer valid. Cancel-safe.
    pub async fn lost(&self) {
        let mut validity = self.validity.clone();
        loop {
            let Some(until) = *validity.borrow_and_update() else { return };
            tokio::select! {
                changed = validity.changed() => if changed.is_err() { return },
                () = self.clock.sleep_until(until) => return,
            }
        }
    }
}

impl LeaseRenewer {
    /// Creates a renewer without leases, and the receiver of its losses. `holder` must be unique per process start.
    pub fn new(
        leases: Arc<dyn Leases>,
        holder: HolderName,
        config: LeaseRenewerConfig,
    ) -> Result<(Self, LostLeases)> {
        Self::with_clock(leases, holder, config, Arc::new(SystemClock))
    }

    /// The same with another clock: time that passes on its monotonic clock while `Instant` stands still counts as a suspension of
    /// the machine, during which leases expire.
    pub fn with_clock(
        leases: Arc<dyn Leases>,
        holder: HolderName,
        config: LeaseRenewerConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<(Self, LostLeases)> {
        config.validate()?;
        let (losses, lost) = mpsc::unbounded_channel();
        let held = Mutex::new(HeldLeases {
            leases: HashMap::new(),
            ended: HashMap::new(),
            renewed: 0,
            losses,
        });
        let (clock, acquired, ended) = (LeaseClock::new(clock), Notify::new(), Notify::new());
        Ok((Self { leases, clock, holder, config, held, acquired, ended }, lost))
    }

    /// The name under which this process holds leases.
    pub fn holder(&self) -> &HolderName {
        &self.holder
    }

    /// Acquires a lease if it is free; from then on it is renewed.
    pub async fn acquire(&self, lease: &LeaseName) -> Result<LeaseAcquisition> {
        // The server returns the same epoch for a lease that it still holds for us. A lease that ended here must not come
        // back with the epoch of handles that were told that they lost it.
        let ended = {
            let mut held = self.lock();
            held.lapse_overdue(self.clock.now(), self.expired_by());
            held.ended.get(lease).map(|(fence, _)| fence.clone())
        };
        if let Some(fence) = ended {
            self.release_fences(slice::from_ref(&fence)).await?;
        }
        let sent = self.clock.now();
        let epoch = match self.leases.acquire(lease, &self.holder, self.config.ttl).await? {
            AcquireResult::Won(epoch) => epoch,
            AcquireResult::Held { by, remaining } => {
                return Ok(LeaseAcquisition::Held { by, remaining });
            }
        };
        let fence = Fence { lease: lease.clone(), epoch };
        let until = Some(self.valid_until(sent));
        let mut held = self.lock();
        held.lapse_overdue(self.clock.now(), self.expired_by());
        let validity = match held.leases.get(lease) {
            Some((known, validity)) if *known == fence => {
                validity.send_replace(until);
                validity.subscribe()
            }
            // It lapsed before the reply arrived: the handle is invalid from the start.
            _ if held.ended.get(lease).is_some_and(|(ended, _)| *ended == fence) => {
                watch::channel(None).1
            }
            _ => {
                let (validity, receiver) = watch::channel(until);
                // Handles of an older epoch of the same lease become invalid.
                let entry = (fence.clone(), validity);
                if let Some((_, old)) = held.leases.insert(lease.clone(), entry) {
                    old.send_replace(None);
                }
                if until <= Some(self.clock.now()) {
                    // The reply came too late. The holder never had the lease, so this is no loss.
                    held.end(lease, self.expired_by());
                    self.ended.notify_one();
                }
                receiver
            }
        };
        drop(held);
        self.acquired.notify_one();
        Ok(LeaseAcquisition::Won(HeldLease { fence, validity, clock: self.clock.clone() }))
    }

    /// Renews all leases once, in one round trip, and releases those that have ended. Each lease has its own result; fails if
    /// the result of one is unknown.
    pub async fn run_once(&self) -> Result<()> {
        let renewed = self.renew().await;
        self.release_ended().await;
        renewed
    }

    async fn renew(&self) -> Result<()> {
        let fences: Vec<Fence> = {
            let mut held = self.lock();
            // First: a lapsed lease must not be renewed.
            held.lapse_overdue(self.clock.now(), self.expired_by());
            held.leases.values().map(|(fence, _)| fence.clone()).collect()
        };
        if fences.is_empty() {
            return Ok(());
        }
        let sent = self.clock.now();
        let renewals = self.leases.renew(&self.holder, &fences, self.config.ttl).await?;
        self.apply_renewals(fences, renewals, sent)
    }

    /// Applies the reply to a renewal.
    fn apply_renewals(
        &self,
        fences: Vec<Fence>,
        renewals: Vec<Renewal>,
        sent: Instant,
    ) -> Result<()> {
        let mut unknown = 0;
        let mut held = self.lock();
        // A lease that lapsed while the reply was in transit stays lost, whatever the reply says.
        held.lapse_overdue(self.clock.now(), self.expired_by());
        for (fence, renewal) in fences.into_iter().zip(renewals) {
            // Ended or acquired again while the renewal was in flight: this reply is not about it.
            if held.leases.get(&fence.lease).is_none_or(|(known, _)| *known != fence) {
                continue;
            }
            match renewal {
                Renewal::Kept => {
                    held.leases[&fence.lease].1.send_replace(Some(self.valid_until(sent)));
                    held.renewed += 1;
                }
                Renewal::Lost => {
                    if let Some((_, validity)) = held.leases.remove(&fence.lease) {
                        validity.send_replace(None);
                    }
                    held.report(fence, LossCause::LostOnServer);
                }
                // It stays valid for as long as it was, and lapses then.
                Renewal::Unknown => unknown += 1,
            }
        }
        if unknown > 0 {
            let problem = format!("the result of {unknown} renewals is unknown");
            return Err(StreamError::Unavailable { problem, source: None });
        }
        Ok(())
    }

    /// Renews until `shutdown` completes, reports lapses and releases what has ended. To be called once.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        tokio::select! {
            () = self.keep_renewing(shutdown) => {}
            () = self.report_lapses() => {}
            () = self.keep_releasing() => {}
        }
    }

    /// Renews at an interval. A renewal that fails, or takes longer than a third of the TTL, is soon repeated.
    async fn keep_renewing(&self, shutdown: impl Future<Output = ()>) {
        let (every, limit) = (self.config.renew_every, self.config.ttl / RENEWAL_PART);
        let late = |_| StreamError::Unavailable {
            problem: format!("lease renewal timed out after {limit:?}"),
            source: None,
        };
        let mut next = Instant::now();
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return,
                () = sleep_until(next) => {}
            }
            let started = Instant::now();
            // Not inside `select!`: a started renewal is completed.
            next = match timeout(limit, self.renew()).await.map_err(late).flatten() {
                // Counted from the start: the reply may have been slow.
                Ok(()) => (started + every).max(Instant::now() + every / 2),
                Err(error) => {
                    warn!(holder = %self.holder, %error, "lease renewal failed, retrying");
                    Instant::now() + every / 8
                }
            };
            // In case an earlier release has failed.
            self.ended.notify_one();
        }
    }

    /// Ends leases as soon as they are no longer valid.
    async fn report_lapses(&self) {
        loop {
            let next = {
                let mut held = self.lock();
                let before = held.leases.len();
                held.lapse_overdue(self.clock.now(), self.expired_by());
                if held.leases.len() < before {
                    self.ended.notify_one();
                }
                held.next_lapse()
            };
            let lapse = async {
                match next {
                    Some(at) => self.clock.sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = lapse => {}
                // A new lease may lapse before all others, if its reply was slow.
                () = self.acquired.notified() => {}
            }
        }
    }

    async fn keep_releasing(&self) {
        loop {
            self.ended.notified().await;
            self.release_ended().await;
        }
    }

    /// Releases leases so that other holders can acquire them at once. Returns how many were still held. If it fails,
    /// [`run`](Self::run) retries until they have expired.
    pub async fn release(&self, leases: &[LeaseName]) -> Result<usize> {
        // Ended first: no owner may work under a lease that is being released.
        let fences: Vec<Fence> = {
            let mut held = self.lock();
            for lease in leases {
                held.end(lease, self.expired_by());
            }
            let ended = leases.iter().filter_map(|lease| held.ended.get(lease));
            ended.map(|(fence, _)| fence.clone()).collect()
        };
        if !fences.is_empty() {
            debug!(count = fences.len(), "releasing leases");
        }
        self.release_fences(&fences).await
    }

    /// Ends a lease here; [`run`](Self::run) releases it. For code that cannot wait, such as a destructor.
    pub fn release_later(&self, lease: &LeaseName) {
        self.lock().end(lease, self.expired_by());
        self.ended.notify_one();
    }

    /// Releases what has ended and has not expired on the server.
    async fn release_ended(&self) {
        let ended: Vec<Fence> = {
            let mut held = self.lock();
            let now = self.clock.now();
            held.ended.retain(|_, (_, expired_by)| *expired_by > now);
            held.ended.values().map(|(fence, _)| fence.clone()).collect()
        };
        if let Err(error) = self.release_fences(&ended).await {
            debug!(count = ended.len(), %error, "failed to release ended leases, retrying");
        }
    }

    async fn release_fences(&self, fences: &[Fence]) -> Result<usize> {
        let mut result = Ok(0);
        for part in fences.chunks(LEASES_MAX) {
            match self.leases.release(&self.holder, part).await {
                Ok(released) => {
                    self.lock().forget_ended(part);
                    result = result.map(|before| before + released);
                }
                Err(error) => result = Err(error),
            }
        }
        result
    }

    /// The leases that the server may hold for this process, in no particular order: valid ones, and ended ones that are
    /// still to be released.
    pub fn held(&self) -> Vec<Fence> {
        let held = self.lock();
        let ended = held.ended.values().map(|(fence, _)| fence.clone());
        held.leases.values().map(|(fence, _)| fence.clone()).chain(ended).collect()
    }

    /// How many renewals have succeeded.
    pub fn renewed(&self) -> u64 {
        self.lock().renewed
    }

    /// Whether a lease is held and valid.
    pub fn holds(&self, lease: &LeaseName) -> bool {
        let now = self.clock.now();
        let held = self.lock();
        held.leases
            .get(lease)
            .is_some_and(|(_, validity)| validity.borrow().is_some_and(|until| now < until))
    }

    fn valid_until(&self, sent: Instant) -> Instant {
        sent + (self.config.ttl - self.config.safety_margin)
    }

    /// When a lease that is no longer renewed has expired on the server, even if a last renewal is still in flight.
    fn expired_by(&self) -> Instant {
        self.clock.now() + 2 * self.config.ttl
    }

    fn lock(&self) -> MutexGuard<'_, HeldLeases> {
        self.held.lock().expect("no code panics while it holds this lock")
    }
}
