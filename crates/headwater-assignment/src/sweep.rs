//! The sweep finds all streams without an owner. Lease hints only make it check sooner.
//!
//! Upstream: an interval, and lease hints from the backend. Downstream: `reassignment` decides about the
//! streams.
//! Guarantees: after a crash between any two steps the input entry is still pending, without a live lease
//! and not kept alive; that is what the sweep looks for. With a sweep interval of at most a heartbeat
//! interval, fail-over is as fast as with hints.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use headwater_stream::{
    EntryId, LeaseEvent, LeaseEventKind, LeaseInfo, LeaseWatch, PendingDelivery, Result, StreamName,
};
use tokio::sync::watch;
use tokio::time::{Instant, interval, sleep_until, timeout_at};
use tracing::{debug, error, info, warn};

use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};
use crate::metrics::{BLOCKED, HINTS, STARTUP_RECOVERED};
use crate::reassignment::{Reassignment, UnownedStream, is_released};

/// Hints within this window are handled together.
const HINT_WINDOW: Duration = Duration::from_millis(10);

/// Maximum number of hints checked one by one; more trigger a full sweep.
const HINTS_MAX: usize = 256;

/// A lease is checked this long after its expected expiration. A pass may be this much later than its
/// interval.
const EXPIRY_MARGIN: Duration = Duration::from_millis(2);
const SWEEP_JITTER: Duration = Duration::from_millis(250);

/// Interval for removing idle consumers of past process starts, and their minimum idle time.
const CONSUMER_CLEANUP_INTERVAL: Duration = Duration::from_secs(10 * 60);
const CONSUMER_IDLE_MIN: Duration = Duration::from_secs(60 * 60);

pub(crate) struct AssignmentSweep {
    member: Arc<AssignmentMember>,
    /// Where the next pass continues, if the last one did not reach the end.
    after: Option<EntryId>,
    passes: u64,
    last_consumer_cleanup: Option<Instant>,
    reassignment: Reassignment,
    /// Leases expected to expire before the next pass unless they are renewed, and when.
    expected_expirations: BTreeSet<(Instant, StreamName)>,
    /// Streams that cannot be assigned because their lease key holds a value of another type.
    blocked: HashSet<StreamName>,
}

enum SweepTrigger {
    /// A full pass.
    Interval,
    /// Check leases that should have expired.
    Expiry,
    /// Check the lease of a hint.
    Hint(LeaseEvent),
}

impl AssignmentSweep {
    pub(crate) fn new(member: Arc<AssignmentMember>) -> Self {
        Self {
            reassignment: Reassignment::new(Arc::clone(&member)),
            member,
            after: None,
            passes: 0,
            last_consumer_cleanup: None,
            expected_expirations: BTreeSet::new(),
            blocked: HashSet::new(),
        }
    }

    /// Sweeps at once, then at every interval and on hints, until the assignment closes.
    pub(crate) async fn run(
        mut self,
        mut watch: Box<dyn LeaseWatch>,
        mut lifecycle: watch::Receiver<Lifecycle>,
    ) {
        let mut ticks = interval(self.member.config.sweep_every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut trigger = SweepTrigger::Interval;
        ticks.tick().await;
        loop {
            // Outside of `select!`, so that it runs to completion.
            let result = match trigger {
                SweepTrigger::Interval => self.run_once(&HashSet::new()).await,
                SweepTrigger::Expiry => {
                    let ended = self.take_expired();
                    self.check(Some(ended)).await
                }
                SweepTrigger::Hint(hint) => {
                    let hinted = self.collect_hints(hint, &mut *watch).await;
                    self.check(hinted).await
                }
            };
            if let Err(error) = result {
                warn!(%error, "sweep failed; the next one retries");
            }
            trigger = tokio::select! {
                () = lifecycle_reached(&mut lifecycle, Lifecycle::Closing) => return,
                _ = ticks.tick() => SweepTrigger::Interval,
                () = self.next_expiry() => SweepTrigger::Expiry,
                // Cancel-safe (see `LeaseWatch::next`).
                hint = watch.next() => SweepTrigger::Hint(hint),
            };
        }
    }

    /// Waits for the first expected expiration. Cancel-safe.
    async fn next_expiry(&self) {
        match self.expected_expirations.first() {
            Some((end, _)) => sleep_until(*end).await,
            None => std::future::pending().await,
        }
    }

    /// The streams whose leases should have expired by now or will in a moment.
    fn take_expired(&mut self) -> HashSet<StreamName> {
        let until = Instant::now() + HINT_WINDOW;
        let mut ended = HashSet::new();
        while self.expected_expirations.first().is_some_and(|(end, _)| *end <= until) {
            ended.extend(self.expected_expirations.pop_first().map(|(_, stream)| stream));
        }
        ended
    }

    /// Schedules a check at the expiration of a lease that is overdue and expires before the next pass.
    fn expect_expiry(
        &mut self,
        stream: &StreamName,
        pending: &PendingDelivery,
        remaining: Duration,
    ) {
        let config = &self.member.config;
        let overdue = pending.idle + SWEEP_JITTER >= config.heartbeat_every;
        if overdue && remaining < config.sweep_every + SWEEP_JITTER {
            self.expected_expirations
                .insert((Instant::now() + remaining + EXPIRY_MARGIN, stream.clone()));
        }
    }

    /// Collects hints that arrive together. `None` if some were missed.
    async fn collect_hints(
        &self,
        first: LeaseEvent,
        watch: &mut dyn LeaseWatch,
    ) -> Option<HashSet<StreamName>> {
        let until = Instant::now() + HINT_WINDOW;
        let mut hinted = Some(HashSet::new());
        let mut next = Some(first);
        while let Some(hint) = next {
            let kind = match hint.kind {
                LeaseEventKind::Expired => "expired",
                LeaseEventKind::Released => "released",
                LeaseEventKind::Lagged => "missed",
            };
            self.member.metrics.count_by(HINTS, "kind", kind);
            match (hint.lease, &mut hinted) {
                (Some(lease), Some(streams)) => {
                    streams.extend(self.member.names.stream_of(&lease));
                }
                (None, _) => hinted = None,
                (Some(_), None) => {}
            }
            next = timeout_at(until, watch.next()).await.ok();
        }
        hinted
    }

    /// Checks only the hinted streams.
    async fn check(&mut self, hinted: Option<HashSet<StreamName>>) -> Result<()> {
        let Some(mut hinted) = hinted else { return self.run_once(&HashSet::new()).await };
        hinted.retain(|stream| !self.member.owned_set.contains(stream));
        if hinted.is_empty() {
            return Ok(());
        }
        if hinted.len() > HINTS_MAX {
            return self.run_once(&hinted).await;
        }
        if hinted.iter().any(|stream| !self.member.entry_index().contains(stream)) {
            self.member.scan_new().await?;
        }
        hinted.retain(|stream| self.member.entry_index().contains(stream));
        // Read the entry first, then the lease: `done` deletes the entry before it releases the lease, and a stream
        // acquired in between has a held lease.
        let streams: Vec<StreamName> = hinted.into_iter().collect();
        let member = &*self.member;
        let entries = try_join_all(streams.iter().map(|stream| async {
            let ids = member.entry_index().ids_of(stream);
            member.first_pending(&ids).await
        }))
        .await?;
        let found = streams.into_iter().zip(entries);
        let mut oldest_pending: HashMap<StreamName, PendingDelivery> =
            found.filter_map(|(stream, pending)| Some((stream, pending?))).collect();
        let free = self.unleased(oldest_pending.keys().cloned().collect(), &oldest_pending).await?;
        let free = free.into_iter().filter_map(|stream| {
            let pending = oldest_pending.remove(&stream)?;
            Some(UnownedStream::new(stream, &pending))
        });
        self.reassignment.handle(free.collect()).await;
        Ok(())
    }

    /// One pass over all pending entries. Leases of `hinted` streams are always checked.
    pub(crate) async fn run_once(&mut self, hinted: &HashSet<StreamName>) -> Result<()> {
        let started_at = self.after;
        let scan = self.member.scan(self.after).await?;
        self.after = scan.next;
        if started_at.is_none() {
            self.expected_expirations.clear();
        }
        let mut oldest_pending: HashMap<StreamName, PendingDelivery> = HashMap::new();
        for (pending, stream) in scan.entries {
            oldest_pending.entry(stream).or_insert(pending);
        }
        if started_at.is_none() && self.after.is_none() {
            self.blocked.retain(|stream| oldest_pending.contains_key(stream));
        }
        let suspects = self.suspects(&oldest_pending, hinted);
        let free = self.unleased(suspects, &oldest_pending).await?;
        let free: Vec<UnownedStream> = free
            .into_iter()
            .filter_map(|stream| {
                let pending = oldest_pending.get(&stream)?;
                Some(UnownedStream::new(stream, pending))
            })
            .collect();
        if self.passes == 0 {
            self.member.metrics.count(STARTUP_RECOVERED, free.len());
            if !free.is_empty() {
                info!(count = free.len(), "found streams without an owner at the start");
            }
        }
        self.passes += 1;
        self.reassignment.prune(&free);
        // The share is only correct after a complete pass.
        if started_at.is_none() && self.after.is_none() {
            let scanned = oldest_pending.keys().collect();
            self.reassignment.fair_share = self.member.rebalance(&scanned).await?;
        }
        self.reassignment.handle(free).await;
        self.remove_idle_consumers().await
    }

    /// Streams whose lease should be checked. Owners keep their entries alive, so an entry idle for more than an
    /// interval may have no owner. An overdue lease that expires before the next pass is checked when it
    /// expires: Redis reports an expired key only when it finds it, which may take long with many keys.
    fn suspects(
        &mut self,
        oldest_pending: &HashMap<StreamName, PendingDelivery>,
        hinted: &HashSet<StreamName>,
    ) -> Vec<StreamName> {
        let late = self.member.config.heartbeat_every * 3 / 2;
        let mut suspects = Vec::new();
        for (stream, pending) in oldest_pending {
            if self.member.owned_set.contains(stream) {
                continue;
            }
            if is_released(pending) || pending.idle >= late || hinted.contains(stream) {
                suspects.push(stream.clone());
            } else {
                let remaining = self.member.config.lease_ttl().saturating_sub(pending.idle);
                self.expect_expiry(stream, pending, remaining);
            }
        }
        suspects
    }

    /// The streams whose lease is not held.
    async fn unleased(
        &mut self,
        streams: Vec<StreamName>,
        oldest_pending: &HashMap<StreamName, PendingDelivery>,
    ) -> Result<Vec<StreamName>> {
        let holders = self.member.holders(&streams).await?;
        let mut free = Vec::new();
        for (stream, holder) in streams.into_iter().zip(holders) {
            if holder.as_ref().is_some_and(LeaseInfo::is_wrong_type) {
                self.report_blocked(stream);
                continue;
            }
            self.blocked.remove(&stream);
            match (holder, oldest_pending.get(&stream)) {
                (None, _) => free.push(stream),
                (Some(held), Some(pending)) => self.expect_expiry(&stream, pending, held.remaining),
                (Some(_), None) => {}
            }
        }
        self.member.metrics.gauge(BLOCKED, self.blocked.len());
        Ok(free)
    }

    /// Logs once that the lease key of a stream holds a value of another type.
    fn report_blocked(&mut self, stream: StreamName) {
        if !self.blocked.contains(&stream) {
            let lease = self
                .member
                .names
                .lease(&stream)
                .map_or_else(|_| String::new(), |lease| lease.to_string());
            error!(%stream, lease, "stream cannot be assigned: its lease key holds a value of another type; delete the key");
            self.blocked.insert(stream);
        }
    }

    /// Removes consumers of past process starts; each start is a new consumer of the group.
    async fn remove_idle_consumers(&mut self) -> Result<()> {
        if self.last_consumer_cleanup.is_some_and(|at| at.elapsed() < CONSUMER_CLEANUP_INTERVAL) {
            return Ok(());
        }
        self.last_consumer_cleanup = Some(Instant::now());
        let names = &self.member.names;
        let removed = self
            .member
            .backend
            .remove_idle_consumers(&names.input, &names.group, CONSUMER_IDLE_MIN)
            .await?;
        debug!(count = removed.len(), "removed idle consumers of past process starts");
        Ok(())
    }
}
