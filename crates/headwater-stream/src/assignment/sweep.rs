//! The sweep finds streams without an owner: all of them, whatever was missed. Hints only make it look sooner.
//!
//! Upstream: time, and hints of the backend about leases. Downstream: `offers` decides what becomes of them.
//! Promises: whatever crashed between any two steps, its input entry is still pending, without a live lease, and not kept
//! alive; that is what the sweep looks for. It also finds what hints told while a connection was broken.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::watch;
use tokio::time::{Instant, interval, timeout_at};
use tracing::{debug, info, warn};

use super::member::{Member, Stage, reached};
use super::offers::{Free, Offers, is_released};
use crate::entry::EntryId;
use crate::error::Result;
use crate::leases::{HintKind, LeaseHint, LeaseWatch};
use crate::limits::LEASES_MAX;
use crate::name::{LeaseName, StreamName};
use crate::streams::Pending;

/// Hints that come together are looked at together.
const HINTS_GATHER: Duration = Duration::from_millis(10);

/// Hints looked at one by one; more of them are worth a sweep.
const HINTS_MAX: usize = 256;

/// How often consumers of past process starts are removed from the group, and after which idle time.
const CONSUMERS_CLEARED_EVERY: Duration = Duration::from_secs(10 * 60);
const CONSUMERS_IDLE: Duration = Duration::from_secs(60 * 60);

pub(super) struct Sweep {
    member: Arc<Member>,
    /// Where the next pass goes on, if the last one did not get to the end.
    after: Option<EntryId>,
    passes: u64,
    consumers_cleared: Option<Instant>,
    offers: Offers,
}

impl Sweep {
    pub(super) fn new(member: Arc<Member>) -> Self {
        Self {
            offers: Offers::new(Arc::clone(&member)),
            member,
            after: None,
            passes: 0,
            consumers_cleared: None,
        }
    }

    /// Sweeps at once, then at every interval and on hints, until the assignment closes.
    pub(super) async fn run(
        mut self,
        mut watch: Box<dyn LeaseWatch>,
        mut stage: watch::Receiver<Stage>,
    ) {
        let mut ticks = interval(self.member.config.sweep_every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let hint = tokio::select! {
                () = reached(&mut stage, Stage::Closing) => return,
                _ = ticks.tick() => None,
                // Cancel-safe, as its trait says.
                hint = watch.next() => Some(hint),
            };
            // Outside of `select!`: what has begun is finished.
            let result = match hint {
                None => self.run_once(&HashSet::new()).await,
                Some(hint) => {
                    let hinted = self.gather(hint, &mut *watch).await;
                    self.look(hinted).await
                }
            };
            if let Err(error) = result {
                warn!(%error, "sweep failed, the next one tries again");
            }
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
        let streams = self.without_lease(hinted.into_iter().collect()).await?;
        // A stream that is done had its entry deleted before its lease was released.
        let member = &*self.member;
        let entries = try_join_all(streams.iter().map(|stream| async {
            let ids = member.known().ids_of(stream);
            member.first_pending(&ids).await
        }))
        .await?;
        let free = streams
            .into_iter()
            .zip(entries)
            .filter_map(|(stream, pending)| Some(Free::new(stream, &pending?)))
            .collect();
        self.offers.handle(free).await;
        Ok(())
    }

    /// One pass over everything pending. Leases of `hinted` streams are looked up in any case.
    pub(super) async fn run_once(&mut self, hinted: &HashSet<StreamName>) -> Result<()> {
        let started_at = self.after;
        let listing = self.member.list(self.after).await?;
        self.after = listing.next;
        // Owners keep their entries alive, so a lease is worth a look only where nobody did for more than an interval.
        let late = self.member.config.heartbeat_every * 3 / 2;
        let mut firsts: HashMap<StreamName, Pending> = HashMap::new();
        for (pending, stream) in listing.entries {
            firsts.entry(stream).or_insert(pending);
        }
        let suspects = firsts
            .iter()
            .filter(|(stream, pending)| {
                let suspect =
                    is_released(pending) || pending.idle >= late || hinted.contains(*stream);
                suspect && !self.member.slots.contains(stream)
            })
            .map(|(stream, _)| stream.clone())
            .collect();
        let free: Vec<Free> = self
            .without_lease(suspects)
            .await?
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
            self.offers.share = self.member.rebalance(firsts.len()).await?;
        }
        self.offers.handle(free).await;
        self.clear_consumers().await
    }

    /// Those of the streams whose lease nobody holds.
    async fn without_lease(&self, streams: Vec<StreamName>) -> Result<Vec<StreamName>> {
        let mut free = Vec::new();
        for chunk in streams.chunks(LEASES_MAX) {
            let leases: Vec<LeaseName> = chunk
                .iter()
                .map(|stream| self.member.names.lease(stream))
                .collect::<Result<_>>()?;
            let holders = self.member.backend.leases(&leases).await?;
            let pairs = chunk.iter().zip(holders);
            free.extend(
                pairs.filter(|(_, holder)| holder.is_none()).map(|(stream, _)| stream.clone()),
            );
        }
        Ok(free)
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
