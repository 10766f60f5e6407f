//! Tests of the transitions of an issue.

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);
const START: Timestamp = Timestamp::from_millis(1_000_000_000);

/// An issue and the current time.
struct TestIssue {
    state: IssueState,
    now: Timestamp,
}

impl TestIssue {
    fn new() -> Self {
        Self { state: IssueState::default(), now: START }
    }

    fn apply(&mut self, transition: &Transition) -> TransitionEffect {
        let (state, effect) = apply(&self.state, transition, self.now);
        state.check_invariants().expect("the invariants hold");
        self.state = state;
        effect
    }

    fn record(&mut self) -> TransitionEffect {
        self.apply(&Transition::Record { events: 1, debounce: DebounceWindow::default() })
    }

    fn claim(&mut self, owner: &str) -> TransitionEffect {
        self.apply(&Transition::Claim { owner: owner.into(), ttl: MINUTE, crashes_max: 3 })
    }

    fn complete(&mut self, epoch: i64, processed: u64) -> TransitionEffect {
        self.apply(&Transition::Complete { epoch: ClaimEpoch(epoch), processed })
    }

    fn fail(&mut self, epoch: i64, then: AfterFailure) -> TransitionEffect {
        let (error, attempts_max) = ("broken".to_owned(), 2);
        self.apply(&Transition::Fail { epoch: ClaimEpoch(epoch), error, then, attempts_max })
    }

    fn wait(&mut self, duration: Duration) {
        self.now = self.now.after(duration);
    }
}

#[test]
fn an_event_that_arrives_while_processing_requeues_the_issue() {
    let mut issue = TestIssue::new();
    assert_eq!(issue.record(), TransitionEffect::Queued);
    assert_eq!(issue.claim("a"), TransitionEffect::Won(ClaimEpoch(1)));
    assert_eq!(issue.record(), TransitionEffect::Nothing);
    assert_eq!(issue.complete(1, 1), TransitionEffect::Queued);
    assert_eq!(issue.claim("b"), TransitionEffect::Won(ClaimEpoch(2)));
    assert_eq!(issue.complete(2, 1), TransitionEffect::Finished);
    assert_eq!(issue.state.status, ProcessingStatus::Idle);
}

#[test]
fn a_second_claim_fails_until_the_first_expires() {
    let mut issue = TestIssue::new();
    issue.record();
    issue.claim("a");
    assert_eq!(issue.claim("b"), TransitionEffect::Nothing);
    issue.wait(MINUTE);
    assert_eq!(issue.claim("b"), TransitionEffect::Won(ClaimEpoch(2)));
    assert_eq!((issue.state.crashes, issue.state.attempts), (1, 0));
}

#[test]
fn a_zombie_is_fenced_and_a_repeated_completion_is_reported() {
    let mut issue = TestIssue::new();
    issue.record();
    issue.claim("a");
    issue.wait(MINUTE);
    issue.claim("b");
    let before = issue.state.clone();
    assert_eq!(issue.complete(1, 1), TransitionEffect::Fenced);
    assert_eq!(issue.fail(1, AfterFailure::Quarantine), TransitionEffect::Fenced);
    assert_eq!(
        issue.apply(&Transition::Heartbeat { epoch: ClaimEpoch(1), ttl: MINUTE }),
        TransitionEffect::Fenced
    );
    assert_eq!(issue.state, before);
    assert_eq!(issue.complete(2, 1), TransitionEffect::Finished);
    assert_eq!(issue.complete(2, 1), TransitionEffect::Repeated);
    assert_eq!(issue.complete(0, 1), TransitionEffect::Fenced);
}

#[test]
fn a_heartbeat_renews_a_claim() {
    let mut issue = TestIssue::new();
    issue.record();
    issue.claim("a");
    issue.wait(MINUTE / 2);
    assert_eq!(
        issue.apply(&Transition::Heartbeat { epoch: ClaimEpoch(1), ttl: MINUTE }),
        TransitionEffect::Kept
    );
    issue.wait(MINUTE / 2);
    assert_eq!(issue.claim("b"), TransitionEffect::Nothing);
}

#[test]
fn failures_back_off_and_then_quarantine_until_an_operator_releases() {
    let mut issue = TestIssue::new();
    issue.record();
    issue.claim("a");
    assert_eq!(issue.fail(1, AfterFailure::Retry { after: MINUTE }), TransitionEffect::Queued);
    assert_eq!(issue.claim("a"), TransitionEffect::NotYet(issue.now.after(MINUTE)));
    issue.wait(MINUTE);
    issue.claim("a");
    assert_eq!(issue.fail(2, AfterFailure::Retry { after: MINUTE }), TransitionEffect::Quarantined);
    assert_eq!(issue.record(), TransitionEffect::Nothing);
    assert_eq!((issue.claim("a"), issue.state.pending_events), (TransitionEffect::Nothing, 2));
    assert_eq!(issue.apply(&Transition::Release), TransitionEffect::Queued);
    assert_eq!(issue.state.attempts, 0);
    assert_eq!(issue.claim("a"), TransitionEffect::Won(ClaimEpoch(3)));
}

#[test]
fn repeatedly_expired_claims_quarantine() {
    let mut issue = TestIssue::new();
    issue.record();
    for _ in 0..2 {
        issue.claim("a");
        issue.wait(MINUTE);
        assert_eq!(issue.apply(&Transition::Expire { crashes_max: 3 }), TransitionEffect::Queued);
        assert_eq!(issue.apply(&Transition::Expire { crashes_max: 3 }), TransitionEffect::Nothing);
    }
    issue.claim("a");
    issue.wait(MINUTE);
    assert_eq!(issue.claim("b"), TransitionEffect::Quarantined);
    assert_eq!(issue.state.last_error.as_deref(), Some("claim of worker `a` expired"));
}

#[test]
fn releasing_a_claim_counts_no_attempt_but_counts_superseded_runs() {
    let mut issue = TestIssue::new();
    issue.record();
    for (reason, superseded) in [(ReleaseReason::Shutdown, 0), (ReleaseReason::Superseded, 1)] {
        issue.claim("a");
        let epoch = issue.state.claim_epoch;
        assert_eq!(
            issue.apply(&Transition::ReleaseClaim { epoch, reason }),
            TransitionEffect::Queued
        );
        assert_eq!((issue.state.attempts, issue.state.superseded), (0, superseded));
    }
}

#[test]
fn each_event_extends_the_debounce_window_up_to_max_wait() {
    let debounce = DebounceWindow {
        quiet_for: Duration::from_secs(10),
        max_wait: Duration::from_secs(25),
        ..DebounceWindow::default()
    };
    let mut issue = TestIssue::new();
    let mut due = Vec::new();
    for _ in 0..4 {
        issue.apply(&Transition::Record { events: 1, debounce });
        due.push(issue.state.not_before.expect("a debounce window").since(START).as_secs());
        issue.wait(Duration::from_secs(8));
    }
    assert_eq!(due, [10, 18, 25, 25]);
    assert_eq!(issue.claim("a"), TransitionEffect::Won(ClaimEpoch(1)));
    // An event during the run starts its own window.
    issue.apply(&Transition::Record { events: 1, debounce });
    assert_eq!(issue.complete(1, 4), TransitionEffect::Queued);
    assert_eq!(issue.claim("a"), TransitionEffect::NotYet(issue.now.after(debounce.quiet_for)));
}

#[test]
fn a_nudge_is_overdue_after_its_age_limit_and_not_before_the_issue_is_due() {
    let overdue = Transition::Nudge { overdue: MINUTE };
    let mut issue = TestIssue::new();
    issue.record();
    assert_eq!(issue.apply(&overdue), TransitionEffect::Nothing);
    issue.wait(MINUTE);
    assert_eq!(issue.apply(&overdue), TransitionEffect::Queued);
    assert_eq!(issue.apply(&overdue), TransitionEffect::Nothing);
    issue.claim("a");
    issue.fail(1, AfterFailure::Retry { after: MINUTE * 5 });
    issue.wait(MINUTE * 5);
    assert_eq!(issue.apply(&overdue), TransitionEffect::Nothing);
    issue.wait(MINUTE);
    assert_eq!(issue.apply(&overdue), TransitionEffect::Queued);
}

#[test]
fn a_retry_ends_a_wait_but_not_a_run() {
    let mut issue = TestIssue::new();
    assert_eq!(issue.apply(&Transition::Retry), TransitionEffect::Nothing);
    issue.record();
    issue.claim("a");
    assert_eq!(issue.apply(&Transition::Retry), TransitionEffect::Nothing);
    issue.fail(1, AfterFailure::Retry { after: MINUTE });
    assert_eq!(issue.apply(&Transition::Retry), TransitionEffect::Queued);
    assert_eq!(issue.claim("a"), TransitionEffect::Won(ClaimEpoch(2)));
    assert_eq!(issue.apply(&Transition::Release), TransitionEffect::Nothing);
}

#[test]
fn events_do_not_end_a_backoff_or_a_deferral() {
    for then in [AfterFailure::Defer { after: MINUTE }, AfterFailure::Retry { after: MINUTE }] {
        let debounce = DebounceWindow { events_max: 2, ..DebounceWindow::default() };
        let mut issue = TestIssue::new();
        issue.record();
        issue.claim("a");
        assert_eq!(issue.fail(1, then), TransitionEffect::Queued);
        assert_eq!(
            issue.apply(&Transition::Record { events: 9, debounce }),
            TransitionEffect::Nothing
        );
        assert_eq!(issue.claim("a"), TransitionEffect::NotYet(issue.now.after(MINUTE)));
    }
}
