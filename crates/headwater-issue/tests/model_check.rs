//! Model checking of the issue protocol in every interleaving.
//!
//! The issue itself is not modelled: the tests use `headwater_issue::state`, the production code. Modelled is its
//! environment: a sender with three events, a stream that loses and duplicates nudges, two workers that crash at any
//! moment, claims that expire while their worker continues as a zombie, lost replies of the database, and handlers that
//! fail.
//!
//! The number of faults is limited, so every path ends; an event that is not processed at the end of a path is lost.
//! Without one part of the protocol, the checker finds the failure that this part prevents.

use std::time::Duration;

use headwater_issue::state::{IssueState, Transition, TransitionEffect, apply};
use headwater_issue::{AfterFailure, ClaimEpoch, DebounceWindow, ProcessingStatus, ReleaseReason};
use headwater_stream::clock::Timestamp;
use stateright::{Checker, HasDiscoveries, Model, Property};

const EVENTS: u8 = 3;
const WORKERS: usize = 2;
/// Fewer than all events, so that a run can leave pending events.
const EVENTS_PER_RUN: u32 = 2;
const ATTEMPTS_MAX: u32 = 2;
/// Never reached: quarantine is modelled with failures.
const CRASHES_MAX: u32 = 100;

const NOW: Timestamp = Timestamp::from_millis(1000);
const TTL: Duration = Duration::from_millis(10);
const EXPIRED: Timestamp = Timestamp::from_millis(1010);

/// The protocol, or the protocol without one of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Whole,
    /// No sweep for overdue nudges and expired claims.
    WithoutSweep,
    /// The end of a run is accepted with any epoch.
    WithoutEpoch,
    /// A completion ignores the counter and uses the number of events at the claim.
    WithoutCounter,
}

/// Maximum number of each fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Faults {
    crashes: u8,
    zombies: u8,
    lost_nudges: u8,
    doubled_nudges: u8,
    lost_replies: u8,
    failures: u8,
    releases: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    issue: Row,
    /// Rows of `event_logs`: bit sets of recorded and processed events.
    recorded: u8,
    processed: u8,
    /// Number of commits that included the event; each wrote a reply.
    effects: [u8; EVENTS as usize],
    /// Nudges about to be sent, and nudges in the stream.
    to_send: u8,
    in_stream: u8,
    workers: [Worker; WORKERS],
    faults: Faults,
}

/// The part of an [`IssueState`] that the model needs. Times are omitted: the model decides what is due.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Row {
    status: ProcessingStatus,
    pending: u64,
    epoch: ClaimEpoch,
    completed: ClaimEpoch,
    attempts: u32,
    quarantined: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Worker {
    Waiting,
    /// Has received a nudge.
    Nudged,
    /// Has claimed these events.
    Working {
        epoch: ClaimEpoch,
        events: u8,
    },
    /// Has to acknowledge the nudge.
    Ended,
    /// Has crashed; its nudge is still pending in the stream.
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Action {
    Record,
    SendNudge,
    /// The sender crashes between commit and nudge, or the stream is unavailable or loses its entries.
    LoseNudge,
    LoseFromStream,
    DoubleNudge,
    Receive(usize),
    Claim(usize),
    Heartbeat(usize),
    Complete(usize),
    /// The database commits, and the reply is lost.
    CompleteReplyLost(usize),
    Fail(usize),
    ReleaseClaim(usize),
    Acknowledge(usize),
    Crash(usize),
    Restart(usize),
    /// The claim of a live worker expires, and the sweep requeues the issue.
    ExpireLive,
    /// The same for a crashed worker.
    ExpireDead,
    SweepNudge,
    Release,
}

struct Checked {
    protocol: Protocol,
    faults: Faults,
}

impl Row {
    fn state(&self) -> IssueState {
        let processing = self.status == ProcessingStatus::Processing;
        IssueState {
            status: self.status,
            pending_events: self.pending,
            claim_epoch: self.epoch,
            completed_epoch: self.completed,
            claim_owner: processing.then(|| "worker".to_owned()),
            claim_expires_at: processing.then_some(EXPIRED),
            attempts: self.attempts,
            quarantined_at: self.quarantined.then_some(NOW),
            ..IssueState::default()
        }
    }

    fn of(state: &IssueState) -> Self {
        Self {
            status: state.status,
            pending: state.pending_events,
            epoch: state.claim_epoch,
            completed: state.completed_epoch,
            attempts: state.attempts,
            quarantined: state.quarantined_at.is_some(),
        }
    }
}

impl World {
    /// Applies a transition of the production state machine.
    fn apply(&mut self, transition: &Transition, now: Timestamp) -> TransitionEffect {
        let (state, effect) = apply(&self.issue.state(), transition, now);
        self.issue = Row::of(&state);
        effect
    }

    fn nudge_if_queued(&mut self, effect: &TransitionEffect) {
        // At most one: nudges are equal, and duplicates are modelled in the stream.
        if *effect == TransitionEffect::Queued {
            self.to_send = 1;
        }
    }

    fn unprocessed(&self) -> u8 {
        self.recorded & !self.processed
    }

    /// Whether a live worker holds the current claim.
    fn has_live_holder(&self) -> bool {
        let holds = |worker: &Worker| matches!(worker, Worker::Working { epoch, .. } if *epoch == self.issue.epoch);
        self.workers.iter().any(holds)
    }

    /// Whether no nudge is queued, in the stream or in a worker.
    fn nudge_is_overdue(&self) -> bool {
        let none = |worker: &Worker| matches!(worker, Worker::Waiting | Worker::Dead);
        self.to_send == 0 && self.in_stream == 0 && self.workers.iter().all(none)
    }

    fn end_run(&mut self, worker: usize, transition: &Transition) {
        let effect = self.apply(transition, NOW);
        self.nudge_if_queued(&effect);
        self.workers[worker] = Worker::Ended;
    }

    /// One transaction: event logs, replies and the issue change together.
    fn complete(
        &mut self,
        protocol: Protocol,
        mut epoch: ClaimEpoch,
        events: u8,
    ) -> TransitionEffect {
        match protocol {
            Protocol::WithoutEpoch => epoch = self.issue.epoch,
            Protocol::WithoutCounter => self.issue.pending = u64::from(events.count_ones()),
            Protocol::Whole | Protocol::WithoutSweep => {}
        }
        let processed = u64::from((events & !self.processed).count_ones());
        let effect = self.apply(&Transition::Complete { epoch, processed }, NOW);
        if matches!(effect, TransitionEffect::Queued | TransitionEffect::Finished) {
            self.processed |= events;
            for event in (0..EVENTS).filter(|event| events & (1 << event) != 0) {
                self.effects[usize::from(event)] += 1;
            }
        }
        self.nudge_if_queued(&effect);
        effect
    }
}

impl Checked {
    /// Possible actions of worker `index`.
    fn worker_actions(&self, world: &World, index: usize, actions: &mut Vec<Action>) {
        let faults = &world.faults;
        match world.workers[index] {
            Worker::Waiting if world.in_stream > 0 => actions.push(Action::Receive(index)),
            Worker::Waiting => return,
            Worker::Nudged => actions.push(Action::Claim(index)),
            Worker::Working { epoch, .. } => {
                actions.push(Action::Complete(index));
                // A renewal changes nothing, so only heartbeats of lost claims are modelled.
                if epoch != world.issue.epoch || world.issue.status != ProcessingStatus::Processing
                {
                    actions.push(Action::Heartbeat(index));
                }
                push_if(actions, faults.lost_replies > 0, Action::CompleteReplyLost(index));
                push_if(actions, faults.failures > 0, Action::Fail(index));
                push_if(actions, faults.releases > 0, Action::ReleaseClaim(index));
            }
            Worker::Ended => actions.push(Action::Acknowledge(index)),
            Worker::Dead => actions.push(Action::Restart(index)),
        }
        let alive = world.workers[index] != Worker::Dead;
        push_if(actions, alive && faults.crashes > 0, Action::Crash(index));
    }

    fn sweep_actions(&self, world: &World, actions: &mut Vec<Action>) {
        if self.protocol == Protocol::WithoutSweep {
            return;
        }
        if world.issue.status == ProcessingStatus::Processing {
            match world.has_live_holder() {
                true => push_if(actions, world.faults.zombies > 0, Action::ExpireLive),
                false => actions.push(Action::ExpireDead),
            }
        }
        let overdue = world.issue.status == ProcessingStatus::Queued && world.nudge_is_overdue();
        push_if(actions, overdue, Action::SweepNudge);
    }

    fn work(&self, world: &mut World, index: usize, action: &Action) {
        let Worker::Working { epoch, events } = world.workers[index] else { return };
        match action {
            Action::Heartbeat(_) => {
                let effect = world.apply(&Transition::Heartbeat { epoch, ttl: TTL }, NOW);
                assert_eq!(
                    effect,
                    TransitionEffect::Fenced,
                    "only lost claims send this heartbeat"
                );
                world.workers[index] = Worker::Ended;
            }
            Action::Complete(_) => {
                world.complete(self.protocol, epoch, events);
                world.workers[index] = Worker::Ended;
            }
            Action::CompleteReplyLost(_) => {
                world.faults.lost_replies -= 1;
                world.complete(self.protocol, epoch, events);
            }
            Action::Fail(_) => {
                world.faults.failures -= 1;
                let then = AfterFailure::Retry { after: Duration::ZERO };
                let (error, attempts_max) = ("no model".to_owned(), ATTEMPTS_MAX);
                world.end_run(index, &Transition::Fail { epoch, error, then, attempts_max });
            }
            Action::ReleaseClaim(_) => {
                world.faults.releases -= 1;
                let reason = ReleaseReason::Shutdown;
                world.end_run(index, &Transition::ReleaseClaim { epoch, reason });
            }
            other => unreachable!("{other:?} is not an action of a working worker"),
        }
    }

    fn claim(&self, world: &mut World, index: usize) {
        let owner = "worker".to_owned();
        let claim = Transition::Claim { owner, ttl: TTL, crashes_max: CRASHES_MAX };
        world.workers[index] = match world.apply(&claim, NOW) {
            TransitionEffect::Won(epoch) => {
                let mut events = world.unprocessed();
                while events.count_ones() > EVENTS_PER_RUN {
                    // The newest event is left for the next run.
                    events &= !(1 << events.ilog2());
                }
                Worker::Working { epoch, events }
            }
            _ => Worker::Ended,
        };
    }
}

fn push_if(actions: &mut Vec<Action>, possible: bool, action: Action) {
    if possible {
        actions.push(action);
    }
}

impl Model for Checked {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            issue: Row::of(&IssueState::default()),
            recorded: 0,
            processed: 0,
            effects: [0; EVENTS as usize],
            to_send: 0,
            in_stream: 0,
            workers: [Worker::Waiting; WORKERS],
            faults: self.faults,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        let faults = &world.faults;
        push_if(actions, world.recorded.count_ones() < u32::from(EVENTS), Action::Record);
        if world.to_send > 0 {
            actions.push(Action::SendNudge);
            push_if(actions, faults.lost_nudges > 0, Action::LoseNudge);
        }
        if world.in_stream > 0 {
            push_if(actions, faults.lost_nudges > 0, Action::LoseFromStream);
            push_if(actions, faults.doubled_nudges > 0, Action::DoubleNudge);
        }
        for index in 0..WORKERS {
            self.worker_actions(world, index, actions);
        }
        self.sweep_actions(world, actions);
        push_if(actions, world.issue.quarantined, Action::Release);
    }

    fn next_state(&self, before: &World, action: Action) -> Option<World> {
        let mut world = before.clone();
        match action {
            Action::Record => {
                world.recorded |= 1 << world.recorded.count_ones();
                let effect = world.apply(
                    &Transition::Record { events: 1, debounce: DebounceWindow::default() },
                    NOW,
                );
                world.nudge_if_queued(&effect);
            }
            Action::SendNudge => {
                world.to_send -= 1;
                world.in_stream += 1;
            }
            Action::LoseNudge => {
                world.faults.lost_nudges -= 1;
                world.to_send -= 1;
            }
            Action::LoseFromStream => {
                world.faults.lost_nudges -= 1;
                world.in_stream = 0;
            }
            Action::DoubleNudge => {
                world.faults.doubled_nudges -= 1;
                world.in_stream += 1;
            }
            Action::Receive(index) => {
                world.in_stream -= 1;
                world.workers[index] = Worker::Nudged;
            }
            Action::Claim(index) => self.claim(&mut world, index),
            Action::Acknowledge(index) => world.workers[index] = Worker::Waiting,
            Action::Crash(index) => {
                world.faults.crashes -= 1;
                // Its unacknowledged nudge is redelivered.
                world.in_stream += u8::from(world.workers[index] != Worker::Waiting);
                world.workers[index] = Worker::Dead;
            }
            Action::Restart(index) => world.workers[index] = Worker::Waiting,
            Action::ExpireLive | Action::ExpireDead => {
                world.faults.zombies -= u8::from(action == Action::ExpireLive);
                let effect = world.apply(&Transition::Expire { crashes_max: CRASHES_MAX }, EXPIRED);
                assert_eq!(effect, TransitionEffect::Queued, "an expired claim is requeued");
                world.nudge_if_queued(&effect);
            }
            Action::SweepNudge => world.in_stream += 1,
            Action::Release => {
                let effect = world.apply(&Transition::Release, NOW);
                world.nudge_if_queued(&effect);
            }
            Action::Heartbeat(index)
            | Action::Complete(index)
            | Action::CompleteReplyLost(index)
            | Action::Fail(index)
            | Action::ReleaseClaim(index) => self.work(&mut world, index, &action),
        }
        // Workers are interchangeable.
        world.workers.sort_unstable();
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "every event is processed at most once in effect",
                |_, world: &World| world.effects.iter().all(|count| *count <= 1),
            ),
            Property::always(
                "the counter is the number of unprocessed rows",
                |_, world: &World| {
                    world.issue.pending == u64::from(world.unprocessed().count_ones())
                },
            ),
            Property::always(
                "an issue with unprocessed events is never idle",
                |_, world: &World| {
                    let idle = world.issue.status == ProcessingStatus::Idle;
                    !idle || world.issue.quarantined || world.unprocessed() == 0
                },
            ),
            Property::always("the state machine keeps its own rules", |_, world: &World| {
                world.issue.state().check_invariants().is_ok()
            }),
            Property::eventually("in the end every event is processed", |_, world: &World| {
                world.processed.count_ones() == u32::from(EVENTS)
            }),
            Property::sometimes(
                "a zombie continues after its claim was taken over",
                |_, world: &World| {
                    let late = |worker: &Worker| matches!(worker, Worker::Working { epoch, .. } if *epoch < world.issue.epoch);
                    world.workers.iter().any(late)
                },
            ),
            Property::sometimes("an event arrives during a run", |_, world: &World| {
                let missed = |worker: &Worker| matches!(worker, Worker::Working { events, .. } if events & world.recorded != world.recorded);
                world.workers.iter().any(missed)
            }),
        ]
    }
}

/// Faults of the network and the machines.
const OUTSIDE: Faults = Faults {
    crashes: 2,
    zombies: 1,
    lost_nudges: 2,
    doubled_nudges: 1,
    lost_replies: 0,
    failures: 0,
    releases: 0,
};

/// Faults of runs.
const INSIDE: Faults = Faults {
    crashes: 0,
    zombies: 1,
    lost_nudges: 1,
    doubled_nudges: 1,
    lost_replies: 1,
    failures: 2,
    releases: 1,
};

/// Checks the properties in every reachable state.
fn assert_sound(faults: Faults) {
    let model = Checked { protocol: Protocol::Whole, faults };
    let checker = model.checker().threads(2).spawn_bfs().join();
    assert!(checker.is_done(), "all states were checked");
    println!("{} states of {faults:?}", checker.unique_state_count());
    checker.assert_properties();
    assert!(checker.unique_state_count() > 50_000, "too few states: faults were not explored");
}

/// The shortest path that violates a property of a protocol without one of its parts.
fn counterexample(protocol: Protocol, property: &'static str) -> Vec<Action> {
    let model = Checked { protocol, faults: OUTSIDE };
    let found = HasDiscoveries::AnyOf([property].into());
    let checker = model.checker().finish_when(found).spawn_bfs().join();
    let path =
        checker.discovery(property).unwrap_or_else(|| panic!("no counterexample: {property}"));
    let steps = path.into_actions();
    println!("{protocol:?}: {steps:?}");
    steps
}

#[test]
fn no_interleaving_of_crashes_zombies_and_lost_nudges_loses_an_event_or_processes_it_twice() {
    assert_sound(OUTSIDE);
}

#[test]
fn no_interleaving_of_failures_lost_replies_and_quarantine_loses_an_event_or_processes_it_twice() {
    assert_sound(INSIDE);
}

#[test]
fn without_the_sweep_an_event_is_never_processed() {
    let steps = counterexample(Protocol::WithoutSweep, "in the end every event is processed");
    let is_loss = |step: &Action| {
        matches!(step, Action::LoseNudge | Action::LoseFromStream | Action::Crash(_))
    };
    assert!(steps.iter().any(is_loss), "{steps:?}");
}

#[test]
fn without_the_epoch_a_zombie_processes_an_event_twice() {
    let steps =
        counterexample(Protocol::WithoutEpoch, "every event is processed at most once in effect");
    assert!(steps.contains(&Action::ExpireLive), "{steps:?}");
}

#[test]
fn without_the_counter_an_event_that_arrives_during_a_run_is_lost() {
    let steps =
        counterexample(Protocol::WithoutCounter, "an issue with unprocessed events is never idle");
    assert!(matches!(steps.last(), Some(Action::Complete(_))), "{steps:?}");
}
