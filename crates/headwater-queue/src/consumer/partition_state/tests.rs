//! The state machine alone: rules one by one, and a simulation of server, fetcher and handlers on a virtual clock, with
//! random events, failures and lost replies.

use proptest::prelude::*;

use super::*;
use crate::config::MessageOrder;
use crate::consumer::retry_or_dead_letter::{DeadLetterCause, FinishedDelivery};
use crate::consumer::settle_state::FOLLOW_UPS_MAX;
use crate::message::KEY;

const OWN: &str = "own";
const CONCURRENCY: usize = 2;
const LIMITS: PartitionLimits = PartitionLimits { regular: 6, bulk: Some(16) };
/// Long enough for every backoff and pause of the state machine.
const LONG: Duration = Duration::from_secs(30);

fn id(n: u64) -> EntryId {
    EntryId::new(n, 0)
}

fn settings(mode: Mode, order: MessageOrder) -> StateSettings {
    let config = ConsumerConfig {
        mode,
        order,
        concurrency: CONCURRENCY,
        reclaim_idle: Duration::from_secs(9),
        blocked_max: 3,
        ..Default::default()
    };
    let consumer_name = ConsumerName::new(OWN).unwrap();
    StateSettings { config, consumer_name, in_place_attempts: 0 }
}

/// A server with one stream and one group, a fetcher, handlers and the calls in progress.
struct World {
    state: PartitionState,
    now: Instant,
    /// All entries and their keys; those not delivered yet; those pending: for which consumer, deliveries.
    keys: BTreeMap<u64, Option<u8>>,
    undelivered: BTreeSet<u64>,
    pending: BTreeMap<u64, (String, u64)>,
    /// Entries that were acknowledged.
    settled: BTreeSet<u64>,
    /// The fetcher.
    is_reading: bool,
    credits: isize,
    failed_reads: u64,
    recovered_reads: u64,
    /// Messages without a handler, and those with one.
    waiting: Vec<InFlightMessage>,
    started: Vec<InFlightMessage>,
    /// How often each message was handled successfully.
    done: BTreeMap<u64, usize>,
    calls: Vec<Action>,
    /// Keys that a barrier blocks.
    blocked_keys: BTreeSet<u8>,
    has_ended_reading: bool,
    /// Whether every follow-up is written at the first attempt.
    are_follow_ups_writable: bool,
    /// Whether more may be in flight than the limit: entries were reclaimed or unblocked, or limits shrank.
    may_exceed_limit: bool,
    terminated: Option<Unfinished>,
}

impl World {
    fn new(mode: Mode, order: MessageOrder) -> Self {
        let now = Instant::now();
        Self {
            state: PartitionState::new(settings(mode, order), LIMITS, now),
            now,
            keys: BTreeMap::new(),
            undelivered: BTreeSet::new(),
            pending: BTreeMap::new(),
            settled: BTreeSet::new(),
            is_reading: false,
            credits: 0,
            failed_reads: 0,
            recovered_reads: 0,
            waiting: Vec::new(),
            started: Vec::new(),
            done: BTreeMap::new(),
            calls: Vec::new(),
            blocked_keys: BTreeSet::new(),
            has_ended_reading: false,
            are_follow_ups_writable: false,
            may_exceed_limit: false,
            terminated: None,
        }
    }

    fn fields(&self, n: u64) -> Fields {
        let mut pairs = vec![("payload", vec![b'x'])];
        pairs.extend(self.keys[&n].map(|key| (KEY, vec![key])));
        Fields::new(pairs)
    }

    fn produce(&mut self, key: Option<u8>) -> u64 {
        let n = self.keys.len() as u64 + 1;
        self.keys.insert(n, key);
        self.undelivered.insert(n);
        n
    }

    /// Delivers an entry to a consumer that died.
    fn leave_pending(&mut self, key: Option<u8>, deliveries: u64) {
        let n = self.produce(key);
        self.undelivered.remove(&n);
        self.pending.insert(n, ("dead".to_owned(), deliveries));
    }

    fn on(&mut self, event: PartitionEvent) {
        self.on_unchecked(event);
        self.check();
    }

    fn on_unchecked(&mut self, event: PartitionEvent) {
        let blocked_keys = self.blocked_keys.clone();
        let is_blocked = |item: &InFlightMessage| {
            item.key.as_ref().is_some_and(|key| blocked_keys.contains(&key[0]))
        };
        let actions = self.state.on(event, self.now, &is_blocked);
        for action in actions {
            self.execute(action);
        }
    }

    fn execute(&mut self, action: Action) {
        assert!(self.terminated.is_none(), "nothing happens after the end: {action:?}");
        match action {
            Action::Start(messages) => self.waiting.extend(messages),
            Action::Credits { change, .. } => self.credits += change,
            Action::StartReading { failed_reads } => {
                self.is_reading = true;
                self.recovered_reads = failed_reads;
            }
            Action::StopReading => self.is_reading = false,
            Action::Withdraw => {
                let ids = self.waiting.drain(..).map(|item| item.delivery.id).collect();
                self.on_unchecked(PartitionEvent::Withdrawn(ids));
            }
            Action::AbortHandlers => {
                self.waiting.clear();
                self.started.clear();
            }
            Action::NotifyBlocked | Action::PartitionReport(_) => {}
            Action::Reply(reply, is_reclaimed) => drop(reply.send(is_reclaimed)),
            Action::Terminated { unfinished, .. } => {
                self.terminated = Some(unfinished);
                self.waiting.clear();
                self.started.clear();
                self.calls.clear();
            }
            call => {
                let same = |other: &Action| {
                    matches!(
                        (&call, other),
                        (Action::Settle(_), Action::Settle(_))
                            | (Action::WriteFollowUps(_), Action::WriteFollowUps(_))
                            | (Action::Reload(_), Action::Reload(_))
                            | (
                                Action::ListPending { .. } | Action::Reclaim { .. },
                                Action::ListPending { .. } | Action::Reclaim { .. },
                            )
                    )
                };
                assert!(!self.calls.iter().any(same), "one call at a time: {call:?}");
                self.calls.push(call);
            }
        }
    }

    fn check(&self) {
        if self.terminated.is_some() {
            return;
        }
        assert_eq!(self.credits, self.state.credits);
        assert_eq!(self.waiting.len() + self.started.len(), self.state.running.len());
        let counted = self.state.in_flight() - self.state.blocked();
        let limit = LIMITS.bulk.unwrap();
        assert!(counted <= limit || self.may_exceed_limit, "{counted} in flight");
    }

    /// The fetcher reads. If the reply is lost, the entries are pending and the partition does not know them.
    fn fetch(&mut self, count: usize, is_reply_lost: bool) {
        let is_recovered = self.failed_reads == self.recovered_reads;
        if !self.is_reading || !is_recovered || self.has_ended_reading || self.credits <= 0 {
            return;
        }
        let count = count.min(usize::try_from(self.credits).unwrap());
        let read: Vec<u64> = self.undelivered.iter().copied().take(count).collect();
        let mut entries = Vec::new();
        for n in read {
            self.undelivered.remove(&n);
            self.pending.insert(n, (OWN.to_owned(), 1));
            entries.push(DeliveredEntry { id: id(n), fields: self.fields(n), deliveries: 1 });
        }
        if is_reply_lost {
            self.failed_reads += 1;
            self.may_exceed_limit = true;
            self.on(PartitionEvent::ReadFailed);
        } else if !entries.is_empty() {
            self.credits -= isize::try_from(entries.len()).unwrap();
            self.on(PartitionEvent::EntriesRead(entries));
        }
    }

    /// A handler starts. Checks the order of its key.
    fn start_handler(&mut self, pick: usize) {
        if self.waiting.is_empty() || self.started.len() >= CONCURRENCY {
            return;
        }
        let item = self.waiting.remove(pick % self.waiting.len());
        let n = item.delivery.id.ms;
        if let Some(key) = item.key.as_ref().map(|key| key[0]) {
            assert!(!self.blocked_keys.contains(&key) || item.failures > 0, "{n} is blocked");
            let older = self.keys.range(..n).filter(|(_, other)| **other == Some(key));
            for (older, _) in older {
                let is_finished = self.settled.contains(older)
                    || self.state.settles.ids().any(|settling| settling == id(*older));
                assert!(is_finished, "{n} overtakes {older} of its key");
            }
        }
        self.started.push(item);
    }

    fn finish_handler(&mut self, pick: usize, outcome: u8) {
        if self.started.is_empty() {
            return;
        }
        let item = self.started.remove(pick % self.started.len());
        let settle = |action, result| Disposition::Settle(FinishedDelivery { action, result });
        let disposition = match outcome {
            0 if item.key.is_some() => {
                Disposition::RetryInPlace { after: Duration::from_millis(50) }
            }
            1 => settle(SettleAction::Release, DeliveryResult::Release),
            2 => {
                *self.done.entry(item.delivery.id.ms).or_default() += 1;
                let to = headwater_stream::StreamName::new("dead letters").unwrap();
                let action = SettleAction::Append { to, fields: item.delivery.fields.clone() };
                settle(action, DeliveryResult::DeadLetter(DeadLetterCause::Handler))
            }
            _ => {
                *self.done.entry(item.delivery.id.ms).or_default() += 1;
                settle(SettleAction::Ack, DeliveryResult::Done)
            }
        };
        let took = Some(Duration::from_millis(1));
        let finished = FinishedMessage { id: item.delivery.id, disposition, took };
        self.on(PartitionEvent::HandlersFinished(vec![finished]));
    }

    /// A call ends: it works, or it fails before or after it took effect.
    fn end_call(&mut self, pick: usize, failure: u8) {
        if self.calls.is_empty() {
            return;
        }
        let call = self.calls.remove(pick % self.calls.len());
        let error = || StreamError::Unavailable { problem: "unavailable".to_owned(), source: None };
        let event = match call {
            // The server of the dead letters is unavailable.
            Action::WriteFollowUps(batch) if failure < 4 && !self.are_follow_ups_writable => {
                PartitionEvent::FollowUpsWritten(batch.to_vec())
            }
            Action::WriteFollowUps(batch) => {
                for Settlement { id, .. } in batch.iter() {
                    self.pending.remove(&id.ms);
                    self.settled.insert(id.ms);
                }
                PartitionEvent::FollowUpsWritten(Vec::new())
            }
            Action::Settle(batch) => {
                for Settlement { id, action } in batch.iter() {
                    let deliveries = self.pending.remove(&id.ms).map_or(0, |(_, count)| count);
                    if matches!(action, SettleAction::Release) {
                        let released = SettleAction::RELEASED.to_owned();
                        self.pending.insert(id.ms, (released, deliveries - 1));
                    } else {
                        self.settled.insert(id.ms);
                    }
                }
                PartitionEvent::Settled(Vec::new())
            }
            Action::ListPending { .. } if failure == 0 => {
                PartitionEvent::PendingListed(Err(error()))
            }
            Action::ListPending { scope, after } => {
                let is_listed =
                    |consumer: &str| scope.consumer().is_none_or(|c| c.as_str() == consumer);
                let after = after.map_or(0, |after| after.ms);
                let rows = self.pending.range(after + 1..);
                let rows = rows.filter(|(_, (consumer, _))| is_listed(consumer)).take(4);
                let rows = rows.map(|(n, (consumer, deliveries))| PendingDelivery {
                    id: id(*n),
                    consumer: ConsumerName::new(consumer.as_str()).unwrap(),
                    idle: LONG,
                    deliveries: *deliveries,
                });
                PartitionEvent::PendingListed(Ok(rows.collect()))
            }
            Action::Reclaim { .. } if failure == 0 => PartitionEvent::Reclaimed(Err(error())),
            Action::Reclaim { scope, ids } => {
                self.may_exceed_limit = true;
                let mut result = ReclaimResult::default();
                for n in ids.iter().map(|id| id.ms) {
                    let Some((consumer, deliveries)) = self.pending.get_mut(&n) else { continue };
                    *consumer = OWN.to_owned();
                    // A claim whose reply was lost is not one more delivery.
                    *deliveries += u64::from(!matches!(scope, ReclaimScope::Unseen(_)));
                    let deliveries = *deliveries;
                    let fields = self.fields(n);
                    result.entries.push(DeliveredEntry { id: id(n), fields, deliveries });
                }
                // The reply is lost.
                PartitionEvent::Reclaimed(if failure == 1 { Err(error()) } else { Ok(result) })
            }
            Action::CountDelivery(id, _) => {
                let deliveries = self.pending.get_mut(&id.ms).map(|(_, count)| {
                    *count += 1;
                    *count
                });
                PartitionEvent::DeliveryCounted(id, deliveries)
            }
            Action::Reload(ids) => PartitionEvent::Reloaded(
                ids.into_iter().map(|id| (id, Some(self.fields(id.ms)))).collect(),
            ),
            Action::KeepAlive(mut ids) => {
                ids.retain(|id| self.pending.get(&id.ms).is_none_or(|(name, _)| name != OWN));
                PartitionEvent::NoLongerPending { ids, is_data_lost: false }
            }
            Action::EndReading => {
                self.has_ended_reading = true;
                PartitionEvent::LastReadEnded
            }
            other => panic!("not a call: {other:?}"),
        };
        self.on(event);
    }

    fn pass_time(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(deadline) = self.state.next_deadline().filter(|at| *at <= until) {
            assert!(deadline > self.now, "a deadline that stays due");
            self.now = deadline;
            self.on(PartitionEvent::Tick);
        }
        self.now = until;
    }

    fn open_barriers(&mut self) {
        self.blocked_keys.clear();
        self.may_exceed_limit = true;
        self.on(PartitionEvent::BarrierOpened);
    }

    fn step(&mut self, op: u8, argument: u16) {
        let pick = usize::from(argument >> 4);
        let choice = u8::try_from(argument % 16).unwrap();
        match op {
            0..3 => {
                self.produce((choice < 12).then_some(choice % 4));
            }
            3 | 4 => self.fetch(pick % 8 + 1, false),
            5 => self.fetch(pick % 8 + 1, choice == 0),
            6 | 7 => self.start_handler(pick),
            8 | 9 => self.finish_handler(pick, choice),
            10..13 => self.end_call(pick, choice),
            13 => self.pass_time(Duration::from_millis(u64::from(argument % 3000))),
            14 if choice == 0 => self.on(PartitionEvent::Paused(pick.is_multiple_of(2))),
            // A barrier closes for a key before its first message.
            14 if choice == 1 => {
                let new = b'z' - u8::try_from(pick % 8).unwrap();
                if !self.keys.values().any(|key| *key == Some(new)) {
                    self.blocked_keys.insert(new);
                    for _ in 0..pick % 6 {
                        self.produce(Some(new));
                    }
                }
            }
            14 if choice == 2 => self.open_barriers(),
            14 if choice == 3 => {
                self.may_exceed_limit = true;
                let limits = PartitionLimits { regular: pick % 4 + 1, bulk: None };
                self.on(PartitionEvent::LimitsChanged(limits));
            }
            _ => self.on(PartitionEvent::SearchOrphans),
        }
    }

    /// Lets everything finish, without failures.
    fn settle_down(&mut self) {
        self.on(PartitionEvent::Paused(false));
        self.open_barriers();
        for _ in 0..10_000 {
            if self.terminated.is_some()
                || (self.undelivered.is_empty() && self.pending.is_empty() && self.calls.is_empty())
            {
                return;
            }
            self.fetch(8, false);
            self.start_handler(0);
            self.finish_handler(0, 15);
            self.end_call(0, 15);
            if self.calls.is_empty() && self.waiting.is_empty() && self.started.is_empty() {
                self.pass_time(Duration::from_secs(1));
                self.on(PartitionEvent::SearchOrphans);
            }
        }
        panic!("it does not come to an end: {:?}", self.state);
    }
}

fn steps() -> impl Strategy<Value = Vec<(u8, u16)>> {
    proptest::collection::vec((0..16_u8, any::<u16>()), 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_message_is_handled_once_and_each_key_in_order(
        left_behind in proptest::collection::vec((0..4_u8, 1..3_u64), 0..6),
        steps in steps(),
    ) {
        let mut world = World::new(Mode::Owned, MessageOrder::PerKey);
        for (key, deliveries) in left_behind {
            world.leave_pending(Some(key), deliveries);
        }
        world.on(PartitionEvent::Started);
        for (op, argument) in steps {
            world.step(op, argument);
        }
        world.settle_down();
        prop_assert!(world.terminated.is_none());
        prop_assert_eq!(world.settled.len(), world.keys.len());
        prop_assert!(world.done.values().all(|times| *times == 1), "{:?}", world.done);
    }

    #[test]
    fn a_shutdown_at_any_time_leaves_nothing_in_flight(
        steps in steps(),
        last in steps(),
        is_drain in any::<bool>(),
        is_per_key in any::<bool>(),
    ) {
        let (mode, order) = match is_per_key {
            true => (Mode::Owned, MessageOrder::PerKey),
            false => (Mode::Shared, MessageOrder::Relaxed),
        };
        let mut world = World::new(mode, order);
        world.are_follow_ups_writable = true;
        world.on(PartitionEvent::Started);
        for (op, argument) in steps {
            // Only barriers of this order block.
            if is_per_key || op != 14 {
                world.step(op, argument);
            }
        }
        let phase = if is_drain { PartitionPhase::Draining } else { PartitionPhase::Stopping };
        world.on(PartitionEvent::ShutDown { phase, drain: Duration::from_secs(2) });
        for (op, argument) in last {
            // Backend calls neither fail nor take long, handlers may do anything.
            if world.terminated.is_none() && !matches!(op, 13 | 14) {
                world.step(op, argument | 8);
            }
        }
        for _ in 0..100 {
            while !world.calls.is_empty() {
                world.end_call(0, 15);
            }
            world.pass_time(Duration::from_millis(100));
        }
        let unfinished = world.terminated.as_ref().expect("it ended");
        prop_assert!(unfinished.unsettled.is_empty() && unfinished.unhandled.is_empty());
        let ours = world.pending.iter().filter(|(_, (consumer, _))| consumer == OWN);
        prop_assert_eq!(ours.count(), 0, "released: {:?}", world.pending);
    }

    #[test]
    fn after_the_lease_is_lost_nothing_has_an_effect_and_nothing_in_hand_is_forgotten(
        steps in steps(),
        last in steps(),
    ) {
        let mut world = World::new(Mode::Owned, MessageOrder::PerKey);
        world.on(PartitionEvent::Started);
        for (op, argument) in steps {
            world.step(op, argument);
        }
        let mut in_hand = world.state.in_flight_ids();
        for item in world.state.queues.iter().filter(|item| item.delivery.fields.is_empty()) {
            in_hand.remove(&item.delivery.id);
        }
        world.on(PartitionEvent::LeaseLost);
        let unfinished = world.terminated.as_ref().expect("it ended");
        let unsettled = unfinished.unsettled.iter().map(|entry| entry.id);
        let unhandled = unfinished.unhandled.iter().map(|entry| entry.id);
        prop_assert_eq!(unhandled.chain(unsettled).collect::<HashSet<_>>(), in_hand);
        for (op, argument) in last {
            world.step(op, argument);
        }
        prop_assert_eq!(world.state.in_flight(), 0);
    }
}

#[test]
fn a_suspect_entry_is_handled_alone() {
    let mut world = World::new(Mode::Owned, MessageOrder::Relaxed);
    world.leave_pending(None, 1);
    world.leave_pending(None, 3);
    world.leave_pending(None, 3);
    world.leave_pending(None, 4);
    world.on(PartitionEvent::Started);
    world.end_call(0, 15);
    world.end_call(0, 15);
    let waiting =
        |world: &World| world.waiting.iter().map(|item| item.delivery.id.ms).collect::<Vec<_>>();
    assert_eq!(waiting(&world), [1]);
    // The next entries crashed two consumers: they wait until the first one is done.
    assert!(!world.calls.iter().any(|call| matches!(call, Action::Reclaim { .. })));
    world.start_handler(0);
    world.finish_handler(0, 15);
    world.calls.retain(|call| !matches!(call, Action::Settle(_)));
    world.end_call(0, 15);
    // As many as there are handlers, of the same risk.
    assert_eq!(waiting(&world), [2, 3]);
    // One that never finishes delays them only for a while.
    world.start_handler(0);
    assert!(world.calls.is_empty());
    world.pass_time(LONG);
    world.calls.retain(|call| matches!(call, Action::Reclaim { .. }));
    world.end_call(0, 15);
    assert_eq!(waiting(&world), [3, 4]);
}

#[test]
fn credits_follow_the_capacity() {
    let mut world = World::new(Mode::Shared, MessageOrder::Relaxed);
    world.on(PartitionEvent::Started);
    assert_eq!(world.credits, 6, "the regular limit");
    for _ in 0..20 {
        world.produce(None);
    }
    world.fetch(6, false);
    assert_eq!((world.credits, world.waiting.len()), (0, 6));
    let finish_one = |world: &mut World| {
        world.start_handler(0);
        world.finish_handler(0, 15);
        world.credits
    };
    // Handlers are slow: not for a few messages, while others wait for a handler.
    world.pass_time(FAST_WITHIN * 2);
    assert_eq!([(); 3].map(|()| finish_one(&mut world)), [0, 0, 3]);
    // Fast: up to the bulk limit.
    world.fetch(3, false);
    world.start_handler(5);
    world.finish_handler(0, 15);
    assert_eq!(world.credits, 11);
    world.on(PartitionEvent::Paused(true));
    assert_eq!(world.credits, 0);
    world.on(PartitionEvent::Paused(false));
    assert!(world.credits > 0);
    world.on(PartitionEvent::LimitsChanged(PartitionLimits { regular: 1, bulk: None }));
    assert_eq!(world.credits, 0, "more is in flight than the new limit");
}

#[test]
fn a_failed_read_stops_reading_until_its_entries_are_reclaimed() {
    let mut world = World::new(Mode::Owned, MessageOrder::PerKey);
    world.on(PartitionEvent::Started);
    world.end_call(0, 15);
    assert!(world.is_reading);
    for _ in 0..4 {
        world.produce(Some(b'a'));
    }
    world.fetch(2, true);
    assert!(!world.is_reading);
    // Listing fails once, then works; the entries are reclaimed before more is read.
    world.end_call(0, 0);
    world.pass_time(Duration::from_millis(100));
    world.end_call(0, 15);
    assert!(!world.is_reading);
    world.end_call(0, 15);
    world.end_call(0, 15);
    assert!(world.is_reading);
    world.settle_down();
    assert_eq!(world.done.len(), 4);
}

#[test]
fn a_retry_without_delay_waits_for_no_timer() {
    let mut world = World::new(Mode::Shared, MessageOrder::PerKey);
    world.on(PartitionEvent::Started);
    world.produce(Some(b'a'));
    world.fetch(1, false);
    world.start_handler(0);
    let item = world.started.remove(0);
    let disposition = Disposition::RetryInPlace { after: Duration::ZERO };
    let finished = FinishedMessage { id: item.delivery.id, disposition, took: None };
    world.on(PartitionEvent::HandlersFinished(vec![finished]));
    assert!(world.calls.iter().any(|call| matches!(call, Action::CountDelivery(..))));
}

/// Entries of one partition, all of them read and handled with this outcome.
fn handle_all(world: &mut World, entries: usize, outcome: u8) {
    for _ in 0..entries {
        world.produce(None);
    }
    for _ in 0..entries {
        world.fetch(LIMITS.regular, false);
        world.start_handler(0);
        world.finish_handler(0, outcome);
    }
}

fn assert_first_is_kept_alive(world: &World) {
    let is_kept = |call: &Action| matches!(call, Action::KeepAlive(ids) if ids == &[id(1)]);
    assert!(world.calls.iter().any(is_kept), "{:?}", world.calls);
}

#[test]
fn acknowledgements_go_on_while_a_dead_letter_cannot_be_written() {
    let mut world = World::new(Mode::Shared, MessageOrder::Relaxed);
    world.on(PartitionEvent::Started);
    world.calls.clear();
    handle_all(&mut world, 1, 2);
    assert!(matches!(world.calls[..], [Action::WriteFollowUps(_)]), "{:?}", world.calls);
    handle_all(&mut world, 1, 15);
    assert!(matches!(world.calls[1], Action::Settle(_)), "{:?}", world.calls);
    world.end_call(1, 15);
    assert_eq!(world.settled, BTreeSet::from([2]));
    // It fails; it is in flight, so that it is neither reclaimed nor idle, and tried again later.
    world.end_call(0, 0);
    assert!(world.calls.is_empty());
    assert!(world.state.in_flight_ids().contains(&id(1)));
    world.pass_time(LONG);
    assert_first_is_kept_alive(&world);
    let at = world.calls.iter().position(|call| matches!(call, Action::WriteFollowUps(_)));
    world.end_call(at.expect("another attempt"), 15);
    assert_eq!(world.settled, BTreeSet::from([1, 2]));
}

#[test]
fn a_partition_with_too_many_dead_letters_that_cannot_be_written_is_not_read() {
    let mut world = World::new(Mode::Shared, MessageOrder::Relaxed);
    world.on(PartitionEvent::Started);
    world.calls.clear();
    handle_all(&mut world, 1, 2);
    world.end_call(0, 0);
    handle_all(&mut world, FOLLOW_UPS_MAX - 2, 2);
    assert!(world.credits > 0);
    handle_all(&mut world, 1, 2);
    assert_eq!(world.credits, 0);
    world.produce(None);
    world.fetch(1, false);
    assert_eq!(world.state.in_flight(), 0);
    // They are written: reading goes on.
    world.pass_time(Duration::from_secs(1));
    let at = world.calls.iter().position(|call| matches!(call, Action::WriteFollowUps(_)));
    world.end_call(at.expect("another attempt"), 15);
    assert!(world.credits > 0);
}

#[test]
fn entries_are_kept_alive_before_a_pull_reassigns_them() {
    let mut world = World::new(Mode::Shared, MessageOrder::Relaxed);
    world.state.settings.config.reclaim_idle = RECLAIM_IDLE_DEFAULT * 12;
    world.on(PartitionEvent::Started);
    world.calls.clear();
    world.produce(None);
    world.fetch(1, false);
    world.start_handler(0);
    world.pass_time(RECLAIM_IDLE_DEFAULT / 3);
    assert_first_is_kept_alive(&world);
}

#[test]
fn a_pulled_entry_is_reclaimed_after_its_lease() {
    let mut world = World::new(Mode::Shared, MessageOrder::Relaxed);
    world.on(PartitionEvent::Started);
    world.settle_down();
    // All are idle for `LONG` when they are listed.
    for (n, lease) in [(1, LONG * 2), (2, LONG / 2)] {
        world.leave_pending(None, 1);
        world.pending.insert(n, (format!("pull:{}:0:a", lease.as_millis()), 1));
    }
    world.leave_pending(None, 1);
    let idle = LONG / 3;
    world.state.reclaims.request(ReclaimPurpose::Orphans, ReclaimScope::Idle(idle));
    world.on(PartitionEvent::Tick);
    world.end_call(0, 15);
    let reclaim = |world: &World, min_idle, n| {
        let [Action::Reclaim { scope, ids }] = &world.calls[..] else { return false };
        *scope == ReclaimScope::Idle(min_idle) && ids == &[id(n)]
    };
    // If its lease is extended meanwhile, it is not idle for long enough.
    assert!(reclaim(&world, LONG / 2, 2), "{:?}", world.calls);
    world.end_call(0, 15);
    assert!(reclaim(&world, idle, 3), "{:?}", world.calls);
}
