//! What becomes of streams without an owner: taken, announced or quarantined.
//!
//! Upstream: `sweep` finds them. Downstream: `taking` for what we take ourselves, the channel for what the program decides.
//! What an owner gave back is on offer to whoever has room, as if it were new; what a dead owner left is announced, unless
//! the program wants it claimed.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use futures_util::future::join_all;
use headwater_stream::{Pending, StreamName, Then};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::config::OnExpired;
use crate::error::ClaimError;
use crate::member::AssignmentMember;

/// Streams taken at the same time.
const CLAIM_CONCURRENCY: usize = 32;

/// How many sweeps others get to take what we gave back, and those below their share to take what is on offer.
const DEFER_SWEEPS: u32 = 3;

pub(crate) struct Reassignment {
    member: Arc<AssignmentMember>,
    /// Since when streams are on offer that we left to others.
    since: HashMap<StreamName, Instant>,
    /// How many streams we should have, if a rebalance is wanted.
    pub(crate) fair_share: Option<usize>,
}

/// A stream without an owner.
pub(crate) struct UnownedStream {
    pub(crate) stream: StreamName,
    /// Its owner gave it back; otherwise it died.
    released: bool,
    deliveries: u64,
}

impl Reassignment {
    pub(crate) fn new(member: Arc<AssignmentMember>) -> Self {
        Self { member, since: HashMap::new(), fair_share: None }
    }

    /// Takes, announces or quarantines streams without an owner.
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
                self.member.notification_queue.expired(&stream);
                // Claimed by the program in this very moment: what it has is not free.
                if self.member.owned_set.contains(&stream) {
                    self.member.notification_queue.retract_expired(&stream);
                }
            }
        }
        for stream in over_limit {
            // Taking it is what quarantines it: one process wins that, too.
            self.report(&stream, self.member.claim(&stream).await.err());
        }
        self.take(take).await;
    }

    /// Takes as many of the streams as there is room for.
    async fn take(&mut self, streams: Vec<StreamName>) {
        let now = Instant::now();
        let defer_for = self.member.config.sweep_every * DEFER_SWEEPS;
        let (mut wanted, mut left): (Vec<StreamName>, Vec<StreamName>) =
            streams.into_iter().partition(|stream| {
                let released_at = self.member.recently_released().get(stream).copied();
                released_at.is_none_or(|at| now.duration_since(at) >= defer_for)
            });
        // Each process tries them in another order, so that all get some and few meet at the same one.
        let holder = self.member.identity.holder.as_str();
        wanted.sort_by_cached_key(|stream| {
            let mut hasher = DefaultHasher::new();
            (holder, stream).hash(&mut hasher);
            hasher.finish()
        });
        if let Some(share) = self.fair_share {
            let below = share.saturating_sub(self.member.owned_set.len());
            let mut above = wanted.split_off(below.min(wanted.len()));
            // Nobody who is below its share wants them, so any owner is better than none.
            wanted.extend(above.extract_if(.., |stream| {
                let since = *self.since.entry(stream.clone()).or_insert(now);
                now.duration_since(since) >= defer_for
            }));
            left.append(&mut above);
        }
        debug!(wanted = wanted.len(), left = left.len(), "streams on offer");
        let this = &*self;
        for (round, streams) in wanted.chunks(CLAIM_CONCURRENCY).enumerate() {
            // Others take from the same streams. One look at many is cheaper than a try at each.
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

    /// Those of the streams that nobody has taken meanwhile.
    async fn still_unowned(&self, streams: &[StreamName]) -> Vec<StreamName> {
        match self.member.holders(streams).await {
            Ok(holders) => {
                let pairs = streams.iter().zip(holders);
                pairs.filter(|(_, holder)| holder.is_none()).map(|(s, _)| s.clone()).collect()
            }
            // A hint is all we wanted.
            Err(_) => streams.to_vec(),
        }
    }

    fn report(&self, stream: &StreamName, error: Option<ClaimError>) {
        match error {
            Some(ClaimError::Backend(error)) => {
                warn!(%stream, %error, "stream was not taken, the next sweep tries again");
            }
            Some(error) => debug!(%stream, %error, "stream was not taken"),
            None => {}
        }
    }

    /// Forgets since when streams were on offer that are not any more, and what we gave back long ago.
    pub(crate) fn prune(&mut self, free: &[UnownedStream]) {
        let still: HashSet<&StreamName> = free.iter().map(|free| &free.stream).collect();
        self.since.retain(|stream, _| still.contains(stream));
        let defer_for = self.member.config.sweep_every * DEFER_SWEEPS;
        self.member.recently_released().retain(|_, at| at.elapsed() < defer_for);
    }
}

impl UnownedStream {
    pub(crate) fn new(stream: StreamName, pending: &Pending) -> Self {
        Self { stream, released: is_released(pending), deliveries: pending.deliveries }
    }
}

/// Whether an entry was given back by its owner.
pub(crate) fn is_released(pending: &Pending) -> bool {
    pending.consumer.as_str() == Then::RELEASED
}
