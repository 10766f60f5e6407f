//! The transitions of an issue, one promise at a time; random walks keep the invariants.

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);
const START: Timestamp = Timestamp::from_millis(1_000_000_000);

/// An issue and its time, changed step by step.
struct World {
    state: IssueState,
    now: Timestamp,
}

impl World {
    fn new() -> Self {
        Self { state: IssueState::default(), now: START }
    }

    fn take(&mut self, transition: &Transition) -> TransitionEffect {
        let (state, effect) = apply(&self.state, transition, self.now);
        state.check_invariants().expect("the invariants hold");
        self.state = state;
        effect
    }

    fn record(&mut self) -> TransitionEffect {
        self.take(&Transition::Record { events: 1, debounce: DebounceWindow::default() })
    }

    fn claim(&mut self, owner: &str) -> TransitionEffect {
        self.take(&Transition::Claim { owner: owner.into(), ttl: MINUTE, crashes_max: 3 })
    }

    fn complete(&mut self, epoch: i64, processed: u64) -> TransitionEffect {
        self.take(&Transition::Complete { epoch: ClaimEpoch(epoch), processed })
    }

    fn fail(&mut self, epoch: i64, then: AfterFailure) -> TransitionEffect {
        let (error, attempts_max) = ("broken".to_owned(), 2);
        self.take(&Transition::Fail { epoch: ClaimEpoch(epoch), error, then, attempts_max })
    }

    fn wait(&mut self, duration: Duration) {
        self.now = self.now.after(duration);
    }
}

#[test]
fn an_event_that_arrives_while_processing_requeues_the_issue() {
    let mut world = World::new();
    assert_eq!(world.record(), TransitionEffect::Queued);
    assert_eq!(world.claim("a"), TransitionEffect::Won(ClaimEpoch(1)));
    assert_eq!(world.record(), TransitionEffect::Nothing);
    assert_eq!(world.complete(1, 1), TransitionEffect::Queued);
    assert_eq!(world.claim("b"), TransitionEffect::Won(ClaimEpoch(2)));
    assert_eq!(world.complete(2, 1), TransitionEffect::Finished);
    assert_eq!(world.state.status, ProcessingStatus::Idle);
}

#[test]
fn a_second_worker_gets_nothing_until_the_claim_runs_out() {
    let mut world = World::new();
    world.record();
    world.claim("a");
    assert_eq!(world.claim("b"), TransitionEffect::Nothing);
    world.wait(MINUTE);
    assert_eq!(world.claim("b"), TransitionEffect::Won(ClaimEpoch(2)));
    assert_eq!((world.state.crashes, world.state.attempts), (1, 0));
}

#[test]
fn a_zombie_changes_nothing_and_a_repeated_completion_says_so() {
    let mut world = World::new();
    world.record();
    world.claim("a");
    world.wait(MINUTE);
    world.claim("b");
    let before = world.state.clone();
    assert_eq!(world.complete(1, 1), TransitionEffect::Fenced);
    assert_eq!(world.fail(1, AfterFailure::Quarantine), TransitionEffect::Fenced);
    assert_eq!(
        world.take(&Transition::Heartbeat { epoch: ClaimEpoch(1), ttl: MINUTE }),
        TransitionEffect::Fenced
    );
    assert_eq!(world.state, before);
    assert_eq!(world.complete(2, 1), TransitionEffect::Finished);
    assert_eq!(world.complete(2, 1), TransitionEffect::Repeated);
    assert_eq!(world.complete(0, 1), TransitionEffect::Fenced);
}

#[test]
fn a_heartbeat_moves_the_end_of_a_claim() {
    let mut world = World::new();
    world.record();
    world.claim("a");
    world.wait(MINUTE / 2);
    assert_eq!(
        world.take(&Transition::Heartbeat { epoch: ClaimEpoch(1), ttl: MINUTE }),
        TransitionEffect::Kept
    );
    world.wait(MINUTE / 2);
    assert_eq!(world.claim("b"), TransitionEffect::Nothing);
}

#[test]
fn failures_back_off_and_then_quarantine_until_an_operator_releases() {
    let mut world = World::new();
    world.record();
    world.claim("a");
    assert_eq!(world.fail(1, AfterFailure::Retry { after: MINUTE }), TransitionEffect::Queued);
    assert_eq!(world.claim("a"), TransitionEffect::NotYet(world.now.after(MINUTE)));
    world.wait(MINUTE);
    world.claim("a");
    assert_eq!(world.fail(2, AfterFailure::Retry { after: MINUTE }), TransitionEffect::Quarantined);
    assert_eq!(world.record(), TransitionEffect::Nothing);
    assert_eq!((world.claim("a"), world.state.pending_events), (TransitionEffect::Nothing, 2));
    assert_eq!(world.take(&Transition::Release), TransitionEffect::Queued);
    assert_eq!(world.state.attempts, 0);
    assert_eq!(world.claim("a"), TransitionEffect::Won(ClaimEpoch(3)));
}

#[test]
fn claims_that_run_out_again_and_again_quarantine_too() {
    let mut world = World::new();
    world.record();
    for _ in 0..2 {
        world.claim("a");
        world.wait(MINUTE);
        assert_eq!(world.take(&Transition::Expire { crashes_max: 3 }), TransitionEffect::Queued);
        assert_eq!(world.take(&Transition::Expire { crashes_max: 3 }), TransitionEffect::Nothing);
    }
    world.claim("a");
    world.wait(MINUTE);
    assert_eq!(world.claim("b"), TransitionEffect::Quarantined);
    assert_eq!(world.state.last_error.as_deref(), Some("the claim of worker a ran out"));
}

#[test]
fn giving_back_counts_no_attempt_but_counts_what_was_superseded() {
    let mut world = World::new();
    world.record();
    for (reason, superseded) in [(ReleaseReason::Shutdown, 0), (ReleaseReason::Superseded, 1)] {
        world.claim("a");
        let epoch = world.state.claim_epoch;
        assert_eq!(
            world.take(&Transition::ReleaseClaim { epoch, reason }),
            TransitionEffect::Queued
        );
        assert_eq!((world.state.attempts, world.state.superseded), (0, superseded));
    }
}

#[test]
fn a_quiet_window_is_pushed_by_each_event_up_to_the_longest_wait() {
    let debounce = DebounceWindow {
        quiet_for: Duration::from_secs(10),
        max_wait: Duration::from_secs(25),
        ..DebounceWindow::default()
    };
    let mut world = World::new();
    let mut due = Vec::new();
    for _ in 0..4 {
        world.take(&Transition::Record { events: 1, debounce });
        due.push(world.state.not_before.expect("a window").since(START).as_secs());
        world.wait(Duration::from_secs(8));
    }
    assert_eq!(due, [10, 18, 25, 25]);
    assert_eq!(world.claim("a"), TransitionEffect::Won(ClaimEpoch(1)));
    // What comes during the run has a window of its own.
    world.take(&Transition::Record { events: 1, debounce });
    assert_eq!(world.complete(1, 4), TransitionEffect::Queued);
    assert_eq!(world.claim("a"), TransitionEffect::NotYet(world.now.after(debounce.quiet_for)));
}

#[test]
fn a_nudge_is_overdue_after_its_time_and_not_before_the_issue_is_due() {
    let overdue = Transition::Nudge { overdue: MINUTE };
    let mut world = World::new();
    world.record();
    assert_eq!(world.take(&overdue), TransitionEffect::Nothing);
    world.wait(MINUTE);
    assert_eq!(world.take(&overdue), TransitionEffect::Queued);
    assert_eq!(world.take(&overdue), TransitionEffect::Nothing);
    world.claim("a");
    world.fail(1, AfterFailure::Retry { after: MINUTE * 5 });
    world.wait(MINUTE * 5);
    assert_eq!(world.take(&overdue), TransitionEffect::Nothing);
    world.wait(MINUTE);
    assert_eq!(world.take(&overdue), TransitionEffect::Queued);
}

#[test]
fn an_operator_can_end_a_wait_but_not_a_run() {
    let mut world = World::new();
    assert_eq!(world.take(&Transition::Retry), TransitionEffect::Nothing);
    world.record();
    world.claim("a");
    assert_eq!(world.take(&Transition::Retry), TransitionEffect::Nothing);
    world.fail(1, AfterFailure::Retry { after: MINUTE });
    assert_eq!(world.take(&Transition::Retry), TransitionEffect::Queued);
    assert_eq!(world.claim("a"), TransitionEffect::Won(ClaimEpoch(2)));
    assert_eq!(world.take(&Transition::Release), TransitionEffect::Nothing);
}

#[test]
fn no_number_of_events_ends_a_wait_that_is_no_quiet_window() {
    for then in [AfterFailure::Defer { after: MINUTE }, AfterFailure::Retry { after: MINUTE }] {
        let debounce = DebounceWindow { events_max: 2, ..DebounceWindow::default() };
        let mut world = World::new();
        world.record();
        world.claim("a");
        assert_eq!(world.fail(1, then), TransitionEffect::Queued);
        assert_eq!(
            world.take(&Transition::Record { events: 9, debounce }),
            TransitionEffect::Nothing
        );
        assert_eq!(world.claim("a"), TransitionEffect::NotYet(world.now.after(MINUTE)));
    }
}
