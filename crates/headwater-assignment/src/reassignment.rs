//! Decides about streams without an owner: claim, announce or quarantine.
//!
//! Upstream: `sweep` finds them. Downstream: `acquire` claims them, `notification` announces them to the
//! program. A released stream is claimed by any consumer with free capacity, as if it were new. A stream of
//! a dead owner is announced, or claimed if `on_expired` says so.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use futures_util::future::join_all;
use headwater_stream::{PendingDelivery, SettleAction, StreamName};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::config::OnExpired;
use crate::error::ClaimError;
use crate::member::AssignmentMember;
use crate::notification::Notification;

/// Concurrent claims.
const CLAIM_CONCURRENCY: usize = 32;

/// Sweeps during which this process leaves streams it released to others, and streams above its share to
/// consumers below theirs.
const DEFER_SWEEPS: u32 = 3;

pub(crate) struct Reassignment {
    member: Arc<AssignmentMember>,
    /// Since when streams have been left to other consumers.
    since: HashMap<StreamName, Instant>,
    /// Fair share of this process, if rebalancing is enabled.
    pub(crate) fair_share: Option<usize>,
}

/// A stream without an owner.
pub(crate) struct UnownedStream {
    pub(crate) stream: StreamName,
    /// Its owner released it; otherwise the owner died.
    released: bool,
    deliveries: u64,
}

impl Reassignment {
    pub(crate) fn new(member: Arc<AssignmentMember>) -> Self {
        Self { member, since: HashMap::new(), fair_share: None }
    }

    /// Claims, announces or quarantines streams without an owner.
    pub(crate) async fn handle(&mut self, free: Vec<UnownedStream>) {
        let config = &self.member.config;
        let (mut take, mut over_limit) = (Vec::new(), Vec::new());
        for UnownedStream { stream, released, deliveries } in free {
            if self.member.owned_set.contains(&stream) {
                continue;
            }
            if deliveries >= config.owners_max {
                over_limit.push(stream);
            } else if released || config.on_expired == OnExpired::Claim {
                take.push(stream);
            } else {
                debug!(%stream, "stream has no owner");
                self.member.notification_queue.send(Notification::Expired(stream.clone()));
                // The program has claimed it meanwhile: retract the announcement.
                if self.member.owned_set.contains(&stream) {
                    self.member.notification_queue.retract_expired(&stream);
                }
            }
        }
        for stream in over_limit {
            // Claiming quarantines it; one process wins that too.
            self.report(&stream, self.member.claim(&stream).await.err());
        }
        self.take(take).await;
    }

    /// Claims as many streams as there is capacity for.
    async fn take(&mut self, streams: Vec<StreamName>) {
        let now = Instant::now();
        let defer_for = self.member.config.sweep_every * DEFER_SWEEPS;
        let (mut wanted, mut left): (Vec<StreamName>, Vec<StreamName>) =
            streams.into_iter().partition(|stream| {
                let released_at = self.member.recently_released().get(stream).copied();
                released_at.is_none_or(|at| now.duration_since(at) >= defer_for)
            });
        // Each process uses a different order, so that all get some and few compete for the same one.
        let holder = self.member.identity.holder.as_str();
        wanted.sort_by_cached_key(|stream| {
            let mut hasher = DefaultHasher::new();
            (holder, stream).hash(&mut hasher);
            hasher.finish()
        });
        if let Some(share) = self.fair_share {
            let below = share.saturating_sub(self.member.owned_set.len());
            let mut above = wanted.split_off(below.min(wanted.len()));
            // No consumer below its share has claimed them, so claim them despite the share.
            wanted.extend(above.extract_if(.., |stream| {
                let since = *self.since.entry(stream.clone()).or_insert(now);
                now.duration_since(since) >= defer_for
            }));
            left.append(&mut above);
        }
        debug!(wanted = wanted.len(), left = left.len(), "unowned streams to claim");
        let this = &*self;
        for (round, streams) in wanted.chunks(CLAIM_CONCURRENCY).enumerate() {
            // Other consumers claim the same streams. One lookup for many is cheaper than an attempt for each.
            let streams =
                if round == 0 { streams.to_vec() } else { self.still_unowned(streams).await };
            let capacity = self.member.owned_set.free_capacity();
            let slots = (0..capacity).map_while(|_| self.member.notification_queue.reserve());
            let takes = streams.iter().zip(slots).map(|(stream, slot)| async move {
                match this.member.claim(stream).await {
                    Ok(owned) => slot.added(owned),
                    Err(error) => this.report(stream, Some(error)),
                }
            });
            join_all(takes).await;
            if self
                .member
                .owned_set
                .free_capacity()
                .min(self.member.notification_queue.free_capacity())
                == 0
            {
                return;
            }
        }
    }

    /// The streams that no consumer has acquired meanwhile.
    async fn still_unowned(&self, streams: &[StreamName]) -> Vec<StreamName> {
        match self.member.holders(streams).await {
            Ok(holders) => {
                let pairs = streams.iter().zip(holders);
                pairs.filter(|(_, holder)| holder.is_none()).map(|(s, _)| s.clone()).collect()
            }
            // The lookup is only an optimization.
            Err(_) => streams.to_vec(),
        }
    }

    fn report(&self, stream: &StreamName, error: Option<ClaimError>) {
        match error {
            Some(ClaimError::Backend(error)) => {
                warn!(%stream, %error, "could not claim the stream; the next sweep retries");
            }
            Some(error) => debug!(%stream, %error, "stream not claimed"),
            None => {}
        }
    }

    /// Drops records of streams that are owned again or were released long ago.
    pub(crate) fn prune(&mut self, free: &[UnownedStream]) {
        let still: HashSet<&StreamName> = free.iter().map(|free| &free.stream).collect();
        self.since.retain(|stream, _| still.contains(stream));
        let defer_for = self.member.config.sweep_every * DEFER_SWEEPS;
        self.member.recently_released().retain(|_, at| at.elapsed() < defer_for);
    }
}

impl UnownedStream {
    pub(crate) fn new(stream: StreamName, pending: &PendingDelivery) -> Self {
        Self { stream, released: is_released(pending), deliveries: pending.deliveries }
    }
}

/// Whether the owner released the entry.
pub(crate) fn is_released(pending: &PendingDelivery) -> bool {
    pending.consumer.as_str() == SettleAction::RELEASED
}
