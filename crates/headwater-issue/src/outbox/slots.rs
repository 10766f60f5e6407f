//! Delivery slots: the number of deliveries each target may have in flight (AIMD).
//!
//! Upstream: `outbox` asks before it takes rows and reports how deliveries ended. Guarantees: a target starts with a
//! few slots and gets another one with each prompt response, up to its share; a failure halves them. All failing
//! targets together hold at most half of all slots. A paused target gets none until the pause ends. A target with
//! nothing in flight and no pause can always use a free slot. No I/O: time is passed in, and the state is that of one
//! process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::limits::{DELIVERY_PAUSE_MAX, OUTBOX_TAKE_MAX, OUTBOX_TARGETS_MAX};
use crate::outbox::types::{DeliveryTarget, OutboxTake, TargetState};

/// Slots of a new target.
const INITIAL_SLOTS: usize = 4;

/// Maximum duration of a prompt response.
const PROMPT_MAX: Duration = Duration::from_secs(2);

/// How long an idle target is tracked.
const IDLE_TARGET_TTL: Duration = Duration::from_secs(10 * 60);

/// How a target responded to a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetResponse {
    /// The target accepted or rejected the row, after this long.
    Responded(Duration),
    /// The target did not respond, or responded that it cannot serve.
    Failed,
    /// The target requested a pause.
    Paused(Duration),
    /// The delivery was cancelled by this process.
    Cancelled,
}

/// The slots of all targets.
#[derive(Debug)]
pub(super) struct DeliverySlots {
    total: usize,
    per_target: usize,
    targets: HashMap<DeliveryTarget, TargetSlots>,
    /// Rows taken so far.
    served: u64,
}

#[derive(Debug)]
struct TargetSlots {
    in_flight: usize,
    slots: usize,
    is_failing: bool,
    paused_until: Option<Instant>,
    /// [`DeliverySlots::served`] when its last row was taken.
    served: u64,
    used_at: Instant,
}

impl DeliverySlots {
    pub(super) fn new(total: usize, per_target: usize) -> Self {
        Self { total, per_target: per_target.min(total), targets: HashMap::new(), served: 0 }
    }

    /// Free slots.
    pub(super) fn free(&self) -> usize {
        let in_flight: usize = self.targets.values().map(|target| target.in_flight).sum();
        self.total.saturating_sub(in_flight)
    }

    /// The rows that may be taken now.
    pub(super) fn take(&mut self, worker: &str, ttl: Duration, now: Instant) -> OutboxTake {
        self.evict_idle(now);
        let failing = self.targets.values().filter(|target| target.is_failing);
        let failing: usize = failing.map(|target| target.in_flight).sum();
        let targets = self.targets.iter().map(|(key, target)| TargetState {
            target: key.clone(),
            in_flight: target.in_flight,
            free_slots: match target.paused_until {
                Some(until) if until > now => 0,
                _ => target.slots.saturating_sub(target.in_flight),
            },
            is_failing: target.is_failing,
            served: target.served,
        });
        OutboxTake {
            worker: worker.to_owned(),
            limit: self.free().min(OUTBOX_TAKE_MAX),
            ttl,
            per_target: self.initial_slots(),
            failing_limit: self.total.div_ceil(2).saturating_sub(failing),
            targets: targets.collect(),
        }
    }

    /// A row of this target was taken.
    pub(super) fn taken(&mut self, key: &DeliveryTarget, now: Instant) {
        self.served += 1;
        let (slots, served) = (self.initial_slots(), self.served);
        let target = self.targets.entry(key.clone()).or_insert_with(|| TargetSlots {
            in_flight: 0,
            slots,
            is_failing: false,
            paused_until: None,
            served,
            used_at: now,
        });
        target.in_flight += 1;
        target.served = served;
        target.used_at = now;
    }

    /// A delivery to this target ended.
    pub(super) fn ended(&mut self, key: &DeliveryTarget, response: TargetResponse, now: Instant) {
        let per_target = self.per_target;
        let Some(target) = self.targets.get_mut(key) else { return };
        target.in_flight = target.in_flight.saturating_sub(1);
        target.used_at = now;
        match response {
            TargetResponse::Responded(after) => {
                target.is_failing = false;
                if after <= PROMPT_MAX {
                    target.slots = (target.slots + 1).min(per_target);
                }
            }
            TargetResponse::Failed | TargetResponse::Paused(_) => {
                target.slots = (target.slots / 2).max(1);
                target.is_failing = target.slots == 1;
            }
            TargetResponse::Cancelled => {}
        }
        if let TargetResponse::Paused(pause) = response {
            let until = now + pause.min(DELIVERY_PAUSE_MAX);
            target.paused_until = target.paused_until.max(Some(until));
        }
    }

    fn initial_slots(&self) -> usize {
        INITIAL_SLOTS.min(self.per_target)
    }

    /// Stops tracking targets that were idle for [`IDLE_TARGET_TTL`], and the least recently used ones over the limit.
    fn evict_idle(&mut self, now: Instant) {
        let is_paused = |target: &TargetSlots| target.paused_until.is_some_and(|until| until > now);
        self.targets.retain(|_, target| {
            target.in_flight > 0
                || is_paused(target)
                || now.saturating_duration_since(target.used_at) < IDLE_TARGET_TTL
        });
        if self.targets.len() > OUTBOX_TARGETS_MAX {
            let idle = self.targets.iter().filter(|(_, target)| target.in_flight == 0);
            let mut idle: Vec<_> =
                idle.map(|(key, target)| (target.used_at, key.clone())).collect();
            idle.sort_unstable_by_key(|(used_at, _)| *used_at);
            let excess = self.targets.len() - OUTBOX_TARGETS_MAX;
            for (_, key) in idle.into_iter().take(excess) {
                self.targets.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::types::OutboxKind;

    const PROMPTLY: TargetResponse = TargetResponse::Responded(Duration::from_millis(10));

    fn target(name: &str) -> DeliveryTarget {
        DeliveryTarget { integration: name.into(), kind: OutboxKind::Reply, target: String::new() }
    }

    fn free_slots(slots: &mut DeliverySlots, name: &str, now: Instant) -> Option<usize> {
        let take = slots.take("w", Duration::from_secs(60), now);
        take.targets.iter().find(|state| state.target == target(name)).map(|state| state.free_slots)
    }

    #[test]
    fn a_target_gains_slots_by_prompt_responses_and_loses_them_by_failures() {
        let (mut slots, now) = (DeliverySlots::new(64, 16), Instant::now());
        assert_eq!(slots.take("w", Duration::ZERO, now).per_target, 4);
        for _ in 0..40 {
            slots.taken(&target("a"), now);
            slots.ended(&target("a"), PROMPTLY, now);
        }
        assert_eq!(free_slots(&mut slots, "a", now), Some(16), "its share and no more");
        for expected in [8, 4, 2, 1, 1] {
            slots.taken(&target("a"), now);
            slots.ended(&target("a"), TargetResponse::Failed, now);
            assert_eq!(free_slots(&mut slots, "a", now), Some(expected));
        }
        slots.taken(&target("a"), now);
        slots.ended(&target("a"), TargetResponse::Responded(Duration::from_secs(20)), now);
        assert_eq!(free_slots(&mut slots, "a", now), Some(1), "a slow response gains no slot");
        assert!(!slots.targets[&target("a")].is_failing);
    }

    #[test]
    fn failing_targets_together_hold_at_most_half_of_the_slots() {
        let (mut slots, now) = (DeliverySlots::new(8, 4), Instant::now());
        for name in 0..20 {
            for _ in 0..3 {
                slots.taken(&target(&name.to_string()), now);
                slots.ended(&target(&name.to_string()), TargetResponse::Failed, now);
            }
        }
        assert_eq!(slots.take("w", Duration::ZERO, now).failing_limit, 4);
        for name in 0..3 {
            slots.taken(&target(&name.to_string()), now);
        }
        let take = slots.take("w", Duration::ZERO, now);
        assert_eq!((take.failing_limit, take.limit), (1, 5));
    }

    #[test]
    fn a_pause_ends_and_is_bounded() {
        let (mut slots, now) = (DeliverySlots::new(64, 16), Instant::now());
        slots.taken(&target("a"), now);
        slots.ended(&target("a"), TargetResponse::Paused(Duration::MAX), now);
        assert_eq!(free_slots(&mut slots, "a", now), Some(0));
        let nearly = now + DELIVERY_PAUSE_MAX - Duration::from_millis(1);
        assert_eq!(free_slots(&mut slots, "a", nearly), Some(0));
        assert_ne!(free_slots(&mut slots, "a", now + DELIVERY_PAUSE_MAX), Some(0));
    }

    #[test]
    fn tracked_targets_are_bounded_and_targets_in_flight_are_never_evicted() {
        let (mut slots, now) = (DeliverySlots::new(64, 16), Instant::now());
        slots.taken(&target("busy"), now);
        for name in 0..2 * OUTBOX_TARGETS_MAX {
            slots.taken(&target(&name.to_string()), now + Duration::from_millis(1));
            slots.ended(&target(&name.to_string()), PROMPTLY, now + Duration::from_millis(1));
        }
        let later = now + IDLE_TARGET_TTL * 2;
        assert_eq!(slots.take("w", Duration::ZERO, now).targets.len(), OUTBOX_TARGETS_MAX);
        let left = slots.take("w", Duration::ZERO, later).targets;
        assert_eq!(left.len(), 1);
        assert_eq!((&left[0].target, left[0].in_flight), (&target("busy"), 1));
        assert_eq!(slots.free(), 63);
    }
}
