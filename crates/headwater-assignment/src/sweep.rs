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

use crate::member::{Member, Stage, reached};
use crate::offers::{Free, Offers, is_released};

/// Hints that come together are looked at together.
const HINTS_GATHER: Duration = Duration::from_millis(10);

/// Hints looked at one by one; more of them are worth a sweep.
const HINTS_MAX: usize = 256;

/// A look at a lease comes this long after its end, and a pass comes at most this much later than its interval says.
const END_PASSED: Duration = Duration::from_millis(2);
const SWEEP_LATE: Duration = Duration::from_millis(250);

/// How often consumers of past process starts are removed from the group, and after which idle time.
const CONSUMERS_CLEARED_EVERY: Duration = Duration::from_secs(10 * 60);
const CONSUMERS_IDLE: Duration = Duration::from_secs(60 * 60);

pub(crate) struct Sweep {
    member: Arc<Member>,
    /// Where the next pass goes on, if the last one did not get to the end.
    after: Option<EntryId>,
    passes: u64,
    consumers_cleared: Option<Instant>,
    offers: Offers,
    /// Leases that end before the next pass unless they are renewed, and when.
    ends: BTreeSet<(Instant, StreamName)>,
    /// Streams that cannot be assigned because the key of their lease holds a value of another type.
    blocked: HashSet<StreamName>,
}

/// What there is to do.
enum WakeUp {
    /// A whole pass.
    Interval,
    /// A look at leases that should have ended.
    End,
    /// A look at leases that somebody spoke of.
    Hint(LeaseHint),
}

impl Sweep {
    pub(crate) fn new(member: Arc<Member>) -> Self {
        Self {
            offers: Offers::new(Arc::clone(&member)),
            member,
            after: None,
            passes: 0,
            consumers_cleared: None,
            ends: BTreeSet::new(),
            blocked: HashSet::new(),
        }
    }

    /// Sweeps at once, then at every interval and on hints, until the assignment closes.
    pub(crate) async fn run(
        mut self,
        mut watch: Box<dyn LeaseWatch>,
        mut stage: watch::Receiver<Stage>,
    ) {
        let mut ticks = interval(self.member.config.sweep_every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut wake_up = WakeUp::Interval;
        ticks.tick().await;
        loop {
            // Outside of `select!`: what has begun is finished.
            let result = match wake_up {
                WakeUp::Interval => self.run_once(&HashSet::new()).await,
                WakeUp::End => {
                    let ended = self.take_ended();
                    self.look(Some(ended)).await
                }
                WakeUp::Hint(hint) => {
                    let hinted = self.gather(hint, &mut *watch).await;
                    self.look(hinted).await
                }
            };
            if let Err(error) = result {
                warn!(%error, "sweep failed, the next one tries again");
            }
            wake_up = tokio::select! {
                () = reached(&mut stage, Stage::Closing) => return,
                _ = ticks.tick() => WakeUp::Interval,
                () = self.first_end() => WakeUp::End,
                // Cancel-safe, as its trait says.
                hint = watch.next() => WakeUp::Hint(hint),
            };
        }
    }

    /// Returns when the first lease should have ended. Cancel-safe.
    async fn first_end(&self) {
        match self.ends.first() {
            Some((end, _)) => sleep_until(*end).await,
            None => std::future::pending().await,
        }
    }

    /// The streams whose leases should have ended by now, or will in a moment.
    fn take_ended(&mut self) -> HashSet<StreamName> {
        let until = Instant::now() + HINTS_GATHER;
        let mut ended = HashSet::new();
        while self.ends.first().is_some_and(|(end, _)| *end <= until) {
            ended.extend(self.ends.pop_first().map(|(_, stream)| stream));
        }
        ended
    }

    /// Remembers to look at a lease when it ends, if it is overdue and ends before the next pass.
    fn expect_end(&mut self, stream: &StreamName, pending: &Pending, remaining: Duration) {
        let config = &self.member.config;
        let overdue = pending.idle + SWEEP_LATE >= config.heartbeat_every;
        if overdue && remaining < config.sweep_every + SWEEP_LATE {
            self.ends.insert((Instant::now() + remaining + END_PASSED, stream.clone()));
        }
    }

    /// Collects hints that come together. `None` if some were missed.
    async fn gather(
        &self,
        first: LeaseHint,
        watch: &mut dyn LeaseWatch,
    ) -> Option<HashSet<StreamName>> {
        let until = Instant::now() + HINTS_GATHER;
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
    async fn look(&mut self, hinted: Option<HashSet<StreamName>>) -> Result<()> {
        let Some(mut hinted) = hinted else { return self.run_once(&HashSet::new()).await };
        hinted.retain(|stream| !self.member.slots.contains(stream));
        if hinted.is_empty() {
            return Ok(());
        }
        if hinted.len() > HINTS_MAX {
            return self.run_once(&hinted).await;
        }
        if hinted.iter().any(|stream| !self.member.known().knows(stream)) {
            self.member.list_new().await?;
        }
        hinted.retain(|stream| self.member.known().knows(stream));
        // First the entry, then the lease: a stream that is done had its entry deleted before its lease was released, and
        // one that was taken in between is found locked.
        let streams: Vec<StreamName> = hinted.into_iter().collect();
        let member = &*self.member;
        let entries = try_join_all(streams.iter().map(|stream| async {
            let ids = member.known().ids_of(stream);
            member.first_pending(&ids).await
        }))
        .await?;
        let found = streams.into_iter().zip(entries);
        let mut firsts: HashMap<StreamName, Pending> =
            found.filter_map(|(stream, pending)| Some((stream, pending?))).collect();
        let free = self.without_lease(firsts.keys().cloned().collect(), &firsts).await?;
        let free = free.into_iter().filter_map(|stream| {
            let pending = firsts.remove(&stream)?;
            Some(Free::new(stream, &pending))
        });
        self.offers.handle(free.collect()).await;
        Ok(())
    }

    /// One pass over everything pending. Leases of `hinted` streams are looked up in any case.
    pub(crate) async fn run_once(&mut self, hinted: &HashSet<StreamName>) -> Result<()> {
        let started_at = self.after;
        let listing = self.member.list(self.after).await?;
        self.after = listing.next;
        if started_at.is_none() {
            self.ends.clear();
        }
        let mut firsts: HashMap<StreamName, Pending> = HashMap::new();
        for (pending, stream) in listing.entries {
            firsts.entry(stream).or_insert(pending);
        }
        if started_at.is_none() && self.after.is_none() {
            self.blocked.retain(|stream| firsts.contains_key(stream));
        }
        let suspects = self.suspects(&firsts, hinted);
        let free = self.without_lease(suspects, &firsts).await?;
        let free: Vec<Free> = free
            .into_iter()
            .filter_map(|stream| {
                let pending = firsts.get(&stream)?;
                Some(Free::new(stream, pending))
            })
            .collect();
        if self.passes == 0 {
            self.member.metrics.startup_recovered(free.len());
            if !free.is_empty() {
                info!(count = free.len(), "streams without an owner found at the start");
            }
        }
        self.passes += 1;
        self.offers.forget_old(&free);
        // The whole has to be known before it can be shared.
        if started_at.is_none() && self.after.is_none() {
            let listed = firsts.keys().collect();
            self.offers.share = self.member.rebalance(&listed).await?;
        }
        self.offers.handle(free).await;
        self.clear_consumers().await
    }

    /// Streams whose lease is worth a look: owners keep their entries alive, so where nobody did for more than an interval
    /// there may be none. An overdue lease that ends before the next pass is looked at when it does: a server tells of an
    /// expired key only when it comes across it, which takes long if it has many, or when somebody asks.
    fn suspects(
        &mut self,
        firsts: &HashMap<StreamName, Pending>,
        hinted: &HashSet<StreamName>,
    ) -> Vec<StreamName> {
        let late = self.member.config.heartbeat_every * 3 / 2;
        let mut suspects = Vec::new();
        for (stream, pending) in firsts {
            if self.member.slots.contains(stream) {
                continue;
            }
            if is_released(pending) || pending.idle >= late || hinted.contains(stream) {
                suspects.push(stream.clone());
            } else {
                let remaining = self.member.config.lease_ttl().saturating_sub(pending.idle);
                self.expect_end(stream, pending, remaining);
            }
        }
        suspects
    }

    /// Those of the streams whose lease nobody holds.
    async fn without_lease(
        &mut self,
        streams: Vec<StreamName>,
        firsts: &HashMap<StreamName, Pending>,
    ) -> Result<Vec<StreamName>> {
        let holders = self.member.holders(&streams).await?;
        let mut free = Vec::new();
        for (stream, holder) in streams.into_iter().zip(holders) {
            if holder.as_ref().is_some_and(LeaseInfo::is_wrong_type) {
                self.report_blocked(stream);
                continue;
            }
            self.blocked.remove(&stream);
            match (holder, firsts.get(&stream)) {
                (None, _) => free.push(stream),
                (Some(held), Some(pending)) => self.expect_end(&stream, pending, held.remaining),
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
    async fn clear_consumers(&mut self) -> Result<()> {
        if self.consumers_cleared.is_some_and(|at| at.elapsed() < CONSUMERS_CLEARED_EVERY) {
            return Ok(());
        }
        self.consumers_cleared = Some(Instant::now());
        let names = &self.member.names;
        let removed = self
            .member
            .backend
            .remove_idle_consumers(&names.input, &names.group, CONSUMERS_IDLE)
            .await?;
        debug!(count = removed.len(), "consumers of past starts removed");
        Ok(())
    }
}
