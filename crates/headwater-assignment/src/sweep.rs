//! The sweep finds streams without an owner: all of them, whatever was missed. Hints only make it look sooner.
//!
//! Upstream: time, and hints of the backend about leases. Downstream: `offers` decides what becomes of them.
//! Promises: whatever crashed between any two steps, its input entry is still pending, without a live lease, and not kept
//! alive; that is what the sweep looks for. With a pass per heartbeat interval or more, it is as fast as hints are.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use headwater_stream::{
    EntryId, HintKind, LeaseHint, LeaseInfo, LeaseWatch, Pending, Result, StreamName,
};
use tokio::sync::watch;
use tokio::time::{Instant, interval, sleep_until, timeout_at};
use tracing::{debug, error, info, warn};

use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};
use crate::reassignment::{Reassignment, UnownedStream, is_released};

/// Hints that come together are looked at together.
const HINT_WINDOW: Duration = Duration::from_millis(10);

/// Hints looked at one by one; more of them are worth a sweep.
const HINTS_MAX: usize = 256;

/// A look at a lease comes this long after its end, and a pass comes at most this much later than its interval says.
const EXPIRY_MARGIN: Duration = Duration::from_millis(2);
const SWEEP_JITTER: Duration = Duration::from_millis(250);

/// How often consumers of past process starts are removed from the group, and after which idle time.
const CONSUMER_CLEANUP_INTERVAL: Duration = Duration::from_secs(10 * 60);
const CONSUMER_IDLE_MIN: Duration = Duration::from_secs(60 * 60);

pub(crate) struct AssignmentSweep {
    member: Arc<AssignmentMember>,
    /// Where the next pass goes on, if the last one did not get to the end.
    after: Option<EntryId>,
    passes: u64,
    last_consumer_cleanup: Option<Instant>,
    reassignment: Reassignment,
    /// Leases that end before the next pass unless they are renewed, and when.
    expected_expirations: BTreeSet<(Instant, StreamName)>,
    /// Streams that cannot be assigned because the key of their lease holds a value of another type.
    blocked: HashSet<StreamName>,
}

/// What there is to do.
enum SweepTrigger {
    /// A whole pass.
    Interval,
    /// A look at leases that should have ended.
    Expiry,
    /// A look at leases that somebody spoke of.
    Hint(LeaseHint),
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
            // Outside of `select!`: what has begun is finished.
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
                warn!(%error, "sweep failed, the next one tries again");
            }
            trigger = tokio::select! {
                () = lifecycle_reached(&mut lifecycle, Lifecycle::Closing) => return,
                _ = ticks.tick() => SweepTrigger::Interval,
                () = self.next_expiry() => SweepTrigger::Expiry,
                // Cancel-safe, as its trait says.
                hint = watch.next() => SweepTrigger::Hint(hint),
            };
        }
    }

    /// Returns when the first lease should have ended. Cancel-safe.
    async fn next_expiry(&self) {
        match self.expected_expirations.first() {
            Some((end, _)) => sleep_until(*end).await,
            None => std::future::pending().await,
        }
    }

    /// The streams whose leases should have ended by now, or will in a moment.
    fn take_expired(&mut self) -> HashSet<StreamName> {
        let until = Instant::now() + HINT_WINDOW;
        let mut ended = HashSet::new();
        while self.expected_expirations.first().is_some_and(|(end, _)| *end <= until) {
            ended.extend(self.expected_expirations.pop_first().map(|(_, stream)| stream));
        }
        ended
    }

    /// Remembers to look at a lease when it ends, if it is overdue and ends before the next pass.
    fn expect_expiry(&mut self, stream: &StreamName, pending: &Pending, remaining: Duration) {
        let config = &self.member.config;
        let overdue = pending.idle + SWEEP_JITTER >= config.heartbeat_every;
        if overdue && remaining < config.sweep_every + SWEEP_JITTER {
            self.expected_expirations
                .insert((Instant::now() + remaining + EXPIRY_MARGIN, stream.clone()));
        }
    }

    /// Collects hints that come together. `None` if some were missed.
    async fn collect_hints(
        &self,
        first: LeaseHint,
        watch: &mut dyn LeaseWatch,
    ) -> Option<HashSet<StreamName>> {
        let until = Instant::now() + HINT_WINDOW;
        let mut hinted = Some(HashSet::new());
        let mut next = Some(first);
        while let Some(hint) = next {
            self.member.metrics.hint(match hint.kind {
                HintKind::Expired => "expired",
                HintKind::Released => "released",
                HintKind::Missed => "missed",
            });
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

    /// Looks whether hinted streams are free, at the cost of these streams and not of all.
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
        // First the entry, then the lease: a stream that is done had its entry deleted before its lease was released, and
        // one that was taken in between is found locked.
        let streams: Vec<StreamName> = hinted.into_iter().collect();
        let member = &*self.member;
        let entries = try_join_all(streams.iter().map(|stream| async {
            let ids = member.entry_index().ids_of(stream);
            member.first_pending(&ids).await
        }))
        .await?;
        let found = streams.into_iter().zip(entries);
        let mut oldest_pending: HashMap<StreamName, Pending> =
            found.filter_map(|(stream, pending)| Some((stream, pending?))).collect();
        let free = self.unleased(oldest_pending.keys().cloned().collect(), &oldest_pending).await?;
        let free = free.into_iter().filter_map(|stream| {
            let pending = oldest_pending.remove(&stream)?;
            Some(UnownedStream::new(stream, &pending))
        });
        self.reassignment.handle(free.collect()).await;
        Ok(())
    }

    /// One pass over everything pending. Leases of `hinted` streams are looked up in any case.
    pub(crate) async fn run_once(&mut self, hinted: &HashSet<StreamName>) -> Result<()> {
        let started_at = self.after;
        let scan = self.member.scan(self.after).await?;
        self.after = scan.next;
        if started_at.is_none() {
            self.expected_expirations.clear();
        }
        let mut oldest_pending: HashMap<StreamName, Pending> = HashMap::new();
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
            self.member.metrics.startup_recovered(free.len());
            if !free.is_empty() {
                info!(count = free.len(), "streams without an owner found at the start");
            }
        }
        self.passes += 1;
        self.reassignment.prune(&free);
        // The whole has to be known before it can be shared.
        if started_at.is_none() && self.after.is_none() {
            let scanned = oldest_pending.keys().collect();
            self.reassignment.fair_share = self.member.rebalance(&scanned).await?;
        }
        self.reassignment.handle(free).await;
        self.remove_idle_consumers().await
    }

    /// Streams whose lease is worth a look: owners keep their entries alive, so where nobody did for more than an interval
    /// there may be none. An overdue lease that ends before the next pass is looked at when it does: a server tells of an
    /// expired key only when it comes across it, which takes long if it has many, or when somebody asks.
    fn suspects(
        &mut self,
        oldest_pending: &HashMap<StreamName, Pending>,
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

    /// Those of the streams whose lease nobody holds.
    async fn unleased(
        &mut self,
        streams: Vec<StreamName>,
        oldest_pending: &HashMap<StreamName, Pending>,
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
        self.member.metrics.blocked(self.blocked.len());
        Ok(free)
    }

    /// The key of a stream's lease holds a value of another type. Told once, until that is over.
    fn report_blocked(&mut self, stream: StreamName) {
        if !self.blocked.contains(&stream) {
            let lease = self
                .member
                .names
                .lease(&stream)
                .map_or_else(|_| String::new(), |lease| lease.to_string());
            error!(%stream, lease, "stream cannot be assigned: the key of its lease holds a value of another type; delete the key");
            self.blocked.insert(stream);
        }
    }

    /// Each start of a process is a consumer of the group; those of the past are removed now and then.
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
        debug!(count = removed.len(), "consumers of past starts removed");
        Ok(())
    }
}
