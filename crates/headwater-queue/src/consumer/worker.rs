//! A partition at work: what of it is in hand, who handles it, what waits to be settled.
//!
//! Upstream: `feed` brings what was read, `adoption` what was taken over. Downstream: `runner` handles, `settling` ends
//! deliveries.
//! Promises: never more in hand than `room` allows; at most `concurrency` handlers at once; once it has ended,
//! nothing that an old handler says has any effect.
//! There are no tasks while there is nothing to do: runners and settlers are started when there is work and end with it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{ConsumerName, Delivery, EntryId, Fence, HeldLease, Settlement, Then};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::feed::Feed;
use super::gate::Gate;
use super::job::Job;
use super::lanes::{Item, Lanes};
use super::meters::Meters;
use super::pace::Pace;
use super::rescue::Witness;
use super::room::LONG;
use super::runner;
use super::upkeep::Dates;
use super::verdict::{Ended, Ending, Rules, Verdict};
use crate::config::Mode;
use crate::group::seam::Alarm;

/// Outcomes are settled when there are this many, or none is to come soon.
const SETTLE_AT: usize = 256;
/// Outcomes wait no longer than this for others while handlers are at work.
const SETTLE_AFTER: Duration = Duration::from_millis(1);

/// One partition and those who work on it.
pub(super) struct Worker {
    pub(super) job: Arc<Job>,
    pub(super) rules: Rules,
    pub(super) consumer: ConsumerName,
    pub(super) lease: HeldLease,
    pub(super) fence: Option<Fence>,
    pub(super) alarm: Alarm,
    pub(super) witness: Arc<Witness>,
    pub(super) meters: Meters,
    pub(super) feed: Arc<Feed>,
    pub(super) pace: Pace,
    /// Whether new entries are to be read.
    pub(super) is_reading: AtomicBool,
    /// Whether the feed knows that there is room: it reads the partition, or it was told to look again.
    pub(super) is_known: AtomicBool,
    /// What counts against the partition's share.
    pub(super) in_hand: AtomicUsize,
    pub(super) ready: AtomicUsize,
    /// Of those in hand, how many wait at a gate, or behind one that does: they take no room, or partitions could wait for each other for ever.
    pub(super) held: AtomicUsize,
    /// Whether something was given back here that is to be taken up again.
    has_released: AtomicBool,
    pub(super) dates: Dates,
    /// Whether a read failed that may have fetched entries which nobody has seen.
    pub(super) has_unseen: AtomicBool,
    /// Held by whoever takes pending entries over.
    adoption: Semaphore,
    state: Mutex<State>,
    changed: Notify,
    crew: Mutex<JoinSet<()>>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) lanes: Lanes,
    /// What each runner has in hand; `None` for one that has not begun.
    running: Vec<Option<Delivery>>,
    idle_slots: Vec<usize>,
    /// Ended deliveries that are to be settled.
    pub(super) outcomes: Vec<Settlement>,
    oldest_outcome: Option<Instant>,
    /// Those that are being settled.
    pub(super) settling: Arc<Vec<Settlement>>,
    pub(super) has_settler: bool,
    /// Grows when everybody at work is dismissed: what they say afterwards counts no more.
    pub(super) generation: u64,
    watchers: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    /// Nothing new is begun.
    Closing,
    /// Nothing new is read, what is in hand is handled.
    Draining,
    Ended,
}

/// A runner's place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    index: usize,
    generation: u64,
}

/// What a runner does next.
pub(super) struct Step {
    pub(super) next: Option<Item>,
    /// Somebody else was woken and must not wait behind the next handler.
    pub(super) has_woken: bool,
}

/// What a worker that ended had in hand.
#[derive(Default)]
pub(super) struct Leftovers {
    pub(super) unhandled: Vec<Delivery>,
    pub(super) outcomes: Vec<Settlement>,
}

impl Worker {
    pub(super) fn new(
        job: Arc<Job>,
        rules: Rules,
        consumer: ConsumerName,
        lease: HeldLease,
        alarm: Alarm,
        feed: Arc<Feed>,
    ) -> Self {
        let meters = Meters::new(&job.topic, rules.partition, &job.group, consumer.as_str());
        let fence = (job.config.mode == Mode::Owned).then(|| lease.fence().clone());
        let state = State {
            phase: Phase::Open,
            lanes: Lanes::new(job.config.order, job.config.held_max),
            running: Vec::new(),
            idle_slots: Vec::new(),
            outcomes: Vec::new(),
            oldest_outcome: None,
            settling: Arc::default(),
            has_settler: false,
            generation: 0,
            watchers: 0,
        };
        Self {
            job,
            consumer,
            lease,
            fence,
            alarm,
            witness: Arc::new(Witness::new(rules.witness())),
            rules,
            meters,
            feed,
            pace: Pace::default(),
            is_reading: AtomicBool::new(false),
            is_known: AtomicBool::new(false),
            in_hand: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            has_released: AtomicBool::new(false),
            dates: Dates::default(),
            has_unseen: AtomicBool::new(false),
            adoption: Semaphore::new(1),
            state: Mutex::new(state),
            changed: Notify::new(),
            crew: Mutex::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the state of a partition")
    }

    /// Starts a task that ends with this worker.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut crew = self.crew.lock().expect("no code panics while it holds the crew");
        while crew.try_join_next().is_some() {}
        crew.spawn(task);
    }

    /// No new entries are wanted for a while. Returns whether some were before.
    pub(super) fn stop_reading(&self) -> bool {
        self.is_reading.swap(false, Ordering::AcqRel)
    }

    pub(super) fn is_reading(&self) -> bool {
        self.is_reading.load(Ordering::Acquire)
    }

    /// Whether something was given back here that is to be taken up again.
    pub(super) fn has_released(&self) -> bool {
        self.has_released.load(Ordering::Relaxed)
    }

    pub(super) fn forget_released(&self) {
        self.has_released.store(false, Ordering::Relaxed);
    }

    /// New entries are wanted from now on.
    pub(super) fn open_for_reading(self: &Arc<Self>) {
        if self.lock().phase == Phase::Open {
            self.is_reading.store(true, Ordering::Release);
            self.feed.add(self);
        }
    }

    /// Waits until nobody else takes pending entries over.
    pub(super) async fn adoption_turn(&self) -> SemaphorePermit<'_> {
        self.adoption.acquire().await.expect("nobody closes it")
    }

    /// Whether somebody takes pending entries over, or waits for room to do so.
    pub(super) fn is_adopting(&self) -> bool {
        self.adoption.available_permits() == 0
    }

    /// Takes in what was read or taken over.
    pub(super) fn receive(self: &Arc<Self>, entries: Vec<Delivery>) {
        if entries.is_empty() {
            return;
        }
        let mut state = self.lock();
        match state.phase {
            Phase::Open | Phase::Draining => {}
            Phase::Closing => {
                state.release(entries.iter().map(|entry| entry.id));
                drop(state);
                self.settle_soon();
                return;
            }
            Phase::Ended => return,
        }
        self.took(entries.len());
        self.meters.in_flight(self.job.in_hand.load(Ordering::Relaxed));
        let now = Instant::now();
        entries.into_iter().for_each(|entry| state.lanes.add(entry, now));
        self.start_runners(state);
    }

    /// Starts as many runners as have something to do.
    pub(super) fn start_runners(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        self.ready.store(state.lanes.ready_len(), Ordering::SeqCst);
        self.held.store(state.lanes.held_len(), Ordering::SeqCst);
        if !self.may_begin(&state) {
            return;
        }
        let at_work = state.running.len() - state.idle_slots.len();
        let free = self.job.config.concurrency.saturating_sub(at_work);
        for _ in 0..free.min(state.lanes.ready_len()) {
            let index = state.idle_slots.pop().unwrap_or_else(|| {
                state.running.push(None);
                state.running.len() - 1
            });
            let slot = Slot { index, generation: state.generation };
            self.spawn(runner::run(Arc::clone(self), slot));
        }
    }

    /// What a runner begins with.
    pub(super) fn begin(&self, slot: Slot) -> Option<Item> {
        let mut state = self.lock();
        if state.generation != slot.generation {
            return None;
        }
        let next = self.next_for(&mut state, slot);
        drop(state);
        next
    }

    /// Whether a handler may begin now. One that stood still until others took over must not: its effects are not fenced.
    fn may_begin(&self, state: &State) -> bool {
        state.may_begin(self.job.is_paused()) && self.lease.is_trusted()
    }

    fn next_for(&self, state: &mut State, slot: Slot) -> Option<Item> {
        let next = if self.may_begin(state) { self.next_free(&mut state.lanes) } else { None };
        self.ready.store(state.lanes.ready_len(), Ordering::SeqCst);
        state.running[slot.index] = next.as_ref().map(|item| item.delivery.clone());
        if next.is_none() {
            state.idle_slots.push(slot.index);
        }
        next
    }

    /// The next message that waits at no gate.
    fn next_free(&self, lanes: &mut Lanes) -> Option<Item> {
        loop {
            let Some(item) = lanes.next() else {
                if !lanes.absent(1).is_empty() {
                    self.job.gates.waiting.notify_one();
                }
                return None;
            };
            if self.job.gates.before(&item, self.rules.partition).is_none() {
                return Some(item);
            }
            lanes.hold(item);
            self.held.store(lanes.held_len(), Ordering::SeqCst);
            self.job.gates.waiting.notify_one();
            // There is more room now.
            self.changed.notify_waiters();
        }
    }

    /// The gates at which messages of this partition wait.
    pub(super) fn awaited(&self) -> Vec<Gate> {
        if self.held.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let state = self.lock();
        let gates = &self.job.gates;
        // One whose gate has opened since is let through by the same look.
        state
            .lanes
            .held()
            .map(|item| gates.before(item, self.rules.partition).unwrap_or(Gate::News))
            .collect()
    }

    /// Messages whose gate is open are handled.
    pub(super) fn let_through(self: &Arc<Self>) {
        let mut state = self.lock();
        let (gates, partition) = (&self.job.gates, self.rules.partition);
        state.lanes.let_through(|item| gates.before(item, partition).is_none());
        self.held.store(state.lanes.held_len(), Ordering::SeqCst);
        self.tell_watchers(&state);
        self.start_runners(state);
    }

    /// A message was handled: notes what becomes of it and takes the next one.
    pub(super) fn finish(
        self: &Arc<Self>,
        slot: Slot,
        item: Item,
        verdict: Verdict,
        took: Option<Duration>,
    ) -> Step {
        let mut state = self.lock();
        if state.generation != slot.generation {
            return Step { next: None, has_woken: false };
        }
        let came_at = item.came_at;
        match state.bring_in_line(verdict) {
            Verdict::End(ending) if ending.result == Ended::Release && state.keeps(&item) => {
                self.meters.ended(Ended::Release, took);
                self.job.count(Ended::Release);
                self.stay_in_lane(&mut state, item);
            }
            Verdict::End(ending) => {
                self.meters.ended(ending.result, took);
                self.job.count(ending.result);
                if ending.result == Ended::Release {
                    self.has_released.store(true, Ordering::Relaxed);
                }
                state.lanes.ended(item.key.as_ref());
                state.outcomes.push(Settlement { id: item.delivery.id, then: ending.then });
                self.gave(1);
            }
            Verdict::Again { after } => {
                self.meters.again(took.unwrap_or_default());
                self.job.count(Ended::Retry);
                self.rest(&mut state, item, after);
            }
        }
        let next = self.next_for(&mut state, slot);
        let mut has_woken = false;
        if state.wants_settling(next.is_none()) {
            state.has_settler = true;
            let generation = state.generation;
            self.spawn(Arc::clone(self).settle_all(generation));
            has_woken = true;
        }
        has_woken |= state.watchers > 0;
        self.tell_watchers(&state);
        drop(state);
        if next.is_none() {
            self.pace.ended(came_at);
        }
        has_woken |= self.ask_for_more(took.is_some_and(|took| took >= LONG));
        Step { next, has_woken }
    }

    /// A handler waits for something, so those that ended before it are settled now.
    pub(super) fn settle_soon(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.wants_settling(true) {
            state.has_settler = true;
            let generation = state.generation;
            self.spawn(Arc::clone(self).settle_all(generation));
        }
        drop(state);
        if self.job.is_short() {
            self.ask_for_more(true);
        }
    }

    /// The entries in hand, those that are being settled included.
    pub(super) fn ids_in_hand(&self) -> HashSet<EntryId> {
        let state = self.lock();
        let settling = state.outcomes.iter().chain(state.settling.iter()).map(|entry| entry.id);
        let running = state.running.iter().flatten().map(|delivery| delivery.id);
        state.lanes.ids().chain(running).chain(settling).collect()
    }

    /// These are no longer ours, or no longer there: those that nobody handles yet are left alone.
    pub(super) fn forget(self: &Arc<Self>, gone: &HashSet<EntryId>) {
        let mut state = self.lock();
        let removed = state.lanes.remove(gone);
        self.held.store(state.lanes.held_len(), Ordering::SeqCst);
        self.gave(removed);
        self.tell_watchers(&state);
        self.start_runners(state);
        self.ask_for_more(true);
    }

    /// Begins what could not begin before: the lease may be trusted again.
    pub(super) fn go_on(self: &Arc<Self>) {
        if self.ready.load(Ordering::SeqCst) > 0 {
            self.start_runners(self.lock());
        }
    }

    /// Handlers may begin again after a pause.
    pub(super) fn resume(self: &Arc<Self>) {
        self.start_runners(self.lock());
        self.feed.look_again();
    }

    /// Waits until the partition is in a certain state.
    pub(super) async fn until(&self, is_so: impl Fn(&State) -> bool) {
        // Counted also if this future is dropped: a watcher too many costs a little time, never a lost wake-up.
        self.lock().watchers += 1;
        let _watcher = Watcher(self);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if is_so(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    pub(super) fn tell_watchers(&self, state: &State) {
        if state.watchers > 0 {
            self.changed.notify_waiters();
        }
    }

    /// Stops reading and beginning; what waits is released, unless it is to be handled.
    pub(super) fn close(self: &Arc<Self>, phase: Phase) {
        self.is_reading.store(false, Ordering::Release);
        let mut state = self.lock();
        if state.phase == Phase::Ended {
            return;
        }
        state.phase = phase;
        if phase == Phase::Closing {
            let ids = state.lanes.clear();
            self.gave(ids.len());
            self.ready.store(0, Ordering::SeqCst);
            self.held.store(0, Ordering::SeqCst);
            state.release(ids);
        }
        // What is in hand is handled to the end, also if the subscription was paused.
        self.start_runners(state);
        self.settle_soon();
    }

    /// Cancels the handlers and releases what they had in hand.
    pub(super) fn cut_short(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.phase == Phase::Ended {
            return;
        }
        state.phase = Phase::Closing;
        self.dismiss(&mut state);
        let mut ids = state.lanes.clear();
        ids.extend(state.running.drain(..).flatten().map(|delivery| delivery.id));
        state.idle_slots.clear();
        self.held.store(0, Ordering::SeqCst);
        self.gave(ids.len());
        // What was being settled when its settler was dismissed is settled again, which does no harm.
        let unsettled = std::mem::take(&mut state.settling);
        state.outcomes.splice(0..0, unsettled.iter().cloned());
        state.release(ids);
        drop(state);
        self.settle_soon();
    }

    /// Ends at once: cancels the handlers, settles nothing. What was in hand stays pending, and is returned.
    pub(super) fn end(&self) -> Leftovers {
        self.is_reading.store(false, Ordering::Release);
        let mut state = self.lock();
        if state.phase == Phase::Ended {
            return Leftovers::default();
        }
        state.phase = Phase::Ended;
        self.dismiss(&mut state);
        let mut unhandled: Vec<Delivery> = state.running.drain(..).flatten().collect();
        unhandled.extend(state.lanes.take_all());
        state.idle_slots.clear();
        self.held.store(0, Ordering::SeqCst);
        let mut outcomes = std::mem::take(&mut state.outcomes);
        outcomes.extend(std::mem::take(&mut state.settling).iter().cloned());
        self.gave(self.in_hand());
        self.tell_watchers(&state);
        drop(state);
        self.feed.forget(self);
        Leftovers { unhandled, outcomes }
    }

    /// Ends everybody at work. A handler that blocks its thread goes on, but nobody listens to it.
    fn dismiss(&self, state: &mut State) {
        state.generation += 1;
        state.has_settler = false;
        self.crew.lock().expect("no code panics while it holds the crew").abort_all();
    }
}

impl State {
    fn may_begin(&self, is_paused: bool) -> bool {
        match self.phase {
            Phase::Open => !is_paused,
            Phase::Draining => true,
            Phase::Closing | Phase::Ended => false,
        }
    }

    /// While nothing new is begun, what is to be tried again is given back: its next try is somebody else's.
    fn bring_in_line(&self, verdict: Verdict) -> Verdict {
        match verdict {
            Verdict::Again { .. } if self.phase == Phase::Closing => {
                Verdict::End(Ending { then: Then::Release, result: Ended::Release })
            }
            verdict => verdict,
        }
    }

    /// Whether a released message stays at the head of its lane: if it left, later ones of its key would pass it.
    fn keeps(&self, item: &Item) -> bool {
        item.key.is_some() && matches!(self.phase, Phase::Open | Phase::Draining)
    }

    fn release(&mut self, ids: impl IntoIterator<Item = EntryId>) {
        let releases = ids.into_iter().map(|id| Settlement { id, then: Then::Release });
        self.outcomes.extend(releases);
    }

    /// Whether to begin settling; `now` if nothing more is to come for a while.
    fn wants_settling(&mut self, now: bool) -> bool {
        if self.has_settler || self.outcomes.is_empty() {
            return false;
        }
        if now || self.outcomes.len() >= SETTLE_AT {
            self.oldest_outcome = None;
            return true;
        }
        let oldest = *self.oldest_outcome.get_or_insert_with(Instant::now);
        if self.outcomes.len().is_multiple_of(16) && oldest.elapsed() >= SETTLE_AFTER {
            self.oldest_outcome = None;
            return true;
        }
        false
    }

    /// Whether a handler is at work.
    pub(super) fn is_handling(&self) -> bool {
        self.running.iter().any(Option::is_some)
    }

    /// Whether no handler is at work or about to be.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_handling() && self.lanes.ready_len() == 0
    }

    /// Whether nothing is in hand but what is to be settled.
    pub(super) fn is_quiet(&self) -> bool {
        !self.is_handling() && self.lanes.len() == 0
    }

    pub(super) fn is_settled(&self) -> bool {
        self.outcomes.is_empty() && self.settling.is_empty()
    }
}

struct Watcher<'a>(&'a Worker);

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        self.0.lock().watchers -= 1;
    }
}
